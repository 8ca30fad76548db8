"""The ticket: what a consumer needs to load one request's blocks. It travels through routers as a dict of JSON types.

A lease is a promise of one rank. An engine of several ranks makes one on each, under the same request id, and a ticket
names one or more of them: `merge_tickets` makes one ticket of those that the ranks have made. A reader that needs a
rank which its ticket does not name works its port out and asks it (`messages.LeaseRequest`), which costs a round trip.

Who makes a ticket need not be where the lease is: `Ticket.without_leases` names an engine's ranks and a request, and
its readers ask every rank for its lease. The request id is what they ask for, so it has to be a secret of that ticket.
A *rendezvous* (`Ticket.rendezvous`) does not know the blocks either: its readers ask for the offer, and wait for it.
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
from msgspec import Meta

from kvflow import checks
from kvflow.checks import INT64_MAX, INT64_MIN, encodes, is_name, shown
from kvflow.config import HOST_CHARS_MAX, PORT_MAX, RANKS_MAX, is_host, rank_offset
from kvflow.core.cache.groups import GROUPS_MAX, GroupFacts
from kvflow.core.plan.topology import Parallelism, Rank
from kvflow.core.protocol.messages import LEASE_ID_CHARS, NO_LEASE_ID, PROTOCOL_VERSION, digest_of
from kvflow.core.protocol.spare import CHARS_MAX, MARK, without_spare
from kvflow.errors import RequestError
from kvflow.limits import REQUEST_ID_CHARS_MAX

_LEASE_ID = re.compile(f"[0-9a-f]{{{LEASE_ID_CHARS}}}")
_TRACEPARENT = re.compile("(?:[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?")
_PROMPT_DIGEST = re.compile("(?:[0-9a-f]{32})?")
_NAME_CHARS_MAX = 1024
_FINITE_MAX = math.nextafter(math.inf, 0.0)
_PLACE_OF = operator.attrgetter("pp_rank", "tp_rank")
_MORE_BLOCK_IDS_OF = operator.attrgetter("more_block_ids")
_BLOCK_IDS_OF = operator.attrgetter("block_ids")
_TEXTS = operator.attrgetter("engine_id", "request_id", "traceparent", "prompt_digest")
_LEASE_TEXTS = operator.attrgetter("host", "incarnation", "lease_id")
_SPARED_CHARS_MAX = REQUEST_ID_CHARS_MAX + len(MARK) + CHARS_MAX
_NO_LEASE: dict[str, Any] = {
    "lease_id": "",
    "seal_index": 0,
    "expires_s": 0.0,
    "block_ids": None,
    "more_block_ids": (),
    "pending": False,
    "payload": False,
    "held": True,
}
"""Fields of the `RankLease` of a rank that has to be asked."""
_READ = "_read"  # of a ticket that was read, among its attributes: how many block ids it has, or will have
_FIELDS_MAX = 256  # of a dict on the way; routers add some

StructT = TypeVar("StructT", bound=msgspec.Struct)

# Python and JSON know larger integers, but no message of ours can carry them.
Int64: TypeAlias = Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=INT64_MAX)]
RankCount: TypeAlias = Annotated[int, Meta(ge=1, le=RANKS_MAX)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=_NAME_CHARS_MAX)]
Host: TypeAlias = Annotated[str, Meta(max_length=HOST_CHARS_MAX)]
BlockIds: TypeAlias = tuple[Int64, ...]
Groups: TypeAlias = Annotated[tuple[GroupFacts, ...], Meta(max_length=GROUPS_MAX)]
Kinds: TypeAlias = Annotated[tuple[tuple[Size, Size, Count], ...], Meta(max_length=GROUPS_MAX)]
RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]


class RankLease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The lease of one rank, and where its side channel listens.

    `expires_s` is when the lease ends on the clock of that incarnation of the rank, and means nothing to anybody
    who does not know that clock (`core.protocol.proof`). `block_ids` are set if the rank's differ from the
    engine's: it offers host buffers. In a ticket's dict the first rank has no host and port: they are where routers
    look for them. With an empty `lease_id` the rank has to be asked.
    """

    pp_rank: Count
    tp_rank: Count
    lease_id: str
    seal_index: Count
    incarnation: Name
    expires_s: Annotated[float, Meta(ge=-_FINITE_MAX, le=_FINITE_MAX)]
    host: Host = ""
    port: Int64 = 0
    block_ids: BlockIds | None = None
    more_block_ids: tuple[BlockIds, ...] = ()
    """Block ids of the further groups, as in a ticket."""
    pending: bool = False
    """The blocks were still being computed, so that the seal has to be seen before anything is read."""
    payload: bool = False
    """A payload comes with the lease's end."""
    held: bool = True
    """The blocks are held for a moment after its end; else the seal is looked at after the last byte."""

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def block_tables(self) -> tuple[BlockIds, ...]:
        """Block ids by group, if they differ from the engine's."""
        return () if self.block_ids is None else (self.block_ids, *self.more_block_ids)


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that a ticket and its dict have alike."""

    num_tokens: Count
    ttl_s: Annotated[float, Meta(gt=0, le=_FINITE_MAX)]
    dp_rank: Count
    pp_size: RankCount
    block_size: Size
    kv_heads: Size
    model_kv_heads: Count
    fixed_ports: bool
    traceparent: str
    prompt_digest: str
    groups: Groups = ()
    more_kinds: Kinds = ()
    extends: bool = False
    """More blocks follow, until they hold all tokens (`Lease.extend`)."""
    awaited: bool = False
    """The offer is not known yet: a rendezvous."""


_OFFERED = _Offer.__struct_fields__
_OFFER = operator.attrgetter(*_OFFERED)


class _TicketExtension(_Offer, frozen=True, kw_only=True):
    """kvflow's own part of a ticket, under the key "kvflow"."""

    version: Int64
    ranks: Annotated[list[RankLease], Meta(min_length=1)]
    padding: Count = 0
    """Ids at the end of each table that are not of the offer: there are readers of another make that count them."""


