"""Messages of the side channel, and notifications.

A side-channel message is two msgpack frames: a `Header` (magic, protocol version, fingerprint) and a body. The header
is decoded and judged first, so that a peer of another version is answered without reading what it meant. Decoding is
strict (wrong types raise `WireError`), sizes are checked before decoding, and nothing here can run code.

The fingerprint is a digest of `Compatibility`: what must be equal on both sides for any byte to mean the same. What may
differ and is planned for is a rank's `topology.Holding`; both are named together when a peer is refused.
"""

from __future__ import annotations

import enum
import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from kvflow.checks import answer, is_name, printable, refusal
from kvflow.core.bounds import (
    BlockIds,
    ClockTime,
    Count,
    DeviceIndex,
    Digest,
    Fact,
    Hold,
    Incarnation,
    Layers,
    Missing,
    Name,
    NetAddress,
    PromptDigest,
    Reader,
    Reason,
    RequestName,
    SealCount,
    SealIndex,
    Seconds,
    Size,
    Wait,
    Word32,
    Word64,
)
from kvflow.core.cache.groups import GROUPS_MAX, SETS_MAX, GroupFacts, GroupKind
from kvflow.core.cache.layout import BlockShape, CacheLayout
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.cache.state import ROWS_MAX, StatePart
from kvflow.core.cache.tensors import NAME_CHARS_MAX
from kvflow.core.plan.topology import CacheShare, Rank
from kvflow.core.prefix.keys import KEY_BYTES
from kvflow.limits import PAYLOAD_BYTES_MAX

PROTOCOL_VERSION = 5
MAGIC = "kvflow"
REGIONS_MAX = 1 << 16
DIGEST_PARTS_MAX = 1 << 12
LEASE_ID_CHARS = 32
PREFIX_OF = "kvflow-prefix/"
"""Beginning of the names of leases of prefixes: no reader can take the name of an engine's own request."""
NO_LEASE_ID = "0" * LEASE_ID_CHARS  # what a wiped seal reads as
_ADDRESS_MAX = (1 << 63) - 1
_PARTS = (("K", "V"), ("KV",), ("latent",))
AGENT_METADATA_BYTES_MAX = 1 << 26
LEASE_IDS_MAX = 1 << 20
"""Lease ids in one notification."""
KEYS_MAX = 1 << 10
"""Keys of a prefix in one question: so it is answered in one short turn of a loop, however long the prefix is."""
NOTIFICATION_BYTES_MAX = 4 << 10
_PART_CHARS_MAX = 4096
_ERROR_CHARS_MAX = 300
_LIFE = re.compile(r"/([0-9]{1,6})\.([0-9]{1,6})\.([0-9]{1,6})#(.+)")

CacheShares: TypeAlias = Annotated[tuple[CacheShare, ...], Meta(max_length=SETS_MAX)]
BlockTables: TypeAlias = Annotated[tuple[BlockIds, ...], Meta(max_length=GROUPS_MAX)]
Numbers: TypeAlias = Annotated[list[Size], Meta(max_length=REGIONS_MAX)]
LeaseId: TypeAlias = Annotated[str, Meta(max_length=LEASE_ID_CHARS)]
"""Lease id as readers send it: one that is none of ours is no lease's."""
NewLeaseId: TypeAlias = Annotated[str, Meta(max_length=LEASE_ID_CHARS, pattern=rf"\A[0-9a-f]{{{LEASE_ID_CHARS}}}\Z")]
LeaseIds: TypeAlias = Annotated[tuple[LeaseId, ...], Meta(max_length=LEASE_IDS_MAX)]

StructT = TypeVar("StructT")


class WireError(Exception):
    """Bytes that are no valid kvflow message. The shell turns it into a counted refusal or a ProtocolError."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of every side-channel message."""

    magic: Name
    version: Count
    fingerprint: Digest
    question: Count = 0
    """Number of the question on its connection, or of the one answered; 0 from a peer that does not number them."""


