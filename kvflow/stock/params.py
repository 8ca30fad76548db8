"""`kv_transfer_params` of stock engines: read as `StockTicket`s from stock producers, and made for stock readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from kvflow import checks
from kvflow.checks import Count, counted, is_name, short_repr
from kvflow.config import ENGINE_ID_CHARS_MAX, RankCount
from kvflow.core.cache.groups import DEFAULT_NAME, GROUPS_MAX, GroupFacts, GroupKind
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.spare import SPARE_MARK, with_spare
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError
from kvflow.hosts import PORT_MAX, is_host, plain_host
from kvflow.stock.deadline import Arrival
from kvflow.stock.texts import fits_text
from kvflow.stock.versions import LINES, line_of, line_of_params

_Block: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 31)]
_REGISTRATIONS_MAX = 64


@checks.built
class StockTicket(Ticket, frozen=True, kw_only=True, dict=True):
    """A stock producer's offer of a prompt's blocks, made from its `kv_transfer_params`. It names no seals.

    Parameters lack the engine's block size, heads and groups, so these fields of a `Ticket` hold placeholders.
    `needed_blocks` returns the blocks to read, once the stock engine's first rank has answered with its metadata.
    """

    def __post_init__(self) -> None:
        """Check nothing: `read_stock_params` has checked the fields, and the groups are not known here."""

    least_line: str
    """Oldest vLLM release line that makes parameters with the keys of `params`, for example "0.29"."""
    arrived: Arrival | None = None
    """Time at which the parameters arrived at this engine; None if it was not recorded."""
    params: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The `kv_transfer_params` as they arrived, without keys that no stock producer makes."""
    left: int = 0
    """Number of tokens at the end of the prompt that are offered but not loaded. `num_tokens` does not count them."""
    generation: int = 0
    """Number of registrations of its cache that the producer had counted; 0 if it counts none (vLLM before 0.33)."""

    @cached_property
    def offered_tokens(self) -> int:
        return self.num_tokens if any(self.block_tables) else 0

    @property
    def leases_can_be_asked(self) -> bool:
        return False

    def to_params(self) -> dict[str, Any]:
        """Return the stock producer's `kv_transfer_params` as they arrived, for routers.

        Returns:
            A copy of `params`.
        """
        return dict(self.params)


