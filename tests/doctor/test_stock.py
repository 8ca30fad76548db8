"""`kvflow doctor --stock`: what an engine with vLLM's own connector shows, and what would not work."""

from __future__ import annotations

from typing import Any

import pytest
from stock_engines import HASH, stock_producer

from kvflow.doctor.findings import Status
from kvflow.doctor.stock_engine import examine_stock


async def statuses(address: str) -> dict[str, Status]:
    return {finding.name: finding.status for finding in await examine_stock(address, 60.0)}


async def test_an_engine_says_who_it_is() -> None:
    async with stock_producer() as producer:
        engine, compatibility, cache, reading = await examine_stock(producer.address, 60.0)
        assert producer.asked == [(0, 0)], "the one question that every listener survives"
    assert "stock-p" in engine.found
    assert "0.32 to 0.33" in engine.found
    assert compatibility.found == HASH
    assert "3 regions of 16 blocks of 4 tokens, 512 bytes each, LBHNC, CPU_ATTN, DRAM" in cache.found
    assert reading.status is Status.OK


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"ssm_sizes": (1, 2)}, Status.FAIL),
        ({"kv_cache_layout": "BLHNC"}, Status.FAIL),
        ({"dcp_size": 2}, Status.FAIL),
        ({"something_new": 1}, Status.WARN),
    ],
)
async def test_what_would_not_work_is_said(change: dict[str, Any], status: Status) -> None:
    async with stock_producer() as producer:
        producer.change = change
        assert (await statuses(producer.address))["reading it"] is status


async def test_what_is_no_stock_engine_is_said() -> None:
    assert await statuses("tcp://127.0.0.1:1?") == {"stock engine": Status.FAIL}
    async with stock_producer() as producer:
        producer.change = {"num_blocks": -1}
        assert await statuses(producer.address) == {"stock engine": Status.FAIL}
