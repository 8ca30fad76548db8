"""What the ranks of the flow bench do: a producer that computes prompts chunk by chunk, and a reader of them.

Nothing is computed: a chunk takes its time on the clock, as it would on a device, and leaves the CPU to others. Both
processes are on one machine and share its monotonic clock, so moments of one are compared with moments of the other.

A rank is opened by a step, not by its start: where a cable connects both, the cable needs their processes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.engine import config_of, open_runtime
from kvflow.bench.loads import PlannedLoad, Ticket
from tests.bench.clocks import loop_ticker, process_cpu_s
from tests.bench.compared import blocks_to_compare
from tests.bench.flow.link import Link, enter_own_network, plug_in

BLOCK_SIZE = 16
_SETTLE_S = 30.0
RankT = TypeVar("RankT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """How a prompt is computed: `chunks` of it, each in `chunk_s`.

    `grows`: its lease is open before, and grows with every chunk; else it is opened after the last one.
    `writes`: the bytes of a chunk are written when it is computed, and were others before.
    """

    load: PlannedLoad
    chunks: int
    chunk_s: float
    grows: bool
    writes: bool = False

    def blocks_of(self, chunk: int) -> tuple[int, ...]:
        step = len(self.load.remote_ids) // self.chunks
        return self.load.remote_ids[chunk * step : (chunk + 1) * step]

    def last_chunk(self) -> Prefill:
        """A prompt of nothing but the last chunk."""
        blocks = len(self.load.remote_ids) // self.chunks
        last = replace(self.load, local_ids=self.load.local_ids[-blocks:], remote_ids=self.load.remote_ids[-blocks:])
        return replace(self, load=last, chunks=1)

    @property
    def num_tokens(self) -> int:
        return len(self.load.remote_ids) * BLOCK_SIZE


class Prefilled(NamedTuple):
    """When it began and when the last chunk was there; and where to get the prompt, unless that is known already."""

    begun_s: float
    ended_s: float
    ticket: Ticket


class Loaded(NamedTuple):
    """When a load began and when it ended."""

    begun_s: float
    ended_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When the leases of many loads grow by one block each: every `every_s`, all in one step or one after the other."""

    leases: int
    advances: int
    every_s: float
    in_step: bool

    @property
    def half_s(self) -> float:
        return self.advances * self.every_s / 2

    def due_s(self, advance: int, lease: int) -> float:
        """After the first one's start."""
        return (advance + (1.0 if self.in_step else (lease + 1) / self.leases)) * self.every_s


class Advanced(NamedTuple):
    """When each lease was complete, and the share of a core that the process took in the first half."""

    ended_s: Sequence[float]
    cpu: float


class Watched(NamedTuple):
    """When each load has ended. The share of a core that the process took in the first half; in the second one, with
    the meter, how late its loop was.
    """

    ended_s: Sequence[float]
    cpu: float
    lags_s: Sequence[float]


@contextlib.asynccontextmanager
async def open_rank(
    kind: Callable[[Link, CacheShape, contextlib.AsyncExitStack], RankT], link: Link, shape: CacheShape
) -> AsyncIterator[RankT]:
    if link is Link.GBIT:
        enter_own_network()
    async with contextlib.AsyncExitStack() as stack:
        yield kind(link, shape, stack)


async def _open(
    engine_id: str, link: Link, host: str, cache: BenchCache, stack: contextlib.AsyncExitStack
) -> kvflow.Runtime:
    if link is Link.GBIT:
        plug_in(host)
    config = replace(config_of(engine_id), listen=f"tcp://{host}:0")
    return await stack.enter_async_context(open_runtime(config, cache))


