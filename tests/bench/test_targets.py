"""Statistics of the bench: what a percentile means, and what a target does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.targets import Verdict, at_least, at_most, percentile


@given(
    st.lists(st.floats(min_value=0, max_value=1e6), min_size=1),
    st.integers(min_value=1, max_value=100),
)
def test_percentile_is_the_smallest_sample_that_covers(samples: list[float], percent: int) -> None:
    """The nearest rank."""
    value = percentile(samples, percent)
    assert value in samples
    assert 100 * sum(sample <= value for sample in samples) >= len(samples) * percent
    assert 100 * sum(sample < value for sample in samples) < len(samples) * percent


def test_percentile_refuses_what_is_no_percentage_and_no_samples() -> None:
    for percent in (0, -1, 100.1):
        with pytest.raises(ValueError, match="percent"):
            percentile([1.0], percent)
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_a_target_takes_the_worst_value_and_says_where_it_was() -> None:
    row = at_least("speed", 0.95, [(2.0, "16 MB"), (0.95, "1 GB")])
    assert (row.need, row.measured, row.where, row.verdict) == (">= 0.95", 0.95, "1 GB", Verdict.PASS)
    row = at_most("lag", 2, [(2.0, "16 MB"), (2.1, "1 GB")])
    assert (row.need, row.measured, row.where, row.verdict) == ("<= 2", 2.1, "1 GB", Verdict.FAIL)
    nothing = at_most("lag", 2, [])
    assert (nothing.measured, nothing.verdict) == (None, Verdict.NOT_MEASURED)
