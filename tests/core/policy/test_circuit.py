"""When a peer may be asked again: waits grow up to their limit, differ by chance, and end when it works."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.core.policy.circuit import BackOff, Circuit, after_failed_handshake, after_failed_read, delay_s
from tests.support.budgets import machine_test

BACK_OFF = BackOff(first_s=0.2, most_s=10.0)
seconds = st.floats(min_value=1e-6, max_value=1e6)


@given(failures=st.integers(1, 1 << 40), first_s=seconds, most_s=seconds, chance=st.floats(0, 1, exclude_max=True))
def test_a_delay_is_half_of_what_has_doubled_to_all_of_it(
    failures: int, first_s: float, most_s: float, chance: float
) -> None:
    whole_s = most_s if failures > 64 else min(first_s * 2 ** (failures - 1), most_s)
    assert whole_s / 2 <= delay_s(failures, BackOff(first_s, most_s), chance) <= whole_s


def test_chance_spreads_the_waits_evenly() -> None:
    assert [delay_s(8, BACK_OFF, chance) for chance in (0.0, 0.5, 0.75)] == [5.0, 7.5, 8.75]


def test_a_peer_that_never_failed_may_be_asked_at_any_time() -> None:
    assert Circuit().wait_s(-1e18) == Circuit().wait_s(0.0) == 0


def test_a_first_failed_read_costs_no_wait_and_a_second_one_does() -> None:
    once = after_failed_read(Circuit(), BACK_OFF, now_s=5.0, chance=0.5)
    assert (once.failures, once.wait_s(5.0)) == (1, 0.0)
    twice = after_failed_read(once, BACK_OFF, now_s=6.0, chance=0.5)
    assert twice.failures == 2
    assert 0.2 <= twice.wait_s(6.0) < 0.4


class Peer(RuleBasedStateMachine):
    """A peer that is asked whenever it may be, over any time, and works or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.circuit = Circuit()
        self.failed_in_a_row = 0
        self.connected = False

    @rule(passed_s=st.floats(0, 30))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s

    @precondition(lambda self: not self.connected and self.circuit.wait_s(self.now_s) == 0)
    @rule(works=st.booleans())
    def it_is_asked(self, works: bool) -> None:
        self.connected = works
        if not works:
            self.circuit = after_failed_handshake(self.circuit, BACK_OFF, now_s=self.now_s, chance=0.5)
            self.failed_in_a_row += 1
            assert self.circuit.wait_s(self.now_s) > 0, "a failed handshake always costs a wait"

    @precondition(lambda self: self.connected)
    @rule()
    def a_read_works(self) -> None:
        self.circuit = Circuit()
        self.failed_in_a_row = 0

    @precondition(lambda self: self.connected)
    @rule()
    def a_read_fails(self) -> None:
        self.circuit = after_failed_read(self.circuit, BACK_OFF, now_s=self.now_s, chance=0.5)
        self.failed_in_a_row += 1
        self.connected = False

    @invariant()
    def waits_are_bounded(self) -> None:
        assert 0 <= self.circuit.wait_s(self.now_s) <= BACK_OFF.most_s
        assert self.circuit.failures == self.failed_in_a_row

    @invariant()
    def after_the_longest_wait_it_may_be_asked(self) -> None:
        assert self.circuit.wait_s(self.now_s + BACK_OFF.most_s) == 0


TestPeer = machine_test(Peer, 25, 100, steps=50)