class FlowProducer:
    """Computes prompts and offers them."""

    def __init__(self, link: Link, shape: CacheShape, stack: contextlib.AsyncExitStack) -> None:
        self._link = link
        self._cache = BenchCache(shape)
        self._stack = stack
        self._runtime: kvflow.Runtime
        self._leases: list[kvflow.Lease] = []

    async def open(self) -> None:
        self._cache.fill()
        self._runtime = await _open("flow-producer", self._link, self._link.hosts()[0], self._cache, self._stack)
        self._stack.callback(self._revoke)  # closing would wait for leases that nobody reads

    async def offer(self, loads: Sequence[PlannedLoad], *, grows: bool = False) -> list[Ticket]:
        """Open a lease for each load; one that grows has nothing yet."""
        leases = [self._serve(load, grows=grows) for load in loads]
        return [dict(lease.ticket.to_params()) for lease in leases]

    async def prepare(self, prefill: Prefill) -> Ticket:
        """What is there before the prompt is computed: with a lease that grows, its ticket."""
        if prefill.writes:
            self._cache.poison(prefill.load.remote_ids)
        return (await self.offer([prefill.load], grows=True))[0] if prefill.grows else {}

    async def compute(self, prefill: Prefill) -> Prefilled:
        """The prompt, chunk by chunk, which the lease is told of; or the whole of it, offered then."""
        begun_s = ended_s = time.monotonic()
        for chunk in range(prefill.chunks):
            if prefill.chunk_s:
                await asyncio.sleep(begun_s + (chunk + 1) * prefill.chunk_s - time.monotonic())
            if prefill.writes:
                self._cache.write(prefill.blocks_of(chunk))
            ended_s = time.monotonic()
            if prefill.grows:
                self._leases[-1].advance((chunk + 1) * prefill.num_tokens // prefill.chunks)
        ticket = {} if prefill.grows else (await self.offer([prefill.load]))[0]
        return Prefilled(begun_s, ended_s, ticket)

    async def advance(self, schedule: Schedule) -> Advanced:
        """Let all leases that are open grow block by block; without any the same timers."""
        leases, start_s, ended_s = list(self._leases), time.monotonic(), list[float]()
        cpu_s, cpu = process_cpu_s(os.getpid()), 0.0
        for advance in range(schedule.advances):
            if advance == schedule.advances // 2:
                cpu = (process_cpu_s(os.getpid()) - cpu_s) / (time.monotonic() - start_s)
            for at in range(schedule.leases):
                wait_s = start_s + schedule.due_s(advance, at) - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if leases:
                    leases[at].advance((advance + 1) * BLOCK_SIZE)
                if advance == schedule.advances - 1:
                    ended_s.append(time.monotonic())
        return Advanced(ended_s[: len(leases)], cpu)

    async def end_leases(self) -> None:
        """Every lease must end as read: a bench whose loads get lost measures something else."""
        async with asyncio.timeout(_SETTLE_S):
            outcomes = [await lease for lease in self._leases]
        if any(outcome is not kvflow.LeaseOutcome.READ for outcome in outcomes):
            raise RuntimeError(f"leases of a turn ended as {outcomes}")
        self._leases = []

    def _serve(self, load: PlannedLoad, *, grows: bool) -> kvflow.Lease:
        request = kvflow.ServeRequest(
            load.request_id,
            block_ids=load.remote_ids,
            num_tokens=len(load.remote_ids) * BLOCK_SIZE,
            computed_tokens=0 if grows else None,
        )
        self._leases.append(self._runtime.serve_blocks(request))
        return self._leases[-1]

    def _revoke(self) -> None:
        for lease in self._leases:
            lease.revoke()


class FlowReader:
    """Loads what the producer offers."""

    def __init__(self, link: Link, shape: CacheShape, stack: contextlib.AsyncExitStack) -> None:
        self._link = link
        self._cache = BenchCache(shape)
        self._stack = stack
        self._runtime: kvflow.Runtime
        self._loading: list[asyncio.Task[Loaded]] = []

    async def open(self) -> None:
        self._runtime = await _open("flow-reader", self._link, self._link.hosts()[1], self._cache, self._stack)

    async def begin(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> None:
        """Start loads; `finish` has to follow."""
        self._loading = [
            asyncio.create_task(self._load(load, ticket), name=f"bench {load.request_id}")
            for load, ticket in zip(loads, tickets, strict=True)
        ]
        await asyncio.sleep(0)  # they begin

    async def finish(self) -> list[Loaded]:
        loading, self._loading = self._loading, []
        return [await task for task in loading]

    async def load(self, load: PlannedLoad, ticket: Ticket) -> Loaded:
        await self.begin([load], [ticket])
        return (await self.finish())[0]

    async def watch(self, schedule: Schedule) -> Watched:
        """While the loads that were begun go on: their process for half of the time, then its loop until they end."""
        cpu_s, start_s = process_cpu_s(os.getpid()), time.monotonic()
        await asyncio.sleep(schedule.half_s)
        cpu = (process_cpu_s(os.getpid()) - cpu_s) / (time.monotonic() - start_s)
        lags_s: list[float] = []
        async with loop_ticker(lags_s):
            if not self._loading:
                await asyncio.sleep(schedule.half_s)
            loaded = await self.finish()
        return Watched([one.ended_s for one in loaded], cpu, lags_s)

    async def poison(self, loads: Sequence[PlannedLoad], layers: Sequence[int] | None) -> None:
        for load in loads:
            self._cache.poison(load.local_ids, layers)

    async def check(self, loads: Sequence[PlannedLoad], layers: Sequence[int] | None, *, check_all: bool) -> int:
        """How many bytes were compared."""
        return self._cache.check(*blocks_to_compare(loads, check_all=check_all), layers=layers)

    async def _load(self, load: PlannedLoad, ticket: Ticket) -> Loaded:
        request = kvflow.LoadRequest(load.request_id, ticket=ticket, block_ids=load.local_ids)
        begun_s = time.monotonic()
        report = await self._runtime.load_blocks(request)
        return Loaded(begun_s, time.monotonic(), report.bytes)
