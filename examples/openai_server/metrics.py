"""Everything that /metrics shows, one registry per process: it ends with the process, as the runtime it shows does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from disaggregated.told import Told
from fastapi import FastAPI, Response
from paged_engine import Engine
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvflow import LeaseOutcome, LoadReport
from kvflow.observe.prometheus import PrometheusMetrics

REQUEST_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)
PHASE_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
# Fine around the two milliseconds that an idle machine should stay under, so that a median can be read from it.
OVERHEAD_BUCKETS_S = (*(step * 0.0002 for step in range(1, 21)), 0.005, 0.006, 0.008, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


def add_metrics(app: FastAPI, registry: CollectorRegistry) -> None:
    """Serve the registry at /metrics."""

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class RouterMetrics:
    """What clients experience, and what the router does about failures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "openai_server_requests_total", "Requests by how they ended", ["outcome"], registry=self.registry
        )
        self.first_token = Histogram(
            "openai_server_time_to_first_token_seconds",
            "From a request to its first token, streamed requests only",
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self._retries = Counter(
            "openai_server_retries_total", "Attempts that another one followed", ["kind"], registry=self.registry
        )
        self._up = Gauge("openai_server_workers_up", "Workers that take requests", ["role"], registry=self.registry)

    def request_ended(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def retried(self, kind: str) -> None:
        self._retries.labels(kind).inc()

    def watch_workers(self, role: str, up: Callable[[], int]) -> None:
        self._up.labels(role).set_function(up)


class WorkerMetrics(Told):
    """What both kinds of workers have. `kvflow` observes the worker's runtime: all metrics of kvflow's own."""

    def __init__(self, *, blocks_used: Callable[[], int], blocks_free: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.kvflow = PrometheusMetrics(self.registry)
        blocks = Gauge("openai_server_blocks", "Blocks of the KV cache", ["state"], registry=self.registry)
        blocks.labels("used").set_function(blocks_used)
        blocks.labels("free").set_function(blocks_free)
        self._tokens = Counter("openai_server_tokens_total", "Tokens computed", registry=self.registry)
        self._failures = Counter(
            "openai_server_failures_total", "Requests that came to nothing", ["kind"], registry=self.registry
        )

    @classmethod
    def of(cls, engine: Engine) -> Self:
        """Metrics that show the engine's blocks, too."""
        return cls(
            blocks_used=lambda: engine.statistics().blocks_used, blocks_free=lambda: engine.statistics().blocks_free
        )

    def computed(self, token_count: int) -> None:
        self._tokens.inc(token_count)

    def failed(self, kind: str) -> None:
        self._failures.labels(kind).inc()


class PrefillMetrics(WorkerMetrics):
    """Prompts and the leases of their blocks."""

    def __init__(self, *, blocks_used: Callable[[], int], blocks_free: Callable[[], int]) -> None:
        super().__init__(blocks_used=blocks_used, blocks_free=blocks_free)
        self._leases = Counter(
            "openai_server_leases_total", "Leases by how they ended", ["outcome"], registry=self.registry
        )

    def lease_ended(self, outcome: LeaseOutcome) -> None:
        self._leases.labels(outcome).inc()


class DecodeMetrics(WorkerMetrics):
    """Loads, and what stands between a computed prompt and the first decode step."""

    def __init__(self, *, blocks_used: Callable[[], int], blocks_free: Callable[[], int]) -> None:
        super().__init__(blocks_used=blocks_used, blocks_free=blocks_free)
        self._phases = Histogram(
            "openai_server_load_seconds",
            "kvflow's own report of each load, by phase",
            ["phase"],
            buckets=PHASE_BUCKETS_S,
            registry=self.registry,
        )
        self._bytes = Counter("openai_server_loaded_bytes_total", "Bytes of KV cache loaded", registry=self.registry)
        self._overhead = Histogram(
            "openai_server_hand_over_overhead_seconds",
            "From the end of the prompt's computation to the first decode step",
            buckets=OVERHEAD_BUCKETS_S,
            registry=self.registry,
        )

    def loaded(self, report: LoadReport) -> None:
        for phase, phase_s in report.seconds.items():
            self._phases.labels(phase).observe(phase_s)
        self._bytes.inc(report.bytes)

    def handed_over(self, elapsed_s: float) -> None:
        self._overhead.observe(elapsed_s)
