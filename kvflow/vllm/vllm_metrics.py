"""kvflow's numbers in vLLM's own metrics: in vLLM's periodic log line, and at its Prometheus endpoint.

Each connector object collects outcomes of loads, leases and questions to peers. vLLM sends the outcomes to its
frontend, and combines those of all ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from kvflow.connector.prefix_questions import PrefixOutcome
from kvflow.connector.worker import Results
from kvflow.runtime.producer.lease import LeaseOutcome

_SECONDS_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
_BYTES_BUCKETS = [float(1 << power) for power in range(12, 36, 2)]
_ABANDONED = "Abandoned"

# The metrics by the key of their values in `KVFlowStats.data`.
_HISTOGRAMS = {
    "load_seconds": ("Duration of loads that succeeded.", _SECONDS_BUCKETS),
    "load_wire_seconds": ("Seconds in which bytes were under way, of loads that succeeded.", _SECONDS_BUCKETS),
    "offer_wait_seconds": (
        "Seconds that requests waited without blocks for their offer (late_blocks).",
        _SECONDS_BUCKETS,
    ),
    "load_bytes": ("Bytes that one load has read.", _BYTES_BUCKETS),
}
_COUNTERS = {
    "load_failures": ("Loads that failed or were abandoned.", "reason"),
    "tickets_refused": ("Requests with parameters that could not be used: their prompts were computed.", "reason"),
    "loads": ("Loads that succeeded, by the kind of proof that their bytes are fresh.", "freshness"),
    "leases": ("Leases that have ended.", "outcome"),
    "prefix_questions": ("Questions to peers for prefixes.", "outcome"),
    "warms": ("Requests that only warm the cache.", "outcome"),
    "hints_ignored": ("Routers' KV hints, or actions of these, that were ignored.", "reason"),
    "prefix_runs": ("Questions of peers for prefixes, and leases that ended because blocks were reused.", "outcome"),
    "late_reads": ("Reads that ended after their lease: the text may be wrong.", "reader"),
}


@dataclass
class KVFlowStats(KVConnectorStats):
    """Outcomes of the loads, leases and questions to peers that have ended in one log interval, in JSON types."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, list[Any]] = {key: [] for key in (*_HISTOGRAMS, *_COUNTERS)}

    def add_results(self, results: Results) -> None:
        data = self.data
        for report in results.loaded.values():
            data["load_seconds"].append(report.total_s)
            data["load_wire_seconds"].append(report.seconds["post"] + report.seconds["wire"])
            data["load_bytes"].append(report.bytes)
            data["loads"].append(report.freshness)
        for _, error in results.failed.values():
            data["load_failures"].append(type(error).__name__ if error else _ABANDONED)
        data["leases"] += (str(outcome) for _, outcome in results.leases)
        data["prefix_questions"] += map(str, results.answers)
        data["offer_wait_seconds"] += results.offered.values()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, values in other.data.items():
            self.data[key] += values
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for vLLM's periodic log line, by their labels in that line."""
        seconds, sizes = sorted(self.data["load_seconds"]), self.data["load_bytes"]
        outcomes = Counter(self.data["leases"])
        return {
            "Loads": len(seconds),
            "Failed loads": len(self.data["load_failures"]),
            "Refused tickets": len(self.data["tickets_refused"]),
            "Late reads": len(self.data["late_reads"]),
            "Prefixes found": self.data["prefix_questions"].count(str(PrefixOutcome.FOUND)),
            "Prefixes shared": self.data["prefix_runs"].count("found"),
            "Median load (ms)": round(seconds[len(seconds) // 2] * 1e3, 3) if seconds else 0,
            "Longest load (ms)": round(seconds[-1] * 1e3, 3) if seconds else 0,
            "Loaded (MiB)": round(sum(sizes) / 2**20, 3),
            **{f"Leases {outcome}": outcomes[str(outcome)] for outcome in LeaseOutcome},
        }


class KVFlowPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics `vllm:kvflow_*`, with vLLM's labels, which distinguish engines."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            key: self._histogram_cls(
                name=f"vllm:kvflow_{key}", documentation=what, buckets=buckets, labelnames=labelnames
            )
            for key, (what, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            key: self._counter_cls(name=f"vllm:kvflow_{key}", documentation=what, labelnames=[*labelnames, label])
            for key, (what, label) in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, histogram in self._histograms.items():
            for value in transfer_stats_data[key]:
                histogram.labels(*labels).observe(value)
        for key, counter in self._counters.items():
            for reason in transfer_stats_data[key]:
                counter.labels(*labels, reason).inc()
