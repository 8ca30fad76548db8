"""The runtime for engines that are not asyncio programs: the verbs, their bounds, and that no thread is left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import PATIENT, WAIT_S, limited, pass_deadlines, small_cache, until

from kvflow import (
    Config,
    LeaseOutcome,
    LoadReport,
    LoadRequest,
    RuntimeState,
    ServeRequest,
)
from kvflow.blocking import Lease, Load, Runtime
from kvflow.core.policy.states import LeaseState
from kvflow.errors import (
    CacheUnregistered,
    ConfigError,
    DeadlineExceeded,
    LeaseExpired,
    NotStored,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeDraining,
    UsageError,
)
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.part import Part
from kvflow.runtime.producer.lease import Lease as AsyncLease
from kvflow.runtime.world import World
from kvflow.storage import RestoreReport, RestoreRequest, SaveReport, SaveRequest, Storage
from kvflow.storage.store_thread import StoreThread
from kvflow.testing import ManualClock, assert_closed, assert_quiet
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.support.storing import HeldMover

CONFIG = limited(replace(PATIENT, listen="tcp://127.0.0.1:0"), seal_hold_s=0.01)
PLAIN = replace(CONFIG, transport="inproc")
BRIEF = replace(CONFIG, cancel_grace_s=0.01)
OFFER = ServeRequest("req", block_ids=[1, 2], num_tokens=8)


@dataclass(frozen=True)
class Pair:
    """Blocks of the producer are full of 1, those of the consumer of -1."""

    producer: Runtime
    consumer: Runtime
    cache: dict[str, torch.Tensor]
    """The consumer's."""
    made: list[InprocTransport]

    def offer(self) -> Lease:
        return self.producer.serve_blocks(OFFER)

    def load(self, lease: Lease) -> LoadReport:
        return self.consumer.load_blocks(load_request(lease))

    def start_held(self, lease: Lease) -> Load:
        """Start a load. Its read is posted, and held."""
        self.made[1].faults.hold = True
        load = self.consumer.start_load(load_request(lease))
        on_loop(self.consumer, lambda runtime: until(lambda: runtime.statistics().transport.open_reads))
        return load

    def perform(self) -> None:
        call_on_loop(self.consumer, self.made[1].perform)


def load_request(lease: Lease, **changes: Any) -> LoadRequest:
    return LoadRequest("req", ticket=lease.ticket.to_params(), block_ids=[5, 6], **changes)


def on_loop(runtime: Runtime, work: Callable[[asynchronous.Runtime], Coroutine[Any, Any, Any]]) -> Any:
    return runtime.start(work).result(WAIT_S)


def call_on_loop(runtime: Runtime, work: Callable[[], Any]) -> Any:
    async def call(_: asynchronous.Runtime) -> Any:
        return work()

    return on_loop(runtime, call)


@contextlib.contextmanager
def opened_pair(
    network: InprocNetwork | None,
    *,
    config: Config = CONFIG,
    clock: Callable[[], Clock] = SystemClock,
    parts: Sequence[Sequence[Part]] = ((), ()),
) -> Iterator[Pair]:
    """Over real NIXL without a network. The clock is the consumer's, `parts` are both's. Afterwards nothing is left."""
    before = set(threading.enumerate())
    made: list[InprocTransport] = []

    def make(_: Config, name: str) -> InprocTransport:
        assert network is not None
        made.append(InprocTransport(name, network))
        return made[-1]

    worlds = [World(transport=make, clock=each) if network else World(clock=each) for each in (SystemClock, clock)]
    with contextlib.ExitStack() as stack:
        sides, caches = [], []
        names = ("producer", "consumer")
        for engine_id, world, fill, given in zip(names, worlds, (1.0, -1.0), parts, strict=True):
            named = replace(config, engine_id=engine_id)
            runtime = Runtime(named, world=world, parts=given, call_timeout_s=WAIT_S)
            sides.append(stack.enter_context(runtime))
            kv_caches, layout = small_cache(fill=fill)
            runtime.register_kv_caches(kv_caches, layout)
            caches.append(kv_caches)
        yield Pair(*sides, caches[1], made)
        for side in sides:
            assert_quiet(side.statistics())
    for side in sides:
        assert_closed(side.statistics())
    assert set(threading.enumerate()) <= before


