"""Messages of the side channel: the questions that a reader puts to a rank, and the answers.

Each is a frozen struct whose fields have bounds (`core.bounds`), so that decoding (`core.protocol.codec`) refuses
whatever is of another type or size. Claims that are true or false as a whole, such as where a peer's cache lies, are
judged by `core.protocol.claims`.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvflow.core.bounds import (
    BlockIds,
    Count,
    Digest,
    Fact,
    Hold,
    Incarnation,
    Layers,
    LeaseId,
    Missing,
    Name,
    PromptDigest,
    Reader,
    Reason,
    RequestName,
    SealAddress,
    SealCount,
    Seconds,
    Size,
    Wait,
    Word32,
    Word64,
)
from kvflow.core.cache.groups import GROUPS_MAX, SETS_MAX, GroupFacts
from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device
from kvflow.core.cache.state import ROWS_MAX
from kvflow.core.plan.topology import CacheShare
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.compatibility import Compatibility
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.limits import PAYLOAD_BYTES_MAX

REGIONS_MAX = 1 << 16
DIGEST_PARTS_MAX = 1 << 12
AGENT_METADATA_BYTES_MAX = 1 << 26
INSTEAD_BYTES_MAX = 1 << 13
"""Size of the rendezvous that readers are sent on to; one of more ranks than fit sends nobody on."""

CacheShares: TypeAlias = Annotated[tuple[CacheShare, ...], Meta(max_length=SETS_MAX)]
BlockTables: TypeAlias = Annotated[tuple[BlockIds, ...], Meta(max_length=GROUPS_MAX)]
Instead: TypeAlias = Annotated[bytes, Meta(max_length=INSTEAD_BYTES_MAX)]
Numbers: TypeAlias = Annotated[list[Size], Meta(max_length=REGIONS_MAX)]


class ReaderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every question that a reader puts to a rank."""

    reader: Reader
    target: Address
    """The engine and rank that a reader believes to listen there."""


class MetadataRequest(ReaderRequest, frozen=True, kw_only=True, tag="get_metadata"):
    """Question for a rank's name and the place of its cache; the answer is `Metadata`."""

    request_id: RequestName | None = None
    """The request of the reader's ticket; a rank that drains connects nobody else."""
    caller: Address | None = None
    """The reader itself, to be told when the rank closes."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """Word of a rank to a reader (`target`) that it closes now.

    The reader believes it if `incarnation` is that of its connection. A forged one costs a handshake at most.
    """

    target: Address
    sender: Address
    incarnation: Incarnation


class LeaseRequest(ReaderRequest, frozen=True, kw_only=True, tag="get_lease"):
    """Question for the lease of a request. The answer is a `LeaseAnswer`.

    It comes as soon as there is something to tell that the reader does not know, at the latest after `wait_s`. The
    request id is the secret that gives access; the request may have yet to begin.
    """

    request_id: RequestName
    wait_s: Wait = 0.0
    num_tokens: Count = 0
    blocks_digest: Digest = b""
    """`digest_of` the engine's block ids, the same on all its ranks, of a reader that knows the offer: a lease of other
    blocks, or of other than `num_tokens`, is not meant. Empty: the offer is told, too."""
    lease_id: LeaseId | None = None
    """The lease, of a reader that knows it: only what becomes of this one is told."""
    known: Annotated[tuple[Count, ...], Meta(max_length=GROUPS_MAX)] = ()
    """Blocks of that lease that the reader knows, counted by group."""
    missing_max: Missing = -1
    """Missing tokens of that lease at which an answer is due as well; -1: not before the end of the lease."""


class ReleaseRequest(ReaderRequest, frozen=True, kw_only=True, tag="release"):
    """Word that the blocks of a lease are needed no more: a `ReadDone` of a reader that is not connected.

    Its share of the lease follows from the cache shares (`topology.report_share`). The answer is an `Ack`.
    """

    lease_id: LeaseId
    cache_shares: CacheShares


class DigestPart(msgspec.Struct, frozen=True, array_like=True):
    """Layers, heads and tokens to digest, numbered as in the model and the prompt, not as on one rank."""

    part: Fact
    """Segment of state, or "": as in a `CacheShare`."""
    layers: Layers
    head: Count
    """The first head."""
    heads: Count
    model_heads: Count
    """Heads of the model: a rank's own follow from them."""
    start: Count
    """The first token of the prompt."""
    stop: Count
    """The one after the last."""


DigestParts: TypeAlias = Annotated[tuple[DigestPart, ...], Meta(max_length=DIGEST_PARTS_MAX)]


class DigestRequest(ReaderRequest, frozen=True, kw_only=True, tag="get_digests"):
    """Question for the digests of these bytes of an open lease. See `verify.digests`."""

    request_id: RequestName
    lease_id: LeaseId
    definition: Count
    """Number of the definition of a digest that the reader computes."""
    parts: DigestParts


