"""Test tool that cancels a coroutine at every point where cancelling can make a difference, in one run for each point.

The runs are in virtual time. The points are called *moments* (`cancel_everywhere`). If a task of the coroutine is woken
several times at the same line, only the first time is a moment. A step of an engine's background task makes no moment,
because the coroutine cannot see the step's effect before the next moment.
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

_ENGINE_TASK_PREFIX = "kvflow-"  # prefix of the names of the engines' background tasks
_RUNS_PER_LOG_LINE = 100
_LINES_MAX = 1 << 30
_UNDER_TEST: ContextVar[bool] = ContextVar("kvflow_cancelled_everywhere", default=False)
"""True in the context of the coroutine under test. Every task that the coroutine starts inherits it."""


def cancel_everywhere(make_scenario: Scenario, *, runs_max: int = 10_000) -> int:
    """Run a coroutine many times: cancel it at its first moment, in the next run at its second, and so on.

    A moment is a point between two steps of the event loop: after a step of any task except the engines' background
    tasks, or before a step of a task of the coroutine that has been woken. A first run counts the moments. kvflow's log
    lines appear only for a run that fails. The logger `kvflow.testing.cancel` logs the progress at INFO.

        @contextlib.asynccontextmanager
        async def scenario():
            cluster = InprocCluster()
            async with cluster.engine("prefill") as prefill, cluster.engine("decode") as decode:
                yield hand_over(prefill, decode)
                assert_quiet(decode.runtime.statistics())  # cancelled or not

        cancel_everywhere(scenario)

    Args:
        make_scenario: Function that returns an async context manager for one run. The context manager opens engines and
            yields the coroutine, not started. The code after the `yield` checks the engines, once the coroutine has
            ended, cancelled or not.
        runs_max: Maximum number of moments, each of which takes one run, in case the coroutine never ends.

    Returns:
        Number of runs in which the coroutine was cancelled.

    Raises:
        AssertionError: The coroutine has more than `runs_max` moments.
        Exception: Any error of the checks or of the coroutine, except its cancellation. A note on the error has the
            moment of the cancellation, and the line at which the coroutine waited.
    """
    moments = _run(make_scenario, runs_max + 1, "not cancelled").count
    if moments > runs_max:
        raise AssertionError(f"it has not run through after {counted(runs_max, 'moment')}")
    logger.info("it can be cancelled at %s", counted(moments, "moment"))
    for moment in range(1, runs_max + 1):
        if not _run(make_scenario, moment, f"cancelled at moment {moment} of {moments}").place:
            return moment - 1
        if moment % _RUNS_PER_LOG_LINE == 0:
            logger.info("cancelled at moment %s of %s", moment, moments)
    raise AssertionError(f"it was cancelled {counted(runs_max, 'time')} and has never run through")


class _Moments:
    """Counts the moments (points of possible cancellation) of one run, and cancels `body` at moment number `last`.

    `place`: the line at which the coroutine waited when it was cancelled.
    """

    def __init__(self, loop: VirtualLoop, body: Coroutine[Any, Any, object], last: int) -> None:
        self.count = 0
        self.place = ""
        self._loop, self._body, self._last = loop, body, last
        self._woken = {""}
        """Lines, in the form of `_place`, at which a task of the coroutine has waited and was woken."""
        context = copy_context()
        context.run(_UNDER_TEST.set, True)
        self.task = loop.create_task(body, name="cancelled everywhere", context=context)

    def count_step(self) -> None:
        """If the point after the step that the loop has just run is a moment, count it. The loop calls this each time.

        When the count reaches `last`, cancel the coroutine.
        """
        if self.place or self.task.done() or inspect.getcoroutinestate(self._body) == inspect.CORO_CREATED:
            return
        ran, follows = self._loop.ran, self._loop.follows
        wakes = _place(task_of(follows)) if _is_coroutine_step(follows) else ""
        self.count += _is_scenario_step(ran) or wakes not in self._woken
        self._woken.add(wakes)
        if self.count >= self._last:
            self.place = _place(self.task)
            self.task.cancel()


def _is_coroutine_step(call: asyncio.Handle | None) -> bool:
    """Return True if `call` is a step of the coroutine under test, or of a task that this coroutine has started."""
    return task_of(call) is not None and call._context.get(_UNDER_TEST, False)  # type: ignore[union-attr]


def _is_scenario_step(call: asyncio.Handle | None) -> bool:
    """Return True if `call` is a step of a task that is no background task of an engine."""
    task = task_of(call)
    return _is_coroutine_step(call) or (task is not None and not task.get_name().startswith(_ENGINE_TASK_PREFIX))


def _run(make_scenario: Scenario, last: int, what: str) -> _Moments:
    with _hold_back_logs(logging.getLogger("kvflow")):
        return run_virtual(_cancel_at(make_scenario, last, what))


async def _cancel_at(make_scenario: Scenario, last: int, what: str) -> _Moments:
    """Run the scenario once, and cancel its coroutine at moment number `last`, unless the coroutine ends earlier.

    Return the run's moments. `what`: text about the cancellation, for a note on an error.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    moments: _Moments | None = None
    try:
        async with make_scenario() as body:
            moments = _Moments(loop, body, last)
            loop.after_step = moments.count_step
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
def _hold_back_logs(root: logging.Logger) -> Iterator[None]:
    """Hold back the log lines of logger `root` and its children during the `with` block.

    If the block raises an error, write these lines at the end of the block; else drop them.
    """
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
    """Return where `task` waits: the line in each coroutine that it awaits, outermost first; "" if the task is done."""
    lines = []
    inner: Any = None if task is None else task.get_coro()
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})")
        inner = inner.cr_await
    return " > ".join(lines)
