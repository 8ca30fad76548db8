"""Records and statistics of a replica's runtime as `ray.serve.metrics`, exported at the metrics port of the node.

    metrics = RayMetrics()
    async with ReplicaRuntime(model="llama", observers=[metrics]) as replica, asyncio.TaskGroup() as tasks:
        tasks.create_task(metrics.watch(replica.runtime))

Names and labels are those of `kvflow.observe`, with Ray's prefix `ray_` and its labels for deployment and replica. Ray
does not export the prometheus_client metrics of a replica's process.
"""

from __future__ import annotations

import asyncio

from ray.serve import metrics as serve_metrics

from kvflow.core.plan.topology import Rank
from kvflow.observe.instruments import COUNTERS, GAUGES, HISTOGRAMS, LABELS, RECORD_COUNTERS, amounts_of
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.statistics import RuntimeStatistics


class RayMetrics:
    """A `kvflow.Observer` that exports the records and statistics of one runtime. Create it inside the replica.

    Args:
        period_s: seconds between two exports of statistics.
    """

    def __init__(self, period_s: float = 5.0) -> None:
        self._period_s = period_s
        self._record_counters = {
            name: (serve_metrics.Counter(name, text, tag_keys=(*LABELS, *labels)), (*LABELS, *labels))
            for name, text, labels in RECORD_COUNTERS
        }
        self._histograms = {
            name: (
                serve_metrics.Histogram(name, text, boundaries=list(buckets), tag_keys=(*LABELS, *labels)),
                (*LABELS, *labels),
            )
            for name, text, labels, buckets in HISTOGRAMS
        }
        self._gauges = [
            (serve_metrics.Gauge(name, text, tag_keys=(*LABELS, *labels)), labels, values_of)
            for name, text, labels, values_of in GAUGES
        ]
        self._counters = [
            (serve_metrics.Counter(name, text, tag_keys=(*LABELS, *labels)), labels, values_of)
            for name, text, labels, values_of in COUNTERS
        ]
        self._counted: dict[tuple[int, tuple[str, ...]], float] = {}

    def load_ended(self, record: LoadRecord) -> None:
        """Add the record of an ended load to the metrics. The runtime calls this.

        Args:
            record: record of the load.
        """
        self._note(record)

    def lease_ended(self, record: LeaseRecord) -> None:
        """Add the record of an ended lease to the metrics. The runtime calls this.

        Args:
            record: record of the lease.
        """
        self._note(record)

    def _note(self, record: LoadRecord | LeaseRecord) -> None:
        for name, labels, amount in amounts_of(record):
            if name in self._histograms:
                histogram, names = self._histograms[name]
                histogram.observe(amount, tags=dict(zip(names, labels, strict=True)))
            elif amount > 0:  # Ray raises if 0 is added
                counter, names = self._record_counters[name]
                counter.inc(amount, tags=dict(zip(names, labels, strict=True)))

    async def watch(self, runtime: Runtime) -> None:
        """Export the statistics of `runtime` every `period_s`, until cancelled.

        Args:
            runtime: the runtime that this object observes.
        """
        where = dict(zip(LABELS, (runtime.config.engine_id, *map(str, Rank.of(runtime.config))), strict=True))
        while True:
            self._export(runtime.statistics(), where)
            await asyncio.sleep(self._period_s)

    def _export(self, now: RuntimeStatistics, where: dict[str, str]) -> None:
        for gauge, labels, values_of in self._gauges:
            for own, amount in values_of(now).items():
                gauge.set(amount, tags={**where, **dict(zip(labels, own, strict=True))})
        for index, (counter, labels, values_of) in enumerate(self._counters):
            for own, amount in values_of(now).items():
                more = amount - self._counted.get((index, own), 0)
                self._counted[index, own] = amount
                if more > 0:
                    counter.inc(more, tags={**where, **dict(zip(labels, own, strict=True))})
