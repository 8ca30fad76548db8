"""The runtime for engines that are not asyncio programs: the verbs, their bounds, and that no thread is left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests_support import PATIENT, WAIT_S, limited, pass_deadlines, small_cache, until

from kvflow import Config, LeaseOutcome, LoadRequest, RuntimeState, ServeRequest
from kvflow.blocking import Load, Runtime
from kvflow.core.policy.states import LeaseState
from kvflow.errors import (
    ConfigError,
    DeadlineExceeded,
    LeaseExpired,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeDraining,
    UsageError,
)
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.world import World
from kvflow.testing import ManualClock, assert_closed, assert_quiet
from kvflow.transport.inproc import InprocNetwork, InprocTransport

CONFIG = limited(replace(PATIENT, listen="tcp://127.0.0.1:0"), seal_hold_s=0.01)


@dataclass(frozen=True)
class Engine:
    runtime: Runtime
    kv_caches: dict[str, torch.Tensor]
    transport: InprocTransport | None


@contextlib.contextmanager
def engine(
    engine_id: str,
    network: InprocNetwork | None,
    *,
    fill: float,
    config: Config = CONFIG,
    clock: Callable[[], Clock] = SystemClock,
) -> Iterator[Engine]:
    """One side; over real NIXL without a network."""
    made: list[InprocTransport] = []

    def make(_: Config, name: str) -> InprocTransport:
        assert network is not None
        made.append(InprocTransport(name, network))
        return made[0]

    kv_caches, layout = small_cache(fill=fill)
    config = replace(config, engine_id=engine_id)
    world = World(transport=make, clock=clock) if network else World(clock=clock)
    with Runtime(config, world=world, call_timeout_s=WAIT_S) as runtime:
        runtime.register_kv_caches(kv_caches, layout)
        yield Engine(runtime, kv_caches, made[0] if made else None)


@dataclass(frozen=True)
class Pair:
    producer: Engine
    consumer: Engine

    def request(self, ticket: dict[str, Any]) -> LoadRequest:
        return LoadRequest("req", ticket=ticket, block_ids=[5, 6])


OFFER = ServeRequest("req", block_ids=[1, 2], num_tokens=8)


@pytest.fixture(params=["inproc", pytest.param("nixl", marks=pytest.mark.nixl)])
def network(request: pytest.FixtureRequest) -> InprocNetwork | None:
    return InprocNetwork() if request.param == "inproc" else None


@pytest.fixture
def pair(network: InprocNetwork | None) -> Iterator[Pair]:
    before = set(threading.enumerate())
    with engine("producer", network, fill=1.0) as producer, engine("consumer", network, fill=-1.0) as consumer:
        yield Pair(producer, consumer)
        for side in (producer, consumer):
            assert_quiet(side.runtime.statistics())
    for side in (producer, consumer):
        assert_closed(side.runtime.statistics())
    assert set(threading.enumerate()) <= before


@pytest.fixture
def inproc_pair() -> Iterator[Pair]:
    network = InprocNetwork()
    with engine("producer", network, fill=1.0) as producer, engine("consumer", network, fill=-1.0) as consumer:
        yield Pair(producer, consumer)


def test_a_hand_over(pair: Pair) -> None:
    lease = pair.producer.runtime.serve_blocks(OFFER)
    assert (lease.request_id, lease.block_ids) == ("req", (1, 2))
    report = pair.consumer.runtime.load_blocks(pair.request(lease.ticket.to_params()))
    assert report.blocks == 2
    assert lease.wait(WAIT_S) is LeaseOutcome.READ
    for layer in pair.consumer.kv_caches.values():
        assert (layer[:, [5, 6]] == 1.0).all()
        assert (layer[:, [0, 1, 2, 3, 4, 7]] == -1.0).all()


def test_loads_are_started_and_waited_for_later(pair: Pair) -> None:
    lease = pair.producer.runtime.serve_blocks(OFFER)
    pending = pair.consumer.runtime.start_load(pair.request(lease.ticket.to_params()))
    called: concurrent.futures.Future[bool] = concurrent.futures.Future()
    pending.add_done_callback(lambda ended: called.set_result(ended is pending))
    assert called.result(WAIT_S)
    assert pending.done
    assert pending.result().bytes > 0
    assert lease.outcome.result(WAIT_S) is LeaseOutcome.READ


def test_a_lease_is_revoked_from_any_thread(pair: Pair) -> None:
    lease = pair.producer.runtime.serve_blocks(OFFER)
    lease.revoke()
    assert lease.wait(WAIT_S) is LeaseOutcome.REVOKED
    with pytest.raises(LeaseExpired):
        pair.consumer.runtime.load_blocks(pair.request(lease.ticket.to_params()))


def test_a_request_that_waits_keeps_its_lease(network: InprocNetwork | None) -> None:
    """Time passes for the consumer alone, as the test says: the lease cannot end before it is renewed."""
    clock = ManualClock()
    with (
        engine("producer", network, fill=1.0) as producer,
        engine("consumer", network, fill=-1.0, clock=lambda: clock) as consumer,
    ):
        pair = Pair(producer, consumer)
        lease = producer.runtime.serve_blocks(OFFER)
        ticket = lease.ticket.to_params()

        async def pass_time(_: asynchronous.Runtime) -> None:
            clock.advance(lease.ticket.ttl_s / 10)

        with consumer.runtime.keep_leases(ticket):
            while producer.runtime.statistics().serving.renewals < 1:  # type: ignore[union-attr]
                assert not lease.outcome.done
                on_loop(consumer.runtime, pass_time)
            report = consumer.runtime.load_blocks(pair.request(ticket))
        assert report.blocks == 2
        assert lease.wait(WAIT_S) is LeaseOutcome.READ
        with pytest.raises(RequestError, match="ticket"), consumer.runtime.keep_leases({}):
            raise AssertionError("not reached")


def test_the_verbs_about_peers(pair: Pair) -> None:
    producer, consumer = pair.producer.runtime, pair.consumer.runtime
    lease = producer.serve_blocks(OFFER)
    (warmed,) = consumer.prewarm([lease.ticket], timeout_s=WAIT_S)
    assert warmed.error is None
    assert consumer.release_blocks(lease.ticket)
    assert lease.wait(WAIT_S) is LeaseOutcome.READ
    assert len(consumer.statistics().peers) == 1
    assert consumer.forget_peer("producer")
    assert consumer.statistics().peers == ()
    assert consumer.drain(WAIT_S).finished
    with pytest.raises(RuntimeDraining):
        consumer.load_blocks(pair.request(lease.ticket.to_params()))


def test_errors_come_out_where_the_verb_was_called(inproc_pair: Pair) -> None:
    with pytest.raises(RequestError, match="99"):
        inproc_pair.producer.runtime.serve_blocks(replace(OFFER, block_ids=[99]))
    pending = inproc_pair.consumer.runtime.start_load(inproc_pair.request({}))
    with pytest.raises(RequestError, match="ticket"):
        pending.result(WAIT_S)


def test_many_threads_use_one_runtime(inproc_pair: Pair) -> None:
    producer, consumer = inproc_pair.producer.runtime, inproc_pair.consumer.runtime

    def hand_over(index: int) -> LeaseOutcome:
        lease = producer.serve_blocks(ServeRequest(f"r{index}", block_ids=[index], num_tokens=4))
        consumer.load_blocks(LoadRequest(f"r{index}", ticket=lease.ticket, block_ids=[index]))
        return lease.wait(WAIT_S)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert set(threads.map(hand_over, range(8))) == {LeaseOutcome.READ}


def test_a_wait_for_a_lease_has_a_bound_and_changes_nothing(inproc_pair: Pair) -> None:
    lease = inproc_pair.producer.runtime.serve_blocks(OFFER)
    with pytest.raises(TimeoutError):
        lease.wait(0.0)
    assert inproc_pair.producer.runtime.statistics().serving is not None
    assert inproc_pair.consumer.runtime.load_blocks(inproc_pair.request(lease.ticket.to_params())).blocks == 2
    assert lease.wait(WAIT_S) is LeaseOutcome.READ


def test_a_cancelled_load_is_done_when_its_bytes_have_stopped(inproc_pair: Pair) -> None:
    transport = inproc_pair.consumer.transport
    assert transport is not None
    lease = inproc_pair.producer.runtime.serve_blocks(OFFER)
    transport.faults.hold = True
    pending = inproc_pair.consumer.runtime.start_load(inproc_pair.request(lease.ticket.to_params()))
    on_loop(inproc_pair.consumer.runtime, lambda runtime: wait_for_reads(runtime, 1))
    pending.cancel()
    assert not pending.done
    on_loop(inproc_pair.consumer.runtime, lambda _: perform(transport))
    with pytest.raises(concurrent.futures.CancelledError):
        pending.result(WAIT_S)
    lease.revoke()
    assert lease.wait(WAIT_S) is LeaseOutcome.REVOKED


def test_a_cancelled_load_says_when_its_blocks_are_safe() -> None:
    """Done is not safe: its bytes may still land for longer than Config.cancel_grace_s."""
    network = InprocNetwork()
    config = replace(CONFIG, cancel_grace_s=0.01)
    with (
        engine("producer", network, fill=1.0) as producer,
        engine("consumer", network, fill=-1.0, config=config) as consumer,
    ):
        transport = consumer.transport
        assert transport is not None
        lease = producer.runtime.serve_blocks(OFFER)
        transport.faults.hold = True
        load = consumer.runtime.start_load(LoadRequest("req", ticket=lease.ticket, block_ids=[5, 6]))
        on_loop(consumer.runtime, lambda runtime: wait_for_reads(runtime, 1))
        load.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            load.result(60.0)
        assert (load.done, load.safe, load.block_ids) == (True, False, (5, 6))
        with pytest.raises(TimeoutError):
            load.settled(0.0)
        on_loop(consumer.runtime, lambda _: perform(transport))
        load.settled(60.0)
        assert load.safe
        assert (lease.state, lease.done) == (LeaseState.OFFERED, False)
        assert lease.revoke().wait(60.0) is LeaseOutcome.REVOKED
        assert (lease.state, lease.done) == (LeaseState.REVOKED, True)


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan"), 0.0, -1.0, 1e300])
def test_a_deadline_that_cannot_be_is_refused(inproc_pair: Pair, deadline_s: float) -> None:
    lease = inproc_pair.producer.runtime.serve_blocks(OFFER)
    request = replace(inproc_pair.request(lease.ticket.to_params()), deadline_s=deadline_s)
    with pytest.raises(RequestError, match="deadline_s"):
        inproc_pair.consumer.runtime.load_blocks(request)
    lease.revoke()


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), -1.0])
def test_a_timeout_that_cannot_be_is_a_usage_error(inproc_pair: Pair, timeout_s: float) -> None:
    lease = inproc_pair.producer.runtime.serve_blocks(OFFER)
    with pytest.raises(UsageError, match="timeout_s"):
        lease.wait(timeout_s)
    lease.revoke()


def test_quarantined_blocks_can_be_waited_for() -> None:
    network = InprocNetwork()
    config = replace(CONFIG, cancel_grace_s=0.01)
    with (
        engine("producer", network, fill=1.0) as producer,
        engine("consumer", network, fill=-1.0, config=config) as consumer,
    ):
        transport = consumer.transport
        assert transport is not None
        lease = producer.runtime.serve_blocks(OFFER)
        transport.faults.hold = True
        pending = consumer.runtime.start_load(LoadRequest("req", ticket=lease.ticket.to_params(), block_ids=[5, 6]))
        on_loop(consumer.runtime, lambda runtime: wait_for_reads(runtime, 1))
        on_loop(consumer.runtime, pass_deadlines)
        with pytest.raises(DeadlineExceeded) as caught:
            pending.result(WAIT_S)
        quarantine = caught.value.quarantine
        assert isinstance(quarantine, Load)
        with pytest.raises(TimeoutError):
            quarantine.settled(0.0)
        on_loop(consumer.runtime, lambda _: perform(transport))
        quarantine.settled(WAIT_S)
        assert quarantine.safe
        lease.revoke()


def on_loop(runtime: Runtime, work: Callable[[asynchronous.Runtime], Coroutine[Any, Any, None]]) -> None:
    runtime.start(work).result(WAIT_S)


async def wait_for_reads(runtime: asynchronous.Runtime, count: int) -> None:
    await until(lambda: runtime.statistics().transport.open_reads >= count)


async def perform(transport: InprocTransport) -> None:
    transport.perform()


# --- opening, closing, dying


def runtime() -> Runtime:
    network = InprocNetwork()
    return Runtime(CONFIG, world=World(transport=lambda _, name: InprocTransport(name, network)))


def test_closing_twice_is_fine_and_nothing_works_afterwards() -> None:
    closed = runtime()
    closed.open()
    closed.close()
    closed.close()
    assert closed.statistics().state is RuntimeState.CLOSED
    with pytest.raises(RuntimeClosed):
        closed.serve_blocks(OFFER)
    load = closed.start_load(LoadRequest("r", {}, []))
    assert (load.done, load.safe) == (True, True)
    load.settled(0.0)
    with pytest.raises(RuntimeClosed):
        load.result()
    with pytest.raises(UsageError, match="opened once"):
        closed.open()


def test_a_runtime_that_was_never_opened_is_closed_without_a_thread() -> None:
    unopened = runtime()
    with pytest.raises(UsageError, match="not open yet"):
        unopened.serve_blocks(OFFER)
    assert unopened.statistics().state is RuntimeState.NEW
    unopened.close()
    with pytest.raises(UsageError, match="opened once"):
        unopened.open()


def test_what_cannot_be_opened_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with runtime() as first:
        port = int(on_loop_result(first).rpartition(":")[2])
        second = Runtime(replace(CONFIG, listen=f"tcp://127.0.0.1:{port}", transport="inproc"))
        with pytest.raises(ConfigError, match="cannot bind"):
            second.open()
        second.close()
    assert set(threading.enumerate()) <= before


def on_loop_result(opened: Runtime) -> str:
    async def address(inner: asynchronous.Runtime) -> str:
        return inner.address

    return opened.start(address).result(WAIT_S)


def test_closing_settles_who_still_waits() -> None:
    opened = runtime()
    opened.open()
    waiting = opened.start(lambda _: asyncio.Event().wait())
    opened.close()
    with pytest.raises(RuntimeClosed):
        waiting.result(WAIT_S)


def test_a_loop_that_dies_settles_everybody_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    opened = runtime()
    opened.open()
    opened.register_kv_caches(*small_cache())
    lease = opened.serve_blocks(OFFER)
    waiting = opened.start(lambda _: asyncio.Event().wait())

    async def die(_: asynchronous.Runtime) -> None:
        asyncio.get_running_loop().call_soon(sys.exit, "killed by a test")

    opened.start(die)
    for pending in (waiting, lease.outcome):
        with pytest.raises((RuntimeBroken, RuntimeClosed, concurrent.futures.CancelledError)):
            pending.result(WAIT_S)
    with pytest.raises(RuntimeBroken, match="died: killed by a test"):
        opened.close()
    opened.close()
    assert set(threading.enumerate()) <= before


def test_whatever_work_raises_belongs_to_who_waits() -> None:
    async def leave(_: asynchronous.Runtime) -> None:
        raise SystemExit(3)

    with runtime() as opened:
        with pytest.raises(SystemExit):
            opened.start(leave).result(WAIT_S)
        assert opened.statistics().state is RuntimeState.OPEN


def test_its_own_thread_cannot_wait_for_itself() -> None:
    with runtime() as opened:

        async def serve_from_within(_: asynchronous.Runtime) -> None:
            opened.serve_blocks(OFFER)

        with pytest.raises(UsageError, match="wait for itself"):
            opened.start(serve_from_within).result(WAIT_S)


def test_work_cancelled_before_it_began_never_begins() -> None:
    begun = []
    with runtime() as opened:

        async def block_and_cancel(_: asynchronous.Runtime) -> None:
            late = opened.start(note)
            late._cancel()  # as if the loop had got `cancel` first
            with pytest.raises(concurrent.futures.CancelledError):
                await until(lambda: late.done)
                late.result()

        async def note(_: asynchronous.Runtime) -> None:
            begun.append(True)

        opened.start(block_and_cancel).result(WAIT_S)
    assert begun == []


FORGETFUL = """
from kvflow import Config
from kvflow.blocking import Load, Runtime
runtime = Runtime(Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc"))
runtime.open()
import atexit
atexit._run_exitfuncs()
print(runtime.statistics().state, runtime._host.alive)
"""


def test_a_forgotten_runtime_does_not_keep_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["closed", "False"])
