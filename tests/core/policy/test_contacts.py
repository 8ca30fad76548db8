"""First contacts: which peers that have never answered may be asked, whatever silent addresses do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.core.policy.contacts import Contact, Contacts, ContactState
from tests.support.budgets import machine_test

MOST, PATIENCE_S = 3, 0.5


class ContactsMachine(RuleBasedStateMachine):
    """Any sequence of asking, giving up and ending, while time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.contacts = Contacts(MOST, PATIENCE_S)
        self.asked: list[Contact] = []
        self.put_back: list[Contact] = []
        self.now_s = 0.0

    def of(self, *states: ContactState) -> list[Contact]:
        return [contact for contact in self.asked if contact.state in states]

    @property
    def under_way(self) -> list[Contact]:
        return self.of(ContactState.UNDER_WAY, ContactState.PREEMPTED)

    @rule()
    def ask(self) -> None:
        self.asked.append(self.contacts.request_turn(self.now_s))

    @rule(seconds=st.sampled_from((0.1, 0.5, 2.0)))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), wanted=st.booleans())
    def change_our_mind(self, data: st.DataObject, wanted: bool) -> None:
        data.draw(st.sampled_from(self.under_way)).wanted = wanted

    @precondition(lambda self: self.under_way or self.of(ContactState.WAITING))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        contact = data.draw(st.sampled_from(self.under_way + self.of(ContactState.WAITING)))
        waited = [other for other in self.of(ContactState.WAITING) if other is not contact]
        had_turn = contact.state is not ContactState.WAITING
        begun = self.contacts.end(contact, self.now_s)
        assert begun is (self.next_of(waited) if had_turn and waited else None)
        assert begun is None or (begun.state, begun.since_s) == (ContactState.UNDER_WAY, self.now_s)

    def next_of(self, waiting: list[Contact]) -> Contact:
        """The newest contact goes first. Contacts that have had a turn go when no other waits, in their order."""
        fresh = [contact for contact in waiting if not contact.had_turn]
        return fresh[-1] if fresh else next(contact for contact in self.put_back if contact in waiting)

    @precondition(lambda self: self.of(ContactState.PREEMPTED))
    @rule()
    def go_back(self) -> None:
        (contact,) = self.of(ContactState.PREEMPTED)
        self.put_back = [other for other in self.put_back if other is not contact] + [contact]
        waited = [*self.of(ContactState.WAITING), contact]
        begun = self.contacts.put_back(contact, self.now_s)
        assert contact.had_turn
        assert begun is self.next_of(waited)

    @rule()
    def make_way(self) -> None:
        before = self.of(ContactState.UNDER_WAY)
        due = self.contacts.due_s(self.now_s) <= self.now_s
        leaving = self.contacts.preempt_one(self.now_s)
        assert (leaving is not None) == due
        if leaving is not None:
            assert leaving in before
            assert not leaving.wanted or self.now_s >= leaving.since_s + PATIENCE_S
            assert not leaving.wanted or all(other.wanted and other.since_s >= leaving.since_s for other in before)

    @invariant()
    def the_bound_holds_and_nobody_waits_for_nothing(self) -> None:
        assert self.contacts.under_way == len(self.under_way) <= MOST
        assert self.contacts.waiting == len(self.of(ContactState.WAITING))
        assert not self.contacts.waiting or self.contacts.under_way == MOST
        assert len(self.of(ContactState.PREEMPTED)) <= 1

    @invariant()
    def nobody_has_to_leave_unless_somebody_waits(self) -> None:
        if not self.contacts.waiting or self.of(ContactState.PREEMPTED):
            assert self.contacts.due_s(self.now_s) == float("inf")


TestContactsMachine = machine_test(ContactsMachine, 25, 100, steps=50)


@given(silent=st.integers(0, 200))
def test_who_comes_behind_any_number_of_silent_addresses_waits_for_one_patience_at_most(silent: int) -> None:
    contacts = Contacts(MOST, PATIENCE_S)
    for _ in range(silent):
        contacts.request_turn(0.0)
    honest = contacts.request_turn(0.1)
    while honest.state is ContactState.WAITING:
        now_s = contacts.due_s(0.1)
        assert now_s <= PATIENCE_S
        leaving = contacts.preempt_one(now_s)
        assert leaving is not None
        contacts.put_back(leaving, now_s)
    assert honest.state is ContactState.UNDER_WAY


def test_a_turn_that_nobody_wants_any_more_goes_at_once() -> None:
    contacts = Contacts(2, PATIENCE_S)
    old, given_up = contacts.request_turn(0.0), contacts.request_turn(0.1)
    given_up.wanted = False
    assert contacts.preempt_one(0.2) is None, "it is in nobody's way"
    waiting = contacts.request_turn(0.2)
    assert contacts.preempt_one(0.2) is given_up
    assert contacts.end(given_up, 0.2) is waiting
    assert old.state is ContactState.UNDER_WAY
