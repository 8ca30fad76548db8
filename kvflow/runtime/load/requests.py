"""Loads as their caller sees them: request, progress, report, and the statistics of all loads."""

from __future__ import annotations

import builtins
import enum
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias

from kvflow import checks
from kvflow.checks import Count, Deadline
from kvflow.core.plan.descriptors import GivenBlockIds
from kvflow.core.policy.events import GivenEvent
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import COMPUTE, RequestError
from kvflow.runtime.records import Attempt

PHASES = ("queued", "handshake", "plan", "post", "wire", "notify")
VERIFY = "verify"
"""Phase between "wire" and "notify" that only a verified load has."""
EVERY_PHASE = ("queued", "handshake", "plan", "post", COMPUTE, "wire", VERIFY, "notify")
"""All phases in order. Only some loads have "compute" (they wait for the producer) and "verify" (they are verified)."""

TICKETS_MAX = 16
"""Largest number of tickets in one load request."""

GivenTicket: TypeAlias = Ticket | Mapping[str, Any]
Again: TypeAlias = Callable[[Sequence[Attempt]], Awaitable[GivenTicket | None]]


@checks.hides_secrets
@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Request to fill `block_ids`, in prompt order, from the blocks that `ticket` offers.

    `block_ids` begin with the block of token `cached_tokens` and end with the block of the last offered token
    (`Ticket.offered_tokens`). If they do not, RequestError names the number of blocks given and needed. If `block_ids`
    is empty, because everything was cached or the offer has no blocks, nothing is read, and the producer is notified.

    For a cache of several groups, `block_ids` is a list for each group, in order, or a dict by group name. The blocks
    of a sliding-window group end with the block of the last offered token. A group with recurrent state has one slot,
    for the last offered token. Groups of these two kinds may be left empty.

    `ticket` is a Ticket or its dict, or a list of several for one prompt, the best first: if a producer fails or its
    lease has ended, the load reads from the next one. `deadline_s` covers every phase; None means
    Config.load_deadline_s. If it is 0 or less, the load fails with DeadlineExceeded in phase "queued". Where loads have
    to wait for each other, a smaller `priority` goes first; loads of equal priority take turns.
    """

    request_id: str
    ticket: GivenTicket | Sequence[GivenTicket]
    block_ids: GivenBlockIds
    deadline_s: Deadline | None = None
    priority: int = 0
    prompt: Sequence[int] | None = None
    """Token ids of the prompt. PromptMismatch if the ticket is known to be for another prompt."""
    after: GivenEvent = None
    """Device event after which the device no longer uses the local blocks, such as a CUDA event recorded after the last
    step that used them. No byte lands before the event. **Without an event, the device must no longer use the blocks
    when the load is requested.**"""
    verify: bool | None = None
    """Whether to compare the bytes with the producer's by checksums. True: fail the load if that is not possible.
    False: never compare. None: Config.verify_share decides."""
    num_tokens: Count | None = None
    """Number of tokens that the offer must have, for callers that allocate blocks before they know the offer, as with a
    pending ticket. PromptMismatch, before anything is read, if the offer has another number. The number is required if
    a group with a sliding window has smaller blocks than all full-attention groups, and `prompt` is not given or is
    longer than the offer."""
    keep_offer: bool = False
    """True: do not notify the producer at the end, because other requests will read the same offer. Use
    `Runtime.keep_leases`, so that the producer keeps the blocks, and call `Runtime.release_blocks` after the last
    request."""
    again: GivenAgain = None
    """Async function that is awaited, within the deadline, when the producers of all tickets have failed. It gets the
    outcome of each attempt, and returns another ticket, for example from another prefill engine, or None. If it raises,
    the load ends with that exception."""
    again_max: Count = 2
    """Largest number of times that `again` is awaited."""
    cached_tokens: Count = 0
    """Number of the prompt's first tokens that are in the local cache already, in full blocks, which `block_ids` leave
    out. A group with larger blocks begins with the block that holds token `cached_tokens`."""
    extends: bool = False
    """True: `block_ids` are only the first of the local blocks, or none, and `Load.extend` adds the others while the
    load runs. For `start_load` with one ticket of an engine that runs kvflow."""


def _checked_again(value: object, what: str) -> object:
    calls = (value, type(value).__call__) if callable(value) else ()
    if value is not None and not any(map(inspect.iscoroutinefunction, calls)):
        raise RequestError(f"{what}: expected an async function (async def), got {checks.short_repr(value)}")
    return value


GivenAgain: TypeAlias = Annotated[Again | None, _checked_again]


class Verification(enum.StrEnum):
    """Outcome of comparing a load's bytes with the producer's bytes."""

    OFF = "off"
    """No comparison was wanted."""
    VERIFIED = "verified"
    """The bytes are equal."""
    REPAIRED = "repaired"
    """The bytes differed, and are equal after a second read."""
    MISMATCH = "mismatch"
    """The bytes differ: the load has failed."""
    UNVERIFIED = "unverified"
    """The bytes could not be compared: the producer or this rank could not compute digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Result of one load that has succeeded.

    `seconds` has an entry for each phase; their sum is `total_s`. A verified load also has "verify", and a load that
    waited for its producer to compute more of the prompt also has "compute".
    """

    request_id: str
    bytes: int
    blocks: int
    tokens: int
    """Number of tokens that were read into the local blocks; the last block may be partly filled."""
    descriptors: int
    sources: tuple[str, ...]
    """Names of the producer's ranks that were read from."""
    notified: bool
    """True if every producer rank with a lease for this reader was notified that this reader has finished with the
    lease."""
    seconds: Mapping[str, float]
    verification: Verification = Verification.OFF
    freshness: str = "seal"
    """Proof that the bytes are fresh. "seal": the seal of each producer's lease. "deadline": the read ended while the
    producer surely held the blocks, for an engine that keeps no seals (`kvflow.stock`)."""
    payload: builtins.bytes = b""
    """Extra bytes that the producer gave to `Lease.complete`; empty if the lease promised no payload."""
    attempts: Sequence[Attempt] = ()
    """Outcomes of all attempts of a load with several tickets or with `again`, in order. The last one succeeded."""

    @property
    def verified(self) -> bool:
        """True if every byte was compared with the producer's, and is equal."""
        return self.verification in (Verification.VERIFIED, Verification.REPAIRED)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a load under way, as `async for` over the load yields it."""

    tokens: int
    """Number of tokens, counted after the cached ones, that have landed in every group of layers. At the end it is
    `LoadReport.tokens`."""
    tokens_in_all: int
    """Number of tokens that the load reads."""


class InFlight(NamedTuple):
    """Size of the reads in flight: bytes, descriptors and number of reads."""

    bytes: int
    descriptors: int
    reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """Reads in flight from one rank, and the number of reads that wait for a permit."""

    in_flight: InFlight
    waiting_reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingStatistics:
    """Counts of loads under way, of ended loads by outcome, and of quarantines."""

    open_loads: int
    waiting_loads: int
    """Open loads that wait for other loads to end, because all loads together may read from at most
    Limits.source_ranks_max ranks. A rank counts once for each load."""
    loads_lacking_blocks: int
    """Open loads with `LoadRequest.extends` that wait for `Load.extend`: more tokens are computed than they have blocks
    for."""
    waiting_reads: int
    """Reads that wait for a permit, because of the limits of Config (`in_flight_bytes_max` and others)."""
    in_flight: InFlight
    """Reads that are posted and have not stopped, including reads into quarantined blocks."""
    peers: Mapping[str, PeerLoad]
    """Reads in flight and waiting reads of each rank, by the name of the rank's NIXL agent."""
    quarantines: int
    """Ended loads that have blocks in quarantine now, because bytes may still land in the blocks."""
    succeeded: int
    failed: int
    cancelled: int
    refused: int
    """Loads that were not accepted: the request was invalid, or the runtime was draining."""
    bytes: int
    renewals: int
    """Renewals of leases, for loads under way and by `keep_leases`."""
    sources_left: int = 0
    """Number of times that a load went on with another producer after a failure."""
    never_read: int = 0
    """Number of engines from which no load has ever succeeded and at least three have failed."""
    verified: int = 0
    """Verified loads with bytes that were equal after the first read."""
    repaired: int = 0
    """Verified loads with bytes that differed after the first read, and were equal after the second."""
    mismatch: int = 0
    """Loads that failed after a comparison had found bytes that differ."""
    unverified: int = 0
    """Loads that should have been verified, but could not be."""
