"""The bench `flow`: what many leases that grow at once cost their producer and their reader.

Each lease grows by one small block at a time, so that bytes are not the cost. Producer and reader are two processes on
one machine, so times of one process's monotonic clock are compared with times of the other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, NamedTuple

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import RankProcess
from kvflow.bench.engine import config_of, open_runtime
from kvflow.bench.loads import Fabric, PlannedLoad, SettingsError, Ticket, scattered_loads
from tests.bench.clocks import loop_ticker, process_cpu_s
from tests.bench.compared import blocks_to_compare
from tests.bench.pairs import open_reader, requests
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved
from tests.bench.targets import Spread, TargetRow, at_most

BLOCK_SIZE = 16
SMALL = CacheShape(layers=1, blocks=1, kv_heads=1, head_size=64)
"""A block has 4 KiB."""
LAG_MAX_MS, READER_CPU_MAX, PRODUCER_CPU_MAX = 2.0, 15.0, 10.0
UNTIMED = "untimed"
_END_LEASES_TIMEOUT_S = 30.0
_LEGEND = (
    "CPU is of one core in the first half of a round, and includes the bench's own timers, as 'none' shows. Loop lag "
    "is measured in the second half. Behind: from the last growth of a lease to the end of its load."
)


class Growth(enum.StrEnum):
    """When the leases of a round grow."""

    NONE = "none"
    SPREAD = "one by one"
    IN_STEP = "in one step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Leases grow by one block every `every_s`, all in one step or one after the other."""

    leases: int
    advances: int
    every_s: float
    in_step: bool

    @property
    def half_s(self) -> float:
        return self.advances * self.every_s / 2

    def due_s(self, advance: int, lease: int) -> float:
        """Return the time of an advance of a lease, in seconds after the start."""
        return (advance + (1.0 if self.in_step else (lease + 1) / self.leases)) * self.every_s


class Advanced(NamedTuple):
    """Times at which the leases were complete, and the producer's share of a core in the first half."""

    ended_s: Sequence[float]
    cpu: float


class Watched(NamedTuple):
    """Ends of the loads, the reader's share of a core in the first half, and its loop's lags in the second half."""

    ended_s: Sequence[float]
    cpu: float
    lags_s: Sequence[float]


