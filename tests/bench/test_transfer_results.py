"""From turns to rows, and from rows to targets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvflow.bench.loads import MIB, Fabric
from tests.bench.targets import Spread, Verdict
from tests.bench.transfer.ranks import Contender, TurnResult
from tests.bench.transfer.results import ONE_BLOCK, Idle, Lag, Speed, busy_targets_of, compare, targets_of

LAG_S = Spread(samples=100, min=0.0, p25=0.0, p50=1e-4, p75=1e-4, p99=1e-3, max=5e-3)


def turn(*seconds: float) -> TurnResult:
    return TurnResult(seconds=seconds, cpu_s=0.5, checked_bytes=1)


def compared(*turns: list[list[TurnResult]]) -> dict[Contender, Speed]:
    rows = compare(Fabric.SHM, "1 MB", MIB, dict(zip(Contender, turns, strict=True)))
    return {row.contender: row for row in rows}


def test_a_size_puts_the_turns_of_all_rounds_together() -> None:
    found = compared(
        [[turn(8.0, 8.0), turn(8.0, 80.0)]],
        [[turn(4.0, 4.0), turn(4.0, 4.0)]],
        [[turn(4.0, 5.0), turn(5.0, 5.0)]],
        [[turn(4.0, 4.0), turn(8.0, 5.0)]],
    )
    ours, example = found[Contender.KVFLOW], found[Contender.EXAMPLE]
    assert (ours.samples, ours.median_s, ours.p99_s) == (4, 5.0, 5.0)
    assert ours.gb_per_s == pytest.approx(MIB / 5.0 / 1e9)
    assert ours.cpu_s_per_gb == pytest.approx(2 * 0.5 / (4 * MIB / 1e9))
    assert (ours.ratio_to_a, ours.ratio_to_b) == pytest.approx((8 / 5, 4 / 5))
    assert (example.ratio_to_a, example.p99_s) == (1.0, 80.0)
    assert found[Contender.HOP].ratio_to_b == pytest.approx(4 / 4.5)


def test_the_median_is_of_the_medians_of_the_pairs() -> None:
    """One pair that is slow for life must not decide, however many samples it has."""
    pairs = [[turn(2.0, 2.0)], [turn(9.0, 9.0), turn(9.0, 9.0), turn(9.0, 9.0)], [turn(3.0, 3.0)]]
    ones = [[turn(6.0, 6.0)]] * 3
    ours = compared(ones, ones, pairs, ones)[Contender.KVFLOW]
    assert (ours.pair_medians_s, ours.median_s, ours.samples) == ((2.0, 9.0, 3.0), 3.0, 10)
    assert ours.ratio_to_b == pytest.approx(6 / 3)


# --- targets


def size(megabytes: int, *, lag_s: Spread = LAG_S, **numbers: float) -> tuple[Speed, Spread]:
    """0 MB are one block."""
    usual = compared(*[[[turn(0.001)]]] * 4)[Contender.KVFLOW]
    usual = replace(usual, ratio_to_a=2.0, size=f"{megabytes} MB" if megabytes else ONE_BLOCK)
    return replace(usual, size_bytes=megabytes * MIB, **numbers), lag_s


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
def test_targets(target: str, sizes: list[tuple[Speed, Spread]], measured: float | None, verdict: Verdict) -> None:
    """Bulk is from 16 MB up, lag counts while a gigabyte is loaded over shm; the worst size decides."""
    transport, speeds, lags = Fabric(target[:3]), list[Speed](), list[Lag]()
    for ours, lag_s in sizes:
        tuned = replace(ours, transport=transport, contender=Contender.TUNED, median_s=0.001)
        speeds += [replace(ours, transport=transport), tuned]
        lags.append(Lag(transport=transport, size=ours.size, size_bytes=ours.size_bytes, lag_s=lag_s))
    rows = {row.target: row for row in targets_of(Idle(transport=transport, cpu_percent=1.0), speeds, lags)}
    row = rows[target]
    assert (row.measured, row.verdict) == (measured if measured is None else pytest.approx(measured), verdict)


@pytest.mark.parametrize(("p99_s", "verdict"), [(0.0015, Verdict.PASS), (0.0016, Verdict.FAIL)])
def test_where_cores_are_busy_the_slowest_of_one_block_is_held_against_the_bare_hop(
    p99_s: float, verdict: Verdict
) -> None:
    (ours, _), (large, _) = size(0, p99_s=p99_s), size(1, p99_s=1.0)
    bare = [replace(row, contender=Contender.HOP, p99_s=0.001) for row in (ours, large)]
    rows = busy_targets_of(Idle(transport=Fabric.SHM, cpu_percent=0.2), [ours, large, *bare])
    assert [row.verdict for row in rows] == [verdict, Verdict.PASS]
