"""A worker of the service: one of `disaggregated`'s two, an engine, a kvflow runtime that knows its cache, HTTP.

POST   /prefill               PrefillRequest -> PrefillReply, or a Failure
DELETE /prefill/<request id>  give up: nobody is going to load these blocks
POST   /decode                DecodeRequest -> a line of JSON for each Step, or a Failure
GET    /health                WorkerHealth
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from disaggregated.decode import DecodeWorker
from disaggregated.failures import EXPECTED_ERRORS
from disaggregated.groups import registered
from disaggregated.keeper import background_tasks
from disaggregated.messages import DecodeRequest, Failure, FailureKind, PrefillRequest
from disaggregated.prefill import PrefillWorker
from disaggregated.told import reported
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from paged_engine import Engine, blocks_for
from paged_engine.weights import MODEL_NAME, load_model
from pydantic import BaseModel

import kvflow
from kvflow.prefix import Prefixes
from openai_server.bodies import BodyLimits, BodyRefusedError
from openai_server.failures import STATUS
from openai_server.http_server import SHUTDOWN_TIMEOUT_S, serve_http
from openai_server.limits import CACHE_TOKENS
from openai_server.metrics import DecodeMetrics, PrefillMetrics, WorkerMetrics, add_metrics
from openai_server.responses import ClientGoneError, LiveStream, read_message, unless_gone
from openai_server.starts import listen_at

BLOCK_SIZE = 16
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


class WorkerHealth(BaseModel):
    """What a worker says of itself at /health."""

    name: str
    role: Literal["prefill", "decode"]
    pid: int
    runtime: str
    """kvflow's state; "open" is the healthy one."""
    blocks_used: int
    blocks_free: int
    introduction: dict[str, Any] | None = None
    """Of a prefill worker: a ticket that says where its blocks are to be had, for the router to make others of it."""


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


async def run_worker(settings: WorkerSettings) -> None:
    """The whole life of a worker."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    listening = listen_at(settings.host, settings.port)
    config = kvflow.Config(
        engine_id=settings.name, listen=f"tcp://{settings.host}:0", model=MODEL_NAME, drain_timeout_s=SHUTDOWN_TIMEOUT_S
    )
    async with open_engine(settings.name, settings.checkpoint) as engine, _app(settings, config, engine) as app:
        await serve_http(app, listening)


@asynccontextmanager
async def _app(settings: WorkerSettings, config: kvflow.Config, engine: Engine) -> AsyncIterator[FastAPI]:
    """The application of a worker of its role, whose loads and leases the metrics show."""
    kind = PrefillMetrics if settings.role == "prefill" else DecodeMetrics
    metrics = kind.of(engine)
    prefixes = Prefixes() if settings.share_prefixes else None
    parts = [prefixes] if prefixes is not None else []
    async with registered(config, engine, [metrics.kvflow], parts) as runtime, background_tasks() as start_task:
        metrics.kvflow.watch(runtime)
        if settings.role == "prefill":
            introduction = runtime.introduce()
            app = worker_app(settings, engine, runtime, metrics, introduction)
            yield prefill_app(app, PrefillWorker(engine, runtime, start_task, metrics, prefixes=prefixes))
        else:
            app = worker_app(settings, engine, runtime, metrics)
            yield decode_app(app, DecodeWorker(engine, runtime, start_task, metrics))


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
    app.add_middleware(BodyLimits, refusal=_body_refused)
    told = None if introduction is None else introduction.to_params()

    @app.get("/health")
    async def health(response: Response) -> WorkerHealth:
        """200 if the worker can be used; 503 says that it must be started again."""
        if runtime.state is not kvflow.RuntimeState.OPEN or runtime.statistics().transport.deaf:
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

    async def expected(_: Request, error: Exception) -> Response:
        failure = reported(error, metrics)
        return Response(failure.written(), status_code=STATUS[failure.kind].http, media_type="application/json")

    async def client_gone(_: Request, __: Exception) -> Response:
        metrics.failed("client_gone")
        return Response(status_code=499)  # nobody sees it

    for kind in EXPECTED_ERRORS:
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(ClientGoneError, client_gone)
    return app


def _body_refused(error: BodyRefusedError) -> Response:
    failure = Failure(kind=FailureKind.INVALID, message=str(error))
    return Response(failure.written(), status_code=error.http, media_type="application/json")


def prefill_app(app: FastAPI, worker: PrefillWorker) -> FastAPI:
    """Add the prefill worker's own endpoints."""

    async def prefill(request: Request) -> Response:
        body = await read_message(request, PrefillRequest)
        reply = await unless_gone(request, worker.prefill(body))
        return Response(reply.written(), media_type="application/json")

    app.add_route("/prefill", prefill, methods=["POST"])

    @app.delete("/prefill/{request_id}", status_code=204)
    async def release(request_id: str) -> None:
        worker.release(request_id)

    return app


def decode_app(app: FastAPI, worker: DecodeWorker) -> FastAPI:
    """Add the decode worker's own endpoint."""

    async def decode(request: Request) -> StreamingResponse:
        body = await read_message(request, DecodeRequest)
        generation = await unless_gone(request, worker.decode(body))
        return LiveStream(generation.lines(), generation, media_type="application/x-ndjson")

    app.add_route("/decode", decode, methods=["POST"])
    return app
