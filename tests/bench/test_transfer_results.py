"""`kvflow bench transfer`: from turns to medians and ratios, and which numbers are held against which bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvflow import LoadReport
from kvflow.bench.cache import CacheShape
from kvflow.bench.loads import MIB, Transport
from kvflow.bench.targets import TargetRow, Verdict
from kvflow.bench.transfer.contenders import Contender
from kvflow.bench.transfer.ranks import TurnResult
from kvflow.bench.transfer.results import (
    ContenderResult,
    LagSummary,
    LoadSize,
    SizeResult,
    TransportResult,
    summarize_lags,
    summarize_size,
    targets_of,
)

SHAPE = CacheShape(layers=2, kv_heads=1, blocks=8)
SIZE = LoadSize("4 blocks", blocks=4, loads_per_turn=2)
LAG = LagSummary(samples=100, p50_ms=0.1, p99_ms=1.0, max_ms=5.0)
REPORT = LoadReport(
    request_id="any", bytes=1, blocks=1, tokens=1, descriptors=3, sources=(), notified=True, seconds={"wire": 2.0}
)


def turn(*seconds: float) -> TurnResult:
    checked_bytes = 7 * SHAPE.block_size_bytes
    lags_s, reports = (0.0, 0.001), (REPORT, REPORT)
    return TurnResult(seconds=seconds, cpu_s=0.5, checked_bytes=checked_bytes, lags_s=lags_s, reports=reports)


def test_lags_are_in_milliseconds() -> None:
    lag = summarize_lags([0.001, 0.002, 0.004])
    assert (lag.samples, lag.p50_ms, lag.p99_ms, lag.max_ms) == (3, 2.0, 4.0, 4.0)


def test_a_size_puts_the_turns_of_all_rounds_together() -> None:
    result = summarize_size(
        SHAPE,
        SIZE,
        {
            Contender.EXAMPLE: [[turn(8.0, 8.0), turn(8.0, 80.0)]],
            Contender.TUNED: [[turn(4.0, 4.0), turn(4.0, 4.0)]],
            Contender.KVFLOW: [[turn(4.0, 5.0), turn(5.0, 5.0)]],
            Contender.HOP: [[turn(4.0, 4.0), turn(8.0, 5.0)]],
        },
    )
    ours, example = result.contenders[Contender.KVFLOW], result.contenders[Contender.EXAMPLE]
    load_bytes = 4 * SHAPE.block_size_bytes
    assert (result.size_bytes, result.descriptors, result.kvflow_descriptors) == (load_bytes, 16, 3)
    assert (ours.samples, ours.median_s, ours.p99_s, ours.seconds) == (4, 5.0, 5.0, (4.0, 5.0, 5.0, 5.0))
    assert ours.gb_per_s == pytest.approx(load_bytes / 5.0 / 1e9)
    assert ours.cpu_s_per_gb == pytest.approx(2 * 0.5 / (4 * load_bytes / 1e9))
    assert (ours.ratio_to_a, ours.ratio_to_b) == pytest.approx((8 / 5, 4 / 5))
    assert (example.ratio_to_a, example.p99_s) == (1.0, 80.0)
    assert result.contenders[Contender.HOP].ratio_to_b == pytest.approx(4 / 4.5)
    assert (ours.checked_blocks, result.lag.samples, result.phases_median_s) == (14, 4, {"wire": 2.0})


def test_the_median_is_of_the_medians_of_the_pairs() -> None:
    """One pair that is slow for life must not decide, however many samples it has."""
    pairs = [[turn(2.0, 2.0)], [turn(9.0, 9.0), turn(9.0, 9.0), turn(9.0, 9.0)], [turn(3.0, 3.0)]]
    ones = [[turn(6.0, 6.0)]] * 3
    turns = {Contender.EXAMPLE: ones, Contender.TUNED: ones, Contender.KVFLOW: pairs, Contender.HOP: ones}
    ours = summarize_size(SHAPE, SIZE, turns).contenders[Contender.KVFLOW]
    assert (ours.pair_medians_s, ours.median_s, ours.samples) == ((2.0, 9.0, 3.0), 3.0, 10)
    assert ours.ratio_to_b == pytest.approx(6 / 3)


# --- targets


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
        contenders={**dict.fromkeys(Contender, speed()), Contender.KVFLOW: ours},
        lag=lag,
        phases_median_s={},
    )


def find(
    words: str, *sizes: SizeResult, transport: Transport = Transport.SHM, idle_cpu_percent: float = 0.5
) -> TargetRow:
    """The one row whose target has `words` in it."""
    result = TransportResult(
        transport=transport, sizes=sizes, idle_cpu_percent=idle_cpu_percent, idle_lag=LAG, huge_page_share=1.0
    )
    (row,) = [row for row in targets_of(result) if words in row.target]
    return row


def test_bulk_takes_the_worst_size_from_16_mb_up() -> None:
    row = find(
        "speed / (b)", size(1, speed(ratio_to_b=0.1)), size(16, speed(ratio_to_b=0.96)), size(256, speed(ratio_to_b=2))
    )
    assert (row.measured, row.where, row.verdict) == (0.96, "16 MB", Verdict.PASS)
    assert find("speed / (b)", size(16, speed(ratio_to_b=0.94))).verdict is Verdict.FAIL
    assert find("speed / (b)", size(1, speed())).verdict is Verdict.NOT_MEASURED


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
    row = find("one block", size(0, speed(median_s=0.001_140), blocks=1))
    assert (row.measured, row.verdict) == (pytest.approx(140), Verdict.PASS)
    assert find("one block", size(0, speed(median_s=0.001_160), blocks=1)).verdict is Verdict.FAIL


def test_lag_counts_while_a_gigabyte_is_loaded_over_shm() -> None:
    slow = replace(LAG, p99_ms=3.0, max_ms=11.0)
    assert find("lag p99", size(1024, speed()), size(16, speed(), lag=slow)).verdict is Verdict.PASS
    assert find("lag p99", size(1024, speed(), lag=slow)).verdict is Verdict.FAIL
    assert find("lag max", size(1024, speed(), lag=slow)).verdict is Verdict.FAIL
    assert find("lag max", size(256, speed())).verdict is Verdict.NOT_MEASURED


def test_idle() -> None:
    assert find("idle CPU", idle_cpu_percent=1.0).verdict is Verdict.PASS
    assert find("idle CPU", idle_cpu_percent=1.1).verdict is Verdict.FAIL