class DeclineRequest(ReaderRequest, frozen=True, kw_only=True, tag="decline"):
    """Word of another engine that a request, whose readers wait for its offer here, has come to it.

    The request id is the secret that gives access, as for a `LeaseRequest`. The answer is an `Ack`.
    """

    request_id: RequestName
    reason: Reason
    instead: Instead = b""
    """See `LeaseAnswer`."""


class RegionTable(msgspec.Struct, frozen=True, kw_only=True):
    """`regions.Regions` on the wire."""

    bases: Numbers
    strides: Numbers
    block: BlockShape
    parts: Annotated[tuple[Fact, ...], Meta(max_length=ROWS_MAX)]
    num_blocks: Size
    device: Device


class SealLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a producer's seals in its host memory: see `core.protocol.proof`."""

    address: SealAddress
    count: SealCount
    hold_s: Hold
    """Time the producer keeps blocks after it has wiped a seal."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, tag="metadata"):
    """Answer with all that a reader needs to know about a rank."""

    engine_id: Name
    incarnation: Incarnation
    cache_shares: CacheShares
    """Shares of each set of layers that look alike."""
    agent_metadata: Annotated[bytes, Meta(max_length=AGENT_METADATA_BYTES_MAX)]
    agent_metadata_crc32: Word32
    """NIXL crashes on flipped bits in its metadata, so a reader compares this first."""
    regions: Annotated[tuple[RegionTable, ...], Meta(max_length=SETS_MAX)]
    """Regions of the sets, in the same order."""
    groups: Annotated[tuple[GroupFacts, ...], Meta(max_length=GROUPS_MAX)]
    """Groups of layers, which the sets name by number (`CacheShare.group`)."""
    seals: SealLocation
    staged: bool
    """Blocks are copied to host buffers before they can be read, so that a lease's seal says how far it is."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank offers: the content of a ticket, for readers that have none."""

    num_tokens: Count
    ttl_s: Seconds
    block_ids: BlockTables
    """Block ids of the engine, by group."""
    extends: bool
    prompt_digest: PromptDigest
    queued_bytes: Count = 0
    """Bytes of prefixes that are leased to others now, and may be read before these."""


class Told(enum.StrEnum):
    """States of a request's lease, as a rank tells them."""

    WAITING = "waiting"
    """There is nothing to tell yet: no lease, or no more of it than the reader knows."""
    OPEN = "open"
    """The end of the lease is still to come."""
    COMPLETE = "complete"
    """All of it can be read, and it has its payload if one was promised. Without a lease: there is nothing to read."""
    ENDED = "ended"
    """The lease is over: no read of it can succeed any more."""
    FAILED = "failed"
    """The prompt cannot be computed, or the rank will not serve it: no read of it can succeed."""


class LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """Answer about a lease, with what the reader does not know of it."""

    state: Told
    lease: RankLease | None = None
    """The lease; its `block_ids` are set if they differ from the engine's (host buffers). The reader knows where the
    rank listens."""
    offer: Offer | None = None
    more_block_ids: BlockTables = ()
    """Block ids, by group, that the reader did not know."""
    payload: Annotated[bytes, Meta(max_length=PAYLOAD_BYTES_MAX)] = b""
    reason: Reason = ""
    """Reason of a failure."""
    instead: Instead = b""
    """Rendezvous (MessagePack of `Ticket.to_params`) at the engine that serves the request instead; empty if none
    does."""


NOTHING_YET = LeaseAnswer(state=Told.WAITING)


class Digests(msgspec.Struct, frozen=True, kw_only=True, tag="digests"):
    """Digests of each layer of each part of a question, in order. The lease was open when the last was computed."""

    values: Annotated[tuple[Word64, ...], Meta(max_length=REGIONS_MAX)]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """Refusal of a question, with its reason. The facts are set when the fingerprints differ."""

    reason: Reason
    version: Count
    transient: bool = False
    """True if the answer may be another one soon: the rank has no cache yet, or is about to go."""
    compatibility: Compatibility | None = None
    cache_shares: CacheShares = ()
    listens: Address | None = None
    """The rank that listens here, if the question was for another engine."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="noted"):
    """Acknowledgement, by this incarnation, of a `Goodbye`, `DeclineRequest` or `ReleaseRequest`."""

    incarnation: Incarnation


Request: TypeAlias = ReaderRequest | Goodbye
"""A question to a rank, of the core or of a part."""
CoreRequest: TypeAlias = MetadataRequest | LeaseRequest | ReleaseRequest | DigestRequest | Goodbye | DeclineRequest
Reply: TypeAlias = Metadata | LeaseAnswer | Digests | Ack | Refusal


def digest_of(block_ids: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> bytes:
    """A short digest of block ids, by group if there are several, to compare those of two ranks."""
    return hashlib.sha256(msgspec.msgpack.encode(block_ids), usedforsecurity=False).digest()[:16]


def asked_by(request: Request) -> str:
    """Return the engine in whose name a request is; any text where a reader's name is no `agent_name`."""
    return request.sender.engine_id if isinstance(request, Goodbye) else request.reader.rpartition("/")[0]
