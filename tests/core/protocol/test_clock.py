"""Another machine's clock: whatever the skew, the drift and the delays, what is said to be sure is true."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.protocol.proof import DRIFT_MAX, RemoteClock

# Rates against true time; two clocks of these drift apart by DRIFT_MAX at most.
_RATES = st.fractions(1 - Fraction(9, 100_000), 1 + Fraction(9, 100_000))
_DELAYS = st.fractions(0, 20)
_ROUNDING_S = 1e-6
"""The module computes in floats; offsets here are up to 1e9 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """A clock as a function of true time."""

    start: Fraction
    rate: Fraction

    def at(self, true: Fraction) -> Fraction:
        return self.start + self.rate * true


clocks = st.builds(Clock, start=st.fractions(-(10**9), 10**9, max_denominator=1000), rate=_RATES)


def read(ours: Clock, theirs: Clock, asked: Fraction, there: Fraction, back: Fraction) -> RemoteClock:
    """Ask at true time `asked`; the question and its answer take `there` and `back`."""
    return RemoteClock(
        incarnation="i",
        theirs_s=float(theirs.at(asked + there)),
        sent_s=float(ours.at(asked)),
        received_s=float(ours.at(asked + there + back)),
    )


@given(ours=clocks, theirs=clocks, there=_DELAYS, back=_DELAYS, lasts=st.fractions(0, 10_000))
def test_a_deadline_is_never_believed_to_be_later_than_it_is_nor_much_earlier(
    ours: Clock, theirs: Clock, there: Fraction, back: Fraction, lasts: Fraction
) -> None:
    """What is lost is the time that the question took to get there, and the drift since."""
    known = read(ours, theirs, Fraction(5), there, back)
    end = Fraction(5) + there + back + lasts  # true time
    lost_s = float(ours.at(end)) - known.not_expired_before_s(known.incarnation, float(theirs.at(end)))
    most_s = float(there) * (1 + DRIFT_MAX) + 2 * DRIFT_MAX * float(back + lasts)
    assert -_ROUNDING_S <= lost_s <= most_s + _ROUNDING_S
    for moment in (5, 5 + there, 5 + there + back):
        true_offset_s = float(theirs.at(Fraction(moment)) - ours.at(Fraction(moment)))
        assert abs(true_offset_s - known.offset_s) <= known.uncertainty_s + _ROUNDING_S


@given(
    ours=clocks,
    theirs=clocks,
    delays=st.lists(st.tuples(st.fractions(0, 1000), _DELAYS, _DELAYS), min_size=2, max_size=5),
)
def test_several_readings_say_what_the_best_of_them_says(
    ours: Clock, theirs: Clock, delays: list[tuple[Fraction, Fraction, Fraction]]
) -> None:
    now = Fraction(0)
    readings = []
    for pause, there, back in delays:
        readings.append(read(ours, theirs, now + pause, there, back))
        now += pause + there + back
    known = readings[0]
    for newer in readings[1:]:
        known = known.combined(newer)
    end_s = float(theirs.at(now + 100))
    best_s = max(one.not_expired_before_s(one.incarnation, end_s) for one in readings)
    assert abs(known.not_expired_before_s(known.incarnation, end_s) - best_s) <= _ROUNDING_S
    assert known.not_expired_before_s(known.incarnation, end_s) <= float(ours.at(now + 100)) + _ROUNDING_S


def test_a_restarted_peer_has_another_clock() -> None:
    old = RemoteClock(incarnation="old", theirs_s=5.0, sent_s=1.0, received_s=1.1)
    new = replace(old, incarnation="new", theirs_s=5000.0)
    assert old.combined(new) == new


def test_in_numbers() -> None:
    known = RemoteClock(incarnation="i", theirs_s=1000.0, sent_s=10.0, received_s=10.2)
    assert (known.offset_s, round(known.uncertainty_s, 6)) == (989.9, 0.10004)
    assert abs(known.not_expired_before_s(known.incarnation, 1030.0) - (40.0 - 30 * DRIFT_MAX)) < 1e-5


def test_what_is_sure_about_a_clock_says_nothing_about_another_incarnation() -> None:
    known = RemoteClock(incarnation="new", theirs_s=10.0, sent_s=1.0, received_s=1.5)
    assert known.not_expired_before_s("new", 50.0) == pytest.approx(41.0, abs=0.01)
    assert known.not_expired_before_s("old", 50.0) == -math.inf
