"""A fleet's life from its cold start to the storm, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from kvflow.testing.virtual_loop import run_virtual
from tests.bench.fleet.channel import Costs
from tests.bench.fleet.ranks import FleetRank
from tests.bench.fleet.results import PhaseResult
from tests.bench.fleet.traffic import Fleet, FleetShape, Loads

_PHASE_S = 5.0
_BACKLOG = 8
_FILES, _PEER_FILES, _READER_FILES = 64, 2, 2  # as `kvflow doctor` counts them


def run_fleet(shape: FleetShape, costs: Costs, rate: float) -> list[PhaseResult]:
    """Run a fleet from its cold start to the storm. Errors and log lines that are left at the end are dropped."""
    level = logging.getLogger("kvflow").level
    logging.getLogger("kvflow").setLevel(logging.CRITICAL + 1)
    try:
        return run_virtual(_run_phases(shape, costs, rate))
    finally:
        logging.getLogger("kvflow").setLevel(level)
        gc.collect()


async def _run_phases(shape: FleetShape, costs: Costs, rate: float) -> list[PhaseResult]:
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
        for port in fleet.connections_model.ports.values():
            port.connections_peak, port.times_dropped, port.slowest_s = len(port.connections), 0, 0.0
        async with fleet.phase() as loads:
            await asyncio.gather(*work())
        rows.append(_row(fleet, name, loads, asyncio.get_running_loop().time() - start_s))
    return rows


def _row(fleet: Fleet, phase: str, loads: Loads, settle_s: float) -> PhaseResult:
    ports = [fleet.connections_model.port(rank.address) for rank in fleet.prefill]
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
        connections=max(port.connections_peak for port in ports),
        dropped_all=sum(port.times_dropped for port in ports),
        wait_s=max(port.slowest_s for port in ports),
        files=max(map(_files, fleet.prefill)),
    )


def _files(rank: FleetRank) -> int:
    runtime = rank.runtime
    now = runtime.statistics() if runtime is not None else None
    return 0 if now is None else _FILES + _PEER_FILES * len(now.peers) + _READER_FILES * now.readers
