"""What kvflow's connector objects in vLLM's scheduler and workers say to one another; vLLM carries the messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvflow.connector.step import Step
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PromptMismatch


@dataclass(frozen=True)
class KVFlowMetadata(KVConnectorMetadata):
    """The work of one engine step, from the scheduler's connector object to the workers'."""

    step: Step
    cards: tuple[bytes, ...] = ()
    """For stock readers: all workers' encoded metadata (`EngineRanks.card`), since a stock reader may ask any worker
    about all workers. Empty if the workers have the metadata already."""
    successor: Ticket | None = None
    """A ticket of the server that takes this one's place, in the step after it was named."""
    idle: bool = False
    """True if the engine computes nothing in this step. The workers may then wait a moment for a result."""


@dataclass(frozen=True)
class KVFlowIntroduction(KVConnectorHandshakeMetadata):
    """Message from a worker to the scheduler's connector object: how readers reach the worker.

    vLLM collects the messages of all workers at its start, and again when it wakes from a sleep.
    """

    ticket: Ticket
    """Ticket without blocks that names the worker's rank and address (`ConnectorWorker.introduction`)."""
    card: bytes = b""
    """The worker's encoded metadata for stock readers (`EngineRanks.card`); empty if `stock_peers` is off."""


@dataclass(frozen=True)
class KVFlowWorkerReport(KVConnectorWorkerMetadata):
    """Report of one worker, or of all workers, to the scheduler's connector object; sent with a step's results."""

    found: Mapping[str, tuple[Ticket, ...]] = field(default_factory=dict)
    """By request id, for requests that wait for peers' answers: the tickets with which to load a prefix of the prompt.
    """
    refused: tuple[tuple[str, PromptMismatch], ...] = ()
    """Ids and errors of requests that must fail: the producer's prompt has the same tokens as the request's, but other
    pictures, another adapter or another cache salt."""

    offered: tuple[str, ...] = ()
    """Ids of requests that have waited for the offer of their prompts, and may get blocks now (`late_blocks`)."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVFlowWorkerReport:
        others = cast(KVFlowWorkerReport, other)
        found, refused = {**self.found, **others.found}, self.refused + others.refused
        return KVFlowWorkerReport(found, refused, self.offered + others.offered)
