"""The metrics at /metrics: of the front, requests as clients see them; of a worker, its blocks and kvflow's metrics."""

from __future__ import annotations

from fastapi import FastAPI, Response
from paged_engine import Engine
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvflow.observe.prometheus import PrometheusMetrics

REQUEST_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)


def add_metrics(app: FastAPI, registry: CollectorRegistry) -> None:
    """Add the endpoint /metrics, which shows `registry`."""

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class FrontMetrics:
    """Metrics of the front: requests, time to the first token, retries, workers that are up."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        prefix = "openai_server"
        self.requests = Counter(f"{prefix}_requests_total", "Requests by outcome", ["outcome"], registry=registry)
        self.first_token = Histogram(
            f"{prefix}_time_to_first_token_seconds",
            "From a request to its first token, streamed requests only",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.retries = Counter(f"{prefix}_retries_total", "Attempts that failed", ["kind"], registry=registry)
        self.up = Gauge(f"{prefix}_workers_up", "Workers that take requests", ["role"], registry=registry)


class WorkerMetrics:
    """Metrics of a worker: blocks and steps of its engine, and `kvflow`, the observer of its runtime."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.kvflow = PrometheusMetrics(self.registry)
        blocks = Gauge("openai_server_blocks", "Blocks of the KV cache", ["state"], registry=self.registry)
        blocks.labels("used").set_function(lambda: engine.statistics().blocks_used)
        blocks.labels("free").set_function(lambda: engine.statistics().blocks_free)
        steps = Gauge("openai_server_steps", "Steps of the model", registry=self.registry)
        steps.set_function(lambda: engine.statistics().steps)
        prefilled = Gauge("openai_server_tokens_prefilled", "Tokens of prompts computed here", registry=self.registry)
        prefilled.set_function(lambda: engine.statistics().tokens_prefilled)
