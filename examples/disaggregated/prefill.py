"""The prefill worker: computes prompts and keeps their blocks until a decode worker has read them.

This is one of the two modules to read if you want to use kvflow in an engine of your own; the demo, the server and the
replicas of Ray Serve all have this worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from paged_engine import BlockId, Engine

import kvflow
from disaggregated.failures import require_length
from disaggregated.groups import LayerGroups
from disaggregated.keeper import BlockKeeper, StartTask
from disaggregated.messages import FirstToken, Instant, PrefillReply, PrefillRequest, Step
from disaggregated.neighbours import Neighbours
from disaggregated.told import Told
from kvflow.errors import KVFlowError
from kvflow.prefix import Prefixes


@dataclass(frozen=True, slots=True)
class Offer:
    """The lease of a prompt's blocks, and the task that ends when they were given back."""

    lease: kvflow.Lease
    given_back: asyncio.Task[None]

    async def released(self) -> kvflow.LeaseOutcome:
        """How the lease ended, once its blocks were given back; cancelling it leaves them as they are."""
        await asyncio.shield(self.given_back)
        return await self.lease


class PrefillWorker:
    """Computes what it is asked; open leases are background tasks."""

    def __init__(
        self,
        engine: Engine,
        runtime: kvflow.Runtime,
        start_task: StartTask,
        told: Told,
        *,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._keeper = BlockKeeper(runtime, start_task)
        self._told = told
        self._groups = LayerGroups(engine)
        self._neighbours = Neighbours(engine, runtime, prefixes, self._keeper) if prefixes is not None else None
        self._leases: dict[str, kvflow.Lease] = {}
        self.offers: dict[str, Offer] = {}
        """By request id: of prompts that are computed, and whose blocks are not given back yet."""

    async def prefill(self, request: PrefillRequest) -> PrefillReply:
        """Compute the prompt, and offer its blocks as they are filled, for as long as the request may take.

        Cancelling it withdraws the offer and gives the blocks back, once the running step has ended.
        """
        try:
            return await self._prefilled(request)
        except BaseException as error:
            with suppress(KVFlowError):  # who waits for an offer need not; of one that was made its lease has said so
                self._runtime.decline(request.request_id, f"{type(error).__name__}: {error}")
            raise

    async def _prefilled(self, request: PrefillRequest) -> PrefillReply:
        require_length(self._engine, len(request.prompt), request.max_tokens)
        async with AsyncExitStack() as blocks:
            block_ids = await blocks.enter_async_context(self._engine.reserve(len(request.prompt)))
            start = await self._pulled(request, block_ids, blocks)
            if request.max_tokens == 1:
                token = await self._engine.prefill(request.prompt, block_ids, sampling=request.sampling, start=start)
            else:
                token = await self._offered(request, block_ids, blocks, start)
            if self._neighbours is not None:
                self._neighbours.computed(request.prompt, block_ids)
            self._told.computed(len(request.prompt) - start)
        last = request.max_tokens == 1
        return PrefillReply(step=Step.of(token, eos_token_id=self._engine.eos_token_id, last=last))

    async def _pulled(self, request: PrefillRequest, block_ids: Sequence[BlockId], blocks: AsyncExitStack) -> int:
        """How many of the prompt's tokens a neighbour has given."""
        if self._neighbours is None:
            return 0
        self._neighbours.reserved(block_ids)
        return await self._neighbours.pull(request, block_ids, blocks)

    async def _offered(
        self, request: PrefillRequest, block_ids: Sequence[BlockId], blocks: AsyncExitStack, start: int
    ) -> int:
        """Compute a prompt under a lease that grows with it; the first token, which its reader gets with the blocks."""
        lease = self._runtime.serve_blocks(
            kvflow.ServeRequest(
                request.request_id,
                block_ids=self._groups.tables(block_ids, len(request.prompt)),
                num_tokens=len(request.prompt),
                ttl_s=request.deadline_s,
                computed_tokens=start,
                payload=True,
            )
        )
        self._leases[request.request_id] = lease
        try:
            token = await self._engine.prefill(
                request.prompt, block_ids, sampling=request.sampling, computed=lease.advance, start=start
            )
            lease.complete(FirstToken(token=token, computed_at=Instant.now()).written())
        except BaseException as error:
            lease.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            # However it ended no step uses the blocks any more, and a reader may until the lease has ended.
            self.offers[request.request_id] = Offer(lease, self._keeper.keep(lease, blocks, ended=self._ended))
        return token

    def release(self, request_id: str) -> None:
        """Nobody is going to load these blocks. No effect if the lease has ended, or never was."""
        lease = self._leases.get(request_id)
        if lease is not None:
            lease.revoke()

    async def released(self, request_id: str) -> None:
        """Return when nobody reads the blocks of a prompt any more; cancelling it leaves them as they are."""
        offer = self.offers.get(request_id)
        if offer is not None:
            await offer.released()

    def _ended(self, lease: kvflow.Lease, outcome: kvflow.LeaseOutcome) -> None:
        self._told.lease_ended(outcome)
        del self._leases[lease.request_id], self.offers[lease.request_id]
