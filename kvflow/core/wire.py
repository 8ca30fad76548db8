"""Messages of the side channel, notifications, and the ticket that travels through routers.

A side-channel message is two msgpack frames: a `Header` (magic, protocol version, fingerprint) and a body. The header
is decoded and judged first, so that a peer of another version is answered without reading what it meant. Decoding is
strict (wrong types raise `WireError`), sizes are checked before decoding, and nothing here can run code.

The fingerprint is a digest of `Compatibility`: what must be equal on both sides for whole blocks to mean the same.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from kvflow.config import PORT_MAX, SEAL_HOLD_S_MAX, SEALS_MAX, is_host, is_name
from kvflow.core.layout import CacheLayout, Device, Regions
from kvflow.errors import RequestError

PROTOCOL_VERSION = 1
MAGIC = "kvflow"
REGIONS_MAX = 1 << 16
LEASE_ID_CHARS = 32
NO_LEASE_ID = "0" * LEASE_ID_CHARS  # what a wiped seal reads as
_LEASE_ID = re.compile(f"[0-9a-f]{{{LEASE_ID_CHARS}}}")
_ADDRESS_MAX = (1 << 63) - 1
_NAME_CHARS_MAX = 1024

StructT = TypeVar("StructT")


class WireError(Exception):
    """Bytes that are no valid kvflow message. The shell turns it into a counted refusal or a ProtocolError."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of every side-channel message."""

    magic: str
    version: int
    fingerprint: bytes


class Compatibility(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides must agree on. Field names are what error messages show."""

    model: str
    dtype: str
    layers: int
    parts: tuple[str, ...]
    memory_order: str
    block_size: int
    num_kv_heads: int
    head_size: int
    tp_size: int
    pp_size: int

    def fingerprint(self) -> bytes:
        """A 16-byte digest, equal exactly for equal facts."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:16]

    def differences(self, theirs: Compatibility) -> list[str]:
        """One "field: ours X, theirs Y" for each fact that differs."""
        pairs = ((name, getattr(self, name), getattr(theirs, name)) for name in self.__struct_fields__)
        return [f"{name}: ours {ours!r}, theirs {other!r}" for name, ours, other in pairs if ours != other]


def compatibility_of(layout: CacheLayout, *, model: str, tp_size: int, pp_size: int) -> Compatibility:
    """The facts of one rank's cache."""
    return Compatibility(
        model=model,
        dtype=layout.dtype,
        layers=len(layout.layer_names),
        parts=layout.parts,
        memory_order=layout.memory_order,
        block_size=layout.block_size,
        num_kv_heads=layout.num_kv_heads,
        head_size=layout.head_size,
        tp_size=tp_size,
        pp_size=pp_size,
    )


class MetadataRequest(msgspec.Struct, frozen=True, kw_only=True, tag="get_metadata"):
    """Who are you, and where is your cache?"""

    reader: str
    engine_id: str
    """The engine that the reader believes to be listening."""
    tp_rank: int
    pp_rank: int


class RegionTable(msgspec.Struct, frozen=True, kw_only=True):
    """`layout.Regions` on the wire."""

    bases: list[int]
    strides: list[int]
    block_size_bytes: int
    num_blocks: int
    device_kind: str
    device_index: int


class SealLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a producer keeps the seals of its leases, in host memory: see `core.seals`."""

    address: int
    count: int
    hold_s: float
    """How long the producer keeps blocks after it has wiped a seal."""


class Metadata(msgspec.Struct, frozen=True, kw_only=True, tag="metadata"):
    """The answer: all that a reader needs to know about a rank."""

    engine_id: str
    incarnation: str
    tp_rank: int
    pp_rank: int
    agent_metadata: bytes
    agent_metadata_crc32: int
    """NIXL crashes on flipped bits in its metadata, so a reader compares this first."""
    regions: RegionTable
    seals: SealLocation


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """No, and why. `compatibility` is set when the fingerprints differ."""

    reason: str
    version: int
    compatibility: Compatibility | None = None


Request: TypeAlias = MetadataRequest
Reply: TypeAlias = Metadata | Refusal


class ReadDone(msgspec.Struct, frozen=True, array_like=True, tag="read_done"):
    """Notification from a reader: it needs the lease's blocks no more. A lease id is a secret of its ticket."""

    lease_id: str
    reader: str


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def encode_frames(header: Header, body: Request | Reply) -> list[bytes]:
    return [msgspec.msgpack.encode(header), msgspec.msgpack.encode(body)]


def our_header(fingerprint: bytes) -> Header:
    return Header(magic=MAGIC, version=PROTOCOL_VERSION, fingerprint=fingerprint)


def decode_header(frame: bytes) -> Header:
    """Decode a first frame; WireError if it is none of ours. The version is for the caller to judge."""
    header: Header = _decode(frame, Header)
    if header.magic != MAGIC or len(header.fingerprint) > 64:
        raise WireError(f"not a kvflow header: magic {header.magic[:16]!r}")
    return header


def decode_request(frame: bytes) -> Request:
    message: Request = _decode(frame, Request)
    return message


def decode_reply(frame: bytes) -> Reply:
    message: Reply = _decode(frame, Reply)
    return message


def decode_notification(payload: bytes) -> ReadDone:
    message: ReadDone = _decode(payload, ReadDone)
    return message


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(data)} bytes do not decode: {error}") from error


