"""Tasks that outlive the request that started them, and the one rule for blocks that every worker here follows.

Blocks are reserved by an `async with engine.reserve(...)`. Whatever may still read or write them keeps it open: a
request that ends while kvflow may still touch its blocks hands the reservation over to a background task
(`AsyncExitStack.pop_all`), which gives the blocks back when that is safe, however often the request is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import kvflow

StartTask = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


@asynccontextmanager
async def background_tasks() -> AsyncIterator[StartTask]:
    """Yield a function that starts tasks, which are cancelled at the end. One that fails is a bug: the process ends."""
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


async def load_into(
    blocks: AsyncExitStack, runtime: kvflow.Runtime, request: kvflow.LoadRequest, start_task: StartTask
) -> kvflow.LoadReport:
    """Load into blocks that `blocks` has reserved. Raises what the load does.

    After a failure or a cancellation bytes may still land: the blocks then stay reserved until they cannot.
    """
    load = runtime.start_load(request)
    try:
        return await load
    finally:
        if not load.safe:
            start_task(_freed_when_settled(load, blocks.pop_all()), f"quarantine {request.request_id}")


async def _freed_when_settled(load: kvflow.Load, blocks: AsyncExitStack) -> None:
    async with blocks:
        await load.settled()
