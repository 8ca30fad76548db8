"""The parent of the bench: rounds of turns, one contender at a time, and what is measured besides.

Equal processes differ in speed for as long as they live, so every contender is opened `pairs` times, one set of
contenders after the other. In each set and for each size, one turn per contender with nothing timed (the first set
compares every block in it), then the set's share of the rounds, in which each contender has one turn with the same
loads. The order rotates from round to round, so that a neighbour's noise and the state of the caches hit all alike.
While children work, the parent sleeps in a read; it draws no progress bars.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from kvflow.cli.bench.cache import huge_page_share
from kvflow.cli.bench.children import BenchError, Pair
from kvflow.cli.bench.clocks import process_cpu_s
from kvflow.cli.bench.contenders import open_pairs
from kvflow.cli.bench.messages import Done, Load, Offer, Offered, OpenLease, RunTurn, Settle, TickIdle, TurnResult
from kvflow.cli.bench.planning import measure_planning
from kvflow.cli.bench.samples import (
    Contender,
    LagSummary,
    PlanningResult,
    TransportResult,
    summarize_lags,
    summarize_size,
)
from kvflow.cli.bench.settings import BenchSettings, LoadSize, Transport, loads_of_turn
from kvflow.cli.bench.targets import TargetRow, judge

_PROCESSES = 2 * len(Contender)
_PROCESS_BASE_BYTES = 512 << 20
_LAG_FLOOR_S = 0.5
_SETTLE_S = 0.5

Note = Callable[[str], None]
Turns = dict[Contender, list[TurnResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Everything one run of the bench found out."""

    settings: BenchSettings
    machine: Mapping[str, str | int | float]
    transports: tuple[TransportResult, ...]
    planning: PlanningResult
    targets: tuple[TargetRow, ...]


def run_bench(settings: BenchSettings, note: Note) -> BenchReport:
    """Measure everything; raises BenchError when a child fails or a block does not hold the right bytes."""
    _check_memory(settings)
    machine = describe_machine()
    note(f"load average {machine['load_average_1m']:.1f} before the start; others' work is in every number")
    planning = measure_planning()
    transports = tuple(_run_transport(settings, transport, note) for transport in settings.transports)
    return BenchReport(
        settings=settings,
        machine=machine,
        transports=transports,
        planning=planning,
        targets=judge(transports, planning),
    )


def _run_transport(settings: BenchSettings, transport: Transport, note: Note) -> TransportResult:
    turns: list[dict[LoadSize, Turns]] = []
    huge_page_shares: list[float] = []
    for index in range(settings.pairs):
        note(f"{transport}: pairs {index + 1} of {settings.pairs}: starting {_PROCESSES} processes")
        with open_pairs(transport, settings.shape) as pairs:
            rounds = settings.rounds_of_pair(index)
            turns.append({size: _run_size(settings, size, rounds, pairs, note) for size in settings.sizes})
            huge_page_shares += _huge_page_shares(settings, pairs)
            if index == settings.pairs - 1:
                note(f"{transport}: idle for {settings.idle_s:g} s")
                idle_cpu_percent, idle_lag = _measure_idle(settings, pairs[Contender.KVFLOW])
    return TransportResult(
        transport=transport,
        sizes=tuple(
            summarize_size(settings.shape, size, {name: [of_set[size][name] for of_set in turns] for name in Contender})
            for size in settings.sizes
        ),
        idle_cpu_percent=idle_cpu_percent,
        idle_lag=idle_lag,
        huge_page_share=min(huge_page_shares),
    )


def _run_size(
    settings: BenchSettings, size: LoadSize, rounds: range, pairs: Mapping[Contender, Pair], note: Note
) -> Turns:
    check_all = 0 in rounds  # the first set: the others run the same code, and 1 GB takes seconds to compare
    first = "all blocks compared" if check_all else "a turn untimed"
    note(f"  {size.label}: {first}, then {len(rounds)} x {size.loads_per_turn} loads")
    first_loads = loads_of_turn(settings, size, "check")
    for contender, pair in pairs.items():
        _run_turn(contender, pair, first_loads, check_all=check_all)
    turns: Turns = {contender: [] for contender in pairs}
    for index in rounds:
        loads = loads_of_turn(settings, size, f"round {index}")
        for contender in _rotated(tuple(pairs), index):
            turns[contender].append(_run_turn(contender, pairs[contender], loads, check_all=False))
    return turns


def _huge_page_shares(settings: BenchSettings, pairs: Mapping[Contender, Pair]) -> list[float]:
    children = [child for pair in pairs.values() for child in (pair.producer, pair.reader)]
    return [huge_page_share(child.pid, settings.shape) for child in children]


def _rotated(contenders: tuple[Contender, ...], index: int) -> tuple[Contender, ...]:
    start = index % len(contenders)
    return contenders[start:] + contenders[:start]


def _run_turn(contender: Contender, pair: Pair, loads: tuple[Load, ...], *, check_all: bool) -> TurnResult:
    with pair.awake():
        offered = pair.producer.ask(Offer(loads=loads), Offered)
        result = pair.reader.ask(RunTurn(loads=loads, tickets=offered.tickets, check_all=check_all), TurnResult)
        pair.producer.ask(Settle(), Done)
    if not result.checked_blocks:
        raise BenchError(f"{contender}: a turn ended without any block compared")
    return result


def _measure_idle(settings: BenchSettings, pair: Pair) -> tuple[float, LagSummary]:
    """CPU of the producer with one open lease in percent of a core, and the ticker's floor on the idle reader."""
    load = loads_of_turn(settings, settings.sizes[0], "idle")[0]
    pair.producer.ask(OpenLease(load=load), Done)
    time.sleep(_SETTLE_S)
    cpu_s, start = process_cpu_s(pair.producer.pid), time.perf_counter()
    time.sleep(settings.idle_s)
    cpu_s = process_cpu_s(pair.producer.pid) - cpu_s
    percent = 100 * cpu_s / (time.perf_counter() - start)
    return percent, summarize_lags(pair.reader.ask(TickIdle(seconds=_LAG_FLOOR_S), TurnResult).lags_s)


def _check_memory(settings: BenchSettings) -> None:
    """Refuse to start what the machine cannot hold: swapping would be measured otherwise."""
    need = _PROCESSES * (settings.shape.size_bytes + _PROCESS_BASE_BYTES)
    available = available_bytes()
    if need > available:
        raise BenchError(
            f"{_PROCESSES} processes with caches of {settings.shape.size_bytes >> 20} MB need {need >> 20} MB, "
            f"available are {available >> 20} MB; ask for smaller --sizes"
        )


def available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    raise BenchError("/proc/meminfo does not say MemAvailable")


def describe_machine() -> dict[str, str | int | float]:
    """What a number depends on besides the code. The load is taken before we add our own."""
    packages = {name: version(name) for name in ("torch", "nixl", "numpy", "uvloop")}
    return {
        "cpus": os.cpu_count() or 0,
        "load_average_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        **packages,
    }
