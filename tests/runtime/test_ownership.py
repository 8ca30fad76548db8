"""Who owns a runtime: its loop, its handle, its tasks. What others do to those leaves nothing behind (I5, I7)."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from pairs import EnginePair, load_request, open_pair
from tests_support import small_cache, turns, until

from kvflow import Config, Lease, LeaseOutcome, Limits, LoadRequest, Runtime, RuntimeState, ServeRequest
from kvflow.errors import KVFlowError, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.testing import InprocCluster, assert_closed, inproc_pair

HOLD = Limits(seal_hold_s=0.01)
BRIEF = Config(engine_id="any", drain_timeout_s=0.05, cancel_grace_s=0.05, limits=HOLD)
PLAIN = Config(engine_id="engine", listen="tcp://127.0.0.1:0", transport="inproc", limits=HOLD)
FORGETFUL = Path(__file__).with_name("forgetful.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
OFFER = ServeRequest("req", block_ids=[3], num_tokens=4)


async def opened(config: Config = PLAIN) -> Runtime:
    """A registered runtime that nobody has promised to close."""
    runtime = Runtime(config)
    await runtime.__aenter__()
    await runtime.register_kv_caches(*small_cache())
    return runtime


def assert_gone(runtime: Runtime) -> None:
    assert runtime.state is RuntimeState.CLOSED
    assert_closed(runtime.statistics())


def task_named(name: str) -> asyncio.Task[object]:
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == name)
    return task


def cancel_others() -> None:
    """What hosts do when they end."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


# --- all tasks are cancelled


@pytest.mark.parametrize("name", ["kvflow-poller", "kvflow-listener"])
async def test_a_service_that_somebody_cancels_breaks_the_runtime(name: str) -> None:
    async with asyncio.timeout(60):
        runtime = await opened()
        lease = runtime.serve_blocks(OFFER)
        task_named(name).cancel()
        assert await lease is LeaseOutcome.REVOKED
        assert runtime.state is RuntimeState.BROKEN
        with pytest.raises(RuntimeBroken, match="cancelled from outside"):
            runtime.serve_blocks(OFFER)
        await runtime.aclose()
        assert_gone(runtime)


@pytest.mark.parametrize("steps", range(0, 40, 3))
async def test_cancelling_all_tasks_settles_everybody_and_closing_leaves_nothing(steps: int) -> None:
    async with inproc_pair(config=BRIEF) as pair:
        lease = pair.offer([3])
        load = pair.consumer.runtime.start_load(pair.wanted(lease, [0]))
        await turns(steps)
        cancel_others()
        with suppress(asyncio.CancelledError, RuntimeBroken):
            await load
        assert await lease in (LeaseOutcome.REVOKED, LeaseOutcome.READ)
        engines = (pair.producer.runtime, pair.consumer.runtime)
        await until(lambda: all(runtime.state is not RuntimeState.OPEN for runtime in engines))
        for runtime in engines:
            with pytest.raises(RuntimeBroken, match="cancelled from outside"):
                runtime.serve_blocks(OFFER)
        for runtime in engines:
            await runtime.aclose()  # nobody has cancelled this task, so it raises no CancelledError
        await load.settled()
        assert load.safe


async def test_cancelling_all_tasks_alone_leaves_nothing() -> None:
    """A host that ends by `asyncio.run` waits for what it has cancelled, and nobody may be left to close anything."""
    runtime = await opened()
    lease = runtime.serve_blocks(OFFER)
    supervisor = task_named("kvflow-supervisor")
    cancel_others()
    await asyncio.wait([supervisor])
    assert lease.done
    assert_gone(runtime)
    await runtime.aclose()


@pytest.mark.parametrize("steps", range(12))
async def test_closing_goes_on_when_it_is_cancelled_with_everything_else(steps: int) -> None:
    async with asyncio.timeout(60):
        runtime = await opened()
        lease = runtime.serve_blocks(OFFER)
        closing = asyncio.create_task(runtime.aclose())
        await turns(steps)
        cancel_others()
        with suppress(asyncio.CancelledError):
            await closing
        await runtime.aclose()
        assert lease.done
        assert_gone(runtime)


async def test_a_runtime_can_be_closed_by_a_task_that_was_cancelled() -> None:
    """As `async with` in a task that a host cancels does, beside everything else."""
    leases: list[Lease] = []
    runtime = await opened(replace(PLAIN, drain_timeout_s=0.05))

    async def engine() -> None:
        async with aclosing(runtime):
            leases.append(runtime.serve_blocks(OFFER))
            await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(60):
        task = asyncio.create_task(engine())
        await until(lambda: leases)
        cancel_others()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_gone(runtime)


# --- another loop, another thread

VERBS: dict[str, Callable[[Runtime, Lease], object]] = {
    "serve_blocks": lambda runtime, _: runtime.serve_blocks(ServeRequest("other", block_ids=[1], num_tokens=4)),
    "load_blocks": lambda runtime, lease: runtime.load_blocks(load_request(lease, [1])),
    "start_load": lambda runtime, lease: runtime.start_load(load_request(lease, [1])),
    "release_blocks": lambda runtime, lease: runtime.release_blocks(lease.ticket),
    "keep_leases": lambda runtime, lease: runtime.keep_leases(lease.ticket),
    "prewarm": lambda runtime, lease: runtime.prewarm([lease.ticket]),
    "forget_peer": lambda runtime, _: runtime.forget_peer("engine"),
    "drain": lambda runtime, _: runtime.drain(1.0),
    "aclose": lambda runtime, _: runtime.aclose(),
    "revoke": lambda _, lease: lease.revoke(),
    "await lease": lambda _, lease: lease,
}


