"""Lifetime: one task owns an `async with`, for hosts that call each method in a task of its own.

A task group, and a runtime, are left by the task that entered them. Ray Serve runs a replica's `__init__`, its requests
and its `__del__` in different tasks.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from kvflow.errors import UsageError

OpenedT = TypeVar("OpenedT")


class Lifetime(Generic[OpenedT]):
    """Content of a context that a task of its own enters at `start` and leaves at `stop`.

    Args:
        context: is entered and left by one task.
        name: of the task, and in errors.
    """

    def __init__(self, context: AbstractAsyncContextManager[OpenedT], name: str = "kvflow-lifetime") -> None:
        self._context = context
        self._name = name
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> OpenedT:
        """Enter the context. Cancelling ends it and waits for that.

        Returns:
            What it opens.

        Raises:
            UsageError: it was started before.
            Exception: whatever entering raises.
        """
        if self._task is not None:
            raise UsageError(f"{self._name}: a Lifetime is started once")
        opened: asyncio.Future[OpenedT] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(opened), name=self._name)
        try:
            await asyncio.wait((opened, self._task), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if not opened.done():
            await self._task  # raises
        return opened.result()

    async def stop(self) -> None:
        """Leave the context, and wait until it is left. Does nothing if it was never entered; stopping twice is fine.

        Cancelling stops the waiting; the leaving goes on.

        Raises:
            Exception: whatever leaving raises, or what has ended it before.
        """
        self._stopping.set()
        if self._task is not None:
            await asyncio.shield(self._task)

    def check(self) -> None:
        """Raise what has ended the context by itself, such as a background task that failed; nothing while it lives.

        Raises:
            Exception: what has ended it.
            UsageError: it was stopped, or cancelled.
        """
        if self._task is not None and self._task.done():
            if self._task.cancelled():
                raise UsageError(f"{self._name} was cancelled")
            self._task.result()
            raise UsageError(f"{self._name} was stopped")

    async def _live(self, opened: asyncio.Future[OpenedT]) -> None:
        async with self._context as value:
            opened.set_result(value)
            await self._stopping.wait()
