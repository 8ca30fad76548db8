"""The ticket: everything that a reader needs to load one request's blocks. Routers carry it as a dict of JSON types.

Each rank of an engine opens a lease, under the same request id, and makes a ticket that names it; `merge_tickets` makes
one ticket of all. If a reader needs a rank that its ticket does not name, it computes the rank's port and asks the rank
for its lease (`messages.LeaseRequest`), which costs a round trip. Tickets can also be made without leases
(`Ticket.without_leases`), and even without blocks (`Ticket.rendezvous`). Readers of these tickets ask by request id, so
this id must be a secret of the ticket.

In a ticket's dict each rank's entry has a checksum of the lease id and of all fields that readers rely on. A dict that
was changed in transit, or mixed from several tickets, is refused. The checksum has no key: it guards against mistakes
only. It leaves out the engine id, host and port, because the engine that answers at the address identifies itself, and
the version of the weights, which older readers do not know.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, TypeAlias
from zlib import crc32

import msgspec
from msgspec import Meta

from kvflow import checks
from kvflow.checks import INT64_MAX, counted, first_few, is_name, is_utf8, short_repr
from kvflow.config import RANKS_MAX, rank_offset
from kvflow.core.bounds import (
    OFFER_PART_CHARS,
    Count,
    GivenTraceparent,
    PromptDigest,
    RankCount,
    Seconds,
    Size,
    Traceparent,
    read_traceparent,
)
from kvflow.core.cache.groups import GROUPS_MAX, GroupFacts, GroupKind
from kvflow.core.cache.tensors import NAME_CHARS_MAX
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.plan.topology import Parallelism, Rank
from kvflow.core.protocol.codec import PROTOCOL_VERSION
from kvflow.core.protocol.messages import digest_of
from kvflow.core.protocol.rank_lease import (
    DICT_EXPECTED,
    BlockIds,
    BlockTables,
    CheckedStructMeta,
    Name,
    RankLease,
    invalid_struct,
    str_subclass_error,
)
from kvflow.core.protocol.spare import SPARE_CHARS_MAX, SPARE_MARK, without_spare
from kvflow.errors import RequestError, WeightsMismatch
from kvflow.hosts import PORT_MAX, address_at
from kvflow.limits import REQUEST_ID_CHARS_MAX

_RANK_OF = operator.attrgetter("pp_rank", "tp_rank")
_TEXTS = operator.attrgetter("engine_id", "request_id", "traceparent", "prompt_digest")
_SPARED_CHARS_MAX = REQUEST_ID_CHARS_MAX + len(SPARE_MARK) + SPARE_CHARS_MAX
_FIELDS_MAX = 256  # maximum number of fields in a dict; routers may add some
_GET_DIGEST = operator.methodcaller("get", "digest", "")
_NAMES = (
    *("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_block_ids"),
    *("remote_host", "remote_port", "tp_size", "kvflow"),
)

Groups: TypeAlias = Annotated[tuple[GroupFacts, ...], Meta(max_length=GROUPS_MAX)]
Kinds: TypeAlias = Annotated[tuple[tuple[Size, Size, Count], ...], Meta(max_length=GROUPS_MAX)]
RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=REQUEST_ID_CHARS_MAX)]
Ranks: TypeAlias = Annotated[tuple[RankLease, ...], Meta(min_length=1, max_length=RANKS_MAX)]


_pack, _unpack = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
_IDS_OF = operator.attrgetter("block_ids", "more_block_ids")
_TOKENS_OF = operator.attrgetter("num_tokens", "prompt_digest", "extends", "awaited")
_REST_OF = operator.attrgetter(
    *("request_id", "tp_size", "pp_size", "dp_rank"),
    *("block_size", "kv_heads", "model_kv_heads", "more_kinds", "groups"),
)
_LEASE_FIELDS_OF = operator.attrgetter(
    *("pp_rank", "tp_rank", "incarnation", "seal_index", "pending", "payload", "held")
)


@checks.built
@checks.hides_secrets
class Ticket(msgspec.Struct, metaclass=CheckedStructMeta, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """The offer of one request's blocks, with everything that a reader needs to load them.

    The constructor checks all fields; RequestError names an invalid field.

    Example, on the prefill and on the decode engine:

        params = prefill.serve_blocks(request).ticket.to_params()
        await decode.load_blocks(LoadRequest("req-1", ticket=params, block_ids=[0, 1, 2]))
    """

    engine_id: Name
    request_id: RequestId
    """Id under which the producer serves the request."""
    block_ids: BlockIds
    """Block ids of the producer in prompt order; those of the first group if there are several groups."""
    num_tokens: Count
    """Number of tokens of the prompt that the blocks hold. The last block may be partly filled."""
    ttl_s: Seconds
    """Lifetime of the lease in seconds, counted from when the ticket is made and again from each renewal. Only a hint:
    readers trust the seal (`core.protocol.proof`)."""
    dp_rank: Count
    """Index of the producer's data-parallel replica, to which all `ranks` belong."""
    tp_size: RankCount
    pp_size: RankCount
    block_size: Size
    """Tokens per block in the first group."""
    kv_heads: Size
    """KV heads of one rank of the producer, in layers of the first kind (see `more_kinds`)."""
    model_kv_heads: Count
    """KV heads of the whole model, in layers of the first kind; 0 if unknown."""
    fixed_ports: bool
    """True if the ports of all ranks can be computed from the port of the first rank (`Config.listen`)."""
    ranks: Ranks
    """Leases that the ticket names, at most one for each rank of the producer's engine."""
    traceparent: Traceparent
    """W3C trace context of the request, for observers of the load; "" if the request has none."""
    prompt_digest: PromptDigest
    """Digest of the prompt, to detect another prompt (`core.protocol.prompts`); "" if the producer gave no prompt."""
    more_block_ids: BlockTables = ()
    """Block ids of each group after the first."""
    groups: Groups = ()
    """Properties of each group, in the order of `block_tables`; () for a single group of full attention."""
    more_kinds: Kinds = ()
    """(block_size, kv_heads, model_kv_heads) of each further kind of layers. Layers of one kind have the same three
    numbers; the ticket's own fields describe the first kind."""
    extends: bool = False
    """True if `Lease.extend` will add more blocks, until the blocks hold all `num_tokens` tokens."""
    awaited: bool = False
    """True for a pending ticket (`Ticket.rendezvous`): the offered blocks are not known yet."""

    def __post_init__(self) -> None:
        """Check that the fields are possible together. RequestError names an invalid field."""
        if {*map(type, _TEXTS(self))} != {str}:
            raise str_subclass_error(self)
        check_engine_id(self.engine_id)
        if not self.request_id.isascii() and not is_utf8(self.request_id):
            raise RequestError(f"ticket: remote_request_id {self.request_id[:80]!a} is not a valid request id")
        if self.groups or self.more_block_ids:
            check_groups(self)
        for lease in self.ranks:
            if lease.block_ids is not None or lease.tp_rank >= self.tp_size or lease.pp_rank >= self.pp_size:
                check_lease(lease, self)
        if len(self.leases) < len(self.ranks):
            raise RequestError(f"ticket: ranks: {len(self.ranks)}, but only {len(self.leases)} are different")
        if self.extends or self.awaited:
            check_incomplete_offer(self)
        elif len(self.ranks) == 1 and self.ranks[0].block_ids is None and not self.more_block_ids:
            vars(self)["block_ids_count"] = len(self.block_ids)  # the usual case, in few steps

    @property
    def first(self) -> RankLease:
        """First lease in `ranks`: of the rank that made the ticket, unless the ticket is merged."""
        return self.ranks[0]

    @property
    def lease_id(self) -> str:
        """Secret id of the first lease in `ranks`."""
        return self.first.lease_id

    @property
    def address(self) -> str:
        """Address of the first rank's side channel."""
        return self.first.address

    @cached_property
    def parallelism(self) -> Parallelism:
        kind = (self.block_size, self.kv_heads, self.model_kv_heads)
        sharded = bool(self.groups) and self.groups[0].kind is GroupKind.SHARDED
        return Parallelism(self.tp_size, self.pp_size, *kind, self.more_kinds, sharded)

    @property
    def block_tables(self) -> tuple[BlockIds, ...]:
        """Block ids of the producer for each group: `block_ids`, then `more_block_ids`."""
        return (self.block_ids, *self.more_block_ids)

    @cached_property
    def offered_tokens(self) -> int:
        """Number of tokens, from the prompt's start, that the ticket offers.

        This is `num_tokens` if more blocks follow (`extends`); else the minimum of `num_tokens` and, for each group of
        full attention, the tokens that the group's blocks can hold. It is 0 without blocks.
        """
        if self.extends:
            return self.num_tokens
        if not self.groups:
            return min(self.num_tokens, len(self.block_ids) * self.block_size)
        tables = zip(self.groups, self.block_tables, strict=True)
        whole = [len(ids) * group.block_size for group, ids in tables if group.whole]
        return min([self.num_tokens, *whole]) if any(self.block_tables) else 0

    @property
    def leases_can_be_asked(self) -> bool:
        """True if readers may ask the producer's ranks for leases and give leases back; False for stock engines."""
        return True

    @property
    def has_blocks(self) -> bool:
        """True if the ticket offers blocks, now or later."""
        return any(self.block_tables) or self.awaited or self.extends

    @property
    def offers_nothing(self) -> bool:
        """True if the ticket offers neither blocks nor a payload (`Lease.complete`).

        The leases of this ticket end when they are opened.
        """
        return not self.has_blocks and not any(rank.payload for rank in self.ranks)

    @cached_property
    def block_counts(self) -> tuple[int, ...]:
        """Number of blocks of each group, including the blocks that the producer has yet to add (`extends`)."""
        if not self.extends:
            return tuple(map(len, self.block_tables))
        if not self.groups:
            return (-(-self.num_tokens // self.block_size),)
        return tuple(group.blocks_needed(self.num_tokens) for group in self.groups)

    @cached_property
    def block_ids_count(self) -> int:
        """Number of block ids in the ticket, those of the engine and of each rank added up, or the sum of
        `block_counts` if that is greater.
        """
        tables = (*self.block_tables, *(ids for rank in self.ranks for ids in rank.block_tables))
        return max(sum(map(len, tables)), sum(self.block_counts))

    @cached_property
    def blocks_digest(self) -> bytes:
        """Digest (`digest_of`) of the producer's block ids, for `LeaseRequest.blocks_digest`."""
        return digest_of(self.block_tables if self.more_block_ids else self.block_ids)

    @cached_property
    def leases(self) -> dict[tuple[int, int], RankLease]:
        """Leases that the ticket names, by (pp_rank, tp_rank)."""
        return dict(zip(map(_RANK_OF, self.ranks), self.ranks, strict=True))

    def find(self, rank: Rank) -> RankLease | None:
        """Return the lease that the ticket names for a rank.

        Args:
            rank: the rank. `rank.dp` is ignored, since all leases of a ticket belong to one replica.

        Returns:
            The lease; None if the ticket does not name the rank.

        Raises:
            RequestError: `rank` is not a Rank.
        """
        checks.instance(rank, Rank, "rank")
        return self.leases.get((rank.pp, rank.tp))

    def address_of(self, rank: Rank) -> str:
        """Return the address of a rank's side channel.

        Args:
            rank: a rank of the producer's engine, named in the ticket or not.

        Returns:
            The address, tcp://host:port. If the ticket does not name the rank, the port is computed from the first
            rank's port.

        Raises:
            RequestError: `rank` is not a Rank, or the ticket does not name it and its port cannot be computed.
        """
        named = self.find(rank)
        if named is not None:
            return named.address
        wanted = (rank.pp, rank.tp)
        if not self.fixed_ports:
            raise RequestError(
                f"ticket: engine {self.engine_id!r} has ranks on ports of the system's choice (listen port 0), and "
                f"(pp_rank, tp_rank) {wanted} is needed, but the ticket names only {first_few(self.leases, 8)}: "
                "merge the ranks' tickets"
            )
        first = _RANK_OF(self.first)
        here, there = (rank_offset(0, *place, tp_size=self.tp_size, pp_size=self.pp_size) for place in (first, wanted))
        port = self.first.port + there - here
        if not 0 < port <= PORT_MAX:
            raise RequestError(
                f"ticket: remote_port {self.first.port} of (pp_rank, tp_rank) {first} puts {wanted} at port {port}, "
                f"which is not in 1..{PORT_MAX}"
            )
        return address_at(self.first.host, port)

    def without_leases(
        self,
        *,
        request_id: str,
        block_ids: Sequence[int] | Sequence[Sequence[int]],
        num_tokens: int,
        ttl_s: float,
        prompt_digest: str = "",
    ) -> Ticket:
        """Return a ticket of the same ranks for another request. Its readers ask each rank for its lease.

        Args:
            request_id: id under which the engine serves the other request: a secret, because any engine that knows it
                may read.
            block_ids: the producer's blocks in prompt order, or a block table for each group.
            num_tokens: tokens of the prompt that the blocks hold.
            ttl_s: lifetime of the lease in seconds, counted from its opening and again from each renewal.
            prompt_digest: digest of the other request's prompt; "" if it is not known.

        Returns:
            The ticket.

        Raises:
            RequestError: a value is invalid.
        """
        ranks = tuple(
            RankLease.without_lease_id(
                Rank(self.dp_rank, rank.pp_rank, rank.tp_rank), rank.incarnation, rank.host, rank.port
            )
            for rank in self.ranks
        )
        tables: Any = (block_ids,) if len(self.block_tables) == 1 else block_ids
        if len(tables) != len(self.block_tables):
            given = counted(len(tables), "block table")
            raise RequestError(f"ticket: {given}, but {counted(len(self.block_tables), 'group')}")
        first, *more = (tuple(checks.whole_numbers(ids, "ticket: remote_block_ids").tolist()) for ids in tables)
        return with_changes(
            self,
            request_id=request_id,
            block_ids=first,
            more_block_ids=tuple(more),
            num_tokens=num_tokens,
            ttl_s=ttl_s,
            ranks=ranks,
            prompt_digest=prompt_digest,
            extends=False,
            awaited=False,
        )

    @classmethod
    def rendezvous(
        cls,
        introduction: Ticket | Mapping[str, Any],
        request_id: str,
        *,
        ttl_s: float = 30.0,
        traceparent: GivenTraceparent = "",
    ) -> Ticket:
        """Return a pending ticket: a ticket for a request that has no blocks yet. Readers wait until the request's
        lease is open.

        Args:
            introduction: any ticket of the engine that will serve the request, or the ticket's dict. The new ticket
                names the same ranks.
            request_id: id under which the engine will serve the request: a secret, because any engine that knows it may
                read.
            ttl_s: maximum seconds for which a reader waits for the lease, unless the load's deadline is earlier.
            traceparent: W3C trace context of the request, as in `ServeRequest.traceparent`.

        Returns:
            A ticket for `LoadRequest.ticket`.

        Raises:
            RequestError: `introduction` or another value is invalid.
        """
        known = read_ticket(introduction)
        nothing = given_block_ids([()] * len(known.block_tables))
        ticket = known.without_leases(request_id=request_id, block_ids=nothing, num_tokens=0, ttl_s=ttl_s)
        return with_changes(ticket, awaited=True, traceparent=read_traceparent(traceparent))

    def to_params(self) -> dict[str, Any]:
        """Return the ticket as a dict for routers, which `from_params` parses.

        Returns:
            A new dict of JSON types.
        """
        fields = msgspec.to_builtins(self)
        ids, *more = [list(fields.pop("block_ids")), *map(list, fields.pop("more_block_ids", ()))]
        kvflow = _unpack(_pack(fields))  # lists in place of tuples; without the block ids, which may be many
        for rank, digest in zip(kvflow["ranks"], _compute_digests(self), strict=True):
            rank["digest"] = digest
        first = kvflow["ranks"][0]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": kvflow.pop("engine_id"),
            "remote_request_id": kvflow.pop("request_id"),
            "remote_block_ids": [ids, *more] if more else ids,
            "remote_host": first.pop("host"),
            "remote_port": first.pop("port"),
            "tp_size": kvflow.pop("tp_size"),
            "kvflow": {"version": PROTOCOL_VERSION, **kvflow},
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Ticket:
        """Parse a ticket from the dict that `to_params` has made.

        Args:
            params: the dict, as routers have forwarded it. Unknown fields are ignored.

        Returns:
            The ticket.

        Raises:
            RequestError: a field, which the message names, is missing or invalid.
        """
        return read_ticket(params)


def read_ticket(ticket: Ticket | Mapping[str, Any], block_ids_max: int = INT64_MAX) -> Ticket:
    """Return `ticket` itself if it is a Ticket, else the ticket that its dict describes.

    RequestError names an invalid field, or says that there are more than `block_ids_max` block ids. These are counted
    before the dict is parsed.
    """
    stated: list[str] = []
    if not isinstance(ticket, Ticket):
        params, nested = _bounded_params(ticket if type(ticket) is dict else _given_dict(ticket), block_ids_max)
        fields: dict[str, Any] = {}
        try:
            wanted, decode, tables = params["do_remote_prefill"], params["do_remote_decode"], params["remote_block_ids"]
            extra = params["kvflow"]
            fields = {**(extra if type(extra) is dict else checks.mapping(extra, "ticket: kvflow"))}
            ranks, version, padding = fields["ranks"], fields["version"], fields.get("padding", 0)
            place = {"host": params["remote_host"], "port": params["remote_port"]}
            if isinstance(ranks, list | tuple) and ranks and isinstance(ranks[0], Mapping):
                fields["ranks"] = [{**ranks[0], **place}, *ranks[1:]]
            if padding:
                own = checks.whole(padding, "ticket: kvflow.padding", least=0)
                tables = [ids[:-own] for ids in tables] if nested else tables[:-own]
            fields["block_ids"], fields["more_block_ids"] = (tables[0], tables[1:]) if nested else (tables, ())
            fields["engine_id"], fields["request_id"] = params["remote_engine_id"], params["remote_request_id"]
            fields["tp_size"] = params["tp_size"]
            if (trace := fields.get("traceparent")) and type(trace) is str:
                fields["traceparent"] = read_traceparent(trace)
            if type(version) is not int or version != PROTOCOL_VERSION:
                raise RequestError(f"ticket: kvflow version: ours {PROTOCOL_VERSION}, theirs {short_repr(version)}")
            if type(decode) is not bool or wanted is not True:
                checks.checked(decode, "ticket: do_remote_decode", bool)
                checks.checked(wanted, "ticket: do_remote_prefill", bool)
                raise RequestError("ticket: do_remote_prefill is false: it does not ask for a load")
            ticket = msgspec.convert(fields, Ticket)
            stated = [*map(_GET_DIGEST, ranks)]
        except Exception as error:
            if (plain := _without_doubles(params)) is not None:
                return read_ticket(plain, block_ids_max)
            if isinstance(error, RequestError):
                raise
            if isinstance(error, KeyError):
                what = f"no required field `{error.args[0]}`, got {short_repr(params)}"
                raise RequestError(f"ticket: {what}; {DICT_EXPECTED}") from error
            raise invalid_struct(fields, error, in_transit=True) from error
    read: Ticket = ticket
    if read.block_ids_count > block_ids_max:
        raise too_many_block_ids(read.block_ids_count, block_ids_max)
    if any(stated) and (computed := _compute_digests(read)) != stated:
        check_digests(read, stated, computed)
    return read


def merge_tickets(tickets: Sequence[Ticket]) -> Ticket:
    """Merge the tickets that the ranks of an engine have made for one request, so that readers need not ask for leases.

    Args:
        tickets: at least one ticket, in any order.

    Returns:
        A ticket that names all the leases. Its `ttl_s` is the smallest `ttl_s` of the tickets.

    Raises:
        RequestError: the tickets differ in engine, request, blocks or tokens, or name two leases of one rank.
    """
    if (count := checks.count(tickets, "merge_tickets: tickets")) > RANKS_MAX:
        raise RequestError(f"merge_tickets: {counted(count, 'ticket')}, but an engine has at most {RANKS_MAX} ranks")
    given = checks.try_call(lambda: tuple(tickets))
    if not given or not all(isinstance(ticket, Ticket) for ticket in given):
        hint = "of a lease pass its `ticket`, of a dict Ticket.from_params(it)"
        got = f"got {short_repr(tickets)}; {hint}"
        raise RequestError(f"merge_tickets: expected at least one ticket, and tickets only, {got}")
    first, *others = given
    for ticket in others:
        for name in Ticket.__struct_fields__:
            ours, theirs = getattr(first, name), getattr(ticket, name)
            if name not in ("ranks", "ttl_s", "traceparent") and ours != theirs:
                both = f"{str(ours)[:80]} and {str(theirs)[:80]}"
                hint = "; give all ranks of an engine one Config.engine_id" if name == "engine_id" else ""
                raise RequestError(
                    f"merge_tickets: {name}: {both}: expected tickets that the ranks of one engine made for one request"
                    f"{hint}"
                )
    ranks: dict[tuple[int, int], RankLease] = {}
    for lease in (lease for ticket in given for lease in ticket.ranks):
        known = ranks.setdefault((lease.pp_rank, lease.tp_rank), lease)
        if known != lease:
            raise RequestError(
                f"merge_tickets: two leases of (pp_rank, tp_rank) {(lease.pp_rank, lease.tp_rank)}: seal_index "
                f"{known.seal_index} of {known.incarnation} and {lease.seal_index} of {lease.incarnation}"
            )
    return with_changes(first, ranks=tuple(ranks.values()), ttl_s=min(ticket.ttl_s for ticket in given))


def too_many_block_ids(count: int, most: int, what: str = "ticket") -> RequestError:
    return RequestError(f"{what}: {counted(count, 'block id')} in all, at most {most} (limits.block_ids_max)")


@lru_cache(maxsize=1024)
def check_engine_id(engine_id: str) -> None:
    if not is_name(engine_id, NAME_CHARS_MAX):
        raise RequestError(f"ticket: remote_engine_id {engine_id[:80]!a} is not a printable name")


def check_groups(ticket: Ticket) -> None:
    groups = ticket.groups
    if len(groups) != len(ticket.block_tables):
        tables = counted(len(ticket.block_tables), "block table")
        raise RequestError(f"ticket: {counted(len(groups), 'group')}, but {tables}")
    if groups[0].block_size != ticket.block_size:
        raise RequestError(f"ticket: block_size {ticket.block_size}, but {groups[0].block_size} of the first group")
    sharded = [group for group in groups if group.kind is GroupKind.SHARDED]
    sizes = [group.block_size for group in groups] + [block_size for block_size, _, _ in ticket.more_kinds]
    if sharded and (len(sharded) < len(groups) or any(size % ticket.tp_size for size in sizes)):
        raise RequestError(
            f"ticket: groups with sharded tokens: {len(sharded)} of {len(groups)}, block sizes {sizes} on "
            f"{counted(ticket.tp_size, 'rank')}"
        )


def check_incomplete_offer(ticket: Ticket) -> None:
    """Raise RequestError if the fields of `ticket`, which has `awaited` or `extends` set, contradict each other."""
    counts = tuple(map(len, ticket.block_tables))
    if ticket.awaited and (any(counts) or ticket.num_tokens or ticket.extends):
        raise RequestError(
            f"ticket: a pending ticket has no blocks and tokens, but this one has {counts} and {ticket.num_tokens}"
        )
    if any(count > most for count, most in zip(counts, ticket.block_counts, strict=True)):
        why = f"num_tokens {ticket.num_tokens} needs {ticket.block_counts}"
        raise RequestError(f"ticket: blocks by group {counts} of a lease that is extended, but {why}")


def check_lease(lease: RankLease, ticket: Ticket) -> None:
    """Raise RequestError if `lease`, an entry of `ticket`, does not fit the ticket.

    The lease's rank must exist in the producer's engine, and its block tables must be as long as the ticket's.
    """
    if lease.block_ids is not None:
        counts, theirs = (tuple(map(len, tables)) for tables in (ticket.block_tables, lease.block_tables))
        if counts != theirs:
            raise RequestError(f"ticket: blocks by group: {counts}, but {theirs} of tp_rank {lease.tp_rank}")
    if lease.tp_rank >= ticket.tp_size or lease.pp_rank >= ticket.pp_size:
        raise RequestError(
            f"ticket: tp_rank {lease.tp_rank} of {ticket.tp_size}, pp_rank {lease.pp_rank} of {ticket.pp_size}"
        )


def check_weights(ticket: Ticket, lease: RankLease, ours: str) -> None:
    """Raise WeightsMismatch unless the blocks of `lease`, of `ticket` or its rank's answer, are of the weights `ours`.

    An engine that was never told of its weights cannot vouch for any version, so "" is compared like every other.
    """
    if lease.weights != ours:
        blocks = f"the blocks of request {ticket.request_id!r} from {ticket.engine_id!r} at {lease.address}"
        raise WeightsMismatch(f"{blocks} were computed with other weights: ours {ours!r}, theirs {lease.weights!r}")


def with_weights(ticket: Ticket, version: str) -> Ticket:
    """Return a copy of `ticket` which says that all its blocks were computed with the weights `version`."""
    return with_changes(ticket, ranks=tuple(msgspec.structs.replace(rank, weights=version) for rank in ticket.ranks))


def with_changes(ticket: Ticket, **changes: Any) -> Ticket:
    """Return a copy of `ticket` with the given `changes` of fields. RequestError names an invalid field."""
    return Ticket(**{**{name: getattr(ticket, name) for name in Ticket.__struct_fields__}, **changes})


def _compute_digests(ticket: Ticket) -> list[str]:
    """Return one text for each lease in `ticket.ranks`: three checksums of 8 hexadecimal digits each.

    The first covers the block ids, the second the tokens, the third the other fields; each also covers the lease id.
    """
    ids, tokens, rest = crc32(_pack(_IDS_OF(ticket))), crc32(_pack(_TOKENS_OF(ticket))), crc32(_pack(_REST_OF(ticket)))
    found = []
    for lease in ticket.ranks:
        name = lease.lease_id
        own_ids = crc32(_pack((name, _IDS_OF(lease))), ids)
        own_tokens = crc32(_pack((name, _RANK_OF(lease))), tokens)
        own_rest = crc32(_pack((name, _LEASE_FIELDS_OF(lease))), rest)
        found.append(f"{own_ids:08x}{own_tokens:08x}{own_rest:08x}")
    return found


_PARTS = ("block ids", "tokens or prompt", "request, ranks or lease")


def check_digests(ticket: Ticket, stated: Sequence[str], computed: Sequence[str]) -> None:
    """Raise RequestError, which says what differs, if checksums in a ticket's dict do not match the ticket.

    `stated`: checksums in the dict. `computed`: checksums of the ticket (`_compute_digests`). Both in the order of
    `ticket.ranks`.
    """
    for lease, theirs, ours in zip(ticket.ranks, stated, computed, strict=True):
        if checks.text(theirs, "ticket: digest") and len(theirs) != len(ours):
            raise RequestError(f"ticket: digest: expected {counted(len(ours), 'character')}, got {short_repr(theirs)}")
        cuts = range(0, len(theirs), OFFER_PART_CHARS)
        both = [(theirs[at : at + OFFER_PART_CHARS], ours[at : at + OFFER_PART_CHARS]) for at in cuts]
        wrong = {name: pair for name, pair in zip(_PARTS, both, strict=False) if pair[0] != pair[1]}
        if wrong:
            digests = "; ".join(f"{name}: digest ours {mine}, theirs {other}" for name, (other, mine) in wrong.items())
            raise RequestError(
                f"ticket: it differs from what (pp_rank, tp_rank) {(lease.pp_rank, lease.tp_rank)} of "
                f"{ticket.engine_id!r} has offered for request {ticket.request_id!r}: it was changed in transit, or "
                f"mixed from several tickets: {digests}"
            )


def _bounded_params(params: Mapping[str, Any], block_ids_max: int) -> tuple[Mapping[str, Any], bool]:
    """Check `params`, a ticket's dict that is not parsed yet. RequestError for too many block ids, ranks or fields.

    Return the dict, and whether `remote_block_ids` is a list of block tables, one for each group. In the returned dict,
    missing fields are taken from the copy in the request id (`core.protocol.spare`).
    """
    request_id = params.get("remote_request_id")
    if isinstance(request_id, str) and len(request_id) <= _SPARED_CHARS_MAX and SPARE_MARK in request_id:
        params = without_spare(params, request_id) if len(params) <= _FIELDS_MAX else params
    extra = params.get("kvflow")
    ranks = dict.get(extra, "ranks") if isinstance(extra, dict) else None
    ranks = ranks if isinstance(ranks, list | tuple) else ()
    if len(ranks) > RANKS_MAX:
        raise RequestError(f"ticket: it names {counted(len(ranks), 'rank')}, expected 1 to {RANKS_MAX}")
    count, nested = 0, False
    of_ranks = itertools.product(ranks, ("block_ids", "more_block_ids"))
    for part, name in ((params, "remote_block_ids"), (extra, ""), *of_ranks):
        if not isinstance(part, dict):
            continue
        if dict.__len__(part) > _FIELDS_MAX:
            raise RequestError(f"ticket: {counted(dict.__len__(part), 'field')} in one dict, at most {_FIELDS_MAX}")
        found = dict.get(part, name)
        if type(found) is list or type(found) is tuple:
            count += len(found)
            if found and type(found[0]) in (list, tuple) and len(found) <= GROUPS_MAX:
                count += sum(len(ids) for ids in found if isinstance(ids, list | tuple))
                nested = nested or part is params
        elif isinstance(found, list | tuple | set | frozenset):
            count += checks.try_call(found.__len__) or 0
    if count > block_ids_max:
        raise too_many_block_ids(count, block_ids_max)
    return params, nested


def _without_doubles(params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a ticket's dict with an int in place of each float such as 3.0. Return None if it has no such float.

    A router or gateway may turn all numbers into doubles, or some.
    """
    known = {name: params[name] for name in _NAMES if name in params}
    plain: dict[str, Any] | None = checks.try_call(partial(checks.without_doubles, known))
    return plain if plain is not None and checks.try_call(lambda: repr(plain) != repr(known)) else None


def _given_dict(given: object) -> Mapping[str, Any]:
    """Return a ticket that is given as a mapping as a dict. RequestError says what to write in place of others."""
    try:
        return checks.mapping(given, "ticket")
    except RequestError as error:
        hint = DICT_EXPECTED
        if isinstance(given, str | bytes):
            hint = "a ticket in JSON is read by json.loads"
        elif isinstance(checks.try_call(lambda: given.ticket), Ticket):  # type: ignore[attr-defined]
            hint = "pass the lease's `ticket`"
        raise RequestError(f"{error}; {hint}") from error
