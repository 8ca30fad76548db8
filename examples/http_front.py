"""An HTTP front for one engine: lifespan, health, clients that hang up, SIGTERM.

    python examples/http_front.py prefill --port 8100
    python examples/http_front.py decode --port 8200

A POST of a prompt to /prefill returns its ticket, a POST of prompt and ticket to /decode loads the blocks. There is no
model: the prefill engine fills the blocks with the sum of the tokens, and the decode engine returns what it loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from openai_server.http_io import run_until_disconnect
from pydantic import BaseModel

import kvflow

BLOCKS, BLOCK_SIZE = 64, 16
KV_CACHES = {"layers.0": torch.zeros(2, BLOCKS, 2, BLOCK_SIZE, 8)}
DRAIN_TIMEOUT_S = 10.0


class Prompt(BaseModel):
    request_id: str
    tokens: list[int]
    ticket: dict[str, Any] | None = None


class Engine:
    """The runtime, the blocks that no request uses, and the tasks that give blocks back."""

    def __init__(self, role: str) -> None:
        config = kvflow.Config(engine_id=role, listen="tcp://127.0.0.1:0", drain_timeout_s=DRAIN_TIMEOUT_S)
        self.runtime = kvflow.Runtime(config)
        self._free, self._returning = list(range(BLOCKS)), set[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Open the runtime before the first request, close it after the last one."""
        async with self.runtime:
            layout = kvflow.CacheLayout.infer(KV_CACHES, order="HND", block_size=BLOCK_SIZE)
            await self.runtime.register_kv_caches(KV_CACHES, layout)
            yield
        await asyncio.gather(*self._returning)  # closing has ended all leases and loads

    def take(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_SIZE)
        if count > len(self._free):
            raise HTTPException(503, "no free blocks", headers={"Retry-After": "1"})
        return [self._free.pop() for _ in range(count)]

    def give_back(self, block_ids: list[int], reader: kvflow.Lease | kvflow.Load | None) -> None:
        """Give blocks back once no lease or load uses them, also if the request's task has been cancelled."""

        async def wait_and_return() -> None:
            if reader is not None:
                await (reader.wait() if isinstance(reader, kvflow.Lease) else reader.settled())
            self._free += block_ids

        task = asyncio.create_task(wait_and_return())
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def prefill(self, prompt: Prompt) -> dict[str, Any]:
        block_ids, lease = self.take(len(prompt.tokens)), None
        try:
            await asyncio.to_thread(compute, prompt.tokens, block_ids)
            offer_id = kvflow.secret_id(prompt.request_id)  # clients send the tickets
            request = kvflow.ServeRequest(offer_id, block_ids, len(prompt.tokens), prompt=prompt.tokens)
            lease = self.runtime.serve_blocks(request)
            return lease.ticket.to_params()
        finally:
            self.give_back(block_ids, lease)

    async def decode(self, prompt: Prompt) -> dict[str, Any]:
        block_ids = self.take(len(prompt.tokens))
        request = kvflow.LoadRequest(prompt.request_id, prompt.ticket or {}, block_ids, prompt=prompt.tokens)
        load = self.runtime.start_load(request)
        try:
            await load  # a client that hangs up cancels this task, and so the load
            return {"sum": float(KV_CACHES["layers.0"][0, block_ids[0], 0, 0, 0])}
        finally:
            load.cancel()
            self.give_back(block_ids, load)


def compute(tokens: list[int], block_ids: list[int]) -> None:
    KV_CACHES["layers.0"][:, block_ids] = float(sum(tokens))


def make_app(role: str) -> FastAPI:
    engine = Engine(role)
    app = FastAPI(lifespan=engine.lifespan)

    @app.get("/health")
    async def health() -> Response:
        """Return 200 while the engine takes requests; a load balancer stops sending them after a 503."""
        return Response(status_code=200 if engine.runtime.state is kvflow.RuntimeState.OPEN else 503)

    @app.post(f"/{role}")
    async def answer(prompt: Prompt, request: Request) -> dict[str, Any]:
        work = engine.prefill(prompt) if role == "prefill" else engine.decode(prompt)
        return await run_until_disconnect(request, work)

    @app.exception_handler(kvflow.errors.KVFlowError)
    async def failed(_: Request, error: kvflow.errors.KVFlowError) -> Response:
        """503: another attempt may succeed. 502, as after LeaseExpired: compute the prompt again."""
        status = 503 if error.retryable else 400 if error.blame is kvflow.errors.Blame.CALLER else 502
        return Response(type(error).__name__, status_code=status)  # the text is for this engine's log

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    # At SIGTERM uvicorn takes no new requests, lets open ones end, and ends the lifespan, which drains the runtime.
    uvicorn.run(make_app(options.role), port=options.port, timeout_graceful_shutdown=5)
