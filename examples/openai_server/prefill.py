"""The prefill worker: computes prompts and keeps their blocks until a decode worker has read them.

This is one of the two modules to read if you want to use kvflow in a server of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

from disaggregated.keeper import BlockKeeper, StartTask, background_tasks
from fastapi import FastAPI, Request, Response
from paged_engine import BlockId, Engine

import kvflow
from kvflow.errors import KVFlowError
from openai_server.http_server import serve_http
from openai_server.messages import FirstToken, Instant, PrefillReply, PrefillRequest, Step
from openai_server.metrics import PrefillMetrics
from openai_server.responses import read_message, unless_gone
from openai_server.starts import listen_at
from openai_server.worker import (
    WorkerSettings,
    introduction_of,
    open_engine,
    open_runtime,
    require_length,
    worker_app,
)


class PrefillWorker:
    """Answers the router's requests; open leases are background tasks."""

    def __init__(self, engine: Engine, runtime: kvflow.Runtime, start_task: StartTask, metrics: PrefillMetrics) -> None:
        self._engine = engine
        self._runtime = runtime
        self._keeper = BlockKeeper(runtime, start_task)
        self._metrics = metrics
        self._leases: dict[str, kvflow.Lease] = {}

    async def prefill(self, request: PrefillRequest) -> PrefillReply:
        """Compute the prompt, and offer its blocks as they are filled, for as long as the request may take.

        Cancelling it withdraws the offer and gives the blocks back, once the running step has ended.
        """
        try:
            require_length(self._engine, len(request.prompt), request.max_tokens)
            async with AsyncExitStack() as blocks:
                block_ids = await blocks.enter_async_context(self._engine.reserve(len(request.prompt)))
                if request.max_tokens == 1:
                    token = await self._engine.prefill(request.prompt, block_ids, sampling=request.sampling)
                else:
                    token = await self._offered(request, block_ids, blocks)
                self._metrics.tokens.inc(len(request.prompt))
        except BaseException as error:
            with suppress(KVFlowError):  # who waits for an offer need not; of one that was made its lease has said so
                self._runtime.decline(request.request_id, f"{type(error).__name__}: {error}")
            raise
        last = request.max_tokens == 1
        return PrefillReply(step=Step.of(token, eos_token_id=self._engine.eos_token_id, last=last))

    async def _offered(self, request: PrefillRequest, block_ids: Sequence[BlockId], blocks: AsyncExitStack) -> int:
        """Compute a prompt under a lease that grows with it; the first token, which its reader gets with the blocks."""
        lease = self._runtime.serve_blocks(
            kvflow.ServeRequest(
                request.request_id,
                block_ids=block_ids,
                num_tokens=len(request.prompt),
                ttl_s=request.deadline_s,
                computed_tokens=0,
                payload=True,
            )
        )
        self._leases[request.request_id] = lease
        try:
            token = await self._engine.prefill(
                request.prompt, block_ids, sampling=request.sampling, computed=lease.advance
            )
            lease.complete(FirstToken(token=token, computed_at=Instant.now()).model_dump_json().encode())
        except BaseException as error:
            lease.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            # However it ended no step uses the blocks any more, and a reader may until the lease has ended.
            self._keeper.keep(lease, blocks, ended=self._ended)
        return token

    def release(self, request_id: str) -> None:
        """Nobody is going to load these blocks. No effect if the lease has ended, or never was."""
        lease = self._leases.get(request_id)
        if lease is not None:
            lease.revoke()

    async def released(self, request_id: str) -> None:
        """Return when nobody reads the blocks of a prompt any more; cancelling it leaves them as they are."""
        lease = self._leases.get(request_id)
        if lease is not None:
            await lease

    def _ended(self, lease: kvflow.Lease, outcome: kvflow.LeaseOutcome) -> None:
        self._metrics.lease_ended(outcome)
        del self._leases[lease.request_id]


def prefill_app(app: FastAPI, worker: PrefillWorker) -> FastAPI:
    """Add the prefill worker's own endpoints."""

    async def prefill(request: Request) -> Response:
        body = await read_message(request, PrefillRequest)
        reply = await unless_gone(request, worker.prefill(body))
        return Response(reply.model_dump_json(), media_type="application/json")

    app.add_route("/prefill", prefill, methods=["POST"])

    @app.delete("/prefill/{request_id}", status_code=204)
    async def release(request_id: str) -> None:
        worker.release(request_id)

    return app


async def run_prefill(settings: WorkerSettings) -> None:
    """The whole life of a prefill worker."""
    listening = listen_at(settings.host, settings.port)
    async with open_engine(settings.name, settings.checkpoint) as engine:
        metrics = PrefillMetrics(
            blocks_used=lambda: engine.statistics().blocks_used, blocks_free=lambda: engine.statistics().blocks_free
        )
        async with open_runtime(settings, engine, metrics.kvflow) as runtime, background_tasks() as start_task:
            worker = PrefillWorker(engine, runtime, start_task, metrics)
            app = worker_app(settings, engine, runtime, metrics, introduction_of(runtime))
            app = prefill_app(app, worker)
            await serve_http(app, listening)
