"""A reader's turn, the same for all contenders, and what the processes of (a), (b) and (d) do.

None of kvflow's runtime is in it: the floor does not move with it. (a) and (b) block their loop while they load. A
producer's loop waits for its parent while its agent's progress thread serves the reads. (d) is (b) behind one thread
and an event loop, nothing else: the reader's agent belongs to one thread; a coroutine on uvloop hands it each load,
which is word for word (b)'s, and awaits the end. What (c) takes longer than this is kvflow's own work; what this takes
longer than (b) are two changes of thread. The producer is (b)'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress, Backends, TunedAgent
from tests.bench.clocks import loop_ticker, process_cpu_s
from tests.bench.compared import blocks_to_compare
from tests.bench.transfer.raw import ExampleAgent, RawAgent


class Contender(enum.StrEnum):
    EXAMPLE = "raw_example"
    TUNED = "raw_tuned"
    KVFLOW = "kvflow"
    HOP = "bare_hop"


Job: TypeAlias = Callable[[], Awaitable[object]]
"""Function that does a load, or several at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """Measurements of a reader in one turn, and how many bytes it compared. `cpu_s` is its producer's, too."""

    seconds: Sequence[float]
    cpu_s: float
    checked_bytes: int
    lags_s: Sequence[float] = ()


class ContenderReader(Protocol):
    """A contender's way to load."""

    async def connect(self, address: AgentAddress) -> None: ...
    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        """A job that does these loads at once. There are no tickets where the producer needs to say nothing."""
        ...


def together(jobs: Sequence[Job]) -> Job:
    """One job that does these at once, on a loop."""
    if len(jobs) == 1:
        return jobs[0]

    async def job() -> None:
        await asyncio.gather(*(each() for each in jobs))

    return job


class ReaderRank:
    """The rank of a reader's process. With `ticks` there is a ticker beside the loads; its CPU time counts."""

    def __init__(self, cache: BenchCache, contender_reader: ContenderReader, *, ticks: bool = True) -> None:
        self._cache = cache
        self._contender_reader = contender_reader
        self._ticker = loop_ticker if ticks else contextlib.nullcontext
        self._pids = [os.getpid()]

    async def connect(self, address: AgentAddress, producer_pid: int) -> None:
        await self._contender_reader.connect(address)
        self._pids.append(producer_pid)

    async def turn(
        self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket], *, check_all: bool, at_once: int = 1
    ) -> TurnResult:
        """Do the loads of a turn. The first wakes both processes, the others are timed, `at_once` loads as one."""
        local_ids, remote_ids = blocks_to_compare(loads, check_all=check_all)
        self._cache.poison(local_ids)
        wake = self._contender_reader.prepare(loads[:1], tickets[:1])
        some = [slice(start, start + at_once) for start in range(1, len(loads), at_once)]
        timed = [self._contender_reader.prepare(loads[part], tickets[part]) for part in some]
        await wake()
        seconds: list[float] = []
        lags_s: list[float] = []
        async with self._ticker(lags_s):
            cpu_before_s = self._cpu_s()
            for job in timed:
                start = time.perf_counter()
                await job()
                seconds.append(time.perf_counter() - start)
            cpu_s = self._cpu_s() - cpu_before_s
        checked_bytes = self._cache.check(local_ids, remote_ids)
        return TurnResult(seconds=seconds, cpu_s=cpu_s, checked_bytes=checked_bytes, lags_s=lags_s)

    def _cpu_s(self) -> float:
        return sum(map(process_cpu_s, self._pids))


class Producer(Protocol):
    """The rank of a producer's process."""

    async def address(self) -> AgentAddress: ...
    async def offer(self, loads: Sequence[PlannedLoad]) -> Sequence[Ticket]: ...
    async def end_leases(self) -> None: ...


class RawProducer:
    """Producer of (a), (b) and (d): it offers no tickets."""

    def __init__(self, agent: RawAgent) -> None:
        self._agent = agent

    async def address(self) -> AgentAddress:
        return self._agent.address()

    async def offer(self, loads: Sequence[PlannedLoad]) -> Sequence[Ticket]:
        return ()

    async def end_leases(self) -> None:
        self._agent.take_notifications()


class BlockingReader:
    """Contenders (a) and (b)."""

    def __init__(self, agent: RawAgent) -> None:
        self._agent = agent

    async def connect(self, address: AgentAddress) -> None:
        self._agent.connect(address)

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        async def job() -> None:
            load_raw(self._agent, loads)

        return job


def load_raw(agent: RawAgent, loads: Sequence[PlannedLoad]) -> None:
    """Read loads one after the other: 64 of 1 MB over tcp, all posted at once, took nearly twice as long."""
    for load in loads:
        agent.load(load.local_ids, load.remote_ids)


class ThreadHopReader:
    """Contender (d): jobs run in order on one thread, with the least that does it."""

    def __init__(self, agent: RawAgent) -> None:
        self._agent = agent
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="bench-hop", daemon=True)
        self._thread.start()

    async def connect(self, address: AgentAddress) -> None:
        await self.call(partial(self._agent.connect, address))

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        return partial(self.call, partial(load_raw, self._agent, loads))

    async def call(self, job: Callable[[], None]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001  (raised where the job was handed over)
                self._loop.call_soon_threadsafe(settle, done, error)
            else:
                self._loop.call_soon_threadsafe(settle, done)

        self._jobs.put(run)
        await done

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def settle(done: asyncio.Future[None], error: Exception | None = None) -> None:
    """End the wait for a job, if it was not cancelled."""
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _make_agent(role: str, cache: BenchCache, backends: Backends, *, tuned: bool) -> RawAgent:
    """Make the agent of a raw contender; (a) takes backends as they are."""
    if tuned:
        return TunedAgent(role, cache, backends, producer=role == "producer")
    return ExampleAgent(role, cache, list(backends))


@contextlib.asynccontextmanager
async def open_raw_producer(shape: CacheShape, backends: Backends, *, tuned: bool) -> AsyncIterator[RawProducer]:
    cache = BenchCache(shape)
    cache.fill()
    yield RawProducer(_make_agent("producer", cache, backends, tuned=tuned))


@contextlib.asynccontextmanager
async def open_raw_reader(shape: CacheShape, backends: Backends, *, tuned: bool) -> AsyncIterator[ReaderRank]:
    cache = BenchCache(shape)
    yield ReaderRank(cache, BlockingReader(_make_agent("reader", cache, backends, tuned=tuned)), ticks=False)


@contextlib.asynccontextmanager
async def open_hop_reader(shape: CacheShape, backends: Backends) -> AsyncIterator[ReaderRank]:
    cache = BenchCache(shape)
    with contextlib.closing(ThreadHopReader(_make_agent("reader", cache, backends, tuned=True))) as contender_reader:
        yield ReaderRank(cache, contender_reader)