class Compatibility(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that both sides must agree on. Field names are what error messages show."""

    model: Fact
    dtype: Fact
    kv_format: Fact
    attention: Fact
    head_size: Fact

    def fingerprint(self) -> bytes:
        """A 16-byte digest, equal exactly for equal facts."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:16]

    def differences(self, theirs: Compatibility) -> list[str]:
        """Differences, as "field: ours X, theirs Y" for each fact."""
        pairs = ((name, getattr(self, name), getattr(theirs, name)) for name in self.__struct_fields__)
        return [f"{name}: ours {ours!r}, theirs {other!r}" for name, ours, other in pairs if ours != other]


def compatibility_of(layouts: Sequence[CacheLayout | StatePart], *, model: str) -> Compatibility:
    """The facts of one rank's cache; where layers differ, all that there are. Of state the shares have them."""

    def facts(fact: Callable[[CacheLayout], object]) -> str:
        return " and ".join(sorted({str(fact(layout)) for layout in layouts if isinstance(layout, CacheLayout)}))

    return Compatibility(
        model=model,
        dtype=facts(lambda layout: layout.dtype),
        kv_format=facts(lambda layout: layout.kv_format),
        attention=facts(lambda layout: "latent" if layout.latent else "K and V"),
        head_size=facts(lambda layout: layout.kv_head_size),
    )


class Target(msgspec.Struct, frozen=True, array_like=True):
    """The engine and rank that a reader believes to be listening."""

    engine_id: Name
    dp_rank: Count
    pp_rank: Count
    tp_rank: Count

    def at(self, address: str) -> str:
        """The rank as messages name it."""
        return f"engine {self.engine_id!r} ({Rank(self.dp_rank, self.pp_rank, self.tp_rank)}) at {address}"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Reader to tell when the asked rank goes: its own side channel."""

    target: Target
    address: NetAddress


class MetadataRequest(msgspec.Struct, frozen=True, kw_only=True, tag="get_metadata"):
    """Question who a rank is, and where its cache lies."""

    reader: Reader
    target: Target
    request_id: RequestName | None = None
    """The request of the reader's ticket; a rank that drains connects nobody else."""
    caller: Caller | None = None


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag="goodbye"):
    """A rank tells a reader (`target`) that it closes now.

    It is believed if `incarnation` is that of the reader's connection. A forged one costs a handshake at most.
    """

    target: Target
    sender: Target
    incarnation: Incarnation


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="find_lease"):
    """Question for the lease that holds these blocks of a request, to ranks that the reader's ticket does not name."""

    reader: Reader
    target: Target
    request_id: RequestName
    num_tokens: Count
    blocks_digest: Digest
    """`digest_of` the engine's block ids, which are the same on all its ranks."""


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """We need these blocks of a request no more: a `ReadDone` of a reader that is not connected.

    What share of the lease it reports follows from what it holds (`topology.report_share`). A reader whose ticket does
    not name the rank has no lease id.
    """

    reader: Reader
    target: Target
    request_id: RequestName
    num_tokens: Count
    blocks_digest: Digest
    lease_id: LeaseId | None
    cache_shares: CacheShares


class ClockRequest(msgspec.Struct, frozen=True, kw_only=True, tag="get_clock"):
    """Question for a reading of the clock."""

    reader: Reader
    target: Target


class DigestPart(msgspec.Struct, frozen=True, array_like=True):
    """Layers, heads and tokens to digest: all numbers are the model's and the prompt's, none a rank's own."""

    part: Fact
    """Segment of state, or "": as in a `CacheShare`."""
    layers: Layers
    head: Count
    """The first head."""
    heads: Count
    model_heads: Count
    """Heads of the model, from which follows which ones a rank holds."""
    start: Count
    """The first token of the prompt."""
    stop: Count
    """The one after the last."""


DigestParts: TypeAlias = Annotated[tuple[DigestPart, ...], Meta(max_length=DIGEST_PARTS_MAX)]


