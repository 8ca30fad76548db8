"""The `kv_transfer_params` of stock engines: read as a ticket of their own kind, and made for their readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from kvflow import checks
from kvflow.checks import encodes, is_name, shown
from kvflow.config import ENGINE_ID_CHARS_MAX, PORT_MAX, RANKS_MAX, is_host
from kvflow.core.protocol.spare import MARK
from kvflow.core.protocol.ticket import RankLease, Ticket
from kvflow.core.stock.deadline import Arrival
from kvflow.core.stock.texts import can_be_told
from kvflow.core.stock.versions import UnknownLine, least_line, line_of
from kvflow.errors import RequestError
from kvflow.limits import REQUEST_ID_CHARS_MAX

_GROUPS_MAX = 64
_BLOCK_MAX = (1 << 31) - 1


class StockTicket(Ticket, frozen=True, kw_only=True, dict=True):
    """What a stock producer's parameters offer: a prompt's blocks, and nothing that could prove them.

    `block_ids` count vLLM's own blocks, of which a rank may hold several as one. Its engine's block size and heads, as
    a `Ticket` has them, are not known before a rank has been asked.
    """

    least_line: str
    """The first release line that makes such parameters."""
    arrived: Arrival | None = None
    """When they came to this engine; None if nobody noted that."""
    params: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """As they came."""

    @cached_property
    def offered_tokens(self) -> int:
        return self.num_tokens if any(self.block_tables) else 0

    def to_params(self) -> dict[str, Any]:
        return dict(self.params)


def is_stock(params: Mapping[str, Any]) -> bool:
    """Whether a request's parameters ask for a load, and none of a kvflow engine's."""
    request_id = params.get("remote_request_id")
    ours = "kvflow" in params or (isinstance(request_id, str) and MARK in request_id)
    return not ours and "remote_block_ids" in params


def read_stock(
    params: Mapping[str, Any], *, arrived: Arrival | None, lease_s: float, block_ids_max: int
) -> StockTicket:
    """The ticket that a stock producer's parameters are. RequestError names what is wrong, or not spoken with."""
    given = checks.mapping(params, "stock params")
    try:
        line = least_line([key for key in given if isinstance(key, str)])
    except UnknownLine as error:
        raise RequestError(f"stock params: {error}") from error
    if given.get("do_remote_prefill") is not True:
        raise RequestError("stock params: do_remote_prefill is not true: they do not ask for a load")
    mode = given.get("transfer_mode", "pull")
    if mode != "pull":
        raise RequestError(f"stock params: transfer_mode {shown(mode)}: blocks are pulled")
    for name in ("dcp_size", "pp_size"):
        if (size := given.get(name, 1)) != 1:
            raise RequestError(f"stock params: {name} {shown(size)}: only 1 is read from")
    tables = _tables(given.get("remote_block_ids"), block_ids_max)
    host, port = given.get("remote_host"), checks.whole(given.get("remote_port"), "stock params: remote_port", least=1)
    if not isinstance(host, str) or not is_host(host) or port > PORT_MAX:
        raise RequestError(f"stock params: remote_host {shown(host)}, remote_port {port}: no address")
    num_tokens = checks.whole(given.get("remote_num_tokens"), "stock params: remote_num_tokens", least=0)
    if any(tables) and not num_tokens:
        raise RequestError("stock params: remote_num_tokens is 0, but there are blocks")
    rank = RankLease(
        pp_rank=0, tp_rank=0, lease_id="", seal_index=0, incarnation="stock", expires_s=0.0, host=host, port=port
    )
    return StockTicket(
        engine_id=_engine_id(given.get("remote_engine_id")),
        request_id=_request_id(given.get("remote_request_id")),
        block_ids=tables[0],
        more_block_ids=tables[1:],
        num_tokens=num_tokens,
        ttl_s=lease_s,
        tp_size=checks.whole(given.get("tp_size", 1), "stock params: tp_size", least=1, most=RANKS_MAX),
        pp_size=1,
        dp_rank=0,
        block_size=1,
        kv_heads=1,
        model_kv_heads=0,
        fixed_ports=False,
        traceparent="",
        prompt_digest="",
        ranks=(rank,),
        least_line=line.version,
        arrived=arrived,
        params=_kept(given),
    )


def stock_params(ticket: Ticket, version: str) -> dict[str, Any]:
    """A ticket's dict as readers of both kinds take it: what a stock producer of that version answers, and "kvflow".

    Block ids are a table in a list, and of the whole prompt. RequestError for a ticket that a stock reader would die
    of, or read wrongly.
    """
    line = line_of(version)
    if not can_be_told(ticket.request_id):
        raise RequestError(f"ticket: no stock reader can name the request {ticket.request_id[:80]!a}")
    if ticket.more_block_ids or ticket.groups or ticket.pp_size != 1:
        raise RequestError("ticket: stock readers are served one group of full attention, of one pipeline stage")
    blocks = -(-ticket.num_tokens // ticket.block_size)
    if len(ticket.block_ids) != blocks or ticket.first.block_ids is not None:
        what = f"{len(ticket.block_ids)} blocks, but {ticket.num_tokens} tokens fill {blocks} of {ticket.block_size}"
        raise RequestError(f"ticket: {what}: a stock reader counts them from the end")
    params = ticket.to_params()
    values: dict[str, Any] = {
        **params,
        "remote_block_ids": [list(ticket.block_ids)],
        "remote_num_tokens": ticket.num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "dcp_size": 1,
        "pp_size": 1,
        "remote_registration_generation": 0,
    }
    return {**{name: values[name] for name in line.params}, "kvflow": params["kvflow"]}


def _engine_id(value: object) -> str:
    if not is_name(value, ENGINE_ID_CHARS_MAX):
        raise RequestError(f"stock params: remote_engine_id {shown(value)} is no name")
    return str(value)


def _request_id(value: object) -> str:
    text = checks.text(value, "stock params: remote_request_id", most=REQUEST_ID_CHARS_MAX)
    if not encodes(text) or not can_be_told(text):
        raise RequestError(f"stock params: remote_request_id {shown(text)}: no notification can name it")
    return text


def _tables(value: object, block_ids_max: int) -> tuple[tuple[int, ...], ...]:
    """Block ids by group. RequestError for flat ones, which are of other versions, and for too many."""
    what = "stock params: remote_block_ids"
    if not isinstance(value, list | tuple) or not 0 < len(value) <= _GROUPS_MAX:
        raise RequestError(f"{what}: expected a list of a list for each group, got {shown(value)}")
    if not all(isinstance(ids, list | tuple) for ids in value):
        raise RequestError(f"{what}: expected a list for each group, got {shown(value)}")
    tables: Sequence[Sequence[Any]] = value
    if (found := sum(map(len, tables))) > block_ids_max:
        raise RequestError(f"{what}: {found} block ids, at most {block_ids_max}")
    for ids in tables:
        for number in ids:
            if type(number) is not int or not 0 <= number <= _BLOCK_MAX:
                raise RequestError(f"{what}: {shown(number)} is no block")
    return tuple(map(tuple, tables))


def _kept(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the parameters, to give them on."""
    known = {*line_of("0.33").params}
    return {key: value for key, value in given.items() if key in known}


def stamped(ticket: StockTicket, arrived: Arrival) -> StockTicket:
    """The same ticket, with the moment at which it came."""
    return msgspec.structs.replace(ticket, arrived=arrived)
