"""Notifications: short messages from a reader's transport agent to a producer's agent, without an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvflow.core.bounds import NO_LEASE_ID, Count, LeaseId, Reader

NOTIFICATION_BYTES_MAX = 4 << 10
LEASE_IDS_MAX = 1 << 20

LeaseIds: TypeAlias = Annotated[tuple[LeaseId, ...], Meta(max_length=LEASE_IDS_MAX)]


class ReadDone(msgspec.Struct, frozen=True, array_like=True, tag="read_done"):
    """Notice that a reader has finished with the blocks of some leases. The secret lease ids authorize the notice.

    Each rank of a reading engine reports a share of the lease, a fraction. An engine has read the lease when the shares
    of its ranks add up to 1.
    """

    lease_ids: LeaseIds
    reader: Reader
    numerator: Count
    """Numerator of the share of each lease that this reader has read."""
    denominator: Count


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Notice that a reader still needs the blocks of some leases. The producer then extends these leases."""

    lease_ids: LeaseIds
    reader: Reader


Notification: TypeAlias = ReadDone | Renew
_encode = msgspec.msgpack.Encoder().encode
_READ_DONE = msgspec.msgpack.Decoder(ReadDone)


def leases_max(reader: str, bytes_max: int) -> int:
    """Return how many lease ids, at least 1, fit in a notification from `reader` of at most `bytes_max` bytes."""
    array_header_bytes = 5
    id_bytes = len(msgspec.msgpack.encode(NO_LEASE_ID))
    rest = ReadDone(lease_ids=(), reader=reader, numerator=1 << 32, denominator=1 << 32)
    rest_bytes = len(_encode(rest)) + array_header_bytes
    return max((bytes_max - rest_bytes) // id_bytes, 1)


def join_read_done(payloads: Sequence[bytes], lease_ids_max: int) -> list[bytes]:
    """Join encoded `ReadDone` messages, all to one producer, into fewer. Each has at most `lease_ids_max` lease ids.

    Only messages with the same reader and the same share are joined.
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
