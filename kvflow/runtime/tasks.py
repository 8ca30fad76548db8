"""The tasks of one runtime, in one task group: if one of them dies, the runtime is *broken*.

The supervisor's task holds the group. A service (the listener, a poller) has died if it raises, or if somebody else
cancels it. Any other task has died if it raises.

What has to come to its end although who waits for it is cancelled, such as closing, is a task outside the group
(`carried`). A host that ends cancels all tasks, that one included. So its steps hold cancellation back
(`to_its_end`): each step is bounded, and can be begun anew.

A runtime, its leases and its loads belong to the event loop that opened the runtime, and to that loop's thread
(`require_loop`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvflow.errors import KVFlowError, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.logs import logger_of

logger = logger_of(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Tasks:
    """All tasks of a runtime. They belong to the loop that `start` was called on."""

    def __init__(self, owner: str, on_break: Callable[[], None], close: Callable[[], Awaitable[None]]) -> None:
        """`on_break` is told once that a task has died. `close` closes the runtime, for when nobody else is left to."""
        self._owner = owner
        self._on_break = on_break
        self._close = close
        self.cause: Exception | None = None
        """The error that has broken the runtime."""
        self._stop = asyncio.Event()
        self._over = asyncio.Event()
        self._started = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation can be replayed
        self._supervision: asyncio.Task[None] | None = None
        self._carried: dict[str, asyncio.Task[None]] = {}

    @property
    def started(self) -> bool:
        """True from `start` on, also when all of it is over."""
        return self._supervision is not None

    @property
    def count(self) -> int:
        """Tasks that run."""
        return len(self._tasks) + (self._supervision is not None and not self._supervision.done())

    async def start(self, begin: Callable[[], None]) -> None:
        """Begin the supervisor's task, in which `begin` spawns the first others.

        It may have been cancelled before its first step: then there is a `cause`.
        """
        self._supervision = asyncio.create_task(self._supervise(begin), name="kvflow-supervisor")
        self._supervision.add_done_callback(lambda _: self._never_ran())
        await self._started.wait()

    async def stop(self) -> None:
        """End all tasks, and wait until they have ended."""
        self._stop.set()
        await self._over.wait()

    async def supervised(self) -> None:
        """Wait until the supervisor's task has ended, too, unless that is who waits."""
        if self._supervision is not None and self._supervision is not asyncio.current_task():
            await asyncio.wait([self._supervision])

    async def carried(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Begin `work` as a task of that name, unless it is under way, and wait for it; raises what it raises.

        Cancelling stops the waiting; the work goes on.
        """
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        while True:
            running = self._carried.get(name)
            if running is None or running.done():  # one that was cancelled before its first step is begun anew
                running = self._carried[name] = asyncio.create_task(work(), name=name)
                running.add_done_callback(seen)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                if not running.cancelled() or (task is not None and task.cancelling() > cancels):
                    raise

    async def over(self, name: str) -> None:
        """Wait until no work of that name is under way, however it ends. Cancelling stops the waiting."""
        if name in self._carried:
            await asyncio.wait([self._carried[name]])

    def spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        """Start a task in the runtime's task group. Raises RuntimeClosed once the runtime is closing."""
        if self._stop.is_set() or self.cause is not None:
            body.close()
            raise RuntimeClosed(f"the runtime {self._owner} is closing")
        watched = self._watched(body)
        try:
            task = self._group.create_task(watched, name=name)
        except RuntimeError as error:  # the host has cancelled all tasks, the supervisor's among them
            watched.close()
            body.close()
            raise RuntimeClosed(f"the runtime {self._owner} is closing") from error
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(lambda _: body.close())  # cancelled before its first step, it never begins
        return task

    def must_last(self, task: asyncio.Task[None], what: str, over: Callable[[], bool] = lambda: False) -> None:
        """Watch a service's task: if somebody else cancels it, before the service is `over`, the service has died."""

        def ended(task: asyncio.Task[None]) -> None:  # cancelled early, the body never runs
            if task.cancelled() and not self._stop.is_set() and not over():
                self.break_down(RuntimeBroken(f"the {what}'s task was cancelled from outside"))

        task.add_done_callback(ended)

    def break_down(self, cause: Exception) -> None:
        """Break the runtime, once, since a task has died: settle everybody, and end the other tasks."""
        if self.cause is not None or self._stop.is_set():
            return
        logger.error("runtime %s broke: %s: %s", self._owner, type(cause).__name__, cause, exc_info=cause.__cause__)
        self.cause = cause
        self._stop.set()
        self._on_break()

    def forget(self) -> None:
        """In a forked child, let the tasks end as they are ended: nothing has broken."""
        self._stop.set()

    async def _supervise(self, begin: Callable[[], None]) -> None:
        """Body of the supervisor's task: until told to stop, or until a service dies.

        If a host that ends cancels it, it closes everything before it goes: nobody else may be left to do that.

        Task `kvflow-supervisor`: holds the runtime's task group, from opening to closing. A host that ends
        cancels it: then it closes everything first.
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
            self._over.set()
            await self._close_whoever_cancels()
            raise
        finally:
            self._over.set()

    async def _close_whoever_cancels(self) -> None:
        while True:
            try:
                return await self._close()
            except asyncio.CancelledError:
                continue  # bounded, since each cancel makes the closing hurry
            except RuntimeBroken:
                return  # it is logged

    async def _watched(self, body: Coroutine[None, None, None]) -> None:
        """Body of every task: an error breaks the runtime."""
        try:
            await body
        except Exception as problem:  # noqa: BLE001 - whatever it is, everybody gets to know
            self.break_down(problem)

    def _never_ran(self) -> None:
        """Settle who waits, if the supervisor's task was cancelled before its first step."""
        if not self._started.is_set():
            self.cause = RuntimeBroken("the supervisor's task was cancelled before it began")
            self._on_break()
            self._over.set()
            self._started.set()


async def for_each(
    items: Sequence[ItemT], work: Callable[[ItemT], Coroutine[Any, Any, ResultT]], at_once: int
) -> list[ResultT]:
    """Do `work` for all items, at most `at_once` at a time, and return the results in order.

    The first failure ends the others and is raised: none begins any more. Cancelling cancels those that have begun.
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


async def to_its_end(step: Callable[[], Awaitable[ResultT]], on_cancel: Callable[[], None] = lambda: None) -> ResultT:
    """Run one step of work that is carried: if it is cancelled it is begun anew, and `on_cancel` is called."""
    while True:
        try:
            return await step()
        except asyncio.CancelledError:
            on_cancel()
            task = asyncio.current_task()
            assert task is not None, "carried work is a task"
            task.uncancel()


def seen(task: asyncio.Future[None]) -> None:
    """Mark the error of a task as seen: who waits gets it, it is logged, and nobody may wait."""
    if not task.cancelled():
        task.exception()


def require_loop(loop: asyncio.AbstractEventLoop | None, what: str) -> None:
    """UsageError unless this is called on `loop`, by its thread."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is not loop:
        where = "no event loop runs here" if running is None else "another loop runs here"
        raise UsageError(f"{what}: belongs to the event loop that opened the runtime, and {where}")
