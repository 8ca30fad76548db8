"""The machines: illegal events change nothing, every life ends, and what `safe` and `open` promise holds."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from kvflow.connector.request_states import (
    CONSUMER_TABLE,
    PRODUCER_TABLE,
    ConsumerEvent,
    ConsumerState,
    ProducerEvent,
    ProducerState,
    request_blocks_held,
)
from kvflow.core.policy.states import (
    LEASE_TABLE,
    PEER_TABLE,
    TRANSFER_TABLE,
    IllegalTransition,
    LeaseEvent,
    LeaseState,
    PeerEvent,
    PeerState,
    TransferEvent,
    TransferState,
    allows,
    fire,
    transfer_blocks_safe,
)
from tests.support.tests_support import each


@dataclass(frozen=True)
class Machine:
    table: Mapping[tuple[Any, Any], Any]
    states: type[enum.StrEnum]
    events: tuple[str, ...]
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
    "peer": Machine(PEER_TABLE, PeerState, get_args(PeerEvent), PeerState.UNKNOWN, frozenset({PeerState.CLOSED})),
    "lease": Machine(
        LEASE_TABLE,
        LeaseState,
        get_args(LeaseEvent),
        LeaseState.OFFERED,
        frozenset({LeaseState.READ, LeaseState.EXPIRED, LeaseState.REVOKED, LeaseState.FAILED}),
    ),
    "transfer": Machine(
        TRANSFER_TABLE,
        TransferState,
        get_args(TransferEvent),
        TransferState.PENDING,
        frozenset({TransferState.LANDED, TransferState.STOPPED}),
    ),
    "consumer": Machine(
        CONSUMER_TABLE, ConsumerState, get_args(ConsumerEvent), ConsumerState.EXPECTED, frozenset({ConsumerState.ENDED})
    ),
    "producer": Machine(
        PRODUCER_TABLE,
        ProducerState,
        get_args(ProducerEvent),
        ProducerState.COMPUTING,
        frozenset({ProducerState.ENDED}),
    ),
}
machines = each("machine", MACHINES.values())


@machines
def test_an_event_that_the_table_does_not_know_raises_and_changes_nothing(machine: Machine) -> None:
    before = dict(machine.table)
    kinds = {(type(state), type(after)) for (state, _), after in before.items()}
    assert kinds == {(machine.states, machine.states)}, "another's would be found by its name"
    assert {event for _, event in before} == set(machine.events)
    assert all(state is not after for (state, _), after in before.items())
    for state in machine.states:
        for event in machine.events:
            if (state, event) in before:
                assert allows(machine.table, state, event)
                assert fire(machine.table, state, event) is before[state, event]
            else:
                assert not allows(machine.table, state, event)
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


def ways(table: Mapping[tuple[Any, Any], Any], is_one: Callable[[Any, Any, Any], bool]) -> set[tuple[Any, Any, Any]]:
    """Those (state, event, state after) of a table."""
    return {(state, event, after) for (state, event), after in table.items() if is_one(state, event, after)}


# --- peers


def test_a_peer_is_ready_only_by_a_handshake_of_which_it_has_one_at_a_time_also_when_it_was_broken() -> None:
    idle = {state for state in PeerState if allows(PEER_TABLE, state, "connect")}
    assert idle == set(PeerState) - {PeerState.CONNECTING, PeerState.CLOSED}
    connected = (PeerState.CONNECTING, "connected", PeerState.READY)
    assert ways(PEER_TABLE, lambda state, event, after: after is PeerState.READY) == {connected}
    state = PeerState.READY
    for event in ("break", "connect", "back_off", "connect", "connected"):
        state = fire(PEER_TABLE, state, event)
    assert state is PeerState.READY


# --- requests of an engine


def test_held_blocks_are_given_back_by_a_workers_report_only() -> None:
    """An abort keeps the blocks held; the end of a load, or of a lease, releases them."""
    for table, report in ((CONSUMER_TABLE, "received"), (PRODUCER_TABLE, "sent")):
        ends = ways(table, lambda state, _, after: request_blocks_held(state) and not request_blocks_held(after))
        assert {event for _, event, _ in ends} == {report}


def test_a_prompt_is_received_at_most_once_and_a_ticket_that_is_out_stays_out() -> None:
    assert ConsumerState.RECEIVING not in MACHINES["consumer"].after(ConsumerState.LOCAL)
    assert MACHINES["producer"].after(ProducerState.SENDING) == {ProducerState.SENDING, ProducerState.ENDED}


# --- leases


def test_a_lease_is_open_exactly_until_its_one_end() -> None:
    ends = {fire(LEASE_TABLE, LeaseState.OFFERED, event) for event in get_args(LeaseEvent)}
    assert len(ends) == len(get_args(LeaseEvent)), "a different one for each reason"
    assert {state for state, _ in LEASE_TABLE} == {LeaseState.OFFERED}


# --- transfers


def test_bytes_are_posted_only_from_pending_and_only_their_end_makes_blocks_safe_again() -> None:
    """Nothing posts into blocks after their transfer has ended (invariant I1)."""
    safe = transfer_blocks_safe
    begins = ways(TRANSFER_TABLE, lambda state, _, after: safe(state) and not safe(after))
    assert {way[:2] for way in begins} == {(TransferState.PENDING, "post")}
    ends = ways(
        TRANSFER_TABLE,
        lambda state, event, after: not safe(state) and (safe(after) or event == "last_stopped"),
    )
    assert {way[1:] for way in ends} == {
        ("land", TransferState.LANDED),
        ("last_stopped", TransferState.STOPPED),
    }
    assert all(safe(state) for state in MACHINES["transfer"].final)  # type: ignore[arg-type]


def test_an_abandoned_transfer_never_lands() -> None:
    """A load that has failed must not be reported as a success later (invariant I4)."""
    for state in (TransferState.PENDING, TransferState.READING):
        abandoned = fire(TRANSFER_TABLE, state, "abandon")
        assert TransferState.LANDED not in MACHINES["transfer"].after(abandoned)
