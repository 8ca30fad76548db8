"""Test tool that finds forgotten loads: a load that is neither awaited nor cancelled holds blocks of both engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator, Iterator
from typing import Any
from unittest import mock

from kvflow.checks import counted
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport, LoadRequest, Progress
from kvflow.runtime.runtime import Runtime
from kvflow.testing.watch import calling_line, checked_at_end


class _WatchedLoad(Load):
    """A `Load` that counts the tasks that await it. `LoadWatch.begun` sets the class of each started load to this."""

    begun_at = ""
    waiting = 0
    """Number of tasks that await the load or its next progress."""
    awaited_or_cancelled = False
    """True once the load was cancelled, ended while awaited, or was awaited after its end."""

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
    """The loads that a runtime has started, and whether each is awaited or cancelled. See `watch_loads`."""

    def __init__(self) -> None:
        self._begun: list[_WatchedLoad] = []

    def begun(self, load: Load, where: str) -> None:
        """Watch a started load. Ignore a load that is done already, for example refused: it holds no blocks.

        Args:
            load: The load that `start_load` returned.
            where: The line of code that started the load, for messages.
        """
        if not load.done:
            load.__class__ = _WatchedLoad
            assert isinstance(load, _WatchedLoad)
            load.begun_at = where
            self._begun.append(load)

    @property
    def forgotten(self) -> tuple[Load, ...]:
        """Loads that were neither cancelled nor awaited when they ended, or that are under way and not awaited now.

        May be called at any time. A load that has just been started is included until a task awaits it.
        """
        return tuple(load for load in self._begun if not (load.awaited_or_cancelled or load.waiting))

    def assert_none_forgotten(self) -> None:
        """Assert that no load is in `forgotten`.

        Raises:
            AssertionError: A load is forgotten. The message names the first, and the line of code that started it.
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
    """Check that every load that a runtime starts is awaited to its end or cancelled.

    To await the load or its next progress counts; to await `Load.settled()` does not, since that does not end the load.
    If a task that iterates over the load by `async for` is cancelled in the loop's body, the load goes on, so it must
    be cancelled. An engine that polls `Load.done` has to await the load afterwards, for its report.

    Args:
        runtime: The reader's runtime. Its `start_load` is replaced inside the `with` block; a reference to the method
            taken before is not watched.

    Returns:
        A context manager that yields the watch. Loads are watched until its block ends.

    Raises:
        AssertionError: A load was forgotten. Raised when the `with` block ends, in place of an error that comes out of
            it. The message names the request and the line that started the load.
    """
    watch, start = LoadWatch(), runtime.start_load

    def start_watched(request: LoadRequest) -> Load:
        load = start(request)
        watch.begun(load, calling_line(__file__))
        return load

    with checked_at_end(watch.assert_none_forgotten), mock.patch.object(runtime, "start_load", start_watched):
        yield watch
