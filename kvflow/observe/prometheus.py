"""Prometheus metrics of one or more runtimes; needs the extra `kvflow[metrics]`.

    metrics = PrometheusMetrics()
    async with kvflow.Runtime(config, observers=[metrics]) as runtime:
        metrics.watch(runtime)

Counters and histograms come from records, gauges from `Runtime.statistics()` at the moment of a scrape. Every metric
has the labels `engine`, `dp`, `pp` and `tp`, which say whose it is. docs/operations.md says what to watch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvflow.core.plan.topology import Rank
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeStatistics

_LABELS = ("engine", *Rank._fields)
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BYTES = tuple(float(4**power) for power in range(6, 18))  # 4 KiB to 16 GiB
_SCRAPE_WAIT_S = 1.0


Values: TypeAlias = Callable[[RuntimeStatistics], Mapping[str, float]]


def _blocks(now: RuntimeStatistics) -> Mapping[str, float]:
    return {} if now.blocks is None else {use: getattr(now.blocks, use) for use in _BLOCK_USES}


def _dropped(now: RuntimeStatistics) -> Mapping[str, float]:
    kinds = () if now.serving is None else ("late", "duplicate", "malformed")
    return {"early": now.early_notifications, **{kind: getattr(now.serving, f"{kind}_notifications") for kind in kinds}}


def _messages(now: RuntimeStatistics) -> Mapping[str, float]:
    results = () if now.listener is None else ("answered", "refused", "dropped")
    return {result: getattr(now.listener, result) for result in results}


# What is shown of `Runtime.statistics()`: name, help, label beside `_LABELS`, and the values by that label.
_BLOCK_USES = ("free", "leased", "in_flight", "quarantined")
_GAUGES: tuple[tuple[str, str, str, Values], ...] = (
    ("kvflow_blocks", "Blocks of the KV cache by use.", "use", _blocks),
    ("kvflow_open_loads", "Loads under way.", "", lambda now: {"": now.loading.open_loads if now.loading else 0}),
    ("kvflow_open_leases", "Leases open.", "", lambda now: {"": now.serving.open_leases if now.serving else 0}),
    ("kvflow_open_reads", "Reads posted and not ended.", "", lambda now: {"": now.transport.open_reads}),
    ("kvflow_buffers_used", "Host blocks and scratch buffers in use.", "", lambda now: {"": now.buffers_used}),
    ("kvflow_peers", "Peers by state.", "state", lambda now: Tally(str(peer.state) for peer in now.peers)),
)
_COUNTERS: tuple[tuple[str, str, str, Values], ...] = (
    ("kvflow_read_bytes", "Bytes that reads have brought.", "", lambda now: {"": now.transport.bytes_read}),
    ("kvflow_reads", "Reads posted.", "", lambda now: {"": now.transport.reads}),
    ("kvflow_reads_failed", "Reads that the transport failed.", "", lambda now: {"": now.transport.reads_failed}),
    ("kvflow_notifications_ignored", "Notifications that changed nothing.", "reason", _dropped),
    ("kvflow_side_channel_messages", "Side-channel messages.", "result", _messages),
)


class PrometheusMetrics(Collector):
    """A `records.Observer` and a collector at once. Several in one process need a registry each."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._watched: list[_Watched] = []

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, (*_LABELS, *labels), registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(name, text, (*_LABELS, *labels), buckets=buckets, registry=registry)

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
        registry.register(self)

    def watch(self, runtime: Runtime) -> None:
        """Show this runtime's gauges; to be called on its loop, once it is open."""
        self._watched.append(_Watched(runtime, asyncio.get_running_loop()))

    def load_ended(self, record: LoadRecord) -> None:
        where = (record.engine_id, *record.rank)
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
        where = (record.engine_id, *record.rank, record.outcome)
        self._leases.labels(*where).inc()
        self._lease_seconds.labels(*where).observe(sum(record.seconds.values()))
        if record.computed and record.computed[-1].tokens == record.tokens:
            self._lease_grow_seconds.labels(record.engine_id, *record.rank).observe(record.computed[-1].seconds)

    def describe(self) -> list[Metric]:
        """Nothing in advance: the gauges are not known before a runtime is watched."""
        return []

    def collect(self) -> Iterator[Metric]:
        """For the registry; from any thread."""
        snapshots = [(watched.labels, watched.statistics()) for watched in self._watched]
        for kind, shown in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, label, values_of in shown:
                family = kind(name, text, labels=(*_LABELS, label) if label else _LABELS)
                for labels, now in snapshots:
                    for value, count in values_of(now).items():
                        family.add_metric([*labels, value] if label else labels, count)
                yield family


class _Watched:
    """A runtime, and how its statistics are taken from whatever thread scrapes."""

    def __init__(self, runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
        self.labels = [runtime.config.engine_id, *map(str, runtime.rank)]
        self._runtime = runtime
        self._loop = loop
        self._last = runtime.statistics()

    def statistics(self) -> RuntimeStatistics:
        """A snapshot made on the runtime's loop; the one before it if the loop does not answer."""
        if _running_loop() is self._loop:
            self._last = self._runtime.statistics()
        elif self._loop.is_running():
            asking = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
            try:
                self._last = asking.result(_SCRAPE_WAIT_S)
            except concurrent.futures.TimeoutError:
                asking.cancel()
        return self._last

    async def _take(self) -> RuntimeStatistics:
        return self._runtime.statistics()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
