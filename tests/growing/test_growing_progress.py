"""`async for progress in load`: tokens as they land, vouched for, in prompt order, until the load has ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvflow import Lease, LeaseOutcome, Load, LoadRequest, ServeRequest, blocking
from kvflow.errors import LeaseExpired, PrefillFailed, RequestError
from kvflow.runtime.load.requests import Progress
from kvflow.testing import (
    CacheSize,
    InprocCluster,
    InprocPair,
    NetworkConditions,
    block_by_block,
    inproc_pair,
    nixl_pair,
)
from tests.support.growing_pairs import BLOCKS, CONFIG, TAKEN, opened, pair_of, wanted
from tests.support.tests_support import PATIENT, WAIT_S, each, in_virtual_time


async def follow(load: Load, seen: list[int]) -> None:
    async for progress in load:
        seen.append(progress.tokens)


def grow(pair: InprocPair, lease: Lease, tokens: int) -> None:
    pair.producer.cache.fill(BLOCKS[: -(-tokens // 4)])
    lease.advance(tokens)


@each("staging", ["never", "always"])
@in_virtual_time
async def test_tokens_as_they_land(staging: str) -> None:
    async with pair_of(staging) as pair:
        lease, seen = opened(pair), list[int]()
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        following = [asyncio.create_task(follow(load, seen)) for _ in range(2)]
        for tokens in (3, 4, 9, 13, 16):
            grow(pair, lease, tokens)
            await asyncio.sleep(0.1)
            assert set(seen) <= {4, 8, 12, 16}, "whole blocks"
            assert max(seen, default=0) == tokens // 4 * 4
        await asyncio.gather(*following)
        assert (await load).tokens == 16
        assert sorted(seen) == [4, 4, 8, 8, 12, 12, 16, 16]
        assert [one async for one in load] == [Progress(16, 16)], "what is over has a last progress"


@pytest.mark.parametrize("transport", ["inproc", pytest.param("nixl", marks=pytest.mark.nixl)])
async def test_a_small_cache_grows_block_by_block_if_it_is_told_to(transport: str) -> None:
    """Each step waits for its tokens to land. With reads of the usual size only the last step would."""
    config = block_by_block(replace(PATIENT, listen="tcp://127.0.0.1:0"))
    async with nixl_pair(config=config) if transport == "nixl" else inproc_pair(config=config) as pair:
        lease, seen = opened(pair), list[int]()
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        lease.advance(4)
        async with asyncio.timeout(WAIT_S):
            async for progress in load:
                seen.append(progress.tokens)
                lease.advance(min(progress.tokens + 4, 16))
        assert seen == [4, 8, 12, 16]


@in_virtual_time
async def test_a_part_of_a_cached_prompt_counts_from_its_own_first_token() -> None:
    async with pair_of() as pair:
        lease, seen = opened(pair), list[int]()
        load = pair.consumer.runtime.start_load(wanted(pair, lease, block_ids=TAKEN[2:], cached_tokens=8))
        following = asyncio.create_task(follow(load, seen))
        for tokens in (8, 12, 16):
            grow(pair, lease, tokens)
            await asyncio.sleep(0.1)
        await following
        assert (seen, (await load).tokens) == ([4, 8], 8)


@in_virtual_time
async def test_nothing_is_told_that_no_look_vouches_for() -> None:
    """Reads take longer than half of the hold: tokens are reported once a later look has found the lease open."""
    world = InprocCluster(seed=1, conditions=NetworkConditions(read_s=0.2)).world()
    async with inproc_pair(config=CONFIG, producer_world=world, consumer_world=world) as pair:
        lease, seen = opened(pair), list[int]()
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        following = asyncio.create_task(follow(load, seen))
        grow(pair, lease, 8)
        await asyncio.sleep(3.0)
        assert seen[-1:] == [8]
        lease.revoke()
        with pytest.raises(LeaseExpired):
            await following
        assert max(seen) == 8


@in_virtual_time
async def test_it_raises_what_the_load_raises() -> None:
    async with pair_of() as pair:
        lease, seen = opened(pair), list[int]()
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        following = [asyncio.create_task(follow(load, seen)) for _ in range(2)]
        grow(pair, lease, 8)
        await asyncio.sleep(0.1)
        lease.fail()
        for one in following:
            with pytest.raises(PrefillFailed):
                await one
        with pytest.raises(PrefillFailed):
            await follow(load, seen)
        assert set(seen) == {4, 8} or set(seen) == {8}


@in_virtual_time
async def test_who_iterates_may_stop_midway() -> None:
    async with pair_of() as pair:
        lease = opened(pair)
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        grow(pair, lease, 4)
        async for progress in load:
            assert progress == Progress(4, 16)
            break
        looking_on = asyncio.create_task(load.progressed(4))
        await asyncio.sleep(0.01)
        looking_on.cancel()
        await asyncio.wait([looking_on])
        assert not load.done
        grow(pair, lease, 16)
        assert (await load).tokens == 16


@each("computed", [0, 4])
@each("held", [False, True])
@in_virtual_time
async def test_cancelling_who_iterates_cancels_the_load_as_who_awaits_it(computed: int, held: bool) -> None:
    """It is over when the task is, which takes as long as reads that are posted, or Config.cancel_grace_s."""

    async def awaits(load: Load) -> None:
        await load

    async def iterates(load: Load) -> None:
        await follow(load, [])

    async with pair_of() as pair:
        took_s = set[float]()
        for wait in (awaits, iterates):
            lease = opened(pair)
            load = pair.consumer.runtime.start_load(wanted(pair, lease))
            pair.consumer.transport.faults.hold = held
            waiting = asyncio.create_task(wait(load))
            if computed:
                grow(pair, lease, computed)
            await asyncio.sleep(2.0)
            begun_s = asyncio.get_running_loop().time()
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            assert load.done
            took_s.add(asyncio.get_running_loop().time() - begun_s)
            pair.consumer.transport.faults.hold = False
            pair.consumer.transport.perform()
            await load.settled()
            statistics = pair.consumer.runtime.statistics().loading
            assert statistics is not None
            assert (statistics.succeeded, statistics.open_loads) == (0, 0)
            await lease.revoke()
        assert max(took_s) - min(took_s) < 0.1


@in_virtual_time
async def test_a_load_that_is_cancelled_and_one_that_was_never_begun() -> None:
    async with pair_of() as pair:
        lease = opened(pair)
        for moment_s in (None, 0.1):
            load = pair.consumer.runtime.start_load(wanted(pair, lease))
            following = asyncio.create_task(follow(load, []))
            if moment_s:
                await asyncio.sleep(moment_s)
            load.cancel()
            await asyncio.wait([following])
            assert following.cancelled()
        lease.revoke()


@in_virtual_time
async def test_loads_of_leases_that_do_not_grow_and_of_nothing() -> None:
    async with pair_of() as pair:
        lease = pair.offer(BLOCKS)
        load = pair.consumer.runtime.start_load(pair.wanted(lease, TAKEN))
        assert [one async for one in load] == [Progress(16, 16)]
        nothing = pair.producer.runtime.serve_blocks(ServeRequest("nothing", [], num_tokens=3))
        load = pair.consumer.runtime.start_load(replace(pair.wanted(nothing, [])))
        assert [one async for one in load] == [Progress(0, 0)]


@pytest.mark.nixl
def test_in_a_callers_thread() -> None:
    caches = {name: CacheSize().make(name) for name in ("prefill", "decode")}
    config = replace(CONFIG, listen="tcp://127.0.0.1:0")
    with (
        blocking.Runtime(replace(config, engine_id="prefill")) as producer,
        blocking.Runtime(replace(config, engine_id="decode")) as consumer,
    ):
        for runtime, (kv_caches, cache) in zip((producer, consumer), caches.values(), strict=True):
            runtime.register_kv_caches(kv_caches, cache.layout)
        lease = producer.serve_blocks(ServeRequest("req", BLOCKS, num_tokens=16, ttl_s=60.0, computed_tokens=4))
        load = consumer.start_load(LoadRequest("req", lease.ticket, TAKEN))
        steps = iter(load)
        assert next(steps) == Progress(4, 16)
        lease.advance(16)
        assert [one.tokens for one in steps][-1:] == [16]
        assert load.result(WAIT_S).tokens == 16
        with pytest.raises(RequestError, match="16 are computed already"):
            lease.advance(15)
        extended = producer.serve_blocks(
            ServeRequest("more", BLOCKS[:1], num_tokens=16, ttl_s=60.0, computed_tokens=0, payload=True)
        )
        with pytest.raises(RequestError, match="its blocks hold 4"):
            extended.advance(16)
        extended.extend(BLOCKS[1:])
        assert extended.block_ids == tuple(BLOCKS)
        extended.complete(b"token")
        with pytest.raises(RequestError, match="another one of 5 bytes was given before"):
            extended.complete(b"other")
        assert extended.fail("out of memory").wait(WAIT_S) is LeaseOutcome.FAILED