@checks.built
class _Params(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a stock producer's `kv_transfer_params` that kvflow uses, with valid types and ranges."""

    do_remote_prefill: bool
    remote_block_ids: Annotated[tuple[tuple[_Block, ...], ...], Meta(min_length=1, max_length=GROUPS_MAX)]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: Annotated[int, Meta(ge=1, le=PORT_MAX)]
    remote_num_tokens: Count
    tp_size: RankCount = 1
    pp_size: Annotated[int, Meta(ge=1, le=1)] = 1
    dcp_size: Annotated[int, Meta(ge=1, le=1)] = 1
    remote_registration_generation: Count | None = None
    transfer_mode: Annotated[str, Meta(pattern=r"\Apull\Z")] = "pull"


def is_stock_params(params: Mapping[str, Any]) -> bool:
    """Return True if `params` are `kv_transfer_params` of a stock producer, and not of kvflow."""
    request_id = params.get("remote_request_id")
    ours = params.get("kvflow") is not None or (isinstance(request_id, str) and SPARE_MARK in request_id)
    return not ours and "remote_block_ids" in params


def read_stock_params(
    params: Mapping[str, Any], *, arrived: Arrival | None, lease_s: float, block_ids_max: int, left: int = 0
) -> StockTicket:
    """Return a ticket made from a stock producer's parameters, for all offered tokens except the last `left`.

    `arrived` is the time at which the parameters arrived, or None. `lease_s` is the producer's `kv_lease_duration`, and
    `block_ids_max` the largest total number of block ids. RequestError names the invalid field, or the unsupported vLLM
    version.
    """
    given = checks.mapping(params, "stock params")
    if isinstance(given.get("remote_port"), float):
        given = checks.without_doubles(given)
    line, left = line_of_params(given), checks.whole(left, "stock params: left", least=0)
    try:
        fields = msgspec.convert(given, _Params)
    except Exception as error:
        raise RequestError(f"stock params: {checks.refused_value_text(error, given)}") from error
    tables, num_tokens, host = fields.remote_block_ids, fields.remote_num_tokens, plain_host(fields.remote_host)
    if (found := sum(map(len, tables))) > block_ids_max:
        most = f"at most {block_ids_max} (limits.block_ids_max)"
        raise RequestError(f"stock params: remote_block_ids: {counted(found, 'block id')}, {most}")
    for name, value, fits in (
        ("do_remote_prefill", fields.do_remote_prefill, fields.do_remote_prefill),
        ("remote_engine_id", fields.remote_engine_id, is_name(fields.remote_engine_id, ENGINE_ID_CHARS_MAX)),
        ("remote_request_id", fields.remote_request_id, fits_text(fields.remote_request_id)),
        ("remote_host", fields.remote_host, host is not None and is_host(host)),
        ("remote_num_tokens, of some blocks,", num_tokens, num_tokens or not found),
    ):
        if not fits:
            raise RequestError(f"stock params: {name} cannot be {short_repr(value)}")
    return StockTicket(
        engine_id=fields.remote_engine_id,
        request_id=fields.remote_request_id,
        block_ids=tables[0],
        more_block_ids=tables[1:],
        num_tokens=max(num_tokens - left, 0),
        ttl_s=lease_s,
        tp_size=fields.tp_size,
        pp_size=1,
        dp_rank=0,
        block_size=1,
        kv_heads=1,
        model_kv_heads=0,
        fixed_ports=False,
        traceparent="",
        prompt_digest="",
        ranks=(RankLease.without_lease_id(Rank(0, 0, 0), "stock", str(host), fields.remote_port),),
        least_line=line.version,
        arrived=_checked_arrival(arrived),
        params={key: value for key, value in given.items() if key in LINES[-1].params},
        left=min(left, num_tokens),
        generation=fields.remote_registration_generation or 0,
    )


def needed_blocks(ticket: StockTicket, groups: Sequence[GroupFacts]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of the offered blocks that hold the ticket's tokens, one tuple for each of the engine's `groups`.

    In a ticket, each group's table ends with the block of the prompt's last token. The table begins with the prompt's
    first block; if the group has a window, blocks before the window may be missing. Block id 0 (null) stands for a
    block that vLLM has freed. RequestError if a table has an impossible length, or if a needed block is null.
    """
    what = f"stock request {ticket.request_id!r}"
    if len(ticket.block_tables) != len(groups):
        tables = f"remote_block_ids has {counted(len(ticket.block_tables), 'table')}"
        raise RequestError(f"{what}: groups: ours {len(groups)}, {tables}")
    found = []
    for facts, ids in zip(groups, ticket.block_tables, strict=True):
        size, tokens = facts.block_size, ticket.num_tokens
        first, end = facts.first_needed(tokens) // size, -(-(tokens + ticket.left) // size)
        kept = _needed_ids(ticket, facts, ids)
        if kept is None:
            filled = f"{counted(end, 'block')} of {size} for {counted(tokens + ticket.left, 'token')}"
            needs = f"there are {filled}, needed from block {first} on"
            raise RequestError(f"{what}: {counted(len(ids), 'block id')} of group {facts.name!r}, but {needs}")
        if (freed := freed_block(ticket, facts, ids)) is not None:
            raise RequestError(f"{what}: group {facts.name!r}: block {freed} is null, but needed")
        found.append(tuple(kept))
    return tuple(found)


def freed_block(ticket: StockTicket, facts: GroupFacts, ids: Sequence[int]) -> int | None:
    """Return the index, among the prompt's blocks, of the first needed block that the producer has freed; None if none.

    `ids` is the ticket's block table for the group `facts`. Also return None if the length of `ids` does not fit the
    group's block size: `needed_blocks` raises for that.
    """
    kept = None if facts.whole else _needed_ids(ticket, facts, ids)
    if kept is None or 0 not in kept:
        return None
    return facts.first_needed(ticket.num_tokens) // facts.block_size + kept.index(0)


def _needed_ids(ticket: StockTicket, facts: GroupFacts, ids: Sequence[int]) -> Sequence[int] | None:
    """Return the slice of `ids` with the blocks that the ticket's tokens need.

    `ids` is the ticket's block table for the group `facts`, and ends with the block of the prompt's last token. Return
    None if the number of `ids` cannot be right for the prompt's number of tokens.
    """
    size, tokens = facts.block_size, ticket.num_tokens
    first, behind = facts.first_needed(tokens) // size, -(-(tokens + ticket.left) // size) - len(ids)
    if not 0 <= behind <= first or (facts.whole and behind):
        return None
    return ids[first - behind : -(-tokens // size) - behind]


class Registrations:
    """Counts the registrations of an engine's cache, by the incarnations that the engine's tickets name.

    A stock reader (vLLM 0.33) asks for the metadata again when the number in its parameters has risen.
    """

    def __init__(self) -> None:
        self._count = 0
        self._numbers = BoundedMap[tuple[str, ...], int](_REGISTRATIONS_MAX)

    def number_of(self, ticket: Ticket) -> int:
        """Return the number of the registration that `ticket` names; the first registration has number 1."""
        incarnations = tuple(rank.incarnation for rank in ticket.ranks)
        if incarnations not in self._numbers:
            self._count += 1
            self._numbers[incarnations] = self._count
        return self._numbers[incarnations]


def make_stock_params(ticket: Ticket, version: str, *, left: int = 0, generation: int = 0) -> dict[str, Any]:
    """Return `ticket` as the `kv_transfer_params` that a stock producer with vLLM `version` would make.

    The parameters also have the key "kvflow", which shows kvflow's own readers that this engine is no stock engine.
    Some routers drop that key. So the request id ends with a copy of the key's value; to a stock reader the longer id
    is an ordinary id.

    The last `left` tokens of the prompt are not offered, but a stock reader allocates blocks for all tokens, and
    computes the last token itself. If these tokens need further blocks, each block table is filled up with copies of
    its last offered block id. "kvflow" holds the number of copies (`padding`).

    `generation` is the number of the cache's registration (`Registrations`). A stock reader that knows a smaller number
    connects again.

    RequestError if a stock reader cannot read what the ticket offers.
    """
    checks.instance(ticket, Ticket, "stock params: ticket")
    line = line_of(checks.text(version, "stock params: version"))
    left = checks.whole(left, "stock params: left", least=0)
    generation = checks.whole(generation, "stock params: generation", least=0)
    if not fits_text(ticket.request_id):
        raise RequestError(
            f"ticket: a stock reader's notification cannot contain request id {ticket.request_id[:80]!a}"
        )
    if ticket.pp_size != 1:
        raise RequestError(f"ticket: pp_size {ticket.pp_size}: stock readers (vLLM's pull mode) read from one stage")
    if ticket.first.block_ids is not None:
        raise RequestError(
            "ticket: each rank offers its own host buffers, stock readers take one block table for all ranks"
        )
    groups, tables, num_tokens = _groups(ticket), [], ticket.num_tokens + left
    if len(groups) != len(ticket.block_tables):
        given = counted(len(ticket.block_tables), "block table")
        raise RequestError(f"ticket: {counted(len(groups), 'group')}, but {given}")
    padding = -(-num_tokens // ticket.block_size) + ticket.num_tokens // -ticket.block_size
    for facts, ids in zip(groups, ticket.block_tables, strict=True):
        if facts.kind is GroupKind.STATE or facts.block_size != ticket.block_size:
            what = f"{facts.kind} with blocks of {facts.block_size}"
            raise RequestError(
                f"ticket: group {facts.name!r}: {what}: stock readers are served only attention, with one block size"
            )
        needed = facts.blocks_needed(ticket.num_tokens)
        if len(ids) != needed or (padding and not ids):
            wanted = f"num_tokens {ticket.num_tokens} needs {needed} of {facts.block_size}"
            what = f"{counted(len(ids), 'block')}, but {wanted}"
            raise RequestError(f"ticket: group {facts.name!r}: {what}: a stock reader counts them from the end")
        tables.append([*ids, *ids[-1:] * padding])
    params = ticket.to_params()
    values: dict[str, Any] = {
        **params,
        "remote_block_ids": tables,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "dcp_size": 1,
        "pp_size": 1,
        "remote_registration_generation": generation,
    }
    own = {**params["kvflow"], **({"padding": padding} if padding else {})}
    return with_spare({**{name: values[name] for name in line.params}, "kvflow": own})


def _groups(ticket: Ticket) -> tuple[GroupFacts, ...]:
    return ticket.groups or (GroupFacts(name=DEFAULT_NAME, block_size=ticket.block_size),)


def _checked_arrival(value: object) -> Arrival | None:
    """Return `value` if it is None or a valid Arrival, else raise RequestError: any caller may have made it."""
    if value is not None:
        fits = isinstance(value, Arrival) and type(value.machine) is str and type(value.now_s) in (int, float)
        if not fits or not abs(value.now_s) <= checks.SECONDS_MAX:  # type: ignore[attr-defined]
            raise RequestError(f"stock params: arrived: expected an Arrival, got {short_repr(value)}")
    return value  # type: ignore[return-value]
