"""Cancels a coroutine at every moment at which it can be cancelled, one run a moment, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

from kvflow.testing.virtual_loop import VirtualLoop, run_virtual

Scenario: TypeAlias = Callable[[], AbstractAsyncContextManager[Coroutine[Any, Any, object]]]


def cancel_everywhere(make_scenario: Scenario, *, runs_max: int = 10_000) -> int:
    """Run a coroutine again and again; cancel it after the 1st, 2nd, 3rd ... step of the loop that it waits through.

    So it is cancelled at each of its awaits, and at each thing that happens elsewhere while it waits there. The last
    run is the one that it gets through.

    Args:
        make_scenario: An async context manager, new for each run: it opens engines and yields the coroutine, not
            started. What follows the `yield` are the checks: they see the engines after the coroutine has ended, as its
            cancellation or as its result came out.
        runs_max: AssertionError after so many runs, for a coroutine that never ends.

    Returns:
        How often it was cancelled.

    Raises:
        Exception: What the coroutine raises, but for its cancellation, and what the checks raise; with a note that says
            in which run, and where the coroutine was.
    """
    for moment in range(1, runs_max + 1):
        if not run_virtual(_cancel_at(make_scenario, moment)):
            return moment - 1
    raise AssertionError(f"it was cancelled {runs_max} times and has never run through")


async def _cancel_at(make_scenario: Scenario, moment: int) -> bool:
    """Run the scenario once; True if it was cancelled."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    where = ""
    try:
        async with make_scenario() as body:
            task = loop.create_task(body, name="cancelled everywhere")
            last_step = loop.steps + moment

            def look() -> None:
                nonlocal where
                if loop.steps >= last_step and not where and not task.done():
                    where = _place(body)
                    task.cancel()

            loop.after_step = look
            try:
                await asyncio.wait([task])
            finally:
                loop.after_step = None
            if not task.cancelled():
                task.result()
    except Exception as error:
        error.add_note(f"cancelled at moment {moment}: {where}" if where else f"not cancelled before moment {moment}")
        raise
    return bool(where)


def _place(body: Coroutine[Any, Any, object]) -> str:
    """The line at which a coroutine waits, with the coroutines that it waits through."""
    lines = []
    inner: Any = body
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})")
        inner = inner.cr_await
    return " > ".join(lines)