class _TicketParams(msgspec.Struct, frozen=True, kw_only=True):
    """The dict as routers see it; its other field names are the ones that routers of this field forward."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: Name
    remote_request_id: RequestId
    remote_block_ids: BlockIds
    remote_host: Host
    remote_port: Int64
    tp_size: RankCount
    kvflow: _TicketExtension


class _GroupedTicketParams(_TicketParams, frozen=True, kw_only=True):
    """The dict of a ticket of several groups: block ids are nested, a list per group, as others of this field do it.

    One group may be written like that, too, for readers that take nothing else.
    """

    remote_block_ids: Annotated[tuple[BlockIds, ...], Meta(min_length=1, max_length=GROUPS_MAX)]  # type: ignore[assignment]


class Ticket(_Offer, frozen=True, kw_only=True, dict=True):
    """The offer of one request's blocks, as a consumer needs it to read them.

    `block_ids` are the producer's, in prompt order; `num_tokens` says how far the last one counts. `ttl_s` is the time
    that the lease had left when the ticket was made, and what each renewal gives it anew; it is a hint, readers trust
    the seal (`core.protocol.proof`).
    `ranks` are those whose leases it names, all of replica `dp_rank`. `kv_heads` are those of one rank,
    `model_kv_heads` the model's or 0 if unknown. With `fixed_ports` the ports of the other ranks follow from the
    first one's. An engine with several groups of layers (`CacheGroup`) has a block table for each: `block_ids` is the
    first one's, `more_block_ids` are the others'; `groups` says what they are, and `more_kinds` what further kinds of
    layers there are (block_size, kv_heads, model_kv_heads).
    """

    engine_id: Name
    request_id: RequestId
    block_ids: BlockIds
    tp_size: RankCount
    ranks: tuple[RankLease, ...]
    traceparent: str = ""
    """W3C trace context of the request, for what observes the load; "" if there is none."""
    prompt_digest: str = ""
    """Tells its tokens from those of another prompt (`core.protocol.prompts`); "" if the producer did not say."""
    more_block_ids: tuple[BlockIds, ...] = ()

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
        """The parallelism of its engine."""
        kind = (self.block_size, self.kv_heads, self.model_kv_heads)
        return Parallelism(self.tp_size, self.pp_size, *kind, self.more_kinds)

    @property
    def block_tables(self) -> tuple[BlockIds, ...]:
        """Block ids by group; one group has one table."""
        return (self.block_ids, *self.more_block_ids)

    @cached_property
    def offered_tokens(self) -> int:
        """Tokens that the blocks hold: those of groups that hold the prompt from its first token on say it."""
        if self.extends:
            return self.num_tokens
        if not self.groups:
            return min(self.num_tokens, len(self.block_ids) * self.block_size)
        tables = zip(self.groups, self.block_tables, strict=True)
        whole = [len(ids) * group.block_size for group, ids in tables if group.whole]
        return min([self.num_tokens, *whole]) if any(self.block_tables) else 0

    @property
    def asks(self) -> bool:
        """True if its ranks are asked for their leases, and may be asked to take them back."""
        return True

    @property
    def offers_nothing(self) -> bool:
        """True if its leases ended when they were made: there is nothing to read, and nothing will be told."""
        to_come = self.awaited or self.extends or any(rank.payload for rank in self.ranks)
        return not any(self.block_tables) and not to_come

    @cached_property
    def block_counts(self) -> tuple[int, ...]:
        """Blocks that there are in the end, by group."""
        if not self.extends:
            return tuple(map(len, self.block_tables))
        if not self.groups:
            return (-(-self.num_tokens // self.block_size),)
        return tuple(group.blocks_needed(self.num_tokens) for group in self.groups)

    @cached_property
    def blocks_digest(self) -> bytes:
        """Digest of the block ids, which ranks compare."""
        return digest_of(self.block_tables if self.more_block_ids else self.block_ids)

    @cached_property
    def leases(self) -> dict[tuple[int, int], RankLease]:
        """Leases by (pp_rank, tp_rank)."""
        return dict(zip(map(_PLACE_OF, self.ranks), self.ranks, strict=True))

    def find(self, rank: Rank) -> RankLease | None:
        """Look a rank's lease up.

        Args:
            rank: its dp does not count, since all leases of a ticket are of one replica.

        Returns:
            The lease; None if the ticket does not name that rank.

        Raises:
            RequestError: what was given is no Rank.
        """
        checks.instance(rank, Rank, "rank")
        return self.leases.get((rank.pp, rank.tp))

    def address_of(self, rank: Rank) -> str:
        """Address of a rank's side channel.

        Args:
            rank: one of the engine's, named in the ticket or not.

        Returns:
            The address; of a rank that is not named, worked out from the first one's port.

        Raises:
            RequestError: what was given is no Rank, or is not named and its port cannot be worked out.
        """
        named = self.find(rank)
        if named is not None:
            return named.address
        wanted = (rank.pp, rank.tp)
        if not self.fixed_ports:
            names = ", ".join(map(str, list(self.leases)[:8])) + (", ..." if len(self.ranks) > 8 else "")
            raise RequestError(
                f"ticket: engine {self.engine_id!r} has ranks on ports of the system's choice (listen port 0), and "
                f"(pp_rank, tp_rank) {wanted} is needed, but only {names} named: merge the ranks' tickets"
            )
        first = _PLACE_OF(self.first)
        here, there = (rank_offset(0, *place, tp_size=self.tp_size, pp_size=self.pp_size) for place in (first, wanted))
        port = self.first.port + there - here
        if not 0 < port <= PORT_MAX:
            raise RequestError(
                f"ticket: remote_port {self.first.port} of (pp_rank, tp_rank) {first} puts {wanted} at port {port}, "
                f"which is not in 1..{PORT_MAX}"
            )
        return f"tcp://{self.first.host}:{port}"

    def without_leases(
        self,
        *,
        request_id: str,
        block_ids: Sequence[int] | Sequence[Sequence[int]],
        num_tokens: int,
        ttl_s: float,
        prompt_digest: str = "",
    ) -> Ticket:
        """A ticket of the same ranks for another request, whose readers ask each rank for its lease.

        Args:
            request_id: the id that the engine serves the other request under.
            block_ids: the producer's blocks in prompt order, of the one group, or a block table for each group.
            num_tokens: how many tokens of the prompt they hold.
            ttl_s: the lease's time, in seconds.
            prompt_digest: of the other request's prompt; "" if it is not known.

        Returns:
            The ticket, checked as readers check it.

        Raises:
            RequestError: no reader would take it.
        """
        ranks = tuple(msgspec.structs.replace(rank, **_NO_LEASE) for rank in self.typed().ranks)
        tables: Any = (block_ids,) if len(self.block_tables) == 1 else block_ids
        if len(tables) != len(self.block_tables):
            raise RequestError(f"ticket: {len(tables)} block tables, but {len(self.block_tables)} groups")
        first, *more = (tuple(checks.whole_numbers(ids, "ticket: remote_block_ids").tolist()) for ids in tables)
        ticket = msgspec.structs.replace(
            self,
            request_id=request_id,
            block_ids=first,
            more_block_ids=tuple(more),
            num_tokens=checks.whole(num_tokens, "ticket: num_tokens"),
            ttl_s=checks.seconds(ttl_s, "ticket: ttl_s"),
            ranks=ranks,
            prompt_digest=prompt_digest,
            extends=False,
            awaited=False,
        )
        return read_ticket(ticket)

    @classmethod
    def rendezvous(
        cls,
        introduction: Ticket | Mapping[str, Any],
        request_id: str,
        *,
        ttl_s: float = 30.0,
        traceparent: str = "",
    ) -> Ticket:
        """A ticket of a request that no engine has begun yet, for readers that come before its blocks are known.

        Args:
            introduction: any ticket of the engine that is to serve the request, or its dict: it names the ranks.
            request_id: the id that the engine will serve it under. Whoever knows it may read, so it has to be a secret.
            ttl_s: how long a reader waits for the engine to open its lease, in seconds, within its own deadline.
            traceparent: W3C trace context of the request.

        Returns:
            A ticket for `LoadRequest.ticket`, whose dict travels as every ticket's does.

        Raises:
            RequestError: the introduction, or what else was given, cannot be right.
        """
        known = read_ticket(introduction)
        nothing: list[Any] = [[] for _ in known.block_tables]
        tables = nothing[0] if len(nothing) == 1 else nothing
        ticket = known.without_leases(request_id=request_id, block_ids=tables, num_tokens=0, ttl_s=ttl_s)
        changes = {"awaited": True, "extends": False, "traceparent": checked_traceparent(traceparent)}
        return read_ticket(msgspec.structs.replace(ticket, **changes))

    def to_params(self) -> dict[str, Any]:
        """The ticket as a dict, in the form that `from_params` reads.

        Returns:
            A new dict of JSON types that survives any HTTP router.

        Raises:
            RequestError: a field is of another type.
        """
        ticket = self.typed()
        ranks: list[dict[str, Any]] = [msgspec.to_builtins(rank) for rank in ticket.ranks]
        for rank in ranks:
            if "block_ids" in rank:
                rank["block_ids"] = [*rank["block_ids"]]
            if "more_block_ids" in rank:
                rank["more_block_ids"] = [*map(list, rank["more_block_ids"])]
        offer = {name: getattr(ticket, name) for name in _Offer.__struct_fields__}
        groups, more_kinds = offer.pop("groups"), offer.pop("more_kinds")
        for name in ("extends", "awaited"):
            if not offer[name]:
                del offer[name]
        if groups:
            offer["groups"] = [msgspec.to_builtins(group) for group in groups]
        if more_kinds:
            offer["more_kinds"] = [*map(list, more_kinds)]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": ticket.engine_id,
            "remote_request_id": ticket.request_id,
            "remote_block_ids": [*map(list, ticket.block_tables)] if ticket.more_block_ids else [*ticket.block_ids],
            "remote_host": ranks[0].pop("host", ""),
            "remote_port": ranks[0].pop("port", 0),
            "tp_size": ticket.tp_size,
            "kvflow": {"version": PROTOCOL_VERSION, **offer, "ranks": ranks},
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Ticket:
        """Read a ticket's dict.

        Args:
            params: as `to_params` made it and routers passed it on. Unknown fields are ignored.

        Returns:
            The ticket, checked.

        Raises:
            RequestError: it names the field that is missing or wrong.
        """
        return read_ticket(params)

    def typed(self) -> Ticket:
        """Check the fields' types, since constructors take anything.

        Returns:
            An equal ticket, each field of its type.

        Raises:
            RequestError: it names a field that is of another type.
        """
        ranks = self.ranks if isinstance(self.ranks, tuple) else ()
        if not ranks or not all(isinstance(rank, RankLease) for rank in ranks):
            raise RequestError(f"ticket: ranks: expected a tuple of RankLeases, got {shown(self.ranks)}")
        more = [self.more_block_ids, *(rank.more_block_ids for rank in ranks)]
        if not all(isinstance(tables, tuple | list) for tables in more):
            raise RequestError(f"ticket: more_block_ids: expected a tuple, got {shown(self.more_block_ids)}")
        first = [self.block_ids, *(rank.block_ids for rank in ranks if rank.block_ids is not None)]
        for name, tables in (("block_ids", first), *zip(itertools.repeat("more_block_ids"), more)):
            for ids in tables:
                if not isinstance(ids, tuple | list):  # msgspec would take a set, whose order is nobody's
                    raise RequestError(f"ticket: {name}: expected a tuple of whole numbers, got {shown(ids)}")
        values = msgspec.structs.asdict(self)
        plain = {"groups": _plain_groups(self.groups), "ranks": tuple(map(msgspec.structs.asdict, ranks))}
        return _convert({**values, **plain}, Ticket)


def read_ticket(ticket: Ticket | Mapping[str, Any], block_ids_max: int = INT64_MAX) -> Ticket:
    """The ticket, checked; RequestError names what is wrong with it, before much work is done for what is too large.

    One that was read before is as it was: nobody can change it.
    """
    if isinstance(ticket, Ticket):
        count = vars(ticket).get(_READ)
        if count is not None and count <= block_ids_max:
            return ticket
        _check_count(checks.answer(partial(_block_ids_in, ticket)) or 0, block_ids_max)  # None: a type that is wrong
        return _checked(ticket.typed(), block_ids_max)
    params = ticket if type(ticket) is dict else checks.mapping(ticket, "ticket")
    request_id = params.get("remote_request_id")
    if isinstance(request_id, str) and len(request_id) <= _SPARED_CHARS_MAX and MARK in request_id:
        _check_sizes(params, block_ids_max)  # before they are copied, and what the spare has once more
        params = without_spare(params, request_id)
    nested = _check_sizes(params, block_ids_max)
    try:
        raw = msgspec.convert(params, _GroupedTicketParams if nested else _TicketParams)
    except Exception as error:
        raise _wrong(params, error) from error
    tables: Any = raw.remote_block_ids if nested else (raw.remote_block_ids,)
    extension = raw.kvflow
    first, *others = extension.ranks
    if extension.padding:
        tables = tuple(ids[: -extension.padding] for ids in tables)
    if extension.version != PROTOCOL_VERSION:
        raise RequestError(f"ticket: kvflow version: ours {PROTOCOL_VERSION}, theirs {extension.version}")
    if not raw.do_remote_prefill:
        raise RequestError("ticket: do_remote_prefill is false: it does not ask for a load")
    read = Ticket(
        engine_id=raw.remote_engine_id,
        request_id=raw.remote_request_id,
        block_ids=tables[0],
        more_block_ids=tables[1:],
        tp_size=raw.tp_size,
        ranks=(msgspec.structs.replace(first, host=raw.remote_host, port=raw.remote_port), *others),
        **dict(zip(_OFFERED, _OFFER(extension), strict=True)),
    )
    return _checked(read, block_ids_max)


def _checked(ticket: Ticket, block_ids_max: int) -> Ticket:
    """The ticket, once it was read. RequestError for what types do not say."""
    _check_texts(ticket)
    if len(ticket.ranks) > RANKS_MAX:
        raise RequestError(f"ticket: it names {len(ticket.ranks)} ranks, expected 1 to {RANKS_MAX}")
    if ticket.groups or ticket.more_block_ids:
        _check_groups(ticket)
    count = len(ticket.block_ids)
    for lease in ticket.ranks:
        _check_lease(lease, ticket)
        if lease.block_ids is not None:
            count += len(lease.block_ids)
    if ticket.more_block_ids or ticket.groups:
        count = _block_ids_in(ticket)
    if count > block_ids_max:  # once more: mappings within its dict may be no dicts
        _check_count(count, block_ids_max)
    if len(ticket.leases) < len(ticket.ranks):
        raise RequestError(f"ticket: it names {len(ticket.ranks)} ranks, but only {len(ticket.leases)} different ones")
    if ticket.extends or ticket.awaited:
        _check_to_come(ticket, block_ids_max)
        count = max(count, sum(ticket.block_counts))
    vars(ticket)[_READ] = count
    return ticket


def _check_texts(ticket: Ticket) -> None:
    if {*map(type, _TEXTS(ticket))} != {str}:
        raise _foreign_text(ticket)
    _check_engine_id(ticket.engine_id)
    if not ticket.request_id.isascii() and not encodes(ticket.request_id):
        raise RequestError(f"ticket: remote_request_id {ticket.request_id[:80]!a} is no request id")
    if ticket.traceparent and not _TRACEPARENT.fullmatch(ticket.traceparent):
        raise RequestError(f"ticket: traceparent {ticket.traceparent[:80]!a} is no W3C trace context")
    if not _PROMPT_DIGEST.fullmatch(ticket.prompt_digest):
        raise RequestError(f"ticket: prompt_digest {ticket.prompt_digest[:80]!a} is not 32 hexadecimal digits")


def _check_to_come(ticket: Ticket, block_ids_max: int) -> None:
    """RequestError if what is told of blocks that are not known yet cannot be right."""
    counts = tuple(map(len, ticket.block_tables))
    if ticket.awaited and (any(counts) or ticket.num_tokens or ticket.extends):
        raise RequestError(
            f"ticket: a rendezvous knows no blocks and tokens, but it has {counts} and {ticket.num_tokens}"
        )
    if any(count > most for count, most in zip(counts, ticket.block_counts, strict=True)):
        why = f"{ticket.num_tokens} tokens need {ticket.block_counts}"
        raise RequestError(f"ticket: {counts} blocks by group of a lease that is extended, but {why}")
    _check_count(sum(ticket.block_counts), block_ids_max)


def _check_groups(ticket: Ticket) -> None:
    groups = ticket.groups
    if len(groups) != len(ticket.block_tables):
        raise RequestError(f"ticket: {len(groups)} groups, but {len(ticket.block_tables)} block tables")
    if groups[0].block_size != ticket.block_size:
        raise RequestError(f"ticket: block_size {ticket.block_size}, but {groups[0].block_size} of the first group")
    for group in groups:
        if not group.plausible or not is_name(group.name, _NAME_CHARS_MAX):
            what = f"kind {group.kind}, window {group.window}, block_size {group.block_size}"
            raise RequestError(f"ticket: group {group.name[:80]!a}: {what}")


def _plain_groups(groups: object) -> list[Any]:
    """Groups as `msgspec.convert` takes them."""
    if not isinstance(groups, tuple) or not all(isinstance(group, GroupFacts) for group in groups):
        raise RequestError(f"ticket: groups: expected a tuple of GroupFacts, got {shown(groups)}")
    return [msgspec.structs.asdict(group) for group in groups]


def check_lease(lease: RankLease, ticket: Ticket) -> None:
    """RequestError names what no producer would have given: for a lease that is not the ticket's, but of its blocks."""
    _check_lease(_convert(msgspec.structs.asdict(lease), RankLease), ticket)