class DigestRequest(msgspec.Struct, frozen=True, kw_only=True, tag="get_digests"):
    """Question for the digests of these bytes of an open lease. See `core.protocol.digests`."""

    reader: Reader
    target: Target
    request_id: RequestName
    lease_id: LeaseId
    definition: Count
    """Number of the definition of a digest that the reader computes."""
    parts: DigestParts


class OfferRequest(msgspec.Struct, frozen=True, kw_only=True, tag="await_offer"):
    """Question for the offer of a request, which may have yet to begin. For readers of a rendezvous.

    Whoever knows the request id may know the answer. It is given when there is something to tell, and otherwise within
    `wait_s`.
    """

    reader: Reader
    target: Target
    request_id: RequestName
    wait_s: Wait


class NewsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="get_news"):
    """Question for news of an open lease: complete, failed or ended, more blocks than these, more tokens.

    It is answered as an `OfferRequest` is.
    """

    reader: Reader
    target: Target
    request_id: RequestName
    lease_id: LeaseId
    known: Annotated[tuple[Count, ...], Meta(max_length=GROUPS_MAX)]
    """Blocks of the lease that the reader knows, counted by group."""
    wait_s: Wait
    missing_max: Missing = -1
    """Answered as well when no more tokens than that are missing; -1: not before the end of the lease."""


class SeekRequest(msgspec.Struct, frozen=True, kw_only=True, tag="seek"):
    """Question for the longest run of a prefix that is in the cache now. It is answered by an `Offer` of it."""

    reader: Reader
    target: Target
    request_id: RequestName
    """Name of the lease that the reader gets, with `PREFIX_OF` before it; the same at every rank of an engine."""
    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * KEYS_MAX)]
    """See `core.prefix.keys`: number i is that of the first (i + 1) * `key_tokens` tokens."""
    key_tokens: Size
    alone: bool = True
    """True if nobody but this rank is to read what is offered."""


class WhoRequest(msgspec.Struct, frozen=True, kw_only=True, tag="who"):
    """Question for the engine and rank that listens here, by a reader that knows an address only."""

    reader: Reader

    @property
    def target(self) -> Target:
        """A rank of an engine that the reader cannot name."""
        return Target("unknown", 0, 0, 0)


class RegionTable(msgspec.Struct, frozen=True, kw_only=True):
    """`regions.Regions` on the wire."""

    bases: Numbers
    strides: Numbers
    block: BlockShape
    parts: Annotated[tuple[Fact, ...], Meta(max_length=ROWS_MAX)]
    num_blocks: Size
    device_kind: Name
    device_index: DeviceIndex


class SealLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The table of a producer's seals in its host memory: see `core.protocol.proof`."""

    address: Size
    count: SealCount
    hold_s: Hold
    """Time the producer keeps blocks after it has wiped a seal."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, tag="metadata"):
    """The answer: all that a reader needs to know about a rank."""

    engine_id: Name
    incarnation: Incarnation
    clock_s: ClockTime
    cache_shares: CacheShares
    """Shares of each set of layers that look alike."""
    agent_metadata: Annotated[bytes, Meta(max_length=AGENT_METADATA_BYTES_MAX)]
    agent_metadata_crc32: Word32
    """NIXL crashes on flipped bits in its metadata, so a reader compares this first."""
    regions: Annotated[tuple[RegionTable, ...], Meta(max_length=SETS_MAX)]
    """Regions of those sets."""
    groups: Annotated[tuple[GroupFacts, ...], Meta(max_length=GROUPS_MAX)]
    """Groups whose block ids the sets have (`CacheShare.group`)."""
    seals: SealLocation
    staged: bool
    """Blocks are copied to host buffers before they can be read, so that a lease's seal says how far it is."""


