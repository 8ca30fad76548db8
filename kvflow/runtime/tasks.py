"""The tasks of one runtime, in one task group. If a task dies, the runtime is *broken*.

The supervisor's task holds the group. A task dies if it raises; the task of a service (the listener, a poller) also
dies if code outside the runtime cancels it.

Work that must finish even if its caller is cancelled, for example closing, is a task outside the group (`run_to_end`).
A program that ends cancels this task too. So each step of the work is run again if it is cancelled
(`retry_if_cancelled`); every step takes a bounded time, and may be run again.

A runtime, its leases and its loads belong to the event loop that opened the runtime (`require_loop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvflow.errors import KVFlowError, RuntimeBroken, RuntimeClosed, UsageError, without_secrets
from kvflow.logs import logger_of

logger = logger_of(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Tasks:
    """All tasks of a runtime. They belong to the loop on which `start` was called."""

    def __init__(self, owner: str, on_break: Callable[[], None], close: Callable[[], Awaitable[None]]) -> None:
        """Make the object; `start` starts the tasks. `owner`: name of the runtime in logs.

        `on_break` is called once, when a task has died. `close` closes the runtime. It is called if the supervisor's
        task is cancelled, as when a program ends.
        """
        self._owner = owner
        self._on_break = on_break
        self._close = close
        self.cause: Exception | None = None
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()
        self._started = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}  # ordered, so that a simulation can be replayed
        self._supervision: asyncio.Task[None] | None = None
        self._detached: dict[str, asyncio.Task[None]] = {}

    @property
    def started(self) -> bool:
        """True once `start` was called, also after all tasks have ended."""
        return self._supervision is not None

    @property
    def count(self) -> int:
        return len(self._tasks) + (self._supervision is not None and not self._supervision.done())

    async def start(self, begin: Callable[[], None]) -> None:
        """Start the supervisor's task, which opens the task group and calls `begin`. Wait until `begin` has returned.

        `begin` spawns the first tasks. If the supervisor's task is cancelled before its first step, `begin` is not
        called, and `Tasks.cause` is set to a RuntimeBroken.
        """
        self._supervision = asyncio.create_task(self._supervise(begin), name="kvflow-supervisor")
        self._supervision.add_done_callback(lambda _: self._on_never_started())
        await self._started.wait()

    async def stop(self) -> None:
        """Cancel all tasks of the group, and wait until they have ended."""
        self._stop.set()
        await self._ended.wait()

    async def wait_for_supervisor(self) -> None:
        """Wait until the supervisor's task has ended. Return immediately if that task itself calls this."""
        if self._supervision is not None and self._supervision is not asyncio.current_task():
            await asyncio.wait([self._supervision])

    async def run_to_end(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work` as a task with the name `name`, wait for its end and raise its error, if any.

        If a task of that name is running, wait for that task instead. Cancelling stops the waiting; the work goes on.
        """
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        while True:
            running = self._detached.get(name)
            if running is None or running.done():  # start again if it was cancelled before its first step
                running = self._detached[name] = asyncio.create_task(work(), name=name)
                running.add_done_callback(mark_retrieved)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                if not running.cancelled() or (task is not None and task.cancelling() > cancels):
                    raise

    async def wait_ended(self, name: str) -> None:
        """Wait until the work that `run_to_end` runs under `name`, if any, has ended. Do not raise its error."""
        if name in self._detached:
            await asyncio.wait([self._detached[name]])

    def spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        """Start a task in the runtime's task group. RuntimeClosed if the runtime is closing or broken."""
        if self._stop.is_set() or self.cause is not None:
            body.close()
            raise RuntimeClosed(f"the runtime {self._owner} is closing")
        watched = self._break_on_error(body)
        try:
            task = self._group.create_task(watched, name=without_secrets(name))
        except RuntimeError as error:  # the host has cancelled all tasks, and so the supervisor's
            watched.close()
            body.close()
            raise RuntimeClosed(f"the runtime {self._owner} is closing") from error
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(lambda _: body.close())  # if cancelled before its first step, the body never starts
        return task

    def break_if_cancelled(
        self, task: asyncio.Task[None], what: str, may_end: Callable[[], bool] = lambda: False
    ) -> None:
        """Break the runtime if `task`, the task of a service, is cancelled from outside the runtime.

        The task may be cancelled after `stop` was called, or when `may_end` returns True. `what`: the service's name,
        for the error.
        """

        def ended(task: asyncio.Task[None]) -> None:  # if cancelled early, the body never runs
            if task.cancelled() and not self._stop.is_set() and not may_end():
                self.break_down(RuntimeBroken(f"the {what}'s task was cancelled from outside"))

        task.add_done_callback(ended)

    def break_down(self, cause: Exception) -> None:
        """Break the runtime, unless it is closing or broken: store `cause`, cancel all tasks and call `on_break`."""
        if self.cause is not None or self._stop.is_set():
            return
        logger.error("runtime %s broke: %s: %s", self._owner, type(cause).__name__, cause, exc_info=cause.__cause__)
        self.cause = cause
        self._stop.set()
        self._on_break()

    def forget(self) -> None:
        """Make `break_down` have no effect. Called in a forked child, which does not run the parent's tasks."""
        self._stop.set()

    async def _supervise(self, begin: Callable[[], None]) -> None:
        """Hold the task group until `stop` is called or a task dies. Body of the supervisor's task.

        Task `kvflow-supervisor`: holds the runtime's task group from the opening to the closing of the runtime. If the
        program cancels this task, the task closes the runtime before the task ends.
        """
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                begin()
                self._started.set()
                await self._stop.wait()
                for task in list(self._tasks):
                    task.cancel()
        except asyncio.CancelledError:
            self.break_down(RuntimeBroken("the supervisor's task was cancelled from outside"))
            self._ended.set()
            await self._close_despite_cancels()
            raise
        finally:
            self._ended.set()

    async def _close_despite_cancels(self) -> None:
        while True:
            try:
                return await self._close()
            except asyncio.CancelledError:
                continue  # this ends, since each cancellation hurries the closing
            except RuntimeBroken:
                return  # it is logged already

    async def _break_on_error(self, body: Coroutine[None, None, None]) -> None:
        """Await `body`, the body of a task. If it raises, break the runtime."""
        try:
            await body
        except Exception as problem:  # noqa: BLE001 - any error breaks the runtime, which reports it
            self.break_down(problem)

    def _on_never_started(self) -> None:
        """Break the runtime and wake all waiting calls if the supervisor's task was cancelled before its first step."""
        if not self._started.is_set():
            self.cause = RuntimeBroken("the supervisor's task was cancelled before it began")
            self._on_break()
            self._ended.set()
            self._started.set()


async def for_each(
    items: Sequence[ItemT], work: Callable[[ItemT], Coroutine[Any, Any, ResultT]], at_once: int
) -> list[ResultT]:
    """Await `work(item)` for all `items`, at most `at_once` at a time, and return the results in the order of `items`.

    If a call raises, or this one is cancelled, cancel the calls under way and begin no others.
    """
    if len(items) == 1:
        return [await work(items[0])]
    results: dict[int, ResultT] = {}
    waiting = iter(enumerate(items))

    async def some() -> None:
        for at, item in waiting:
            results[at] = await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(items))):
                group.create_task(some())
    except BaseExceptionGroup as problems:
        ours, others = problems.split(KVFlowError)
        if ours is None or others is not None:
            raise
        raise ours.exceptions[0] from None
    return [results[at] for at in range(len(items))]


async def retry_if_cancelled(
    step: Callable[[], Awaitable[ResultT]], on_cancel: Callable[[], None] = lambda: None
) -> ResultT:
    """Call and await `step`, a step of work that `Tasks.run_to_end` runs. Return its result, or raise its error.

    Each time the task is cancelled, call `on_cancel` and run the step again.
    """
    while True:
        try:
            return await step()
        except asyncio.CancelledError:
            on_cancel()
            task = asyncio.current_task()
            assert task is not None, "carried work is a task"
            task.uncancel()


def shielded_from_scopes() -> contextlib.AbstractContextManager[object]:
    """Return a context manager that keeps the cancelled scopes of anyio from cancelling the task in the block.

    anyio cancels a task of a cancelled scope once per turn of the loop until the task has left the scope. A task that
    has to wait nevertheless, as for posted reads, would use a whole core. Cancellations of asyncio reach the block.
    """
    anyio = sys.modules.get("anyio")  # without it there are no such scopes
    return contextlib.nullcontext() if anyio is None else anyio.CancelScope(shield=True)


def mark_retrieved(task: asyncio.Future[None]) -> None:
    """Mark a finished task's error, which is reported elsewhere, as retrieved, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def require_loop(loop: asyncio.AbstractEventLoop | None, what: str) -> None:
    """Raise UsageError unless `loop` is the event loop that runs this call. `what` begins the message."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is not loop:
        where = "no event loop runs here" if running is None else "another loop runs here"
        raise UsageError(f"{what}: belongs to the event loop that opened the runtime, and {where}")
