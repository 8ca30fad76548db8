"""The machines: illegal events change nothing, every life ends, and what `safe` and `open` promise holds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

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
    request_blocks_held,
    transfer_blocks_safe,
)
from tests.support.tests_support import each


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
        frozenset({LeaseState.READ, LeaseState.EXPIRED, LeaseState.REVOKED, LeaseState.FAILED}),
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
    kinds = {(type(state), type(event), type(after)) for (state, event), after in before.items()}
    assert kinds == {(machine.states, machine.events, machine.states)}, "another's would be found by its name"
    assert {event for _, event in before} == set(machine.events)
    assert all(state is not after for (state, _), after in before.items())
    for state in machine.states:
        for event in machine.events:
            if (state, event) in before:
                assert knows(machine.table, state, event)
                assert fire(machine.table, state, event) is before[state, event]
            else:
                assert not knows(machine.table, state, event)
                with pytest.raises(IllegalTransition, match=f"{type(state).__name__} {state}.*{event}"):
                    fire(machine.table, state, event)
    assert dict(machine.table) == before


@machines
def test_every_state_is_reached_and_every_life_can_end(machine: Machine) -> None:
    assert machine.after(machine.first) == set(machine.states)
    ends = {state for state in machine.states if machine.after(state) == {state}}
    assert ends == machine.final
    for state in machine.states:
        assert machine.after(state) & machine.final


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
    ends = {fire(LEASE_TABLE, LeaseState.OFFERED, event) for event in LeaseEvent}
    assert len(ends) == len(LeaseEvent), "a different one for each reason"
    assert {state for state, _ in LEASE_TABLE} == {LeaseState.OFFERED}


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
    ways = {
        (event, after)
        for (state, event), after in TRANSFER_TABLE.items()
        if not transfer_blocks_safe(state) and (transfer_blocks_safe(after) or event is TransferEvent.LAST_STOPPED)
    }
    assert ways == {
        (TransferEvent.LAND, TransferState.LANDED),
        (TransferEvent.LAST_STOPPED, TransferState.STOPPED),
    }


def test_an_abandoned_transfer_never_lands() -> None:
    """A load that has failed must not be reported as a success later (invariant I4)."""
    for state in (TransferState.PENDING, TransferState.READING):
        abandoned = fire(TRANSFER_TABLE, state, TransferEvent.ABANDON)
        assert TransferState.LANDED not in MACHINES["transfer"].after(abandoned)
