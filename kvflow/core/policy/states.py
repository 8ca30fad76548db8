"""The life of a peer, a lease and a read, each as one transition table.

`fire` is the only way a state changes: it looks the (state, event) pair up and returns the next state; a pair that
is not in the table raises `IllegalTransition` and changes nothing. Questions about a state are functions with a
meaning, such as `transfer_blocks_safe`. The pictures in docs/architecture.md are drawn from these tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal, TypeAlias, TypeVar

StateT = TypeVar("StateT", bound=enum.StrEnum)
EventT = TypeVar("EventT", bound=str)
Table: TypeAlias = Mapping[tuple[StateT, EventT], StateT]


class IllegalTransition(AssertionError):
    """Event that the state does not know: a bug in kvflow, not in its caller."""


def fire(table: Table[StateT, EventT], state: StateT, event: EventT) -> StateT:
    """The state after `event`; IllegalTransition if the table has no such row."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{type(state).__name__} {state}: no transition for {event}") from None


def knows(table: Table[StateT, EventT], state: StateT, event: EventT) -> bool:
    """True if `event` means anything in `state`; late and duplicate messages are asked first and then counted."""
    return (state, event) in table


class PeerState(enum.StrEnum):
    """A rank of a remote engine, as a reader sees it."""

    UNKNOWN = "unknown"  # no connection was made, or the peer asked to be asked later
    CONNECTING = "connecting"  # one handshake is under way, everybody waits on it
    READY = "ready"
    BROKEN = "broken"  # the connection is dead or outdated; the next load makes a new one
    BACKING_OFF = "backing_off"  # it failed; nobody asks it until its wait is over (`core.policy.circuit`)
    CLOSED = "closed"


PeerEvent: TypeAlias = Literal["connect", "connected", "postpone", "back_off", "break", "close"]
"""Event of a peer; "connect" also while connected, if a ticket is of another incarnation of it."""

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
    """A producer's promise to keep blocks."""

    OFFERED = "offered"
    READ = "read"  # every reader has read
    EXPIRED = "expired"
    REVOKED = "revoked"  # withdrawn by its owner, or by the closing runtime
    FAILED = "failed"  # its prompt will never be computed


LeaseEvent: TypeAlias = Literal["all_read", "expire", "revoke", "fail"]

LEASE_TABLE: Table[LeaseState, LeaseEvent] = {
    (LeaseState.OFFERED, "all_read"): LeaseState.READ,
    (LeaseState.OFFERED, "expire"): LeaseState.EXPIRED,
    (LeaseState.OFFERED, "revoke"): LeaseState.REVOKED,
    (LeaseState.OFFERED, "fail"): LeaseState.FAILED,
}


class TransferState(enum.StrEnum):
    """The bytes of one load."""

    PENDING = "pending"  # nothing was posted
    READING = "reading"
    STOPPING = "stopping"  # the load has ended badly; posted slices cannot be taken back and are waited for
    QUARANTINED = "quarantined"  # ... for longer than the load itself may last
    LANDED = "landed"  # every posted byte has arrived
    STOPPED = "stopped"  # ended early, and no byte can arrive any more


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
    """True if no byte can land in the local blocks any more (invariant I1)."""
    return state in (TransferState.PENDING, TransferState.LANDED, TransferState.STOPPED)
