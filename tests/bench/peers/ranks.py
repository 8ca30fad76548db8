"""A reader's rank in the bench `peers`: turns of loads as in `dev.py bench transfer`, and loads that are broken off."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress, Backends, TunedAgent
from tests.bench.peers.memory import LandedBytes
from tests.bench.transfer.ranks import (
    BlockingReader,
    ContenderReader,
    Job,
    ReaderRank,
    ThreadHopReader,
)

WARM_LOADS = 3
_SAFE_MAX_S = 40.0
_CANCELLED_MAX_S = 10.0


class PeerReader(ContenderReader, Protocol):
    """A contender's way to load, and what it says of the memory of a load that was cancelled."""

    async def wait_safe(self) -> bool:
        """Wait until, by the contender's word, no byte lands any more. False if it never says so."""
        ...


class ColdResult(NamedTuple):
    """Seconds from the producer's address to the end of the first load, and of loads after it."""

    cold_s: float
    warm_s: Sequence[float]


class CancelResult(NamedTuple):
    """A load that was to be cancelled at one moment.

    `ended_s` and `safe_s` count from there: until the coroutine had ended, and until the contender said that no byte
    lands (None: it never says so). `landed_bytes` landed after its last word. `outcome`: how the coroutine ended.
    """

    ended_s: float
    safe_s: float | None
    landed_bytes: int
    landed_before_bytes: int
    outcome: str


class EndResult(NamedTuple):
    """How a load ended whose producer was killed or stopped: when, by the machine's monotonic clock, and as what.

    A load that had not ended at its bound has no `ended_at_s`; `cancelled_s` is then how long its cancelling took.
    """

    ended_at_s: float | None
    outcome: str
    cancelled_s: float | None = None


class BreakableReader(ReaderRank):
    """The rank of a reader's process, with a ticker beside the loads."""

    def __init__(self, cache: BenchCache, reader: PeerReader) -> None:
        super().__init__(cache, reader)
        self._reader = reader
        self._landed = LandedBytes(cache)

    async def cold(self, address: AgentAddress, load: PlannedLoad, tickets: Sequence[Ticket]) -> ColdResult:
        """Connect and load, then load the same again: with each further ticket, or as often where there are none."""
        self._cache.poison(load.local_ids)
        jobs = [self._reader.prepare([load], [ticket]) for ticket in tickets]
        jobs = jobs or [self._reader.prepare([load], ()) for _ in range(WARM_LOADS + 1)]
        begun_s = time.perf_counter()
        await self._reader.connect(address)
        connected_s = time.perf_counter()
        seconds = [await _timed(job) for job in jobs]
        self._cache.check(load.local_ids, load.remote_ids)
        return ColdResult(connected_s - begun_s + seconds[0], seconds[1:])

    async def cancel(self, load: PlannedLoad, tickets: Sequence[Ticket], after_s: float) -> CancelResult:
        """Begin a load, cancel it `after_s` later, and see what lands after the contender's word."""
        self._landed.poison()
        job = self._reader.prepare([load], tickets)
        task = asyncio.ensure_future(job())
        cancel_at_s = time.perf_counter() + after_s
        await _sleep_until(cancel_at_s)
        task.cancel()
        outcome = await _outcome(task)
        ended_s = time.perf_counter() - cancel_at_s
        safe_s: float | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SAFE_MAX_S):
                if await self._reader.wait_safe():
                    safe_s = time.perf_counter() - cancel_at_s
        before = self._landed.sampled()
        return CancelResult(ended_s, safe_s, await self._landed.after_now(), before, outcome)

    async def watch(self, load: PlannedLoad, tickets: Sequence[Ticket], bound_s: float) -> EndResult:
        """Begin a load and say when and how it ended; at its bound, cancel it."""
        task = asyncio.ensure_future(self._reader.prepare([load], tickets)())
        done, _ = await asyncio.wait([task], timeout=bound_s)
        if done:
            ended_at_s = time.monotonic()
            return EndResult(ended_at_s, await _outcome(task))
        task.cancel()
        begun_s = time.perf_counter()
        done, _ = await asyncio.wait([task], timeout=_CANCELLED_MAX_S)
        return EndResult(None, "waits", time.perf_counter() - begun_s if done else None)


async def _timed(job: Job) -> float:
    begun_s = time.perf_counter()
    await job()
    return time.perf_counter() - begun_s


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))


async def _outcome(task: asyncio.Future[object]) -> str:
    """Wait for the end of a load, and return "loaded" or the name of its error."""
    await asyncio.wait([task])
    if task.cancelled():
        return asyncio.CancelledError.__name__
    error = task.exception()
    return "loaded" if error is None else type(error).__name__


# --- raw NIXL and a bare hop


class RawReader(BlockingReader):
    """Raw NIXL blocks its loop: a load has ended, and is safe, before a cancel is seen."""

    async def wait_safe(self) -> bool:
        return True


class HopReader(ThreadHopReader):
    """A cancelled coroutine leaves its job to the thread."""

    async def wait_safe(self) -> bool:
        await self.call(lambda: None)
        return True


@contextlib.asynccontextmanager
async def open_raw_reader(shape: CacheShape, backends: Backends) -> AsyncIterator[BreakableReader]:
    cache = BenchCache(shape)
    yield BreakableReader(cache, RawReader(TunedAgent("reader", cache, backends, producer=False)))


@contextlib.asynccontextmanager
async def open_hop_reader(shape: CacheShape, backends: Backends) -> AsyncIterator[BreakableReader]:
    cache = BenchCache(shape)
    with contextlib.closing(HopReader(TunedAgent("reader", cache, backends, producer=False))) as reader:
        yield BreakableReader(cache, reader)
