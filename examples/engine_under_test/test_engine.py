"""Tests of the toy engine with `kvflow.testing`: a cluster in one process, faults, virtual time, accounting of blocks.

Run them with `pytest examples/engine_under_test`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from toy_engine import Engine

from kvflow.errors import LeaseExpired
from kvflow.testing import (
    InprocCluster,
    InprocPair,
    PatternCache,
    assert_closed,
    assert_conserved,
    assert_quiet,
    run_virtual,
    watch_blocks,
    watch_loads,
    watch_offers,
)

PROMPT = [11, 12, 13, 14, 15, 16]


@asynccontextmanager
async def engines(cluster: InprocCluster) -> AsyncIterator[tuple[Engine, Engine]]:
    """Yield a prefill and a decode engine. Check that offered blocks do not change and that all blocks are freed."""
    prefill, decode = Engine("prefill", world=cluster.world()), Engine("decode", world=cluster.world())
    with watched(prefill), watched(decode):
        async with prefill, decode:
            yield prefill, decode
    for engine in (prefill, decode):
        assert_closed(engine.runtime.statistics())


@contextmanager
def watched(engine: Engine) -> Iterator[None]:
    cache = PatternCache(engine.runtime.config.engine_id, engine.kv_caches, engine.layout)
    blocks = watch_blocks(engine.runtime, engine, take="take", free="give_back", free_blocks=lambda: engine.free)
    with watch_offers(engine.runtime, cache), blocks, watch_loads(engine.runtime):
        yield


async def test_a_prompt_is_handed_over(kvflow_cluster: InprocCluster) -> None:
    async with engines(kvflow_cluster) as (prefill, decode):
        ticket = prefill.prefill("request", PROMPT)
        assert_conserved(prefill.runtime, prefill.leases)
        assert await decode.decode("request", ticket, len(PROMPT)) == PROMPT


def test_a_prompt_that_nobody_reads_is_given_up(kvflow_cluster: InprocCluster) -> None:
    """The lease lasts five seconds, which take no time in virtual time."""

    async def main() -> None:
        async with engines(kvflow_cluster) as (prefill, decode):
            ticket = prefill.prefill("request", PROMPT)
            assert len(prefill.free) == prefill.num_blocks - 2
            await asyncio.sleep(6.0)
            assert len(prefill.free) == prefill.num_blocks
            with pytest.raises(LeaseExpired):
                await decode.decode("request", ticket, len(PROMPT))

    run_virtual(main())


def test_a_cancelled_decode_reuses_no_block_that_may_still_be_written(kvflow_cluster: InprocCluster) -> None:
    async def main() -> None:
        async with engines(kvflow_cluster) as (prefill, decode):
            ticket = prefill.prefill("request", PROMPT)
            transport = kvflow_cluster.transport("decode")
            transport.faults.hold = True  # posted reads do not end until the test says so
            decoding = asyncio.create_task(decode.decode("request", ticket, len(PROMPT)))
            await asyncio.sleep(1.0)
            decoding.cancel()
            await asyncio.sleep(1.0)
            assert decoding.cancelled()
            assert len(prefill.free) == prefill.num_blocks, "kept for nobody"
            assert len(decode.free) == decode.num_blocks - 2, "freed under a running read"
            transport.perform()
            await asyncio.sleep(0.1)
            assert_quiet(decode.runtime.statistics())
            assert len(decode.free) == decode.num_blocks

    run_virtual(main())


def test_a_lost_message_costs_time_and_no_blocks(kvflow_cluster: InprocCluster) -> None:
    async def main() -> None:
        async with engines(kvflow_cluster) as (prefill, decode):
            kvflow_cluster.transport("decode").faults.drop_notifications = True
            ticket = prefill.prefill("request", PROMPT)
            assert await decode.decode("request", ticket, len(PROMPT)) == PROMPT
            assert len(prefill.free) < prefill.num_blocks
            await asyncio.sleep(6.0)
            assert len(prefill.free) == prefill.num_blocks

    run_virtual(main())


async def test_the_pair_has_everything_for_a_single_hand_over(kvflow_pair: InprocPair) -> None:
    lease = kvflow_pair.offer([3, 4])
    await kvflow_pair.consumer.runtime.load_blocks(kvflow_pair.wanted(lease, [0, 1]))
    kvflow_pair.assert_loaded([0, 1], [3, 4])
    await lease
