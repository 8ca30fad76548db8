"""From samples to medians, ratios, tables, and what kvflow promises about speed. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from kvflow.bench.cache import CacheShape
from kvflow.bench.loads import MIB, Transport
from kvflow.bench.scenario import Outcome, Samples, Table
from kvflow.bench.targets import Spread, TargetRow, at_least, at_most, in_ms, percentile
from kvflow.bench.transfer.ranks import Contender, TurnResult

BULK_BYTES = 16 * MIB
LAG_BYTES = 1024 * MIB
RATIO_TO_B_MIN = 0.95
RATIO_TO_A_MIN = {Transport.SHM: 1.3, Transport.TCP: 1.6}
ONE_BLOCK_OVER_B_US_MAX = 150.0
LAG_P99_MS_MAX = 2.0
LAG_MAX_MS_MAX = 10.0
IDLE_CPU_PERCENT_MAX = 1.0
_GB = 1e9
_TITLES = {
    Contender.EXAMPLE: "(a) example",
    Contender.TUNED: "(b) tuned",
    Contender.KVFLOW: "(c) kvflow",
    Contender.HOP: "(d) bare hop",
}
_LEGEND = (
    "(a) raw NIXL as its examples use it, (b) raw NIXL at its best, "
    "(d) b awaited from a loop through one thread and nothing else; n loads each, by several pairs of processes. "
    "p50: median of the pairs' medians; pairs: their least and greatest, what differs by less may be chance. "
    "Ratios are of p50, above 1 is faster. "
    "With n < 100 the p99 is the slowest load. s/GB: CPU of reader and producer. "
    "All blocks were compared once, then samples."
)

PairTurns = Sequence[Sequence[TurnResult]]
"""The turns of one contender at one size, for each pair that it was opened as."""


class LoadSize(NamedTuple):
    """What one load moves."""

    label: str
    blocks: int
    loads_per_turn: int


class Idle(NamedTuple):
    """CPU of a producer with one open lease, in percent of a core."""

    cpu_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """One contender at one size. Ratios are of speed: above 1 is faster than (a) or (b).

    A contender is opened several times, as several pairs of processes, and equal pairs differ. `median_s` is the median
    of `pair_medians_s`, in the order of opening; everything else is of all samples.
    """

    samples: int
    median_s: float
    pair_medians_s: tuple[float, ...]
    p99_s: float
    gb_per_s: float
    cpu_s_per_gb: float
    ratio_to_a: float
    ratio_to_b: float
    checked_blocks: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """All contenders at one size. `lag_s` is how late a 1 ms ticker was on kvflow's event loop while it loaded."""

    label: str
    size_bytes: int
    blocks: int
    contenders: Mapping[Contender, ContenderResult]
    lag_s: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportResult:
    transport: Transport
    sizes: tuple[SizeResult, ...]
    idle_cpu_percent: float


def judge(samples: Samples, shape: CacheShape, sizes: Sequence[LoadSize], pairs: int) -> Outcome:
    turns = samples.of(TurnResult)

    def of_size(transport: Transport, size: LoadSize) -> SizeResult:
        found = {name: [turns[transport, size, name, pair] for pair in range(pairs)] for name in Contender}
        return summarize_size(shape, size, found)

    transports = [
        TransportResult(
            transport=transport,
            sizes=tuple(of_size(transport, size) for size in sizes),
            idle_cpu_percent=idle.cpu_percent,
        )
        for transport, (idle,) in samples.of(Idle).items()
    ]
    title = f"scattered blocks, {shape.region_block_size_bytes >> 10} KiB a descriptor"
    return Outcome(
        results={"transports": transports},
        tables=[table for result in transports for table in (_speed_table(result, title), _loop_table(result))],
        targets=list(chain.from_iterable(map(targets_of, transports))),
    )


