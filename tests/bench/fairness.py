"""Waits of one-block loads while huge loads run beside them.

A round measures everything once, and a ratio is always within a round, so what else the machine does counts on both
sides of it. Small loads come one after the other with random pauses, so that they meet a huge load's slices at any
moment. Small loads that are left when the huge loads end are made afterwards, untimed: the producer waits for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple, TypeAlias

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import BenchError, RankProcess
from kvflow.bench.engine import EngineProducer, config_of, open_producer, open_runtime
from kvflow.bench.loads import MIB, Fabric, PlannedLoad, SettingsError, Ticket, scattered_loads
from kvflow.config import config_for_device
from tests.bench.compared import blocks_to_compare
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.targets import Spread, at_most, percentile

READER = config_for_device(config_of("fairness-reader"), "cpu")
DELAY_SLICES_MAX = float(READER.limits.slices_in_flight_max)
"""Bytes that one other load has in flight at most; where small reads can go first (shared memory) it is one slice."""

_LAYERS = 8
_SLICE_LOADS = 3
_PAUSE_MAX_S = 0.004
_LEGEND = (
    "One-block loads, one after the other with random pauses, alone and while huge loads run. The delay is how much "
    "longer they take behind huge ones, in times of a load of one slice: the median of the rounds' ratios."
)

Loads: TypeAlias = dict[str, tuple[PlannedLoad, ...]]
"""Loads of a round, by kind: wake, alone, slice, huge, behind."""
Job: TypeAlias = Callable[[], Coroutine[Any, Any, float]]
"""Function that does a load, and returns the seconds that it took."""


class Round(NamedTuple):
    """Seconds of each load: one block while nothing else ran, one slice, huge, one block behind the huge ones."""

    alone_s: Sequence[float]
    slice_s: Sequence[float]
    huge_s: Sequence[float]
    behind_s: Sequence[float]

    def delay(self, percent: float) -> float:
        """Delay of small loads behind huge ones, in times of one slice."""
        more_s = percentile(self.behind_s, percent) - percentile(self.alone_s, percent)
        return more_s / statistics.median(self.slice_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Loads of one kind over all rounds."""

    kind: str
    load_s: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Measure the delay of small loads behind huge ones, in times of one slice.

    The delay is a percentile of the small loads behind huge loads, less the same percentile of small loads alone, in
    times of one slice. Each row is the median over the rounds.
    """

    p50: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Measure how long one-block loads take alone, and while huge loads run beside them."""

    transport: Annotated[Fabric, "Fabric that moves the bytes: shm or tcp (UCX_TLS=tcp)."] = Fabric.SHM
    size: Annotated[int, "MB (2**20 bytes) of a huge load."] = 1024
    huge_loads: Annotated[int, "How many huge loads run at once."] = 1
    rounds: Annotated[int, "Rounds; each measures everything once."] = 9

    @property
    def counts(self) -> dict[str, list[int]]:
        """Return the blocks of each load of a round. SettingsError if a huge load has no whole number of blocks."""
        block_bytes = CacheShape(layers=_LAYERS, blocks=1).block_size_bytes
        slice_bytes = READER.limits.slice_bytes_max
        huge_blocks, rest = divmod(self.size * MIB, block_bytes)
        if rest or self.size * MIB < 2 * slice_bytes:
            raise SettingsError(
                f"--size: {self.size} MB is no multiple of a block, which has {block_bytes} bytes, "
                f"or less than two slices, which have {2 * slice_bytes}"
            )
        return {
            "wake": [1],
            "alone": [1] * 30,
            "slice": [slice_bytes // block_bytes] * _SLICE_LOADS,
            "huge": [huge_blocks] * self.huge_loads,
            "behind": [1] * 200,
        }

    @property
    def shape(self) -> CacheShape:
        return CacheShape(layers=_LAYERS, blocks=sum(chain(*self.counts.values()))).checked("--size, --huge-loads")

    def sets(self) -> Sequence[RankSet]:
        shape = self.shape
        ranks = (
            RankProcess("producer", partial(open_producer, config_of("bench-producer"), shape)),
            RankProcess("reader", partial(open_reader, shape)),
        )
        note, environment = f"{self.transport}: {self.rounds} rounds", self.transport.environment
        return [RankSet(note=note, ranks=ranks, turns=self._turns, environment=environment)]

    def loads_of_round(self, index: int) -> Loads:
        """Scattered blocks for every load of a round, which share none."""
        name, counts, blocks = f"round {index}", self.counts, self.shape.blocks
        loads = iter(scattered_loads(name, blocks, list(chain(*counts.values()))))
        return {kind: tuple(islice(loads, len(some))) for kind, some in counts.items()}

    def _turns(self, children: Children) -> Iterator[Turn]:
        for index in range(self.rounds):
            note = f"round {index + 1} of {self.rounds}"
            yield Turn(key="round", run=partial(_run_round, self.loads_of_round(index), children), note=note)

    def judge(self, samples: Samples) -> Outcome:
        loads, delay = summarize(samples.of(Round)["round"])
        return Outcome(
            results={"loads": loads, "delay": [delay]},
            legend=_LEGEND,
            targets=[at_most("one block behind huge, p99, slices", DELAY_SLICES_MAX, [(delay.p99, "")])],
        )


def _run_round(loads: Loads, children: Children) -> Round:
    tickets = children["producer"].run(EngineProducer.offer, list(chain(*loads.values())))
    result = children["reader"].run(FairnessReader.round, loads, tickets)
    children["producer"].run(EngineProducer.end_leases)
    if not result.behind_s:
        raise BenchError("no small load met a huge one: ask for a larger --size")
    return result


def summarize(rounds: Sequence[Round]) -> tuple[list[LoadTimes], Delay]:
    kinds = {
        "one block, alone": [one.alone_s for one in rounds],
        "one block, behind": [one.behind_s for one in rounds],
        "one slice, alone": [one.slice_s for one in rounds],
        "huge": [one.huge_s for one in rounds],
    }
    loads = [LoadTimes(kind=kind, load_s=Spread.of(list(chain(*seconds)))) for kind, seconds in kinds.items()]
    p50, p99 = (statistics.median(one.delay(percent) for one in rounds) for percent in (50, 99))
    return loads, Delay(p50=p50, p99=p99)


# --- in the process that loads


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape) -> AsyncIterator[FairnessReader]:
    cache = BenchCache(shape)
    async with open_runtime(READER, cache) as runtime:
        yield FairnessReader(runtime, cache)


