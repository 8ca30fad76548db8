"""Metrics of runtimes, whatever collects them: names, labels and buckets, and what a record adds to each.

Prometheus and Ray Serve have instruments of their own: `prometheus` and `kvflow.ray.metrics` make them from here.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from kvflow.core.plan.topology import Rank
from kvflow.runtime.records import CANCELLED, LeaseRecord, LoadRecord
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


def _prefix_questions(now: RuntimeStatistics) -> Mapping[str, float]:
    outcomes = () if now.sharing is None else ("found", "missed", "busy", "failed", "reclaimed")
    return {outcome: getattr(now.sharing, outcome) for outcome in outcomes}


def _prefix_pulls(now: RuntimeStatistics) -> Mapping[str, float]:
    pulls = now.prefixes
    return {} if pulls is None else {"hit": pulls.hits, "miss": pulls.pulls - pulls.hits}


# What is shown of `Runtime.statistics()`: name, help, label beside `LABELS`, and the values by that label.
_BLOCK_USES = ("free", "leased", "in_flight", "quarantined")
_STORE_OUTCOMES = ("saved", "restored", "missed", "damaged", "failed")
GAUGES: tuple[tuple[str, str, str, Values], ...] = (
    ("kvflow_blocks", "Blocks of the KV cache by use.", "use", _blocks),
    ("kvflow_open_loads", "Loads under way.", "", lambda now: {"": now.loading.open_loads if now.loading else 0}),
    (
        "kvflow_engines_never_read",
        "Engines whose tickets come, and that no load has ever read from.",
        "",
        lambda now: {"": now.loading.never_read if now.loading else 0},
    ),
    ("kvflow_open_leases", "Leases open.", "", lambda now: {"": now.serving.open_leases if now.serving else 0}),
    ("kvflow_open_reads", "Reads posted and not ended.", "", lambda now: {"": now.transport.open_reads}),
    ("kvflow_buffers_used", "Host blocks and scratch buffers in use.", "", lambda now: {"": now.buffers_used}),
    ("kvflow_peers", "Peers by state.", "state", lambda now: Tally(str(peer.state) for peer in now.peers)),
    ("kvflow_store_bytes", "Bytes of the store's files, and how many they may have.", "of", _store_bytes),
    (
        "kvflow_prefix_pinned_blocks",
        "Blocks pinned for readers of prefixes.",
        "",
        lambda now: {"": now.sharing.pinned_blocks} if now.sharing else {},
    ),
    ("kvflow_store_entries", "Entries stored.", "", lambda now: {"": now.store.entries} if now.store else {}),
)
COUNTERS: tuple[tuple[str, str, str, Values], ...] = (
    ("kvflow_read_bytes", "Bytes that reads have brought.", "", lambda now: {"": now.transport.bytes_read}),
    ("kvflow_reads", "Reads posted.", "", lambda now: {"": now.transport.reads}),
    ("kvflow_reads_failed", "Reads that the transport failed.", "", lambda now: {"": now.transport.reads_failed}),
    ("kvflow_notifications_ignored", "Notifications that changed nothing.", "reason", _dropped),
    (
        "kvflow_leases_deserted",
        "Leases given back since their readers had died.",
        "",
        lambda now: {"": now.serving.deserted if now.serving else 0},
    ),
    (
        "kvflow_late_reads",
        "Reads of stock engines that ended after their lease: the text may be wrong.",
        "",
        lambda now: {"": now.serving.late_reads} if now.serving else {},
    ),
    (
        "kvflow_load_sources_left",
        "Sources that loads have left for their next one.",
        "",
        lambda now: {"": now.loading.sources_left if now.loading else 0},
    ),
    ("kvflow_side_channel_messages", "Side-channel messages.", "result", _messages),
    ("kvflow_prefix_questions", "Questions of peers for prefixes, and runs taken back.", "outcome", _prefix_questions),
    ("kvflow_prefix_pulls", "Pulls of prefixes that have ended.", "outcome", _prefix_pulls),
    (
        "kvflow_prefix_tokens",
        "Tokens that were pulled instead of computed.",
        "",
        lambda now: {"": now.prefixes.tokens} if now.prefixes else {},
    ),
    ("kvflow_store_requests", "Saves and restores that have ended.", "outcome", _stored),
    (
        "kvflow_store_evictions",
        "Entries that made room for others.",
        "",
        lambda now: {"": now.store.evicted} if now.store else {},
    ),
)


RECORD_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("kvflow_loads", "Loads that have ended.", ("outcome",)),
    ("kvflow_load_descriptors", "Descriptors of successful loads.", ()),
    ("kvflow_load_blocks", "Blocks that successful loads have filled.", ("group",)),
    ("kvflow_loads_verified", "Loads that were to be verified, by what came of it.", ("result",)),
    ("kvflow_loads_vouched", "Loads that read, by what vouches for their bytes.", ("freshness", "outcome")),
    ("kvflow_leases", "Leases that have ended.", ("outcome",)),
)
"""Counters that records add to: name, help, labels beside `LABELS`."""
HISTOGRAMS: tuple[tuple[str, str, tuple[str, ...], tuple[float, ...]], ...] = (
    ("kvflow_load_seconds", "Duration of successful loads.", (), _SECONDS),
    ("kvflow_load_phase_seconds", "Time that successful loads spent in each phase.", ("phase",), _SECONDS),
    ("kvflow_load_bytes", "Bytes of successful loads.", (), _BYTES),
    ("kvflow_lease_seconds", "Time that leases kept their blocks.", ("outcome",), _SECONDS),
    ("kvflow_lease_grow_seconds", "Time that leases grew, until the last token.", (), _SECONDS),
    (
        "kvflow_load_grow_seconds",
        "Time in successful loads of growing leases from the first tokens to the last.",
        (),
        _SECONDS,
    ),
)
"""Histograms that records add to: name, help, labels beside `LABELS`, buckets."""
Told: TypeAlias = tuple[str, tuple[str, ...], float]
"""Name of an instrument, the values of all its labels, and the amount."""


def told_by(record: LoadRecord | LeaseRecord) -> Iterator[Told]:
    """Amounts that a record adds to counters and histograms."""
    where = (record.engine_id, *map(str, record.rank))
    details = _of_load(record) if isinstance(record, LoadRecord) else _of_lease(record)
    return ((name, (*where, *labels), amount) for name, labels, amount in details)


def _of_load(record: LoadRecord) -> Iterator[Told]:
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


def _of_lease(record: LeaseRecord) -> Iterator[Told]:
    yield "kvflow_leases", (record.outcome,), 1
    yield "kvflow_lease_seconds", (record.outcome,), sum(record.seconds.values())
    if record.computed and record.computed[-1].tokens == record.tokens:
        yield "kvflow_lease_grow_seconds", (), record.computed[-1].seconds
