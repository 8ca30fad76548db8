"""The clocks of the bench."""

from __future__ import annotations

import asyncio
import os
import time

from tests.bench.clocks import loop_ticker, process_cpu_s


def test_the_clock_of_this_process_is_the_one_python_has() -> None:
    before = time.process_time()
    found = process_cpu_s(os.getpid())
    after = time.process_time()
    assert before <= found <= after


async def test_the_ticker_sees_a_blocked_loop() -> None:
    lags_s: list[float] = []
    async with loop_ticker(lags_s):
        await asyncio.sleep(0.01)
        time.sleep(0.05)  # noqa: ASYNC251  (blocking the loop is the point)
    assert len(lags_s) >= 2
    assert min(lags_s) >= 0
    assert max(lags_s) >= 0.04


async def test_the_ticker_ends_with_its_block() -> None:
    lags_s: list[float] = []
    async with loop_ticker(lags_s):
        pass
    count = len(lags_s)
    await asyncio.sleep(0.01)
    assert len(lags_s) == count
