"""Cancels a coroutine at every moment at which it can be cancelled, one run a moment, in virtual time.

A *moment* is one at which the scenario's own tasks run: after each step of the coroutine, of what was started for it,
such as its loads, and of the scenario's other tasks; and, once for each place at which the coroutine and what was
started for it wait, between the event that they wait for and their going on. What engines do besides changes nothing
that the coroutine could see before one of these.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar, copy_context
from logging.handlers import MemoryHandler
from typing import Any, TypeAlias

from kvflow.checks import counted
from kvflow.logs import logger_of
from kvflow.testing.virtual_loop import VirtualLoop, run_virtual, task_of

Scenario: TypeAlias = Callable[[], AbstractAsyncContextManager[Coroutine[Any, Any, object]]]

logger = logger_of(__name__)

_OF_ENGINES = "kvflow-"  # how the names of their tasks begin
_SAID_EVERY = 100
_LINES_MAX = 1 << 30
_OURS: ContextVar[bool] = ContextVar("kvflow_cancelled_everywhere", default=False)
"""True in the context of the coroutine, which whatever is started for it inherits."""


def cancel_everywhere(make_scenario: Scenario, *, runs_max: int = 10_000) -> int:
    """Run a coroutine again and again; cancel it at the 1st, 2nd, 3rd ... moment at which its own tasks run.

    The first run is not cancelled: it counts the moments. Log lines of kvflow are kept back, and written for a run that
    fails only; how far it is goes to the log of `kvflow.testing.cancel`, at INFO.

    Args:
        make_scenario: An async context manager, new for each run: it opens engines and yields the coroutine, not
            started. What follows the `yield` are the checks: they see the engines after the coroutine has ended, as its
            cancellation or as its result came out.
        runs_max: AssertionError after so many moments, for a coroutine that never ends.

    Returns:
        How often it was cancelled.

    Raises:
        Exception: What the coroutine raises, but for its cancellation, and what the checks raise; with a note that says
            at which moment of how many, and where the coroutine was.
    """
    moments = _run(make_scenario, runs_max + 1, "not cancelled").count
    if moments > runs_max:
        raise AssertionError(f"it has not run through after {counted(runs_max, 'moment')}")
    logger.info("it can be cancelled at %s", counted(moments, "moment"))
    for moment in range(1, runs_max + 1):
        if not _run(make_scenario, moment, f"cancelled at moment {moment} of {moments}").place:
            return moment - 1
        if moment % _SAID_EVERY == 0:
            logger.info("cancelled at moment %s of %s", moment, moments)
    raise AssertionError(f"it was cancelled {counted(runs_max, 'time')} and has never run through")


class _Moments:
    """The moments of one run, and the place at which the coroutine was cancelled."""

    def __init__(self, loop: VirtualLoop, body: Coroutine[Any, Any, object], last: int) -> None:
        self.count = 0
        self.place = ""
        self._loop, self._body, self._last = loop, body, last
        self._woken = {""}
        """Places from which one of the tasks has gone on."""
        context = copy_context()
        context.run(_OURS.set, True)
        self.task = loop.create_task(body, name="cancelled everywhere", context=context)

    def look(self) -> None:
        """Take the step that has just ended."""
        if self.place or self.task.done() or inspect.getcoroutinestate(self._body) == inspect.CORO_CREATED:
            return
        ran, follows = self._loop.ran, self._loop.follows
        wakes = _place(task_of(follows)) if _is_of_it(follows) else ""
        self.count += _is_ours(ran) or wakes not in self._woken
        self._woken.add(wakes)
        if self.count >= self._last:
            self.place = _place(self.task)
            self.task.cancel()


def _is_of_it(call: asyncio.Handle | None) -> bool:
    """Return True for a step of the coroutine, or of a task that was started for it."""
    return task_of(call) is not None and call._context.get(_OURS, False)  # type: ignore[union-attr]


def _is_ours(call: asyncio.Handle | None) -> bool:
    """Return True for a step of one of the scenario's own tasks."""
    task = task_of(call)
    return _is_of_it(call) or (task is not None and not task.get_name().startswith(_OF_ENGINES))


def _run(make_scenario: Scenario, last: int, what: str) -> _Moments:
    with _kept_back(logging.getLogger("kvflow")):
        return run_virtual(_cancel_at(make_scenario, last, what))


async def _cancel_at(make_scenario: Scenario, last: int, what: str) -> _Moments:
    """Run the scenario once, and cancel it at its last moment, if it comes so far."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    moments: _Moments | None = None
    try:
        async with make_scenario() as body:
            moments = _Moments(loop, body, last)
            loop.after_step = moments.look
            try:
                await asyncio.wait([moments.task])
            finally:
                loop.after_step = None
            if not moments.task.cancelled():
                moments.task.result()
    except Exception as error:
        place = "" if moments is None else moments.place
        error.add_note(f"{what}: {place}" if place else "not cancelled: it fails by itself")
        raise
    return moments


@contextmanager
def _kept_back(root: logging.Logger) -> Iterator[None]:
    """Keep a logger's lines, those of its children included; write them if the block fails."""
    kept = MemoryHandler(_LINES_MAX, flushLevel=logging.CRITICAL + 1)
    before, root.handlers, propagate, root.propagate = root.handlers, [kept], root.propagate, False
    failed = True
    try:
        yield
        failed = False
    finally:
        root.handlers, root.propagate = before, propagate
        for record in kept.buffer if failed else ():
            root.callHandlers(record)


def _place(task: asyncio.Task[Any] | None) -> str:
    """The line at which a task waits, with the coroutines that it waits through."""
    lines = []
    inner: Any = None if task is None else task.get_coro()
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})")
        inner = inner.cr_await
    return " > ".join(lines)
