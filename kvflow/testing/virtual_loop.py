"""An event loop whose time is a number: when nothing is ready it jumps to the next timer.

Everything runs in one thread and in one order, so a test that waits for ten seconds takes microseconds and is the same
every time. There are no threads and no sockets; what needs one fails at once with NotImplementedError. Where an
ordinary loop would wait forever, because nothing is ready and no timer is set, this one raises `Deadlock` and names
the tasks that wait.

A `Life` stands for one process among several on the loop: what was started in its context can be frozen and thawed, as
by SIGSTOP and SIGCONT, or killed, after which nothing of it runs any more, not even a `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import heapq
import itertools
import threading
import weakref
from asyncio.base_events import BaseEventLoop
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, Unpack

from kvflow.checks import counted

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_ENDING_S = 60.0
_ROUNDS_MAX = 10

Awaited: TypeAlias = Generator[Any, None, T] | Coroutine[Any, Any, T]

_LIFE: ContextVar[Life | None] = ContextVar("kvflow_life", default=None)


class Deadlock(AssertionError):
    """Deadlock: nothing is ready and no timer is set, but the loop is not done. It would wait forever."""


class LifeState(enum.StrEnum):
    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


class Life:
    """Callbacks, tasks and timers that stop together. Start them with `context=life.context()`, or `life.task`."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.state = LifeState.RUNNING
        self.frozen_s = 0.0
        """Seconds for which it has been frozen so far, all times together, the present one not included."""
        self._loop = loop
        self._since_s = 0.0
        self._context = copy_context()
        self._context.run(_LIFE.set, self)
        self._waiting: deque[asyncio.Handle] = deque()
        """Handles that are due while nothing may run."""
        self._remains: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return f"<Life {self.name} {self.state}>"

    def context(self) -> Context:
        """A context that belongs to this life; each task needs one of its own."""
        return self._context.copy()

    def task(self, body: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task of this life."""
        return self._loop.create_task(body, name=name, context=self.context())

    def freeze(self) -> None:
        """Run nothing of it until `thaw`; timers that are due meanwhile are late."""
        if self.state is LifeState.RUNNING:
            self.state = LifeState.FROZEN
            self._since_s = self._loop.time()
            self._loop.stopped[self] = None

    def thaw(self) -> None:
        if self.state is LifeState.FROZEN:
            self.state = LifeState.RUNNING
            self.frozen_s += self._loop.time() - self._since_s
            self._resume()

    def kill(self) -> None:
        """Run nothing of it ever again. Its tasks are kept: one that is destroyed would run its `finally` clauses."""
        self._remains = self._loop.tasks(self)
        self.state = LifeState.DEAD
        self._loop.stopped[self] = None

    def bury(self) -> list[asyncio.Task[Any]]:
        """End a dead life's tasks by cancellation, after a test, so that none is destroyed while it is pending."""
        self.state = LifeState.RUNNING
        tasks = self._loop.tasks(self)
        for task in tasks:
            task.cancel()
        self._remains.clear()
        self._waiting = deque(call for call in self._waiting if not isinstance(call, asyncio.TimerHandle))
        self._resume()
        return tasks

    def _resume(self) -> None:
        self._loop.stopped.pop(self, None)
        self._loop._ready.extend(self._waiting)
        self._waiting.clear()


def life_of(context: Context) -> Life | None:
    """Life that a context belongs to."""
    return context.get(_LIFE)


def task_of(call: asyncio.Handle | None) -> asyncio.Task[Any] | None:
    """Task whose step a callback is; None for another callback, or none."""
    owner = None if call is None else getattr(call._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner if isinstance(owner, asyncio.Task) else None


class _Task(asyncio.Task[T]):
    """A task whose hash is its number: asyncio keeps tasks in sets, whose order must be the same in every run."""

    def __init__(self, body: Awaited[T], loop: VirtualLoop, name: object, context: Context) -> None:
        self._number = next(loop._numbers)
        self.life = context.get(_LIFE)
        named = str(name or f"task-{self._number}")
        super().__init__(body, loop=loop, name=named, context=context)  # type: ignore[arg-type, unused-ignore]

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(BaseEventLoop):
    """An event loop whose time is a number. Use it as `asyncio.Runner(loop_factory=new_virtual_loop)`.

    When nothing is ready it jumps to the next timer; where there is none it raises `Deadlock`. Threads and sockets it
    has not: what needs one fails at once with NotImplementedError.
    """

    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        """Callbacks run so far."""
        self.after_step: Callable[[], None] | None = None
        """Called after every callback; it must not raise."""
        self.ran: asyncio.Handle | None = None
        """For `after_step`: what ran."""
        self.stopped: dict[Life, None] = {}
        """Lives that are frozen or dead; they enter themselves."""
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._tasks: weakref.WeakSet[_Task[Any]] = weakref.WeakSet()
        self._thread = threading.current_thread()

    def __repr__(self) -> str:
        return f"<VirtualLoop at {self._now_s:.6f} s, {len(self._ready)} ready, {counted(len(self._timers), 'timer')}>"

    def time(self) -> float:
        """The virtual time now.

        Returns:
            Seconds since the loop was made.
        """
        return self._now_s

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer, as asyncio's.

        Args:
            when: Virtual seconds, as `time` counts them; one that is past is due at once.
            callback: What is called then.
            args: What it is called with.
            context: What it runs in, which says whose life it belongs to; None for the present one.

        Returns:
            The timer, to be cancelled.
        """
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback for the next turn, as asyncio does, but from the loop's own thread only.

        Args:
            callback: What is called.
            args: What it is called with.
            context: What it runs in, which says whose life it belongs to; None for the present one.

        Returns:
            The call, to be cancelled.

        Raises:
            RuntimeError: Called from another thread.
        """
        if threading.current_thread() is not self._thread:
            raise RuntimeError("a virtual loop has one thread: what other threads do has no place in its time")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Refused: there are no threads.

        Args:
            executor: Ignored.
            func: Ignored.
            args: Ignored.

        Returns:
            Nothing, ever.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("a virtual loop has one thread")

    def create_task(
        self, coro: Awaited[T], *, name: object = None, context: Context | None = None, eager_start: bool | None = None
    ) -> asyncio.Task[T]:
        """Start a task, as asyncio's.

        Args:
            coro: What it runs.
            name: Its name; None numbers it.
            context: What it runs in, which says whose life it belongs to; None for a copy of the present one.
            eager_start: Ignored. Python 3.14 and later may ask for it; it has no place in an order by time.

        Returns:
            The task; its hash is its number, so that sets of tasks have the same order in every run.
        """
        task = _Task(coro, self, name, copy_context() if context is None else context)
        self._tasks.add(task)
        return task

    def tasks(self, life: Life | None = None) -> list[asyncio.Task[Any]]:
        """Tasks that are not done.

        Args:
            life: Whose; None for all.

        Returns:
            The tasks, oldest first.
        """
        found = [task for task in self._tasks if not task.done() and (life is None or task.life is life)]
        return sorted(found, key=hash)

    @property
    def follows(self) -> asyncio.Handle | None:
        """What runs next, if that is known: nothing is waited for before."""
        return self._ready[0] if self._ready else None

    def end_all(self) -> None:
        """End, after a test, everything that is still there, dead lives included. Errors are dropped."""
        self.after_step = None
        self.set_exception_handler(lambda *_: None)
        for life in list(self.stopped):
            life.bury()
        self._timers.clear()
        for _ in range(_ROUNDS_MAX):  # what ends may begin something
            tasks = self.tasks()
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            ends = asyncio.gather(*tasks, return_exceptions=True)
            stop = self.call_later(_ENDING_S, ends.cancel)
            with contextlib.suppress(Deadlock, asyncio.CancelledError):
                self.run_until_complete(ends)
            stop.cancel()

    # --- called by the base class

    def _run_once(self) -> None:
        """Run the next callback, after moving time to it if need be."""
        if not self._ready:
            self._advance()
        call = self._ready.popleft()
        if call._cancelled:
            return
        if self.stopped:
            life = life_of(call._context)  # type: ignore[attr-defined]
            if life in self.stopped:
                life._waiting.append(call)
                return
        self.steps += 1
        call._run()
        if self.after_step is not None:
            self.ran = call
            self.after_step()

    def _asyncgen_firstiter_hook(self, generator: object) -> None:
        """Leave generators alone: they end with their users, those of a dead process never."""

    _asyncgen_finalizer_hook = _asyncgen_firstiter_hook

    def _advance(self) -> None:
        """Jump to the next timer; all that are due then become ready, in the order in which they were set."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            waiting = ", ".join(task.get_name() for task in self.tasks()) or "none"
            raise Deadlock(f"at {self._now_s:.6f} s nothing is ready and no timer is set; tasks that wait: {waiting}")
        self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            self._ready.append(heapq.heappop(timers)[2])


def new_virtual_loop() -> VirtualLoop:
    """Make a loop; what it lacks (sockets, threads, processes) asyncio answers with NotImplementedError.

    Returns:
        The loop, at time 0.
    """
    return VirtualLoop()


def run_virtual(body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time.

    Args:
        body: Not started yet.

    Returns:
        What it returns.

    Raises:
        Deadlock: It would wait forever; the error names the tasks that wait.
        Exception: What the coroutine raises.
    """
    with asyncio.Runner(loop_factory=new_virtual_loop) as runner:
        try:
            return runner.run(body)
        finally:
            loop = runner.get_loop()
            if isinstance(loop, VirtualLoop) and loop.stopped:
                loop.end_all()
