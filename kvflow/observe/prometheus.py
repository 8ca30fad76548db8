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
from collections.abc import Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvflow.observe.instruments import COUNTERS, GAUGES, LABELS, RecordMetrics
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeStatistics

_SCRAPE_WAIT_S = 1.0


class PrometheusMetrics(Collector):
    """A `records.Observer` and a collector at once. Several in one process need a registry each."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._watched: list[_Watched] = []
<<<<<<< HEAD

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
=======
        self._records = RecordMetrics(_Registered(registry))
>>>>>>> ray
        registry.register(self)

    def watch(self, runtime: Runtime) -> None:
        """Show this runtime's gauges; to be called on its loop, once it is open."""
        self._watched.append(_Watched(runtime, asyncio.get_running_loop()))

    def load_ended(self, record: LoadRecord) -> None:
<<<<<<< HEAD
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
=======
        self._records.load_ended(record)
>>>>>>> ray

    def lease_ended(self, record: LeaseRecord) -> None:
        self._records.lease_ended(record)

    def describe(self) -> list[Metric]:
        """Nothing in advance: the gauges are not known before a runtime is watched."""
        return []

    def collect(self) -> Iterator[Metric]:
        """For the registry; from any thread."""
        snapshots = [(watched.labels, watched.statistics()) for watched in self._watched]
        for kind, shown in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, label, values_of in shown:
                family = kind(name, text, labels=(*LABELS, label) if label else LABELS)
                for labels, now in snapshots:
                    for value, count in values_of(now).items():
                        family.add_metric([*labels, value] if label else labels, count)
                yield family


class _Registered:
    """Instruments of a registry; see `Instruments`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)


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
