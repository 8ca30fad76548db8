"""The ticket: what a consumer needs to load one request's blocks. It travels through routers as a dict of JSON types.

A lease is a promise of one rank. An engine of several ranks makes one on each, under the same request id, and a ticket
names one or more of them: `merge_tickets` makes one ticket of those that the ranks have made. A reader that needs a
rank which its ticket does not name works its port out and asks it (`messages.LeaseRequest`), which costs a round trip.

Who makes a ticket need not be where the lease is: `Ticket.without_leases` names an engine's ranks and a request, and
its readers ask every rank for its lease. The request id is what they ask for, so it has to be a secret of that ticket.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from kvflow import checks
from kvflow.checks import INT64_MAX, INT64_MIN, encodes, is_name, shown
from kvflow.config import PORT_MAX, RANKS_MAX, is_host, rank_offset
from kvflow.core.plan.topology import Parallelism, Rank
from kvflow.core.protocol.messages import LEASE_ID_CHARS, NO_LEASE_ID, PROTOCOL_VERSION, digest_of
from kvflow.errors import RequestError
from kvflow.limits import REQUEST_ID_CHARS_MAX

_LEASE_ID = re.compile(f"[0-9a-f]{{{LEASE_ID_CHARS}}}")
_NAME_CHARS_MAX = 1024
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_PLACE_OF = operator.attrgetter("pp_rank", "tp_rank")
_BLOCK_IDS_OF = operator.attrgetter("block_ids")
_REMEMBERED_CHARS_MAX = 512
_FIELDS_MAX = 256  # of a dict on the way; routers add some

StructT = TypeVar("StructT", bound=msgspec.Struct)
_PROMPT_DIGEST = re.compile("(?:[0-9a-f]{32})?")
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

# Python and JSON know larger integers, but no message of ours can carry them.
Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=INT64_MIN, le=INT64_MAX)]


class RankLease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's lease, and where that rank's side channel listens.

    `expires_s` is when the lease ends on the clock of that incarnation of the rank, and means nothing to anybody
    who does not know that clock (`core.protocol.freshness`). `block_ids` are set if the rank's differ from the
    engine's: it offers host buffers. In a ticket's dict the first rank has no host and port: they are where routers
    look for them. With an empty `lease_id` the rank has to be asked.
    """

    pp_rank: Int64
    tp_rank: Int64
    lease_id: str
    seal_index: Int64
    incarnation: str
    expires_s: float
    host: str = ""
    port: Int64 = 0
    block_ids: tuple[Int64, ...] | None = None

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def check(self, block_count: int) -> None:
        """RequestError names what no producer would have given."""
        if set(map(type, (self.host, self.incarnation, self.lease_id))) != {str}:
            _refuse_texts(self, ("host", "incarnation", "lease_id"))
        if len(self.host) + len(self.incarnation) > _REMEMBERED_CHARS_MAX:
            _check_place.__wrapped__(self.host, self.port, self.incarnation)
        _check_place(self.host, self.port, self.incarnation)
        if self.lease_id and (not _LEASE_ID.fullmatch(self.lease_id) or self.lease_id == NO_LEASE_ID):
            raise RequestError(f"ticket: lease_id is not {LEASE_ID_CHARS} hexadecimal digits")
        if self.seal_index < 0 or not math.isfinite(self.expires_s):
            raise RequestError(f"ticket: seal_index {self.seal_index}, expires_s {self.expires_s}")
        if self.block_ids is not None and len(self.block_ids) != block_count:
            raise RequestError(f"ticket: {block_count} blocks, but {len(self.block_ids)} of tp_rank {self.tp_rank}")


@lru_cache(maxsize=1024)  # engines have few ranks, and each ticket names one of them again
def _check_place(host: str, port: int, incarnation: str) -> None:
    if not 0 < port <= PORT_MAX:
        raise RequestError(f"ticket: remote_port {port} is not in 1..{PORT_MAX}")
    if not is_host(host):
        raise RequestError(f"ticket: remote_host {host[:80]!a} is no host to connect to")
    if not is_name(incarnation, _NAME_CHARS_MAX):
        raise RequestError(f"ticket: incarnation {incarnation[:80]!a} is no name")


