"""The bench `surviving`: what it adds to a load of two tickets that its first source dies, or stands still, meanwhile.

Two producers hold the same prompt. Each moment of a load has processes of its own: both producers are read from once,
then the load begins, and at its moment the first producer is killed, or stopped and let go on a while later. Every byte
is compared. Beside that: the same prompt in one load, and in two halves from both producers at the same time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, NamedTuple

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import BenchError, Child
from kvflow.bench.engine import EngineProducer
from kvflow.bench.loads import MIB, Fabric, PlannedLoad, SettingsError, Ticket
from tests.bench.pairs import open_reader, pair_of
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.targets import Spread

_LAYERS = 8
_SOURCES = ("first", "second")
_LEGEND = (
    "Added time is that of the load beyond the median one from a healthy first source. All bytes of each load were "
    "compared. Split: two halves from two producers at once, as a ratio of speed to one load of all."
)


class Fate(StrEnum):
    """Fault of the first producer."""

    KILL = "kill"
    STOP = "stop"


class Survived(NamedTuple):
    """One load, and the producer that its bytes came from."""

    seconds: float
    outcomes: tuple[str, ...]


class Reader:
    """Loads from two producers."""

    def __init__(self, runtime: kvflow.Runtime, cache: BenchCache) -> None:
        self._runtime = runtime
        self._cache = cache

    async def load(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket | list[Ticket]]) -> Survived:
        """Loads at once, each by a ticket or by several; every byte is compared."""
        for load in loads:
            self._cache.poison(load.local_ids)
        start_s = time.perf_counter()
        reports = await asyncio.gather(
            *(
                self._runtime.load_blocks(kvflow.LoadRequest(load.request_id, ticket, load.local_ids))
                for load, ticket in zip(loads, tickets, strict=True)
            )
        )
        seconds = time.perf_counter() - start_s
        for load in loads:
            self._cache.check(load.local_ids, load.remote_ids)
        return Survived(seconds, tuple(one.outcome for report in reports for one in report.attempts))


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentRow:
    """Loads during which the first source was killed or stopped, at one moment: a share of a healthy load's time."""

    moment: float
    load_s: Spread
    added_s: float
    outcomes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """One load of all beside two halves from two producers at once."""

    whole_s: Spread
    halves_s: Spread
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Surviving:
    """Kill or stop the first source of loads of two tickets at many moments, and measure what that adds."""

    transport: Annotated[Fabric, "Fabric that moves the bytes: shm or tcp (UCX_TLS=tcp)."] = Fabric.SHM
    fate: Annotated[Fate, "What befalls the first source: kill or stop."] = Fate.KILL
    size_mb: Annotated[int, "What one load moves in MB (2**20 bytes)."] = 256
    moments: Annotated[int, "At how many moments of a load."] = 20
    rounds: Annotated[int, "Healthy loads, and splits, to compare with."] = 7
    stopped_s: Annotated[float, "How long a source that is stopped stands still."] = 2.0

    @property
    def blocks(self) -> int:
        block_bytes = CacheShape(layers=_LAYERS, blocks=1).block_size_bytes
        count, rest = divmod(self.size_mb * MIB, block_bytes)
        if rest or count < 2:
            raise SettingsError(
                f"--size-mb: {self.size_mb} MB is no multiple of a block, which has {block_bytes} bytes"
            )
        return count

    @property
    def shape(self) -> CacheShape:
        return CacheShape(layers=_LAYERS, blocks=self.blocks).checked("--size-mb")

    def sets(self) -> Sequence[RankSet]:
        turns = {"healthy": self._load_without_fault}
        for at in range(self.moments):
            turns[f"moment {at + 1} of {self.moments}"] = partial(self._load_under_fault, at / self.moments)
        ranks = pair_of(partial(open_reader, Reader), self.shape, _SOURCES)
        return [
            RankSet(note=f"{self.transport}: {note}", ranks=ranks, turns=some, environment=self.transport.environment)
            for note, some in turns.items()
        ]

    def judge(self, samples: Samples) -> Outcome:
        found = samples.of(Survived)
        healthy_s, whole, halves = (
            Spread.of([one.seconds for one in found.pop(name)]) for name in ("healthy", "whole", "halves")
        )
        rows = []
        for moment, loads in found.items():
            if any(one.outcomes[-1:] != ("loaded",) for one in loads):
                raise BenchError(f"moment {moment}: {loads}")
            spread = Spread.of([one.seconds for one in loads])
            outcomes = "; ".join(", ".join(one.outcomes) for one in loads)
            rows.append(MomentRow(moment=moment, load_s=spread, added_s=spread.p50 - healthy_s.p50, outcomes=outcomes))
        split = SplitRow(whole_s=whole, halves_s=halves, ratio=whole.p50 / halves.p50)
        return Outcome(results={"moments": rows, "split": [split]}, legend=_LEGEND, targets=[])

    def _planned(self, name: str, first: int = 0, stop: int | None = None) -> PlannedLoad:
        ids = tuple(range(self.blocks))[first:stop]
        return PlannedLoad(request_id=name, local_ids=ids, remote_ids=ids)

    def _load_without_fault(self, children: Children) -> Iterator[Turn]:
        half = self.blocks // 2
        self._warm_up(children)
        for index in range(self.rounds):
            yield Turn(key="healthy", run=partial(self._load_from_both, children, f"healthy {index}", None))
            whole = {"first": self._planned(f"whole {index}")}
            halves = {
                "first": self._planned(f"half {index} a", 0, half),
                "second": self._planned(f"half {index} b", half),
            }
            for name, loads in (("whole", whole), ("halves", halves)):
                yield Turn(key=name, run=partial(self._load, children, loads))

    def _load_under_fault(self, moment: float, children: Children) -> Iterator[Turn]:
        healthy_s = self._warm_up(children)
        yield Turn(key=moment, run=partial(self._load_from_both, children, "struck", moment * healthy_s))

    def _warm_up(self, children: Children) -> float:
        """Both are connected, and have a history; how long a load from the first one takes."""
        for index, name in enumerate(("second", "first", "first")):
            last = self._load(children, {name: self._planned(f"warm up {index}")})
        return last.seconds

    def _load(self, children: Children, loads: dict[str, PlannedLoad]) -> Survived:
        """At once, each from its producer."""
        tickets = [children[name].run(EngineProducer.offer, [load])[0] for name, load in loads.items()]
        found = children["reader"].run(Reader.load, list(loads.values()), tickets)
        for name in loads:
            children[name].run(EngineProducer.end_leases)
        return found

    def _load_from_both(self, children: Children, name: str, after_s: float | None) -> Survived:
        """A load of both tickets; its first source meets its fate so long after its beginning, if it does."""
        load, sources = self._planned(name), [children[source] for source in _SOURCES]
        tickets = [source.run(EngineProducer.offer, [load])[0] for source in sources]
        wait = children["reader"].start(Reader.load, [load], [tickets])
        if after_s is not None:
            time.sleep(after_s)
            self._inject_fault(sources[0])
            return wait()
        survived = wait()
        for source in sources:
            source.run(EngineProducer.end_leases)
        return survived

    def _inject_fault(self, child: Child) -> None:
        if self.fate is Fate.KILL:
            os.kill(child.pid, signal.SIGKILL)
        else:
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(self.stopped_s)
            os.kill(child.pid, signal.SIGCONT)
