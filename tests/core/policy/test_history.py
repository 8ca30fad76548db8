"""History: moments are in order, few, and keep both ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.policy.history import MOMENTS_MAX, History, Moment


class Time:
    def __init__(self) -> None:
        self.now = 10.0

    def now_s(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1)), max_size=300))
def test_moments_are_few_in_order_and_keep_both_ends(steps: list[tuple[int, float]]) -> None:
    time = Time()
    history, all_of_them = History(time.now_s, 10.0), list[Moment]()
    for tokens, pause_s in steps:
        time.now += pause_s
        history.note(tokens)
        if tokens > max((moment.tokens for moment in all_of_them), default=0):
            all_of_them.append(Moment(time.now - 10.0, tokens))
    found = history.moments
    assert len(found) <= MOMENTS_MAX
    assert set(found) <= set(all_of_them)
    assert list(found) == sorted(found)
    assert (found[:1], found[-1:]) == (tuple(all_of_them[:1]), tuple(all_of_them[-1:]))


def test_of_many_moments_every_other_one_is_forgotten() -> None:
    time = Time()
    history = History(time.now_s, 10.0)
    for tokens in range(1, MOMENTS_MAX + 2):
        history.note(tokens)
    assert [moment.tokens for moment in history.moments] == [*range(1, MOMENTS_MAX + 2, 2)]