@lru_cache(maxsize=1024)  # as above
def _check_engine(engine_id: str, dp_rank: int, parallelism: Parallelism) -> None:
    for name in ("tp_size", "pp_size"):
        if not 0 < (size := getattr(parallelism, name)) <= RANKS_MAX:
            raise RequestError(f"ticket: {name} {size} is not in 1..{RANKS_MAX}")
    if not is_name(engine_id, _NAME_CHARS_MAX):
        raise RequestError(f"ticket: remote_engine_id {engine_id[:80]!a} is no name")
    if dp_rank < 0:
        raise RequestError(f"ticket: dp_rank {dp_rank}")
    block_size, kv_heads, model_kv_heads = parallelism[2:]
    if min(block_size, kv_heads) < 1 or model_kv_heads < 0:
        sizes = f"block_size {block_size}, kv_heads {kv_heads}, model_kv_heads {model_kv_heads}"
        raise RequestError(f"ticket: {sizes}")


class _TicketExtension(msgspec.Struct, frozen=True, kw_only=True):
    """kvflow's own part of a ticket, under the key "kvflow"."""

    version: Int64
    num_tokens: Int64
    ttl_s: float
    dp_rank: Int64
    pp_size: Int64
    block_size: Int64
    kv_heads: Int64
    model_kv_heads: Int64
    fixed_ports: bool
    traceparent: str
    prompt_digest: str
    ranks: list[RankLease]


