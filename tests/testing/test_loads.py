"""`watch_loads` finds loads that go on without a waiter, and no other loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvflow import Config, Lease, Load, LoadRequest, ServeRequest
from kvflow.errors import PrefillFailed
from kvflow.testing import InprocCluster, TestEngine, watch_loads
from tests.support.tests_support import each, in_virtual_time, limited, lose_errors

BLOCKS, TAKEN = [3, 4], [0, 1]

EAGER = limited(Config(engine_id="any", load_deadline_s=60.0), slice_bytes_max=64)
"""So that computed tokens of a small prompt are read at once."""

Use = Callable[[Load], Coroutine[Any, Any, None]]


What = Callable[[asyncio.Task[None], Lease], object]


async def play(use: Use, what: What = lambda task, lease: None) -> None:
    """An engine `use`s a load of a prompt that is half computed; `what` happens; then the rest is computed."""
    cluster = InprocCluster()
    async with cluster.engine("prefill") as prefill, cluster.engine("decode", config=EAGER) as decode:
        with watch_loads(decode.runtime) as watch:
            lease = prefill.runtime.serve_blocks(ServeRequest("req", BLOCKS, num_tokens=8, computed_tokens=0))
            load = begin(decode, lease)
            task = asyncio.create_task(use(load))
            await asyncio.sleep(1.0)
            lease.advance(4)
            await asyncio.sleep(1.0)
            what(task, lease)
            await asyncio.sleep(0.1)
            if not task.cancelling():
                watch.assert_none_forgotten()
            lease.advance(8)
            await lease
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None
            await load.settled()


def begin(decode: TestEngine, lease: Lease) -> Load:
    return decode.runtime.start_load(LoadRequest("req", lease.ticket, TAKEN))


async def awaits(load: Load) -> None:
    await load


async def shields(load: Load) -> None:
    await asyncio.shield(load)


async def iterates(load: Load) -> None:
    async for _ in load:
        pass


async def polls(load: Load) -> None:
    while not load.done:
        await asyncio.sleep(0.01)
    await load


async def looks_after_itself(load: Load) -> None:
    try:
        async for _ in load:
            await asyncio.sleep(1000.0)
    finally:
        load.cancel()
        await load.settled()


async def forgets(load: Load) -> None:
    try:
        async for _ in load:
            await asyncio.sleep(1000.0)  # a step of its own, with the part that is there
    finally:
        await load.settled()


async def stops_midway(load: Load) -> None:
    async for _ in load:
        break


async def only_settles(load: Load) -> None:
    await load.settled()


@each("use", [awaits, shields, iterates])
@in_virtual_time
async def test_who_waits_to_the_end_is_not_accused(use: Use) -> None:
    async def fails(load: Load) -> None:
        with pytest.raises(PrefillFailed):
            await use(load)

    await play(use)
    await play(fails, lambda _, lease: lease.fail())


@each("use", [awaits, shields, iterates, looks_after_itself])
@in_virtual_time
async def test_who_is_cancelled_and_ends_the_load_is_not_accused(use: Use) -> None:
    await play(use, lambda task, _: task.cancel())


@in_virtual_time
async def test_who_polls_takes_the_report_in_the_end() -> None:
    cluster = InprocCluster()
    async with cluster.engine("prefill") as prefill, cluster.engine("decode") as decode:
        with watch_loads(decode.runtime):
            await polls(begin(decode, prefill.runtime.serve_blocks(ServeRequest("req", BLOCKS, num_tokens=8))))


@each("use", [forgets, stops_midway, only_settles])
@in_virtual_time
async def test_who_forgets_a_load_is_found(use: Use) -> None:
    lose_errors()
    expected = r"'req'.*test_loads.py:\d+ \(begin\), (went on|is under way).*nobody waits"
    with pytest.raises(AssertionError, match=expected):
        await play(use, lambda task, _: task.cancel())


@in_virtual_time
async def test_a_load_that_is_under_way_still_and_an_error_that_comes_of_it() -> None:
    cluster = InprocCluster()
    async with cluster.engine("prefill") as prefill, cluster.engine("decode") as decode:
        lease = prefill.runtime.serve_blocks(ServeRequest("req", BLOCKS, num_tokens=8, computed_tokens=0))
        with pytest.raises(AssertionError, match="is under way") as caught, watch_loads(decode.runtime) as watch:
            load = begin(decode, lease)
            assert watch.forgotten == (load,)
            await asyncio.sleep(1.0)
            raise ValueError("no more")
        assert isinstance(caught.value.__cause__, ValueError)
        load.cancel()
        await load.settled()
        lease.revoke()


@in_virtual_time
async def test_a_load_that_was_refused_keeps_nothing() -> None:
    lose_errors()
    async with InprocCluster().engine("decode") as decode:
        with watch_loads(decode.runtime):
            assert decode.runtime.start_load(LoadRequest("req", {}, TAKEN)).done
