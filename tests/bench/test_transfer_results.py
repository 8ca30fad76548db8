"""`kvflow bench transfer`: from turns to medians and ratios, and which numbers are held against which bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvflow import LoadReport
from kvflow.bench.cache import CacheShape
from kvflow.bench.loads import MIB, Transport
from kvflow.bench.targets import Spread, Verdict
from kvflow.bench.transfer.contenders import Contender
from kvflow.bench.transfer.ranks import TurnResult
from kvflow.bench.transfer.results import (
    ContenderResult,
    LoadSize,
    SizeResult,
    TransportResult,
    summarize_size,
    targets_of,
)

SHAPE = CacheShape(layers=2, kv_heads=1, blocks=8)
SIZE = LoadSize("4 blocks", blocks=4, loads_per_turn=2)
LAG_S = Spread(samples=100, min=0.0, p25=0.0, p50=1e-4, p75=1e-4, p99=1e-3, max=5e-3)
REPORT = LoadReport(
    request_id="any", bytes=1, blocks=1, tokens=1, descriptors=3, sources=(), notified=True, seconds={"wire": 2.0}
)


def turn(*seconds: float) -> TurnResult:
    checked_bytes = 7 * SHAPE.block_size_bytes
    lags_s, reports = (0.0, 0.001), (REPORT, REPORT)
    return TurnResult(seconds=seconds, cpu_s=0.5, checked_bytes=checked_bytes, lags_s=lags_s, reports=reports)


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
    assert (ours.checked_blocks, result.lag_s.samples, result.phases_median_s) == (14, 4, {"wire": 2.0})


def test_the_median_is_of_the_medians_of_the_pairs() -> None:
    """One pair that is slow for life must not decide, however many samples it has."""
    pairs = [[turn(2.0, 2.0)], [turn(9.0, 9.0), turn(9.0, 9.0), turn(9.0, 9.0)], [turn(3.0, 3.0)]]
    ones = [[turn(6.0, 6.0)]] * 3
    turns = {Contender.EXAMPLE: ones, Contender.TUNED: ones, Contender.KVFLOW: pairs, Contender.HOP: ones}
    ours = summarize_size(SHAPE, SIZE, turns).contenders[Contender.KVFLOW]
    assert (ours.pair_medians_s, ours.median_s, ours.samples) == ((2.0, 9.0, 3.0), 3.0, 10)
    assert ours.ratio_to_b == pytest.approx(6 / 3)


# --- targets


def speed(**numbers: float) -> ContenderResult:
    usual = dict.fromkeys(("gb_per_s", "cpu_s_per_gb", "ratio_to_b"), 1.0) | {"ratio_to_a": 2.0}
    usual |= {"median_s": 0.001, "p99_s": 0.001, **numbers}
    return ContenderResult(samples=10, pair_medians_s=(0.001,), checked_blocks=1, seconds=(0.001,), **usual)


def size(megabytes: int, *, lag_s: Spread = LAG_S, **numbers: float) -> SizeResult:
    """0 MB are one block."""
    return SizeResult(
        label=f"{megabytes} MB",
        size_bytes=megabytes * MIB,
        blocks=100 if megabytes else 1,
        descriptors=1,
        kvflow_descriptors=1,
        contenders={**dict.fromkeys(Contender, speed()), Contender.KVFLOW: speed(**numbers)},
        lag_s=lag_s,
        phases_median_s={},
    )


SLOW = replace(LAG_S, p99=3e-3, max=11e-3)


@pytest.mark.parametrize(
    ("target", "sizes", "measured", "verdict"),
    [
        ("shm: bulk speed / (b)", [size(1, ratio_to_b=0.1), size(16, ratio_to_b=0.96), size(256)], 0.96, Verdict.PASS),
        ("shm: bulk speed / (b)", [size(16, ratio_to_b=0.94)], 0.94, Verdict.FAIL),
        ("shm: bulk speed / (b)", [size(1)], None, Verdict.NOT_MEASURED),
        ("shm: bulk speed / (a)", [size(16, ratio_to_a=1.3)], 1.3, Verdict.PASS),
        ("shm: bulk speed / (a)", [size(16, ratio_to_a=1.29)], 1.29, Verdict.FAIL),
        ("tcp: bulk speed / (a)", [size(16, ratio_to_a=1.6)], 1.6, Verdict.PASS),
        ("tcp: bulk speed / (a)", [size(16, ratio_to_a=1.59)], 1.59, Verdict.FAIL),
        ("shm: one block, us over (b)", [size(0, median_s=0.001_140)], 140, Verdict.PASS),
        ("shm: one block, us over (b)", [size(0, median_s=0.001_160)], 160, Verdict.FAIL),
        ("shm: loop lag p99, 1 GB, ms", [size(1024), size(16, lag_s=SLOW)], 1.0, Verdict.PASS),
        ("shm: loop lag p99, 1 GB, ms", [size(1024, lag_s=SLOW)], 3.0, Verdict.FAIL),
        ("shm: loop lag max, 1 GB, ms", [size(1024, lag_s=SLOW)], 11.0, Verdict.FAIL),
        ("shm: loop lag max, 1 GB, ms", [size(256, lag_s=SLOW)], None, Verdict.NOT_MEASURED),
        ("tcp: idle CPU, % of a core", [], 1.0, Verdict.PASS),
    ],
)
def test_targets(target: str, sizes: list[SizeResult], measured: float | None, verdict: Verdict) -> None:
    """Bulk is from 16 MB up, lag counts while a gigabyte is loaded over shm; the worst size decides."""
    result = TransportResult(
        transport=Transport(target[:3]), sizes=tuple(sizes), idle_cpu_percent=1.0, idle_lag_s=LAG_S, huge_page_share=1.0
    )
    row = {row.target: row for row in targets_of(result)}[target]
    assert (row.measured, row.verdict) == (measured if measured is None else pytest.approx(measured), verdict)