def _check_lease(lease: RankLease, ticket: Ticket) -> None:
    if {*map(type, _LEASE_TEXTS(lease))} != {str}:
        raise _foreign_text(lease)
    _check_place(lease.host, lease.port, lease.incarnation)
    if lease.lease_id and (not _LEASE_ID.fullmatch(lease.lease_id) or lease.lease_id == NO_LEASE_ID):
        raise RequestError(f"ticket: lease_id is not {LEASE_ID_CHARS} hexadecimal digits")  # nor shown: it is a secret
    count = len(ticket.block_ids)
    if lease.block_ids is not None and len(lease.block_ids) != count:
        raise RequestError(f"ticket: {count} blocks, but {len(lease.block_ids)} of tp_rank {lease.tp_rank}")
    if (ticket.more_block_ids or lease.more_block_ids) and lease.block_ids is not None:
        counts, theirs = (tuple(map(len, tables)) for tables in (ticket.block_tables, lease.block_tables))
        if counts != theirs:
            raise RequestError(f"ticket: {counts} blocks by group, but {theirs} of tp_rank {lease.tp_rank}")
    if lease.tp_rank >= ticket.tp_size or lease.pp_rank >= ticket.pp_size:
        raise RequestError(
            f"ticket: tp_rank {lease.tp_rank} of {ticket.tp_size}, pp_rank {lease.pp_rank} of {ticket.pp_size}"
        )