class Many(NamedTuple):
    """One round: lags of the reader's loop, shares of a core, and for each load its delay after its lease's end."""

    lags_s: Sequence[float]
    reader_cpu: float
    producer_cpu: float
    behind_s: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyResult:
    """All rounds of one kind. CPU is in percent of a core."""

    link: Fabric
    growth: Growth
    loads: int
    lag_s: Spread
    behind_s: Spread | None
    reader_cpu_percent: float
    producer_cpu_percent: float

    @property
    def label(self) -> str:
        return f"{self.link}, {self.growth}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Measure many leases that grow at the same time, and their loads."""

    link: Annotated[Fabric | None, "Fabric that moves the bytes: shm or tcp; by default both."] = None
    rounds: Annotated[int, "Rounds of each kind."] = 5
    many: Annotated[int, "Number of leases that grow at once."] = 64
    advance_ms: Annotated[float, "Time between two growths of a lease, by one block each."] = 20.0
    many_s: Annotated[float, "Seconds of growth in a round."] = 6.0

    @property
    def advances(self) -> int:
        """Number of growths of each lease in a round."""
        return round(self.many_s * 1e3 / self.advance_ms)

    @property
    def shape(self) -> CacheShape:
        return CacheShape(
            layers=SMALL.layers,
            blocks=self.many * self.advances,
            kv_heads=SMALL.kv_heads,
            head_size=SMALL.head_size,
        ).checked("--many, --many-s")

    def sets(self) -> Sequence[RankSet]:
        if self.advances < 2:
            raise SettingsError(f"--many-s {self.many_s:g}: leases grow {self.advances} times, at least 2 are needed")
        ranks = (
            RankProcess("producer", partial(open_growing_producer, self.shape)),
            RankProcess("reader", partial(open_reader, GrowingReader, self.shape)),
        )
        return [
            RankSet(
                note=f"{link}: starting 2 ranks",
                ranks=ranks,
                turns=partial(self._turns, link),
                environment=link.environment,
            )
            for link in ([self.link] if self.link else Fabric)
        ]

    def _turns(self, link: Fabric, children: Children) -> Iterator[Turn]:
        note = f"{self.rounds} rounds of {self.many} loads that grow every {self.advance_ms:g} ms for {self.many_s:g} s"
        run = partial(_grow, children, self.planned("check", 2), self.schedule(2, Growth.IN_STEP))
        yield Turn(key=UNTIMED, run=run, note=note)
        for index, growth in interleaved(tuple(Growth), range(self.rounds)):
            loads = () if growth is Growth.NONE else self.planned(f"round {index} {growth}", self.advances)
            run = partial(_grow, children, loads, self.schedule(self.advances, growth))
            yield Turn(key=(link, growth), run=run, note=note)

    def schedule(self, advances: int, growth: Growth) -> Schedule:
        in_step = growth is Growth.IN_STEP
        return Schedule(leases=self.many, advances=advances, every_s=self.advance_ms / 1e3, in_step=in_step)

    def planned(self, turn: str, blocks: int) -> tuple[PlannedLoad, ...]:
        """Return the loads of a turn, of `blocks` blocks each. No two loads share a block."""
        return scattered_loads(turn, self.shape.blocks, [blocks] * self.many)

    def judge(self, samples: Samples) -> Outcome:
        rows = [_result(*key, rounds=rounds) for key, rounds in samples.of(Many).items() if key != UNTIMED]
        return Outcome(results={"many": rows}, legend=_LEGEND, targets=targets(rows))


def _result(link: Fabric, growth: Growth, *, rounds: Sequence[Many]) -> ManyResult:
    behind_s = list(chain.from_iterable(many.behind_s for many in rounds))
    return ManyResult(
        link=link,
        growth=growth,
        loads=len(rounds[0].behind_s),
        lag_s=Spread.of(list(chain.from_iterable(many.lags_s for many in rounds))),
        behind_s=Spread.of(behind_s) if behind_s else None,
        reader_cpu_percent=100 * statistics.median(many.reader_cpu for many in rounds),
        producer_cpu_percent=100 * statistics.median(many.producer_cpu for many in rounds),
    )


def targets(rows: Sequence[ManyResult]) -> list[TargetRow]:
    growing = [row for row in rows if row.growth is not Growth.NONE]
    return [
        at_most("many: loop lag p99, ms", LAG_MAX_MS, [(row.lag_s.p99 * 1e3, row.label) for row in growing]),
        at_most("many: reader's CPU, %", READER_CPU_MAX, [(row.reader_cpu_percent, row.label) for row in growing]),
        at_most(
            "many: producer's CPU, %", PRODUCER_CPU_MAX, [(row.producer_cpu_percent, row.label) for row in growing]
        ),
    ]


def _grow(children: Children, loads: Sequence[PlannedLoad], schedule: Schedule) -> Many:
    """Run a turn of many loads. Without loads both processes run the same timers."""
    producer, reader = children["producer"], children["reader"]
    reader.run(GrowingReader.begin, loads, producer.run(GrowingProducer.offer, loads))
    growing = producer.start(GrowingProducer.advance, schedule)
    watched = reader.run(GrowingReader.watch, schedule)
    advanced = growing()
    reader.run(GrowingReader.check, loads)
    producer.run(GrowingProducer.end_leases)
    behind_s = [loaded - complete for loaded, complete in zip(watched.ended_s, advanced.ended_s, strict=True)]
    return Many(watched.lags_s, watched.cpu, advanced.cpu, behind_s)