TWICE = pytest.mark.parametrize("network", ["inproc", pytest.param("nixl", marks=pytest.mark.nixl)], indirect=True)
"""A test that runs over real NIXL, too."""


@pytest.fixture
def network(request: pytest.FixtureRequest) -> InprocNetwork | None:
    return None if getattr(request, "param", "inproc") == "nixl" else InprocNetwork()


@pytest.fixture
def pair(network: InprocNetwork | None) -> Iterator[Pair]:
    with opened_pair(network) as pair:
        yield pair


@pytest.fixture
def brief() -> Iterator[Pair]:
    with opened_pair(InprocNetwork(), config=BRIEF) as pair:
        yield pair


@TWICE
def test_a_hand_over(pair: Pair) -> None:
    lease = pair.offer()
    assert (lease.request_id, lease.block_ids) == ("req", (1, 2))
    with pytest.raises(TimeoutError):
        lease.wait(0.0)
    assert pair.load(lease).blocks == 2
    assert lease.wait(WAIT_S) is LeaseOutcome.READ
    for layer in pair.cache.values():
        assert (layer[:, [5, 6]] == 1.0).all()
        assert (layer[:, [0, 1, 2, 3, 4, 7]] == -1.0).all()


def test_verbs_are_those_of_asyncio_and_say_so() -> None:
    """`help()` of a verb shows the arguments of the asyncio verb, apart from arguments for threads, and a text."""
    pairs = [(Runtime, asynchronous.Runtime), (Lease, AsyncLease)]
    for ours, theirs in pairs:
        verbs = [name for name in vars(theirs) if not name.startswith("_") and callable(getattr(ours, name, None))]
        assert len(verbs) > 3
        for name in verbs:
            shown, meant = (inspect.signature(getattr(kind, name)).parameters for kind in (ours, theirs))
            assert [*meant] == [key for key in shown if key not in ("timeout_s",)], name
            said = inspect.getdoc(getattr(ours, name))
            assert said, name
            assert not said.startswith("Blocking form") or f"`kvflow.{theirs.__name__}.{name}`" in said


def test_loads_are_started_and_waited_for_later(pair: Pair) -> None:
    lease = pair.offer()
    pending = pair.consumer.start_load(load_request(lease))
    called: concurrent.futures.Future[bool] = concurrent.futures.Future()
    pending.add_done_callback(lambda ended: called.set_result(ended is pending))
    assert called.result(WAIT_S)
    assert pending.done
    assert pending.result().bytes > 0
    assert lease.outcome.result(WAIT_S) is LeaseOutcome.READ


def test_a_load_gets_its_blocks_from_any_thread(pair: Pair) -> None:
    lease = pair.offer()
    request = load_request(lease)
    load = pair.consumer.start_load(replace(request, block_ids=[], extends=True))
    assert load.computed(0, WAIT_S) == lease.ticket.num_tokens
    with pytest.raises(RequestError, match=r"extend\(\): block_ids: block id -1"):
        load.extend([-1])
    load.extend(request.block_ids)
    assert load.result(WAIT_S).bytes > 0
    assert load.computed(0) is None
    load.extend([1])
    assert lease.outcome.result(WAIT_S) is LeaseOutcome.READ


async def address(runtime: asynchronous.Runtime) -> str:
    return runtime.address


def test_a_lease_is_restarted_and_revoked_from_any_thread(pair: Pair) -> None:
    lease = pair.offer()
    entry = lease._lease._entry
    before_s = entry.expires_s
    lease.restart(1e6)
    lease.restart()  # told in order
    assert (lease.state, lease.done) == (LeaseState.OFFERED, False)
    at_once = call_on_loop(pair.producer, lambda: (lease._lease.revoke().state, lease.done))
    assert at_once == (LeaseState.REVOKED, False), "a reader may still read its blocks"
    assert lease.revoke().wait(WAIT_S) is LeaseOutcome.REVOKED
    assert (lease.state, lease.done) == (LeaseState.REVOKED, True)
    assert entry.expires_s > before_s + 1e5
    with pytest.raises(RequestError, match="ttl_s"):
        lease.restart(0.0)
    with pytest.raises(LeaseExpired):
        pair.load(lease)


