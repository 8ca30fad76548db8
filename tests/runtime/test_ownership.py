"""Who owns a runtime: its loop, its handle, its tasks. What others do to those leaves nothing behind (I5, I7)."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests_support import small_cache, turns, until

from kvflow import Config, Lease, LeaseOutcome, Limits, LoadRequest, Runtime, RuntimeState, ServeRequest
from kvflow.errors import KVFlowError, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.testing import InprocCluster, Pair, assert_closed, inproc_pair

BRIEF = Config(engine_id="any", drain_timeout_s=0.05, cancel_grace_s=0.05, limits=Limits(seal_hold_s=0.01))
FORGETFUL = Path(__file__).with_name("forgetful.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
OFFER = ServeRequest("req", block_ids=[3], num_tokens=4)


def settings(**changes: object) -> Config:
    options = {
        "engine_id": "engine",
        "listen": "tcp://127.0.0.1:0",
        "transport": "inproc",
        "limits": Limits(seal_hold_s=0.01),
    }
    return Config(**(options | changes))  # type: ignore[arg-type]


async def opened(**changes: object) -> Runtime:
    """A registered runtime that nobody has promised to close."""
    kv_caches, layout = small_cache()
    runtime = Runtime(settings(**changes))
    await runtime.__aenter__()
    await runtime.register_kv_caches(kv_caches, layout)
    return runtime


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
        (task,) = (task for task in asyncio.all_tasks() if task.get_name() == name)
        task.cancel()
        assert await lease is LeaseOutcome.REVOKED
        assert runtime.state is RuntimeState.BROKEN
        with pytest.raises(RuntimeBroken, match="cancelled from outside"):
            runtime.serve_blocks(OFFER)
        await runtime.aclose()
        assert runtime.state is RuntimeState.CLOSED
        assert_closed(runtime.statistics())


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
        for engine in (pair.producer, pair.consumer):
            with pytest.raises(RuntimeBroken, match="cancelled from outside"):
                engine.runtime.serve_blocks(OFFER)
        for engine in (pair.producer, pair.consumer):
            await engine.runtime.aclose()  # nobody has cancelled this task, so it raises no CancelledError
        await load.settled()
        assert load.safe


async def test_cancelling_all_tasks_alone_leaves_nothing() -> None:
    """A host that ends by `asyncio.run` waits for what it has cancelled, and nobody may be left to close anything."""
    runtime = await opened()
    lease = runtime.serve_blocks(OFFER)
    (supervisor,) = (task for task in asyncio.all_tasks() if task.get_name() == "kvflow-supervisor")
    cancel_others()
    await asyncio.wait([supervisor])
    assert runtime.state is RuntimeState.CLOSED
    assert lease.done
    assert_closed(runtime.statistics())
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
        assert runtime.state is RuntimeState.CLOSED
        assert lease.done
        assert_closed(runtime.statistics())


async def test_a_runtime_can_be_closed_by_a_task_that_was_cancelled() -> None:
    """As `async with` in a task that a host cancels does, beside everything else."""
    runtimes: list[Runtime] = []

    async def engine() -> None:
        async with await _entered(runtimes) as runtime:
            runtime.serve_blocks(OFFER)
            await asyncio.get_running_loop().create_future()

    async with asyncio.timeout(60):
        task = asyncio.create_task(engine())
        while not (runtimes and (serving := runtimes[0].statistics().serving) and serving.open_leases):
            await asyncio.sleep(0)
        cancel_others()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runtimes[0].state is RuntimeState.CLOSED
        assert_closed(runtimes[0].statistics())


async def _entered(runtimes: list[Runtime]) -> _Reentered:
    runtimes.append(await opened(drain_timeout_s=0.05))
    return _Reentered(runtimes[0])


class _Reentered:
    """An open runtime, as an asynchronous context manager that closes it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __aenter__(self) -> Runtime:
        return self._runtime

    async def __aexit__(self, *_: object) -> None:
        await self._runtime.aclose()


# --- another loop, another thread

VERBS: dict[str, Callable[[Runtime, Lease], object]] = {
    "serve_blocks": lambda runtime, _: runtime.serve_blocks(ServeRequest("other", block_ids=[1], num_tokens=4)),
    "load_blocks": lambda runtime, lease: runtime.load_blocks(LoadRequest("r", lease.ticket, [1])),
    "start_load": lambda runtime, lease: runtime.start_load(LoadRequest("r", lease.ticket, [1])),
    "release_blocks": lambda runtime, lease: runtime.release_blocks(lease.ticket),
    "keep_leases": lambda runtime, lease: runtime.keep_leases(lease.ticket),
    "prewarm": lambda runtime, lease: runtime.prewarm([lease.ticket]),
    "forget_peer": lambda runtime, _: runtime.forget_peer("engine"),
    "drain": lambda runtime, _: runtime.drain(1.0),
    "aclose": lambda runtime, _: runtime.aclose(),
    "revoke": lambda _, lease: lease.revoke(),
    "await lease": lambda _, lease: lease,
}


