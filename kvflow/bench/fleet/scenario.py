"""`kvflow bench fleet`: fleets of several sizes, all in virtual time, and what a peer costs in memory."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from kvflow.bench.fleet.channel import Costs
from kvflow.bench.fleet.memory import MemorySample, measure_memory
from kvflow.bench.fleet.ranks import FleetRank
from kvflow.bench.fleet.traffic import Fleet, FleetShape, Loads
from kvflow.bench.loads import SettingsError
from kvflow.bench.scenario import Children, Outcome, RankSet, Samples, Turn
from kvflow.bench.targets import at_most
from kvflow.testing.virtual_loop import run_virtual

_LEGEND = (
    "Real runtimes in virtual time; bytes take no time, connections and answers are modelled. right, lost (with a rank "
    "that was killed) and failed: loads. settle: until every rank is connected again and all loads have ended. "
    "connections: to one listener at once. wait: the longest for an answer. Memory is Python's; NIXL's is not in it."
)
_PHASE_S = 5.0
_BACKLOG = 8
_FILES, _PEER_FILES, _READER_FILES = 64, 2, 2  # as `kvflow doctor` counts them


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """What one phase did to a fleet of `ranks` prefill and as many decode ranks."""

    ranks: int
    phase: str
    right: int
    lost: int
    failed: int
    """Loads whose ranks both lived, and whose prefill rank was asked by a decode rank in service."""
    errors: str
    wrong: int
    settle_s: float
    slowest_s: float
    connections: int
    dropped_all: int
    wait_s: float
    files: int
    """That the busiest prefill rank would have open, with NIXL over tcp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """Bytes for each peer of a rank."""

    peers: int
    layers: int
    connected_bytes: int
    loaded_bytes: int


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
    figure: Annotated[str, "An SVG file for the curves; needs kvflow[figures]."] = ""

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
            yield Turn(key=("memory", size), run=partial(measure_memory, size, self.layers), note=note)

    def _run(self, size: int) -> list[PhaseResult]:
        shape = FleetShape(prefill=size, decode=size, peers=min(self.peers, size), hot=min(self.hot, size))
        return run_fleet(shape, Costs(answer_s=self.answer_ms / 1e3), self.rate)

    def judge(self, samples: Samples) -> Outcome:
        phases = [row for rows in samples.of(list).values() for row in rows[0]]
        memory = [_memory(taken[0]) for taken in samples.of(MemorySample).values()]
        failed = [(float(row.failed + row.wrong), f"{row.ranks}, {row.phase}") for row in phases]
        most = [(row.loaded_bytes / 1024, f"{row.peers} peers") for row in memory]
        return Outcome(
            results={"fleet": phases, "memory": memory},
            legend=_LEGEND,
            targets=[at_most("honest loads that fail", 0, failed), at_most("KiB for each peer", 50, most)],
        )


def run_fleet(shape: FleetShape, costs: Costs, rate: float) -> list[PhaseResult]:
    """A fleet's life from its cold start to the storm; what is left of it concerns nobody, nor what it logs."""
    level = logging.getLogger("kvflow").level
    logging.getLogger("kvflow").setLevel(logging.CRITICAL + 1)
    try:
        return run_virtual(_live(shape, costs, rate))
    finally:
        logging.getLogger("kvflow").setLevel(level)
        gc.collect()


async def _live(shape: FleetShape, costs: Costs, rate: float) -> list[PhaseResult]:
    fleet = Fleet(shape, costs)
    await fleet.start(fleet.prefill)
    rows: list[PhaseResult] = []
    requests = partial(fleet.serve_for, _PHASE_S, rate)
    kills, at_once = max(1, shape.prefill // 50), max(1, shape.prefill // 10)
    phases: dict[str, Callable[[], list[Coroutine[Any, Any, object]]]] = {
        "cold start": lambda: [fleet.start(fleet.decode)],
        "steady": lambda: [requests()],
        "churn": lambda: [requests(), fleet.churn(_PHASE_S, kills)],
        "rolling restart": lambda: [requests(), fleet.roll(fleet.prefill, at_once)],
        "all decode restart": lambda: [requests(), fleet.restart_all(fleet.decode, _BACKLOG)],
    }
    for name, work in phases.items():
        start_s = asyncio.get_running_loop().time()
        for port in fleet.wires.ports.values():
            port.most, port.recycled, port.slowest_s = len(port.connections), 0, 0.0
        async with fleet.phase() as loads:
            await asyncio.gather(*work())
        rows.append(_row(fleet, name, loads, asyncio.get_running_loop().time() - start_s))
    return rows


def _row(fleet: Fleet, phase: str, loads: Loads, settle_s: float) -> PhaseResult:
    ports = [fleet.wires.port(rank.address) for rank in fleet.prefill]
    return PhaseResult(
        ranks=fleet.shape.prefill,
        phase=phase,
        right=loads.right,
        lost=loads.lost,
        failed=sum(loads.errors.values()),
        errors=", ".join(f"{count} {name}" for name, count in sorted(loads.errors.items())),
        wrong=loads.wrong,
        settle_s=settle_s,
        slowest_s=loads.slowest_s,
        connections=max(port.most for port in ports),
        dropped_all=sum(port.recycled for port in ports),
        wait_s=max(port.slowest_s for port in ports),
        files=max(map(_files, fleet.prefill)),
    )


def _files(rank: FleetRank) -> int:
    runtime = rank.runtime
    now = runtime.statistics() if runtime is not None else None
    return 0 if now is None else _FILES + _PEER_FILES * len(now.peers) + _READER_FILES * now.readers


def _memory(sample: MemorySample) -> MemoryResult:
    return MemoryResult(
        peers=sample.peers,
        layers=sample.layers,
        connected_bytes=round(sample.connected_bytes),
        loaded_bytes=round(sample.loaded_bytes),
    )
