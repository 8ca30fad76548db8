"""OwnerThread: a thread that runs jobs in order and, between jobs, calls a function `step`.

NIXL agents must not be shared between threads, and their calls may block for milliseconds. So every call is a job for
the one thread that owns the agents. Copies, device events and the files of the block store have threads of this kind,
too. `step` makes progress with reads or copies, and returns how long the thread may sleep; a new job ends the sleep. So
reads and copies progress even if the event loop is busy.

After each call that has released the GIL, the thread may have to wait for the GIL. So each read takes few calls, and
the thread reports ended reads before its next such call. Beside a loop that is never idle each wait may take a second:
docs/decisions/0033-bursts-and-threads.md.

The thread ends when `step` returns None or raises. Then every `call` that waits raises an error, and later calls raise
TransportBroken.

At exit Python ends the threads that still run, which a thread inside NIXL has not survived (nixl 1.5.1). So at the
interpreter's exit each thread first returns from `step`, and the objects that `step` uses are never destroyed, since
bytes may still land in them. A forked child, which has no such thread, does not destroy them either.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvflow import forks, threads
from kvflow.errors import TransportBroken

T = TypeVar("T")
Job = Callable[[], None]

_HALT_S = 5.0
"""Seconds for which the interpreter's exit waits for one `OwnerThread` to end."""
_LIVE_THREADS: weakref.WeakSet[OwnerThread] = weakref.WeakSet()


def _halt_all() -> None:
    """Make every `OwnerThread` end after its current job or `step` call, and wait for each at most `_HALT_S`.

    Called at the interpreter's exit, after the exit hooks that close runtimes.
    """
    running = [thread for thread in _LIVE_THREADS if thread.alive]
    for thread in running:
        thread.halt()
    for thread in running:
        thread.join(_HALT_S)


atexit.register(_halt_all)


_SLEEP_MIN_S = 50e-6
_SLEEP_MAX_S = 1e-3
_SLEEP_SHARE = 8


def pause_s(idle_s: float) -> float:
    """Return the seconds to sleep before the next poll, which grow with `idle_s`, the seconds since the last event."""
    return min(max(idle_s / _SLEEP_SHARE, _SLEEP_MIN_S), _SLEEP_MAX_S)


class OwnerThread:
    """A thread that runs jobs in order, and calls `step` between jobs.

    `step` returns the seconds that the thread may sleep if no job comes, or None to end the thread. If `step` or a job
    raises, `on_death` is called on the event loop with the error. ConfigError if the system starts no further thread.
    """

    def __init__(self, name: str, step: Callable[[], float | None], on_death: Callable[[BaseException], None]) -> None:
        self._step = step
        self._on_death = on_death
        self._jobs: deque[Job] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Queue on which the thread sleeps until an item arrives. A `put` costs a system call, so `submit` puts at most
        one item."""
        self._wake_pending = False
        """True while `_wakes` holds an item that the thread has not taken yet."""
        self._wakes_at_s = 0.0
        """Time (`time.monotonic`) at which the thread wakes by itself; 0 while it is awake."""
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._ended = asyncio.Event()
        self.alive = True
        """True while the thread accepts jobs."""
        self._cause: BaseException | None = None
        self._halted = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with threads.starting(name):
            self._thread.start()
        _LIVE_THREADS.add(self)
        forks.register(self)

    def has_jobs(self) -> bool:
        """Return True if there are submitted jobs that the thread has not begun."""
        return bool(self._jobs)

    @property
    def loop_closed(self) -> bool:
        """True if the event loop is closed, so that no further job can come."""
        return self._loop.is_closed()

    async def call(self, job: Callable[[], T]) -> T:
        """Run `job` on the thread and return its result or raise its error.

        If cancelled, stop waiting; the job still runs.
        """
        done: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                settle = partial(done.set_result, job())
            except Exception as problem:  # noqa: BLE001 - raised in the caller
                settle = partial(done.set_exception, problem)
            self.run_on_loop(lambda: None if done.done() else settle())

        self.submit(run)
        self._waiting.add(done)
        try:
            return await done
        finally:
            self._waiting.discard(done)

    def submit(self, job: Job, *, within_s: float = 0.0) -> None:
        """Queue `job`, which must not raise, to run on the thread. Raises TransportBroken if the thread has ended.

        `within_s`: seconds that the job may wait. If the thread wakes by itself before that, this call does not wake
        the thread.
        """
        if not self.alive:
            raise TransportBroken(f"the thread {self._thread.name} has ended") from self._cause
        self._jobs.append(job)
        if within_s and self._wakes_at_s <= time.monotonic() + within_s:
            return
        if not self._wake_pending:
            self._wake_pending = True
            self._wakes.put(None)

    def run_on_loop(self, callback: Callable[[], None]) -> None:
        """Schedule `callback` on the event loop. May be called on any thread. No effect if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def ended(self) -> None:
        await self._ended.wait()
        self._thread.join()

    def abandon(self, last_job: Job, wait_s: float) -> None:
        """Queue `last_job`, which must make `step` end the thread, and wait up to `wait_s` for the end of the thread.

        For use after the event loop has ended. May be called on any thread; a call on the ending thread does not wait.
        """
        self._jobs.append(last_job)
        self._wakes.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def halt(self) -> None:
        """Make the thread end after its current job or `step` call, without cleaning up.

        May be called on any thread.
        """
        self.keep_forever()
        self._halted = True
        self._wakes.put(None)

    def join(self, wait_s: float) -> None:
        """Wait up to `wait_s` for the end of the thread. Do not call this on the thread itself."""
        self._thread.join(wait_s)

    def forked(self) -> None:
        """In a forked child, which does not have the thread, keep the objects that `step` uses alive forever."""
        if self.alive:
            self.keep_forever()

    def keep_forever(self) -> None:
        """Keep this object, and every object that `step` refers to, alive until the process ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            self._run_jobs()
        except BaseException as error:  # noqa: BLE001 - the thread ends here; the loop gets the reason
            cause = error
        self.alive = False
        self.run_on_loop(lambda: self._finish(cause))

    def _run_jobs(self) -> None:
        idle_s = self._step()
        while idle_s is not None and not self._halted:
            self._wakes_at_s = time.monotonic() + idle_s
            try:
                # A job that came before the line above has perhaps not woken the thread.
                self._wakes.get(timeout=idle_s) if idle_s > 0 and not self._jobs else self._wakes.get_nowait()
            except queue.Empty:
                pass
            else:
                self._wake_pending = False  # before any job runs: a job submitted now wakes the thread again
            self._wakes_at_s = 0.0
            if self._jobs:
                self._jobs.popleft()()
            for _ in range(len(self._jobs)):  # jobs that came meanwhile run first: a step may take long
                self._jobs.popleft()()
            if not self._halted:
                idle_s = self._step()

    def _finish(self, cause: BaseException | None) -> None:
        self._cause = cause
        self._ended.set()
        for waiter in list(self._waiting):
            if not waiter.done():
                error = TransportBroken(f"the thread {self._thread.name} ended before it answered")
                error.__cause__ = cause
                waiter.set_exception(error)
        if cause is not None:
            self._on_death(cause)
