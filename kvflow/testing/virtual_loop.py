"""An event loop in virtual time: when no callback is ready, the loop's time jumps to the time of the next timer.

All code runs in one thread and in a fixed order, so a test that waits for ten seconds takes microseconds and runs the
same way every time.

A loop may have several simulated processes (`SimProcess`). All tasks and callbacks of a process can be frozen and
thawed, as by SIGSTOP and SIGCONT, or killed. After a kill no code of the process runs, not even a `finally`.
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

_PROCESS: ContextVar[SimProcess | None] = ContextVar("kvflow_life", default=None)


class Deadlock(AssertionError):
    """Error: the loop would wait forever. No callback is ready, no timer is set, and the main coroutine is not done."""


class SimProcessState(enum.StrEnum):
    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


class SimProcess:
    """A simulated process: callbacks, tasks and timers on a `VirtualLoop` that are frozen, thawed and killed together.

    Start a task by `process.task(...)`, or pass `context=process.context()` to asyncio. Tasks and callbacks started by
    this task belong to the process, too.
    """

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.state = SimProcessState.RUNNING
        self.frozen_s = 0.0
        """Total virtual seconds for which the process was frozen. A freeze is added when the process is thawed."""
        self._loop = loop
        self._since_s = 0.0
        self._context = copy_context()
        self._context.run(_PROCESS.set, self)
        self._waiting: deque[asyncio.Handle] = deque()
        """Callbacks that became ready while the process was frozen or dead."""
        self._kept_tasks: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return f"<SimProcess {self.name} {self.state}>"

    def context(self) -> Context:
        """Return a new `contextvars.Context` for one task: code in it belongs to this process."""
        return self._context.copy()

    def task(self, body: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start and return a task that belongs to this process and runs `body`."""
        return self._loop.create_task(body, name=name, context=self.context())

    def freeze(self) -> None:
        """Run no callback of this process until `thaw`. Timers that become due meanwhile fire after `thaw`."""
        if self.state is SimProcessState.RUNNING:
            self.state = SimProcessState.FROZEN
            self._since_s = self._loop.time()
            self._loop.stopped[self] = None

    def thaw(self) -> None:
        if self.state is SimProcessState.FROZEN:
            self.state = SimProcessState.RUNNING
            self.frozen_s += self._loop.time() - self._since_s
            self._resume()

    def kill(self) -> None:
        """Run no callback of this process again, but keep references to its tasks.

        Python would run the `finally` blocks of a task without a reference.
        """
        self._kept_tasks = self._loop.tasks(self)
        self.state = SimProcessState.DEAD
        self._loop.stopped[self] = None

    def cancel_dead(self) -> list[asyncio.Task[Any]]:
        """After a test, cancel and return the tasks of a frozen or dead process, so that they can end.

        Otherwise asyncio would warn about tasks that were destroyed while pending.
        """
        self.state = SimProcessState.RUNNING
        tasks = self._loop.tasks(self)
        for task in tasks:
            task.cancel()
        self._kept_tasks.clear()
        self._waiting = deque(call for call in self._waiting if not isinstance(call, asyncio.TimerHandle))
        self._resume()
        return tasks

    def _resume(self) -> None:
        self._loop.stopped.pop(self, None)
        self._loop._ready.extend(self._waiting)
        self._waiting.clear()


def process_of(context: Context) -> SimProcess | None:
    """Return the simulated process that code in `context` belongs to, or None."""
    return context.get(_PROCESS)


def task_of(call: asyncio.Handle | None) -> asyncio.Task[Any] | None:
    """Return the task of which the callback `call` is a step; None if there is none."""
    owner = None if call is None else getattr(call._callback, "__self__", None)  # type: ignore[attr-defined]
    return owner if isinstance(owner, asyncio.Task) else None