@TWICE
def test_a_request_that_waits_keeps_its_lease(network: InprocNetwork | None) -> None:
    """Time passes for the consumer alone, as the test says: the lease cannot end before it is renewed."""
    clock = ManualClock()
    with opened_pair(network, clock=lambda: clock) as pair:
        lease = pair.offer()

        async def pass_time(runtime: asynchronous.Runtime) -> None:
            incarnation = runtime._supervisor.incarnation
            if (
                incarnation is not None and incarnation.host.leases._renewed
            ):  # before that its peer is idle, and would be evicted
                clock.advance(lease.ticket.ttl_s / 10)

        with pair.consumer.keep_leases(lease.ticket.to_params()):
            while pair.producer.statistics().serving.renewals < 1:  # type: ignore[union-attr]
                assert not lease.done
                on_loop(pair.consumer, pass_time)
            assert pair.load(lease).blocks == 2
        assert lease.wait(WAIT_S) is LeaseOutcome.READ
        with pytest.raises(RequestError, match="ticket"), pair.consumer.keep_leases({}):
            raise AssertionError("not reached")


def test_the_verbs_about_peers(pair: Pair) -> None:
    lease, consumer = pair.offer(), pair.consumer
    (warmed,) = consumer.prewarm([lease.ticket], timeout_s=WAIT_S)
    assert warmed is None
    assert consumer.release_blocks(lease.ticket)
    assert lease.wait(WAIT_S) is LeaseOutcome.READ
    assert len(consumer.statistics().peers) == 1
    assert consumer.forget_peer("producer")
    assert consumer.statistics().peers == ()
    assert consumer.drain(WAIT_S)
    with pytest.raises(RuntimeDraining):
        pair.load(lease)


@TWICE
def test_an_engine_that_sleeps(pair: Pair) -> None:
    """On both sides; the second time with another cache. Of before nothing is good, and a new ticket is."""
    for blocks in (8, 5):
        before = pair.offer()
        pair.producer.unregister()
        assert before.wait(WAIT_S) is LeaseOutcome.REVOKED
        pair.producer.unregister()  # nothing to do
        with pytest.raises(CacheUnregistered):
            pair.offer()
        pair.producer.register_kv_caches(*small_cache(num_blocks=blocks, fill=1.0))
        with pytest.raises(LeaseExpired):
            pair.load(before)
        pair.consumer.unregister()
        with pytest.raises(CacheUnregistered):
            pair.load(before)
        pair.consumer.register_kv_caches(*small_cache(fill=-1.0))
        lease = pair.offer()
        assert pair.load(lease).blocks == 2
        assert lease.wait(WAIT_S) is LeaseOutcome.READ


def test_errors_come_out_where_the_verb_was_called(pair: Pair) -> None:
    with pytest.raises(RequestError, match="99"):
        pair.producer.serve_blocks(replace(OFFER, block_ids=[99]))
    with pytest.raises(RequestError, match="ticket"):
        pair.consumer.start_load(LoadRequest("req", {}, [5, 6])).result(WAIT_S)
    lease = pair.offer()
    for bad_s in (float("inf"), float("nan"), 1e300):
        with pytest.raises(RequestError, match="deadline_s"):
            pair.consumer.load_blocks(load_request(lease, deadline_s=bad_s))
    for over_s in (0.0, -1.0):
        with pytest.raises(DeadlineExceeded, match="in phase 'queued'"):
            pair.consumer.load_blocks(load_request(lease, deadline_s=over_s))
    for bad_s in (float("inf"), float("nan"), -1.0):
        with pytest.raises(UsageError, match="timeout_s"):
            lease.wait(bad_s)
    assert lease.revoke().wait(WAIT_S) is LeaseOutcome.REVOKED


def test_many_threads_use_one_runtime(pair: Pair) -> None:
    def hand_over(index: int) -> LeaseOutcome:
        lease = pair.producer.serve_blocks(ServeRequest(f"r{index}", block_ids=[index], num_tokens=4))
        pair.consumer.load_blocks(LoadRequest(f"r{index}", ticket=lease.ticket, block_ids=[index]))
        return lease.wait(WAIT_S)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert set(threads.map(hand_over, range(8))) == {LeaseOutcome.READ}


