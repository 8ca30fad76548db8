"""From samples to numbers: medians, percentiles, ratios, and the results that tables and JSON are made of. Pure.

A percentile here is a sample that was really measured (nearest rank); below 100 samples the p99 is their maximum.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvflow.cli.bench.messages import TurnResult
from kvflow.cli.bench.settings import CacheShape, LoadSize, Transport

_GB = 1e9


class Contender(enum.StrEnum):
    EXAMPLE = "raw_example"
    TUNED = "raw_tuned"
    KVFLOW = "kvflow"
    HOP = "bare_hop"


@dataclass(frozen=True, slots=True, kw_only=True)
class LagSummary:
    """How late a 1 ms ticker was on an event loop."""

    samples: int
    p50_ms: float
    p99_ms: float
    max_ms: float


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
    """All contenders at one size. `descriptors` were asked for; kvflow made `kvflow_descriptors` of them."""

    label: str
    size_bytes: int
    blocks: int
    descriptors: int
    kvflow_descriptors: int
    contenders: Mapping[Contender, ContenderResult]
    lag: LagSummary
    phases_median_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportResult:
    """`idle_lag` is what the ticker shows on a loop that has nothing else to do: the floor of `lag`.

    `huge_page_share` is of the process whose cache has the least huge pages. Much below 1, equal pairs differ more.
    """

    transport: Transport
    sizes: tuple[SizeResult, ...]
    idle_cpu_percent: float
    idle_lag: LagSummary
    huge_page_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    descriptors: int
    median_s: float


PairTurns = Sequence[Sequence[TurnResult]]
"""The turns of one contender at one size, for each pair that it was opened as."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of the samples do not exceed."""
    if not samples:
        raise ValueError("percentile of no samples")
    if not 0 < percent <= 100:
        raise ValueError(f"percent: expected above 0 and at most 100, got {percent}")
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[rank - 1]


def summarize_lags(lags_s: Sequence[float]) -> LagSummary:
    return LagSummary(
        samples=len(lags_s),
        p50_ms=percentile(lags_s, 50) * 1e3,
        p99_ms=percentile(lags_s, 99) * 1e3,
        max_ms=max(lags_s) * 1e3,
    )


def summarize_size(shape: CacheShape, size: LoadSize, turns: Mapping[Contender, PairTurns]) -> SizeResult:
    """Put the turns of all pairs at one size together."""
    size_bytes = size.blocks * shape.block_size_bytes
    medians_s = {name: statistics.median(_pair_medians(turns[name])) for name in turns}
    ours = _flat(turns[Contender.KVFLOW])
    return SizeResult(
        label=size.label,
        size_bytes=size_bytes,
        blocks=size.blocks,
        descriptors=size.blocks * shape.block_descriptors,
        kvflow_descriptors=ours[-1].descriptors,
        contenders={name: _summarize_contender(turns[name], size_bytes, medians_s) for name in turns},
        lag=summarize_lags([lag for turn in ours for lag in turn.lags_s]),
        phases_median_s=_median_phases([phases for turn in ours for phases in turn.phases_s]),
    )


def _summarize_contender(pairs: PairTurns, size_bytes: int, medians_s: Mapping[Contender, float]) -> ContenderResult:
    turns = _flat(pairs)
    seconds = _seconds(turns)
    pair_medians_s = _pair_medians(pairs)
    median_s = statistics.median(pair_medians_s)
    return ContenderResult(
        samples=len(seconds),
        median_s=median_s,
        pair_medians_s=pair_medians_s,
        p99_s=percentile(seconds, 99),
        gb_per_s=size_bytes / median_s / _GB,
        cpu_s_per_gb=sum(turn.cpu_s for turn in turns) / (size_bytes * len(seconds) / _GB),
        ratio_to_a=medians_s[Contender.EXAMPLE] / median_s,
        ratio_to_b=medians_s[Contender.TUNED] / median_s,
        checked_blocks=sum(turn.checked_blocks for turn in turns),
        seconds=tuple(seconds),
    )


def _pair_medians(pairs: PairTurns) -> tuple[float, ...]:
    return tuple(statistics.median(_seconds(turns)) for turns in pairs)


def _flat(pairs: PairTurns) -> list[TurnResult]:
    return [turn for turns in pairs for turn in turns]


def _seconds(turns: Sequence[TurnResult]) -> list[float]:
    return [seconds for turn in turns for seconds in turn.seconds]


def _median_phases(phases_s: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for phases in phases_s for name in phases)
    return {name: statistics.median(phases.get(name, 0.0) for phases in phases_s) for name in names}
