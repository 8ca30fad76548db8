"""A worker of the service: an engine, a kvflow runtime with its cache, and both workers of `disaggregated`.

Whether it prefills or decodes is the router's choice.

POST   /prefill               PrefillRequest -> Offered, or a Failure
DELETE /prefill/<request id>  withdraw the offer: these blocks will not be loaded
POST   /decode                DecodeRequest -> a line of JSON for each Step, or a Failure
GET    /health                200 if the worker can take requests
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec
import torch
from disaggregated.background import background_tasks
from disaggregated.decode import DecodeWorker
from disaggregated.failures import EXPECTED_ERRORS, failure_of
from disaggregated.groups import open_runtime
from disaggregated.messages import DecodeRequest, Offered, PrefillRequest
from disaggregated.prefill import PrefillWorker
from fastapi import FastAPI, Request, Response
from paged_engine import Engine, blocks_for
from paged_engine.weights import MODEL_NAME, load_model

import kvflow
from kvflow.prefix import Prefixes
from openai_server.failures import STATUS
from openai_server.http_io import (
    SHUTDOWN_TIMEOUT_S,
    BodyLimit,
    LiveStream,
    run_until_disconnect,
    serve_http,
)
from openai_server.metrics import WorkerMetrics, add_metrics
from openai_server.parameters import CACHE_TOKENS
from openai_server.replies import Reply, json_reply

BLOCK_SIZE = 16


def open_engine(name: str, checkpoint: Path) -> Engine:
    """Return an engine. Sets torch to one thread in this process."""
    torch.set_num_threads(1)  # all workers share the machine's cores, and with one thread sums are rounded alike
    return Engine(
        load_model(checkpoint),
        block_count=blocks_for(CACHE_TOKENS, BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        batch_size=8,
        shuffle_seed=name,  # scatter the blocks, differently in each engine, as after long use
    )


async def run_worker(options: argparse.Namespace) -> None:
    """Run a worker until SIGTERM or Ctrl-C. With `share_prefixes`, prefill workers load prefixes from each other."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    host = f"[{options.host}]" if ":" in options.host else options.host
    config = kvflow.Config(
        engine_id=options.name, listen=f"tcp://{host}:0", model=MODEL_NAME, drain_timeout_s=SHUTDOWN_TIMEOUT_S
    )
    prefixes = Prefixes() if options.share_prefixes else None
    parts = [] if prefixes is None else [prefixes]
    async with open_engine(options.name, options.checkpoint) as engine:
        metrics = WorkerMetrics(engine)
        async with open_runtime(config, engine, [metrics.kvflow], parts) as runtime, background_tasks() as start_task:
            metrics.kvflow.watch(runtime)
            prefill = PrefillWorker(engine, runtime, start_task, prefixes=prefixes)
            app = worker_app(engine, runtime, prefill, DecodeWorker(engine, runtime, start_task))
            add_metrics(app, metrics.registry)
            await serve_http(app, options.host, options.port)


def worker_app(engine: Engine, runtime: kvflow.Runtime, prefill: PrefillWorker, decode: DecodeWorker) -> FastAPI:
    """Return the application of a worker, which takes requests of both kinds."""
    app = FastAPI(title=f"worker {runtime.config.engine_id}")
    app.add_middleware(BodyLimit)

    async def compute(request: Request) -> Response:
        lease = await run_until_disconnect(request, prefill.prefill(PrefillRequest.read(await request.body())))
        return Response(Offered(ticket=lease.ticket.to_params()).written(), media_type="application/json")

    async def generate(request: Request) -> Response:
        generation = await run_until_disconnect(request, decode.decode(DecodeRequest.read(await request.body())))
        lines = (step.written() + b"\n" async for step in generation.steps())
        return LiveStream(lines, generation, media_type="application/x-ndjson")

    app.add_route("/prefill", compute, methods=["POST"])
    app.add_route("/decode", generate, methods=["POST"])

    @app.delete("/prefill/{request_id}", status_code=204)
    async def release(request_id: str) -> None:
        prefill.release(request_id)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        good = runtime.state is kvflow.RuntimeState.OPEN and not runtime.statistics().transport.unreachable
        statistics = engine.statistics()
        reply: Reply = {
            "name": runtime.config.engine_id,
            "pid": os.getpid(),
            "runtime": runtime.state,
            "address": runtime.introduce().address,
            "blocks_used": statistics.blocks_used,
            "blocks_free": statistics.blocks_free,
        }
        return json_reply(reply, 200 if good else 503)

    async def failed(_: Request, error: Exception) -> Response:
        failure = failure_of(error)
        return Response(failure.written(), STATUS[failure.kind].http, media_type="application/json")

    async def malformed(_: Request, error: Exception) -> Response:
        return Response(str(error), 422)

    app.add_exception_handler(msgspec.DecodeError, malformed)
    for kind in EXPECTED_ERRORS:
        app.add_exception_handler(kind, failed)
    return app
