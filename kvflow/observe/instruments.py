"""The metrics of a runtime, for any collector: names, help texts, labels, buckets, and sources of values.

`prometheus` and `kvflow.ray.ray_metrics` create counters, gauges and histograms of their own classes from these tables.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from kvflow.core.plan.topology import Rank
from kvflow.runtime.records import CANCELLED, LeaseRecord, LoadRecord
from kvflow.runtime.statistics import RuntimeStatistics

LABELS = ("engine", *Rank._fields)
_SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BYTES_BUCKETS = tuple(float(4**power) for power in range(6, 18))  # 4 KiB to 16 GiB


ReadValues: TypeAlias = Callable[[RuntimeStatistics], Mapping[tuple[str, ...], float]]
"""Function that takes a runtime's statistics and returns the values of one metric, by the values of its own labels."""


def _statistics_of(now: RuntimeStatistics, part: str) -> Any:
    """Return one section of a runtime's statistics `now`, or None if the runtime has no such section.

    `part`: name of an optional feature in `now.parts`, or of a field of `now`. After a dot may follow the name of a
    field of the section: "prefix.sharing".
    """
    name, _, inner = part.partition(".")
    section = now.parts.get(name) or getattr(now, name, None)
    return getattr(section, inner, None) if inner else section


def _values_of(part: str, *fields: str, without: float | None = None, **named: str) -> ReadValues:
    """Return a function that reads the values of one metric from fields of the statistics of `part`.

    `_statistics_of` finds these statistics. Give either `fields`: the label value of each field is its name, and a
    single field has no label. Or give `named`, which maps label values to fields. If the runtime has no statistics for
    `part`, each value is `without`; if `without` is None, the mapping is empty.
    """
    by_label = named or {field: field for field in fields}
    labels = {(): fields[0]} if len(fields) == 1 else {(label,): field for label, field in by_label.items()}

    def values(now: RuntimeStatistics) -> Mapping[tuple[str, ...], float]:
        section = _statistics_of(now, part)
        if section is None:
            return {} if without is None else dict.fromkeys(labels, without)
        return {label: getattr(section, field) for label, field in labels.items()}

    return values


def _ignored_notifications(now: RuntimeStatistics) -> Mapping[tuple[str, ...], float]:
    kinds = () if now.serving is None else ("late", "duplicate", "malformed")
    counts: dict[tuple[str, ...], float] = {(kind,): getattr(now.serving, f"{kind}_notifications") for kind in kinds}
    return {("early",): now.early_notifications, **counts}


def _prefix_pulls(now: RuntimeStatistics) -> Mapping[tuple[str, ...], float]:
    prefix = _statistics_of(now, "prefix")
    return {} if prefix is None else {("hit",): prefix.hits, ("miss",): prefix.pulls - prefix.hits}


_BLOCKS = _values_of("blocks", "free", "leased", "in_flight", "quarantined")
_MESSAGES = _values_of("listener", "answered", "refused", "dropped")
_PREFIX_QUESTIONS = _values_of("prefix.sharing", "found", "missed", "busy", "failed", "reclaimed")
_HANDED_ON = _values_of("prefix", given="handed_on_tokens", taken="taken_over_tokens")
_PINNED_BLOCKS = _values_of("prefix.sharing", "pinned_blocks")
_STORE_REQUESTS = _values_of("storage", "saved", "restored", "missed", "damaged", "failed")
_STORE_BYTES = _values_of("storage", used="bytes", max="bytes_max")
_LISTENERS_LOST_HELP = "Listeners that UCX has closed, as when open files run out: no new peer connects there."
_LACKING_HELP = "Loads that wait for local blocks (Load.extend)."
_NEVER_READ_HELP = "Engines that tickets name, and that no load has read from yet."
_READERS_REFUSED_HELP = "New readers that were refused because too few open files were left."
_SOURCES_LEFT_HELP = "Sources that loads gave up for their next source."
_PREFIX_QUESTIONS_HELP = "Questions of peers for prefixes by outcome, and reclaimed leases."
_HANDED_ON_HELP = "Tokens that a successor has pulled, given by the engine that leaves, taken by its successor."
_LATE_READS_HELP = "Reads of stock engines that ended after their lease: the text may be wrong."

