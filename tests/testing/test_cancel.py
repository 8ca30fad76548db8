"""`cancel_everywhere`: the moments of its cancellations, its error messages, and the log lines that it keeps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from kvflow.logs import logger_of
from kvflow.testing import cancel_everywhere

Scenario = Callable[[], AbstractAsyncContextManager[Coroutine[Any, Any, object]]]


Body = Callable[[], Coroutine[Any, Any, object]]


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0.1)


async def chatter() -> None:
    """A background task of an engine."""
    while True:
        await asyncio.sleep(0.001)


def beside(
    other: Callable[[], Coroutine[Any, Any, object]], name: str, body: Callable[[], Coroutine[Any, Any, Any]]
) -> Scenario:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Coroutine[Any, Any, object]]:
        task = asyncio.create_task(other(), name=name)
        yield body()
        task.cancel()
        await asyncio.wait([task])

    return scenario


def test_what_engines_do_besides_makes_no_moments() -> None:
    def body() -> Coroutine[Any, Any, object]:
        return steps(5)

    quiet = cancel_everywhere(beside(asyncio.Event().wait, "kvflow-quiet", body))
    assert cancel_everywhere(beside(chatter, "kvflow-poller", body)) == quiet
    assert 5 <= quiet <= 7


def test_steps_of_the_scenarios_other_tasks_and_of_what_it_starts_are_moments() -> None:
    async def starts() -> None:
        await asyncio.create_task(steps(5), name="kvflow-load")

    alone = cancel_everywhere(beside(asyncio.Event().wait, "kvflow-quiet", lambda: steps(3)))
    with_other = cancel_everywhere(beside(lambda: steps(9), "prefill", lambda: steps(3)))
    assert alone < with_other <= alone + 4, "those before the coroutine has ended"
    assert cancel_everywhere(beside(asyncio.Event().wait, "kvflow-quiet", starts)) >= 6


def test_a_result_that_is_lost_between_its_coming_and_its_being_taken_is_found() -> None:
    """The event that the coroutine waits for is no step of a task of the scenario's."""

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Coroutine[Any, Any, object]]:
        loop, taken = asyncio.get_running_loop(), [0]

        async def body() -> None:
            came: asyncio.Future[None] = loop.create_future()
            loop.call_later(1.0, came.set_result, None)
            try:
                await came
            except asyncio.CancelledError:
                assert came.cancelled(), "the result is lost"
                raise
            taken[0] += 1

        yield body()

    with pytest.raises(AssertionError, match="the result is lost") as caught:
        cancel_everywhere(scenario)
    assert caught.value.__notes__[0].startswith("cancelled at moment 2 of ")


def failing_at(wanted: int) -> Scenario:
    """Says something in every run, and fails when it is cancelled for that time."""
    cancelled, logger = [0], logger_of("kvflow.test_cancel")

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Coroutine[Any, Any, object]]:
        logger.warning("run %s begins", cancelled[0])

        async def body() -> None:
            try:
                await steps(5)
            except asyncio.CancelledError:
                cancelled[0] += 1
                assert cancelled[0] != wanted, "wrong"
                raise

        yield body()

    return scenario


def test_only_the_run_that_fails_leaves_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AssertionError, match="wrong") as caught:
        cancel_everywhere(failing_at(3))
    assert [one.getMessage() for one in caplog.records if one.name == "kvflow.test_cancel"] == ["run 2 begins"]
    assert caught.value.__notes__[0].startswith("cancelled at moment 3 of ")


def test_how_far_it_is_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    moments = cancel_everywhere(beside(asyncio.Event().wait, "kvflow-quiet", lambda: steps(120)))
    said = [one.getMessage() for one in caplog.records if one.name == "kvflow.testing.cancel"]
    assert said == [f"it can be cancelled at {moments} moments", f"cancelled at moment 100 of {moments}"]


def test_a_scenario_that_fails_without_being_cancelled_says_so(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Coroutine[Any, Any, object]]:
        logger_of("kvflow.test_cancel").warning("it begins")
        yield steps(2)
        raise ValueError("the check fails")

    with pytest.raises(ValueError, match="the check fails") as caught:
        cancel_everywhere(scenario)
    assert caught.value.__notes__ == ["not cancelled: it fails by itself"]
    assert "it begins" in caplog.text


def test_the_log_is_as_it_was_afterwards() -> None:
    root = logging.getLogger("kvflow")
    before = (list(root.handlers), root.propagate)
    cancel_everywhere(failing_at(0))
    with contextlib.suppress(AssertionError):
        cancel_everywhere(failing_at(1))
    assert (list(root.handlers), root.propagate) == before
