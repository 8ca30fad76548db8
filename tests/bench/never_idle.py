"""The bench `never-idle`: what a loop that is never idle costs a load (docs/decisions/0033-bursts-and-threads.md).

A task of the reader's loop computes for as long as a turn takes, lets others run, and starts again; loads go one after
the other beside it. For each length of a turn and each switch interval of Python's lock (`sys.setswitchinterval`, the
host's to set). The producer is another process; bytes go through shared memory. Threads are starved only where cores
are free: on a busy machine run it under `chrt -f 1`, and only for some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import Fabric, PlannedLoad, Ticket, scattered_loads
from tests.bench.pairs import hand_over, numbers, open_reader, pair_of, requests
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.targets import Spread

_LAYERS = 8
_LEGEND = "Loads one after the other beside turns of the loop that never end; 0: no such task."


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow:
    """Loads beside turns of one length, with one switch interval."""

    turn_ms: float
    switch_interval_ms: float
    load_s: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverIdle:
    """Measure what an event loop that is never idle costs a load, by how long its turns are."""

    turns_ms: Annotated[str, "How long turns of the loop take, separated by commas; 0: no such task."] = "0,0.1,1"
    intervals_ms: Annotated[str, "Switch intervals of Python's lock, separated by commas."] = "5,0.05"
    loads: Annotated[int, "Loads of each case."] = 5
    blocks: Annotated[int, "Blocks of a load."] = 1

    @property
    def cases(self) -> list[tuple[float, float]]:
        """Every length of a turn with every switch interval."""
        turns, intervals = numbers("--turns-ms", self.turns_ms), numbers("--intervals-ms", self.intervals_ms)
        return [(turn, interval) for turn in turns for interval in intervals]

    @property
    def shape(self) -> CacheShape:
        return CacheShape(layers=_LAYERS, blocks=self.loads * self.blocks + 1).checked("--loads, --blocks")

    def sets(self) -> Sequence[RankSet]:
        ranks, note = pair_of(partial(open_reader, Reader), self.shape), f"{len(self.cases)} cases"
        return [RankSet(note=note, ranks=ranks, turns=self._turns, environment=Fabric.SHM.environment)]

    def _turns(self, children: Children) -> Iterator[Turn]:
        for index, case in enumerate([(0.0, 5.0), *self.cases]):  # the first one connects
            loads = scattered_loads(f"never idle {index}", self.shape.blocks, [self.blocks] * self.loads)
            run = partial(hand_over, children, Reader.load, loads, *case)
            yield Turn(key=case if index else "connect", run=run)

    def judge(self, samples: Samples) -> Outcome:
        taken = samples.of(list)
        rows = [
            CaseRow(turn_ms=turn, switch_interval_ms=interval, load_s=Spread.of(taken[turn, interval][0]))
            for turn, interval in self.cases
        ]
        return Outcome(results={"cases": rows}, legend=_LEGEND, targets=[])


class Reader:
    """The process that loads beside a task that is never idle."""

    def __init__(self, runtime: kvflow.Runtime, _: BenchCache) -> None:
        self._runtime = runtime

    async def load(
        self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket], turn_ms: float, interval_ms: float
    ) -> list[float]:
        """How long each load took."""
        took_s = []
        with switch_interval(interval_ms / 1e3):
            turns = asyncio.create_task(take_turns(turn_ms / 1e3)) if turn_ms else None
            for request in requests(loads, tickets):
                begun_s = time.perf_counter()
                await self._runtime.load_blocks(request)
                took_s.append(time.perf_counter() - begun_s)
            if turns is not None:
                turns.cancel()
        return took_s


async def take_turns(turn_s: float) -> None:
    while True:
        end_s = time.perf_counter() + turn_s
        while time.perf_counter() < end_s:
            pass
        await asyncio.sleep(0)


@contextlib.contextmanager
def switch_interval(interval_s: float) -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(interval_s)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