class _TicketParams(msgspec.Struct, frozen=True, kw_only=True):
    """The dict as routers see it; its other field names are the ones that routers of this field forward."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: tuple[Int64, ...]
    remote_host: str
    remote_port: Int64
    tp_size: Int64
    kvflow: _TicketExtension


class Ticket(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a consumer needs to read one request's blocks.

    `block_ids` are the producer's, in prompt order; `num_tokens` says how far the last one counts. `ttl_s` is the time
    that the lease had left when the ticket was made, and what each renewal gives it anew; it is a hint, readers trust
    the seal (`core.protocol.freshness`).
    `ranks` are those whose leases it names, all of replica `dp_rank`. `kv_heads` are those of one rank,
    `model_kv_heads` the model's or 0 if unknown. With `fixed_ports` the ports of the other ranks follow from the
    first one's.
    """

    engine_id: str
    request_id: str
    block_ids: tuple[Int64, ...]
    num_tokens: Int64
    ttl_s: float
    tp_size: Int64
    pp_size: Int64
    dp_rank: Int64
    block_size: Int64
    kv_heads: Int64
    model_kv_heads: Int64
    fixed_ports: bool
    ranks: tuple[RankLease, ...]
    traceparent: str = ""
    """W3C trace context of the request, for what observes the load; "" if there is none."""
    prompt_digest: str = ""
    """Tells its tokens from those of another prompt (`core.protocol.prompts`); "" if the producer did not say."""

    @property
    def first(self) -> RankLease:
        """The rank that made the ticket, or the first of those that were merged."""
        return self.ranks[0]

    @property
    def lease_id(self) -> str:
        return self.first.lease_id

    @property
    def address(self) -> str:
        return self.first.address

    @cached_property
    def parallelism(self) -> Parallelism:
        """How its engine is divided into ranks."""
        return Parallelism(self.tp_size, self.pp_size, self.block_size, self.kv_heads, self.model_kv_heads)

    @cached_property
    def blocks_digest(self) -> bytes:
        """What ranks compare of `block_ids`."""
        return digest_of(self.block_ids)

    @cached_property
    def leases(self) -> dict[tuple[int, int], RankLease]:
        """By (pp_rank, tp_rank)."""
        return dict(zip(map(_PLACE_OF, self.ranks), self.ranks, strict=True))

    def find(self, rank: Rank) -> RankLease | None:
        """The lease of that rank, if the ticket names it."""
        checks.instance(rank, Rank, "rank")
        return self.leases.get((rank.pp, rank.tp))

    def address_of(self, rank: Rank) -> str:
        """Where that rank listens. RequestError if it is not named and cannot be worked out."""
        named = self.find(rank)
        if named is not None:
            return named.address
        if not self.fixed_ports:
            names = ", ".join(f"({lease.pp_rank}, {lease.tp_rank})" for lease in self.ranks[:8])
            raise RequestError(
                f"ticket: engine {self.engine_id!r} has ranks on ports of the system's choice (listen port 0), and "
                f"(pp_rank, tp_rank) {(rank.pp, rank.tp)} is needed, but only {names}"
                f"{', ...' if len(self.ranks) > 8 else ''} named: merge the ranks' tickets"
            )
        first = self.first
        here, there = (
            rank_offset(0, pp, tp, tp_size=self.tp_size, pp_size=self.pp_size)
            for pp, tp in ((first.pp_rank, first.tp_rank), (rank.pp, rank.tp))
        )
        port = first.port + there - here
        if not 0 < port <= PORT_MAX:
            raise RequestError(
                f"ticket: remote_port {first.port} of (pp_rank, tp_rank) {(first.pp_rank, first.tp_rank)} puts "
                f"{(rank.pp, rank.tp)} at port {port}, which is not in 1..{PORT_MAX}"
            )
        return f"tcp://{first.host}:{port}"

    def without_leases(
        self, *, request_id: str, block_ids: Sequence[int], num_tokens: int, ttl_s: float, prompt_digest: str = ""
    ) -> Ticket:
        """A ticket of the same ranks for another request, whose readers ask each rank for its lease.

        Raises RequestError if no reader would take it.
        """
        ranks = tuple(
            msgspec.structs.replace(rank, lease_id="", seal_index=0, expires_s=0.0, block_ids=None)
            for rank in self.typed().ranks
        )
        ticket = msgspec.structs.replace(
            self,
            request_id=request_id,
            block_ids=tuple(checks.whole_numbers(block_ids, "ticket: remote_block_ids").tolist()),
            num_tokens=checks.whole(num_tokens, "ticket: num_tokens"),
            ttl_s=checks.seconds(ttl_s, "ticket: ttl_s"),
            ranks=ranks,
            prompt_digest=prompt_digest,
        )
        return read_ticket(ticket)

    def to_params(self) -> dict[str, Any]:
        """A dict of JSON types that survives any HTTP router. RequestError if a field is of another type."""
        return self.typed()._params()

    def _params(self) -> dict[str, Any]:
        first = msgspec.structs.replace(self.first, host="", port=0)
        params: dict[str, Any] = msgspec.to_builtins(
            _TicketParams(
                do_remote_prefill=True,
                do_remote_decode=False,
                remote_engine_id=self.engine_id,
                remote_request_id=self.request_id,
                remote_block_ids=self.block_ids,
                remote_host=self.first.host,
                remote_port=self.first.port,
                tp_size=self.tp_size,
                kvflow=_TicketExtension(
                    version=PROTOCOL_VERSION,
                    num_tokens=self.num_tokens,
                    ttl_s=self.ttl_s,
                    dp_rank=self.dp_rank,
                    pp_size=self.pp_size,
                    block_size=self.block_size,
                    kv_heads=self.kv_heads,
                    model_kv_heads=self.model_kv_heads,
                    fixed_ports=self.fixed_ports,
                    traceparent=self.traceparent,
                    prompt_digest=self.prompt_digest,
                    ranks=[first, *self.ranks[1:]],
                ),
            )
        )
        params["remote_block_ids"] = list(self.block_ids)
        for rank in params["kvflow"]["ranks"]:
            if "block_ids" in rank:
                rank["block_ids"] = list(rank["block_ids"])
        return params

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Ticket:
        """Read a ticket's dict; RequestError names the field that is missing or wrong. Unknown fields are ignored."""
        plain = params if type(params) is dict else checks.mapping(params, "ticket")
        _check_sizes(plain)
        return cls._from_checked(plain)

    @classmethod
    def _from_checked(cls, params: Mapping[str, Any]) -> Ticket:
        try:
            raw = msgspec.convert(params, _TicketParams, strict=True)
        except Exception as error:
            raise _wrong(params, error) from error
        extra = raw.kvflow
        if extra.version != PROTOCOL_VERSION:
            raise RequestError(f"ticket: kvflow version: ours {PROTOCOL_VERSION}, theirs {extra.version}")
        if not raw.do_remote_prefill:
            raise RequestError("ticket: do_remote_prefill is false: it does not ask for a load")
        if not 0 < len(extra.ranks) <= RANKS_MAX:
            raise RequestError(f"ticket: it names {len(extra.ranks)} ranks, expected 1 to {RANKS_MAX}")
        first = msgspec.structs.replace(extra.ranks[0], host=raw.remote_host, port=raw.remote_port)
        ticket = cls(
            engine_id=raw.remote_engine_id,
            request_id=raw.remote_request_id,
            block_ids=raw.remote_block_ids,
            num_tokens=extra.num_tokens,
            ttl_s=extra.ttl_s,
            tp_size=raw.tp_size,
            pp_size=extra.pp_size,
            dp_rank=extra.dp_rank,
            block_size=extra.block_size,
            kv_heads=extra.kv_heads,
            model_kv_heads=extra.model_kv_heads,
            fixed_ports=extra.fixed_ports,
            ranks=(first, *extra.ranks[1:]),
            traceparent=extra.traceparent,
            prompt_digest=extra.prompt_digest,
        )
        ticket._check_values()
        return ticket

    def typed(self) -> Ticket:
        """The same ticket, each field of its type: constructors take anything. RequestError names one that is not."""
        ranks = self.ranks if isinstance(self.ranks, tuple) else ()
        if not ranks or not all(isinstance(rank, RankLease) for rank in ranks):
            raise RequestError(f"ticket: ranks: expected a tuple of RankLeases, got {shown(self.ranks)}")
        for ids in (self.block_ids, *(rank.block_ids for rank in ranks if rank.block_ids is not None)):
            if not isinstance(ids, tuple | list):  # msgspec would take a set, whose order is nobody's
                raise RequestError(f"ticket: block_ids: expected a tuple of whole numbers, got {shown(ids)}")
        values = msgspec.structs.asdict(self)
        return _convert({**values, "ranks": tuple(map(msgspec.structs.asdict, ranks))}, Ticket)

    def check(self) -> None:
        """RequestError names the field whose type or value no producer would have given."""
        self.typed()._check_values()

    def _check_values(self) -> None:
        if (
            not type(self.engine_id)
            is type(self.request_id)
            is type(self.traceparent)
            is type(self.prompt_digest)
            is str
        ):
            _refuse_texts(self, ("engine_id", "request_id", "traceparent", "prompt_digest"))
        if len(self.engine_id) > _REMEMBERED_CHARS_MAX:
            _check_engine.__wrapped__(self.engine_id, self.dp_rank, self.parallelism)
        _check_engine(self.engine_id, self.dp_rank, self.parallelism)
        utf8 = self.request_id.isascii() or encodes(self.request_id)
        if not 0 < len(self.request_id) <= REQUEST_ID_CHARS_MAX or not utf8:
            raise RequestError(f"ticket: remote_request_id {self.request_id[:80]!a} is no request id")
        if self.num_tokens < 0 or not 0 < self.ttl_s < math.inf:
            raise RequestError(f"ticket: num_tokens {self.num_tokens}, ttl_s {self.ttl_s}")
        if self.traceparent and not _TRACEPARENT.fullmatch(self.traceparent):
            raise RequestError(f"ticket: traceparent {self.traceparent[:80]!a} is no W3C trace context")
        if not _PROMPT_DIGEST.fullmatch(self.prompt_digest):
            raise RequestError(f"ticket: prompt_digest {self.prompt_digest[:80]!a} is not 32 hexadecimal digits")
        if not 0 < len(self.ranks) <= RANKS_MAX:
            raise RequestError(f"ticket: it names {len(self.ranks)} ranks, expected 1 to {RANKS_MAX}")
        for lease in self.ranks:
            lease.check(len(self.block_ids))
            if not 0 <= lease.tp_rank < self.tp_size or not 0 <= lease.pp_rank < self.pp_size:
                raise RequestError(
                    f"ticket: tp_rank {lease.tp_rank} of {self.tp_size}, pp_rank {lease.pp_rank} of {self.pp_size}"
                )
        if len(self.leases) < len(self.ranks):
            raise RequestError(f"ticket: it names {len(self.ranks)} ranks, but only {len(self.leases)} different ones")


