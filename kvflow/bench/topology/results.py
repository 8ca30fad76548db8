"""From loads to rows: speeds, ratios within a round, and what a run says about the targets. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvflow.bench.child import BenchError
from kvflow.bench.scenario import Outcome, Samples, Table
from kvflow.bench.targets import Spread, TargetRow, at_least
from kvflow.bench.topology.cuts import CASES, Case, Cut
from kvflow.bench.topology.ranks import LoadResult

SLICE_RATIO_MIN = 0.8
SLICE_PIECE_BYTES = 32 << 10
_GB = 1e9
_LEGEND = (
    "One rank loads the same tokens into the same memory; only the producer's cut differs, unless the "
    "row says otherwise. MB are read, which may be more than is wanted, in pieces of so many KiB; GB/s are of what is "
    "wanted. Ratios are of speed to the first row of the block: the median of the rounds' ratios, and their quartiles. "
    "The time from a staged producer runs from the offer on, copying included. All bytes of one load were compared, "
    "then a layer of each."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case over all rounds, one load a round.

    `size_bytes` is what was wanted, and what speeds are of; `read_bytes` is what was read for it. `ratio` is of speed,
    to `baseline`: of each round to the same round's.
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
    load_s: Spread
    gb_per_s: float
    ratio: Spread
    checked_bytes: int
    phases_median_s: Mapping[str, float]
    seconds: tuple[float, ...]


def judge(samples: Samples, useful_bytes: Callable[[Cut], int], title: str) -> Outcome:
    loads = samples.of(LoadResult)
    for case in CASES:
        (first,), wanted = loads["check", case], useful_bytes(case.consumer)
        if first.checked_bytes != wanted:
            raise BenchError(f"{case.label}: {first.checked_bytes} bytes compared of {wanted}")
    cases = summarize({case.label: loads["check", case] + loads["rounds", case] for case in CASES}, useful_bytes)
    return Outcome(
        results={"cases": cases},
        tables=[_table(cases, title)],
        targets=[slice_target(cases)],
    )


def summarize(loads: Mapping[str, Sequence[LoadResult]], useful_bytes: Callable[[Cut], int]) -> list[CaseResult]:
    """`loads` has each case's by label: the one that was compared as a whole, then one a round."""
    return [
        _summarize_case(case, loads[case.label], loads[case.baseline or case.label], useful_bytes(case.consumer))
        for case in CASES
    ]


def _summarize_case(
    case: Case, loads: Sequence[LoadResult], baseline: Sequence[LoadResult], size_bytes: int
) -> CaseResult:
    _, *timed = loads
    seconds = [load.seconds for load in timed]
    ratios = [other.seconds / load.seconds for other, load in zip(baseline[1:], timed, strict=True)]
    # Blocks that happen to be neighbours on both sides are read as one, so rounds differ a little.
    descriptors, read_bytes = statistics.median_high(load.descriptors for load in timed), timed[-1].size_bytes
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
        load_s=Spread.of(seconds),
        gb_per_s=size_bytes / statistics.median(seconds) / _GB,
        ratio=Spread.of(ratios),
        checked_bytes=sum(load.checked_bytes for load in loads),
        phases_median_s={name: statistics.median(load.phases_s[name] for load in timed) for name in timed[-1].phases_s},
        seconds=tuple(seconds),
    )


def slice_target(cases: Sequence[CaseResult]) -> TargetRow:
    large = [
        (case.ratio.p50, case.label) for case in cases if case.is_head_slice and case.piece_bytes >= SLICE_PIECE_BYTES
    ]
    return at_least("HND slices >= 32 KiB, ratio", SLICE_RATIO_MIN, large)


def _table(cases: Sequence[CaseResult], title: str) -> Table:
    rows: list[tuple[str, ...]] = []
    for case in cases:
        if case.label == case.baseline:
            rows += [(), (f"to {case.consumer}: {case.size_bytes / (1 << 20):.3g} MB",)]
        rows.append(
            (
                case.label,
                f"{case.read_bytes / (1 << 20):.3g}",
                str(case.descriptors),
                f"{case.piece_bytes / 1024:.3g}",
                f"{case.load_s.p50 * 1e3:.1f}",
                f"{case.gb_per_s:.2f}",
                f"{case.ratio.p50:.2f}",
                f"{case.ratio.p25:.2f}..{case.ratio.p75:.2f}",
            )
        )
    headings = ("case", "MB", "descr.", "KiB", "p50 ms", "GB/s", "ratio", "quartiles")
    return Table(title=title, headings=headings, rows=rows, caption=_LEGEND)
