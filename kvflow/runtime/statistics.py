"""Statistics of a runtime: its state, what is open now, and what has happened over all its registrations."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvflow.core.policy.ledger import BlockCounts
from kvflow.runtime.channel.protocol import ListenerStatistics
from kvflow.runtime.load.requests import LoadingStatistics
from kvflow.runtime.peers.table import PeerStatistics
from kvflow.runtime.producer.lease import ServingStatistics
from kvflow.transport.base import TransportStatistics

PartT = TypeVar("PartT", ServingStatistics, LoadingStatistics, TransportStatistics)

_SERVED = ("read", "expired", "revoked", "failed", "renewals")
_NOTIFIED = ("late_notifications", "duplicate_notifications", "malformed_notifications", "late_reads")
_LOADED = ("succeeded", "failed", "cancelled", "refused", "bytes", "renewals", "sources_left")
_MOVED = ("reads", "reads_failed", "bytes_read")
_SENT = ("notifications_sent", "notifications_received", "notifications_failed")


class RuntimeState(enum.StrEnum):
    """State of a runtime: takes new work (OPEN), ends what it has (DRAINING, CLOSING), or can do nothing any more."""

    NEW = "new"
    OPEN = "open"
    DRAINING = "draining"
    BROKEN = "broken"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatistics:
    """Counts of a part. Parts have counts of their own beside."""

    open_requests: int
    """Requests that the part has under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStatistics:
    """A snapshot of a runtime: what is open, and what has happened.

    Before a cache is registered, and in a runtime that was abandoned, its parts are None.

    A cache that is registered again goes on counting where the one before has ended. Between the two there are no
    `blocks`.
    """

    state: RuntimeState
    tasks: int
    blocks: BlockCounts | None
    buffers_used: int
    """Host blocks and scratch buffers that are in use now."""
    serving: ServingStatistics | None
    loading: LoadingStatistics | None
    peers: tuple[PeerStatistics, ...]
    readers: int
    """Ranks that have connected to this one and will be told when it goes."""
    listener: ListenerStatistics | None
    transport: TransportStatistics
    readers_refused: int
    """Readers that were refused because too few open files were left."""
    early_notifications: int
    """Notifications that came before a cache was registered, when no lease could exist."""
    parts: Mapping[str, PartStatistics] = field(default_factory=dict)
    """Counts of the parts by name, such as "storage" and "prefix", anew with each registration."""


def totals(
    past: RuntimeStatistics | None,
    serving: ServingStatistics | None,
    loading: LoadingStatistics | None,
    transport: TransportStatistics | None,
) -> tuple[ServingStatistics | None, LoadingStatistics | None, TransportStatistics]:
    """Return snapshots of what is open now, and of what was counted so far: `past` is of registrations that ended."""
    if past is not None:
        serving = _total(serving, past.serving, (*_SERVED, *_NOTIFIED))
        loading = _total(loading, past.loading, _LOADED)
        transport = _total(transport, past.transport, (*_MOVED, *_SENT))
    assert transport is not None, "there was a first transport"
    return serving, loading, transport


def _total(now: PartT | None, past: PartT | None, counters: Sequence[str]) -> PartT | None:
    """Snapshot of what is open now, and what was counted so far."""
    if now is None or past is None:
        return past if now is None else now
    return replace(now, **{name: getattr(now, name) + getattr(past, name) for name in counters})
