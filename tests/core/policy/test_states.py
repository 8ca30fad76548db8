"""The machines: illegal events change nothing, every life ends, and what `safe` and `open` promise holds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.core.policy.states import (
    CONSUMER_TABLE,
    LEASE_TABLE,
    PEER_TABLE,
    PRODUCER_TABLE,
    TRANSFER_TABLE,
    ConsumerEvent,
    ConsumerState,
    IllegalTransition,
    LeaseEvent,
    LeaseState,
    PeerEvent,
    PeerState,
    ProducerEvent,
    ProducerState,
    TransferEvent,
    TransferState,
    fire,
    knows,
    lease_open,
    mermaid,
    request_blocks_held,
    transfer_blocks_safe,
)
from tests.budgets import machine_test
from tests.tests_support import each


@dataclass(frozen=True)
class Machine:
    table: Mapping[tuple[Any, Any], Any]
    states: type[enum.StrEnum]
    events: type[enum.StrEnum]
    first: enum.StrEnum
    final: frozenset[enum.StrEnum]

    def after(self, state: enum.StrEnum) -> set[enum.StrEnum]:
        """All states that can follow, however much later; `state` itself included."""
        found, left = {state}, [state]
        while left:
            here = left.pop()
            following = {after for (before, _), after in self.table.items() if before is here} - found
            found |= following
            left += following
        return found


MACHINES = {
    "peer": Machine(PEER_TABLE, PeerState, PeerEvent, PeerState.UNKNOWN, frozenset({PeerState.CLOSED})),
    "lease": Machine(
        LEASE_TABLE,
        LeaseState,
        LeaseEvent,
        LeaseState.OFFERED,
        frozenset({LeaseState.READ, LeaseState.EXPIRED, LeaseState.REVOKED}),
    ),
    "transfer": Machine(
        TRANSFER_TABLE,
        TransferState,
        TransferEvent,
        TransferState.PENDING,
        frozenset({TransferState.LANDED, TransferState.STOPPED}),
    ),
    "consumer": Machine(
        CONSUMER_TABLE, ConsumerState, ConsumerEvent, ConsumerState.EXPECTED, frozenset({ConsumerState.ENDED})
    ),
    "producer": Machine(
        PRODUCER_TABLE, ProducerState, ProducerEvent, ProducerState.COMPUTING, frozenset({ProducerState.ENDED})
    ),
}
machines = each("machine", MACHINES.values())


@machines
def test_an_event_that_the_table_does_not_know_raises_and_changes_nothing(machine: Machine) -> None:
    before = dict(machine.table)
    illegal = 0
    for state in machine.states:
        for event in machine.events:
            if (state, event) in before:
                assert knows(machine.table, state, event)
                assert fire(machine.table, state, event) is before[state, event]
            else:
                illegal += 1
                assert not knows(machine.table, state, event)
                with pytest.raises(IllegalTransition, match=f"{type(state).__name__} {state}.*{event}"):
                    fire(machine.table, state, event)
    assert dict(machine.table) == before
    assert illegal == len(machine.states) * len(machine.events) - len(before)


@machines
def test_tables_use_their_own_states_and_events_and_all_of_them(machine: Machine) -> None:
    """States are strings, so a state of another machine would be found by accident of its name."""
    for (state, event), after in machine.table.items():
        assert (type(state), type(event), type(after)) == (machine.states, machine.events, machine.states)
        assert state is not after
    assert {event for _, event in machine.table} == set(machine.events)


@machines
def test_every_state_is_reached_and_every_life_can_end(machine: Machine) -> None:
    assert machine.after(machine.first) == set(machine.states)
    ends = {state for state in machine.states if machine.after(state) == {state}}
    assert ends == machine.final
    for state in machine.states:
        assert machine.after(state) & machine.final


@machines
def test_the_diagram_has_each_row_once(machine: Machine) -> None:
    lines = [line.strip() for line in mermaid(machine.table).splitlines()]
    expected = [f"{state} --> {after}: {event}" for (state, event), after in machine.table.items()]
    expected += [f"[*] --> {machine.first}", *(f"{state} --> [*]" for state in machine.final)]
    assert lines[0] == "stateDiagram-v2"
    assert sorted(lines[1:]) == sorted(expected)


# --- peers


def test_a_peer_has_one_handshake_at_a_time() -> None:
    idle = {state for state in PeerState if knows(PEER_TABLE, state, PeerEvent.CONNECT)}
    assert idle == set(PeerState) - {PeerState.CONNECTING, PeerState.CLOSED}


def test_a_peer_is_ready_only_by_a_handshake() -> None:
    ways = [(state, event) for (state, event), after in PEER_TABLE.items() if after is PeerState.READY]
    assert ways == [(PeerState.CONNECTING, PeerEvent.CONNECTED)]


def test_a_broken_peer_can_become_ready_again() -> None:
    state = PeerState.READY
    for event in (PeerEvent.BREAK, PeerEvent.CONNECT, PeerEvent.BACK_OFF, PeerEvent.CONNECT, PeerEvent.CONNECTED):
        state = fire(PEER_TABLE, state, event)
    assert state is PeerState.READY


# --- requests of an engine


def test_held_blocks_are_given_back_by_a_workers_report_only() -> None:
    """An abort keeps the blocks held; what ends the holding is that a load, or a lease, has ended."""
    reports = {ConsumerEvent.RECEIVED, ProducerEvent.SENT}
    for table in (CONSUMER_TABLE, PRODUCER_TABLE):
        for (state, event), after in table.items():
            if request_blocks_held(state) and not request_blocks_held(after):
                assert event in reports


def test_a_prompt_is_received_at_most_once() -> None:
    assert ConsumerState.RECEIVING not in MACHINES["consumer"].after(ConsumerState.LOCAL)


def test_a_ticket_that_is_out_stays_out() -> None:
    assert MACHINES["producer"].after(ProducerState.SENDING) == {ProducerState.SENDING, ProducerState.ENDED}


# --- leases


def test_a_lease_is_open_exactly_until_its_one_end() -> None:
    assert [state for state in LeaseState if lease_open(state)] == [LeaseState.OFFERED]
    for first in LeaseEvent:
        ended = fire(LEASE_TABLE, LeaseState.OFFERED, first)
        assert not lease_open(ended)
        for second in LeaseEvent:
            assert not knows(LEASE_TABLE, ended, second)


def test_leases_end_differently_for_different_reasons() -> None:
    assert len({fire(LEASE_TABLE, LeaseState.OFFERED, event) for event in LeaseEvent}) == len(LeaseEvent)


# --- transfers


def test_bytes_are_posted_only_from_pending() -> None:
    """The one way from safe to unsafe; nothing posts into blocks whose transfer has ended (invariant I1)."""
    unsafe_ways = [
        (state, event)
        for (state, event), after in TRANSFER_TABLE.items()
        if transfer_blocks_safe(state) and not transfer_blocks_safe(after)
    ]
    assert unsafe_ways == [(TransferState.PENDING, TransferEvent.POST)]
    assert all(transfer_blocks_safe(state) for state in MACHINES["transfer"].final)  # type: ignore[arg-type]


def test_only_the_end_of_the_bytes_makes_blocks_safe_again() -> None:
    events = {
        event
        for (state, event), after in TRANSFER_TABLE.items()
        if not transfer_blocks_safe(state) and transfer_blocks_safe(after)
    }
    assert events == {TransferEvent.LAND, TransferEvent.LAST_STOPPED}


def test_an_abandoned_transfer_never_lands() -> None:
    """A load that has failed must not be reported as a success later (invariant I4)."""
    for state in (TransferState.PENDING, TransferState.READING):
        abandoned = fire(TRANSFER_TABLE, state, TransferEvent.ABANDON)
        assert TransferState.LANDED not in MACHINES["transfer"].after(abandoned)


class TransferLife(RuleBasedStateMachine):
    """A transfer and the reads it has posted; the model knows how many of them are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.state = TransferState.PENDING
        self.under_way = 0
        self.ended: TransferState | None = None

    def fire(self, event: TransferEvent) -> None:
        self.state = fire(TRANSFER_TABLE, self.state, event)

    @precondition(lambda self: self.state in (TransferState.PENDING, TransferState.READING))
    @rule()
    def post(self) -> None:
        if self.state is TransferState.PENDING:
            self.fire(TransferEvent.POST)
        self.under_way += 1

    @precondition(lambda self: self.under_way > 0)
    @rule()
    def a_read_ends(self) -> None:
        self.under_way -= 1
        if self.under_way == 0 and knows(TRANSFER_TABLE, self.state, TransferEvent.LAST_STOPPED):
            self.fire(TransferEvent.LAST_STOPPED)

    @precondition(lambda self: self.state is TransferState.READING and self.under_way == 0)
    @rule()
    def land(self) -> None:
        self.fire(TransferEvent.LAND)

    @precondition(lambda self: self.state in (TransferState.PENDING, TransferState.READING))
    @rule()
    def abandon(self) -> None:
        self.fire(TransferEvent.ABANDON)
        if self.under_way == 0 and knows(TRANSFER_TABLE, self.state, TransferEvent.LAST_STOPPED):
            self.fire(TransferEvent.LAST_STOPPED)

    @precondition(lambda self: self.state is TransferState.STOPPING)
    @rule()
    def overdue(self) -> None:
        self.fire(TransferEvent.OVERDUE)

    @rule(event=st.sampled_from(list(TransferEvent)))
    def a_stray_event(self, event: TransferEvent) -> None:
        if not knows(TRANSFER_TABLE, self.state, event):
            before = self.state
            with pytest.raises(IllegalTransition):
                self.fire(event)
            assert self.state is before

    @invariant()
    def safe_means_that_nothing_is_under_way(self) -> None:
        if transfer_blocks_safe(self.state):
            assert self.under_way == 0

    @invariant()
    def an_abandoned_transfer_without_reads_is_over(self) -> None:
        if self.state in (TransferState.STOPPING, TransferState.QUARANTINED):
            assert self.under_way > 0

    @invariant()
    def an_end_is_for_ever(self) -> None:
        if self.ended is not None:
            assert self.state is self.ended
        elif self.state in MACHINES["transfer"].final:
            self.ended = self.state


TestTransferLife = machine_test(TransferLife, 25, 100, steps=25)