class LeaseFound(msgspec.Struct, frozen=True, kw_only=True, tag="lease"):
    """The rank's open lease for a request; `block_ids` are set if they differ from the engine's (host buffers)."""

    incarnation: Incarnation
    clock_s: ClockTime
    expires_s: ClockTime
    lease_id: NewLeaseId
    seal_index: SealIndex
    block_ids: BlockIds | None
    more_block_ids: BlockTables = ()
    pending: bool = False
    """Its blocks are still being computed."""
    payload: bool = False
    """A payload comes with its end."""
    held: bool = True
    """The blocks are held for a moment after its end: see `core.protocol.proof`."""


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """An offer of a request by one rank: its ticket's content, for readers that have no ticket."""

    lease: LeaseFound | None
    """None if there is nothing to read: a prompt that is shorter than a block."""
    num_tokens: Count
    ttl_s: Seconds
    block_ids: BlockTables
    """The engine's, by group."""
    extends: bool
    prompt_digest: PromptDigest
    queued_bytes: Count = 0
    """Bytes of prefixes that are leased to others now: what may be read before."""


class RankNamed(msgspec.Struct, frozen=True, kw_only=True, tag="known"):
    """The answer to a `WhoRequest`."""

    target: Target


class Declined(msgspec.Struct, frozen=True, kw_only=True, tag="declined"):
    """The rank will not serve the request."""

    reason: Reason


class LeaseNews(enum.StrEnum):
    """States of a lease as news tells them."""

    OPEN = "open"
    """The lease is to come to an end still."""
    COMPLETE = "complete"
    """All of it can be read, and it has its payload if one was promised."""
    ENDED = "ended"
    """The lease is over: no read of it can succeed any more."""
    FAILED = "failed"
    """The prompt could not be computed: no read of it can succeed."""


class News(msgspec.Struct, frozen=True, kw_only=True, tag="news"):
    """News of a lease, and the blocks that the reader did not know, by group, where it reads them."""

    state: LeaseNews
    more_block_ids: BlockTables = ()
    payload: Annotated[bytes, Meta(max_length=PAYLOAD_BYTES_MAX)] = b""
    reason: Reason = ""
    """The reason why it has failed."""


class NoLease(msgspec.Struct, frozen=True, kw_only=True, tag="no_lease"):
    """There is no such open lease. `ended` if there was one or will be none: else the rank may be about to open it."""

    ended: bool
    failed: Reason | None = None
    """The reason why its prompt will never be there, if that is so."""


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    """Noted, if it changes anything: a lease may have ended, or may be none of this incarnation of the rank."""

    incarnation: Incarnation


class ClockShown(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    """A reading of the rank's clock. It means nothing on another machine: see `core.protocol.proof`."""

    incarnation: Incarnation
    clock_s: ClockTime


class Digests(msgspec.Struct, frozen=True, kw_only=True, tag="digests"):
    """Digests of each layer of each part of the question, in order. The lease was open when the last was computed."""

    values: Annotated[tuple[Word64, ...], Meta(max_length=REGIONS_MAX)]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """Refusal of a question, with its reason. The facts are set when the fingerprints differ."""

    reason: Reason
    version: Count
    transient: bool = False
    """The answer may be another one soon: the rank has no cache yet, or is about to go."""
    compatibility: Compatibility | None = None
    cache_shares: CacheShares = ()


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="noted"):
    """Acknowledges a `Goodbye`."""


WaitingRequest: TypeAlias = OfferRequest | NewsRequest
"""Questions that may be answered late."""
Request: TypeAlias = (
    MetadataRequest
    | LeaseRequest
    | ReleaseRequest
    | ClockRequest
    | DigestRequest
    | Goodbye
    | WaitingRequest
    | SeekRequest
    | WhoRequest
)
Reply: TypeAlias = (
    Metadata
    | LeaseFound
    | NoLease
    | Released
    | ClockShown
    | Digests
    | Ack
    | Refusal
    | Offer
    | Declined
    | News
    | RankNamed
)


