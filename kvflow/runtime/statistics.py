"""Statistics of a runtime: its state, the open objects, and counts over all of its registrations."""

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
    """State of a runtime: it takes new work (OPEN), only ends its work (DRAINING, CLOSING), or cannot work."""

    NEW = "new"
    OPEN = "open"
    DRAINING = "draining"
    BROKEN = "broken"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatistics:
    """Counts that every part has. A part may have a subclass with more."""

    open_requests: int
    """Number of requests that the part has under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStatistics:
    """A snapshot of a runtime: its open objects, and counts of past events.

    `blocks`, `serving` and `loading` are None before the first cache is registered, and in an abandoned runtime.

    If a cache is registered again, its counts continue those of the last cache. While no cache is registered, `blocks`
    is None.
    """

    state: RuntimeState
    tasks: int
    blocks: BlockCounts | None
    buffers_used: int
    """Number of host blocks and scratch buffers in use."""
    serving: ServingStatistics | None
    loading: LoadingStatistics | None
    peers: tuple[PeerStatistics, ...]
    readers: int
    """Number of ranks that have connected to this rank and get a goodbye when it closes."""
    listener: ListenerStatistics | None
    transport: TransportStatistics
    readers_refused: int
    """Number of readers refused for too few open files."""
    early_notifications: int
    """Number of notifications that came before a cache was registered, when no lease could exist."""
    parts: Mapping[str, PartStatistics] = field(default_factory=dict)
    """Counts of the parts by name, for example "storage" or "prefix". They begin at 0 with each registration."""


def totals(
    past: RuntimeStatistics | None,
    serving: ServingStatistics | None,
    loading: LoadingStatistics | None,
    transport: TransportStatistics | None,
) -> tuple[ServingStatistics | None, LoadingStatistics | None, TransportStatistics]:
    """Return the current snapshots with the counts of earlier registrations, which `past` has, added."""
    if past is not None:
        serving = _total(serving, past.serving, (*_SERVED, *_NOTIFIED))
        loading = _total(loading, past.loading, _LOADED)
        transport = _total(transport, past.transport, (*_MOVED, *_SENT))
    assert transport is not None, "there was a first transport"
    return serving, loading, transport


def _total(now: PartT | None, past: PartT | None, counters: Sequence[str]) -> PartT | None:
    """Return `now` with the `counters` of `past` added; either may be None."""
    if now is None or past is None:
        return past if now is None else now
    return replace(now, **{name: getattr(now, name) + getattr(past, name) for name in counters})
