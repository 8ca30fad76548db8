"""A load as its caller sees it: the request, the report, and the counts of all. `loading` does them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvflow import checks
from kvflow.config import Config
from kvflow.core.ticket import Ticket
from kvflow.errors import RequestError
from kvflow.runtime.budget import InFlight
from kvflow.runtime.lease import checked_request_id


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Fill `block_ids`, in prompt order, from the blocks that `ticket` offers.

    With fewer local than offered blocks (a prefix was cached), the tail of the offer is read; with none (all was
    cached), nothing is read and the producer is told at once. `ticket` is a Ticket or its dict. `deadline_s` covers
    every phase and defaults to Config.load_deadline_s. Where loads have to wait for each other, a smaller `priority`
    goes first; loads of equal priority take turns.
    """

    request_id: str
    ticket: Ticket | Mapping[str, Any]
    block_ids: Sequence[int]
    deadline_s: float | None = None
    priority: int = 0
    prompt: Sequence[int] | None = None
    """Token ids of the prompt. PromptMismatch if the ticket is of another one, as far as its producer has told."""


def checked_load_request(request: object, config: Config) -> LoadRequest:
    """The request with its numbers and texts as Python's own.

    RequestError names what cannot be right whatever the ticket and the cache are.
    """
    given = checks.instance(request, LoadRequest, "load_blocks")
    request_id = checked_request_id(given.request_id, config)
    try:
        checks.count(given.block_ids, "block_ids", most=config.block_ids_max)
        deadline_s = None if given.deadline_s is None else checks.seconds(given.deadline_s, "deadline_s")
        priority = checks.whole(given.priority, "priority")
    except RequestError as error:
        raise RequestError(f"request {request_id!r}: {error}") from error
    if request_id is given.request_id and deadline_s is given.deadline_s and priority is given.priority:
        return given  # the usual case, quicker than to make another one
    return LoadRequest(request_id, given.ticket, given.block_ids, deadline_s, priority, given.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one load did. `seconds` has an entry for each phase; they add up to `total_s`."""

    request_id: str
    bytes: int
    blocks: int
    tokens: int
    """Tokens that were read into the local blocks; the last of those may be partly filled."""
    descriptors: int
    sources: tuple[str, ...]
    """The ranks of the producer that were read from."""
    notified: bool
    """Whether every rank of the producer that holds a lease for us was told that it may free its blocks."""
    seconds: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """What is in flight from one rank, and how many reads wait to be."""

    in_flight: InFlight
    waiting_reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingStatistics:
    """Loads under way now, how others ended, and blocks that no ended load could declare safe yet."""

    open_loads: int
    waiting_loads: int
    """Those of the open loads that wait because Config.loads_max ranks are read from already."""
    waiting_reads: int
    """Reads that wait for room in the budgets of Config (`in_flight_bytes_max` and others)."""
    in_flight: InFlight
    """What is posted and has not stopped yet, reads into quarantined blocks included."""
    peers: Mapping[str, PeerLoad]
    """The same for each rank, by its agent's name, that has any."""
    quarantines: int
    succeeded: int
    failed: int
    cancelled: int
    bytes: int
    renewals: int
    """How often a lease was renewed, for loads under way and by `keep_leases`."""
