"""OwnerThread: a thread of kvflow's own that runs jobs in order and turns a crank between them.

NIXL agents are not safe to share between threads, and their calls may block for milliseconds, so every call is a job
for the one thread that owns them; copies, events and files have such a thread for the same reason. When it has done all
jobs that wait it turns the crank, which moves things on and says for how long it may sleep; a new job ends the sleep at
once. Progress therefore does not depend on the event loop.

The thread gets Python's lock as any thread does, and nothing on the loop or in the host's process is changed for it.
Where it waits for the lock is where Python's own calls, and NIXL's, have let go of it; so what a thread does for one
read is kept to few calls, and it tells what has ended before it lets go of the lock again. Beside a loop that is never
idle each wait may take a second: docs/decisions/0033-bursts-and-threads.md.

The loop side belongs to one event loop. The thread ends when the crank returns None, or raises; then every waiter is
told, and later calls raise TransportBroken.

When Python ends it also ends threads that still run, but a thread in C++ that then asks for Python's lock aborts the
process ("terminate called without an active exception"). So at the interpreter's exit each thread leaves the crank
first, and what the crank uses is never destroyed: bytes may still land there. A forked child has none of the threads,
and does not destroy what belongs to them either.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvflow import forks
from kvflow.errors import TransportBroken

T = TypeVar("T")
Job = Callable[[], None]

_HALT_S = 5.0
"""Time that the interpreter's exit waits for each thread to come back from a call of its library."""
_LIVE: weakref.WeakSet[OwnerThread] = weakref.WeakSet()


def _halt_all() -> None:
    """Have all threads end where they are, at the interpreter's exit; after the exit hooks of runtimes, which close."""
    running = [thread for thread in _LIVE if thread.alive]
    for thread in running:
        thread.halt()
    for thread in running:
        thread.join(_HALT_S)


atexit.register(_halt_all)


_SLEEP_MIN_S = 50e-6
_SLEEP_MAX_S = 1e-3
_SLEEP_SHARE = 8


def pause_s(idle_s: float) -> float:
    """Return how long a thread sleeps until it polls again, `idle_s` seconds after something last ended there."""
    return min(max(idle_s / _SLEEP_SHARE, _SLEEP_MIN_S), _SLEEP_MAX_S)


class OwnerThread:
    """Thread that runs jobs and a crank. `crank` returns how many seconds it may be left alone, or None to end."""

    def __init__(self, name: str, crank: Callable[[], float | None], on_death: Callable[[BaseException], None]) -> None:
        self._crank = crank
        self._on_death = on_death
        self._jobs: deque[Job] = deque()
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes of the thread, one for all jobs that came until it is taken: putting one costs a system call."""
        self._called = False
        """True while there is an entry that the thread has not taken yet."""
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Any]] = set()
        self._ended = asyncio.Event()
        self.alive = True
        """True while it takes jobs: until it is about to end."""
        self._cause: BaseException | None = None
        self._halted = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _LIVE.add(self)
        forks.watch(self)

    def called(self) -> bool:
        """True if jobs wait that the thread has not taken yet."""
        return bool(self._jobs)

    @property
    def orphaned(self) -> bool:
        """True if its loop is gone, so that nobody will ever give it a job, or wait for one."""
        return self._loop.is_closed()

    async def call(self, job: Callable[[], T]) -> T:
        """Run `job` on the thread and return its result. Cancelling stops the waiting, not the job."""
        done: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                settle = partial(done.set_result, job())
            except Exception as problem:  # noqa: BLE001 - handed to the caller, whoever it was
                settle = partial(done.set_exception, problem)
            self.run_on_loop(lambda: None if done.done() else settle())

        self.submit(run)
        self._waiting.add(done)
        try:
            return await done
        finally:
            self._waiting.discard(done)

    def submit(self, job: Job) -> None:
        """Run `job` on the thread some time soon; it must not raise. TransportBroken if the thread has ended."""
        if not self.alive:
            raise TransportBroken("the agent's thread has ended") from self._cause
        self._jobs.append(job)
        if not self._called:
            self._called = True
            self._calls.put(None)

    def run_on_loop(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the loop, from the thread, unless the loop is gone and nobody waits any more."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def ended(self) -> None:
        """Wait until the thread is gone."""
        await self._ended.wait()
        self._thread.join()

    def abandon(self, last_job: Job, wait_s: float) -> None:
        """Give the thread its last job, without the loop, from any thread, and wait up to `wait_s` for its end."""
        self._jobs.append(last_job)
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def halt(self) -> None:
        """Have the thread end after the job or the turn that it is in, with everything as it is; from any thread."""
        self.keep()
        self._halted = True
        self._calls.put(None)

    def join(self, wait_s: float) -> None:
        """Wait up to `wait_s` for the end of the thread; from another thread."""
        self._thread.join(wait_s)

    def forked(self) -> None:
        """See `forks`: the library's objects are kept for ever."""
        if self.alive:
            self.keep()

    def keep(self) -> None:
        """Never destroy this object, nor what its crank refers to, until the process ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            self._turn()
        except BaseException as error:  # noqa: BLE001 - the thread ends here; the loop gets the reason
            cause = error
        self.alive = False
        self.run_on_loop(lambda: self._finish(cause))

    def _turn(self) -> None:
        idle_s = self._crank()
        while idle_s is not None and not self._halted:
            try:
                self._calls.get(timeout=idle_s) if idle_s > 0 else self._calls.get_nowait()
            except queue.Empty:
                pass
            else:
                self._called = False  # before any job is done: one that comes now calls again
                if self._jobs:
                    self._jobs.popleft()()
                for _ in range(len(self._jobs)):  # what has come meanwhile: the crank may start something long
                    self._jobs.popleft()()
            if not self._halted:
                idle_s = self._crank()

    def _finish(self, cause: BaseException | None) -> None:
        self._cause = cause
        self._ended.set()
        for waiter in list(self._waiting):
            if not waiter.done():
                error = TransportBroken("the agent's thread ended before it answered")
                error.__cause__ = cause
                waiter.set_exception(error)
        if cause is not None:
            self._on_death(cause)
