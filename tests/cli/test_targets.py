"""Targets: which numbers are held against which bound, and what happens without a number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvflow.cli.bench.samples import (
    Contender,
    ContenderResult,
    LagSummary,
    PlanningResult,
    SizeResult,
    TransportResult,
)
from kvflow.cli.bench.settings import MIB, Transport
from kvflow.cli.bench.targets import TargetRow, Verdict, judge

LAG = LagSummary(samples=100, p50_ms=0.1, p99_ms=1.0, max_ms=5.0)
FAST_PLANNING = PlanningResult(descriptors=100_000, median_s=0.005)


def speed(*, ratio_to_a: float = 2.0, ratio_to_b: float = 1.0, median_s: float = 0.001) -> ContenderResult:
    return ContenderResult(
        samples=10,
        median_s=median_s,
        pair_medians_s=(median_s,),
        p99_s=median_s,
        gb_per_s=1.0,
        cpu_s_per_gb=1.0,
        ratio_to_a=ratio_to_a,
        ratio_to_b=ratio_to_b,
        checked_blocks=1,
        seconds=(median_s,),
    )


def size(megabytes: int, ours: ContenderResult, *, blocks: int = 100, lag: LagSummary = LAG) -> SizeResult:
    return SizeResult(
        label=f"{megabytes} MB",
        size_bytes=megabytes * MIB,
        blocks=blocks,
        descriptors=1,
        kvflow_descriptors=1,
        contenders={
            Contender.EXAMPLE: speed(),
            Contender.TUNED: speed(),
            Contender.KVFLOW: ours,
            Contender.HOP: speed(),
        },
        lag=lag,
        phases_median_s={},
    )


def find(
    words: str,
    *sizes: SizeResult,
    transport: Transport = Transport.SHM,
    idle_cpu_percent: float = 0.5,
    planning: PlanningResult = FAST_PLANNING,
) -> TargetRow:
    """The one row whose target has `words` in it."""
    result = TransportResult(
        transport=transport, sizes=sizes, idle_cpu_percent=idle_cpu_percent, idle_lag=LAG, huge_page_share=1.0
    )
    (row,) = [row for row in judge([result], planning) if words in row.target]
    return row


def test_bulk_takes_the_worst_size_from_16_mb_up() -> None:
    row = find(
        "speed / (b)", size(1, speed(ratio_to_b=0.1)), size(16, speed(ratio_to_b=0.96)), size(256, speed(ratio_to_b=2))
    )
    assert (row.measured, row.where, row.verdict) == (0.96, "16 MB", Verdict.PASS)
    assert find("speed / (b)", size(16, speed(ratio_to_b=0.94))).verdict is Verdict.FAIL


@pytest.mark.parametrize(
    ("transport", "ratio", "verdict"),
    [
        (Transport.SHM, 1.3, Verdict.PASS),
        (Transport.SHM, 1.29, Verdict.FAIL),
        (Transport.TCP, 1.6, Verdict.PASS),
        (Transport.TCP, 1.59, Verdict.FAIL),
    ],
)
def test_the_bound_on_a_depends_on_the_transport(transport: Transport, ratio: float, verdict: Verdict) -> None:
    assert find("speed / (a)", size(16, speed(ratio_to_a=ratio)), transport=transport).verdict is verdict


def test_one_block_is_compared_by_its_latency() -> None:
    slower = size(0, speed(median_s=0.001_140), blocks=1)
    row = find("one block", slower)
    assert row.measured == pytest.approx(140)
    assert row.verdict is Verdict.PASS
    assert find("one block", size(0, speed(median_s=0.001_160), blocks=1)).verdict is Verdict.FAIL


def test_lag_counts_while_a_gigabyte_is_loaded_over_shm() -> None:
    slow = replace(LAG, p99_ms=3.0, max_ms=11.0)
    assert find("lag p99", size(1024, speed()), size(16, speed(), lag=slow)).verdict is Verdict.PASS
    assert find("lag p99", size(1024, speed(), lag=slow)).verdict is Verdict.FAIL
    assert find("lag max", size(1024, speed(), lag=slow)).verdict is Verdict.FAIL


def test_idle_and_planning() -> None:
    assert find("idle CPU", idle_cpu_percent=1.0).verdict is Verdict.PASS
    assert find("idle CPU", idle_cpu_percent=1.1).verdict is Verdict.FAIL
    assert find("planning").verdict is Verdict.PASS
    slow = PlanningResult(descriptors=100_000, median_s=0.021)
    assert find("planning", planning=slow).verdict is Verdict.FAIL


def test_what_was_not_measured_is_said() -> None:
    row = find("speed / (b)", size(1, speed()))
    assert (row.measured, row.verdict) == (None, Verdict.NOT_MEASURED)
    assert find("lag max", size(256, speed())).verdict is Verdict.NOT_MEASURED
