"""Processes that compute all the time while others are measured, as the engines of a machine do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator

from kvflow.bench.child import RankProcess

_STEP = 10_000  # a tenth of a millisecond or so


def busy_ranks(count: int) -> tuple[RankProcess, ...]:
    """Ranks that compute, one for each core that is to be busy. They take no turns."""
    return tuple(RankProcess(f"busy {index}", open_busy) for index in range(count))


@contextlib.asynccontextmanager
async def open_busy() -> AsyncIterator[threading.Thread]:
    """A thread that computes until the block ends."""
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            sum(range(_STEP))

    thread = threading.Thread(target=compute, name="bench-busy", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()
