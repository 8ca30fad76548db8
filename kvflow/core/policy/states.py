"""The states of a peer, a lease and a transfer, each with a transition table.

A state changes only by `fire`, which looks up the pair (state, event) and returns the next state. Functions such as
`transfer_blocks_safe` say what a state means. docs/architecture.md has pictures of the tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal, TypeAlias, TypeVar

StateT = TypeVar("StateT", bound=enum.StrEnum)
EventT = TypeVar("EventT", bound=str)
Table: TypeAlias = Mapping[tuple[StateT, EventT], StateT]


class IllegalTransition(AssertionError):
    """An event is not allowed in a state. This is a bug in kvflow, not in the code that uses kvflow."""


def fire(table: Table[StateT, EventT], state: StateT, event: EventT) -> StateT:
    """Return the state that follows `state` at `event`. IllegalTransition if `table` has no row for this pair."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{type(state).__name__} {state}: no transition for {event}") from None


def allows(table: Table[StateT, EventT], state: StateT, event: EventT) -> bool:
    """Return True if `table` has a row for `event` in `state`.

    The tables have no rows for the events of late or duplicate messages.
    """
    return (state, event) in table


class PeerState(enum.StrEnum):
    """The state of a peer (a rank of a remote engine), as this reader knows it."""

    UNKNOWN = "unknown"  # no connection was made, or the peer was not ready
    CONNECTING = "connecting"  # a handshake is under way, and all loads of the peer wait for it
    READY = "ready"
    BROKEN = "broken"  # the connection is dead or outdated; the next load makes a new one
    BACKING_OFF = "backing_off"  # the peer failed and is not contacted until its wait is over (`core.policy.circuit`)
    CLOSED = "closed"


PeerEvent: TypeAlias = Literal["connect", "connected", "postpone", "back_off", "break", "close"]
"""Event that changes the state of a peer. "connect" also happens in READY, if a ticket names another incarnation."""

PEER_TABLE: Table[PeerState, PeerEvent] = {
    (PeerState.UNKNOWN, "connect"): PeerState.CONNECTING,
    (PeerState.UNKNOWN, "close"): PeerState.CLOSED,
    (PeerState.CONNECTING, "connected"): PeerState.READY,
    (PeerState.CONNECTING, "postpone"): PeerState.UNKNOWN,
    (PeerState.CONNECTING, "back_off"): PeerState.BACKING_OFF,
    (PeerState.READY, "connect"): PeerState.CONNECTING,
    (PeerState.READY, "break"): PeerState.BROKEN,
    (PeerState.READY, "back_off"): PeerState.BACKING_OFF,
    (PeerState.READY, "close"): PeerState.CLOSED,
    (PeerState.BROKEN, "connect"): PeerState.CONNECTING,
    (PeerState.BROKEN, "close"): PeerState.CLOSED,
    (PeerState.BACKING_OFF, "connect"): PeerState.CONNECTING,
    (PeerState.BACKING_OFF, "close"): PeerState.CLOSED,
}


class LeaseState(enum.StrEnum):
    """The state of a lease: whether the producer still promises to keep the blocks, or how the lease has ended."""

    OFFERED = "offered"
    """The lease is open. Every other state is an outcome."""
    READ = "read"
    """Every reader has read."""
    EXPIRED = "expired"
    """`ttl_s` has passed without a renewal."""
    REVOKED = "revoked"
    """Withdrawn by its owner, or by the runtime that closes."""
    FAILED = "failed"
    """The prompt will not be computed."""


LeaseEvent: TypeAlias = Literal["all_read", "expire", "revoke", "fail"]

LEASE_TABLE: Table[LeaseState, LeaseEvent] = {
    (LeaseState.OFFERED, "all_read"): LeaseState.READ,
    (LeaseState.OFFERED, "expire"): LeaseState.EXPIRED,
    (LeaseState.OFFERED, "revoke"): LeaseState.REVOKED,
    (LeaseState.OFFERED, "fail"): LeaseState.FAILED,
}


class TransferState(enum.StrEnum):
    """The state of the reads of one load: whether their bytes may still land in the local blocks."""

    PENDING = "pending"  # no read was posted
    READING = "reading"
    STOPPING = "stopping"  # the load has failed; posted slices cannot be cancelled, so their end is awaited
    QUARANTINED = "quarantined"  # the load has ended, and posted slices have not stopped in time
    LANDED = "landed"  # every posted byte has arrived
    STOPPED = "stopped"  # the load failed, and no further byte can arrive


TransferEvent: TypeAlias = Literal["post", "land", "abandon", "overdue", "last_stopped"]

TRANSFER_TABLE: Table[TransferState, TransferEvent] = {
    (TransferState.PENDING, "post"): TransferState.READING,
    (TransferState.PENDING, "abandon"): TransferState.STOPPED,
    (TransferState.READING, "land"): TransferState.LANDED,
    (TransferState.READING, "abandon"): TransferState.STOPPING,
    (TransferState.STOPPING, "last_stopped"): TransferState.STOPPED,
    (TransferState.STOPPING, "overdue"): TransferState.QUARANTINED,
    (TransferState.QUARANTINED, "last_stopped"): TransferState.STOPPED,
}


def transfer_blocks_safe(state: TransferState) -> bool:
    """Return True if no further byte of the load can land in the local blocks (invariant I1)."""
    return state in (TransferState.PENDING, TransferState.LANDED, TransferState.STOPPED)
