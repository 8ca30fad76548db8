"""What is measured of runtimes, whatever collects it: names, labels and buckets, and what a record adds to each.

Prometheus and Ray Serve have instruments of their own; how one is made is all that they differ in here.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from kvflow.core.plan.topology import Rank
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.runtime.statistics import RuntimeStatistics

LABELS = ("engine", *Rank._fields)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BYTES = tuple(float(4**power) for power in range(6, 18))  # 4 KiB to 16 GiB


Values: TypeAlias = Callable[[RuntimeStatistics], Mapping[str, float]]


def _blocks(now: RuntimeStatistics) -> Mapping[str, float]:
    return {} if now.blocks is None else {use: getattr(now.blocks, use) for use in _BLOCK_USES}


def _dropped(now: RuntimeStatistics) -> Mapping[str, float]:
    kinds = () if now.serving is None else ("late", "duplicate", "malformed")
    return {"early": now.early_notifications, **{kind: getattr(now.serving, f"{kind}_notifications") for kind in kinds}}


def _messages(now: RuntimeStatistics) -> Mapping[str, float]:
    results = () if now.listener is None else ("answered", "refused", "dropped")
    return {result: getattr(now.listener, result) for result in results}


def _store_bytes(now: RuntimeStatistics) -> Mapping[str, float]:
    return {} if now.store is None else {"used": now.store.bytes, "max": now.store.bytes_max}


def _stored(now: RuntimeStatistics) -> Mapping[str, float]:
    return {} if now.store is None else {outcome: getattr(now.store, outcome) for outcome in _STORE_OUTCOMES}


# What is shown of `Runtime.statistics()`: name, help, label beside `LABELS`, and the values by that label.
_BLOCK_USES = ("free", "leased", "in_flight", "quarantined")
_STORE_OUTCOMES = ("saved", "restored", "missed", "damaged", "failed")
GAUGES: tuple[tuple[str, str, str, Values], ...] = (
    ("kvflow_blocks", "Blocks of the KV cache by use.", "use", _blocks),
    ("kvflow_open_loads", "Loads under way.", "", lambda now: {"": now.loading.open_loads if now.loading else 0}),
    ("kvflow_open_leases", "Leases open.", "", lambda now: {"": now.serving.open_leases if now.serving else 0}),
    ("kvflow_open_reads", "Reads posted and not ended.", "", lambda now: {"": now.transport.open_reads}),
    ("kvflow_buffers_used", "Host blocks and scratch buffers in use.", "", lambda now: {"": now.buffers_used}),
    ("kvflow_peers", "Peers by state.", "state", lambda now: Tally(str(peer.state) for peer in now.peers)),
    ("kvflow_store_bytes", "Bytes of the store's files, and how many they may have.", "of", _store_bytes),
    ("kvflow_store_entries", "Entries stored.", "", lambda now: {"": now.store.entries} if now.store else {}),
)
COUNTERS: tuple[tuple[str, str, str, Values], ...] = (
    ("kvflow_read_bytes", "Bytes that reads have brought.", "", lambda now: {"": now.transport.bytes_read}),
    ("kvflow_reads", "Reads posted.", "", lambda now: {"": now.transport.reads}),
    ("kvflow_reads_failed", "Reads that the transport failed.", "", lambda now: {"": now.transport.reads_failed}),
    ("kvflow_notifications_ignored", "Notifications that changed nothing.", "reason", _dropped),
    (
        "kvflow_late_reads",
        "Reads of stock engines that ended after their lease: the text may be wrong.",
        "",
        lambda now: {"": now.serving.late_reads} if now.serving else {},
    ),
    ("kvflow_side_channel_messages", "Side-channel messages.", "result", _messages),
    ("kvflow_store_requests", "Saves and restores that have ended.", "outcome", _stored),
    (
        "kvflow_store_evictions",
        "Entries that made room for others.",
        "",
        lambda now: {"": now.store.evicted} if now.store else {},
    ),
)


class Counts(Protocol):
    """One time series of a counter."""

    def inc(self, amount: float = 1) -> None: ...


class Observes(Protocol):
    """One time series of a histogram."""

    def observe(self, amount: float) -> None: ...


class CounterKind(Protocol):
    """A counter; its labels are given in order."""

    def labels(self, *values: str) -> Counts: ...


class HistogramKind(Protocol):
    """A histogram; its labels are given in order."""

    def labels(self, *values: str) -> Observes: ...


class Instruments(Protocol):
    """Makes what collects: a counter or a histogram of a name, a help text and labels."""

    def counter(self, name: str, text: str, labels: Sequence[str]) -> CounterKind: ...

    def histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> HistogramKind: ...


class RecordMetrics:
    """A `records.Observer`: counters and histograms of how loads and leases have ended."""

    def __init__(self, instruments: Instruments) -> None:
        def counter(name: str, text: str, *labels: str) -> CounterKind:
            return instruments.counter(name, text, (*LABELS, *labels))

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> HistogramKind:
            return instruments.histogram(name, text, (*LABELS, *labels), buckets)

        self._loads = counter("kvflow_loads", "Loads that have ended.", "outcome")
        self._load_seconds = histogram("kvflow_load_seconds", "Duration of successful loads.")
        self._phase_seconds = histogram(
            "kvflow_load_phase_seconds", "Time that successful loads spent in each phase.", "phase"
        )
        self._load_bytes = histogram("kvflow_load_bytes", "Bytes of successful loads.", buckets=_BYTES)
        self._descriptors = counter("kvflow_load_descriptors", "Descriptors of successful loads.")
        self._blocks = counter("kvflow_load_blocks", "Blocks that successful loads have filled.", "group")
        self._verified = counter(
            "kvflow_loads_verified", "Loads that were to be verified, by what came of it.", "result"
        )
        self._vouched = counter(
            "kvflow_loads_vouched", "Loads that read, by what vouches for their bytes.", "freshness", "outcome"
        )
        self._leases = counter("kvflow_leases", "Leases that have ended.", "outcome")
        self._lease_seconds = histogram("kvflow_lease_seconds", "How long leases kept their blocks.", "outcome")
        self._lease_grow_seconds = histogram("kvflow_lease_grow_seconds", "How long leases grew, until the last token.")
        self._load_grow_seconds = histogram(
            "kvflow_load_grow_seconds", "Time in successful loads of growing leases from the first tokens to the last."
        )

    def load_ended(self, record: LoadRecord) -> None:
        where = _where(record)
        self._loads.labels(*where, record.outcome).inc()
        if record.freshness:
            self._vouched.labels(*where, record.freshness, record.outcome).inc()
        if record.verification != "off":
            self._verified.labels(*where, record.verification).inc()
        if record.error or record.outcome == "cancelled":
            return
        self._load_seconds.labels(*where).observe(sum(record.seconds.values()))
        self._load_bytes.labels(*where).observe(record.bytes)
        self._descriptors.labels(*where).inc(record.descriptors)
        for group, count in record.blocks_by_group.items():
            self._blocks.labels(*where, group).inc(count)
        if record.landed:
            self._load_grow_seconds.labels(*where).observe(record.landed[-1].seconds - record.landed[0].seconds)
        for phase, seconds in record.seconds.items():
            self._phase_seconds.labels(*where, phase).observe(seconds)

    def lease_ended(self, record: LeaseRecord) -> None:
        where = (*_where(record), record.outcome)
        self._leases.labels(*where).inc()
        self._lease_seconds.labels(*where).observe(sum(record.seconds.values()))
        if record.computed and record.computed[-1].tokens == record.tokens:
            self._lease_grow_seconds.labels(*_where(record)).observe(record.computed[-1].seconds)


def _where(record: LoadRecord | LeaseRecord) -> tuple[str, ...]:
    """The values of `LABELS`."""
    return record.engine_id, *map(str, record.rank)
