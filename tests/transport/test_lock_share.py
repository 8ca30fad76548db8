"""An event loop that is never idle lets its transport's thread have Python's lock (docs/decisions/0030)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from tests_support import WAIT_S, in_virtual_time

from kvflow.transport.nixl.lock_share import LockShare, Pace
from kvflow.transport.nixl.owner import OwnerThread

_TURN_S = 1e-4


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the loop has slept, by its own clock, which is that of the threads, too."""
    times: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(time, "sleep", lambda _: times.append(asyncio.get_running_loop().time()))
    return times


@contextlib.asynccontextmanager
async def share_of(pace: Pace) -> AsyncIterator[LockShare]:
    share = LockShare(pace)
    yield share
    share.close()


@in_virtual_time
async def test_a_thread_that_does_not_get_on_is_given_the_lock_until_it_does(slept: list[float]) -> None:
    pace = Pace()
    async with share_of(pace):
        await asyncio.sleep(0.02)
        assert len(slept) >= 10
        pace.turns, pace.asleep, pace.due_s = 1, True, asyncio.get_running_loop().time() + 60
        slept.clear()
        await asyncio.sleep(50)
        assert slept == []
        await asyncio.sleep(11)
        assert slept, "it was due"


@in_virtual_time
async def test_a_thread_in_a_call_that_takes_long_is_left_alone(slept: list[float]) -> None:
    pace = Pace()
    begun_s = asyncio.get_running_loop().time()
    pace.due_s = begun_s + 0.5
    async with share_of(pace) as share:
        share.called_up()
        await asyncio.sleep(1)
    assert slept[0] > begun_s + 0.5


@in_virtual_time
async def test_a_thread_that_was_called_up_does_not_sleep_on(slept: list[float]) -> None:
    pace = Pace()
    pace.asleep, pace.due_s = True, asyncio.get_running_loop().time() + 60
    async with share_of(pace) as share:
        await asyncio.sleep(5)
        assert slept == []
        share.called_up()
        await asyncio.sleep(0.01)
        assert slept, "in milliseconds, however rarely it was looked at before"
        pace.turns += 1
        slept.clear()
        await asyncio.sleep(5)
        assert slept == []


@in_virtual_time
async def test_a_loop_does_not_sleep_for_ever_for_a_thread_that_hangs(slept: list[float]) -> None:
    pace = Pace()
    async with share_of(pace):
        await asyncio.sleep(10)
        assert 64 < len(slept) < 64 + 10 / 0.25 + 10
        pace.turns += 1
        slept.clear()
        await asyncio.sleep(0.5)
        assert len(slept) > 64, "it has got on, and is waited for anew"


@in_virtual_time
async def test_nobody_looks_after_the_end(slept: list[float]) -> None:
    async with share_of(Pace()) as share:
        share.close()
        share.called_up()
        await asyncio.sleep(5)
    assert slept == []


async def test_jobs_are_done_beside_a_loop_that_is_never_idle() -> None:
    """Without a share of the lock each of these waits for a second or so, and so do all of them for minutes."""
    ending = False
    thread = OwnerThread("kvflow-test", lambda: None if ending else WAIT_S, lambda cause: None)
    busy = asyncio.create_task(hold_the_loop())
    async with asyncio.timeout(WAIT_S):
        for _ in range(100):
            await thread.call(let_go_of_the_lock)
    busy.cancel()
    ending = True
    thread.submit(lambda: None)
    await thread.ended()


def let_go_of_the_lock() -> None:
    """Four times, as NIXL's calls do."""
    for _ in range(4):
        time.sleep(0)


async def hold_the_loop() -> None:
    while True:
        end_s = time.perf_counter() + _TURN_S
        while time.perf_counter() < end_s:
            pass
        await asyncio.sleep(0)