# Engines have few ranks, and each ticket names one of them again. Types bound the lengths of what is remembered.
@lru_cache(maxsize=1024)
def _check_place(host: str, port: int, incarnation: str) -> None:
    if not 0 < port <= PORT_MAX:
        raise RequestError(f"ticket: remote_port {port} is not in 1..{PORT_MAX}")
    if not is_host(host):
        raise RequestError(f"ticket: remote_host {host[:80]!a} is no host to connect to")
    if not is_name(incarnation, _NAME_CHARS_MAX):
        raise RequestError(f"ticket: incarnation {incarnation[:80]!a} is no name")


@lru_cache(maxsize=1024)
def _check_engine_id(engine_id: str) -> None:
    if not is_name(engine_id, _NAME_CHARS_MAX):
        raise RequestError(f"ticket: remote_engine_id {engine_id[:80]!a} is no name")


def _foreign_text(struct: Ticket | RankLease) -> RequestError:
    """A text that is not Python's own: no message can carry a class of somebody else's."""
    values = msgspec.structs.asdict(struct).items()
    name, value = next((name, value) for name, value in values if isinstance(value, str) and type(value) is not str)
    return RequestError(f"ticket: {name}: expected a str, got the {type(value).__name__} {shown(value)}")


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"ticket: {count} block ids in all, at most {most} (block_ids_max)")


