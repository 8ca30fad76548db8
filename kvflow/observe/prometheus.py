"""Prometheus metrics of one or more runtimes. Needs the extra `kvflow[metrics]`.

    metrics = PrometheusMetrics()
    async with kvflow.Runtime(config, observers=[metrics]) as runtime:
        metrics.watch(runtime)

Metrics of ended loads and leases are updated at each end. Gauges and the other counters come from
`Runtime.statistics()` at each scrape. Every metric has the labels `engine`, `dp`, `pp` and `tp`, which name the rank.
docs/operations.md explains the metrics to watch.

In the multiprocess mode of prometheus_client (PROMETHEUS_MULTIPROC_DIR) a scrape reads only files, so gauges and
counters from statistics are written to files, every `WRITE_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvflow.core.plan.topology import Rank
from kvflow.observe.instruments import COUNTERS, GAUGES, HISTOGRAMS, LABELS, RECORD_COUNTERS, amounts_of
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeState, RuntimeStatistics

__all__ = ["PrometheusMetrics"]

WRITE_EVERY_S = 5.0
_SCRAPE_WAIT_S = 1.0


class PrometheusMetrics(Collector):
    """A `kvflow.Observer` that is also a prometheus_client collector.

    Two of these objects in one process need two registries.

    Args:
        registry: Registry of prometheus_client to which all metrics are added.

    Raises:
        ValueError: The registry already has metrics of these names.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._watched: list[_WatchedRuntime] = []
        self._counters = {
            name: Counter(name, text, (*LABELS, *labels), registry=registry) for name, text, labels in RECORD_COUNTERS
        }
        self._histograms = {
            name: Histogram(name, text, (*LABELS, *labels), buckets=buckets, registry=registry)
            for name, text, labels, buckets in HISTOGRAMS
        }
        self._gauges: dict[str, Gauge] = {}
        """The gauges that are written to files; empty unless prometheus_client is in multiprocess mode."""
        if not getattr(values.ValueClass, "_multiprocess", False):
            registry.register(self)
            return
        for name, text, labels, _ in GAUGES:
            names = (*LABELS, *labels)
            self._gauges[name] = Gauge(name, text, names, registry=registry, multiprocess_mode="livemostrecent")
        for name, text, labels, _ in COUNTERS:
            self._counters[name] = Counter(name, text, (*LABELS, *labels), registry=registry)

    def watch(self, runtime: Runtime) -> None:
        """Add the metrics of `runtime.statistics()` to each later scrape. Call this on the runtime's event loop.

        In multiprocess mode the metrics are up to `WRITE_EVERY_S` old.

        Args:
            runtime: An open runtime.

        Raises:
            RuntimeError: No event loop is running in this thread.
        """
        self._watched.append(_WatchedRuntime(runtime, asyncio.get_running_loop()))
        if self._gauges:
            self._write(self._watched[-1], {})

    def load_ended(self, record: LoadRecord) -> None:
        """Add the record of an ended load to counters and histograms. The runtime calls this.

        Args:
            record: Record of the load.
        """
        self._add_record(record)

    def lease_ended(self, record: LeaseRecord) -> None:
        """Add the record of an ended lease to counters and histograms. The runtime calls this.

        Args:
            record: Record of the lease.
        """
        self._add_record(record)

    def _add_record(self, record: LoadRecord | LeaseRecord) -> None:
        for name, labels, amount in amounts_of(record):
            if name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
            else:
                self._histograms[name].labels(*labels).observe(amount)

    def _write(self, watched: _WatchedRuntime, written: dict[tuple[str, tuple[str, ...]], float]) -> None:
        """Write a runtime's gauges and counters to files now, and every `WRITE_EVERY_S` until the runtime is closed.

        `written`: the values that were written last, by the metric's name and the values of its own labels.
        """
        now = watched.statistics()
        for name, _, _, values_of in (*GAUGES, *COUNTERS):
            counts = values_of(now)
            gone = [own for known, own in written if known == name and own not in counts and name in self._gauges]
            for own, count in {**counts, **dict.fromkeys(gone, 0)}.items():
                labels = [*watched.labels, *own]
                if name in self._gauges:
                    self._gauges[name].labels(*labels).set(count)
                else:
                    self._counters[name].labels(*labels).inc(max(count - written.get((name, own), 0), 0))
                written[name, own] = count
        if now.state is not RuntimeState.CLOSED:
            asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._write, watched, written)

    def describe(self) -> list[Metric]:
        """Return no metrics, since none is known before a runtime is watched. The registry calls this.

        Returns:
            An empty list.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all watched runtimes. The registry calls this at each scrape, from any thread.

        Returns:
            Gauges and counters with their present values or, for a runtime with an event loop that does not answer
                within a second, the values of the previous scrape.
        """
        snapshots = [(watched.labels, watched.statistics()) for watched in self._watched]
        for kind, shown in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, own_names, values_of in shown:
                family = kind(name, text, labels=(*LABELS, *own_names))
                for labels, now in snapshots:
                    for own, count in values_of(now).items():
                        family.add_metric([*labels, *own], count)
                yield family


class _WatchedRuntime:
    """A watched runtime and its event loop, so that any thread can take the runtime's statistics."""

    def __init__(self, runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
        self.labels = [runtime.config.engine_id, *map(str, Rank.of(runtime.config))]
        self._runtime = runtime
        self._loop = loop
        self._last_statistics = runtime.statistics()

    def statistics(self) -> RuntimeStatistics:
        """Return the runtime's statistics, taken on its event loop.

        If the loop does not answer, return the previous statistics.
        """
        if _running_loop() is self._loop:
            self._last_statistics = self._runtime.statistics()
        elif self._loop.is_running():
            asking = asyncio.run_coroutine_threadsafe(self._statistics_now(), self._loop)
            try:
                self._last_statistics = asking.result(_SCRAPE_WAIT_S)
            except concurrent.futures.TimeoutError:
                asking.cancel()
        return self._last_statistics

    async def _statistics_now(self) -> RuntimeStatistics:
        return self._runtime.statistics()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
