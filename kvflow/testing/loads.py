"""Watch for forgotten loads: nobody waits for them or cancels them, so they go on and keep blocks at both ends."""

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
    """Load that notes who waits for it; a load that was begun is made one of these."""

    begun_at = ""
    waiting = 0
    """Tasks that wait for the load, or for its next progress."""
    cared_for = False
    """True once somebody has cancelled it, waited when it ended, or has taken what came of it."""

    def __await__(self) -> Generator[Any, None, LoadReport]:
        self.waiting += 1
        try:
            return (yield from super().__await__())
        finally:
            self.waiting -= 1
            self.cared_for = self.cared_for or self.done

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
        self.cared_for = True
        super().cancel()

    def end(self, outcome: LoadReport | BaseException) -> None:
        cancelled = isinstance(outcome, asyncio.CancelledError)
        self.cared_for = self.cared_for or self.waiting > 0 or cancelled
        super().end(outcome)


class LoadWatch:
    """The watch that `watch_loads` opens."""

    def __init__(self) -> None:
        self._begun: list[_WatchedLoad] = []

    def begun(self, load: Load, where: str) -> None:
        """Watch a load that was started. One that was refused keeps nothing.

        Args:
            load: As `start_load` returned it; it is watched from here on.
            where: The line that has begun it, as messages name it.
        """
        if not load.done:
            load.__class__ = _WatchedLoad
            assert isinstance(load, _WatchedLoad)
            load.begun_at = where
            self._begun.append(load)

    @property
    def forgotten(self) -> tuple[Load, ...]:
        """Loads that nobody waits for, or did when they ended, and nobody has cancelled. Legal at any moment: a load
        that was begun just now is one of them until somebody awaits it.
        """
        return tuple(load for load in self._begun if not (load.cared_for or load.waiting))

    def assert_none_forgotten(self) -> None:
        """Assert that no load is `forgotten`.

        Raises:
            AssertionError: One is; it names the first, and where it was begun.
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
    """Watch that every load that is begun is waited for to its end, or cancelled.

    A load goes on when a task that iterates it is cancelled in the loop's body, or when nobody was to await it at all.
    Then its engine forgets it with `settled()`, which waits and ends nothing. Waiting is awaiting the load or its next
    progress; who polls `done` awaits it in the end, for its report.

    Args:
        runtime: The reader's; its `start_load` is watched from here on, under any name that is looked up later.

    Returns:
        A context manager; its block gets the watch, and is how long loads are watched.

    Raises:
        AssertionError: At the end, if a load was forgotten, also when an error of the engine comes through; it names
            the request, and the line that has begun the load.
    """
    watch, start = LoadWatch(), runtime.start_load

    def start_watched(request: LoadRequest) -> Load:
        load = start(request)
        watch.begun(load, calling_line(__file__))
        return load

    with checked_at_end(watch.assert_none_forgotten), mock.patch.object(runtime, "start_load", start_watched):
        yield watch
