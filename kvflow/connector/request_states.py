"""The life of a request in an engine's scheduler, as transition tables: one that consumes, one that produces.

See `core.policy.states` for `fire` and `knows`. The pictures in docs/architecture.md are drawn from these tables.
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

from kvflow.core.policy.states import Table


class ConsumerState(enum.StrEnum):
    """A request whose prompt may come from a remote engine, as a scheduler sees it (`connector.scheduler`)."""

    EXPECTED = "expected"  # it has no blocks yet
    RECEIVING = "receiving"  # a load writes its blocks
    ABANDONED = "abandoned"  # it has ended, and a load may still write its blocks
    LOCAL = "local"  # it needs nothing remote any more
    ENDED = "ended"


ConsumerEvent: TypeAlias = Literal["receive", "skip", "received", "end"]

CONSUMER_TABLE: Table[ConsumerState, ConsumerEvent] = {
    (ConsumerState.EXPECTED, "receive"): ConsumerState.RECEIVING,
    (ConsumerState.EXPECTED, "skip"): ConsumerState.LOCAL,
    (ConsumerState.EXPECTED, "end"): ConsumerState.ENDED,
    (ConsumerState.RECEIVING, "received"): ConsumerState.LOCAL,
    (ConsumerState.RECEIVING, "end"): ConsumerState.ABANDONED,
    (ConsumerState.ABANDONED, "received"): ConsumerState.ENDED,
    (ConsumerState.LOCAL, "end"): ConsumerState.ENDED,
}


class ProducerState(enum.StrEnum):
    """A request whose prompt is computed for a remote engine, as an engine's scheduler sees it."""

    COMPUTING = "computing"
    FLOWING = "flowing"  # its lease grows with its prompt, and is read meanwhile
    SAVED = "saved"  # its prompt is computed and its lease open; nobody has its ticket
    SENDING = "sending"  # it has finished, its ticket is out
    ENDED = "ended"


ProducerEvent: TypeAlias = Literal["flow", "save", "preempt", "send", "sent", "end"]

PRODUCER_TABLE: Table[ProducerState, ProducerEvent] = {
    (ProducerState.COMPUTING, "flow"): ProducerState.FLOWING,
    (ProducerState.COMPUTING, "save"): ProducerState.SAVED,
    (ProducerState.COMPUTING, "end"): ProducerState.ENDED,
    (ProducerState.FLOWING, "preempt"): ProducerState.COMPUTING,
    (ProducerState.FLOWING, "send"): ProducerState.SENDING,
    (ProducerState.SAVED, "preempt"): ProducerState.COMPUTING,
    (ProducerState.SAVED, "send"): ProducerState.SENDING,
    (ProducerState.SAVED, "end"): ProducerState.ENDED,
    (ProducerState.SENDING, "sent"): ProducerState.ENDED,
}


def request_blocks_held(state: ConsumerState | ProducerState) -> bool:
    """True if blocks of the request must stay as they are, although it may have ended for the engine."""
    return state in (ConsumerState.RECEIVING, ConsumerState.ABANDONED, ProducerState.SENDING)
