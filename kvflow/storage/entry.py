"""Format of an entry's file: a header, which describes the entry and proves that it is whole, then the blocks.

    magic, version, CRC-32 of the body, length of the body    24 bytes
    body: msgpack of `EntryHeader`                             padded to a multiple of 4096 bytes
    the blocks, as `placing` lays them out

The header is written last, and the file gets its name after that, so a file with a name was complete once. Later damage
is found by `decode_header`, which checks the header, or by a restore, which compares the digests in the header with
those of the blocks that it has read.
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
_HEADER_PREFIX = struct.Struct("<8sIIQ")
HEADER_PREFIX_BYTES = _HEADER_PREFIX.size
"""Size of the bytes at the start of a file that say how long the header is."""
_ALIGNMENT = 4096
_BODY_BYTES_MAX = 8 << 20
"""Size of the largest header: it has room for the digests of a million layers."""


class NotAnEntry(Exception):
    """Raised if a file is not a whole entry; the message says why."""


class EntryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of an entry's file."""

    fingerprint: bytes
    """Fingerprint of the cache's layout: see `fingerprint_of`."""
    key: bytes
    num_tokens: int
    block_counts: tuple[int, ...]
    """Number of blocks in each group."""
    data_bytes: int
    digests: bytes
    """One digest (`verify.digests`) for each layer, by layer set, as integers of 8 bytes, little-endian."""

    @property
    def data_start(self) -> int:
        """Offset of the first block in the file."""
        return _padded(HEADER_PREFIX_BYTES + len(msgspec.msgpack.encode(self)))

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes


def fingerprint_of(facts: Sequence[object]) -> bytes:
    """Return a fingerprint of a cache's layout. Two fingerprints are equal if the `facts` have the same repr."""
    return hashlib.sha256(repr((VERSION, *facts)).encode(), usedforsecurity=False).digest()


def entry_name(fingerprint: bytes, key: bytes) -> str:
    """Return the beginning of the names of all files saved under `key`; a random suffix distinguishes them."""
    return hashlib.sha256(fingerprint + key, usedforsecurity=False).hexdigest()[:40]


def checked_key(key: object, what: str) -> bytes:
    """Return `key` as bytes. RequestError unless it is text or bytes, of 1 to 256 bytes; `what` names it in the
    message.
    """
    plain = checks.text(key, what).encode() if isinstance(key, str) else key
    if type(plain) is not bytes:
        raise RequestError(f"{what}: expected bytes or text, got {checks.short_repr(key)}")
    if not 0 < len(plain) <= KEY_BYTES_MAX:
        raise RequestError(f"{what}: expected 1 to {KEY_BYTES_MAX} bytes, got {len(plain)}")
    return plain


def encode_header(header: EntryHeader) -> bytes:
    """Return the start of the file, up to its first block."""
    body = msgspec.msgpack.encode(header)
    start = _HEADER_PREFIX.pack(_MAGIC, VERSION, zlib.crc32(body), len(body))
    return (start + body).ljust(header.data_start, b"\0")


def header_size_bytes(start: bytes) -> int:
    """Return the size of the header of a file that begins with `start`, which has at least `HEADER_PREFIX_BYTES` bytes.

    Raises NotAnEntry.
    """
    if len(start) < HEADER_PREFIX_BYTES:
        raise NotAnEntry(f"it has {counted(len(start), 'byte')}")
    magic, version, _, length = _HEADER_PREFIX.unpack_from(start)
    if magic != _MAGIC:
        raise NotAnEntry(f"it begins with {magic!r}, not with {_MAGIC!r}")
    if version != VERSION:
        raise NotAnEntry(f"its version is {version}, expected {VERSION}")
    if length > _BODY_BYTES_MAX:
        raise NotAnEntry(f"its header has {counted(length, 'byte')}")
    return _padded(HEADER_PREFIX_BYTES + length)


def decode_header(start: bytes, file_bytes: int) -> EntryHeader:
    """Return the header of a file of `file_bytes` bytes that begins with `start`.

    Raises NotAnEntry if the file cannot be a whole entry.
    """
    end = header_size_bytes(start)
    _, _, expected, length = _HEADER_PREFIX.unpack_from(start)
    body = start[HEADER_PREFIX_BYTES : HEADER_PREFIX_BYTES + length]
    if len(body) < length:
        raise NotAnEntry(f"it has {counted(file_bytes, 'byte')}, its header alone needs {end}")
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