def test_a_cancelled_load_is_done_when_its_bytes_have_stopped(pair: Pair) -> None:
    lease = pair.offer()
    pending = pair.start_held(lease)
    pending.cancel()
    assert not pending.done
    pair.perform()
    with pytest.raises(concurrent.futures.CancelledError):
        pending.result(WAIT_S)
    lease.revoke().wait(WAIT_S)


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "past its deadline"])
def test_a_load_that_is_done_says_when_its_blocks_are_safe(brief: Pair, cancelled: bool) -> None:
    """Done is not safe: its bytes may still land for longer than Config.cancel_grace_s."""
    lease = brief.offer()
    load: Load | None = brief.start_held(lease)
    assert load is not None
    if cancelled:
        load.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            load.result(WAIT_S)
        assert (load.done, load.safe, load.block_ids) == (True, False, (5, 6))
    else:
        on_loop(brief.consumer, pass_deadlines)
        with pytest.raises(DeadlineExceeded) as caught:
            load.result(WAIT_S)
        load = caught.value.quarantine
    assert isinstance(load, Load)
    with pytest.raises(TimeoutError):
        load.settled(0.0)
    brief.perform()
    load.settled(WAIT_S)
    assert load.safe
    lease.revoke().wait(WAIT_S)


# --- opening, closing, dying


@pytest.fixture
def opened() -> Iterator[Runtime]:
    """A runtime that the test may close, or that dies. No thread is left behind."""
    before = set(threading.enumerate())
    runtime = Runtime(PLAIN)
    runtime.open()
    yield runtime
    with contextlib.suppress(RuntimeBroken):
        runtime.close()
    runtime.close()
    assert set(threading.enumerate()) <= before


async def wait_forever(_: asynchronous.Runtime) -> None:
    await asyncio.get_running_loop().create_future()


def test_closing_twice_is_fine_and_nothing_works_afterwards(opened: Runtime) -> None:
    waiting = opened.start(wait_forever)
    opened.close()
    opened.close()
    with pytest.raises(RuntimeClosed):
        waiting.result(WAIT_S)
    assert opened.statistics().state is RuntimeState.CLOSED
    with pytest.raises(RuntimeClosed):
        opened.serve_blocks(OFFER)
    load = opened.start_load(LoadRequest("r", {}, []))
    assert (load.done, load.safe) == (True, True)
    load.settled(0.0)
    with pytest.raises(RuntimeClosed):
        load.result()
    with pytest.raises(UsageError, match="opened once"):
        opened.open()


def test_a_runtime_that_was_never_opened_is_closed_without_a_thread() -> None:
    unopened = Runtime(PLAIN)
    with pytest.raises(UsageError, match="not open yet"):
        unopened.serve_blocks(OFFER)
    assert unopened.statistics().state is RuntimeState.NEW
    unopened.close()
    with pytest.raises(UsageError, match="opened once"):
        unopened.open()


def test_what_cannot_be_opened_leaves_no_thread(opened: Runtime) -> None:
    second = Runtime(replace(PLAIN, listen=on_loop(opened, address)))
    with pytest.raises(ConfigError, match="cannot bind"):
        second.open()
    second.close()


