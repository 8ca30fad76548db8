"""Results of transfer: medians and ratios of the samples, and kvflow's promises about speed. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvflow.bench.loads import MIB, Fabric
from tests.bench.scenario import Outcome, Samples
from tests.bench.targets import Spread, TargetRow, at_least, at_most, percentile
from tests.bench.transfer.ranks import Contender, TurnResult
from tests.bench.transfer.sizes import ONE_BLOCK, LoadSize

BULK_BYTES = 16 * MIB
LAG_BYTES = 1024 * MIB
RATIO_TO_B_MIN = 0.95
RATIO_TO_A_MIN = {Fabric.SHM: 1.3, Fabric.TCP: 1.6}
ONE_BLOCK_OVER_B_US_MAX = 150.0
LAG_P99_MS_MAX = 2.0
LAG_MAX_MS_MAX = 10.0
IDLE_CPU_PERCENT_MAX = 1.0
BUSY_P99_TO_HOP_MAX = 1.5
_GB = 1e9
_LEGEND = (
    "raw_example (a): raw NIXL as its examples use it; raw_tuned (b): raw NIXL at its best, its backends set as "
    "kvflow's are; bare_hop (d): b awaited from a loop through one thread and nothing else; each in several pairs of "
    "processes. The median is that of the pairs' medians; what differs by less than they do may be chance. Ratios are "
    "of medians, above 1 is faster. With less than 100 samples the p99 is the slowest load. CPU is that of reader and "
    "producer. All blocks were compared once, then samples. Lag: how late a 1 ms ticker was on kvflow's event loop "
    "while it loaded. Idle: one open lease."
)

PairTurns = Sequence[Sequence[TurnResult]]
"""The turns of one contender at one size, for each pair that it was opened as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One contender at one size. Ratios are of speed: above 1 is faster than (a) or (b).

    A contender is opened several times, as several pairs of processes, and equal pairs differ. `median_s` is the median
    of `pair_medians_s`, in the order of opening; everything else is of all samples.
    """

    transport: Fabric
    size: str
    size_bytes: int = field(repr=False)
    contender: Contender
    samples: int
    median_s: float
    pair_medians_s: tuple[float, ...]
    p99_s: float
    gb_per_s: float
    ratio_to_a: float
    ratio_to_b: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Lag of a 1 ms ticker on kvflow's event loop while it loaded."""

    transport: Fabric
    size: str
    size_bytes: int = field(repr=False)
    lag_s: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """CPU of a producer with one open lease, in percent of a core."""

    transport: Fabric
    cpu_percent: float


def judge(samples: Samples, sizes: Mapping[LoadSize, int], pairs: int, *, busy: bool = False) -> Outcome:
    """Judge the samples. `sizes` has the bytes of a load of each size. A `busy` machine has targets of its own."""
    turns, speeds, lags = samples.of(TurnResult), list[Speed](), list[Lag]()
    idles = list(chain(*samples.of(Idle).values()))
    for idle in idles:
        for size, size_bytes in sizes.items():
            key = (idle.transport, size)
            found = {name: [turns[*key, name, pair] for pair in range(pairs)] for name in Contender}
            speeds += compare(idle.transport, size.label, size_bytes, found)
            lag_s = Spread.of([lag for turn in chain(*found[Contender.KVFLOW]) for lag in turn.lags_s])
            lags.append(Lag(transport=idle.transport, size=size.label, size_bytes=size_bytes, lag_s=lag_s))
    return Outcome(
        results={"speed": speeds, "loop_lag": lags, "idle": idles},
        legend=_LEGEND,
        targets=[
            target
            for idle in idles
            for target in (busy_targets_of(idle, speeds) if busy else targets_of(idle, speeds, lags))
        ],
    )


def compare(transport: Fabric, size: str, size_bytes: int, turns: Mapping[Contender, PairTurns]) -> Iterator[Speed]:
    """Put the turns of all pairs at one size together."""
    pair_medians_s = {name: tuple(statistics.median(_seconds(pair)) for pair in turns[name]) for name in turns}
    medians_s = {name: statistics.median(found) for name, found in pair_medians_s.items()}
    for name, pairs in turns.items():
        every, median_s = list(chain(*pairs)), medians_s[name]
        seconds = _seconds(every)
        yield Speed(
            transport=transport,
            size=size,
            size_bytes=size_bytes,
            contender=name,
            samples=len(seconds),
            median_s=median_s,
            pair_medians_s=pair_medians_s[name],
            p99_s=percentile(seconds, 99),
            gb_per_s=size_bytes / median_s / _GB,
            ratio_to_a=medians_s[Contender.EXAMPLE] / median_s,
            ratio_to_b=medians_s[Contender.TUNED] / median_s,
            cpu_s_per_gb=sum(turn.cpu_s for turn in every) / (size_bytes * len(seconds) / _GB),
        )


def _seconds(turns: Sequence[TurnResult]) -> list[float]:
    return list(chain.from_iterable(turn.seconds for turn in turns))


def targets_of(idle: Idle, speeds: Sequence[Speed], lags: Sequence[Lag]) -> Iterator[TargetRow]:
    """Compare the measurements over a transport with the promises."""
    name = idle.transport
    over = [row for row in speeds if row.transport is name]
    ours = [row for row in over if row.contender is Contender.KVFLOW]
    bulk = [row for row in ours if row.size_bytes >= BULK_BYTES]
    to_a, to_b = ([(getattr(row, ratio), row.size) for row in bulk] for ratio in ("ratio_to_a", "ratio_to_b"))
    yield at_least(f"{name}: bulk speed / (b)", RATIO_TO_B_MIN, to_b)
    yield at_least(f"{name}: bulk speed / (a)", RATIO_TO_A_MIN[name], to_a)
    tuned = {row.size: row.median_s for row in over if row.contender is Contender.TUNED}
    over_b_us = [((row.median_s - tuned[row.size]) * 1e6, row.size) for row in ours if row.size == ONE_BLOCK]
    yield at_most(f"{name}: one block, us over (b)", ONE_BLOCK_OVER_B_US_MAX, over_b_us)
    if name is Fabric.SHM:
        large = [row for row in lags if row.transport is name and row.size_bytes >= LAG_BYTES]
        p99, worst = ([(getattr(row.lag_s, of) * 1e3, row.size) for row in large] for of in ("p99", "max"))
        yield at_most(f"{name}: loop lag p99, 1 GB, ms", LAG_P99_MS_MAX, p99)
        yield at_most(f"{name}: loop lag max, 1 GB, ms", LAG_MAX_MS_MAX, worst)
    yield _idle_target(idle)


def busy_targets_of(idle: Idle, speeds: Sequence[Speed]) -> Iterator[TargetRow]:
    """The targets where other processes compute."""
    over = [row for row in speeds if row.transport is idle.transport and row.size == ONE_BLOCK]
    bare = [row.p99_s for row in over if row.contender is Contender.HOP]
    ratios = [(row.p99_s / p99_s, row.size) for row in over if row.contender is Contender.KVFLOW for p99_s in bare]
    yield at_most(f"{idle.transport}: one block, p99 to (d)'s, cores busy", BUSY_P99_TO_HOP_MAX, ratios)
    yield _idle_target(idle)


def _idle_target(idle: Idle) -> TargetRow:
    measured = [(idle.cpu_percent, "one open lease")]
    return at_most(f"{idle.transport}: idle CPU, % of a core", IDLE_CPU_PERCENT_MAX, measured)