def summarize_size(shape: CacheShape, size: LoadSize, turns: Mapping[Contender, PairTurns]) -> SizeResult:
    """Put the turns of all pairs at one size together."""
    size_bytes = size.blocks * shape.block_size_bytes
    ours = list(chain(*turns[Contender.KVFLOW]))
    pair_medians_s = {name: tuple(statistics.median(_seconds(pair)) for pair in pairs) for name, pairs in turns.items()}
    medians_s = {name: statistics.median(medians) for name, medians in pair_medians_s.items()}

    def summarize(name: Contender) -> ContenderResult:
        every = list(chain(*turns[name]))
        seconds = _seconds(every)
        return ContenderResult(
            samples=len(seconds),
            median_s=medians_s[name],
            pair_medians_s=pair_medians_s[name],
            p99_s=percentile(seconds, 99),
            gb_per_s=size_bytes / medians_s[name] / _GB,
            cpu_s_per_gb=sum(turn.cpu_s for turn in every) / (size_bytes * len(seconds) / _GB),
            ratio_to_a=medians_s[Contender.EXAMPLE] / medians_s[name],
            ratio_to_b=medians_s[Contender.TUNED] / medians_s[name],
            checked_blocks=sum(turn.checked_bytes for turn in every) // shape.block_size_bytes,
            seconds=seconds,
        )

    return SizeResult(
        label=size.label,
        size_bytes=size_bytes,
        blocks=size.blocks,
        contenders={name: summarize(name) for name in turns},
        lag_s=Spread.of([lag for turn in ours for lag in turn.lags_s]),
    )


def _seconds(turns: Sequence[TurnResult]) -> tuple[float, ...]:
    return tuple(chain.from_iterable(turn.seconds for turn in turns))


def targets_of(result: TransportResult) -> Iterator[TargetRow]:
    """Hold a result against what is promised."""
    name = result.transport
    ours = [(size, size.contenders[Contender.KVFLOW]) for size in result.sizes]
    bulk = [(size.label, found) for size, found in ours if size.size_bytes >= BULK_BYTES]
    yield at_least(f"{name}: bulk speed / (b)", RATIO_TO_B_MIN, [(found.ratio_to_b, label) for label, found in bulk])
    to_a = [(found.ratio_to_a, label) for label, found in bulk]
    yield at_least(f"{name}: bulk speed / (a)", RATIO_TO_A_MIN[name], to_a)
    over_b_us = [
        ((found.median_s - size.contenders[Contender.TUNED].median_s) * 1e6, size.label)
        for size, found in ours
        if size.blocks == 1
    ]
    yield at_most(f"{name}: one block, us over (b)", ONE_BLOCK_OVER_B_US_MAX, over_b_us)
    if name is Transport.SHM:
        lags = [(size.lag_s, size.label) for size in result.sizes if size.size_bytes >= LAG_BYTES]
        p99, worst = ([(getattr(lag_s, of) * 1e3, label) for lag_s, label in lags] for of in ("p99", "max"))
        yield at_most(f"{name}: loop lag p99, 1 GB, ms", LAG_P99_MS_MAX, p99)
        yield at_most(f"{name}: loop lag max, 1 GB, ms", LAG_MAX_MS_MAX, worst)
    idle = [(result.idle_cpu_percent, "one open lease")]
    yield at_most(f"{name}: idle CPU, % of a core", IDLE_CPU_PERCENT_MAX, idle)


def _speed_table(result: TransportResult, title: str) -> Table:
    rows: list[tuple[str, ...]] = []
    for size in result.sizes:
        rows += [(size.label,), *(_speed_cells(name, found) for name, found in size.contenders.items()), ()]
    return Table(
        title=f"{result.transport}: {title}",
        headings=("one load by", "n", "p50 ms", "pairs", "p99 ms", "GB/s", "/(a)", "/(b)", "s/GB"),
        rows=rows,
        caption=_LEGEND,
    )


def _speed_cells(contender: Contender, found: ContenderResult) -> tuple[str, ...]:
    return (
        _TITLES[contender],
        str(found.samples),
        _ms(found.median_s),
        "..".join(_ms(bound(found.pair_medians_s)) for bound in (min, max)),
        _ms(found.p99_s),
        *(f"{value:.2f}" for value in (found.gb_per_s, found.ratio_to_a, found.ratio_to_b, found.cpu_s_per_gb)),
    )


def _ms(seconds: float) -> str:
    """0.0584, 0.584, 5.84, 58.4, 584, 5840: at least three significant digits, never an exponent."""
    decimals = max(0, 2 - math.floor(math.log10(seconds * 1e3))) if seconds > 0 else 0
    return f"{seconds * 1e3:.{decimals}f}"


def _loop_table(result: TransportResult) -> Table:
    return Table(
        title=f"{result.transport}: lag of kvflow's event loop, 1 ms ticker",
        headings=("while loading", "ticks", "p50 ms", "p99 ms", "max ms"),
        rows=[(size.label, *in_ms(size.lag_s)) for size in result.sizes],
        caption=f"idle CPU, one open lease: {result.idle_cpu_percent:.2f} % of a core",
    )
