"""Processes with open runtimes in which a library changes asyncio: `python -m tests.support.patched_process`.

Each of `PATCHES` gets two processes: in one it comes before the runtimes are opened, in the other while they are open
and a load is under way. Each process loads, cancels, loads a growing prompt, closes, and then uses runtimes of threads.
The program prints a line for each process: its name, and whether it ended well.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import multiprocessing
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

import kvflow
from kvflow import blocking
from kvflow.testing import inproc_pair
from tests.support.tests_support import PATIENT, WAIT_S, small_cache, turns, until


def nested_loops(loop: asyncio.AbstractEventLoop) -> None:
    """Patch the loop as notebooks do: tasks and futures get other classes, and `run_until_complete` nests."""
    import nest_asyncio

    nest_asyncio.apply(loop)


def python_classes(_: asyncio.AbstractEventLoop) -> None:
    asyncio.Task = asyncio.tasks.Task = asyncio.tasks._PyTask  # type: ignore[attr-defined,misc]
    asyncio.Future = asyncio.futures.Future = asyncio.futures._PyFuture  # type: ignore[attr-defined,misc]


def eager_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """A task takes its first step in `create_task`. Python 3.11 has no such factory."""
    loop.set_task_factory(getattr(asyncio, "eager_task_factory", _first_step_now))


def _first_step_now(loop: Any, body: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    steps: list[Callable[[], object]] = []

    def note(step: Callable[..., object], *given: object, context: contextvars.Context) -> None:
        steps.append(lambda: context.run(step, *given))

    loop.call_soon = note
    try:
        task = asyncio.Task(body, loop=loop, **options)
    finally:
        del loop.call_soon
    outer = asyncio.current_task(loop)
    if outer is not None:
        asyncio.tasks._leave_task(loop, outer)
    try:
        steps[0]()
    finally:
        if outer is not None:
            asyncio.tasks._enter_task(loop, outer)
    return task


def wrapping_factory(loop: asyncio.AbstractEventLoop) -> None:
    """Patch as tracers of requests do: the task's coroutine is a wrapper, which awaits the original."""

    def make(loop: asyncio.AbstractEventLoop, body: Any, **options: Any) -> asyncio.Task[Any]:
        async def traced() -> Any:
            return await body

        return asyncio.Task(traced(), loop=loop, **options)

    loop.set_task_factory(make)


def debug_mode(loop: asyncio.AbstractEventLoop) -> None:
    loop.set_debug(True)


def uvloop_policy(_: asyncio.AbstractEventLoop) -> None:
    """Install uvloop's policy, as `uvloop.install` does."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


PATCHES = {
    patch.__name__: patch
    for patch in (nested_loops, python_classes, eager_tasks, wrapping_factory, debug_mode, uvloop_policy)
}


async def hand_over(patch: Callable[[asyncio.AbstractEventLoop], None], when: str) -> None:
    loop = asyncio.get_running_loop()
    problems: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, problem: problems.append(problem))
    if when == "before":
        patch(loop)
    async with inproc_pair(config=PATIENT) as pair:
        producer, consumer, transport = pair.producer.runtime, pair.consumer.runtime, pair.consumer.transport
        lease = pair.offer([3, 4], "under way")
        transport.faults.hold = True
        load = consumer.start_load(pair.wanted(lease, [0, 1]))
        await until(lambda: transport.held)
        if when == "open":
            patch(loop)
        transport.faults.hold = False
        transport.perform()
        assert (await load).blocks == 2
        assert await lease is kvflow.LeaseOutcome.READ

        transport.faults.hold = True
        lease = pair.offer([5], "cancelled")
        load = consumer.start_load(pair.wanted(lease, [2]))
        await until(lambda: transport.held)
        load.cancel()
        settled = asyncio.ensure_future(load.settled())
        await asyncio.sleep(0)
        transport.faults.hold = False
        transport.perform()
        await settled
        assert load.safe
        lease.revoke()

        lease = producer.serve_blocks(kvflow.ServeRequest("growing", [6, 7], 8, computed_tokens=4))
        load = consumer.start_load(kvflow.LoadRequest("growing", lease.ticket, [3, 4]))
        await turns(10)
        lease.advance(8)
        assert (await load).tokens == 8
        assert await lease is kvflow.LeaseOutcome.READ
        if patch is nested_loops:
            lease = pair.offer([3, 4], "nested")
            loop.run_until_complete(asyncio.wait_for(consumer.load_blocks(pair.wanted(lease, [0, 1])), WAIT_S))
    assert not problems, problems


def hand_over_in_threads() -> None:
    config = [kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc") for name in "pd"]
    with blocking.Runtime(config[0]) as producer, blocking.Runtime(config[1]) as consumer:
        for runtime in (producer, consumer):
            runtime.register_kv_caches(*small_cache())
        lease = producer.serve_blocks(kvflow.ServeRequest("req", [3, 4], 8))
        assert consumer.load_blocks(kvflow.LoadRequest("req", lease.ticket, [0, 1])).tokens == 8


def run(patch: Callable[[asyncio.AbstractEventLoop], None], when: str) -> None:
    asyncio.run(hand_over(patch, when))
    hand_over_in_threads()


def main() -> None:
    for (name, patch), when in itertools.product(PATCHES.items(), ("before", "open")):
        process = multiprocessing.get_context("fork").Process(target=run, args=(patch, when))
        process.start()
        process.join(WAIT_S)
        process.kill()
        print(f"{name} {when}: {'ended well' if process.exitcode == 0 else 'failed'}", flush=True)


if __name__ == "__main__":
    main()