class ReadDone(msgspec.Struct, frozen=True, array_like=True, tag="read_done"):
    """Notification from a reader: it needs these leases' blocks no more. A lease id is a secret of its ticket.

    Readers of one engine share a lease, which ends when their shares add up to 1 (`topology.ReportShare`).
    See `leases_max`.
    """

    lease_ids: LeaseIds
    reader: Reader
    numerator: Count
    denominator: Count


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Notification from a reader: it still needs the blocks of these leases; see `leases_max`."""

    lease_ids: LeaseIds
    reader: Reader


Notification: TypeAlias = ReadDone | Renew


def leases_max(reader: str, bytes_max: int) -> int:
    """Number of leases that a notification of at most `bytes_max` may name; one at least."""
    array_header_bytes = 5
    id_bytes = len(msgspec.msgpack.encode(NO_LEASE_ID))
    rest = ReadDone(lease_ids=(), reader=reader, numerator=1 << 32, denominator=1 << 32)
    rest_bytes = len(encode(rest)) + array_header_bytes
    return max((bytes_max - rest_bytes) // id_bytes, 1)


def joined(payloads: Sequence[bytes], leases_most: int) -> list[bytes]:
    """`ReadDone`s of one reader to one producer as few messages, of which none names more than so many leases."""
    lease_ids: dict[tuple[str, int, int], list[str]] = {}
    for payload in payloads:
        done = _READ_DONE.decode(payload)
        lease_ids.setdefault((done.reader, done.numerator, done.denominator), []).extend(done.lease_ids)
    found = []
    for (reader, numerator, denominator), ids in lease_ids.items():
        for start in range(0, len(ids), leases_most):
            some = tuple(ids[start : start + leases_most])
            found.append(encode(ReadDone(some, reader, numerator, denominator)))
    return found


encode = msgspec.msgpack.Encoder().encode
_READ_DONE = msgspec.msgpack.Decoder(ReadDone)


def encode_frames(header: Header, body: Request | Reply) -> list[bytes]:
    return [msgspec.msgpack.encode(header), msgspec.msgpack.encode(body)]


def our_header(fingerprint: bytes, question: int = 0) -> Header:
    return Header(magic=MAGIC, version=PROTOCOL_VERSION, fingerprint=fingerprint, question=question)


def decode_header(frame: bytes) -> Header:
    """Decode a first frame; WireError if it is none of ours. The version is for the caller to judge."""
    header: Header = _decode(frame, Header)
    if header.magic != MAGIC:
        raise WireError(f"not a kvflow header: magic {header.magic[:16]!r}")
    return header


def decode_request(frame: bytes) -> Request:
    message: Request = _decode(frame, Request)
    return message


def decode_reply(frame: bytes) -> Reply:
    message: Reply = _decode(frame, Reply)
    return message


def decode_notification(payload: bytes) -> Notification:
    message: Notification = _decode(payload, Notification)
    return message


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raw = answer(partial(msgspec.msgpack.decode, data))
        why = _with_names(str(error) if raw is None else refusal(error, raw), kind)
        why = printable(why, _ERROR_CHARS_MAX)  # msgspec repeats a tag or a word that it does not know
        raise WireError(f"{len(data)} bytes do not decode: {why}") from error


def _with_names(refused: str, kind: Any) -> str:
    """A refusal that names fields of messages that are sent as arrays, which msgspec numbers; a tag is number 0."""

    def named(found: re.Match[str]) -> str:
        place, number = found[1], int(found[2])
        names = _OUTER.get(kind, ()) if place == "$" else _INNER[place.partition("[")[0]]
        return f"{place}.{names[number]}" if number < len(names) else found[0]

    return _NUMBERED.sub(named, refused)


_NUMBERED = re.compile(r"(\$|\.target|\.sender|\.block|\.parts\[\d+\])\[(\d+)\]")
_OUTER: dict[Any, tuple[str, ...]] = {
    Header: Header.__struct_fields__,
    Notification: ("kind", *ReadDone.__struct_fields__),
}
_INNER = {
    ".target": Target.__struct_fields__,
    ".sender": Target.__struct_fields__,
    ".block": BlockShape._fields,
    ".parts": DigestPart.__struct_fields__,
}


def regions_to_wire(regions: Regions) -> RegionTable:
    return RegionTable(
        bases=regions.bases.tolist(),
        strides=regions.strides.tolist(),
        block=regions.block,
        parts=regions.parts,
        num_blocks=regions.num_blocks,
        device_kind=regions.device.kind,
        device_index=regions.device.number,
    )


def all_regions_from_wire(tables: Sequence[RegionTable]) -> tuple[Regions, ...]:
    """Regions of each set of layers. WireError where one cannot be true, or there are too many to look at."""
    count = sum(len(table.bases) for table in tables)
    if len(tables) > SETS_MAX or count > REGIONS_MAX:
        raise WireError(f"region tables: {len(tables)} with {count} regions, at most {SETS_MAX} with {REGIONS_MAX}")
    return tuple(map(regions_from_wire, tables))


def regions_from_wire(table: RegionTable) -> Regions:
    """Check a peer's region table and turn it into arrays; WireError where it cannot be true."""
    count = len(table.bases)
    if not 0 < count <= REGIONS_MAX or len(table.strides) != count:
        raise WireError(f"region table: {count} bases and {len(table.strides)} strides")
    of_state = 0 < len(set(table.parts)) == len(table.parts) <= ROWS_MAX and table.block.tokens == 1
    if (table.parts not in _PARTS and not of_state) or count % len(table.parts):
        raise WireError(f"region table: {count} regions, parts of a layer {str(table.parts)[:80]}")
    if not _is_dense(table.block):
        raise WireError(f"region table: {table.num_blocks} blocks of shape {tuple(table.block)}")
    size = table.block.size_bytes
    for base, stride in zip(table.bases, table.strides, strict=True):
        if stride < size or base + stride * table.num_blocks > _ADDRESS_MAX:
            raise WireError(f"region table: base {base}, stride {stride}, {table.num_blocks} blocks")
    return Regions(
        bases=np.array(table.bases, dtype=np.uint64),
        strides=np.array(table.strides, dtype=np.uint64),
        block=table.block,
        parts=table.parts,
        num_blocks=table.num_blocks,
        device=Device(table.device_kind, table.device_index),
    )


