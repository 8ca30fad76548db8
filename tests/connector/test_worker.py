"""Both halves of a connector together, for an imaginary engine: a scheduler's calls, a worker's steps."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from log_lines import FORGED, Written
from tests_support import PATIENT, WAIT_S, limited, pass_deadlines, small_cache, until

from kvflow import Config, LeaseOutcome
from kvflow.blocking import Runtime
from kvflow.connector.parameters import params_of_several, producer_params, runtime_id_of
from kvflow.connector.prefix_peers import PrefixPeers
from kvflow.connector.prefix_questions import PrefixOutcome
from kvflow.connector.scheduler import ConnectorScheduler, SchedulingConfig, Sharing
from kvflow.connector.step import Finished, Step
from kvflow.connector.worker import ConnectorWorker, FailedLoad, Results
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.prompts import marked_by_keys
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    DeadlineExceeded,
    LeaseExpired,
    PrefillFailed,
    PromptMismatch,
    RequestError,
    RuntimeClosed,
    TransferFailed,
    WeightsMismatch,
)
from kvflow.prefix import Prefixes
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.world import World
from kvflow.testing import ManualClock, assert_quiet
from kvflow.transport.base import TransportError
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.connector.test_scheduler import BLOCK_SIZE, PREFILL, Request

Ended: TypeAlias = tuple[str, LoadReport | FailedLoad | LeaseOutcome]
"""A load or lease of a request that has ended."""
CONFIG = limited(replace(PATIENT, listen="tcp://127.0.0.1:0", lease_ttl_s=60.0), seal_hold_s=0.01)


@dataclass
class Engine:
    """One rank and its scheduler. `until` steps the engine until something has happened."""

    runtime: Runtime
    transport: InprocTransport
    kv_caches: dict[str, torch.Tensor]
    scheduler: ConnectorScheduler
    worker: ConnectorWorker
    happened: list[Ended] = field(default_factory=list)
    sent: set[str] = field(default_factory=set)
    answers: list[tuple[PrefixOutcome, tuple[Ticket, ...]]] = field(default_factory=list)

    def step(
        self,
        *scheduled: tuple[str, int],
        blocks: Sequence[int] = (1, 2),
        preempted: Sequence[str] = (),
        event: DeviceEvent | None = None,
    ) -> Step:
        """One step; with an `event` that its work is done by."""
        entries = dict(scheduled)
        step = self.scheduler.build_step(entries, preempted=preempted, block_ids=lambda _: blocks)
        self.worker.prepare(step)
        self.worker.begin(step, ready=event, after=event)
        self.collect()
        return step

    def collect(self) -> None:
        results = self.worker.collect()
        self.scheduler.update_from_workers(received=results.received, sent=results.sent, offered=results.offered)
        self.sent |= results.sent
        self.answers += zip(results.answers, results.found.values(), strict=True)
        self.happened += (*results.loaded.items(), *results.failed.items(), *results.leases)

    def compute(self, request_id: str = "r", blocks: Sequence[int] = (1, 2), tokens: int = 7, **more: Any) -> Step:
        """Take a prompt to offer, and compute all of it."""
        self.scheduler.add(Request(request_id, tokens, PREFILL))
        return self.step((request_id, tokens), blocks=blocks, **more)

    def complete(self, request_id: str = "r") -> dict[str, Any]:
        """End a request with an offered prompt. Return the parameters that the router gets."""
        finished = self.scheduler.request_finished(request_id, completed=True)
        assert finished.hold_blocks
        assert finished.params is not None
        return finished.params

    def until(self, happened: Callable[[Ended], bool], *, meanwhile: Callable[[], object] = lambda: None) -> Ended:
        for _ in steps():
            meanwhile()
            self.step()
            for entry in self.happened:
                if happened(entry):
                    self.happened.remove(entry)
                    return entry
        raise AssertionError(f"did not happen; what did: {self.happened}")

    def prefill(self, request_id: str = "r", blocks: Sequence[int] = (1, 2), tokens: int = 7) -> dict[str, Any]:
        self.compute(request_id, blocks, tokens)
        return self.complete(request_id)

    def receive(self, params: dict[str, Any], blocks: Sequence[int], request_id: str = "d", tokens: int = 7) -> None:
        self.scheduler.add(Request(request_id, tokens, params))
        matched = self.scheduler.num_new_matched_tokens(request_id, 0)
        assert matched == (tokens, True)
        self.scheduler.update_after_alloc(request_id, blocks, tokens)

    def flow(self, request_id: str = "r", tokens: int = 7, name: str = "name") -> dict[str, Any]:
        """Take a prompt that is to be read while it is computed; its reader's parameters."""
        rendezvous = Ticket.rendezvous(self.worker.introduction(), name)
        self.scheduler.add(Request(request_id, tokens, producer_params(rendezvous)))
        return rendezvous.to_params()

    def until_loaded(self, request_id: str = "d") -> LoadReport:
        """Step until the request has its prompt, and end it."""
        name, report = self.until(load_ended)
        assert isinstance(report, LoadReport)
        assert name == request_id
        self.scheduler.request_finished(request_id, completed=True)
        return report

    def until_failed(self, kind: type[Exception], message: str = "") -> FailedLoad:
        """Step until a load has failed so, and end its request."""
        name, ended = self.until(load_ended)
        assert isinstance(ended, FailedLoad)
        assert isinstance(ended.error, kind)
        assert message in str(ended.error)
        self.scheduler.request_finished(name, completed=False)
        return ended

    def assert_filled(self, *blocks: int, fill: float = 1.0, tokens: int = BLOCK_SIZE) -> None:
        """The first tokens of these blocks hold what an engine is filled with."""
        for layer in self.kv_caches.values():
            assert (layer[:, blocks, :, :tokens] == fill).all()

    def on_loop(self, call: Callable[[], object]) -> None:
        async def run(_: asynchronous.Runtime) -> None:
            call()

        self.runtime.start(run).result(WAIT_S)

    def perform(self) -> None:
        """Let the bytes of reads that were held move."""
        self.transport.faults.hold = False
        self.on_loop(self.transport.perform)

    def until_read(self, request_id: str = "r", *, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Step until the request's lease has ended, read or given back, and its blocks are free."""
        assert self.until(lease_ended, meanwhile=meanwhile) == (request_id, LeaseOutcome.READ)
        assert request_id in self.sent
        assert not self.scheduler.blocks_held(request_id)

    def until_settled(self) -> None:
        """Step until the scheduler has no waiting requests and the runtime has no lease, load or blocks in use."""
        for _ in steps():
            self.step()
            blocks = self.runtime.statistics().blocks
            if self.scheduler.open_requests == 0 and blocks is not None and blocks.free == blocks.total:
                break
        assert self.scheduler.open_requests == 0
        assert_quiet(self.runtime.statistics())
        assert not self.worker._receiving
        assert not self.worker._saved


def steps() -> Iterator[None]:
    """One for each step of an engine that is idle between them, for as long as a test waits."""
    tick, end_s = threading.Event(), time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        yield
        tick.wait(0.01)


def make(
    engine_id: str,
    network: InprocNetwork,
    fill: float,
    config: Config = CONFIG,
    clock: Callable[[], Clock] = SystemClock,
    **scheduling: Any,
) -> Engine:
    made: list[InprocTransport] = []

    def transport(_: Config, name: str) -> InprocTransport:
        made.append(InprocTransport(name, network))
        return made[-1]

    peers = PrefixPeers(prefixes=Prefixes())
    world = World(transport=transport, clock=clock)
    runtime = Runtime(replace(config, engine_id=engine_id), world=world, parts=[peers.prefixes])
    runtime.open()
    kv_caches, layout = small_cache(fill=fill)
    runtime.register_kv_caches(kv_caches, layout)
    worker = ConnectorWorker(runtime, peers)
    scheduler = ConnectorScheduler(
        SchedulingConfig(block_size=BLOCK_SIZE, lease_ttl_s=config.lease_ttl_s, **scheduling),
        new_secret=iter("abcdefgh").__next__,
    )
    scheduler.introduce(worker.introduction())
    return Engine(runtime, made[0], kv_caches, scheduler, worker)


@dataclass(frozen=True)
class Pair:
    prefill: Engine
    decode: Engine
    network: InprocNetwork = field(default_factory=InprocNetwork)


@contextlib.contextmanager
def settled_afterwards(*engines: Engine) -> Iterator[Sequence[Engine]]:
    try:
        yield engines
        for engine in engines:
            engine.until_settled()
    finally:
        for engine in reversed(engines):
            engine.runtime.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    config, network = replace(CONFIG, **getattr(request, "param", {})), InprocNetwork()
    both = Pair(make("prefill", network, 1.0, config), make("decode", network, -1.0, config), network)
    with settled_afterwards(both.prefill, both.decode):
        yield both


def lease_ended(entry: Ended) -> bool:
    return isinstance(entry[1], LeaseOutcome)


def load_ended(entry: Ended) -> bool:
    return isinstance(entry[1], LoadReport | FailedLoad)


def test_a_prompt_goes_from_one_engine_to_the_other(pair: Pair) -> None:
    """The lease was opened in the step that computed the prompt: no later step is needed for it to be read."""
    pair.decode.receive(pair.prefill.prefill(), [5, 6])
    assert pair.decode.until_loaded().tokens == 7
    assert pair.prefill.scheduler.blocks_held("r")
    pair.decode.assert_filled(5)
    pair.decode.assert_filled(6, tokens=3)
    pair.decode.assert_filled(0, 1, 2, 3, 4, 7, fill=-1.0)
    pair.prefill.until_read()


@pytest.mark.parametrize("read_from", ["first", "second", "nobody"])
def test_a_prompt_that_two_engines_hold_comes_from_the_second_if_the_first_fails(pair: Pair, read_from: str) -> None:
    """A producer that is not read is released. If the request is rejected, both are released."""
    decode = pair.decode
    with settled_afterwards(make("spare", decode.transport._network, 2.0)) as (spare,):
        params = params_of_several([pair.prefill.prefill(), spare.prefill()])
        if read_from == "nobody":
            decode.scheduler.reject(Request("d", 7, params))
            decode.step()
        else:
            fails = read_from == "second"
            decode.transport.faults.fail_next.extend([TransportError("scripted")] * fails)
            decode.receive(params, [5, 6])
            outcomes = ["TransferFailed"] * fails + ["loaded"]
            assert [one.outcome for one in decode.until_loaded().attempts] == outcomes
            decode.assert_filled(5, fill=2.0 if fails else 1.0)
        for engine in (pair.prefill, spare):
            engine.until_read()


@pytest.mark.parametrize("flows", [False, True])
def test_ids_of_any_length_are_handed_over(pair: Pair, flows: bool) -> None:
    """An engine's ids may be longer than a runtime's: on both sides one has its beginning and a digest instead."""
    ours, theirs = "d" * 5000, "r" * 5000
    params = pair.prefill.flow(theirs) if flows else pair.prefill.prefill(theirs)
    if flows:
        pair.prefill.step((theirs, 7))
        pair.prefill.complete(theirs)
    else:
        assert Ticket.from_params(params).request_id.startswith(runtime_id_of(theirs))
    pair.decode.receive(params, [5, 6], ours)
    assert pair.decode.until_loaded(ours).request_id == runtime_id_of(ours)
    pair.prefill.until_read(theirs)


def test_long_ids_with_the_same_beginning_have_names_of_their_own() -> None:
    assert runtime_id_of("r" * 200) == "r" * 200
    names = {runtime_id_of("r" * 200 + end) for end in ("0", "1", "00")}
    assert len(names) == 3
    assert all(name.startswith("r" * 200) and len(name) < 256 for name in names)


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.happened.wait()


def test_a_step_that_the_device_has_yet_to_do(pair: Pair) -> None:
    """No reader reads blocks before the step has run, and nothing lands where earlier device work may still write."""
    computed, left_alone = Event(), Event()
    pair.prefill.compute(event=computed)
    pair.decode.receive(pair.prefill.complete(), [5, 6])
    pair.decode.step(event=left_alone)
    until_blocking(lambda: left_alone.asked > 3)
    for layer in pair.prefill.kv_caches.values():
        layer[:, 1:3] = 2.0
    left_alone.happened.set()
    until_blocking(lambda: computed.asked > 3)
    pair.decode.assert_filled(5, 6, fill=-1.0)
    computed.happened.set()
    pair.decode.until_loaded()
    pair.decode.assert_filled(5, fill=2.0)
    pair.prefill.until_read()


def until_blocking(condition: Callable[[], bool]) -> None:
    for _ in steps():
        if condition():
            return
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("flows", [False, True])
def test_a_request_that_waits_for_blocks_keeps_its_prompt(flows: bool) -> None:
    """The decode engine has no room for longer than the lease's ttl; its steps go on. A lease that flows is found when
    prefill opens it, and kept from then on; so is a lease with a complete prompt.
    """
    network, theirs, ours = InprocNetwork(), ManualClock(), ManualClock()
    prefill = make("prefill", network, 1.0, clock=lambda: theirs)
    decode = make("decode", network, -1.0, clock=lambda: ours)

    def renewals() -> int:
        decode.step()
        decode.on_loop(partial(ours.advance, CONFIG.lease_ttl_s / 10))
        serving = prefill.runtime.statistics().serving
        assert serving is not None
        return serving.renewals

    with settled_afterwards(prefill, decode):
        decode.scheduler.add(Request("d", 7, prefill.flow() if flows else prefill.prefill()))
        if flows:
            assert [*decode.step().keep] == ["d"]
            prefill.step(("r", 3), blocks=[1])
            prefill.step(("r", 7))
            prefill.complete()
            prefill.step()
        for _ in range(4):
            before = renewals()
            next(None for _ in steps() if renewals() > before)
            prefill.on_loop(partial(theirs.advance, CONFIG.lease_ttl_s * 0.6))
        decode.scheduler.update_after_alloc("d", [5, 6], 7)
        decode.until_loaded()
        prefill.until_read(meanwhile=lambda: prefill.on_loop(partial(theirs.advance, CONFIG.limits.seal_hold_s)))


@pytest.mark.parametrize("pair", [{"lease_ttl_s": 0.3}], indirect=True)
def test_the_time_of_a_lease_begins_when_its_request_has_finished(pair: Pair) -> None:
    """The step that completes the prompt may take long; no reader can read the prompt before."""
    prefill = pair.prefill
    prefill.compute()
    offer = next(found for _ in steps() if (found := prefill.worker._saved.get("r")))
    assert offer.lease is not None
    entry = offer.lease._entry
    next(None for _ in steps() if entry.expires_s > entry.offered_s + 3 * CONFIG.limits.seal_hold_s + 3 * 0.3)
    assert Ticket.from_params(prefill.complete()).ttl_s == 0.3
    prefill.step()
    next(None for _ in steps() if offer.sent)
    assert offer.restart_timer is None, "its time is restarted although its ticket is out"
    assert prefill.until(lease_ended) == ("r", LeaseOutcome.EXPIRED)


@pytest.mark.parametrize("opened", ["at once", "before", "after"])
@pytest.mark.parametrize("end", ["loaded", "cached", "aborted", "aborted at once"])
def test_what_was_kept_is_let_go(pair: Pair, end: str, opened: str) -> None:
    """The ticket is let go after the load, or when it is not needed: its client leaves, or the server answers HTTP 400.
    If the prompt flows, prefill may offer it before or after that.
    """
    prefill, decode = pair.prefill, pair.decode
    params = prefill.prefill() if opened == "at once" else prefill.flow()
    idle = decode.runtime.statistics().tasks
    if opened == "before":
        prefill.step(("r", 5))
    decode.scheduler.add(Request("d", 7, params))
    if end != "aborted at once":
        assert len(decode.step().keep) == 1
        assert decode.runtime.statistics().tasks > idle
    if end in ("loaded", "cached"):
        decode.scheduler.update_after_alloc("d", [5, 6], 7 if end == "loaded" else 0)
    if end != "loaded":
        decode.scheduler.request_finished("d", completed=end == "cached")
    assert not decode.step().keep
    if opened != "at once":
        prefill.step(("r", 7))
        prefill.complete()
    if end == "loaded":
        decode.until_loaded()
    prefill.until_read()
    until_blocking(lambda: decode.runtime.statistics().tasks == idle)


def tear(decode: Engine) -> None:
    """The next read of an engine fails."""
    decode.on_loop(lambda: decode.transport.faults.fail_next.append(TransportError("torn")))


@pytest.mark.parametrize("flows", [False, True])
def test_a_load_that_has_failed_gives_the_offer_back(pair: Pair, flows: bool) -> None:
    """Otherwise the producer's blocks stay leased until the lease expires, and no request needs it."""
    tear(pair.decode)
    if flows:
        begin_flow(pair)
        pair.prefill.step(("r", 7))
        pair.prefill.complete()
    else:
        pair.decode.receive(pair.prefill.prefill(), [5, 6])
    pair.decode.until_failed(TransferFailed)
    pair.prefill.until_read()


def test_the_offer_of_a_load_that_has_failed_may_be_used_again() -> None:
    """The one switch: a router may try the same ticket at another decode engine."""
    network = InprocNetwork()
    prefill = make("prefill", network, 1.0)
    first, second = (make(name, network, -1.0, release_failed_loads=False) for name in ("first", "second"))
    with settled_afterwards(prefill, first, second):
        params = prefill.prefill()
        tear(first)
        first.receive(params, [5, 6])
        first.until_failed(TransferFailed)
        first.until_settled()
        assert prefill.scheduler.blocks_held("r")
        second.receive(params, [5, 6])
        second.until_loaded()
        prefill.until_read()


def begin_held(prefill: Engine, decode: Engine) -> None:
    """Begin a load. Its bytes move when the test calls `perform`."""
    decode.transport.faults.hold = True
    decode.receive(prefill.prefill(), [5, 6])
    decode.step()
    decode.runtime.start(reads_are_open).result(WAIT_S)


def test_an_abandoned_load_is_received_when_its_bytes_have_stopped(pair: Pair) -> None:
    decode = pair.decode
    begin_held(pair.prefill, decode)
    assert decode.scheduler.request_finished("d", completed=False).hold_blocks
    for _ in range(2):
        decode.step()
    assert decode.happened == []
    assert decode.scheduler.blocks_held("d")
    decode.perform()
    assert decode.until(load_ended) == ("d", FailedLoad(((5, 6),), None))
    assert not decode.scheduler.blocks_held("d")
    pair.prefill.until_read()  # it was told at once


def test_a_load_that_is_abandoned_in_its_first_step_reads_nothing(pair: Pair) -> None:
    pair.decode.receive(pair.prefill.prefill(), [5, 6])
    assert pair.decode.scheduler.request_finished("d", completed=False).hold_blocks
    assert pair.decode.until(load_ended) == ("d", FailedLoad(((5, 6),), None))
    pair.prefill.until_read()  # it was told
    pair.decode.assert_filled(*range(8), fill=-1.0)


def share(engine: Engine, params: dict[str, Any], *names: str) -> None:
    for name in names:
        engine.scheduler.add(Request(name, 7, params), sharing=Sharing.SAMPLES)


def load_rest(engine: Engine, name: str, blocks: Sequence[int]) -> Ended:
    """Load the tokens that are not in the engine's prefix cache, into its last blocks."""
    missing = {2: 7, 1: 3}[len(blocks)]
    assert engine.scheduler.num_new_matched_tokens(name, 7 - missing) == (missing, True)
    engine.scheduler.update_after_alloc(name, [5, 6][: 2 - len(blocks)] + list(blocks), missing)
    return engine.until(load_ended)


@pytest.mark.parametrize("flows", [False, True])
def test_samples_read_one_offer_and_its_producer_is_told_once(pair: Pair, flows: bool) -> None:
    prefill, decode = pair.prefill, pair.decode
    params = prefill.flow() if flows else prefill.prefill()
    if flows:
        prefill.step(("r", 7))
        prefill.complete()
    share(decode, params, "a", "b", "c")
    for name, blocks in {"a": [5, 6], "b": [4], "c": [3]}.items():
        assert isinstance(load_rest(decode, name, blocks)[1], LoadReport)
        prefill.step()
        assert prefill.scheduler.blocks_held("r")
        assert prefill.happened == []
    prefill.until_read(meanwhile=decode.step)
    decode.assert_filled(5)
    decode.assert_filled(3, 4, 6, tokens=3)
    for name in "abc":
        decode.scheduler.request_finished(name, completed=True)


def test_a_sample_that_is_abandoned_leaves_the_offer_to_the_others(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    decode.transport.faults.hold = True
    share(decode, prefill.prefill(), "a", "b", "c")
    decode.scheduler.update_after_alloc("a", [5, 6], 7)
    decode.step()
    decode.runtime.start(reads_are_open).result(WAIT_S)
    for name in "ac":
        decode.scheduler.request_finished(name, completed=False)
    for _ in range(2):
        decode.step()
    decode.perform()
    assert decode.until(load_ended) == ("a", FailedLoad(((5, 6),), None))
    assert isinstance(load_rest(decode, "b", [3, 4])[1], LoadReport)
    decode.assert_filled(3)
    prefill.until_read(meanwhile=decode.step)
    decode.scheduler.request_finished("b", completed=True)


@pytest.mark.parametrize("pair", [{"cancel_grace_s": 0.01}], indirect=True)
def test_quarantined_blocks_are_not_received(pair: Pair) -> None:
    decode = pair.decode
    begin_held(pair.prefill, decode)
    for wait in (pass_deadlines, blocks_are_quarantined):
        decode.runtime.start(wait).result(WAIT_S)
    decode.step()
    assert decode.happened == []
    assert decode.scheduler.blocks_held("d")
    decode.perform()
    decode.until_failed(DeadlineExceeded, "deadline exceeded in phase 'wire'")
    pair.prefill.until_read()


@pytest.mark.parametrize("pair", [{"cancel_grace_s": 0.01}], indirect=True)
def test_leases_of_a_load_that_has_failed_are_not_kept_while_its_blocks_are_quarantined(pair: Pair) -> None:
    decode = pair.decode
    decode.transport.faults.hold = True
    decode.scheduler.add(Request("d", 7, pair.prefill.prefill()))
    assert [*decode.step().keep] == ["d"]
    decode.runtime.start(keeps).result(WAIT_S)
    decode.scheduler.update_after_alloc("d", [5, 6], 7)
    decode.step()
    for wait in (reads_are_open, pass_deadlines, blocks_are_quarantined, keeps_nothing):
        decode.runtime.start(wait).result(WAIT_S)
    decode.perform()
    decode.until_failed(DeadlineExceeded)
    pair.prefill.until_read()


def test_a_preempted_prompt_is_offered_again_under_another_name(pair: Pair) -> None:
    prefill = pair.prefill
    first = prefill.compute().save[0]
    prefill.step(preempted=["r"])
    second = prefill.step(("r", 7), blocks=[3, 4]).save[0]
    assert first.serve_id != second.serve_id
    params = prefill.complete()
    assert params["remote_block_ids"] == [3, 4]
    pair.decode.receive(params, [5, 6])
    pair.decode.until_loaded()
    outcomes = {prefill.until(lease_ended) for _ in range(2)}
    assert outcomes == {("r", LeaseOutcome.REVOKED), ("r", LeaseOutcome.READ)}


def test_blocks_of_a_withdrawn_prompt_may_be_loaded_into_at_once(pair: Pair) -> None:
    """An engine that prefills and decodes: its scheduler hands the blocks on before the lease has quite ended."""
    pair.decode.compute("own", [5, 6])
    pair.decode.scheduler.request_finished("own", completed=False)
    pair.decode.receive(pair.prefill.prefill(), [5, 6])
    pair.decode.until_loaded()


@pytest.mark.parametrize("pair", [{"limits": replace(CONFIG.limits, lease_wait_s=0.05)}], indirect=True)
def test_a_prompt_that_is_not_served_holds_no_blocks_and_fails_its_reader(pair: Pair, written: Written) -> None:
    """It was withdrawn, or an engine names blocks that it does not have. Their ids forge no log line."""
    for name, kind in (("offered", LeaseExpired), ("refused", PrefillFailed)):
        request_id = f"{FORGED} {name}"
        params = pair.prefill.prefill(request_id) if name == "offered" else refused(pair.prefill, request_id, [1, 99])
        if name == "offered":
            pair.prefill.scheduler.withdraw_all()
        assert pair.prefill.until(lease_ended) == (request_id, LeaseOutcome.REVOKED)
        pair.decode.receive(params, [5, 6], f"{FORGED} decode {name}")
        assert pair.decode.until_failed(kind).block_tables == ((5, 6),)
    pair.decode.assert_filled(*range(8), fill=-1.0)
    written.assert_plain("refused: its prompt is not offered", "decode offered: its prompt was not received")


def refused(engine: Engine, request_id: str, blocks: Sequence[int]) -> dict[str, Any]:
    """Compute a prompt that cannot be offered, and end it before the scheduler knows. Return what the router gets."""
    engine.scheduler.add(Request(request_id, 7, PREFILL))
    engine.worker.begin(engine.scheduler.build_step({request_id: 7}, preempted=(), block_ids=lambda _: blocks))
    return engine.complete(request_id)


ONE_LEASE = {"limits": replace(CONFIG.limits, leases_max=1)}


@pytest.mark.parametrize("pair", [ONE_LEASE], indirect=True)
def test_a_full_engine_gives_no_ticket_or_its_reader_hears_at_once_that_it_is_full(pair: Pair) -> None:
    prefill = pair.prefill
    params = prefill.prefill("first", [1, 2])
    prefill.compute("second", [3, 4])
    for _ in steps():
        prefill.step()
        if prefill.scheduler.state_of("second") is None:
            break
    assert prefill.scheduler.request_finished("second", completed=True) == Finished(False, None)
    third = refused(prefill, "third", [3, 4])
    assert prefill.until(lease_ended) == ("second", LeaseOutcome.REVOKED)
    pair.decode.receive(third, [5, 6])
    pair.decode.until_failed(PrefillFailed, "Overloaded: request 'third#")
    prefill.until(lease_ended)
    assert not prefill.scheduler.blocks_held("third")
    pair.decode.receive(params, [5, 6])
    pair.decode.until_loaded()
    prefill.until_read("first")


def test_steps_without_work_wake_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delattr(Runtime, "start")
        pair.decode.step()


@contextlib.contextmanager
def waiting_step(engine: Engine) -> Iterator[Future[Results]]:
    """The results of a step that has begun to wait for a load."""
    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(engine.worker.collect, 10 * WAIT_S)
        until_blocking(lambda: bool(engine.worker._reported._waiters))  # type: ignore[attr-defined]
        yield results


def test_a_step_that_waits_for_a_load_is_woken_by_its_end(pair: Pair) -> None:
    decode = pair.decode
    begin_held(pair.prefill, decode)
    with waiting_step(decode) as results:
        decode.perform()
        found = results.result(WAIT_S)
    assert found.received == {"d"}
    decode.scheduler.update_from_workers(received=found.received)
    decode.scheduler.request_finished("d", completed=True)
    pair.prefill.until_read()


def test_a_step_that_waits_for_a_lease_is_woken_by_its_end(pair: Pair) -> None:
    prefill, decode = pair.prefill, pair.decode
    params = prefill.prefill()
    prefill.step()  # the router has the ticket
    prefill.on_loop(lambda: None)  # and the loop has looked at the step
    with waiting_step(prefill) as results:
        decode.receive(params, [5, 6])
        decode.until_loaded()
        found = results.result(WAIT_S)
    assert (found.leases, found.sent) == ([("r", LeaseOutcome.READ)], {"r"})
    prefill.scheduler.update_from_workers(received=found.received, sent=found.sent)


def test_a_step_that_waits_for_a_load_is_woken_by_a_bug(pair: Pair) -> None:
    decode = pair.decode
    begin_held(pair.prefill, decode)
    with waiting_step(decode) as results:
        decode.on_loop(lambda: decode.worker._note_internal_error(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            results.result(WAIT_S)
    decode.worker._internal_error = None
    decode.perform()
    decode.until_loaded()
    pair.prefill.until_read()


def test_a_step_waits_no_longer_than_it_may_and_not_for_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, waits = pair.decode, list[float | None]()
    wait = decode.worker._reported.wait
    with monkeypatch.context() as patched:
        patched.setattr(decode.worker._reported, "wait", lambda s: (waits.append(s), wait(s))[1])
        assert decode.worker.collect(WAIT_S) == Results()
        assert waits == []
        begin_held(pair.prefill, decode)
        assert decode.worker.collect() == Results()
        assert waits == []
        assert decode.worker.collect(0.001) == Results()
        assert waits
        assert max(filter(None, waits)) <= 0.001
    decode.perform()
    decode.until_loaded()
    pair.prefill.until_read()


def test_a_step_waits_for_the_loads_that_it_has_begun(pair: Pair) -> None:
    """Also if the loop has not looked at the step yet."""
    prefill, decode = pair.prefill, pair.decode
    decode.receive(prefill.prefill(), [5, 6])
    step = decode.scheduler.build_step({}, preempted=(), block_ids=lambda _: ())
    decode.worker.prepare(step)
    decode.worker.begin(step)
    results = decode.worker.collect(WAIT_S)
    assert set(results.loaded) == {"d"}
    decode.scheduler.update_from_workers(received=results.received, sent=results.sent)
    decode.scheduler.request_finished("d", completed=True)
    prefill.until_read()


@pytest.mark.parametrize("wait_s", [-1.0, float("nan"), float("inf"), 1e300, "1", None])
def test_a_step_waits_for_a_number_of_seconds(pair: Pair, wait_s: Any) -> None:
    begin_held(pair.prefill, pair.decode)
    with pytest.raises(RequestError, match="collect: wait_s"):
        pair.decode.worker.collect(wait_s)
    assert pair.decode.worker.collect(0) == Results()
    pair.decode.perform()
    pair.decode.until_loaded()
    pair.prefill.until_read()


def test_closing_ends_loads_and_leases_and_refuses_steps() -> None:
    network = InprocNetwork()
    prefill, decode = (make(name, network, 1.0, replace(CONFIG, drain_timeout_s=0.01)) for name in ("p", "d"))
    begin_held(prefill, decode)
    decode.perform()
    decode.until(load_ended)
    for engine in (decode, prefill):
        engine.runtime.close()
    prefill.collect()
    with pytest.raises(RuntimeClosed):
        prefill.compute("r2")


async def reads_are_open(runtime: asynchronous.Runtime) -> None:
    await until(lambda: runtime.statistics().transport.open_reads != 0)


def _keepers() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("kvflow-keep")]


async def keeps(runtime: asynchronous.Runtime) -> None:
    await until(_keepers)


async def keeps_nothing(runtime: asynchronous.Runtime) -> None:
    await until(lambda: not _keepers())


async def blocks_are_quarantined(runtime: asynchronous.Runtime) -> None:
    await until(lambda: runtime.quarantines)


# --- prompts that are read while they are computed


def begin_flow(pair: Pair, *, tokens: int = 7) -> None:
    """Both engines get their requests at once, and the reader's load begins."""
    pair.decode.receive(pair.prefill.flow(tokens=tokens), [5, 6])
    pair.decode.step()


@pytest.mark.parametrize("pair", [{"staging": "never"}, {"staging": "always"}], indirect=True)
def test_a_prompt_is_read_while_it_is_computed(pair: Pair) -> None:
    begin_flow(pair)
    pair.prefill.step(("r", 3), blocks=[1])
    pair.prefill.step(("r", 5))
    assert not any(map(load_ended, pair.decode.happened))
    for layer in pair.prefill.kv_caches.values():
        layer[:, 2, :, 1:] = 2.0
    pair.prefill.step(("r", 7))
    assert pair.decode.until_loaded().tokens == 7
    pair.decode.assert_filled(5)
    pair.decode.assert_filled(6, tokens=1)
    for layer in pair.decode.kv_caches.values():
        assert (layer[:, 6, :, 1:3] == 2.0).all()
    pair.prefill.complete()
    pair.prefill.until_read()


@pytest.mark.parametrize("pair", [{"staging": "never"}, {"staging": "always"}], indirect=True)
def test_what_is_cached_of_a_prompt_is_offered_before_the_step_that_computes_the_rest(pair: Pair) -> None:
    begin_flow(pair)
    prefill = pair.prefill
    step = prefill.scheduler.build_step({"r": 7}, preempted=(), block_ids=lambda _: (1, 2), cached={"r": BLOCK_SIZE})
    prefill.worker.prepare(step)
    prefill.on_loop(lambda: None)  # the loop has begun what `prepare` gave it
    (opened,) = (offer.lease for offer in prefill.worker._saved.values())
    assert opened is not None
    assert opened._opened.held.computed == BLOCK_SIZE
    for layer in prefill.kv_caches.values():  # the step computes
        layer[:, 2] = 2.0
    prefill.worker.begin(step)
    prefill.collect()
    assert pair.decode.until_loaded().tokens == 7
    pair.decode.assert_filled(5)
    pair.decode.assert_filled(6, fill=2.0, tokens=3)
    prefill.complete()
    prefill.until_read()


def test_the_answer_of_a_prompt_that_flowed_has_a_ticket_for_other_readers(pair: Pair) -> None:
    """Its first reader may never come."""
    pair.prefill.flow()
    pair.prefill.step(("r", 3), blocks=[1])
    pair.prefill.step(("r", 7))
    pair.decode.receive(pair.prefill.complete(), [5, 6])
    pair.decode.until_loaded()
    pair.prefill.until_read()


def test_a_preempted_prompt_is_recalled_before_its_blocks_are_written(pair: Pair) -> None:
    """The step that takes the blocks waits until no read can succeed; afterwards the prompt is offered as usual."""
    begin_flow(pair)
    pair.prefill.step(("r", 5))
    pair.prefill.step(preempted=["r"])
    assert pair.prefill.runtime.statistics().serving.open_leases == 0  # type: ignore[union-attr]
    pair.decode.until_failed(PrefillFailed, "preempted")
    pair.prefill.step(("r", 7), blocks=[3, 4])
    pair.decode.receive(pair.prefill.complete(), [5, 6], request_id="again")
    pair.decode.until_loaded("again")


@pytest.mark.parametrize("computed", [0, 5])
def test_an_aborted_prompt_fails_its_reader_at_once(pair: Pair, computed: int) -> None:
    begin_flow(pair)
    if computed:
        pair.prefill.step(("r", computed))
    finished = pair.prefill.scheduler.request_finished("r", completed=False)
    assert finished.hold_blocks is (computed > 0)
    pair.prefill.step()
    pair.decode.until_failed(PrefillFailed)


@pytest.mark.parametrize("tokens", [3, 6, 8])
def test_a_prompt_of_another_length_is_not_received(pair: Pair, tokens: int) -> None:
    """The reader has made room for its own; engines that do not agree on a prompt are found out before a byte lands."""
    begin_flow(pair, tokens=tokens)
    pair.prefill.step(("r", tokens))
    pair.decode.until_failed(PromptMismatch, "expected 7 tokens")
    pair.decode.assert_filled(*range(8), fill=-1.0)
    pair.prefill.scheduler.request_finished("r", completed=True)
    pair.prefill.until_read()  # it was told


@pytest.mark.parametrize("flows", [False, True])
def test_a_decode_leg_without_its_pictures_fails(pair: Pair, flows: bool) -> None:
    """It is not computed from the pictures' placeholders, also where only the load finds out."""
    prompt = list(range(100, 107))
    whole = marked_by_keys(prompt, {2: [("mm", "red")]})
    if flows:
        name = Ticket.rendezvous(pair.prefill.worker.introduction(), "name")
        asks, params = producer_params(name), name.to_params()
    else:
        asks = PREFILL
    pair.prefill.scheduler.add(Request("r", 7, asks, whole))
    pair.prefill.step(("r", 7))
    if not flows:
        params = pair.prefill.complete()
    pair.decode.scheduler.add(Request("d", 7, params, prompt))
    matched = pair.decode.scheduler.num_new_matched_tokens("d", 0)
    assert matched == (7, True)
    pair.decode.scheduler.update_after_alloc("d", [5, 6], 7)
    assert (pair.decode.scheduler.refusal("d") is None) is flows
    failed = pair.decode.until_failed(PromptMismatch, "but without its pictures")
    assert isinstance(failed.error, PromptMismatch)
    assert failed.error.parts == ("pictures",)
    pair.decode.assert_filled(*range(8), fill=-1.0)
    if flows:
        pair.prefill.scheduler.request_finished("r", completed=True)
    else:  # the request that the ticket is of still gets its blocks
        pair.decode.scheduler.add(Request("right", 7, params, whole))
        pair.decode.scheduler.update_after_alloc("right", [5, 6], 7)
        assert pair.decode.until_loaded("right").tokens == 7
    pair.prefill.until_read()


def test_a_prompt_that_has_come_to_another_rank_than_its_reader_waits_at_is_received(
    pair: Pair, written: Written
) -> None:
    """Data parallel, or two servers behind one URL: the reader is redirected, and the log has one line about it."""
    with settled_afterwards(make("sibling", pair.network, 2.0)) as (sibling,):
        for name in ("one", "two"):
            rendezvous = Ticket.rendezvous(sibling.worker.introduction(), name)
            pair.decode.receive(rendezvous.to_params(), [5, 6], request_id=name)
            pair.decode.step()
            pair.prefill.scheduler.add(Request(name, 7, producer_params(rendezvous)))
            pair.prefill.step((name, 4))
            pair.prefill.step((name, 7))
            assert pair.decode.until_loaded(name).tokens == 7
            pair.decode.assert_filled(5, fill=1.0)
            assert pair.prefill.scheduler.request_finished(name, completed=True).params is not None
            pair.prefill.until_read(name)
    lines = [line for line in written.texts if "they are redirected" in line]
    assert len(lines) == 1
    assert "sent to 'prefill' (dp_rank 0)" in lines[0]
    assert "not to 'sibling' (dp_rank 0)" in lines[0]


def test_a_prompt_that_cannot_be_offered_is_declined(pair: Pair) -> None:
    """Its blocks are written by a load, which is the engine's mistake; its reader does not wait for it."""
    params = pair.decode.prefill("other")
    begin_flow(pair)
    pair.prefill.transport.faults.hold = True
    pair.prefill.receive(params, [1, 2], request_id="busy")
    pair.prefill.step()
    until_blocking(lambda: pair.prefill.transport.held)
    pair.prefill.step(("r", 5))
    pair.decode.until_failed(PrefillFailed)
    pair.prefill.perform()
    pair.prefill.until(load_ended)
    for request_id in ("busy", "r"):
        pair.prefill.scheduler.request_finished(request_id, completed=False)
    pair.decode.until(lease_ended)


def test_a_name_is_used_once_at_a_time(pair: Pair) -> None:
    """The second prompt of that name is not offered, which does not disturb the first one's reader."""
    begin_flow(pair)
    pair.prefill.step(("r", 5))
    pair.prefill.flow("twin")
    pair.prefill.step(("twin", 7), blocks=[3, 4])
    pair.prefill.step(("r", 7))
    pair.decode.until_loaded()
    for request_id in ("twin", "r"):
        pair.prefill.scheduler.request_finished(request_id, completed=True)


@pytest.mark.parametrize("state", ["computing", "flowing", "saved", "sending"])
def test_new_weights_end_what_is_offered(pair: Pair, state: str) -> None:
    """In whatever state a prompt is; the engine goes on, and offers prompts of the new ones."""
    if state == "flowing":
        begin_flow(pair)
        pair.prefill.step(("r", 5))
    else:
        pair.prefill.scheduler.add(Request("r", 7, PREFILL))
        pair.prefill.step(("r", 5 if state == "computing" else 7))
    if state == "sending":
        pair.decode.receive(pair.prefill.complete(), [5, 6])
    for half in (pair.prefill.worker, pair.prefill.scheduler):
        half.set_weights("step-7")
    if state in ("flowing", "sending"):
        pair.decode.until_failed(LeaseExpired)
    if state != "sending":
        pair.prefill.step(("r", 7))
        assert pair.prefill.scheduler.request_finished("r", completed=True).params is None
    pair.prefill.until_settled()
    params = pair.prefill.prefill("later")
    with pytest.raises(WeightsMismatch, match="ours '', theirs 'step-7'"):
        pair.decode.scheduler.add(Request("old", 7, params))
    pair.decode.step()  # gives the refused ticket back
    pair.prefill.until(lambda ended: ended == ("later", LeaseOutcome.READ))
    pair.decode.worker.set_weights("step-7")
    pair.decode.scheduler.set_weights("step-7")
    pair.decode.receive(pair.prefill.prefill("again"), [5, 6], request_id="new")
    pair.decode.until_loaded("new")


# --- blocks late


@pytest.fixture
def late() -> Iterator[Pair]:
    """The decode engine gives a request blocks once its prompt is offered."""
    network = InprocNetwork()
    decode = make("decode", network, -1.0, late_blocks=True)
    both = Pair(make("prefill", network, 1.0), decode, network)
    with settled_afterwards(both.prefill, both.decode):
        yield both


def until_matched(decode: Engine) -> None:
    """Step until the request "d" may get blocks."""
    for _ in steps():
        decode.step()
        if decode.scheduler.num_new_matched_tokens("d", 0) != (None, False):
            return
    raise AssertionError("it waits for ever")


def test_a_request_gets_blocks_when_its_prefill_has_begun(late: Pair) -> None:
    prefill, decode = late.prefill, late.decode
    decode.scheduler.add(Request("d", 7, prefill.flow()))
    assert decode.step().await_offers == ["d"]
    assert decode.worker.collect(0.001) == Results()
    assert decode.scheduler.num_new_matched_tokens("d", 0) == (None, False)
    prefill.step(("r", 3), blocks=[1])
    until_matched(decode)
    assert decode.scheduler.num_new_matched_tokens("d", 0) == (7, True)
    decode.scheduler.update_after_alloc("d", [5, 6], 7)
    decode.step()
    prefill.step(("r", 7))
    assert decode.until_loaded().tokens == 7
    decode.assert_filled(5)
    decode.assert_filled(6, tokens=3)
    prefill.complete()
    prefill.until_read()


def test_a_step_waits_for_an_offer_and_is_woken_by_it(late: Pair) -> None:
    prefill, decode = late.prefill, late.decode
    decode.scheduler.add(Request("d", 7, prefill.flow()))
    decode.step()
    with waiting_step(decode) as results:
        prefill.step(("r", 7))
        found = results.result(WAIT_S)
    assert [*found.offered] == ["d"]
    assert found.offered["d"] >= 0.0
    decode.scheduler.update_from_workers(offered=found.offered)
    decode.scheduler.update_after_alloc("d", [5, 6], 7)
    decode.until_loaded()
    prefill.complete()
    prefill.until_read()


@pytest.mark.parametrize("others", [False, True])
def test_a_prompt_that_will_not_be_offered_fails_its_request_once(late: Pair, others: bool) -> None:
    """It gets blocks, since only a load can fail it. With a second ticket the load goes on with that."""
    prefill, decode = late.prefill, late.decode
    params = prefill.flow()
    if others:
        prefill.compute("other", blocks=[3, 4])
        second = prefill.complete("other")
        prefill.step()
        params = params_of_several([params, second])
    decode.scheduler.add(Request("d", 7, params))
    decode.step()
    prefill.scheduler.request_finished("r", completed=False)
    prefill.step()
    until_matched(decode)
    decode.scheduler.update_after_alloc("d", [5, 6], 7)
    if others:
        assert decode.until_loaded().tokens == 7
        prefill.until_read("other")
        return
    decode.until_failed(PrefillFailed)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_request_that_ends_while_its_offer_is_awaited(late: Pair, blocks: bool) -> None:
    """Its blocks are free at once; a step waits no longer for it; an offer that comes later is given back."""
    prefill, decode = late.prefill, late.decode
    idle = decode.runtime.statistics().tasks
    decode.scheduler.add(Request("d", 7, prefill.flow()))
    decode.step()
    if blocks:  # another rank of the engine has reported its offer
        decode.scheduler.update_from_workers(offered=["d"])
        decode.scheduler.update_after_alloc("d", [5, 6], 7)
        decode.step()
    decode.scheduler.request_finished("d", completed=False)
    if blocks:
        _, failed = decode.until(load_ended)
        assert failed == FailedLoad(((5, 6),), None)
    decode.step()
    until_blocking(lambda: not decode.worker._awaiting)
    prefill.step(("r", 7))
    prefill.complete()
    prefill.until_read()
    until_blocking(lambda: decode.runtime.statistics().tasks == idle)
