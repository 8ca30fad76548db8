"""From loads to rows: speeds, ratios within a round, and what this run says about the targets. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvflow.cli.bench.messages import LoadResult
from kvflow.cli.bench.samples import percentile
from kvflow.cli.bench.targets import TargetRow, at_least, at_most
from kvflow.cli.topology_bench.cuts import Case
from kvflow.cli.topology_bench.prompts import PeerMemory, PromptPlanning
from kvflow.cli.topology_bench.settings import TopologySettings

SLICE_RATIO_MIN = 0.8
SLICE_PIECE_BYTES = 32 << 10
PLANNING_MS_MAX = 30.0
PEER_MEMORY_GROWTH_MAX = 1.01
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case over all rounds, one load a round.

    `size_bytes` is what was wanted, and what speeds are of; `read_bytes` is what was read for it. `ratio` is of speed,
    to `baseline`: the median over the rounds of the ratio within each, `ratio_low` and `ratio_high` its quartiles.
    """

    label: str
    baseline: str
    consumer: str
    producers: str
    is_head_slice: bool
    size_bytes: int
    read_bytes: int
    descriptors: int
    piece_bytes: int
    median_s: float
    low_s: float
    high_s: float
    gb_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    checked_bytes: int
    phases_median_s: Mapping[str, float]
    seconds: tuple[float, ...]


def summarize(
    settings: TopologySettings, loads: Mapping[str, Sequence[LoadResult]], checked_bytes: Mapping[str, int]
) -> tuple[CaseResult, ...]:
    """`loads` has each case's by label, round by round; `checked_bytes` what was compared besides."""
    return tuple(
        _summarize_case(settings, case, loads[case.label], loads[case.baseline or case.label], checked_bytes)
        for case in settings.cases
    )


def _summarize_case(
    settings: TopologySettings,
    case: Case,
    loads: Sequence[LoadResult],
    baseline: Sequence[LoadResult],
    checked_bytes: Mapping[str, int],
) -> CaseResult:
    seconds = [load.seconds for load in loads]
    ratios = [other.seconds / load.seconds for other, load in zip(baseline, loads, strict=True)]
    size_bytes, read_bytes = settings.useful_bytes(case.consumer), loads[-1].size_bytes
    # Blocks that happen to be neighbours on both sides are read as one, so rounds differ a little.
    descriptors = statistics.median_high(load.descriptors for load in loads)
    return CaseResult(
        label=case.label,
        baseline=case.baseline or case.label,
        consumer=str(case.consumer),
        producers=f"{len(case.producers)} x {case.producers[0]}" if len(case.producers) > 1 else str(case.producers[0]),
        is_head_slice=case.is_head_slice,
        size_bytes=size_bytes,
        read_bytes=read_bytes,
        descriptors=descriptors,
        piece_bytes=read_bytes // descriptors,
        median_s=statistics.median(seconds),
        low_s=percentile(seconds, 25),
        high_s=percentile(seconds, 75),
        gb_per_s=size_bytes / statistics.median(seconds) / _GB,
        ratio=statistics.median(ratios),
        ratio_low=percentile(ratios, 25),
        ratio_high=percentile(ratios, 75),
        checked_bytes=checked_bytes[case.label] + sum(load.checked_bytes for load in loads),
        phases_median_s={name: statistics.median(load.phases_s[name] for load in loads) for name in loads[-1].phases_s},
        seconds=tuple(seconds),
    )


def judge(
    cases: Sequence[CaseResult], planning: Sequence[PromptPlanning], memory: Sequence[PeerMemory]
) -> tuple[TargetRow, ...]:
    """Hold every result against the targets."""
    slices = [
        (case.ratio, case.label) for case in cases if case.is_head_slice and case.piece_bytes >= SLICE_PIECE_BYTES
    ]
    return (
        at_least("HND slices >= 32 KiB, ratio", SLICE_RATIO_MIN, slices),
        *(at_most(f"planning, {plan.label}, ms", PLANNING_MS_MAX, [(plan.median_s * 1e3, "")]) for plan in planning),
        at_most(
            "peer memory, 16 x blocks / 1",
            PEER_MEMORY_GROWTH_MAX,
            [(peer.growth, f"{peer.regions} regions") for peer in memory],
        ),
    )
