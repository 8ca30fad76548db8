"""Statistics of a runtime: its state, the open objects, and counts over all of its registrations."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from kvflow.core.policy.ledger import BlockCounts
from kvflow.runtime.channel.protocol import ListenerStatistics
from kvflow.runtime.load.requests import LoadingStatistics
from kvflow.runtime.peers.table import PeerStatistics
from kvflow.runtime.producer.lease import ServingStatistics
from kvflow.transport.base import TransportStatistics

PartT = TypeVar("PartT", ServingStatistics, LoadingStatistics, TransportStatistics)

_GAUGES = {
    *("open_leases", "open_loads", "waiting_loads", "waiting_reads", "in_flight", "peers", "quarantines", "never_read"),
    "loads_lacking_blocks",
    *("open_reads", "open_peers", "open_spans", "open_threads", "listeners_lost", "unreachable"),
}
"""Names of fields that count what exists now. All other fields count events, and go on in the next registration."""


class RuntimeState(enum.StrEnum):
    """State of a runtime. An OPEN runtime takes new work; a DRAINING or CLOSING one only lets its work end.

    In the states NEW, BROKEN and CLOSED a runtime does no work.
    """

    NEW = "new"
    OPEN = "open"
    DRAINING = "draining"
    BROKEN = "broken"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatistics:
    """Counts of one part of a runtime. A part may return a subclass with further counts."""

    open_requests: int
    """Number of requests of the part that are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeStatistics:
    """A snapshot of a runtime: its open objects, and counts of past events.

    `blocks` is None while no cache is registered; `serving` and `loading` are None before the first cache is
    registered. If the event loop ended before the runtime was closed, `blocks` is None; `serving` and `loading` lack
    the counts of the last registration, or are None.

    If a cache is registered again, `serving`, `loading` and `transport` go on counting.
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
    """Number of ranks that have connected to this rank, and get a goodbye when this rank closes."""
    listener: ListenerStatistics | None
    transport: TransportStatistics
    readers_refused: int
    """Number of readers that were refused because too few files could still be opened."""
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
    """Return the statistics of serving, loading and transport, added up over all registrations.

    `past` has the sums over all earlier registrations; the other arguments are statistics of the current registration.
    """
    if past is not None:
        serving = _total(serving, past.serving)
        loading = _total(loading, past.loading)
        transport = _total(transport, past.transport)
    assert transport is not None, "there was a first transport"
    return serving, loading, transport


def _total(now: PartT | None, past: PartT | None) -> PartT | None:
    """Return `now` with each count increased by the same count of `past`. If one is None, return the other."""
    if now is None or past is None:
        return past if now is None else now
    counts = [entry.name for entry in fields(now) if entry.name not in _GAUGES]
    return replace(now, **{name: getattr(now, name) + getattr(past, name) for name in counts})