# Metrics from `Runtime.statistics()`: name, help, labels in addition to `LABELS`, function that returns the values.
GAUGES: tuple[tuple[str, str, tuple[str, ...], ReadValues], ...] = (
    ("kvflow_blocks", "Blocks of the KV cache by use.", ("use",), _BLOCKS),
    ("kvflow_open_loads", "Loads under way.", (), _values_of("loading", "open_loads", without=0)),
    ("kvflow_loads_lacking_blocks", _LACKING_HELP, (), _values_of("loading", "loads_lacking_blocks", without=0)),
    ("kvflow_engines_never_read", _NEVER_READ_HELP, (), _values_of("loading", "never_read", without=0)),
    ("kvflow_open_leases", "Leases open.", (), _values_of("serving", "open_leases", without=0)),
    ("kvflow_open_reads", "Reads posted and not ended.", (), _values_of("transport", "open_reads")),
    ("kvflow_listeners_lost", _LISTENERS_LOST_HELP, (), _values_of("transport", "listeners_lost")),
    ("kvflow_buffers_used", "Host blocks and scratch buffers in use.", (), lambda now: {(): now.buffers_used}),
    ("kvflow_peers", "Peers by state.", ("state",), lambda now: Tally((str(peer.state),) for peer in now.peers)),
    ("kvflow_store_bytes", "Bytes of the store's files, used and at most.", ("of",), _STORE_BYTES),
    ("kvflow_prefix_pinned_blocks", "Blocks pinned for readers of prefixes.", (), _PINNED_BLOCKS),
    ("kvflow_store_entries", "Entries stored.", (), _values_of("storage", "entries")),
)
COUNTERS: tuple[tuple[str, str, tuple[str, ...], ReadValues], ...] = (
    ("kvflow_read_bytes", "Bytes read.", (), _values_of("transport", "bytes_read")),
    ("kvflow_reads", "Reads posted.", (), _values_of("transport", "reads")),
    ("kvflow_reads_failed", "Reads that failed in the transport.", (), _values_of("transport", "reads_failed")),
    ("kvflow_notifications_ignored", "Notifications that changed nothing.", ("reason",), _ignored_notifications),
    ("kvflow_readers_refused", _READERS_REFUSED_HELP, (), lambda now: {(): now.readers_refused}),
    ("kvflow_late_reads", _LATE_READS_HELP, (), _values_of("serving", "late_reads")),
    ("kvflow_load_sources_left", _SOURCES_LEFT_HELP, (), _values_of("loading", "sources_left", without=0)),
    ("kvflow_side_channel_messages", "Side-channel messages.", ("result",), _MESSAGES),
    ("kvflow_prefix_questions", _PREFIX_QUESTIONS_HELP, ("outcome",), _PREFIX_QUESTIONS),
    ("kvflow_prefix_pulls", "Pulls of prefixes that have ended.", ("outcome",), _prefix_pulls),
    ("kvflow_prefix_tokens", "Tokens that were pulled instead of computed.", (), _values_of("prefix", "tokens")),
    ("kvflow_prefix_handed_on_tokens", _HANDED_ON_HELP, ("side",), _HANDED_ON),
    ("kvflow_store_requests", "Saves and restores that have ended.", ("outcome",), _STORE_REQUESTS),
    ("kvflow_store_evictions", "Entries evicted to make room for others.", (), _values_of("storage", "evicted")),
)


_LOAD_GROW_HELP = "Time in successful loads of growing leases from the first tokens to the last."

RECORD_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("kvflow_loads", "Loads that have ended.", ("outcome",)),
    ("kvflow_load_descriptors", "Descriptors of successful loads.", ()),
    ("kvflow_load_blocks", "Blocks that successful loads have filled.", ("group",)),
    ("kvflow_loads_verified", "Loads that were to be verified, by result.", ("result",)),
    ("kvflow_loads_vouched", "Loads that have read, by what proves their bytes fresh.", ("freshness", "outcome")),
    ("kvflow_leases", "Leases that have ended.", ("outcome",)),
)
"""Counters that each record of an ended load or lease increases: name, help text, labels in addition to `LABELS`."""
HISTOGRAMS: tuple[tuple[str, str, tuple[str, ...], tuple[float, ...]], ...] = (
    ("kvflow_load_seconds", "Duration of successful loads.", (), _SECONDS_BUCKETS),
    ("kvflow_load_phase_seconds", "Time that successful loads spent in each phase.", ("phase",), _SECONDS_BUCKETS),
    ("kvflow_load_bytes", "Bytes of successful loads.", (), _BYTES_BUCKETS),
    ("kvflow_lease_seconds", "Time that leases kept their blocks.", ("outcome",), _SECONDS_BUCKETS),
    ("kvflow_lease_grow_seconds", "Time that leases grew, until the last token.", (), _SECONDS_BUCKETS),
    ("kvflow_load_grow_seconds", _LOAD_GROW_HELP, (), _SECONDS_BUCKETS),
)
"""Histograms over ended loads and leases: name, help text, labels in addition to `LABELS`, upper bounds of buckets."""
Amount: TypeAlias = tuple[str, tuple[str, ...], float]
"""An amount to add to a counter or histogram: name of the metric, values of all its labels, amount."""


def amounts_of(record: LoadRecord | LeaseRecord) -> Iterator[Amount]:
    """Yield the amounts that the record of an ended load or lease adds to counters and histograms."""
    where = (record.engine_id, *map(str, record.rank))
    details = _amounts_of_load(record) if isinstance(record, LoadRecord) else _amounts_of_lease(record)
    return ((name, (*where, *labels), amount) for name, labels, amount in details)


def _amounts_of_load(record: LoadRecord) -> Iterator[Amount]:
    yield "kvflow_loads", (record.outcome,), 1
    if record.freshness:
        yield "kvflow_loads_vouched", (record.freshness, record.outcome), 1
    if record.verification != "off":
        yield "kvflow_loads_verified", (record.verification,), 1
    if record.error or record.outcome == CANCELLED:
        return
    yield "kvflow_load_seconds", (), sum(record.seconds.values())
    yield "kvflow_load_bytes", (), record.bytes
    yield "kvflow_load_descriptors", (), record.descriptors
    for group, count in record.blocks_by_group.items():
        yield "kvflow_load_blocks", (group,), count
    if record.landed:
        yield "kvflow_load_grow_seconds", (), record.landed[-1].seconds - record.landed[0].seconds
    for phase, seconds in record.seconds.items():
        yield "kvflow_load_phase_seconds", (phase,), seconds


def _amounts_of_lease(record: LeaseRecord) -> Iterator[Amount]:
    yield "kvflow_leases", (record.outcome,), 1
    yield "kvflow_lease_seconds", (record.outcome,), sum(record.seconds.values())
    if record.computed and record.computed[-1].tokens == record.tokens:
        yield "kvflow_lease_grow_seconds", (), record.computed[-1].seconds