def _block_ids_in(ticket: Ticket) -> int:
    count = len(ticket.block_ids) + sum(map(len, filter(None, map(_BLOCK_IDS_OF, ticket.ranks))))
    if ticket.more_block_ids or ticket.groups:
        more = (ticket.more_block_ids, *map(_MORE_BLOCK_IDS_OF, ticket.ranks))
        count += sum(len(ids) for tables in more for ids in tables)
    return count


def _check_sizes(params: Mapping[str, Any], block_ids_max: int) -> bool:
    """RequestError if there are more block ids, ranks or fields than can be right: reading them would take long.

    Judged before they are read, as far as it is a dict of a ticket. Whether it has a block table for each of several
    groups.
    """
    extra = params.get("kvflow")
    ranks = dict.get(extra, "ranks") if isinstance(extra, dict) else None
    ranks = ranks if isinstance(ranks, list | tuple) else ()
    if len(ranks) > RANKS_MAX:
        raise RequestError(f"ticket: it names {len(ranks)} ranks, expected 1 to {RANKS_MAX}")
    count, nested = 0, False
    of_ranks = itertools.product(ranks, ("block_ids", "more_block_ids"))
    for part, name in ((params, "remote_block_ids"), (extra, ""), *of_ranks):
        if not isinstance(part, dict):
            continue
        if dict.__len__(part) > _FIELDS_MAX:
            raise RequestError(f"ticket: {dict.__len__(part)} fields in one dict, at most {_FIELDS_MAX}")
        found = dict.get(part, name)
        if type(found) is list or type(found) is tuple:
            count += len(found)
            if found and type(found[0]) in (list, tuple) and len(found) <= GROUPS_MAX:
                count += sum(len(ids) for ids in found if isinstance(ids, list | tuple))
                nested = nested or part is params
        elif isinstance(found, list | tuple | set | frozenset):
            count += checks.answer(found.__len__) or 0
    if count > block_ids_max:
        _check_count(count, block_ids_max)
    return nested


