"""The prefill worker: computes prompts, and keeps their blocks until a decode worker has read them.

This is one of the two modules to read if you want to use kvflow in your own engine. The demo, the server and the Ray
Serve replicas all use this worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from paged_engine import BlockId, Engine

import kvflow
from disaggregated.background import StartTask
from disaggregated.failures import require_length
from disaggregated.groups import LayerGroups
from disaggregated.messages import FirstToken, PrefillRequest
from disaggregated.neighbours import Neighbours
from kvflow.prefix import Prefixes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """A prompt's lease, the task that computes the prompt, and the task that keeps its blocks while it is on offer."""

    lease: kvflow.Lease
    compute_task: asyncio.Task[int]
    keep_task: asyncio.Task[None]


class PrefillWorker:
    """Computes prompts in background tasks, each of which owns the blocks of its prompt."""

    def __init__(
        self, engine: Engine, runtime: kvflow.Runtime, start_task: StartTask, *, prefixes: Prefixes | None = None
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._start_task = start_task
        self._groups = LayerGroups(engine)
        self.neighbours = Neighbours(engine, runtime, prefixes, start_task) if prefixes is not None else None
        """The prompts that this worker shares with others; None without `prefixes`."""
        self._offers: dict[str, Offer] = {}

    async def prefill(self, request: PrefillRequest) -> kvflow.Lease:
        """Reserve blocks for a prompt, offer them, and compute the prompt in the background. Return the lease.

        The lease grows with the prompt, so the decode worker loads computed blocks while the rest is computed.
        Cancelling this call frees the blocks. Raises RequestTooLongError, OutOfBlocksError, and any error of
        `serve_blocks`.
        """
        require_length(self._engine, len(request.prompt), 0)
        async with AsyncExitStack() as blocks:
            block_ids = await blocks.enter_async_context(self._engine.reserve(len(request.prompt)))
            start = 0
            if self.neighbours is not None:
                start = await self.neighbours.pull(request, block_ids, blocks)
            lease = self._runtime.serve_blocks(
                kvflow.ServeRequest(
                    request.offer_id or kvflow.secret_id(request.request_id),
                    block_ids=self._groups.tables(block_ids, len(request.prompt)),
                    num_tokens=len(request.prompt),
                    ttl_s=request.deadline_s,
                    computed_tokens=start,
                    payload=True,
                )
            )
            name = f"prompt {request.request_id}"
            compute_task = asyncio.create_task(self._compute(request, lease, block_ids, start), name=name)
            keep_task = self._start_task(
                self._keep_blocks(request.request_id, lease, compute_task, blocks.pop_all()),
                f"lease {request.request_id}",
            )
        self._offers[request.request_id] = Offer(lease, compute_task, keep_task)
        return lease

    async def _compute(
        self, request: PrefillRequest, lease: kvflow.Lease, block_ids: Sequence[BlockId], start: int
    ) -> int:
        """Compute the prompt and return its first token, which the decode worker gets as the lease's payload."""
        try:
            token = await self._engine.prefill(
                request.prompt, block_ids, sampling=request.sampling, computed=lease.advance, start=start
            )
        except BaseException as error:
            lease.fail(f"{type(error).__name__}: {error}")
            raise
        lease.complete(FirstToken(token=token).written())
        if self.neighbours is not None:
            self.neighbours.add(request.prompt, block_ids)
        return token

    async def _keep_blocks(
        self, request_id: str, lease: kvflow.Lease, compute_task: asyncio.Task[int], blocks: AsyncExitStack
    ) -> None:
        """Keep the blocks reserved until the lease has ended and no step of the engine writes to them."""
        async with blocks:
            try:
                await lease
            finally:
                lease.revoke()  # no effect on a lease that has ended
                compute_task.cancel()
                await asyncio.wait([compute_task])
                await lease
                offer = self._offers.get(request_id)
                if offer is not None and offer.lease is lease:  # otherwise a later request has reused the id
                    del self._offers[request_id]
        if not compute_task.cancelled() and compute_task.exception() is not None:
            logger.error("%s was not computed", request_id, exc_info=compute_task.exception())

    async def wait_computed(self, request_id: str) -> int:
        """Wait until the prompt of an open lease is computed, and return its first token.

        Cancelling this call does not stop the computation.
        """
        return await asyncio.shield(self._offers[request_id].compute_task)

    def release(self, request_id: str) -> None:
        """Withdraw the offer of a prompt. No effect if its lease has ended."""
        offer = self._offers.get(request_id)
        if offer is not None:
            offer.lease.revoke()

    async def wait_released(self, request_id: str) -> None:
        """Wait until a prompt's blocks are free again. Cancelling this call only stops the waiting."""
        offer = self._offers.get(request_id)
        if offer is not None:
            await asyncio.wait([offer.keep_task])
