"""Loads in cancelled scopes of anyio, which cancel a task once per turn of the loop until the task has left them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from pairs import EnginePair, load_request
from tests_support import turns, until

from kvflow import LoadRequest, Runtime
from kvflow.runtime.load.load import Load

TURNS, CANCELS_MAX = 100, 4


async def load_blocks(runtime: Runtime, request: LoadRequest) -> None:
    await runtime.load_blocks(request)


async def start_load(runtime: Runtime, request: LoadRequest) -> None:
    await runtime.start_load(request)


async def follow(runtime: Runtime, request: LoadRequest) -> None:
    async for _ in runtime.start_load(request):
        pass


async def await_twice(runtime: Runtime, request: LoadRequest) -> None:
    """The error of the first `await` is caught, as by code that wants to clean up."""
    load = runtime.start_load(request)
    with contextlib.suppress(asyncio.CancelledError):
        await load
    await load


@pytest.mark.parametrize("verb", [load_blocks, start_load, follow, await_twice])
async def test_a_load_that_waits_for_its_reads_is_cancelled_a_few_times_only(
    pair: EnginePair, verb: Callable[[Runtime, LoadRequest], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cancellation wakes the task: 100 turns are 100 without a shield, and a core is busy for `cancel_grace_s`."""
    loads: list[Load] = []
    accept = pair.reader._supervisor.incarnation.loader._accept  # type: ignore[union-attr]

    def note(*given: Any, **options: Any) -> Any:
        accepted = accept(*given, **options)
        loads.append(accepted[0])
        return accepted

    monkeypatch.setattr(pair.reader._supervisor.incarnation.loader, "_accept", note)  # type: ignore[union-attr]
    pair.transport.faults.hold = True
    lease = pair.offer([3, 4])
    scope = anyio.CancelScope()

    async def leave() -> None:
        with scope:
            await verb(pair.reader, load_request(lease, [0, 1]))

    task = asyncio.create_task(leave())
    await until(lambda: pair.transport.held)
    scope.cancel()
    await turns(TURNS)
    assert not task.done(), "it waits for its reads"
    performing = loads[0].performing_task
    assert performing is not None
    assert 0 < performing.cancelling() <= CANCELS_MAX
    assert task.cancelling() <= CANCELS_MAX
    pair.release_reads()
    await task
    assert scope.cancelled_caught
    assert loads[0].safe
    assert pair.loading.cancelled == 1


async def test_a_shielded_wait_hears_other_cancellations(pair: EnginePair) -> None:
    """The end of the load is a cancellation of asyncio, although the wait is in a shield of anyio."""
    pair.transport.faults.hold = True
    load = pair.reader.start_load(load_request(pair.offer([3, 4]), [0, 1]))
    task = asyncio.ensure_future(load)
    await until(lambda: pair.transport.held)
    for _ in range(3):
        task.cancel()
        await turns(3)
    assert not task.done()
    pair.release_reads()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert load.safe
