"""The owners of a runtime: its loop, its handle, its tasks. A misuse of these leaves nothing behind (I5, I7)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pairs import EnginePair, load_request, open_pair
from tests_support import WAIT_S, small_cache, turns, until

from kvflow import (
    Config,
    Lease,
    LeaseOutcome,
    Limits,
    Load,
    LoadRequest,
    Runtime,
    RuntimeState,
    ServeRequest,
)
from kvflow.errors import KVFlowError, LeaseExpired, RuntimeBroken, RuntimeClosed, UsageError
from kvflow.runtime.part import Part
from kvflow.testing import InprocCluster, assert_closed, inproc_pair
from kvflow.transport.inproc import InprocTransport

HOLD = Limits(seal_hold_s=0.01)
BRIEF = Config(engine_id="any", drain_timeout_s=0.05, cancel_grace_s=0.05, limits=HOLD)
PLAIN = Config(engine_id="engine", listen="tcp://127.0.0.1:0", transport="inproc", limits=HOLD)
FORGETFUL = Path(__file__).with_name("forgetful.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
OFFER = ServeRequest("req", block_ids=[3], num_tokens=4)


async def opened(config: Config = PLAIN) -> Runtime:
    """A registered runtime without an `async with` that closes it."""
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
    """Cancel all other tasks, as hosts do at their end."""
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
    """A host that ends by `asyncio.run` waits for its cancelled tasks, and no task is left to close anything."""
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

VERBS: dict[str, Callable[[Runtime, Lease, Load], object]] = {
    "Runtime.register_kv_caches": lambda runtime, *_: runtime.register_kv_caches(*small_cache()),
    "Runtime.unregister": lambda runtime, *_: runtime.unregister(),
    "Runtime.serve_blocks": lambda runtime, *_: runtime.serve_blocks(OTHER),
    "Runtime.decline": lambda runtime, *_: runtime.decline("other", "no"),
    "Runtime.load_blocks": lambda runtime, lease, _: runtime.load_blocks(load_request(lease, [1])),
    "Runtime.start_load": lambda runtime, lease, _: runtime.start_load(load_request(lease, [1])),
    "Runtime.release_blocks": lambda runtime, lease, _: runtime.release_blocks(lease.ticket),
    "Runtime.keep_leases": lambda runtime, lease, _: runtime.keep_leases(lease.ticket),
    "Runtime.introduce": lambda runtime, *_: runtime.introduce(),
    "Runtime.prewarm": lambda runtime, lease, _: runtime.prewarm([lease.ticket]),
    "Runtime.forget_peer": lambda runtime, *_: runtime.forget_peer("engine"),
    "Runtime.set_weights": lambda runtime, *_: runtime.set_weights("next"),
    "Runtime.drain": lambda runtime, *_: runtime.drain(1.0),
    "Runtime.aclose": lambda runtime, *_: runtime.aclose(),
    "Lease.wait": lambda _, lease, __: lease.wait(),
    "Lease.__await__": lambda _, lease, __: lease,
    "Lease.revoke": lambda _, lease, __: lease.revoke(),
    "Lease.fail": lambda _, lease, __: lease.fail("broken"),
    "Lease.advance": lambda _, lease, __: lease.advance(4),
    "Lease.extend": lambda _, lease, __: lease.extend([4]),
    "Lease.complete": lambda _, lease, __: lease.complete(),
    "Lease.restart": lambda _, lease, __: lease.restart(),
    "Load.__await__": lambda _, __, load: load,
    "Load.__aiter__": lambda _, __, load: anext(aiter(load)),
    "Load.cancel": lambda _, __, load: load.cancel(),
    "Load.settled": lambda _, __, load: load.settled(),
    "Load.progressed": lambda _, __, load: load.progressed(0),
    "Load.computed": lambda _, __, load: load.computed(0),
    "Load.extend": lambda _, __, load: load.extend([2]),
}
"""Everything that asks for work or waits, of everything that belongs to a loop."""
ANYWHERE = {
    *("Runtime.__aenter__", "Runtime.__aexit__"),  # `aclose`; a runtime belongs to no loop before it is open
    *("Runtime.config", "Runtime.state", "Runtime.address", "Runtime.quarantines"),
    "Runtime.statistics",
    *("Lease.request_id", "Lease.block_ids", "Lease.block_tables", "Lease.state", "Lease.done", "Lease.readers_done"),
    *("Load.block_ids", "Load.block_tables", "Load.done", "Load.safe", "Load.has_handle"),
    *("Load.follow", "Load.note_progress", "Load.start_task", "Load.set_outcome"),  # of its loader
    "Load.note_computed",  # of `growing`
    *("Load.cancel_overdue", "Load.take_back_cancel"),  # of its loader
    *("Load.enter_phase", "Load.end_phases", "Load.current_phase", "Load.report", "Load.failure"),  # of its steps
}
"""Properties that describe the current state."""
OTHER = ServeRequest("other", block_ids=[1], num_tokens=4)
AT_ONCE = {"serve_blocks", "decline", "start_load"}
PLAIN_CALLS = [verb for verb in VERBS if verb.split(".")[1] in AT_ONCE]
PLAIN_CALLS += [verb for verb in VERBS if verb.startswith("Lease.") and "wait" not in verb]
PLAIN_CALLS += ["Load.cancel", "Load.extend"]
STATES = [RuntimeState.OPEN, RuntimeState.DRAINING]


def test_no_verb_is_forgotten() -> None:
    found = set()
    for owner in (Runtime, Lease, Load):
        for name in vars(owner):
            if not name.startswith("_") or name in ("__await__", "__aiter__", "__aenter__", "__aexit__"):
                found.add(f"{owner.__name__}.{name}")
    assert found == {*VERBS} | ANYWHERE


async def settle(result: object) -> None:
    if isinstance(result, Awaitable):
        await result


@contextlib.asynccontextmanager
async def at_work(state: RuntimeState, parts: Sequence[Part] = ()) -> AsyncIterator[tuple[Runtime, Lease, Load]]:
    """A runtime, a lease, and a load of it with a held read. Afterwards assert that nothing has changed."""
    config = replace(PLAIN, drain_timeout_s=WAIT_S)
    async with Runtime(config, parts=parts) as runtime:
        await runtime.register_kv_caches(*small_cache())
        registration = runtime._supervisor.registration
        assert registration is not None
        transport = registration.transport
        assert isinstance(transport, InprocTransport)
        transport.faults.hold = True
        lease = runtime.serve_blocks(ServeRequest("req", [3, 4], num_tokens=8))
        load = runtime.start_load(load_request(lease, [0, 1]))
        await until(lambda: transport.statistics.open_reads)
        draining = asyncio.create_task(runtime.drain(WAIT_S) if state is RuntimeState.DRAINING else asyncio.sleep(0))
        await until(lambda: runtime.state is state)
        before = runtime.statistics()
        yield runtime, lease, load
        after = runtime.statistics()
        assert after.serving is not None
        assert before.serving is not None
        served = replace(after.serving, renewals=before.serving.renewals)  # on a slow host the load keeps its lease
        assert (served, after.blocks, after.state) == (before.serving, before.blocks, before.state)
        assert after.loading is not None
        assert before.loading is not None
        assert (after.loading.open_loads, after.loading.refused) == (1, before.loading.refused)
        assert (lease.state, load.done) == ("offered", False)
        lease.revoke()
        transport.faults.hold = False
        transport.perform()
        with pytest.raises(LeaseExpired):
            await load
        await asyncio.gather(lease, draining)


@pytest.mark.parametrize("state", STATES)
async def test_every_verb_refuses_another_loop_and_takes_nothing(state: RuntimeState) -> None:
    """A plain call raises at once, also in a thread without a loop, where no task can await anything."""
    async with at_work(state) as (runtime, lease, load):

        async def elsewhere(verb: str) -> None:
            await settle(VERBS[verb](runtime, lease, load))

        for verb, call in VERBS.items():
            with pytest.raises(UsageError, match=r"loop that opened the runtime, and another loop runs here") as caught:
                await asyncio.to_thread(asyncio.run, elsewhere(verb))
            assert caught.type is UsageError, verb
            if verb in PLAIN_CALLS:
                with pytest.raises(UsageError, match="no event loop runs here") as caught:
                    await asyncio.to_thread(call, runtime, lease, load)
                assert caught.type is UsageError, verb


async def test_what_is_over_may_be_asked_from_any_loop_and_what_was_begun_here_not_entered() -> None:
    """A result is a result: there is nothing to wait for."""
    async with open_pair(BRIEF) as pair:
        lease = pair.offer([3], reader_count=2)
        load = pair.reader.start_load(pair.wanted(lease, [0]))
        report, kept = await load, pair.reader.keep_leases(lease.ticket)

        async def elsewhere() -> None:
            assert await load is report
            load.cancel()
            await load.settled()
            assert (pair.reader.state, pair.reader.quarantines) == (RuntimeState.OPEN, ())
            assert pair.reader.statistics().loading is not None
            with pytest.raises(UsageError, match="another loop runs here"), kept:
                raise AssertionError("it was entered")

        await asyncio.to_thread(asyncio.run, elsewhere())
        lease.revoke()


# --- nobody closes it


WAYS = ["reading", "in_run", "kept_after_run", "asking", "loop_closed", "loop_left", "own_thread"]


@pytest.mark.parametrize(
    "transport", [pytest.param("inproc", marks=pytest.mark.thorough), pytest.param("nixl", marks=pytest.mark.nixl)]
)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "reading" else pytest.mark.thorough) for way in WAYS]
)
def test_a_program_that_forgets_to_close_leaves_nothing_and_ends_by_itself(way: str, transport: str) -> None:
    command = [sys.executable, "-W", "default::ResourceWarning", str(FORGETFUL), way, transport]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT, check=False)
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
    """A refused load is over at once, and so is a load that is cancelled before its first step."""
    load = pair.reader.start_load(load_request(pair.offer([3, 4]), [0, 1]))
    assert (load.request_id, load.block_ids, load.done, load.safe) == ("req", (0, 1), False, False)
    report = await load
    assert report.blocks == 2
    assert await load is report
    assert (load.done, load.safe) == (True, True)
    await load.settled()
    load.cancel()
    pair.assert_loaded([0, 1], [3, 4])
    refused = pair.reader.start_load(LoadRequest("req", {}, [0]))
    assert (refused.done, refused.safe, refused.block_ids) == (True, True, ())
    await refused.settled()
    for _ in range(2):
        with pytest.raises(KVFlowError, match="ticket"):
            await refused
    load = pair.reader.start_load(load_request(pair.offer([5], "cancelled")))
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


async def assert_only_on_its_loop(part: Part, state: RuntimeState, verbs: Mapping[str, Any], at_once: str) -> None:
    """Check that the verbs of a part refuse other loops and threads without one, and take nothing.

    `verbs`: the argument of each verb, or a dict of its arguments by name. `at_once`: a verb that is no coroutine.
    """
    async with at_work(state, [part]):

        async def elsewhere(verb: str) -> None:
            method, given = getattr(part, verb), verbs[verb]
            await settle(method(**given) if isinstance(given, dict) else method(given))

        for verb in verbs:
            with pytest.raises(UsageError, match=r"loop that opened the runtime, and another loop runs here"):
                await asyncio.to_thread(asyncio.run, elsewhere(verb))
        with pytest.raises(UsageError, match="no event loop runs here"):
            await asyncio.to_thread(getattr(part, at_once), verbs[at_once])