def read_ticket(ticket: Ticket | Mapping[str, Any], block_ids_max: int = INT64_MAX) -> Ticket:
    """The ticket, checked; RequestError names what is wrong with it, before much work is done for what is too large."""
    if isinstance(ticket, Ticket):
        _check_count(checks.answer(partial(_block_ids_in, ticket)) or 0, block_ids_max)  # None: a type that is wrong
        read = ticket.typed()
        read._check_values()
        return read
    plain = ticket if type(ticket) is dict else checks.mapping(ticket, "ticket")
    _check_sizes(plain, block_ids_max)
    read = Ticket._from_checked(plain)
    count = _block_ids_in(read)  # once more: mappings within it that are no dicts
    if count > block_ids_max:
        _check_count(count, block_ids_max)
    return read


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"ticket: {count} block ids in all, at most {most} (block_ids_max)")


def _block_ids_in(ticket: Ticket) -> int:
    return len(ticket.block_ids) + sum(map(len, filter(None, map(_BLOCK_IDS_OF, ticket.ranks))))


def _check_sizes(params: Any, block_ids_max: int = INT64_MAX) -> None:
    """RequestError if there are more block ids, ranks or fields than can be right: reading them would take long.

    Judged before they are read, as far as it is a dict of a ticket.
    """
    extra = dict.get(params, "kvflow") if isinstance(params, dict) else None
    ranks = dict.get(extra, "ranks") if isinstance(extra, dict) else None
    ranks = ranks if isinstance(ranks, list | tuple) else ()
    if len(ranks) > RANKS_MAX:
        raise RequestError(f"ticket: it names {len(ranks)} ranks, expected 1 to {RANKS_MAX}")
    count = 0
    for part, name in ((params, "remote_block_ids"), (extra, ""), *zip(ranks, itertools.repeat("block_ids"))):
        if not isinstance(part, dict):
            continue
        if dict.__len__(part) > _FIELDS_MAX:
            raise RequestError(f"ticket: {dict.__len__(part)} fields in one dict, at most {_FIELDS_MAX}")
        found = dict.get(part, name)
        if type(found) is list or type(found) is tuple:
            count += len(found)
        elif isinstance(found, list | tuple | set | frozenset):
            count += checks.answer(found.__len__) or 0
    if count > block_ids_max:
        _check_count(count, block_ids_max)