async def settle(result: object) -> None:
    if isinstance(result, Awaitable):
        await result


@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_refuses_another_loop_and_takes_nothing(verb: str) -> None:
    runtime = await opened()
    lease = runtime.serve_blocks(OFFER)
    before = runtime.statistics()

    async def elsewhere() -> None:
        await settle(VERBS[verb](runtime, lease))

    with pytest.raises(UsageError, match="event loop that opened the runtime"):
        await asyncio.to_thread(asyncio.run, elsewhere())
    assert runtime.statistics() == before
    assert lease.state == "offered"
    await lease.revoke()
    await runtime.aclose()


@pytest.mark.parametrize("verb", ["serve_blocks", "start_load", "revoke"])
async def test_every_plain_call_refuses_a_thread_without_a_loop(verb: str) -> None:
    runtime = await opened()
    lease = runtime.serve_blocks(OFFER)
    with pytest.raises(UsageError, match="no event loop runs here"):
        await settle(await asyncio.to_thread(VERBS[verb], runtime, lease))
    blocks = runtime.statistics().blocks
    assert blocks is not None
    assert blocks.leased == 1
    await lease.revoke()
    await runtime.aclose()


# --- nobody closes it


WAYS = ["reading", "in_run", "kept_after_run", "asking", "loop_closed", "loop_left", "own_thread"]


@pytest.mark.parametrize(
    "transport", [pytest.param("inproc", marks=pytest.mark.thorough), pytest.param("nixl", marks=pytest.mark.nixl)]
)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("reading", "loop_closed") else pytest.mark.thorough) for way in WAYS]
)
def test_a_program_that_forgets_to_close_leaves_nothing_and_ends_by_itself(way: str, transport: str) -> None:
    command = [sys.executable, "-W", "default::ResourceWarning", str(FORGETFUL), way, transport]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, env=ENVIRONMENT, check=False)
    assert ended.returncode == 0, ended.stderr
    if way == "loop_left":  # it could still be run: what is open goes with the process
        assert "was abandoned" in ended.stderr
    else:
        assert json.loads(ended.stdout) == {"threads": [], "listening": 0}, ended.stderr
    if way not in ("loop_left", "kept_after_run"):
        assert "dropped without being closed" in ended.stderr


async def test_a_runtime_that_is_dropped_while_its_loop_runs_is_closed() -> None:
    runtime = await opened()
    supervisor = runtime._supervisor
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        del runtime
    await until(lambda: supervisor.state is RuntimeState.CLOSED)
    assert_closed(supervisor.statistics())


def test_closing_on_another_loop_when_its_own_is_gone() -> None:
    runtime = asyncio.run(opened())
    asyncio.run(runtime.aclose())
    assert_gone(runtime)
    with warnings.catch_warnings():  # a closed runtime is dropped in silence
        warnings.simplefilter("error")
        del runtime
        gc.collect()


# --- the handle of a load


async def test_a_load_is_a_handle(pair: EnginePair) -> None:
    load = pair.reader.start_load(load_request(pair.offer([3, 4]), [0, 1]))
    assert (load.request_id, load.block_ids, load.done, load.safe) == ("req", (0, 1), False, False)
    report = await load
    assert report.blocks == 2
    assert await load is report
    assert (load.done, load.safe) == (True, True)
    await load.settled()
    load.cancel()
    pair.assert_loaded([0, 1], [3, 4])


async def test_a_refused_load_is_over_at_once(pair: EnginePair) -> None:
    load = pair.reader.start_load(LoadRequest("req", {}, [0]))
    assert (load.done, load.safe, load.block_ids) == (True, True, ())
    await load.settled()
    for _ in range(2):
        with pytest.raises(KVFlowError, match="ticket"):
            await load


async def test_a_load_that_is_cancelled_before_its_first_step_is_over(pair: EnginePair) -> None:
    load = pair.reader.start_load(load_request(pair.offer([3])))
    load.cancel()
    await load.settled()
    assert load.safe
    with pytest.raises(asyncio.CancelledError):
        await load
    assert (pair.loading.open_loads, pair.loading.cancelled) == (0, 1)


@pytest.mark.parametrize("how", ["cancel", "drain", "aclose"])
async def test_a_load_that_is_ended_is_not_safe_before_its_bytes_have_stopped(how: str) -> None:
    """RuntimeClosed says that blocks are quarantined as any other error of a load does."""
    world = InprocCluster().world()
    async with open_pair(BRIEF, producer=world, consumer=world) as pair:
        pair.transport.faults.hold = True
        load = pair.reader.start_load(load_request(pair.offer([3])))
        await until(lambda: pair.transport.held)
        if how == "cancel":
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
        else:
            ending = asyncio.create_task(pair.reader.drain(0.01) if how == "drain" else pair.reader.aclose())
            with pytest.raises(RuntimeClosed) as caught:
                await load
            assert caught.value.quarantine is load
        assert (load.done, load.safe, pair.reader.quarantines) == (True, False, (load,))
        pair.transport.perform()
        await load.settled()
        assert load.safe
        if how != "cancel":
            await ending
