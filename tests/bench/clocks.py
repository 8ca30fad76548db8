"""CPU time of processes, and lag of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

TICK_S = 0.001
_PROCESS_CLOCK = 2


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process since its start, in nanoseconds' resolution and without disturbing it (Linux).

    Linux makes the id of another process's CPU clock out of its pid (see clock_getcpuclockid); /proc counts in 10 ms.
    """
    return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)


@contextlib.asynccontextmanager
async def loop_ticker(lags_s: list[float]) -> AsyncIterator[None]:
    """While the block runs, sleep 1 ms again and again on this loop and append by how much each sleep was too long.

    The sleep that the end of the block interrupts counts if it was late already.
    """
    task = asyncio.create_task(_tick(lags_s), name="bench-ticker")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _tick(lags_s: list[float]) -> None:
    while True:
        start = time.perf_counter()
        interrupted = True
        try:
            await asyncio.sleep(TICK_S)
            interrupted = False
        finally:
            late_s = time.perf_counter() - start - TICK_S
            if late_s > 0 or not interrupted:
                lags_s.append(max(late_s, 0.0))
