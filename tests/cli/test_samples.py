"""Statistics of the bench: what a percentile and a ratio mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.cli.bench.messages import TurnResult
from kvflow.cli.bench.samples import Contender, percentile, summarize_lags, summarize_size
from kvflow.cli.bench.settings import CacheShape, LoadSize

SHAPE = CacheShape(layers=2, kv_heads=1, blocks=8)
SIZE = LoadSize(label="4 blocks", blocks=4, loads_per_turn=2)


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [
        ([5.0], 1, 5.0),
        ([5.0], 99, 5.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 101)], 100, 100.0),
        ([float(n) for n in range(1, 100)], 99, 99.0),  # fewer than 100 samples: the maximum
    ],
)
def test_percentile_by_nearest_rank(samples: list[float], percent: float, expected: float) -> None:
    assert percentile(samples, percent) == expected


@given(
    st.lists(st.floats(min_value=0, max_value=1e6), min_size=1),
    st.integers(min_value=1, max_value=100),
)
def test_percentile_is_the_smallest_sample_that_covers(samples: list[float], percent: int) -> None:
    value = percentile(samples, percent)
    assert value in samples
    assert 100 * sum(sample <= value for sample in samples) >= len(samples) * percent
    assert 100 * sum(sample < value for sample in samples) < len(samples) * percent


@pytest.mark.parametrize("percent", [0, -1, 100.1])
def test_percentile_refuses_what_is_no_percentage(percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        percentile([1.0], percent)


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_lags_are_in_milliseconds() -> None:
    lag = summarize_lags([0.001, 0.002, 0.004])
    assert (lag.samples, lag.p50_ms, lag.p99_ms, lag.max_ms) == (3, 2.0, 4.0, 4.0)


def test_a_size_puts_the_turns_of_all_rounds_together() -> None:
    result = summarize_size(
        SHAPE,
        SIZE,
        {
            Contender.EXAMPLE: [[_turn(8.0, 8.0), _turn(8.0, 80.0)]],
            Contender.TUNED: [[_turn(4.0, 4.0), _turn(4.0, 4.0)]],
            Contender.KVFLOW: [[_turn(4.0, 5.0), _turn(5.0, 5.0)]],
            Contender.HOP: [[_turn(4.0, 4.0), _turn(8.0, 5.0)]],
        },
    )
    ours = result.contenders[Contender.KVFLOW]
    example = result.contenders[Contender.EXAMPLE]
    load_bytes = 4 * SHAPE.block_size_bytes

    assert (result.size_bytes, result.descriptors, result.kvflow_descriptors) == (load_bytes, 16, 3)
    assert (ours.samples, ours.median_s, ours.p99_s, ours.seconds) == (4, 5.0, 5.0, (4.0, 5.0, 5.0, 5.0))
    assert ours.gb_per_s == pytest.approx(load_bytes / 5.0 / 1e9)
    assert ours.cpu_s_per_gb == pytest.approx(2 * 0.5 / (4 * load_bytes / 1e9))
    assert ours.ratio_to_a == pytest.approx(8 / 5)
    assert ours.ratio_to_b == pytest.approx(4 / 5)
    assert (example.ratio_to_a, example.p99_s) == (1.0, 80.0)
    assert result.contenders[Contender.HOP].ratio_to_b == pytest.approx(4 / 4.5)
    assert ours.checked_blocks == 14
    assert result.lag.samples == 4
    assert result.phases_median_s == {"wire": 2.0, "plan": 1.0}


def test_the_median_is_of_the_medians_of_the_pairs() -> None:
    """One pair that is slow for life must not decide, however many samples it has."""
    pairs = [[_turn(2.0, 2.0)], [_turn(9.0, 9.0), _turn(9.0, 9.0), _turn(9.0, 9.0)], [_turn(3.0, 3.0)]]
    ones = [[_turn(6.0, 6.0)]] * 3
    turns = {Contender.EXAMPLE: ones, Contender.TUNED: ones, Contender.KVFLOW: pairs, Contender.HOP: ones}
    ours = summarize_size(SHAPE, SIZE, turns).contenders[Contender.KVFLOW]
    assert (ours.pair_medians_s, ours.median_s, ours.samples) == ((2.0, 9.0, 3.0), 3.0, 10)
    assert ours.ratio_to_b == pytest.approx(6 / 3)


def _turn(*seconds: float) -> TurnResult:
    return TurnResult(
        seconds=seconds,
        cpu_s=0.5,
        checked_blocks=7,
        lags_s=(0.0, 0.001),
        phases_s=({"wire": 2.0, "plan": 1.0}, {"wire": 2.0, "plan": 1.0}),
        descriptors=3,
    )
