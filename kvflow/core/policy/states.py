"""The life of a peer, a lease, a read and an engine's request, each as one transition table.

`fire` is the only way a state changes: it looks the (state, event) pair up and returns the next state; a pair that
is not in the table raises `IllegalTransition` and changes nothing. Questions about a state are functions with a
meaning, such as `transfer_blocks_safe`. The pictures in docs/architecture.md are drawn from these tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

StateT = TypeVar("StateT", bound=enum.StrEnum)
EventT = TypeVar("EventT", bound=enum.StrEnum)
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


class PeerEvent(enum.StrEnum):
    CONNECT = "connect"  # also while connected, if a ticket is of another incarnation of the peer
    CONNECTED = "connected"
    POSTPONE = "postpone"
    BACK_OFF = "back_off"
    BREAK = "break"
    CLOSE = "close"


PEER_TABLE: Table[PeerState, PeerEvent] = {
    (PeerState.UNKNOWN, PeerEvent.CONNECT): PeerState.CONNECTING,
    (PeerState.UNKNOWN, PeerEvent.CLOSE): PeerState.CLOSED,
    (PeerState.CONNECTING, PeerEvent.CONNECTED): PeerState.READY,
    (PeerState.CONNECTING, PeerEvent.POSTPONE): PeerState.UNKNOWN,
    (PeerState.CONNECTING, PeerEvent.BACK_OFF): PeerState.BACKING_OFF,
    (PeerState.READY, PeerEvent.CONNECT): PeerState.CONNECTING,
    (PeerState.READY, PeerEvent.BREAK): PeerState.BROKEN,
    (PeerState.READY, PeerEvent.BACK_OFF): PeerState.BACKING_OFF,
    (PeerState.READY, PeerEvent.CLOSE): PeerState.CLOSED,
    (PeerState.BROKEN, PeerEvent.CONNECT): PeerState.CONNECTING,
    (PeerState.BROKEN, PeerEvent.CLOSE): PeerState.CLOSED,
    (PeerState.BACKING_OFF, PeerEvent.CONNECT): PeerState.CONNECTING,
    (PeerState.BACKING_OFF, PeerEvent.CLOSE): PeerState.CLOSED,
}


class LeaseState(enum.StrEnum):
    """A producer's promise to keep blocks."""

    OFFERED = "offered"
    READ = "read"  # every reader has read
    EXPIRED = "expired"
    REVOKED = "revoked"  # withdrawn by its owner, or by the closing runtime
    FAILED = "failed"  # its prompt will never be computed


class LeaseEvent(enum.StrEnum):
    ALL_READ = "all_read"
    EXPIRE = "expire"
    REVOKE = "revoke"
    FAIL = "fail"


LEASE_TABLE: Table[LeaseState, LeaseEvent] = {
    (LeaseState.OFFERED, LeaseEvent.ALL_READ): LeaseState.READ,
    (LeaseState.OFFERED, LeaseEvent.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.OFFERED, LeaseEvent.REVOKE): LeaseState.REVOKED,
    (LeaseState.OFFERED, LeaseEvent.FAIL): LeaseState.FAILED,
}


class TransferState(enum.StrEnum):
    """The bytes of one load."""

    PENDING = "pending"  # nothing was posted
    READING = "reading"
    STOPPING = "stopping"  # the load has ended badly; posted slices cannot be taken back and are waited for
    QUARANTINED = "quarantined"  # ... for longer than the load itself may last
    LANDED = "landed"  # every posted byte has arrived
    STOPPED = "stopped"  # ended early, and no byte can arrive any more


class TransferEvent(enum.StrEnum):
    POST = "post"
    LAND = "land"
    ABANDON = "abandon"
    OVERDUE = "overdue"
    LAST_STOPPED = "last_stopped"