def _is_dense(block: BlockShape) -> bool:
    """True if tokens and heads fill a block without gaps, in either order."""
    tokens, heads, run = block[:3]
    if min(tokens, heads, run) < 1 or max(tokens, heads, run) >= 1 << 31:
        return False
    return block[3:] in ((heads * run, run), (run, tokens * run))


def check_cache_shares(shares: Sequence[CacheShare]) -> None:
    """WireError unless a rank can hold that."""
    count = sum(len(share.layers) for share in shares)
    if not 0 < len(shares) <= SETS_MAX or count > REGIONS_MAX:
        raise WireError(f"cache share: {len(shares)} shares with {count} layers, at most {SETS_MAX} with {REGIONS_MAX}")
    for share in shares:
        _check_cache_share(share)
    if len(shares) == 1:
        return
    if len({(one.tp_rank, one.tp_size, one.pp_rank, one.pp_size) for one in shares}) > 1:
        raise WireError("cache shares: of several ranks")
    if len({(one.part, layer) for one in shares for layer in one.layers}) < sum(len(one.layers) for one in shares):
        raise WireError("cache shares: some layer is in two of them")


def _check_cache_share(share: CacheShare) -> None:
    if share.tp_rank >= share.tp_size or share.pp_rank >= share.pp_size:
        sizes = (share.tp_rank, share.tp_size, share.pp_rank, share.pp_size)
        raise WireError(f"cache share: (tp_rank, tp_size, pp_rank, pp_size) are {sizes}")
    if share.part and (not is_name(share.part, _PART_CHARS_MAX) or share.latent or share.model_kv_heads < 1):
        raise WireError(f"cache share: part {share.part[:80]!a}, latent is {share.latent}")
    if not 0 < len(set(share.layers)) == len(share.layers):
        raise WireError(f"cache share: {len(share.layers)} layers, none or some of them twice")


