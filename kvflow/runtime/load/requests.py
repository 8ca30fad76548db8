"""Loads as their caller sees them: the request, the progress, the report, and the counts of all."""

from __future__ import annotations

import builtins
import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias

from kvflow import checks
from kvflow.checks import Count, Seconds
from kvflow.core.plan.descriptors import GivenBlockIds
from kvflow.core.policy.events import GivenEvent
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import COMPUTE, RequestError
from kvflow.runtime.records import Attempt

PHASES = ("queued", "handshake", "plan", "post", "wire", "notify")
VERIFY = "verify"
"""The phase between "wire" and "notify" of a load that is verified; no other has it."""
EVERY_PHASE = ("queued", "handshake", "plan", "post", COMPUTE, "wire", VERIFY, "notify")
"""All phases, with those that only some loads have: "compute" is of loads that had to wait for their producer."""

TICKETS_MAX = 16
"""Most tickets of one load."""

GivenTicket: TypeAlias = Ticket | Mapping[str, Any]
Again: TypeAlias = Callable[[Sequence[Attempt]], Awaitable[GivenTicket | None]]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Fill `block_ids`, in prompt order, from the blocks that `ticket` offers.

    `block_ids` begin with the block of token `cached_tokens` and end with that of the last offered token
    (`Ticket.offered_tokens`). RequestError with both numbers if they do not. With no blocks (all was cached) nothing is
    read and the producer is told at once; an offer without blocks reads nothing either, and `LoadReport.tokens` is 0.

    For a cache of several groups `block_ids` are a list for each, in order, or by the groups' names. A window's blocks
    end with that of the last offered token; a state's slot is of that token; either may be left out.

    `ticket` is a Ticket or its dict; or several of one prompt, the best first: the load reads from the next one if its
    source fails or has ended. `deadline_s` covers every phase and defaults to Config.load_deadline_s. Where
    loads have to wait for each other, a smaller `priority` goes first; loads of equal priority take turns.
    """

    request_id: str
    ticket: GivenTicket | Sequence[GivenTicket]
    block_ids: GivenBlockIds
    deadline_s: Seconds | None = None
    priority: int = 0
    prompt: Sequence[int] | None = None
    """Token ids of the prompt. PromptMismatch if the ticket is of another one, as far as its producer has told."""
    after: GivenEvent = None
    """An event after which the device does nothing to the local blocks any more, such as a CUDA event behind the last
    step of who had them before: no byte lands earlier. **Without it the blocks have to be at rest when the load is
    asked for.**"""
    verify: bool | None = None
    """Comparison of its bytes with the producer's by checksums: True fails the load where that is not possible,
    False never compares, None leaves it to Config.verify_share."""
    num_tokens: Count | None = None
    """Tokens that the offer has to be of, for callers that have made room before they could know, as for a
    rendezvous: PromptMismatch if it is of more or fewer, before anything is read. Required for a window whose blocks
    are smaller than those of all groups without one, unless `prompt` has as many tokens."""
    keep_offer: bool = False
    """True if the producer is not told at the end, since other requests are to read the same: `Runtime.release_blocks`
    tells it, and `Runtime.keep_leases` keeps the blocks until then."""
    again: GivenAgain = None
    """Awaited when no source is left, within the deadline: brings another ticket, such as of a prefill elsewhere, or
    None. It is given what came of the sources so far. What it raises ends the load."""
    again_max: Count = 2
    """Times that `again` is awaited at most."""
    cached_tokens: Count = 0
    """Tokens of the prompt in front of `block_ids`, which are in the local cache already: full blocks. A group with
    larger blocks begins with the block that holds token `cached_tokens`."""


def _checked_again(value: object, what: str) -> object:
    if value is not None and not callable(value):
        raise RequestError(f"{what}: expected an async function, got {checks.shown(value)}")
    return value


GivenAgain: TypeAlias = Annotated[Again | None, _checked_again]


class Verification(enum.StrEnum):
    """Outcome of comparing a load's bytes with its producer's."""

    OFF = "off"
    """Bytes that were not to be compared."""
    VERIFIED = "verified"
    """Bytes that are equal."""
    REPAIRED = "repaired"
    """Bytes that differed, and are equal since they were read once more."""
    MISMATCH = "mismatch"
    """Bytes that differ: the load has failed."""
    UNVERIFIED = "unverified"
    """Bytes that could not be compared: the producer does not answer such questions, or not now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Result of one load.

    `seconds` has an entry for each phase, which sum to `total_s`: also "verify" if it was verified, and "compute" if it
    had to wait until its producer had computed more of the prompt.
    """

    request_id: str
    bytes: int
    blocks: int
    tokens: int
    """Tokens that were read into the local blocks; the last of those may be partly filled."""
    descriptors: int
    sources: tuple[str, ...]
    """The ranks of the producer that were read from."""
    notified: bool
    """True if every rank of the producer that holds a lease for us was told that it may free its blocks."""
    seconds: Mapping[str, float]
    verification: Verification = Verification.OFF
    freshness: str = "seal"
    """Proof of the bytes: "seal", that of each producer's lease; or "deadline", arithmetic alone, for a load
    from an engine that keeps no seals (`kvflow.stock`)."""
    payload: builtins.bytes = b""
    """Bytes that came with the lease's end (`Lease.complete`); b"" if nothing was promised."""
    attempts: Sequence[Attempt] = ()
    """Sources of a load of several tickets, or with `again`, in the order of their turns, the last of which has
    given all of it."""

    @property
    def verified(self) -> bool:
        """True if every byte was compared with the producer's, and is equal."""
        return self.verification in (Verification.VERIFIED, Verification.REPAIRED)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a load under way: what `async for` over it gives."""

    tokens: int
    """Tokens of what it loads, from the first one on, that are in the local blocks of all groups; in the end, as
    many as `LoadReport.tokens`."""
    tokens_in_all: int


class InFlight(NamedTuple):
    """Reads in flight, as permits bound them."""

    bytes: int
    descriptors: int
    reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """Reads in flight from one rank, and how many wait to be."""

    in_flight: InFlight
    waiting_reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingStatistics:
    """Loads under way now, how others ended, and blocks that no ended load could declare safe yet."""

    open_loads: int
    waiting_loads: int
    """Open loads that wait because Limits.loads_max ranks are read from already."""
    waiting_reads: int
    """Reads that wait for room in the budgets of Config (`in_flight_bytes_max` and others)."""
    in_flight: InFlight
    """Reads that are posted and have not stopped yet, those into quarantined blocks included."""
    peers: Mapping[str, PeerLoad]
    """Reads in flight and waiting, by the agent's name of each rank that has any."""
    quarantines: int
    succeeded: int
    failed: int
    cancelled: int
    refused: int
    """Loads whose request could not be right, or that came while the runtime drains."""
    bytes: int
    renewals: int
    """Renewals of leases, for loads under way and by `keep_leases`."""
    sources_left: int = 0
    """Sources that loads have left since they failed; which peers are not asked for now `peers` says."""
    never_read: int = 0
    """Engines whose tickets loads have failed with again and again, and that no load has ever read from."""
    verified: int = 0
    """Loads whose bytes were compared with their producers' and were equal at once."""
    repaired: int = 0
    """Loads whose bytes differed, and were equal when they had been read once more."""
    mismatch: int = 0
    """Loads that have failed because their bytes differed twice."""
    unverified: int = 0
    """Loads that were to be verified and could not be."""