TRANSFER_TABLE: Table[TransferState, TransferEvent] = {
    (TransferState.PENDING, TransferEvent.POST): TransferState.READING,
    (TransferState.PENDING, TransferEvent.ABANDON): TransferState.STOPPED,
    (TransferState.READING, TransferEvent.LAND): TransferState.LANDED,
    (TransferState.READING, TransferEvent.ABANDON): TransferState.STOPPING,
    (TransferState.STOPPING, TransferEvent.LAST_STOPPED): TransferState.STOPPED,
    (TransferState.STOPPING, TransferEvent.OVERDUE): TransferState.QUARANTINED,
    (TransferState.QUARANTINED, TransferEvent.LAST_STOPPED): TransferState.STOPPED,
}


def transfer_blocks_safe(state: TransferState) -> bool:
    """True if no byte can land in the local blocks any more (invariant I1)."""
    return state in (TransferState.PENDING, TransferState.LANDED, TransferState.STOPPED)


class ConsumerState(enum.StrEnum):
    """A request whose prompt may come from a remote engine, as a scheduler sees it (`connector.scheduler`)."""

    EXPECTED = "expected"  # it has no blocks yet
    RECEIVING = "receiving"  # a load writes its blocks
    ABANDONED = "abandoned"  # it has ended, and a load may still write its blocks
    LOCAL = "local"  # it needs nothing remote any more
    ENDED = "ended"


class ConsumerEvent(enum.StrEnum):
    RECEIVE = "receive"
    SKIP = "skip"
    RECEIVED = "received"
    END = "end"


CONSUMER_TABLE: Table[ConsumerState, ConsumerEvent] = {
    (ConsumerState.EXPECTED, ConsumerEvent.RECEIVE): ConsumerState.RECEIVING,
    (ConsumerState.EXPECTED, ConsumerEvent.SKIP): ConsumerState.LOCAL,
    (ConsumerState.EXPECTED, ConsumerEvent.END): ConsumerState.ENDED,
    (ConsumerState.RECEIVING, ConsumerEvent.RECEIVED): ConsumerState.LOCAL,
    (ConsumerState.RECEIVING, ConsumerEvent.END): ConsumerState.ABANDONED,
    (ConsumerState.ABANDONED, ConsumerEvent.RECEIVED): ConsumerState.ENDED,
    (ConsumerState.LOCAL, ConsumerEvent.END): ConsumerState.ENDED,
}


class ProducerState(enum.StrEnum):
    """A request whose prompt is computed for a remote engine, as an engine's scheduler sees it."""

    COMPUTING = "computing"
    FLOWING = "flowing"  # its lease grows with its prompt, and is read meanwhile
    SAVED = "saved"  # its prompt is computed and its lease open; nobody has its ticket
    SENDING = "sending"  # it has finished, its ticket is out
    ENDED = "ended"


class ProducerEvent(enum.StrEnum):
    FLOW = "flow"
    SAVE = "save"
    PREEMPT = "preempt"
    SEND = "send"
    SENT = "sent"
    END = "end"


PRODUCER_TABLE: Table[ProducerState, ProducerEvent] = {
    (ProducerState.COMPUTING, ProducerEvent.FLOW): ProducerState.FLOWING,
    (ProducerState.COMPUTING, ProducerEvent.SAVE): ProducerState.SAVED,
    (ProducerState.COMPUTING, ProducerEvent.END): ProducerState.ENDED,
    (ProducerState.FLOWING, ProducerEvent.PREEMPT): ProducerState.COMPUTING,
    (ProducerState.FLOWING, ProducerEvent.SEND): ProducerState.SENDING,
    (ProducerState.SAVED, ProducerEvent.PREEMPT): ProducerState.COMPUTING,
    (ProducerState.SAVED, ProducerEvent.SEND): ProducerState.SENDING,
    (ProducerState.SAVED, ProducerEvent.END): ProducerState.ENDED,
    (ProducerState.SENDING, ProducerEvent.SENT): ProducerState.ENDED,
}


def request_blocks_held(state: ConsumerState | ProducerState) -> bool:
    """True if blocks of the request must stay as they are, although it may have ended for the engine."""
    return state in (ConsumerState.RECEIVING, ConsumerState.ABANDONED, ProducerState.SENDING)