def merge_tickets(tickets: Sequence[Ticket]) -> Ticket:
    """One ticket that names the ranks of all: each rank of an engine has made one for the same request.

    Raises RequestError if they are not of the same engine, request, blocks and tokens, or name two leases of a rank.
    """
    given = checks.answer(lambda: tuple(tickets))
    if not given or not all(isinstance(ticket, Ticket) for ticket in given):
        raise RequestError(f"merge_tickets: expected at least one ticket, and tickets only, got {shown(tickets)}")
    tickets = [read_ticket(ticket) for ticket in given]
    first = tickets[0]
    ranks: dict[tuple[int, int], RankLease] = {}
    for lease in (lease for ticket in tickets for lease in ticket.ranks):
        known = ranks.setdefault((lease.pp_rank, lease.tp_rank), lease)
        if known != lease:
            raise RequestError(
                f"merge_tickets: two leases of (pp_rank, tp_rank) {(lease.pp_rank, lease.tp_rank)}: seal_index "
                f"{known.seal_index} of {known.incarnation} and {lease.seal_index} of {lease.incarnation}"
            )
    merged = msgspec.structs.replace(first, ranks=tuple(ranks.values()), ttl_s=min(ticket.ttl_s for ticket in tickets))
    for ticket in tickets[1:]:
        for name in Ticket.__struct_fields__:
            ours, theirs = getattr(first, name), getattr(ticket, name)
            if name not in ("ranks", "ttl_s", "traceparent") and ours != theirs:
                raise RequestError(f"merge_tickets: {name}: {str(ours)[:80]} and {str(theirs)[:80]}")
    merged.check()
    return merged


def checked_traceparent(value: object) -> str:
    """RequestError unless it is "" or a W3C traceparent: version, trace id, span id and flags in hexadecimal."""
    traceparent = checks.text(value, "traceparent")
    if traceparent and not _TRACEPARENT.fullmatch(traceparent):
        raise RequestError(f"traceparent {traceparent[:80]!a} is no W3C trace context")
    return traceparent


def _convert(given: Mapping[str, Any], kind: type[StructT]) -> StructT:
    """What somebody else has filled in, as a struct whose fields are of their types."""
    try:
        return msgspec.convert(given, kind, strict=True)
    except Exception as error:
        raise _wrong(given, error) from error


def _wrong(given: Mapping[str, Any], error: Exception) -> RequestError:
    """What somebody else has filled in cannot be read."""
    if isinstance(error, msgspec.ValidationError):
        hint = "; expected a dict of `lease.ticket.to_params()`" if "required field" in str(error) else ""
        return RequestError(f"ticket: {error}, got {shown(_value_at(str(error), given))}{hint}")
    return RequestError(f"ticket: {shown(error)}")


def _value_at(message: str, given: Any) -> Any:
    """The value that msgspec's message points at, as in "... - at `$.kvflow.ranks[0].port`"."""
    for name, index in _STEP.findall(message.rpartition("`$")[2]):
        given = checks.answer(partial(operator.getitem, given, name or int(index)))
    return given


def _refuse_texts(struct: Ticket | RankLease, names: Sequence[str]) -> None:
    """RequestError for the first that is not Python's own: no message can carry a class of somebody else's."""
    for name in names:
        value = getattr(struct, name)
        if type(value) is not str:
            raise RequestError(f"ticket: {name}: expected a str, got the {type(value).__name__} {shown(value)}")