class _Task(asyncio.Task[T]):
    """An asyncio task with its serial number as its hash, so that sets of tasks have the same order in every run."""

    def __init__(self, body: Awaited[T], loop: VirtualLoop, name: object, context: Context) -> None:
        self._number = next(loop._numbers)
        self.life = context.get(_PROCESS)
        named = str(name or f"task-{self._number}")
        super().__init__(body, loop=loop, name=named, context=context)  # type: ignore[arg-type, unused-ignore]

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(BaseEventLoop):
    """An event loop in virtual time. Use it by `run_virtual`, or by `asyncio.Runner(loop_factory=new_virtual_loop)`.

    When no callback is ready, the loop's time jumps to the time of the next timer; if no timer is set, the loop raises
    `Deadlock`. A call that needs threads or sockets raises NotImplementedError.
    """

    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        """Number of callbacks that the loop has run so far."""
        self.after_step: Callable[[], None] | None = None
        """Function that the loop calls after each callback; it must not raise."""
        self.ran: asyncio.Handle | None = None
        """The callback that ran last, set before each call of `after_step`."""
        self.stopped: dict[SimProcess, None] = {}
        """Frozen and dead simulated processes, as keys. A dict, because the order of a set is not fixed."""
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._tasks: weakref.WeakSet[_Task[Any]] = weakref.WeakSet()
        self._thread = threading.current_thread()

    def __repr__(self) -> str:
        return f"<VirtualLoop at {self._now_s:.6f} s, {len(self._ready)} ready, {counted(len(self._timers), 'timer')}>"

    def time(self) -> float:
        """Return the virtual time of the loop.

        Returns:
            Virtual seconds since the loop was created.
        """
        return self._now_s

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call `callback` at a virtual time, like asyncio's `call_at`.

        Args:
            when: Virtual time of the call, on the scale of `time()`. A past time means immediately.
            callback: Function to call.
            args: Arguments of `callback`.
            context: Context to run `callback` in, which decides its `SimProcess`; None for the current context.

        Returns:
            The timer. Its `cancel()` prevents the call.
        """
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call `callback` soon, like asyncio's `call_soon`. Call this only on the loop's own thread.

        Args:
            callback: Function to call.
            args: Arguments of `callback`.
            context: Context to run `callback` in, which decides its `SimProcess`; None for the current context.

        Returns:
            The scheduled call. Its `cancel()` prevents the call.

        Raises:
            RuntimeError: Called from another thread.
        """
        if threading.current_thread() is not self._thread:
            raise RuntimeError("a virtual loop has one thread: what other threads do has no place in its time")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Raise NotImplementedError, since a virtual loop has no threads.

        Args:
            executor: Ignored.
            func: Ignored.
            args: Ignored.

        Returns:
            Never.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("a virtual loop has one thread")

    def create_task(
        self, coro: Awaited[T], *, name: object = None, context: Context | None = None, eager_start: bool | None = None
    ) -> asyncio.Task[T]:
        """Start a task, like asyncio's `create_task`.

        Args:
            coro: Coroutine to run.
            name: Name of the task; None for `task-` and the task's number.
            context: Context to run `coro` in, which decides its `SimProcess`; None for a copy of the current one.
            eager_start: Ignored: a task always starts in a later turn of the loop. Python 3.14 may pass it.

        Returns:
            The task. Its hash is a serial number, so that sets of tasks have the same order in every run.
        """
        task = _Task(coro, self, name, copy_context() if context is None else context)
        self._tasks.add(task)
        return task

    def tasks(self, life: SimProcess | None = None) -> list[asyncio.Task[Any]]:
        """Return the tasks that are not done.

        Args:
            life: Simulated process of the tasks; None for all tasks.

        Returns:
            The tasks, oldest first.
        """
        waiting = [task for task in self._tasks if not task.done() and (life is None or task.life is life)]
        return sorted(waiting, key=hash)

    @property
    def follows(self) -> asyncio.Handle | None:
        """The callback that will run next; None if none is ready, so that the loop's time must jump first."""
        return self._ready[0] if self._ready else None

    def end_all(self) -> None:
        """After a test, cancel all tasks that are not done, even those of dead processes. Ignore the tasks' errors."""
        self.after_step = None
        self.set_exception_handler(lambda *_: None)
        for life in list(self.stopped):
            life.cancel_dead()
        self._timers.clear()
        for _ in range(_ROUNDS_MAX):  # a task may start others while it ends
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
        """Run one callback. If no callback is ready, first jump to the time of the next timer."""
        if not self._ready:
            self._advance()
        call = self._ready.popleft()
        if call._cancelled:
            return
        if self.stopped:
            life = process_of(call._context)  # type: ignore[attr-defined]
            if life in self.stopped:
                life._waiting.append(call)
                return
        self.steps += 1
        call._run()
        if self.after_step is not None:
            self.ran = call
            self.after_step()

    def _asyncgen_firstiter_hook(self, generator: object) -> None:
        """Override both hooks of asyncio, which would close async generators, by a hook that does nothing.

        The user of a generator closes the generator, and a generator of a dead process must never end.
        """

    _asyncgen_finalizer_hook = _asyncgen_firstiter_hook

    def _advance(self) -> None:
        """Jump to the time of the next timer, and make ready the callbacks of all timers that are due at that time.

        The order is by time and, at equal times, by when the timers were set. If no timer is set, raise `Deadlock`.
        """
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
    """Return a new `VirtualLoop`, for `asyncio.Runner(loop_factory=new_virtual_loop)`.

    Returns:
        The loop, at time 0.
    """
    return VirtualLoop()


def run_virtual(body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a new `VirtualLoop`, in virtual time. For real time use `asyncio.run`.

        def test_hand_over() -> None:
            run_virtual(hand_over())  # ten seconds of waiting take microseconds

    Args:
        body: Coroutine to run.

    Returns:
        The result of `body`.

    Raises:
        Deadlock: `body` would wait forever. The message names the waiting tasks.
        Exception: Any error of `body`.
    """
    with asyncio.Runner(loop_factory=new_virtual_loop) as runner:
        try:
            return runner.run(body)
        finally:
            loop = runner.get_loop()
            if isinstance(loop, VirtualLoop) and loop.stopped:
                loop.end_all()
