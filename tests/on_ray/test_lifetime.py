"""One task enters and leaves a context, on behalf of any caller. The caller gets the errors of the context."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests_support import until

from kvflow.errors import UsageError
from kvflow.ray.lifetime import Lifetime


class Opening:
    """A context that notes which task enters and leaves it."""

    def __init__(self) -> None:
        self.entered: asyncio.Task[object] | None = None
        self.left: asyncio.Task[object] | None = None
        self.gate = asyncio.Event()
        self.broken = asyncio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self.entered = asyncio.current_task()
        await self.gate.wait()
        try:
            async with asyncio.TaskGroup() as group:
                broken = group.create_task(self._break())
                yield "opened"
                broken.cancel()
        finally:
            self.left = asyncio.current_task()

    async def _break(self) -> None:
        await self.broken.wait()
        raise ZeroDivisionError


async def test_one_task_enters_and_leaves_whoever_asks() -> None:
    opening = Opening()
    opening.gate.set()
    lifetime = Lifetime(opening.open())
    assert await asyncio.create_task(lifetime.start()) == "opened"
    lifetime.check()
    assert opening.left is None
    await asyncio.create_task(lifetime.stop())
    assert opening.entered is opening.left is not asyncio.current_task()
    await lifetime.stop()
    with pytest.raises(UsageError, match="was stopped"):
        lifetime.check()


async def test_what_was_never_started_stops_at_once() -> None:
    """Serve calls `__del__` also of a replica with a failed `__init__`."""
    await Lifetime(Opening().open()).stop()


async def test_it_is_started_once() -> None:
    opening = Opening()
    opening.gate.set()
    lifetime = Lifetime(opening.open())
    await lifetime.start()
    with pytest.raises(UsageError, match="started once"):
        await lifetime.start()
    await lifetime.stop()


async def test_what_entering_raises_is_raised_where_it_is_started() -> None:
    @asynccontextmanager
    async def fails() -> AsyncIterator[None]:
        raise ZeroDivisionError
        yield

    lifetime = Lifetime(fails())
    with pytest.raises(ZeroDivisionError):
        await lifetime.start()
    with pytest.raises(ZeroDivisionError):
        lifetime.check()


async def test_what_ends_it_by_itself_is_found_by_the_check() -> None:
    opening = Opening()
    opening.gate.set()
    lifetime = Lifetime(opening.open())
    await lifetime.start()
    opening.broken.set()
    await until(lambda: opening.left is not None)
    await until(lambda: lifetime._task is not None and lifetime._task.done())
    with pytest.raises(ExceptionGroup, match="TaskGroup"):
        lifetime.check()
    with pytest.raises(ExceptionGroup):
        await lifetime.stop()


async def test_a_start_that_is_cancelled_ends_the_context() -> None:
    opening = Opening()
    lifetime = Lifetime(opening.open())
    starting = asyncio.create_task(lifetime.start())
    await until(lambda: opening.entered is not None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert lifetime._task is not None
    assert lifetime._task.cancelled()


async def test_a_stop_that_is_cancelled_goes_on() -> None:
    held = asyncio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        yield
        await held.wait()

    lifetime = Lifetime(slow())
    await lifetime.start()
    stopping = asyncio.create_task(lifetime.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    lifetime.check()
    held.set()
    await lifetime.stop()