async def _do(verb: str, runtime: Runtime, lease: Lease) -> None:
    result = VERBS[verb](runtime, lease)
    if isinstance(result, Awaitable):
        await result


@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_refuses_another_loop_and_takes_nothing(verb: str) -> None:
    runtime = await opened()
    lease = runtime.serve_blocks(OFFER)
    before = runtime.statistics()
    problems: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(_do(verb, runtime, lease))
        except BaseException as problem:  # noqa: BLE001 - the test judges it
            problems.append(problem)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    (problem,) = problems
    assert type(problem) is UsageError, problem
    assert "event loop that opened the runtime" in str(problem)
    assert runtime.statistics() == before
    assert lease.state == "offered"
    await lease.revoke()
    await runtime.aclose()


@pytest.mark.parametrize("verb", ["serve_blocks", "start_load", "revoke"])
async def test_every_plain_call_refuses_a_thread_without_a_loop(verb: str) -> None:
    runtime = await opened()
    lease = runtime.serve_blocks(OFFER)
    results: list[object] = []

    def elsewhere() -> None:
        try:
            results.append(VERBS[verb](runtime, lease))
        except BaseException as problem:  # noqa: BLE001 - the test judges it
            results.append(problem)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    (result,) = results
    with pytest.raises(UsageError, match="no event loop runs here"):
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, Awaitable)
        await result
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
    left = json.loads(ended.stdout)
    if way == "loop_left":  # it could still be run: what is open goes with the process
        assert "was abandoned" in ended.stderr
    else:
        assert left == {"threads": [], "listening": 0}, ended.stderr
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
    assert runtime.state is RuntimeState.CLOSED
    assert_closed(runtime.statistics())


async def test_a_closed_runtime_is_dropped_in_silence() -> None:
    runtime = await opened()
    await runtime.aclose()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del runtime
        gc.collect()


# --- the handle of a load


async def test_a_load_is_a_handle() -> None:
    async with inproc_pair() as pair:
        lease = pair.offer([3, 4])
        load = pair.consumer.runtime.start_load(pair.wanted(lease, [0, 1]))
        assert (load.request_id, load.block_ids, load.done, load.safe) == ("req", (0, 1), False, False)
        report = await load
        assert report.blocks == 2
        assert await load is report
        assert (load.done, load.safe) == (True, True)
        await load.settled()
        load.cancel()
        pair.assert_loaded([0, 1], [3, 4])
        await lease


async def test_a_refused_load_is_over_at_once() -> None:
    async with inproc_pair() as pair:
        load = pair.consumer.runtime.start_load(LoadRequest("req", {}, [0]))
        assert (load.done, load.safe, load.block_ids) == (True, True, ())
        await load.settled()
        for _ in range(2):
            with pytest.raises(KVFlowError, match="ticket"):
                await load


async def test_a_load_that_is_cancelled_before_its_first_step_is_over() -> None:
    async with inproc_pair() as pair:
        lease = pair.offer([3])
        load = pair.consumer.runtime.start_load(pair.wanted(lease, [0]))
        load.cancel()
        await load.settled()
        assert load.safe
        with pytest.raises(asyncio.CancelledError):
            await load
        loading = pair.consumer.runtime.statistics().loading
        assert loading is not None
        assert (loading.open_loads, loading.cancelled) == (0, 1)
        lease.revoke()


async def test_a_cancelled_load_is_not_safe_before_its_bytes_have_stopped() -> None:
    async with inproc_pair(config=BRIEF) as pair:
        pair.consumer.transport.faults.hold = True
        lease = pair.offer([3])
        load = pair.consumer.runtime.start_load(pair.wanted(lease, [0]))
        await until(lambda: pair.consumer.transport.held)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert (load.done, load.safe) == (True, False)
        assert pair.consumer.runtime.quarantines == (load,)
        pair.consumer.transport.perform()
        await load.settled()
        assert load.safe
        lease.revoke()


@pytest.mark.parametrize("verb", ["drain", "aclose"])
async def test_a_load_that_the_runtime_ends_carries_what_may_still_land(verb: str) -> None:
    """It raises RuntimeClosed, which says that blocks are quarantined as any other error of a load does."""
    cluster = InprocCluster()
    async with cluster.engine("producer") as producer, cluster.engine("consumer", config=BRIEF) as consumer:
        pair = Pair(producer=producer, consumer=consumer)
        consumer.transport.faults.hold = True
        lease = pair.offer([3])
        load = consumer.runtime.start_load(pair.wanted(lease, [0]))
        await until(lambda: consumer.transport.held)
        ending = asyncio.create_task(consumer.runtime.drain(0.01) if verb == "drain" else consumer.runtime.aclose())
        with pytest.raises(RuntimeClosed) as caught:
            await load
        assert caught.value.quarantine is load
        assert not load.safe
        consumer.transport.perform()
        await load.settled()
        await ending
        lease.revoke()
