"""An entry's file: a header that says what it is and proves that it is whole, then the blocks.

    magic, version, CRC-32 of the body, length of the body    24 bytes
    body: msgpack of `EntryHeader`                             padded to a multiple of 4096 bytes
    the blocks, as `placing` lays them out

The header is written last, and the file gets its name after that; so what has a name was complete once. What may have
happened to it since is found here (`decode`), or by its digests, which are compared with those of the blocks that were
read.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

import msgspec

from kvflow import checks
from kvflow.checks import counted
from kvflow.errors import RequestError

KEY_BYTES_MAX = 256
VERSION = 1
_MAGIC = b"kvfentry"
_PREFIX = struct.Struct("<8sIIQ")
PREFIX_BYTES = _PREFIX.size
"""Bytes of a file that tell how long its header is."""
_ALIGNMENT = 4096
_BODY_BYTES_MAX = 8 << 20
"""Longest header: digests of a million layers."""


class NotAnEntry(Exception):
    """File that is no whole entry; the message says why."""


class EntryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of an entry's file."""

    fingerprint: bytes
    """Fingerprint of the blocks' layout: see `fingerprint_of`."""
    key: bytes
    num_tokens: int
    block_counts: tuple[int, ...]
    """Blocks of each group."""
    data_bytes: int
    digests: bytes
    """Digests of each layer of each set, 8 bytes each, little-endian: see `verify.digests`."""

    @property
    def data_start(self) -> int:
        """Offset of the blocks in the file."""
        return _padded(PREFIX_BYTES + len(msgspec.msgpack.encode(self)))

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes


def fingerprint_of(facts: Sequence[object]) -> bytes:
    """Fingerprint of a layout: equal exactly for facts that read alike."""
    return hashlib.sha256(repr((VERSION, *facts)).encode(), usedforsecurity=False).digest()


def entry_name(fingerprint: bytes, key: bytes) -> str:
    """Name of a key's files, but for what tells two of them apart."""
    return hashlib.sha256(fingerprint + key, usedforsecurity=False).hexdigest()[:40]


def checked_key(key: object, what: str) -> bytes:
    """A key as bytes: 1 to 256 of them, or text of that length. RequestError for anything else."""
    plain = checks.text(key, what).encode() if isinstance(key, str) else key
    if type(plain) is not bytes:
        raise RequestError(f"{what}: expected bytes or text, got {checks.shown(key)}")
    if not 0 < len(plain) <= KEY_BYTES_MAX:
        raise RequestError(f"{what}: expected 1 to {KEY_BYTES_MAX} bytes, got {len(plain)}")
    return plain


def encode(header: EntryHeader) -> bytes:
    """Beginning of the file, up to its blocks."""
    body = msgspec.msgpack.encode(header)
    start = _PREFIX.pack(_MAGIC, VERSION, zlib.crc32(body), len(body))
    return (start + body).ljust(header.data_start, b"\0")


def header_bytes(start: bytes) -> int:
    """Return the size of the header of a file that begins with `start`, at least `PREFIX_BYTES` of it.

    Raises NotAnEntry.
    """
    if len(start) < PREFIX_BYTES:
        raise NotAnEntry(f"it has {counted(len(start), 'byte')}")
    magic, version, _, length = _PREFIX.unpack_from(start)
    if magic != _MAGIC:
        raise NotAnEntry(f"it begins with {magic!r}, not with {_MAGIC!r}")
    if version != VERSION:
        raise NotAnEntry(f"it is of version {version}, this is {VERSION}")
    if length > _BODY_BYTES_MAX:
        raise NotAnEntry(f"its header has {counted(length, 'byte')}")
    return _padded(PREFIX_BYTES + length)


def decode(start: bytes, file_bytes: int) -> EntryHeader:
    """The header of a file of so many bytes, from its beginning. Raises NotAnEntry if that cannot be a whole entry."""
    end = header_bytes(start)
    _, _, expected, length = _PREFIX.unpack_from(start)
    body = start[PREFIX_BYTES : PREFIX_BYTES + length]
    if len(body) < length:
        raise NotAnEntry(f"it has {counted(file_bytes, 'byte')}, its header alone {end}")
    if zlib.crc32(body) != expected:
        raise NotAnEntry("its header is damaged")
    try:
        header = msgspec.msgpack.decode(body, type=EntryHeader)
    except msgspec.MsgspecError as error:
        raise NotAnEntry(f"its header cannot be read: {error}") from error
    if end + header.data_bytes != file_bytes:
        raise NotAnEntry(f"it has {counted(file_bytes, 'byte')}, its header says {end + header.data_bytes}")
    return header


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
