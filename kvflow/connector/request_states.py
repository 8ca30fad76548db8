"""Transition tables for requests in an engine's scheduler: one for requests that load prompts, one for offered prompts.

`core.policy.states` applies the tables. The pictures in docs/architecture.md are drawn from them.
"""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

from kvflow.core.policy.states import Table


class ConsumerState(enum.StrEnum):
    """State of a request that may load its prompt from another engine (`connector.consumers`)."""

    EXPECTED = "expected"  # the request has no blocks yet
    RECEIVING = "receiving"  # a load writes to the request's blocks
    ABANDONED = "abandoned"  # the request has ended, but a load may still write to its blocks
    LOCAL = "local"  # the request needs nothing further from a remote engine
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
    """State of a request that computes its prompt for another engine (`connector.producers`)."""

    COMPUTING = "computing"
    FLOWING = "flowing"  # the prompt is being computed, with an open lease that readers may read
    SAVED = "saved"  # the prompt is computed and its lease open, but no reader has the ticket yet
    SENDING = "sending"  # the request has ended, and readers may have the ticket
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
    """Return True if the engine must not reuse the blocks of a request in `state`, even if the request has ended."""
    return state in (ConsumerState.RECEIVING, ConsumerState.ABANDONED, ProducerState.SENDING)