def check_sets(shares: Sequence[CacheShare], regions: Sequence[Regions], groups: Sequence[GroupFacts]) -> None:
    """WireError unless a rank with these groups and regions can hold that."""
    check_cache_shares(shares)
    _check_groups(groups)
    if len(regions) != len(shares):
        raise WireError(f"cache shares: {len(shares)}, but {len(regions)} region tables")
    num_blocks: dict[int, int] = {}
    for share, region in zip(shares, regions, strict=True):
        _check_set(share, region)
        if share.group >= len(groups) or groups[share.group].block_size != share.block_size:
            raise WireError(f"cache share: group {share.group} of {len(groups)}, block_size {share.block_size}")
        if (groups[share.group].kind is GroupKind.STATE) != bool(share.part):
            raise WireError(f"cache share: part {share.part!a} in a group of kind {groups[share.group].kind}")
        if num_blocks.setdefault(share.group, region.num_blocks) != region.num_blocks:
            raise WireError(f"cache shares: group {share.group} has {num_blocks[share.group]} and other blocks")
    if len(num_blocks) != len(groups):
        raise WireError(f"cache shares: of {len(num_blocks)} groups, but there are {len(groups)}")
    if len({region.device for region in regions}) > 1:
        raise WireError("region tables: on several devices")


def _check_groups(groups: Sequence[GroupFacts]) -> None:
    names = {group.name for group in groups if is_name(group.name, NAME_CHARS_MAX)}
    if not 0 < len(groups) <= GROUPS_MAX or len(names) < len(groups):
        raise WireError(f"groups: {len(groups)}, expected 1 to {GROUPS_MAX} of different names")
    for group in groups:
        if not group.plausible:
            raise WireError(f"groups: kind {group.kind}, window {group.window}, block_size {group.block_size}")


def _check_set(share: CacheShare, regions: Regions) -> None:
    if len(share.layers) * len(regions.parts) != len(regions):
        raise WireError(f"cache share: {len(share.layers)} layers, {len(regions)} regions {regions.parts}")
    block = regions.block
    if (share.block_size, share.kv_heads) != (block.tokens, block.heads):
        raise WireError(
            f"cache share: block_size {share.block_size}, kv_heads {share.kv_heads}, "
            f"model_kv_heads {share.model_kv_heads}, blocks of shape {tuple(block)}"
        )
    if share.part and (block.tokens != 1 or regions.parts in _PARTS):
        raise WireError(f"cache share: part {share.part!a}, blocks of shape {tuple(block)}")
    if not share.part and regions.parts not in _PARTS:
        raise WireError(f"cache share: parts of a layer {str(regions.parts)[:80]}")
    if share.latent != (regions.parts == ("latent",)) or (share.latent and block.heads != 1):
        raise WireError(
            f"cache share: latent is {share.latent}, parts of a layer are {regions.parts}, of {block.heads} heads"
        )


def check_seals(location: SealLocation) -> None:
    """WireError unless a seal table of this size can lie there."""
    if location.address >= _ADDRESS_MAX - location.count * 16:
        raise WireError(f"seal table: {location.count} seals at {location.address}")


def agent_name(engine_id: str, rank: Rank, incarnation: str) -> str:
    """The transport agent's name: unique per incarnation of a rank, so a restarted producer is somebody else."""
    return f"{engine_id}/{rank.dp}.{rank.pp}.{rank.tp}#{incarnation}"


def life_of(agent: str, engine_id: str) -> tuple[Rank, str] | None:
    """The rank of that engine, and its incarnation, whose `agent_name` this is; None for agents of another make."""
    found = _LIFE.fullmatch(agent.removeprefix(engine_id)) if agent.startswith(engine_id) else None
    return None if found is None else (Rank(*map(int, found.groups()[:3])), found[4])


def asked_by(request: Request) -> str:
    """The engine in whose name a request is; nothing sensible where a reader's name is no `agent_name`."""
    return request.sender.engine_id if isinstance(request, Goodbye) else request.reader.rpartition("/")[0]


def checksum(data: bytes) -> int:
    return zlib.crc32(data)


def digest_of(block_ids: tuple[int, ...] | tuple[tuple[int, ...], ...]) -> bytes:
    """A short digest of block ids, by group if there are several, to compare those of two ranks."""
    return hashlib.sha256(msgspec.msgpack.encode(block_ids)).digest()[:16]