def test_an_interrupt_while_it_opens_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    interrupted = Runtime(PLAIN)
    monkeypatch.setattr(interrupted._thread._opened, "result", interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.open()
    assert not interrupted._thread.is_alive()
    with pytest.raises(RuntimeClosed):
        interrupted.serve_blocks(OFFER)


def test_a_loop_that_dies_settles_everybody_and_leaves_no_thread(opened: Runtime) -> None:
    opened.register_kv_caches(*small_cache())
    lease = opened.serve_blocks(OFFER)
    waiting = opened.start(wait_forever)

    call_on_loop(opened, lambda: asyncio.get_running_loop().call_soon(sys.exit, "killed by a test"))
    for pending in (waiting, lease.outcome):
        with pytest.raises((RuntimeBroken, RuntimeClosed, concurrent.futures.CancelledError)):
            pending.result(WAIT_S)
    with pytest.raises(RuntimeBroken, match="died: killed by a test"):
        opened.close()


def test_whatever_work_raises_belongs_to_who_waits(opened: Runtime) -> None:
    def work() -> None:
        raise GeneratorExit

    with pytest.raises(GeneratorExit):
        call_on_loop(opened, work)
    with pytest.raises(UsageError, match="wait for itself"):
        call_on_loop(opened, lambda: opened.serve_blocks(OFFER))
    assert opened.statistics().state is RuntimeState.OPEN


WAITS: dict[str, Callable[[Pair, Lease, Load], object]] = {
    "Lease.wait": lambda _, lease, __: lease.wait(),
    "Lease.advance": lambda _, lease, __: lease.advance(8),
    "Lease.extend": lambda _, lease, __: lease.extend([3]),
    "Lease.complete": lambda _, lease, __: lease.complete(),
    "Lease.fail": lambda _, lease, __: lease.fail("broken"),
    "Load.result": lambda _, __, load: load.result(),
    "Load.wait_done": lambda _, __, load: load.wait_done(),
    "Load.settled": lambda _, __, load: load.settled(),
    "Load.__iter__": lambda _, __, load: next(iter(load)),
    "Runtime.decline": lambda pair, *_: pair.producer.decline("other"),
    "Runtime.drain": lambda pair, *_: pair.producer.drain(),
    "Runtime.close": lambda pair, *_: pair.producer.close(),
}


def test_who_would_wait_for_itself_is_told() -> None:
    """On the loop's thread, such as in an observer: nothing is done, since the thread would wait forever."""
    with opened_pair(InprocNetwork(), config=PLAIN) as pair:
        lease = pair.producer.serve_blocks(ServeRequest("req", [1, 2], num_tokens=8, computed_tokens=0))
        load = pair.consumer.start_load(load_request(lease))

        for name, wait in WAITS.items():
            runtime = pair.consumer if name.startswith("Load") else pair.producer
            with pytest.raises(UsageError, match="wait for itself"):
                call_on_loop(runtime, functools.partial(wait, pair, lease, load))
            assert (lease.state, load.done, len(lease.block_ids)) == (LeaseState.OFFERED, False, 2), name
        assert lease.revoke().wait(WAIT_S) == "revoked"
        with pytest.raises(LeaseExpired):
            load.result(WAIT_S)


@contextlib.contextmanager
def stuck(runtime: Runtime) -> Iterator[None]:
    """Inside the block the loop's thread does nothing, and calls wait for it a millisecond."""
    begun, go_on = threading.Event(), threading.Event()

    async def block(_: asynchronous.Runtime) -> None:
        begun.set()
        go_on.wait(WAIT_S)

    blocking = runtime.start(block)
    assert begun.wait(WAIT_S)
    usual_s, runtime._thread.call_timeout_s = runtime._thread.call_timeout_s, 0.001
    try:
        yield
    finally:
        runtime._thread.call_timeout_s = usual_s
        go_on.set()
        blocking.result(WAIT_S)


def test_a_stuck_loop_keeps_nobody_waiting() -> None:
    """Verbs that only wait for the loop's thread end by themselves, and their work is not done later."""
    with opened_pair(InprocNetwork(), config=PLAIN) as pair:
        lease = pair.producer.serve_blocks(ServeRequest("req", [1, 2], num_tokens=12, computed_tokens=0))
        waits: dict[str, Callable[[], object]] = {
            "advance": lambda: lease.advance(8),
            "extend": lambda: lease.extend([3]),
            "complete": lambda: lease.complete(),
            "fail": lambda: lease.fail("broken"),
            "serve_blocks": lambda: pair.producer.serve_blocks(replace(OFFER, block_ids=[4, 5])),
            "decline": lambda: pair.producer.decline("other"),
            "statistics": lambda: pair.producer.statistics(),
            "keep_leases": lambda: pair.producer.keep_leases(lease.ticket).__enter__(),
        }
        with stuck(pair.producer):
            for wait in waits.values():
                with pytest.raises(TimeoutError):
                    wait()
        assert (lease.state, lease.block_ids) == (LeaseState.OFFERED, (1, 2))
        serving = pair.producer.statistics().serving
        assert serving is not None
        assert (serving.open_leases, serving.failed) == (1, 0)
        assert lease.revoke().wait(WAIT_S) is LeaseOutcome.REVOKED


def test_who_follows_a_load_on_a_stuck_loop_waits_as_long_as_it_may_take() -> None:
    with opened_pair(InprocNetwork(), config=replace(PLAIN, cancel_grace_s=0.01)) as pair:
        lease = pair.producer.serve_blocks(ServeRequest("req", [1, 2], num_tokens=8, computed_tokens=0))
        load = pair.consumer.start_load(load_request(lease, deadline_s=0.05))
        with stuck(pair.consumer), pytest.raises(TimeoutError):
            next(iter(load))
        with pytest.raises(DeadlineExceeded):
            load.result(WAIT_S)
        load.settled(WAIT_S)
        assert lease.revoke().wait(WAIT_S) is LeaseOutcome.REVOKED


def test_work_cancelled_before_its_first_step_is_done(pair: Pair) -> None:
    """The loop gets both in one turn, so the task never runs; its handle is settled nevertheless."""

    async def start_and_cancel(_: asynchronous.Runtime) -> tuple[Load, concurrent.futures.Future[None]]:
        load, pending = pair.consumer.start_load(load_request(lease)), pair.consumer.start(never)
        load.cancel()
        pending.cancel()
        return load, pending

    async def never(_: asynchronous.Runtime) -> None:
        raise AssertionError("it was cancelled")

    lease = pair.offer()
    for handle in on_loop(pair.consumer, start_and_cancel):
        with pytest.raises(concurrent.futures.CancelledError):
            handle.result(WAIT_S)
    lease.revoke().wait(WAIT_S)


FORGETFUL = """
from kvflow import Config
from kvflow.blocking import Load, Runtime
runtime = Runtime(Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc"))
runtime.open()
import atexit
atexit._run_exitfuncs()
print(runtime.statistics().state, runtime._thread.is_alive())
"""


def test_a_forgotten_runtime_does_not_keep_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["closed", "False"])


