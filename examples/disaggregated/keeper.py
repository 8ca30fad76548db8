"""Whose blocks are: the one rule that every worker here keeps, of the demo, the server and the replicas.

Blocks are reserved by an `async with engine.reserve(...)`, and whoever may still read or write them holds it open. A
request that ends while kvflow may still touch its blocks hands the reservation over to a background task
(`AsyncExitStack.pop_all`), which ends it when the blocks are safe. A request that is cancelled, even twice, does not
take that along.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import kvflow

StartTask = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
Ended = Callable[[kvflow.Lease, kvflow.LeaseOutcome], None]

RELEASE_TIMEOUT_S = 2.0  # a prefill worker that has not offered the prompt by then has been told to end


@asynccontextmanager
async def background_tasks() -> AsyncIterator[StartTask]:
    """Tasks that outlive the request that started them. One that fails ends the process: that is a bug."""
    tasks: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:

        def start(body: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
            task = group.create_task(body, name=name)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return task

        yield start
        for task in tasks:
            task.cancel()


class BlockKeeper:
    """Keeps blocks reserved while kvflow may touch them."""

    def __init__(self, runtime: kvflow.Runtime, start_task: StartTask) -> None:
        self._runtime = runtime
        self._start_task = start_task

    async def load(self, request: kvflow.LoadRequest, blocks: AsyncExitStack) -> kvflow.LoadReport:
        """Load into blocks that `blocks` has reserved; raises what the load does.

        After a failure or a cancellation bytes may still land: then the blocks stay reserved until they cannot, and the
        offer is given back, since nobody will read it.
        """
        load = self._runtime.start_load(request)
        try:
            return await load
        except BaseException:
            self._start_task(self._give_offer_back(request), f"release {request.request_id}")
            raise
        finally:
            if not load.safe:
                self._start_task(_freed_when_settled(load, blocks.pop_all()), f"quarantine {request.request_id}")

    def keep(self, lease: kvflow.Lease, blocks: AsyncExitStack, ended: Ended = lambda *_: None) -> asyncio.Task[None]:
        """Keep the blocks of a lease until it has ended, and no reader can take them for good any more."""
        return self._start_task(_freed_when_ended(lease, blocks.pop_all(), ended), f"lease {lease.request_id}")

    async def _give_offer_back(self, request: kvflow.LoadRequest) -> None:
        """Best effort: a lease that nobody ends runs out."""
        with suppress(kvflow.errors.KVFlowError, TimeoutError):
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                given = request.ticket
                for ticket in [given] if isinstance(given, kvflow.Ticket | Mapping) else given:
                    await self._runtime.release_blocks(ticket)


async def _freed_when_settled(load: kvflow.Load, blocks: AsyncExitStack) -> None:
    async with blocks:
        await load.settled()


async def _freed_when_ended(lease: kvflow.Lease, blocks: AsyncExitStack, ended: Ended) -> None:
    async with blocks:
        try:
            await lease
        finally:
            # No effect on a lease that has ended. One that is still open, because this worker ends, must not outlive
            # the reservation.
            lease.revoke()
            ended(lease, await lease)
