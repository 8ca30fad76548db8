"""Test tool that finds forgotten loads, which an engine has started but neither awaits nor cancels.

A forgotten load holds blocks of both engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any
from unittest import mock

from kvflow.checks import counted
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.load.requests import LoadReport, LoadRequest, Progress
from kvflow.runtime.runtime import Runtime
from kvflow.testing.watch import calling_line, checked_at_end


class _WatchedLoad(Load):
    """A `Load` that counts the tasks that await it. While loads are watched, all accepted loads are of this class."""

    begun_at = ""
    waiting = 0
    """Number of tasks that now await the load or its next `Progress`."""
    awaited_or_cancelled = False
    """True once the load was cancelled, has ended while a task awaited it, or was awaited after its end."""

    def __await__(self) -> Generator[Any, None, LoadReport]:
        self.waiting += 1
        try:
            return (yield from super().__await__())
        finally:
            self.waiting -= 1
            self.awaited_or_cancelled = self.awaited_or_cancelled or self.done

    async def __aiter__(self) -> AsyncIterator[Progress]:
        steps = super().__aiter__()
        while True:
            self.waiting += 1
            try:
                step = await anext(steps, None)
            finally:
                self.waiting -= 1
            if step is None:
                return
            yield step

    def cancel(self) -> None:
        self.awaited_or_cancelled = True
        super().cancel()

    def set_outcome(self, outcome: LoadReport | BaseException) -> None:
        cancelled = isinstance(outcome, asyncio.CancelledError)
        self.awaited_or_cancelled = self.awaited_or_cancelled or self.waiting > 0 or cancelled
        super().set_outcome(outcome)


class LoadWatch:
    """Watches whether each load that a runtime has started is awaited or cancelled. `watch_loads` creates it."""

    def __init__(self) -> None:
        self._begun: list[_WatchedLoad] = []

    def begun(self, load: Load, where: str) -> None:
        """Watch a started load. A load that was refused, or is done already, is ignored, since it holds no blocks.

        Args:
            load: The load that `start_load` has returned.
            where: The line of code that started the load, for messages.
        """
        if isinstance(load, _WatchedLoad) and not load.done:
            load.begun_at = where
            self._begun.append(load)

    @property
    def forgotten(self) -> tuple[Load, ...]:
        """Ended loads that were neither cancelled nor awaited, and loads under way that no task awaits now.

        This may be read at any time. A load that was just started is included until a task awaits it.
        """
        return tuple(load for load in self._begun if not (load.awaited_or_cancelled or load.waiting))

    def assert_none_forgotten(self) -> None:
        """Assert that no load is in `forgotten`.

        Raises:
            AssertionError: A load is forgotten.
        """
        for load in self._begun:
            if load in self.forgotten:
                state = "went on to its end" if load.done else "is under way"
                raise AssertionError(
                    f"request {load.request_id!r}: its load, begun at {load.begun_at}, {state} though nobody waits for "
                    f"it: `settled()` only waits, so `cancel()` goes before it "
                    f"({counted(len(self.forgotten), 'such load')})"
                )


@contextlib.contextmanager
def watch_loads(runtime: Runtime) -> Iterator[LoadWatch]:
    """Check that each load that a runtime starts is awaited to its end, or cancelled.

    Awaiting the load or its next `Progress` counts. Awaiting `Load.settled()` does not count, since `settled()` returns
    no report and raises no error of the load. If a task is cancelled in the body of an `async for` over a load, the
    load continues, so the load must be cancelled, too. An engine that polls `Load.done` must await the load afterwards,
    for the load's report.

    Args:
        runtime: The reader's runtime. Its `start_load` is replaced inside the `with` block. If a caller has saved the
            method `runtime.start_load` before the block, loads that the saved method starts are not watched.

    Returns:
        A context manager that yields the watch. Loads are watched until the `with` block ends.

    Raises:
        AssertionError: A load was forgotten. Raised at the end of the `with` block, in place of the block's own error.
            The message names the line that started the load.
    """
    watch, start = LoadWatch(), runtime.start_load

    def start_watched(request: LoadRequest) -> Load:
        load = start(request)
        watch.begun(load, calling_line(__file__))
        return load

    with (
        checked_at_end(watch.assert_none_forgotten),
        mock.patch.object(runtime, "start_load", start_watched),
        mock.patch.object(Loader, "load_type", _WatchedLoad),
    ):
        yield watch
