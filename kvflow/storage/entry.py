"""Format of a stored file (an entry): a header that describes the blocks, with their digests, then the blocks.

    magic, version, CRC-32 of the body, length of the body    24 bytes
    body: msgpack of `EntryHeader`                             padded to a multiple of 4096 bytes
    the blocks, in the order of `placing`

A file gets its final name only once the blocks and then the header are written. Later damage is found by
`decode_header`, which checks the header, or by a restore, which compares the digests in the header with those of the
restored blocks.
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
"""Number of bytes before the header's body, including the field with the body's length."""
_ALIGNMENT = 4096
_BODY_BYTES_MAX = 8 << 20
"""Maximum size of the header's body. A million digests fit."""


class NotAnEntry(Exception):
    """Raised if a file is damaged, incomplete, or no file of a store. The message says which."""


class EntryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a stored file: facts about its blocks, and their digests."""

    fingerprint: bytes
    """Hash of the facts that describe the layout of the saved KV cache, from `fingerprint_of`."""
    key: bytes
    num_tokens: int
    block_counts: tuple[int, ...]
    """Number of blocks of each group of layers."""
    data_bytes: int
    digests: bytes
    """One digest (`verify.digests`) of 8 bytes, little-endian, for each layer: ordered by layer set (layers of equal
    shape), then by layer."""

    @property
    def data_start(self) -> int:
        """Offset in bytes of the first block in the file."""
        return _padded(HEADER_PREFIX_BYTES + len(msgspec.msgpack.encode(self)))

    @property
    def file_bytes(self) -> int:
        return self.data_start + self.data_bytes


_HEADER = msgspec.msgpack.Decoder(EntryHeader)


def fingerprint_of(facts: Sequence[object]) -> bytes:
    """Return a SHA-256 hash of `facts`, which describe the layout of a KV cache. Equal `repr`s give equal hashes."""
    return hashlib.sha256(repr((VERSION, *facts)).encode(), usedforsecurity=False).digest()


def entry_name(fingerprint: bytes, key: bytes) -> str:
    """Return the first 40 characters of the names of files saved under `key`. A random suffix follows in each name.

    `fingerprint`: hash of the KV cache's layout, so that caches with different layouts have different files.
    """
    return hashlib.sha256(fingerprint + key, usedforsecurity=False).hexdigest()[:40]


def checked_key(key: object, what: str) -> bytes:
    """Return `key` as bytes. Raise RequestError unless it is text or bytes, and 1 to 256 bytes long.

    `what`: name of the key in the error message.
    """
    plain = checks.text(key, what).encode() if isinstance(key, str) else key
    if type(plain) is not bytes:
        raise RequestError(f"{what}: expected bytes or text, got {checks.short_repr(key)}")
    if not 0 < len(plain) <= KEY_BYTES_MAX:
        raise RequestError(f"{what}: expected 1 to {KEY_BYTES_MAX} bytes, got {len(plain)}")
    return plain


def encode_header(header: EntryHeader) -> bytes:
    """Return the encoded header with its padding: all bytes of the file before its first block."""
    body = msgspec.msgpack.encode(header)
    start = _HEADER_PREFIX.pack(_MAGIC, VERSION, zlib.crc32(body), len(body))
    return (start + body).ljust(header.data_start, b"\0")


def header_size_bytes(start: bytes) -> int:
    """Return the size in bytes of a file's header with its padding: the offset of the first block.

    Raise NotAnEntry if `start`, the first bytes of the file, has fewer than `HEADER_PREFIX_BYTES` bytes, or is no
    beginning of a stored file of this version.
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
    """Return the decoded header of a file of `file_bytes` bytes that begins with `start`.

    Raise NotAnEntry if the header is damaged or incomplete, or is for another file size.
    """
    end = header_size_bytes(start)
    _, _, expected, length = _HEADER_PREFIX.unpack_from(start)
    body = start[HEADER_PREFIX_BYTES : HEADER_PREFIX_BYTES + length]
    if len(body) < length:
        raise NotAnEntry(f"it has {counted(file_bytes, 'byte')}, its header alone needs {end}")
    if zlib.crc32(body) != expected:
        raise NotAnEntry("its header is damaged")
    try:
        header = _HEADER.decode(body)
    except msgspec.MsgspecError as error:
        raise NotAnEntry(f"its header cannot be read: {error}") from error
    if end + header.data_bytes != file_bytes:
        raise NotAnEntry(f"it has {counted(file_bytes, 'byte')}, its header says {end + header.data_bytes}")
    return header


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
