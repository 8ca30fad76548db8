"""The thread of a blocking runtime. It runs an event loop, with a `kvflow.Runtime` on that loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeAlias, TypeVar

import uvloop

from kvflow import checks, forks, threads
from kvflow.errors import KVFlowError, Quarantine, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.logs import logger_of
from kvflow.runtime import runtime as asynchronous

logger = logger_of(__name__)

ResultT = TypeVar("ResultT")
Work: TypeAlias = Callable[[asynchronous.Runtime], Coroutine[Any, Any, ResultT]]
"""Function that is called with the runtime on the event loop, and returns a coroutine to run there."""


class LoopThread(threading.Thread):
    """The thread of a `blocking.Runtime`, with its event loop and its `kvflow.Runtime`.

    The thread has no reference to the `blocking.Runtime`, so that a dropped runtime is collected and noticed.

    Thread `kvflow-loop <engine>`: begun by opening a `blocking.Runtime`. It ends when the runtime closes or the loop
    dies. If the loop dies, waiting calls raise `RuntimeBroken`.
    """

    def __init__(self, runtime: asynchronous.Runtime, call_timeout_s: float) -> None:
        super().__init__(name=f"kvflow-loop {runtime.config.engine_id}", daemon=True)
        self.runtime = runtime
        self.call_timeout_s = call_timeout_s
        """Seconds that a call waits for this thread, in addition to the time that the call's work may take."""
        self.loop = uvloop.new_event_loop()
        self._closing = asyncio.Event()
        self._opened: Future[None] = Future()
        self._lock = threading.Lock()
        """Lock for `_ended` and for submitting work, so that no work is submitted after the end of the loop."""
        self._ended = False
        self._cause: BaseException | None = None
        self._futures: set[Future[Any]] = set()
        """Futures of unfinished work. The end of the thread sets an error on the futures that are left."""
        self._in_forked_child = False

    def open(self, closing_s: float) -> None:
        """Start the thread and wait until the runtime is open.

        `closing_s` is the maximum number of seconds for closing the runtime when the interpreter exits.
        """
        if self.ident is not None or self._ended:
            raise UsageError(f"a Runtime is opened once; this one is {self.runtime.state}")
        forks.register(self)
        with threads.starting(self.name):
            self.start()
        try:
            self._opened.result()
        except BaseException:  # also an interrupt of the calling thread
            self.call_soon(self._closing.set)
            self.join()
            raise
        # A NIXL agent must not be destroyed by the interpreter's exit while it reads.
        atexit.register(self.close, closing_s)

    def forked(self) -> None:
        """Record that this process is a forked child, which has neither the thread nor the loop. Take no lock.

        A thread of the parent process may have held the lock at the fork.
        """
        self._in_forked_child = True

    def stop(self) -> None:
        """Ask the loop to close the runtime and to end the thread, and return without waiting."""
        atexit.unregister(self.close)
        if self._in_forked_child:
            return
        if self.ident is None:
            self._ended = True
            self.loop.close()
        self.call_soon(self._closing.set)

    def close(self, timeout_s: float) -> None:
        """Close the runtime and wait until the thread has ended.

        TimeoutError if `timeout_s` has passed; RuntimeBroken if the loop had died.
        """
        if self._in_forked_child or self.ident is None:
            self.stop()
            return
        self.require_another_thread()
        self.call_soon(self._closing.set)
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError(f"{self.runtime!r} has not closed within {timeout_s} s")
        atexit.unregister(self.close)
        if self._cause is not None:
            error, self._cause = self._closed_error(), None
            raise error

    def submit(self, work: Work[ResultT]) -> Future[ResultT]:
        """Call `work` on the event loop, run the coroutine that it returns, and return the future of the result.

        The future is always completed, even if the loop dies. A cancelled future is done immediately.
        """
        if self._in_forked_child:
            raise UsageError("the runtime belongs to the process that this one was forked from")
        with self._lock:
            if self._ended:
                raise self._closed_error()
            if self.ident is None:
                raise UsageError("the runtime is not open yet: use it as `with Runtime(config) as rt`")
            future = asyncio.run_coroutine_threadsafe(self._carry_out(work), self.loop)
            self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def call(self, work: Work[ResultT], timeout_s: float | None) -> ResultT:
        """Call `work` on the event loop, run the coroutine that it returns, and return its result.

        After `timeout_s`, cancel the coroutine and raise TimeoutError.
        """
        self.require_another_thread()
        bound_s = checked_timeout(timeout_s)
        future = self.submit(work)
        try:
            return future.result(bound_s)
        finally:
            future.cancel()  # no effect if it is done

    def result_of(self, future: Future[ResultT], timeout_s: float | None) -> ResultT:
        """Return the result of `future`, which `submit` returned. TimeoutError if `timeout_s` has passed."""
        self.require_another_thread(future)
        return future.result(checked_timeout(timeout_s))

    def call_now(self, verb: Callable[[asynchronous.Runtime], ResultT]) -> ResultT:
        """Call the function `verb`, which never waits, with the runtime on the event loop, and return its result."""

        async def work(runtime: asynchronous.Runtime) -> ResultT:
            return verb(runtime)

        return self.call(work, self.call_timeout_s)

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Schedule `callback(*arguments)` on the event loop. Never waits. No effect if the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *arguments)

    def wait_safe(self, held: Quarantine, work: Work[None], timeout_s: float | None) -> None:
        """Wait until no byte can land in the blocks of `held`: a load, or other quarantined blocks.

        The coroutine function `work` waits for that on the loop. TimeoutError if `timeout_s` has passed; RuntimeBroken
        if the loop has ended while bytes may still land.
        """
        if held.safe:
            return
        try:
            self.call(work, timeout_s)
        except RuntimeClosed:  # the loop has been closed, or has died, meanwhile
            if not held.safe:
                raise RuntimeBroken(f"request {held.request_id!r}: its reads were not seen to stop") from None

    def require_another_thread(self, future: Future[Any] | None = None) -> None:
        """Raise UsageError if called on this thread, which would wait for itself. No error if `future` is done."""
        if threading.current_thread() is self and not (future is not None and future.done()):
            raise UsageError("called on the loop's own thread, which would wait for itself")

    def run(self) -> None:
        """Run the event loop until the runtime is closed, or until the loop dies. Body of the thread."""
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                try:
                    runner.run(self._main())
                except BaseException as cause:  # noqa: BLE001 - whatever killed the loop, all waiting calls raise it
                    self._end(cause)
                else:
                    self._end(None)
        finally:
            for future in list(self._futures):
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(self._closed_error())

    async def _main(self) -> None:
        async with self.runtime:
            self._opened.set_result(None)
            await self._closing.wait()

    def _end(self, cause: BaseException | None) -> None:
        """Refuse further work. `cause` is the error with which the loop died, or None if the runtime was closed.

        After this call asyncio's Runner cancels the work that is still on the loop.
        """
        with self._lock:
            self._ended = True
            if self._opened.done():
                self._cause = cause
        if self._cause is not None:
            logger.error("the loop of %s died", self.runtime.config.engine_id, exc_info=cause)
        elif cause is not None:
            self._opened.set_exception(cause)

    async def _carry_out(self, work: Work[ResultT]) -> ResultT:
        """Run the coroutine that `work` returns, as the body of a task on the event loop.

        Task `kvflow-blocking`: one for each call of a method of `blocking.Runtime`. It ends with the method's
        coroutine. If the coroutine raises an error, the method raises the same error.
        """
        task = asyncio.current_task()
        assert task is not None
        task.set_name("kvflow-blocking")
        try:
            await asyncio.sleep(0)  # if the future was cancelled before this turn, stop here
            return await work(self.runtime)
        except asyncio.CancelledError:
            if self._ended:  # the loop's end has cancelled the task, not the caller
                raise self._closed_error() from None
            raise

    def _closed_error(self) -> KVFlowError:
        if self._cause is None:
            return RuntimeClosed(f"{self.runtime!r} is closed")
        error = RuntimeBroken(f"the loop of {self.runtime.config.engine_id!r} died: {self._cause}")
        error.__cause__ = self._cause
        return error


def close_dropped(thread: LoopThread) -> None:
    """Begin to close a runtime whose `blocking.Runtime` was dropped. Give a ResourceWarning if the thread is alive."""
    if thread.is_alive():
        warnings.warn(f"{thread.runtime!r} was dropped without being closed", ResourceWarning, stacklevel=2)
    thread.stop()


def checked_timeout(timeout_s: float | None) -> float | None:
    """Return `timeout_s` if it is None (no limit) or a valid number of seconds, else raise UsageError."""
    checked_s: float | None = checks.checked(timeout_s, "timeout_s", checks.Timeout | None, UsageError)
    return checked_s
