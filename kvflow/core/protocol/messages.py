"""Messages of the side channel: the questions of readers to a rank, and the answers.

Decoding (`core.protocol.codec`) checks the type and bounds of each field; `core.protocol.claims` checks values that are
only valid together, such as the addresses of a peer's cache.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Annotated, ClassVar, TypeAlias

import msgspec
from msgspec import Meta

from kvflow.checks import SECONDS_MAX, hides_secrets
from kvflow.core.bounds import (
    BlockIds,
    Count,
    Digest,
    Fact,
    Hold,
    Incarnation,
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
AGENT_METADATA_BYTES_MAX = 1 << 26
REDIRECT_BYTES_MAX = 1 << 13
"""Maximum bytes of a pending ticket that redirects readers to another engine. If the ticket is larger, because it names
many ranks, readers are not redirected.
"""

CacheShares: TypeAlias = Annotated[tuple[CacheShare, ...], Meta(max_length=SETS_MAX)]
BlockTables: TypeAlias = Annotated[tuple[BlockIds, ...], Meta(max_length=GROUPS_MAX)]
Redirect: TypeAlias = Annotated[bytes, Meta(max_length=REDIRECT_BYTES_MAX)]
Numbers: TypeAlias = Annotated[list[Size], Meta(max_length=REGIONS_MAX)]


@hides_secrets
class ReaderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of the questions that a reader asks a rank."""

    reader: Reader
    """Name of the reader's transport agent (`addresses.agent_name`)."""
    target: Address
    """The engine and rank that the reader expects at the address to which it sends the question."""
    replies: ClassVar[msgspec.msgpack.Decoder[Reply] | None] = None
    """Decoder of the replies to this type of requests (`codec.replies_with`); None: types of the core only."""


class MetadataRequest(ReaderRequest, frozen=True, kw_only=True, tag="get_metadata"):
    """Handshake: ask a rank for its identity and the addresses of its cache. The answer is `Metadata`."""

    request_id: RequestName | None = None
    """Request id in the reader's ticket. A draining rank accepts only readers of requests with an open lease."""
    caller: Address | None = None
    """Address of the reader, to which the rank sends a `Goodbye` when the rank closes."""


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """Notice from a rank to a reader that the rank closes now.

    A reader accepts the notice only if it is connected to `incarnation`. A forged notice costs the reader at most a
    handshake.
    """

    target: Address
    sender: Address
    incarnation: Incarnation
    awaits_removal: bool = False
    """True if the reader is to answer once it has removed the rank's agent, so that none of the rank's memory is mapped
    there. Older readers answer at once."""
    successor: Address | None = None
    """The rank that takes this rank's place, if there is one. Only readers that say so go there: a notice may be
    forged. Older readers ignore it."""


class LeaseRequest(ReaderRequest, frozen=True, kw_only=True, tag="get_lease"):
    """Ask a rank for the lease of a request, even if no lease is open yet. The answer is a `LeaseAnswer`.

    The rank answers as soon as it knows something that the reader does not know, and after `wait_s` at the latest. The
    secret request id authorizes the reader.
    """

    request_id: RequestName
    wait_s: Wait = 0.0
    """Maximum seconds for which the rank may hold back its answer."""
    num_tokens: Count = 0
    """Number of offered tokens; not used if `blocks_digest` is empty."""
    blocks_digest: Digest = b""
    """Digest (`digest_of`) of the offered block ids, if the reader knows the offer; the rank then disregards leases of
    other blocks or another `num_tokens`. Empty: the reader does not know the offer, and the answer has it.
    """
    lease_id: LeaseId | None = None
    """Id of the lease that the question is about, if the reader knows it; None: any lease of the request."""
    known: Annotated[tuple[Count, ...], Meta(max_length=GROUPS_MAX)] = ()
    """Number of blocks of the lease `lease_id` that the reader knows, by group."""
    missing_max: Missing = -1
    """The rank also answers once the number of tokens that cannot be read yet is this or less. -1: such progress is no
    reason to answer before the lease is complete."""


class ReleaseRequest(ReaderRequest, frozen=True, kw_only=True, tag="release"):
    """Notice that a reader has finished with a lease. The answer is an `Ack`.

    The same as `ReadDone`, for readers without a transport connection to the rank.
    """

    lease_id: LeaseId
    cache_shares: CacheShares
    """Cache shares of the reader, from which the rank computes which fraction of the lease the reader has read."""


class RegionTable(msgspec.Struct, frozen=True, kw_only=True):
    """The message form of `regions.Regions`, for one set of layers."""

    bases: Numbers
    strides: Numbers
    block: BlockShape
    parts: Annotated[tuple[Fact, ...], Meta(max_length=ROWS_MAX)]
    num_blocks: Size
    device: Device


class SealLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Address and number of slots of a producer's table of seals, in its host memory (`core.protocol.proof`)."""

    address: SealAddress
    count: SealCount
    hold_s: Hold
    """Seconds for which the producer keeps the blocks of a lease after wiping the lease's seal."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, tag="metadata"):
    """The answer to a `MetadataRequest`: everything that a reader must know about a rank to read from that rank."""

    engine_id: Name
    incarnation: Incarnation
    cache_shares: CacheShares
    """Cache share of each set of layers (layers of one group with the same layout) of the rank."""
    agent_metadata: Annotated[bytes, Meta(max_length=AGENT_METADATA_BYTES_MAX)]
    agent_metadata_crc32: Word32
    """CRC-32 of `agent_metadata`. Readers check it first, because NIXL 1.5.1 takes metadata on trust."""
    regions: Annotated[tuple[RegionTable, ...], Meta(max_length=SETS_MAX)]
    """Regions of each set of layers, in the order of `cache_shares`."""
    groups: Annotated[tuple[GroupFacts, ...], Meta(max_length=GROUPS_MAX)]
    """Groups of layers; `CacheShare.group` is an index in this tuple."""
    seals: SealLocation
    staged: bool
    """True if blocks can be read only after a copy to host buffers. Then a seal shows how many tokens are not copied
    yet."""
    device_memory: Annotated[bytes, Meta(max_length=AGENT_METADATA_BYTES_MAX)] = b""
    """What readers on the same machine need to map the rank's device memory (`Transport.device_memory`); b"" if they
    cannot. Older readers ignore it."""
    device_memory_crc32: Word32 = 0
    """CRC-32 of `device_memory`: a handle with a wrong bit may stand for other memory."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The offered blocks, for readers with a ticket that does not name them."""

    num_tokens: Count
    ttl_s: Seconds
    block_ids: BlockTables
    """Block ids of the producer's engine, by group."""
    extends: bool
    """True if more blocks follow, until the blocks hold all `num_tokens` tokens."""
    prompt_digest: PromptDigest
    queued_bytes: Count = 0
    """If the offer is a prefix: bytes of the other prefixes that the rank has leased, which may be read before this
    one."""


class LeaseAnswerState(enum.StrEnum):
    """The state of a request's lease, as a `LeaseAnswer` gives it."""

    WAITING = "waiting"
    """Nothing new: the rank has no lease of the request yet, or the reader knows all that the rank knows."""
    OPEN = "open"
    """The lease is open; more blocks or computed tokens may follow."""
    COMPLETE = "complete"
    """All tokens of the lease can be read, and the payload (`Lease.complete`), if promised, is known. This is also the
    state if there is no lease because the offer has no blocks.
    """
    ENDED = "ended"
    """The lease has ended, so no read of it can succeed."""
    FAILED = "failed"
    """The prompt cannot be computed, or the rank will not serve it, so no read can succeed."""


@hides_secrets
class LeaseAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """The answer to a question about a lease. The answer has only what the reader does not know about the lease."""

    state: LeaseAnswerState
    lease: RankLease | None = None
    """The lease. Readers know the rank's address, so they ignore the lease's `host` and `port`."""
    offer: Offer | None = None
    more_block_ids: BlockTables = ()
    """By group, the block ids that follow those that the reader knows."""
    payload: Annotated[bytes, Meta(max_length=PAYLOAD_BYTES_MAX)] = b""
    reason: Reason = ""
    """Why no read can succeed, if the state is FAILED."""
    instead: Redirect = b""
    """Pending ticket for the engine that serves the request instead, as MessagePack of `Ticket.to_params`; empty if
    unknown."""


NOTHING_YET = LeaseAnswer(state=LeaseAnswerState.WAITING)


class PartReply(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of the replies to requests of optional parts."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """The refusal of a question. If caches are incompatible, the refusal has the rank's `compatibility` and
    `cache_shares`.
    """

    reason: Reason
    version: Count
    transient: bool = False
    """True if the rank may answer the question later, for example because it has no cache yet."""
    retry_after_s: Annotated[float, Meta(ge=0, le=SECONDS_MAX)] = 0.0
    """Seconds after which to ask again, because the rank is asked too often; 0 for another reason."""
    compatibility: Compatibility | None = None
    cache_shares: CacheShares = ()
    listens: Address | None = None
    """The rank that answers at the asked address, if the question was meant for another engine."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="noted"):
    """The acknowledgement of a `Goodbye`, a `ReleaseRequest`, or a notice to an optional part."""

    incarnation: Incarnation
    """Incarnation of the rank that sends the acknowledgement."""


Request: TypeAlias = ReaderRequest | Goodbye
"""A question to a rank: a type of the core, or a `ReaderRequest` type of an optional part."""
CoreRequest: TypeAlias = MetadataRequest | LeaseRequest | ReleaseRequest | Goodbye
CoreReply: TypeAlias = Metadata | LeaseAnswer | Ack | Refusal
Reply: TypeAlias = CoreReply | PartReply
"""An answer to a question: a type of the core, or a `PartReply` type of an optional part."""


def digest_of(block_ids: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> bytes:
    """Return a digest of `block_ids`, one list or a list for each group.

    Ranks compare digests in place of block ids.
    """
    return hashlib.sha256(msgspec.msgpack.encode(block_ids), usedforsecurity=False).digest()[:16]


def claimed_engine_id(request: Request) -> str:
    """Return the engine id of the sender as `request` claims it, unchecked."""
    return request.sender.engine_id if isinstance(request, Goodbye) else request.reader.rpartition("/")[0]