class StoredBlocks:
    """A part's verbs in threads: each is a coroutine on the runtime's loop."""

    def __init__(self, runtime: Runtime, storage: Storage) -> None:
        self._runtime, self._storage = runtime, storage

    def save(self, request: SaveRequest) -> SaveReport:
        return self._runtime.start(lambda _: self._storage.save(request)).result(WAIT_S)

    def restore(self, request: RestoreRequest) -> RestoreReport:
        return self._runtime.start(lambda _: self._storage.restore(request)).result(WAIT_S)

    def drop(self, keys: list[str] | None = None) -> int:
        return self._runtime.start(lambda _: self._storage.drop(keys)).result(WAIT_S)

    def has(self, key: str) -> bool:
        async def ask(_: object) -> bool:
            return self._storage.has(key)

        return self._runtime.start(ask).result(WAIT_S)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[StoredBlocks, dict[str, torch.Tensor], HeldMover]]:
    """A storage, its runtime's cache full of 3, and what moves its blocks."""
    (cache, layout), mover, network = small_cache(fill=3.0), HeldMover(), InprocNetwork()
    world = World(transport=lambda _, name: InprocTransport(name, network))
    storage = Storage(tmp_path, files=lambda _, name: StoreThread(name, lambda _: mover))
    with Runtime(replace(PLAIN, cancel_grace_s=0.01), world=world, parts=[storage]) as runtime:
        runtime.register_kv_caches(cache, layout)
        blocks = StoredBlocks(runtime, storage)
        assert blocks.save(SaveRequest("s", "key", [1, 2], 8)).blocks == 2
        yield blocks, cache, mover
    assert_closed(runtime.statistics())


def test_a_restore_whose_bytes_do_not_stop_is_waited_for(
    stored: tuple[StoredBlocks, dict[str, torch.Tensor], HeldMover],
) -> None:
    blocks, _, mover = stored
    mover.gate.clear()
    with pytest.raises(DeadlineExceeded) as caught:
        blocks.restore(RestoreRequest("r", "key", [5, 4], 8, deadline_s=0.05))
    held = caught.value.quarantine
    assert held is not None
    assert (held.request_id, held.block_ids, held.safe) == ("r", (5, 4), False)
    mover.gate.set()
    held.settled()
    assert held.safe


def test_blocks_are_saved_and_restored(stored: tuple[StoredBlocks, dict[str, torch.Tensor], HeldMover]) -> None:
    blocks, cache, _ = stored
    assert blocks.has("key")
    for tensor in cache.values():
        tensor.zero_()
    assert blocks.restore(RestoreRequest("r", "key", [5, 4], 8)).tokens == 8
    assert all((tensor[:, [4, 5]] == 3.0).all() and not tensor[:, :4].any() for tensor in cache.values())
    with pytest.raises(NotStored):
        blocks.restore(RestoreRequest("r", "other", [5, 4], 8))
    assert [blocks.drop(["other"]), blocks.drop(), blocks.drop()] == [0, 1, 0]
    assert not blocks.has("key")
    with pytest.raises(DeadlineExceeded, match="its deadline_s was -1"):
        blocks.save(SaveRequest("s", "key", [1, 2], 8, deadline_s=-1.0))
