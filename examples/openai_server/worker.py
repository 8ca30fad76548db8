"""What both kinds of workers have: an engine, a kvflow runtime that knows its cache, HTTP."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from paged_engine import Engine, blocks_for
from paged_engine.weights import MODEL_NAME, load_model

import kvflow
from kvflow.observe.prometheus import PrometheusMetrics
from openai_server.failures import EXPECTED_ERRORS, STATUS, RequestTooLongError, failure_of
from openai_server.http_server import SHUTDOWN_TIMEOUT_S
from openai_server.messages import Failure, FailureKind, WorkerHealth
from openai_server.metrics import WorkerMetrics, add_metrics
from openai_server.responses import ClientGoneError

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
# Some 180 MiB: 30 layers, K and V, 3 heads of 64 float32 values for each token.
CACHE_TOKENS = 4096
BATCH_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Everything a worker is told when it is started."""

    name: str
    role: Literal["prefill", "decode"]
    host: str
    port: int
    checkpoint: Path
    share_prefixes: bool = False
    """Whether prefill workers load prefixes from each other."""


def open_engine(name: str, checkpoint: Path) -> Engine:
    """An engine; torch takes one thread for all engines of this process."""
    # All workers share the machine's cores, and one thread gives the same sums everywhere.
    torch.set_num_threads(1)
    return Engine(
        load_model(checkpoint),
        block_count=blocks_for(CACHE_TOKENS, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        batch_size=BATCH_SIZE,
        # Scattered blocks, different ones in each engine: what a real engine's cache looks like.
        shuffle_seed=name,
    )


@asynccontextmanager
async def open_runtime(
    settings: WorkerSettings, engine: Engine, metrics: PrometheusMetrics
) -> AsyncIterator[kvflow.Runtime]:
    """A runtime that knows the engine's cache, and whose loads and leases the metrics show.

    It is closed before the engine: it uses the engine's memory.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    config = kvflow.Config(
        engine_id=settings.name, listen=f"tcp://{settings.host}:0", model=MODEL_NAME, drain_timeout_s=SHUTDOWN_TIMEOUT_S
    )
    async with kvflow.Runtime(config, observers=[metrics]) as runtime:
        metrics.watch(runtime)
        layout = kvflow.CacheLayout.infer(engine.kv_caches, order="HND", block_size=engine.block_size)
        await runtime.register_kv_caches(engine.kv_caches, layout)
        yield runtime


def require_length(engine: Engine, prompt_count: int, max_tokens: int) -> None:
    """RequestTooLongError for what no worker can hold: all engines have the same room."""
    token_count = prompt_count + max_tokens
    if token_count > engine.token_count_max:
        raise RequestTooLongError(
            f"This model's maximum context length is {engine.token_count_max} tokens. However, you requested "
            f"{token_count} tokens ({prompt_count} in the prompt, {max_tokens} in the completion)."
        )


def reported(error: Exception, metrics: WorkerMetrics) -> Failure:
    """What the router is told of an error, once it has been counted; logged if it is one that should not be."""
    failure = failure_of(error)
    metrics.failed(failure.kind)
    if failure.kind is FailureKind.WORKER_FAILED:
        logger.error("a request has failed, and should not have: %s", failure.message, exc_info=error)
    return failure


def introduction_of(runtime: kvflow.Runtime) -> kvflow.Ticket:
    """A ticket of nothing: where this worker's blocks are to be had."""
    return runtime.serve_blocks(kvflow.ServeRequest("introduction", block_ids=[], num_tokens=0)).ticket


def worker_app(
    settings: WorkerSettings,
    engine: Engine,
    runtime: kvflow.Runtime,
    metrics: WorkerMetrics,
    introduction: kvflow.Ticket | None = None,
) -> FastAPI:
    """The application that both kinds of workers start from; the `introduction` is for /health to tell."""
    app = FastAPI(title=f"{settings.role} worker {settings.name}")
    add_metrics(app, metrics.registry)
    told = None if introduction is None else introduction.to_params()

    @app.get("/health")
    async def health(response: Response) -> WorkerHealth:
        """200 if the worker can be used; 503 says that it must be started again."""
        if runtime.state is not kvflow.RuntimeState.OPEN:
            response.status_code = 503
        statistics = engine.statistics()
        return WorkerHealth(
            name=settings.name,
            role=settings.role,
            pid=os.getpid(),
            runtime=runtime.state,
            blocks_used=statistics.blocks_used,
            blocks_free=statistics.blocks_free,
            introduction=told,
        )

    async def expected(_: Request, error: Exception) -> JSONResponse:
        failure = reported(error, metrics)
        return JSONResponse(failure.model_dump(), status_code=STATUS[failure.kind].http)

    async def client_gone(_: Request, __: Exception) -> Response:
        metrics.failed("client_gone")
        return Response(status_code=499)  # nobody sees it

    for kind in EXPECTED_ERRORS:
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(ClientGoneError, client_gone)
    return app
