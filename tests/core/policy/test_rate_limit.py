"""Token buckets: no peer gets more than its share, and a peer that keeps to its share gets all of it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.core.policy.rate_limit import RateLimiter

STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 0.5)), max_size=200)


@given(STEPS, st.integers(1, 20))
def test_no_peer_gets_more_than_a_burst_and_its_rate(steps: list[tuple[str, float]], requests_per_s: int) -> None:
    """In any window, not just from the start."""
    limiter = RateLimiter(requests_per_s=requests_per_s, peers_max=3)
    allowed: dict[str, list[float]] = {}
    now_s = 0.0
    for peer, pause_s in steps:
        now_s += pause_s
        if limiter.allows(peer, now_s):
            allowed.setdefault(peer, []).append(now_s)
    for times in allowed.values():
        for first, start_s in enumerate(times):
            for last, end_s in enumerate(times[first:], start=first):
                assert last - first + 1 <= requests_per_s * (1 + end_s - start_s) + 1e-4


@example(1, 1.00001)
@given(st.integers(1, 50), st.floats(0, 1e9))
def test_who_keeps_to_the_rate_is_never_held_up(requests_per_s: int, start_s: float) -> None:
    limiter = RateLimiter(requests_per_s=requests_per_s, peers_max=1)
    assert all(limiter.allows("a", start_s) for _ in range(requests_per_s))
    assert all(limiter.allows("a", start_s + 1 + step) for step in range(5))


@given(STEPS)
def test_peers_do_not_share(steps: list[tuple[str, float]]) -> None:
    """Requests of other peers change nothing for a peer, as long as there is room."""
    together, alone = (RateLimiter(requests_per_s=2, peers_max=3) for _ in range(2))
    now_s = 0.0
    for peer, pause_s in steps:
        now_s += pause_s
        allowed = together.allows(peer, now_s)
        if peer == "a":
            assert allowed == alone.allows("a", now_s)


def test_the_number_of_buckets_is_bounded_and_the_idlest_goes() -> None:
    limiter = RateLimiter(requests_per_s=1, peers_max=2)
    assert limiter.allows("a", 0.0)
    assert limiter.allows("b", 0.1)
    assert not limiter.allows("a", 0.2)
    assert limiter.allows("c", 0.3)  # forgets b
    assert len(limiter) == 2
    assert not limiter.allows("a", 0.4)
    assert limiter.allows("b", 0.5)
    for number in range(1000):
        limiter.allows(str(number), 1.0)
    assert len(limiter) == 2


def test_a_clock_that_goes_back_fills_nothing() -> None:
    limiter = RateLimiter(requests_per_s=1, peers_max=2)
    assert limiter.allows("a", 5.0)
    assert not limiter.allows("a", 1.0)
    assert not limiter.allows("a", 1.5)
    assert limiter.allows("a", 2.0)