@contextlib.asynccontextmanager
async def open_growing_producer(shape: CacheShape) -> AsyncIterator[GrowingProducer]:
    cache = BenchCache(shape)
    cache.fill()
    async with open_runtime(config_of("bench-producer"), cache) as runtime:
        producer = GrowingProducer(runtime)
        yield producer
        producer.revoke()  # otherwise closing would wait for leases that no reader reads


class GrowingProducer:
    """A producer that offers prompts before they are computed."""

    def __init__(self, runtime: kvflow.Runtime) -> None:
        self._runtime = runtime
        self._leases: list[kvflow.Lease] = []

    async def offer(self, loads: Sequence[PlannedLoad]) -> list[Ticket]:
        for load in loads:
            num_tokens = len(load.remote_ids) * BLOCK_SIZE
            request = kvflow.ServeRequest(load.request_id, load.remote_ids, num_tokens, computed_tokens=0)
            self._leases.append(self._runtime.serve_blocks(request))
        return [dict(lease.ticket.to_params()) for lease in self._leases]

    async def end_leases(self) -> None:
        """Wait until every lease has been read. Raise RuntimeError if one has another outcome."""
        async with asyncio.timeout(_END_LEASES_TIMEOUT_S):
            outcomes = [await lease for lease in self._leases]
        if any(outcome is not kvflow.LeaseOutcome.READ for outcome in outcomes):
            raise RuntimeError(f"leases of a turn ended as {outcomes}")
        self._leases = []

    def revoke(self) -> None:
        for lease in self._leases:
            lease.revoke()

    async def advance(self, schedule: Schedule) -> Advanced:
        """Let all open leases grow block by block. Without leases run the same timers."""
        leases, start_s, ended_s = self._leases, time.monotonic(), list[float]()
        cpu_s, cpu = process_cpu_s(os.getpid()), 0.0
        for advance in range(schedule.advances):
            if advance == schedule.advances // 2:
                cpu = (process_cpu_s(os.getpid()) - cpu_s) / (time.monotonic() - start_s)
            for index in range(schedule.leases):
                wait_s = start_s + schedule.due_s(advance, index) - time.monotonic()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                if leases:
                    leases[index].advance((advance + 1) * BLOCK_SIZE)
                if advance == schedule.advances - 1:
                    ended_s.append(time.monotonic())
        return Advanced(ended_s[: len(leases)], cpu)


class GrowingReader:
    """A reader that loads all leases of a turn at once."""

    def __init__(self, runtime: kvflow.Runtime, cache: BenchCache) -> None:
        self._runtime = runtime
        self._cache = cache
        self._loading: list[asyncio.Task[float]] = []

    async def begin(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> None:
        """Overwrite the local blocks, and start the loads. `watch` has to follow."""
        for load in loads:
            self._cache.poison(load.local_ids)
        self._loading = [
            asyncio.create_task(self._load(request), name=f"bench {request.request_id}")
            for request in requests(loads, tickets)
        ]
        await asyncio.sleep(0)

    async def watch(self, schedule: Schedule) -> Watched:
        """Measure the process for the first half of the time, then the loop until all loads have ended."""
        cpu_s, start_s = process_cpu_s(os.getpid()), time.monotonic()
        await asyncio.sleep(schedule.half_s)
        cpu = (process_cpu_s(os.getpid()) - cpu_s) / (time.monotonic() - start_s)
        lags_s: list[float] = []
        async with loop_ticker(lags_s):
            if not self._loading:
                await asyncio.sleep(schedule.half_s)
            ended_s = [await task for task in self._loading]
        self._loading = []
        return Watched(ended_s, cpu, lags_s)

    async def check(self, loads: Sequence[PlannedLoad]) -> None:
        self._cache.check(*blocks_to_compare(loads, check_all=False))

    async def _load(self, request: kvflow.LoadRequest) -> float:
        await self._runtime.load_blocks(request)
        return time.monotonic()
