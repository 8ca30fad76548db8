"""Decode steps of concurrent requests, computed together: continuous batching in a few lines.

Each step waits in a queue. While one batch is computed in the worker thread, other steps join the queue; when the batch
has ended, the first steps of the queue are the next batch. So a request joins a batch when it arrives and leaves when
it is done, and a single request never waits for others.

A running step cannot be stopped: cancelling its request waits until the batch has ended. A step still in the queue is
removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")


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
        self._queue: dict[asyncio.Future[int], Step] = {}
        """The steps that wait, by the future of their token."""
        self._running: asyncio.Task[None] | None = None
        self.batch_count = 0
        """Number of batches started."""

    async def step(self, step: Step) -> int:
        """Compute a step in some batch, and return its token."""
        token: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue[token] = step
        if self._running is None:
            self._start()
        try:
            return await token
        except asyncio.CancelledError:
            if self._queue.pop(token, None) is None and self._running is not None:
                await wait_through_cancel(self._running)
            raise

    def _start(self) -> None:
        """Start a batch of the first steps in the queue. Do nothing if the queue is empty."""
        batch = {token: self._queue.pop(token) for token in list(self._queue)[: self._batch_size]}
        self._running = asyncio.create_task(self._run(batch), name="batch") if batch else None

    async def _run(self, batch: Mapping[asyncio.Future[int], Step]) -> None:
        loop = asyncio.get_running_loop()
        self.batch_count += 1
        try:
            results = await wait_through_cancel(
                loop.run_in_executor(self._executor, self._compute, list(batch.values()))
            )
        except Exception as error:  # noqa: BLE001 - it goes to all requests of the batch
            for token in batch:
                if not token.done():  # otherwise its request was cancelled
                    token.set_exception(error)
        else:
            for token, result in zip(batch, results, strict=True):
                if not token.done():
                    token.set_result(result)
        # In the next turn of the loop: requests that have just got a token can queue their next step first.
        loop.call_soon(self._start)


async def wait_through_cancel(future: asyncio.Future[Result]) -> Result:
    """Return the future's result. If cancelled, even several times, wait for its end before raising CancelledError."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return future.result()