def regions_to_wire(regions: Regions) -> RegionTable:
    return RegionTable(
        bases=regions.bases.tolist(),
        strides=regions.strides.tolist(),
        block_size_bytes=regions.block_size_bytes,
        num_blocks=regions.num_blocks,
        device_kind=regions.device.kind,
        device_index=regions.device.number,
    )


def regions_from_wire(table: RegionTable) -> Regions:
    """Check a peer's region table and turn it into arrays; WireError where it cannot be true."""
    count = len(table.bases)
    if not 0 < count <= REGIONS_MAX or len(table.strides) != count:
        raise WireError(f"region table: {count} bases and {len(table.strides)} strides")
    if table.num_blocks < 1 or table.block_size_bytes < 1:
        raise WireError(f"region table: {table.num_blocks} blocks of {table.block_size_bytes} bytes")
    if not 0 <= table.device_index < 1 << 16:
        raise WireError(f"region table: device index {table.device_index}")
    for base, stride in zip(table.bases, table.strides, strict=True):
        fits = base > 0 and stride >= table.block_size_bytes and base + stride * table.num_blocks <= _ADDRESS_MAX
        if not fits:
            raise WireError(f"region table: base {base}, stride {stride}, {table.num_blocks} blocks")
    return Regions(
        bases=np.array(table.bases, dtype=np.uint64),
        strides=np.array(table.strides, dtype=np.uint64),
        block_size_bytes=table.block_size_bytes,
        num_blocks=table.num_blocks,
        device=Device(table.device_kind, table.device_index),
    )


def check_seals(location: SealLocation) -> None:
    """WireError unless a seal table of this size can lie there."""
    if not 0 < location.hold_s <= SEAL_HOLD_S_MAX:
        raise WireError(f"seal table: hold_s {location.hold_s}")
    if not 0 < location.count <= SEALS_MAX or not 0 < location.address < _ADDRESS_MAX - location.count * 16:
        raise WireError(f"seal table: {location.count} seals at {location.address}")


def agent_name(engine_id: str, pp_rank: int, tp_rank: int, incarnation: str) -> str:
    """The transport agent's name: unique per life of a rank, so a restarted producer is somebody else."""
    return f"{engine_id}/{pp_rank}.{tp_rank}#{incarnation}"


def checksum(data: bytes) -> int:
    return zlib.crc32(data)


class _TicketExtension(msgspec.Struct, frozen=True, kw_only=True):
    """kvflow's own part of a ticket, under the key "kvflow"."""

    version: int
    lease_id: str
    seal_index: int
    incarnation: str
    num_tokens: int
    ttl_s: float


