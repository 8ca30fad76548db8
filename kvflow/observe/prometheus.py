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
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvflow.observe.instruments import COUNTERS, GAUGES, HISTOGRAMS, LABELS, RECORD_COUNTERS, told_by
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeStatistics

__all__ = ["PrometheusMetrics"]

_SCRAPE_WAIT_S = 1.0


class PrometheusMetrics(Collector):
    """A `kvflow.Observer` and a collector at once. Several in one process need a registry each.

    Args:
        registry: of prometheus_client, to which all metrics are added.

    Raises:
        ValueError: the registry has them already.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._watched: list[_Watched] = []
        self._counters = {
            name: Counter(name, text, (*LABELS, *labels), registry=registry) for name, text, labels in RECORD_COUNTERS
        }
        self._histograms = {
            name: Histogram(name, text, (*LABELS, *labels), buckets=buckets, registry=registry)
            for name, text, labels, buckets in HISTOGRAMS
        }
        registry.register(self)

    def watch(self, runtime: Runtime) -> None:
        """Show a runtime's gauges; to be called on its loop.

        Args:
            runtime: one that is open.

        Raises:
            RuntimeError: no event loop runs here.
        """
        self._watched.append(_Watched(runtime, asyncio.get_running_loop()))

    def load_ended(self, record: LoadRecord) -> None:
        """Count a load.

        Args:
            record: what became of it.
        """
        self._note(record)

    def lease_ended(self, record: LeaseRecord) -> None:
        """Count a lease.

        Args:
            record: what became of it.
        """
        self._note(record)

    def _note(self, record: LoadRecord | LeaseRecord) -> None:
        for name, labels, amount in told_by(record):
            if name in self._counters:
                self._counters[name].labels(*labels).inc(amount)
            else:
                self._histograms[name].labels(*labels).observe(amount)

    def describe(self) -> list[Metric]:
        """Metric families for the registry, when this is added to it.

        Returns:
            Nothing in advance: the gauges are not known before a runtime is watched.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        """Metric families for the registry, with each scrape; from any thread.

        Returns:
            Gauges and counters of all watched runtimes, as they are now. One whose loop does not answer within a second
            is shown as it was before.
        """
        snapshots = [(watched.labels, watched.statistics()) for watched in self._watched]
        for kind, shown in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, text, label, values_of in shown:
                family = kind(name, text, labels=(*LABELS, label) if label else LABELS)
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
