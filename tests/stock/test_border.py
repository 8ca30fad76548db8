"""Values of callers for stock peers are right, or an InvalidInput names them in a line; as `tests/test_border.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from stock_engines import HASH, layout_of, stock_cache
from tests_support import PATIENT, TICKET, each

from kvflow import blocking
from kvflow.errors import InvalidInput, RequestError
from kvflow.stock import Arrival, EngineRanks, StockPeers, Terms, ask_rank
from kvflow.stock.params import make_stock_params, read_stock_params

PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
    "remote_num_tokens": 4,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "dcp_size": 1,
    "pp_size": 1,
    "remote_registration_generation": 0,
}
PEERS: dict[str, Any] = {
    "hashes": ("a" * 64,),
    "terms": Terms(),
    "tp_sizes": (1,),
    "serve_version": "0.32.0",
    "attn_backend_name": "CPU_ATTN",
    "region_names": ("l",),
    "ranks": None,
}
ANY = {"remote_blocks_expiry_time", "do_remote_decode"}
"""Parameters that are not read, so that they may be anything."""


def wrong() -> list[Any]:
    """Values that are right for hardly anything."""
    odd: list[Any] = [object(), int, 1j, 1.5, float("nan"), b"x", -1, 1 << 70]
    nested: list[Any] = [[None], (object(),), {1: 2}, [[[]]], ["\ud800"], 10**400]
    return [*odd, *nested, "\ud800", "a\n\x1b[2J" * 9, "x" * 100_000, [0.5] * 100_000]


def read(arrived: Any = None, left: Any = 0, **params: Any) -> Any:
    return read_stock_params({**PARAMS, **params}, arrived=arrived, lease_s=30.0, block_ids_max=100, left=left)


def ask(**given: Any) -> Any:
    right = {"address": "tcp://127.0.0.1:1", "pp_rank": 0, "tp_rank": 0, "timeout_s": 1.0, "engine_id": "e"}
    return asyncio.run(ask_rank(**{**right, **given}))


def show(cards: Any) -> None:
    ranks = EngineRanks()
    ranks.begin("e", 0, 1, b"shown")
    ranks.show(cards)


VERBS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "StockPeers": (lambda **given: StockPeers(**{**PEERS, **given}), set(PEERS)),
    "Terms": (Terms, {"lease_s", "router_s", "settle_s", "allowance_s"}),
    "read_stock_params": (read, {"arrived", "left", *PARAMS} - ANY),
    "make_stock_params": (
        lambda **given: make_stock_params(**{"ticket": TICKET, "version": "0.32.0", **given}),
        {"ticket"},
    ),
    "stock_params of a version": (lambda **given: make_stock_params(TICKET, **given), {"version"}),
    "ask_rank": (ask, {"address", "pp_rank", "tp_rank", "timeout_s", "engine_id"}),
    "EngineRanks.show": (show, {"cards"}),
}


def is_right(parameter: str, value: object) -> bool:
    texts = {"engine_id", "attn_backend_name", "transfer_mode"}
    return (parameter.endswith("_s") and value == 1.5) or (parameter in texts and value == "a\n\x1b[2J" * 9)


@each("verb", VERBS)
def test_what_cannot_be_is_refused_in_a_line(verb: str) -> None:
    call, parameters = VERBS[verb]
    for parameter in sorted(parameters):
        for value in wrong():
            if not is_right(parameter, value):
                with pytest.raises(InvalidInput) as caught:
                    call(**{parameter: value})
                assert str(caught.value).isprintable(), f"{parameter}: {value!a}"
                assert len(str(caught.value)) < 500, f"{parameter}: {ascii(value)[:99]}"


@each(
    "arrived",
    [Arrival("m", float("nan")), Arrival("m", float("inf")), Arrival(1, 1.0), Arrival("m", None), ("m", 1.0)],  # type: ignore[arg-type]
)
def test_a_moment_that_is_none_is_not_compared_with_any(arrived: Any) -> None:
    """A bound made of it would be passed by every time, so whatever was read later would be fresh."""
    with pytest.raises(RequestError, match="arrived"):
        read(arrived)
    assert read(Arrival("m", 1.0)).arrived == Arrival("m", 1.0)


def test_an_engine_that_is_no_asyncio_program_gives_a_stock_prompt_back() -> None:
    """No process listens there; the failed notification is no error."""
    config = replace(PATIENT, listen="tcp://127.0.0.1:0", transport="inproc", handshake_timeout_s=0.05)
    with blocking.Runtime(config, parts=[StockPeers(hashes=(HASH,))]) as runtime:
        cache = stock_cache(4)
        runtime.register_kv_caches(cache, layout_of(cache))
        assert not runtime.release_blocks(PARAMS)
