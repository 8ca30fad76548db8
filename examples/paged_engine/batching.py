"""Decode steps of concurrent requests, computed together: continuous batching in a few lines.

Each step waits in a queue. While one batch is computed in the worker thread, other steps join the queue; when the batch
has ended, the first steps of the queue are the next batch. So a request joins a batch when it arrives and leaves when
it is done, and a single request never waits for others.

A running step cannot be stopped: cancelling its request waits until the batch has ended. A step still in the queue is
removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting(Generic[Step]):
    """A step in the queue, and the future of its token."""

    step: Step
    token: asyncio.Future[int]


class StepBatcher(Generic[Step]):
    """Runs `compute` in the executor, on one batch of at most `batch_size` steps at a time."""

    def __init__(
        self, compute: Callable[[Sequence[Step]], Sequence[int]], executor: Executor, *, batch_size: int
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: a batch needs room for at least one step, got {batch_size}")
        self._compute = compute
        self._executor = executor
        self._batch_size = batch_size
        self._queue: list[_Waiting[Step]] = []
        self._running: asyncio.Future[Sequence[int]] | None = None
        self.batch_count = 0
        """Number of batches started."""

    async def step(self, step: Step) -> int:
        """Compute a step in some batch, and return its token."""
        waiting = _Waiting(step=step, token=asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        if self._running is None:
            self._start()
        try:
            return await waiting.token
        except asyncio.CancelledError:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif self._running is not None:
                await wait_done(self._running)
            raise

    def _start(self) -> None:
        """Start a batch of the first steps in the queue. Do nothing if the queue is empty."""
        batch, self._queue = self._queue[: self._batch_size], self._queue[self._batch_size :]
        if not batch:
            self._running = None
            return
        self.batch_count += 1
        steps = [waiting.step for waiting in batch]
        try:
            self._running = asyncio.get_running_loop().run_in_executor(self._executor, self._compute, steps)
        except RuntimeError as error:  # the executor was shut down
            self._running = None
            _fail([*batch, *self._queue], error)
            self._queue = []
        else:
            self._running.add_done_callback(partial(self._end_batch, batch))

    def _end_batch(self, batch: Sequence[_Waiting[Step]], done: asyncio.Future[Sequence[int]]) -> None:
        error = done.exception()
        if error is not None:
            _fail(batch, error)
        else:
            for waiting, token in zip(batch, done.result(), strict=True):
                if not waiting.token.done():  # otherwise its request was cancelled
                    waiting.token.set_result(token)
        # In the next turn of the loop: requests that have just got a token can queue their next step first.
        asyncio.get_running_loop().call_soon(self._start)


def _fail(batch: Sequence[_Waiting[Step]], error: BaseException) -> None:
    for waiting in batch:
        if not waiting.token.done():
            waiting.token.set_exception(error)


async def wait_through_cancel(future: asyncio.Future[Result]) -> Result:
    """Return the future's result. If cancelled, wait for the future's end before raising CancelledError."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await wait_done(future)
        raise


async def wait_done(future: asyncio.Future[Result]) -> None:
    """Wait until `future` is done, even if cancelled several times. Raise CancelledError then, if cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