class _TicketParams(msgspec.Struct, frozen=True, kw_only=True):
    """The dict as routers see it; its other field names are the ones that routers of this field forward."""

    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: str
    remote_request_id: str
    remote_block_ids: list[int]
    remote_host: str
    remote_port: int
    tp_size: int
    kvflow: _TicketExtension


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer needs to read one request's blocks from one rank.

    `block_ids` are the producer's, in prompt order; `num_tokens` says how far the last one counts. `ttl_s` is the time
    that the lease had left when the ticket was made; it is a hint for routers, readers trust the seal (`core.seals`).
    """

    engine_id: str
    request_id: str
    block_ids: tuple[int, ...]
    host: str
    port: int
    tp_size: int
    lease_id: str
    seal_index: int
    incarnation: str
    num_tokens: int
    ttl_s: float

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def to_params(self) -> dict[str, Any]:
        """A dict of JSON types that survives any HTTP router."""
        params: dict[str, Any] = msgspec.to_builtins(
            _TicketParams(
                do_remote_prefill=True,
                do_remote_decode=False,
                remote_engine_id=self.engine_id,
                remote_request_id=self.request_id,
                remote_block_ids=list(self.block_ids),
                remote_host=self.host,
                remote_port=self.port,
                tp_size=self.tp_size,
                kvflow=_TicketExtension(
                    version=PROTOCOL_VERSION,
                    lease_id=self.lease_id,
                    incarnation=self.incarnation,
                    seal_index=self.seal_index,
                    num_tokens=self.num_tokens,
                    ttl_s=self.ttl_s,
                ),
            )
        )
        return params

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Ticket:
        """Read a ticket's dict; RequestError names the field that is missing or wrong. Unknown fields are ignored."""
        try:
            raw = msgspec.convert(params, _TicketParams, strict=True)
        except msgspec.ValidationError as error:
            raise RequestError(f"ticket: {error}") from error
        extra = raw.kvflow
        if extra.version != PROTOCOL_VERSION:
            raise RequestError(f"ticket: kvflow version: ours {PROTOCOL_VERSION}, theirs {extra.version}")
        if not raw.do_remote_prefill:
            raise RequestError("ticket: do_remote_prefill is false: it does not ask for a load")
        ticket = cls(
            engine_id=raw.remote_engine_id,
            request_id=raw.remote_request_id,
            block_ids=tuple(raw.remote_block_ids),
            host=raw.remote_host,
            port=raw.remote_port,
            tp_size=raw.tp_size,
            lease_id=extra.lease_id,
            incarnation=extra.incarnation,
            num_tokens=extra.num_tokens,
            seal_index=extra.seal_index,
            ttl_s=extra.ttl_s,
        )
        ticket.check()
        return ticket

    def check(self) -> None:
        """RequestError names the field whose value no producer would have given."""
        if not 0 < self.port <= PORT_MAX:
            raise RequestError(f"ticket: remote_port {self.port} is not in 1..{PORT_MAX}")
        if not is_host(self.host):
            raise RequestError(f"ticket: remote_host {self.host[:80]!a} is no host to connect to")
        if self.tp_size < 1:
            raise RequestError(f"ticket: tp_size {self.tp_size} is not above 0")
        for name, text in (("remote_engine_id", self.engine_id), ("incarnation", self.incarnation)):
            if not is_name(text, _NAME_CHARS_MAX):
                raise RequestError(f"ticket: {name} {text[:80]!a} is no name")
        if not 0 < len(self.request_id) <= _NAME_CHARS_MAX or not _encodes(self.request_id):
            raise RequestError(f"ticket: remote_request_id {self.request_id[:80]!a} is no request id")
        if not _LEASE_ID.fullmatch(self.lease_id) or self.lease_id == NO_LEASE_ID:
            raise RequestError(f"ticket: lease_id is not {LEASE_ID_CHARS} hexadecimal digits")
        if self.num_tokens < 0 or self.seal_index < 0 or not 0 < self.ttl_s < math.inf:
            raise RequestError(
                f"ticket: num_tokens {self.num_tokens}, seal_index {self.seal_index}, ttl_s {self.ttl_s}"
            )


def _encodes(text: str) -> bool:
    """Whether UTF-8, hence any message of ours, can carry the text: JSON may hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
