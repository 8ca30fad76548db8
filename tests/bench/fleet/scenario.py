"""The bench `fleet`: fleets of several sizes, all in virtual time, and what a peer costs in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from kvflow.bench.loads import SettingsError
from tests.bench.fleet.results import MemoryResult, PhaseResult
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from tests.bench.targets import at_most

_LEGEND = (
    "Real runtimes in virtual time; bytes take no time, connections and answers are modelled. right, lost (with a rank "
    "that was killed) and failed: loads. settle: until every rank is connected again and all loads have ended. "
    "connections: to one listener at once. wait: the longest for an answer. Memory is Python's; NIXL's is not in it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetBench:
    """Run fleets of real runtimes in virtual time: cold starts, churn, rolling restarts, the storm after a restart.

    It takes minutes and some gigabytes; nothing is transferred between machines.
    """

    sizes: Annotated[str, "How many prefill ranks, and as many decode ranks; several by commas."] = "125,250,500,1000"
    peers: Annotated[int, "How many prefill ranks each decode rank has requests for."] = 16
    hot: Annotated[int, "How many of them are the same for all decode ranks."] = 4
    rate: Annotated[float, "Requests a second for each decode rank."] = 1.0
    answer_ms: Annotated[float, "What a question takes of the loop of the rank that is asked."] = 1.0
    layers: Annotated[int, "Layers of the caches whose memory for each peer is counted."] = 80

    def sets(self) -> Sequence[RankSet]:
        try:
            sizes = [int(size) for size in self.sizes.split(",")]
        except ValueError:
            raise SettingsError(f"sizes: expected numbers and commas, got {self.sizes[:80]!r}") from None
        if min(sizes) < 1 or not self.hot <= self.peers:
            given = f"{self.sizes}, {self.hot} and {self.peers}"
            raise SettingsError(f"sizes, hot, peers: expected sizes of 1 or more and hot <= peers, got {given}")
        return [RankSet(note="fleets in virtual time", turns=partial(self._turns, sizes))]

    def _turns(self, sizes: Sequence[int], _: Children) -> Iterable[Turn]:
        for size in sizes:
            note = f"{size} prefill and {size} decode ranks"
            yield Turn(key=size, run=partial(self._run, size), note=note)
            note = f"memory of a rank with {size} peers"
            yield Turn(key=("memory", size), run=partial(self._measure_memory, size), note=note)

    def _run(self, size: int) -> list[PhaseResult]:
        from tests.bench.fleet.channel import Costs  # these import torch, which takes a second
        from tests.bench.fleet.life import run_fleet
        from tests.bench.fleet.traffic import FleetShape

        shape = FleetShape(prefill=size, decode=size, peers=min(self.peers, size), hot=min(self.hot, size))
        return run_fleet(shape, Costs(answer_s=self.answer_ms / 1e3), self.rate)

    def _measure_memory(self, size: int) -> MemoryResult:
        from tests.bench.fleet.memory import measure_memory

        return measure_memory(size, self.layers)

    def judge(self, samples: Samples) -> Outcome:
        phases = [row for rows in samples.of(list).values() for row in rows[0]]
        memory = [taken[0] for taken in samples.of(MemoryResult).values()]
        failed = [(float(row.failed + row.wrong), f"{row.ranks}, {row.phase}") for row in phases]
        most = [(row.loaded_bytes / 1024, f"{row.peers} peers") for row in memory]
        return Outcome(
            results={"fleet": phases, "memory": memory},
            legend=_LEGEND,
            targets=[at_most("honest loads that fail", 0, failed), at_most("KiB for each peer", 50, most)],
        )
