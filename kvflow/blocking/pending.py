"""Work under way on the loop of another thread, and how to reach that loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Self, TypeAlias, TypeVar

from kvflow import checks
from kvflow.errors import RuntimeClosed, UsageError
from kvflow.runtime import runtime as asynchronous

ResultT = TypeVar("ResultT")
Work: TypeAlias = Callable[[asynchronous.Runtime], Coroutine[Any, Any, ResultT]]
WAITS_FOR_ITSELF = "called on the loop's own thread, which would wait for itself"


class Pending(Generic[ResultT]):
    """Handle of work that is under way on the runtime's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._future: concurrent.futures.Future[ResultT] = concurrent.futures.Future()

    @property
    def done(self) -> bool:
        """True if `result` returns, or raises, at once."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> ResultT:
        """Wait, in the calling thread, for the work's result.

        Args:
            timeout_s: how long, in seconds; 0 does not wait, None waits as long as it takes.

        Returns:
            The work's own result.

        Raises:
            BaseException: as the work raised it.
            concurrent.futures.CancelledError: it was cancelled.
            TimeoutError: `timeout_s` has passed; the work goes on.
            UsageError: on the loop's own thread, unless it is done; or `timeout_s` is no time.
        """
        self._require_another_thread()
        return self._future.result(bound(timeout_s))

    def cancel(self) -> None:
        """Ask the work to end. It has ended when `done` says so."""
        tell(self._loop, self._cancel)

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Have a function called once the work is done.

        Args:
            callback: gets this handle, on the loop's thread, which it must not block; or here and now if it is done.
        """
        self._future.add_done_callback(lambda _: callback(self))

    def wait_done(self, timeout_s: float | None = None) -> bool:
        """Wait, in the calling thread, until it is done, in whatever way.

        Args:
            timeout_s: how long, as for `result`.

        Returns:
            True once it is done; False if `timeout_s` has passed.

        Raises:
            UsageError: as for `result`.
        """
        self._require_another_thread()
        return bool(concurrent.futures.wait([self._future], bound(timeout_s)).done)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> None:
        """Start the task, on the loop."""
        if self._cancelled:
            self._fail(concurrent.futures.CancelledError())
        else:
            self._task = self._loop.create_task(self._run(work), name="kvflow-blocking")
            # A task that is cancelled before its first step never runs, and would settle nobody.
            self._task.add_done_callback(lambda _: self._fail(self._end()))

    def _end(self) -> BaseException:
        """Error of work that was cancelled: by its handle, or since the runtime closes."""
        return concurrent.futures.CancelledError() if self._cancelled else RuntimeClosed("the runtime was closed")

    def _fail(self, error: BaseException) -> None:
        """End it, unless it has ended."""
        if not self._future.done():
            self._future.set_exception(error)

    def _require_another_thread(self) -> None:
        if asyncio._get_running_loop() is self._loop and not self.done:
            raise UsageError(WAITS_FOR_ITSELF)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> None:
        """Body of the task: hand its result, or its error, to who waits in another thread.

        Task `kvflow-blocking`: one for each call of a `blocking.Runtime`. Ends with its work. Whoever waits
        gets its error.
        """
        try:
            self._future.set_result(await work())
        except asyncio.CancelledError:
            self._fail(self._end())
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to who waits
            self._fail(error)


def bound(timeout_s: float | None) -> float | None:
    """A timeout that threads can wait for; UsageError for anything else."""
    return checks.timeout(timeout_s, "timeout_s", error=UsageError)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Have the loop call something soon. No effect on a closed loop, whose end has settled everybody."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