def merge_tickets(tickets: Sequence[Ticket]) -> Ticket:
    """Merge tickets into one that names the ranks of all: each rank of an engine has made one for the same request.

    Args:
        tickets: at least one, in any order.

    Returns:
        A ticket that saves its readers a question to each rank.

    Raises:
        RequestError: they are not of the same engine, request, blocks and tokens, or name two leases of a rank.
    """
    if (count := checks.count(tickets, "merge_tickets: tickets")) > RANKS_MAX:
        raise RequestError(f"merge_tickets: {count} tickets, but an engine has at most {RANKS_MAX} ranks")
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
    return read_ticket(merged)


def checked_traceparent(value: object) -> str:
    """RequestError unless it is "" or a W3C traceparent: version, trace id, span id and flags in hexadecimal."""
    traceparent = checks.text(value, "traceparent")
    if not _TRACEPARENT.fullmatch(traceparent):
        raise RequestError(f"traceparent {traceparent[:80]!a} is no W3C trace context")
    return traceparent


def _convert(given: Mapping[str, Any], kind: type[StructT]) -> StructT:
    """A struct that somebody else has filled in, its fields of their types."""
    try:
        return msgspec.convert(given, kind)
    except Exception as error:
        raise _wrong(given, error) from error


def _wrong(given: Mapping[str, Any], error: Exception) -> RequestError:
    """A struct that somebody else has filled in cannot be read."""
    if isinstance(error, msgspec.ValidationError):
        hint = "; expected a dict of `lease.ticket.to_params()`" if "required field" in str(error) else ""
        return RequestError(f"ticket: {checks.refusal(error, given)}{hint}")
    return RequestError(f"ticket: {shown(error)}")
