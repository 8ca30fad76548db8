"""Tasks that outlive their request, and the rule by which every worker here frees blocks.

Blocks are reserved by an `async with engine.reserve(...)`, which stays open as long as anything may read or write them.
If a request ends while kvflow may still touch its blocks, it passes the reservation to a background task
(`AsyncExitStack.pop_all`). The task frees the blocks when that is safe, even if the request is cancelled several times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import kvflow

StartTask = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


@asynccontextmanager
async def background_tasks() -> AsyncIterator[StartTask]:
    """Yield a function that starts tasks. The end of the block cancels them; a task that fails ends the block."""
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
    """Load into blocks reserved by `blocks`, and return the report. Raises any error of the load.

    If bytes may still land after a failure or cancellation, a background task keeps the blocks reserved until they
    cannot.
    """
    load = runtime.start_load(request)
    try:
        return await load
    finally:
        if not load.safe:
            start_task(free_when_settled([load], blocks.pop_all()), f"quarantine {request.request_id}")


async def free_when_settled(loads: Sequence[kvflow.Load], blocks: AsyncExitStack) -> None:
    """Keep `blocks` reserved until no load can write to them."""
    async with blocks:
        for load in loads:
            await load.settled()
