"""Notifications: short messages from a reader's transport agent to a producer's, without an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvflow.core.bounds import NO_LEASE_ID, Count, LeaseId, Reader

NOTIFICATION_BYTES_MAX = 4 << 10
LEASE_IDS_MAX = 1 << 20
"""Maximum number of lease ids in one notification."""

LeaseIds: TypeAlias = Annotated[tuple[LeaseId, ...], Meta(max_length=LEASE_IDS_MAX)]


class ReadDone(msgspec.Struct, frozen=True, array_like=True, tag="read_done"):
    """Notice that a reader has finished with the blocks of some leases.

    The secret lease ids authorize it. The ranks of one reading engine share a lease; it ends when their shares add up
    to 1 (`topology.ReportShare`).
    """

    lease_ids: LeaseIds
    reader: Reader
    numerator: Count
    """Share of this reader, as a fraction: `numerator` / `denominator`."""
    denominator: Count


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Notice that a reader still needs the blocks of some leases; it renews them."""

    lease_ids: LeaseIds
    reader: Reader


Notification: TypeAlias = ReadDone | Renew
_encode = msgspec.msgpack.Encoder().encode
_READ_DONE = msgspec.msgpack.Decoder(ReadDone)


def leases_max(reader: str, bytes_max: int) -> int:
    """Return how many lease ids fit in a notification of `reader` of at most `bytes_max` bytes; at least 1."""
    array_header_bytes = 5
    id_bytes = len(msgspec.msgpack.encode(NO_LEASE_ID))
    rest = ReadDone(lease_ids=(), reader=reader, numerator=1 << 32, denominator=1 << 32)
    rest_bytes = len(_encode(rest)) + array_header_bytes
    return max((bytes_max - rest_bytes) // id_bytes, 1)


def join_read_done(payloads: Sequence[bytes], lease_ids_max: int) -> list[bytes]:
    """Join encoded `ReadDone` messages to one producer into fewer, each with at most `lease_ids_max` lease ids.

    Messages are joined if reader and share are equal.
    """
    lease_ids: dict[tuple[str, int, int], list[str]] = {}
    for payload in payloads:
        done = _READ_DONE.decode(payload)
        lease_ids.setdefault((done.reader, done.numerator, done.denominator), []).extend(done.lease_ids)
    return [
        _encode(ReadDone(tuple(ids[start : start + lease_ids_max]), *share))
        for share, ids in lease_ids.items()
        for start in range(0, len(ids), lease_ids_max)
    ]
