"""Errands: work that a task of its own carries to its end, even if who waits for it is cancelled.

A host that ends cancels all tasks, the errand's own included. So the steps of an errand hold cancellation back
(`carry_out`): each step is bounded, and can be begun anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

ResultT = TypeVar("ResultT")


class Errand:
    """One errand, which may be run again once it is over. Belongs to one event loop."""

    def __init__(self, work: Callable[[], Coroutine[None, None, None]], name: str) -> None:
        self._work = work
        self._name = name
        self._task: asyncio.Task[None] | None = None

    async def done(self) -> None:
        """Begin it, unless it is under way, and wait for it; raises what it raises. Cancelling stops the waiting."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        while True:
            running = self._running()
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                if not running.cancelled() or (task is not None and task.cancelling() > cancels):
                    raise

    async def over(self) -> None:
        """Wait until it is not under way, however it ends. Cancelling stops the waiting."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _running(self) -> asyncio.Task[None]:
        if self._task is None or self._task.done():  # one that was cancelled before its first step is begun anew
            self._task = asyncio.create_task(self._work(), name=self._name)
            self._task.add_done_callback(seen)
        return self._task


async def carry_out(step: Callable[[], Awaitable[ResultT]], on_cancel: Callable[[], None] = lambda: None) -> ResultT:
    """Carry one step of an errand to its end: if it is cancelled it is begun anew, and `on_cancel` is called."""
    while True:
        try:
            return await step()
        except asyncio.CancelledError:
            on_cancel()
            task = asyncio.current_task()
            assert task is not None, "an errand is a task"
            task.uncancel()


def seen(task: asyncio.Future[None]) -> None:
    """Mark the error of a task as seen: who waits gets it, it is logged, and nobody may wait."""
    if not task.cancelled():
        task.exception()
