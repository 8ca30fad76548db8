"""How long a stock producer's blocks count as leased: never longer than its own rules say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.protocol.proof import ProofStep
from kvflow.errors import ConfigError
from kvflow.stock.deadline import DeadlineProof, Terms

TERMS = Terms()


class Watch:
    """A deadline that began at 100 s, and what time it is."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.unsent = 0
        self.replaced = False
        self.proof = DeadlineProof(100.0, TERMS, lambda: self.now_s, lambda: self.unsent, lambda: self.replaced)

    def beat(self, *times_s: float) -> None:
        for self.now_s in times_s:
            self.proof.note_heartbeat()

    def until_s(self, now_s: float) -> float:
        self.now_s = now_s
        return self.proof.held_until_s()


def test_without_heartbeats_it_is_the_lease_without_the_routers_share() -> None:
    watch = Watch()
    watch.now_s = 124.9
    assert (watch.proof.judge_before_post(), watch.proof.judge_after_read(1.0)) == (ProofStep.POST, ProofStep.FRESH)
    watch.now_s = 125.0
    assert (watch.proof.judge_before_post(), watch.proof.judge_after_read(1.0)) == (ProofStep.STALE, ProofStep.STALE)
    assert watch.proof.judge_after_read(None) is ProofStep.STALE, "what it was is what it stays"


def test_heartbeats_move_it_once_the_producer_knows_of_the_request() -> None:
    watch = Watch()
    watch.beat(100.0, 105.0)
    assert watch.until_s(105.0) == 125.0, "these may have been dropped"
    watch.beat(110.0)
    assert watch.until_s(110.0) == 125.0, "it may be under way"
    assert watch.until_s(111.0) == 110.0 + 20.0 - 1.0


def test_a_gap_ends_it_for_good() -> None:
    watch = Watch()
    watch.beat(124.5, 130.0)  # the first is too late to get there for sure
    assert watch.until_s(135.0) == 125.0
    assert watch.proof.judge_after_read(1.0) is ProofStep.STALE


def test_one_message_that_was_not_sent_ends_it_for_good() -> None:
    watch = Watch()
    watch.beat(110.0)
    watch.unsent = 1
    watch.beat(115.0)
    assert watch.until_s(118.0) == 125.0


def test_a_cache_that_is_registered_again_ends_it_at_once() -> None:
    watch = Watch()
    watch.beat(110.0)
    assert watch.proof.judge_before_post() is ProofStep.POST
    watch.replaced = True
    assert (watch.proof.judge_before_post(), watch.proof.judge_after_read(1.0)) == (ProofStep.STALE, ProofStep.STALE)


@pytest.mark.parametrize(
    "values", [{"lease_s": 5.0}, {"router_s": 30.0}, {"lease_s": -1.0}, {"settle_s": float("nan")}]
)
def test_terms_that_leave_nothing_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="|".join([*values, "router_s"])):
        Terms(**values)


@given(
    router_s=st.floats(0.0, 5.0),
    steps=st.lists(st.tuples(st.floats(0.01, 12.0), st.floats(0.0, 1.0)), max_size=40),
    knows_after_s=st.floats(0.0, 10.0),
)
def test_it_never_outlives_what_the_producer_holds(
    router_s: float, steps: list[tuple[float, float]], knows_after_s: float
) -> None:
    """The producer's own arithmetic beside it, with any delays that the terms allow: a request that ended up to
    `router_s` before, heartbeats that are dropped at first, and each up to `allowance_s` under way."""
    watch = Watch()
    deadline = watch.proof
    held_until_s = 100.0 - router_s + TERMS.lease_s
    on_the_way: list[float] = []
    for pause_s, delay_s in steps:
        watch.now_s += pause_s
        for arrives_s in [at for at in on_the_way if at <= watch.now_s]:
            on_the_way.remove(arrives_s)
            if arrives_s >= 100.0 + knows_after_s and arrives_s < held_until_s:
                held_until_s = max(held_until_s, arrives_s + TERMS.extension_s)
        if deadline.judge_after_read(0.0) is ProofStep.FRESH:
            assert watch.now_s < held_until_s
        assert deadline.held_until_s() <= max([held_until_s, *(at + TERMS.extension_s for at in on_the_way)])
        deadline.note_heartbeat()
        on_the_way.append(watch.now_s + delay_s)
        on_the_way.sort()
