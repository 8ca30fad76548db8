"""Lifetime: enters and leaves an async context manager in one task, for hosts that call each method in another task.

A task group or a runtime must be exited by the task that entered it. Ray Serve runs a replica's `__init__`, requests
and `__del__` in different tasks.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

from kvflow.errors import UsageError

OpenedT = TypeVar("OpenedT")


class Lifetime(Generic[OpenedT]):
    """An async context manager that a task enters at `start`, and the same task exits at `stop`.

    The module docstring of `kvflow.ray.replica` has an example.

    Args:
        context: the async context manager.
        name: name of the task, also used in errors.
    """

    def __init__(self, context: AbstractAsyncContextManager[OpenedT], name: str = "kvflow-lifetime") -> None:
        self._context = context
        self._name = name
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> OpenedT:
        """Start a task that enters the context, and wait until it has been entered.

        If the call is cancelled, the task exits the context before the call ends.

        Returns:
            The value that the context manager gives to `async with ... as`.

        Raises:
            UsageError: `start` was called before.
            Exception: any error of entering the context.
        """
        if self._task is not None:
            raise UsageError(f"{self._name}: a Lifetime is started once")
        opened: asyncio.Future[OpenedT] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold_open(opened), name=self._name)
        try:
            await asyncio.wait((opened, self._task), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._task.cancel()
            await asyncio.wait([self._task])
            raise
        if not opened.done():
            await self._task  # raises the error of entering the context
        return opened.result()

    async def stop(self) -> None:
        """Make the task exit the context, and wait for that.

        No effect if the context was never entered or has been exited. If cancelled, stop waiting; the context is exited
        in any case.

        Raises:
            Exception: any error of exiting the context, or the error that had ended the context before.
        """
        self._stopping.set()
        if self._task is not None:
            await asyncio.shield(self._task)

    def check(self) -> None:
        """Raise an error if the context has ended, for example because a background task failed.

        Raises:
            Exception: the error that ended the context.
            UsageError: the context was stopped or cancelled.
        """
        if self._task is not None and self._task.done():
            if self._task.cancelled():
                raise UsageError(f"{self._name} was cancelled")
            self._task.result()
            raise UsageError(f"{self._name} was stopped")

    async def _hold_open(self, opened: asyncio.Future[OpenedT]) -> None:
        async with self._context as value:
            opened.set_result(value)
            await self._stopping.wait()