class FairnessReader:
    """Reader rank, which does the loads of a round."""

    def __init__(self, runtime: kvflow.Runtime, cache: BenchCache) -> None:
        self._runtime = runtime
        self._cache = cache

    async def round(self, loads: Loads, tickets: Sequence[Ticket]) -> Round:
        """Do all loads of a round. `tickets` are in the order of the loads."""
        local_ids, remote_ids = blocks_to_compare(chain(*loads.values()), check_all=False)
        self._cache.poison(local_ids)
        rest, pauses = iter(tickets), random.Random(loads["wake"][0].request_id)
        jobs = {kind: [partial(self._time, load, next(rest)) for load in some] for kind, some in loads.items()}
        await _one_by_one(jobs["wake"])
        alone_s = await _one_by_one(jobs["alone"], pauses)
        slice_s = await _one_by_one(jobs["slice"], pauses)
        left, behind_s = iter(jobs["behind"]), list[float]()
        async with asyncio.TaskGroup() as group:
            huge = [group.create_task(job()) for job in jobs["huge"]]
            await asyncio.sleep(_PAUSE_MAX_S)
            for small in left:
                seconds = await _one_by_one([small], pauses)
                if any(task.done() for task in huge):
                    break  # and this small load may have had the machine for itself
                behind_s += seconds
        await _one_by_one(left)
        self._cache.check(local_ids, remote_ids)
        return Round(alone_s, slice_s, [task.result() for task in huge], behind_s)

    async def _time(self, load: PlannedLoad, ticket: Ticket) -> float:
        request = kvflow.LoadRequest(load.request_id, ticket=ticket, block_ids=load.local_ids)
        start = time.perf_counter()
        await self._runtime.load_blocks(request)
        return time.perf_counter() - start


async def _one_by_one(jobs: Iterable[Job], pauses: random.Random | None = None) -> list[float]:
    seconds = []
    for job in jobs:
        if pauses is not None:
            await asyncio.sleep(pauses.uniform(0, _PAUSE_MAX_S))
        seconds.append(await job())
    return seconds
