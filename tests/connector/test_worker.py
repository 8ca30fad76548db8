"""Both halves of a connector together, for an engine that is nobody's: a scheduler's calls, a worker's steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from log_lines import FORGED, Written
from tests_support import PATIENT, WAIT_S, limited, pass_deadlines, small_cache, until

from kvflow import Config, LeaseOutcome
from kvflow.blocking import Runtime
from kvflow.connector.courier import Happening, Loaded, LoadFailed
from kvflow.connector.offers import OfferEnded
from kvflow.connector.parameters import name_of, params_of_several, producer_params
from kvflow.connector.scheduler import ConnectorScheduler, Scheduled, SchedulingConfig, Sharing
from kvflow.connector.step import Step
from kvflow.connector.worker import ConnectorWorker
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import LeaseExpired, PrefillFailed, PromptMismatch, RequestError, RuntimeClosed, TransferFailed
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.world import World
from kvflow.testing import ManualClock, assert_quiet
from kvflow.transport.base import TransportError
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.connector.test_scheduler import BLOCK_SIZE, PREFILL, Request

CONFIG = limited(replace(PATIENT, listen="tcp://127.0.0.1:0", lease_ttl_s=60.0), seal_hold_s=0.01)


@dataclass
class Engine:
    """One rank and its scheduler. `until` steps the engine until something has happened."""

    runtime: Runtime
    transport: InprocTransport
    kv_caches: dict[str, torch.Tensor]
    scheduler: ConnectorScheduler
    worker: ConnectorWorker
    happened: list[Happening] = field(default_factory=list)

    def step(
        self,
        *scheduled: tuple[str, int],
        blocks: Sequence[int] = (),
        preempted: Sequence[str] = (),
        event: DeviceEvent | None = None,
    ) -> Step:
        """One step; with an `event` that its work is done by."""
        entries = [Scheduled(*entry) for entry in scheduled]
        step = self.scheduler.build_step(entries, preempted=preempted, block_ids=lambda _: blocks)
        self.worker.prepare(step)
        self.worker.begin(step, ready=event, after=event)
        self.collect()
        return step

    def collect(self) -> None:
        results = self.worker.collect()
        self.scheduler.update_from_workers(received=results.received, sent=results.sent)
        assert results.failed.keys() <= results.received
        self.happened += results.happenings

    def until(
        self, happened: Callable[[Happening], bool], *, meanwhile: Callable[[], object] = lambda: None
    ) -> Happening:
        for _ in steps():
            meanwhile()
            self.step()
            for entry in self.happened:
                if happened(entry):
                    self.happened.remove(entry)
                    return entry
        raise AssertionError(f"did not happen; what did: {self.happened}")

    def prefill(self, request_id: str = "r", blocks: Sequence[int] = (1, 2), tokens: int = 7) -> dict[str, Any]:
        """Compute a prompt and finish; what the router gets."""
        self.scheduler.add(Request(request_id, tokens, PREFILL))
        self.step((request_id, tokens), blocks=blocks)
        finished = self.scheduler.request_finished(request_id, completed=True)
        assert finished.hold_blocks
        assert finished.params is not None
        return finished.params

    def receive(self, params: dict[str, Any], blocks: Sequence[int], request_id: str = "d", tokens: int = 7) -> None:
        self.scheduler.add(Request(request_id, tokens, params))
        matched = self.scheduler.num_new_matched_tokens(request_id, 0)
        assert matched == (tokens, True)
        self.scheduler.update_after_alloc(request_id, blocks, matched.tokens)

    def flow(self, request_id: str = "r", tokens: int = 7, name: str = "name") -> dict[str, Any]:
        """Take a prompt that is to be read while it is computed; its reader's parameters."""
        rendezvous = Ticket.rendezvous(self.worker.introduction(), name)
        self.scheduler.add(Request(request_id, tokens, producer_params(rendezvous)))
        return rendezvous.to_params()

    def until_loaded(self, request_id: str = "d") -> LoadReport:
        """Step until the request has its prompt, and end it."""
        loaded = self.until(load_ended)
        assert isinstance(loaded, Loaded)
        assert loaded.request_id == request_id
        self.scheduler.request_finished(request_id, completed=True)
        return loaded.report

    def until_read(self, request_id: str = "r", *, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Step until the request's lease has ended, read or given back, and its blocks are free."""
        assert self.until(lease_ended, meanwhile=meanwhile) == OfferEnded(request_id, LeaseOutcome.READ, True)
        assert not self.scheduler.blocks_held(request_id)

    def until_settled(self) -> None:
        """Step until the scheduler waits for nothing and the runtime has no lease, load or blocks in use."""
        for _ in steps():
            self.step()
            blocks = self.runtime.statistics().blocks
            if self.scheduler.open_requests == 0 and blocks is not None and blocks.free == blocks.total:
                break
        assert self.scheduler.open_requests == 0
        assert_quiet(self.runtime.statistics())


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
        return made[0]

    runtime = Runtime(replace(config, engine_id=engine_id), world=World(transport=transport, clock=clock))
    runtime.open()
    kv_caches, layout = small_cache(fill=fill)
    runtime.register_kv_caches(kv_caches, layout)
    worker = ConnectorWorker(runtime)
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


@contextlib.contextmanager
def settled_afterwards(both: Pair) -> Iterator[Pair]:
    try:
        yield both
        for engine in (both.prefill, both.decode):
            engine.until_settled()
    finally:
        for engine in (both.decode, both.prefill):
            engine.runtime.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    config = replace(CONFIG, **getattr(request, "param", {}))
    network = InprocNetwork()
    with settled_afterwards(Pair(make("prefill", network, 1.0, config), make("decode", network, -1.0, config))) as both:
        yield both


def lease_ended(entry: Happening) -> bool:
    return isinstance(entry, OfferEnded)


def load_ended(entry: Happening) -> bool:
    return isinstance(entry, Loaded | LoadFailed)


def test_a_prompt_goes_from_one_engine_to_the_other(pair: Pair) -> None:
    """The lease was opened in the step that computed the prompt: no later step is needed for it to be read."""
    pair.decode.receive(pair.prefill.prefill(), [5, 6])
    assert pair.decode.until_loaded().tokens == 7
    assert pair.prefill.scheduler.blocks_held("r")
    for layer in pair.decode.kv_caches.values():
        assert (layer[:, 5] == 1.0).all()
        assert (layer[:, 6, :, :3] == 1.0).all()
        assert (layer[:, [0, 1, 2, 3, 4, 7]] == -1.0).all()
    pair.prefill.until_read()


@contextlib.contextmanager
def spare_of(pair: Pair) -> Iterator[Engine]:
    """One more prefill engine."""
    spare = make("spare", pair.decode.transport._network, 2.0)
    try:
        yield spare
        spare.until_settled()
    finally:
        spare.runtime.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_prompt_that_two_engines_hold_comes_from_the_second_if_the_first_fails(pair: Pair, fails: bool) -> None:
    """Parameters that name both: whoever is not read is told that nobody will."""
    with spare_of(pair) as spare:
        params = params_of_several([pair.prefill.prefill(), spare.prefill()])
        pair.decode.transport.faults.fail_next.extend([TransportError("scripted")] * fails)
        pair.decode.receive(params, [5, 6])
        outcomes = ["TransferFailed", "loaded"] if fails else ["loaded"]
        assert [one.outcome for one in pair.decode.until_loaded().attempts] == outcomes
        for layer in pair.decode.kv_caches.values():
            assert (layer[:, 5] == (2.0 if fails else 1.0)).all()
        for engine in (pair.prefill, spare):
            engine.until_read()


def test_a_rejected_request_gives_the_tickets_of_all_engines_back(pair: Pair) -> None:
    with spare_of(pair) as spare:
        params = params_of_several([pair.prefill.prefill(), spare.prefill()])
        pair.decode.scheduler.reject(Request("d", 7, params))
        pair.decode.step()
        for engine in (pair.prefill, spare):
            engine.until_read()


def test_parameters_of_several_that_cannot_be_are_refused(pair: Pair) -> None:
    first, longer = pair.prefill.prefill(), pair.prefill.prefill("longer", (3, 4), 8)
    with pytest.raises(PromptMismatch, match=r"offers 7 tokens, .* 8"):
        pair.decode.scheduler.add(Request("d", 9, params_of_several([first, longer])))
    for wrong in (7, [7], [{}] * 16):
        with pytest.raises(RequestError):
            pair.decode.scheduler.add(Request("d", 9, {**first, "kvflow": {**first["kvflow"], "others": wrong}}))
    with pytest.raises(RequestError, match="0 tickets"):
        params_of_several([])
    for params in (first, longer):
        pair.decode.scheduler.reject(Request("d", 9, params))
    pair.decode.step()


@pytest.mark.parametrize("flows", [False, True])
def test_ids_of_any_length_are_handed_over(pair: Pair, flows: bool) -> None:
    """An engine's ids may be longer than a runtime's: on both sides one has its beginning and a digest instead."""
    ours, theirs = "d" * 5000, "r" * 5000
    if flows:
        params = pair.prefill.flow(theirs)
        pair.prefill.step((theirs, 7), blocks=(1, 2))
    else:
        params = pair.prefill.prefill(theirs)
        assert Ticket.from_params(params).request_id.startswith(name_of(theirs))
    pair.decode.receive(params, [5, 6], ours)
    assert pair.decode.until_loaded(ours).request_id == name_of(ours)
    if flows:
        pair.prefill.scheduler.request_finished(theirs, completed=True)
    pair.prefill.until_read(theirs)


def test_long_ids_with_the_same_beginning_have_names_of_their_own() -> None:
    assert name_of("r" * 200) == "r" * 200
    names = {name_of("r" * 200 + end) for end in ("0", "1", "00")}
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
    """Nobody reads what it is to compute, and nothing lands where its earlier work may still write."""
    computed, left_alone = Event(), Event()
    pair.prefill.scheduler.add(Request("r", 7, PREFILL))
    pair.prefill.step(("r", 7), blocks=(1, 2), event=computed)
    finished = pair.prefill.scheduler.request_finished("r", completed=True)
    assert finished.params is not None
    pair.decode.receive(finished.params, [5, 6])
    pair.decode.step(event=left_alone)
    until_blocking(lambda: left_alone.asked > 3)
    for layer in pair.prefill.kv_caches.values():
        layer[:, 1:3] = 2.0
    left_alone.happened.set()
    until_blocking(lambda: computed.asked > 3)
    assert all((layer[:, 5:7] == -1.0).all() for layer in pair.decode.kv_caches.values())
    computed.happened.set()
    pair.decode.until_loaded()
    assert all((layer[:, 5] == 2.0).all() for layer in pair.decode.kv_caches.values())
    pair.prefill.until_read()


def until_blocking(condition: Callable[[], bool]) -> None:
    for _ in steps():
        if condition():
            return
    raise AssertionError("it did not come to that")


@pytest.mark.parametrize("flows", [False, True])
def test_a_request_that_waits_for_blocks_keeps_its_prompt(flows: bool) -> None:
    """The decode engine has no room for longer than the lease's ttl; its steps go on meanwhile. A lease that flows is
    found when prefill opens it, and kept from then on; so is one that has come to its end.
    """
    network, theirs, ours = InprocNetwork(), ManualClock(), ManualClock()
    prefill = make("prefill", network, 1.0, clock=lambda: theirs)
    decode = make("decode", network, -1.0, clock=lambda: ours)
    with settled_afterwards(Pair(prefill, decode)):
        if flows:
            decode.scheduler.add(Request("d", 7, prefill.flow()))
            assert [keep.request_id for keep in decode.step().keep] == ["d"]
            prefill.step(("r", 3), blocks=[1])
            prefill.step(("r", 7), blocks=[1, 2])
            assert prefill.scheduler.request_finished("r", completed=True).hold_blocks
            prefill.step()
        else:
            decode.scheduler.add(Request("d", 7, prefill.prefill()))
        for _ in range(4):
            until_renewed(prefill, decode, ours)
            on_loop(prefill.runtime, partial(theirs.advance, CONFIG.lease_ttl_s * 0.6))
        decode.scheduler.update_after_alloc("d", [5, 6], 7)
        decode.until_loaded()
        hold_passes = partial(on_loop, prefill.runtime, partial(theirs.advance, CONFIG.limits.seal_hold_s))
        prefill.until_read(meanwhile=hold_passes)


@pytest.mark.parametrize("pair", [{"lease_ttl_s": 0.3}], indirect=True)
def test_the_time_of_a_lease_begins_when_its_request_has_finished(pair: Pair) -> None:
    """However long the step takes that completes the prompt: nobody can have read it before."""
    prefill = pair.prefill
    prefill.scheduler.add(Request("r", 7, PREFILL))
    prefill.step(("r", 7), blocks=(1, 2))
    offer = next(found for _ in steps() if (found := prefill.worker._courier.offers.get("r")))
    assert offer.lease is not None
    entry = offer.lease._entry
    next(None for _ in steps() if entry.expires_s > entry.offered_s + 3 * CONFIG.limits.seal_hold_s + 3 * 0.3)
    finished = prefill.scheduler.request_finished("r", completed=True)
    assert finished.params is not None
    assert Ticket.from_params(finished.params).ttl_s == 0.3
    prefill.step()
    next(None for _ in steps() if offer.sent)
    assert offer.restart is None, "its time is begun anew although its ticket is out"
    assert prefill.until(lease_ended) == OfferEnded("r", LeaseOutcome.EXPIRED, True)


def until_renewed(prefill: Engine, decode: Engine, clock: ManualClock) -> None:
    """Let time pass for the decode engine until a lease has been renewed once more."""
    before = renewals_of(prefill)
    for _ in steps():
        decode.step()
        if renewals_of(prefill) > before:
            return
        on_loop(decode.runtime, partial(clock.advance, CONFIG.lease_ttl_s / 10))
    raise AssertionError(f"no renewal after {before}")


def renewals_of(engine: Engine) -> int:
    serving = engine.runtime.statistics().serving
    assert serving is not None
    return serving.renewals


@pytest.mark.parametrize("end", ["loaded", "cached", "aborted"])
def test_what_was_kept_is_let_go(pair: Pair, end: str) -> None:
    """After its load, and if it is not needed any more: the producer's blocks are free then."""
    scheduler = pair.decode.scheduler
    scheduler.add(Request("d", 7, pair.prefill.prefill()))
    idle = pair.decode.runtime.statistics().tasks
    assert len(pair.decode.step().keep) == 1
    assert pair.decode.runtime.statistics().tasks > idle
    if end != "aborted":
        scheduler.update_after_alloc("d", [5, 6], 7 if end == "loaded" else 0)
    if end == "loaded":
        pair.decode.until_loaded()
    else:
        scheduler.request_finished("d", completed=end == "cached")
    pair.decode.step()
    pair.prefill.until_read()
    pair.decode.until_settled()
    assert pair.decode.runtime.statistics().tasks == idle


def tear(decode: Engine) -> None:
    """The next read of an engine fails."""
    on_loop(decode.runtime, lambda: decode.transport.faults.fail_next.append(TransportError("torn")))


@pytest.mark.parametrize("flows", [False, True])
def test_a_load_that_has_failed_gives_the_offer_back(pair: Pair, flows: bool) -> None:
    """The producer's blocks need not wait until its time is over, which is for nobody any more."""
    tear(pair.decode)
    if flows:
        begin_flow(pair)
        pair.prefill.step(("r", 7), blocks=[1, 2])
        assert pair.prefill.scheduler.request_finished("r", completed=True).hold_blocks
    else:
        pair.decode.receive(pair.prefill.prefill(), [5, 6])
    assert isinstance(failed(pair.decode).error, TransferFailed)
    pair.prefill.until_read()


def test_the_offer_of_a_load_that_has_failed_may_be_used_again() -> None:
    """The one switch: a router may try the same ticket at another decode engine."""
    network = InprocNetwork()
    prefill = make("prefill", network, 1.0)
    first, second = (make(name, network, -1.0, release_failed_loads=False) for name in ("first", "second"))
    with settled_afterwards(Pair(prefill, first)), settled_afterwards(Pair(prefill, second)):
        params = prefill.prefill()
        tear(first)
        first.receive(params, [5, 6])
        assert isinstance(failed(first).error, TransferFailed)
        first.until_settled()
        assert prefill.scheduler.blocks_held("r")
        second.receive(params, [5, 6])
        second.until_loaded()
        prefill.until_read()


def begin_held(prefill: Engine, decode: Engine) -> None:
    """Begin a load whose bytes do not move before the transport is told to `perform`."""
    decode.transport.faults.hold = True
    decode.receive(prefill.prefill(), [5, 6])
    decode.step()
    decode.runtime.start(reads_are_open).result(WAIT_S)


def test_an_abandoned_load_is_received_when_its_bytes_have_stopped(pair: Pair) -> None:
    decode = pair.decode
    begin_held(pair.prefill, decode)
    assert decode.scheduler.request_finished("d", completed=False).hold_blocks
    decode.step()
    decode.step()
    assert decode.happened == []
    assert decode.scheduler.blocks_held("d")
    decode.transport.faults.hold = False
    on_loop(decode.runtime, decode.transport.perform)
    assert decode.until(load_ended) == LoadFailed("d", ((5, 6),), None)
    assert not decode.scheduler.blocks_held("d")
    pair.prefill.until_read()  # it was told at once


def share(engine: Engine, params: dict[str, Any], *names: str) -> None:
    for name in names:
        engine.scheduler.add(Request(name, 7, params), sharing=Sharing.FIRST)


def load_rest(engine: Engine, name: str, blocks: Sequence[int]) -> Happening:
    """Load what is not in the engine's prefix cache, by its last blocks."""
    missing = {2: 7, 1: 3}[len(blocks)]
    assert engine.scheduler.num_new_matched_tokens(name, 7 - missing) == (missing, True)
    engine.scheduler.update_after_alloc(name, [5, 6][: 2 - len(blocks)] + list(blocks), missing)
    return engine.until(load_ended)


@pytest.mark.parametrize("flows", [False, True])
def test_samples_read_one_offer_and_its_producer_is_told_once(pair: Pair, flows: bool) -> None:
    prefill, decode = pair.prefill, pair.decode
    params = prefill.flow() if flows else prefill.prefill()
    if flows:
        prefill.step(("r", 7), blocks=(1, 2))
        prefill.scheduler.request_finished("r", completed=True)
    share(decode, params, "a", "b", "c")
    for name, blocks in {"a": [5, 6], "b": [4], "c": [3]}.items():
        assert isinstance(load_rest(decode, name, blocks), Loaded)
        prefill.step()
        assert prefill.scheduler.blocks_held("r")
        assert prefill.happened == []
    prefill.until_read(meanwhile=decode.step)
    for layer in decode.kv_caches.values():
        assert (layer[:, 5] == 1.0).all()
        assert (layer[:, [3, 4, 6], :, :3] == 1.0).all()
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
    decode.step()
    decode.step()
    decode.transport.faults.hold = False
    on_loop(decode.runtime, decode.transport.perform)
    assert decode.until(load_ended) == LoadFailed("a", ((5, 6),), None)
    assert isinstance(load_rest(decode, "b", [3, 4]), Loaded)
    assert all((layer[:, 3] == 1.0).all() for layer in decode.kv_caches.values())
    prefill.until_read(meanwhile=decode.step)
    decode.scheduler.request_finished("b", completed=True)


@pytest.mark.parametrize("pair", [{"cancel_grace_s": 0.01}], indirect=True)
def test_quarantined_blocks_are_not_received(pair: Pair) -> None:
    decode = pair.decode
    begin_held(pair.prefill, decode)
    decode.runtime.start(pass_deadlines).result(WAIT_S)
    decode.runtime.start(blocks_are_quarantined).result(WAIT_S)
    decode.step()
    assert decode.happened == []
    assert decode.scheduler.blocks_held("d")
    on_loop(decode.runtime, decode.transport.perform)
    assert "deadline exceeded in phase 'wire'" in str(failed(decode).error)
    pair.prefill.until_read()


def test_after_the_lease_a_late_reader_fails(pair: Pair) -> None:
    params = pair.prefill.prefill()
    pair.prefill.scheduler.withdraw_all()
    pair.prefill.until(lease_ended)
    for layer in pair.prefill.kv_caches.values():
        layer.fill_(9.0)
    pair.decode.receive(params, [5, 6])
    ended = failed(pair.decode)
    assert isinstance(ended.error, LeaseExpired)
    assert ended.block_tables == ((5, 6),)
    assert all((layer == -1.0).all() for layer in pair.decode.kv_caches.values())


def test_a_preempted_prompt_is_offered_again_under_another_name(pair: Pair) -> None:
    prefill = pair.prefill
    prefill.scheduler.add(Request("r", 7, PREFILL))
    first = prefill.step(("r", 7), blocks=[1, 2]).save[0]
    prefill.step(preempted=["r"])
    second = prefill.step(("r", 7), blocks=[3, 4]).save[0]
    assert first.serve_id != second.serve_id
    params = prefill.scheduler.request_finished("r", completed=True).params
    assert params is not None
    assert params["remote_block_ids"] == [3, 4]
    pair.decode.receive(params, [5, 6])
    pair.decode.until_loaded()
    outcomes = {prefill.until(lease_ended) for _ in range(2)}
    assert outcomes == {OfferEnded("r", LeaseOutcome.REVOKED, False), OfferEnded("r", LeaseOutcome.READ, True)}


def test_blocks_of_a_withdrawn_prompt_may_be_loaded_into_at_once(pair: Pair) -> None:
    """An engine that prefills and decodes: its scheduler hands the blocks on before the lease has quite ended."""
    params = pair.prefill.prefill()
    decode = pair.decode
    decode.scheduler.add(Request("own", 7, PREFILL))
    decode.step(("own", 7), blocks=[5, 6])
    decode.scheduler.request_finished("own", completed=False)
    decode.receive(params, [5, 6])
    decode.until_loaded()


@pytest.mark.parametrize("pair", [{"limits": replace(CONFIG.limits, lease_wait_s=0.05)}], indirect=True)
def test_a_prompt_that_cannot_be_served_does_not_hold_its_blocks_for_ever(pair: Pair) -> None:
    params = pair.prefill.prefill(blocks=[1, 99])
    assert pair.prefill.until(lease_ended) == OfferEnded("r", LeaseOutcome.REVOKED, True)
    pair.decode.receive(params, [5, 6])
    failed(pair.decode)


@pytest.mark.parametrize("pair", [{"limits": replace(CONFIG.limits, lease_wait_s=0.05)}], indirect=True)
def test_no_log_line_is_forged_by_a_request_id(pair: Pair, written: Written) -> None:
    for name, blocks in (("offered", [1, 2]), ("refused", [1, 99])):
        params = pair.prefill.prefill(f"{FORGED} {name}", blocks)
        pair.prefill.scheduler.withdraw_all()
        pair.prefill.until(lease_ended)
        pair.decode.receive(params, [5, 6], f"{FORGED} decode {name}")
        failed(pair.decode)
    written.assert_plain("refused: its prompt is not offered", "decode offered: its prompt was not received")


def test_steps_without_work_wake_nobody(pair: Pair) -> None:
    started = []
    start, pair.decode.runtime.start = pair.decode.runtime.start, started.append  # type: ignore[method-assign]
    pair.decode.step()
    pair.decode.runtime.start = start  # type: ignore[method-assign]
    assert started == []


def test_closing_ends_loads_and_leases_and_refuses_steps() -> None:
    network = InprocNetwork()
    prefill, decode = (make(name, network, 1.0, replace(CONFIG, drain_timeout_s=0.01)) for name in ("p", "d"))
    begin_held(prefill, decode)
    on_loop(decode.runtime, lambda: decode.transport.faults.__setattr__("hold", False))
    on_loop(decode.runtime, decode.transport.perform)
    decode.until(load_ended)
    for engine in (decode, prefill):
        engine.runtime.close()
    prefill.collect()
    with pytest.raises(RuntimeClosed):
        prefill.scheduler.add(Request("r2", 7, PREFILL))
        prefill.step(("r2", 7), blocks=[1, 2])


def on_loop(runtime: Runtime, call: Callable[[], object]) -> None:
    async def run(_: asynchronous.Runtime) -> None:
        call()

    runtime.start(run).result(WAIT_S)


async def reads_are_open(runtime: asynchronous.Runtime) -> None:
    await until(lambda: runtime.statistics().transport.open_reads != 0)


async def blocks_are_quarantined(runtime: asynchronous.Runtime) -> None:
    await until(lambda: runtime.quarantines)


# --- prompts that are read while they are computed


def begin_flow(pair: Pair, *, tokens: int = 7, expected: int = 7, name: str = "name") -> None:
    """Both engines get their requests at once, and the reader's load begins."""
    pair.decode.receive(pair.prefill.flow(tokens=tokens, name=name), [5, 6], tokens=expected)
    pair.decode.step()


def failed(engine: Engine) -> LoadFailed:
    ended = engine.until(load_ended)
    assert isinstance(ended, LoadFailed)
    engine.scheduler.request_finished(ended.request_id, completed=False)
    return ended


@pytest.mark.parametrize("staging", ["never", "always"])
def test_a_prompt_is_read_while_it_is_computed(staging: str) -> None:
    config, network = replace(CONFIG, staging=staging), InprocNetwork()
    engines = Pair(make("prefill", network, 1.0, config), make("decode", network, -1.0))
    with settled_afterwards(engines) as pair:
        begin_flow(pair)
        pair.prefill.step(("r", 3), blocks=[1])
        pair.prefill.step(("r", 5), blocks=[1, 2])
        assert not any(map(load_ended, pair.decode.happened))
        for layer in pair.prefill.kv_caches.values():
            layer[:, 2, :, 1:] = 2.0
        pair.prefill.step(("r", 7), blocks=[1, 2])
        assert pair.decode.until_loaded().tokens == 7
        for layer in pair.decode.kv_caches.values():
            assert (layer[:, 5] == 1.0).all()
            assert (layer[:, 6, :, 0] == 1.0).all()
            assert (layer[:, 6, :, 1:3] == 2.0).all()
        assert pair.prefill.scheduler.request_finished("r", completed=True).hold_blocks
        pair.prefill.until_read()


def test_the_answer_of_a_prompt_that_flowed_has_a_ticket_for_other_readers(pair: Pair) -> None:
    """Its first reader may never come."""
    pair.prefill.flow()
    pair.prefill.step(("r", 3), blocks=[1])
    pair.prefill.step(("r", 7), blocks=[1, 2])
    params = pair.prefill.scheduler.request_finished("r", completed=True).params
    assert params is not None
    pair.decode.receive(params, [5, 6])
    pair.decode.until_loaded()
    pair.prefill.until_read()


def test_a_preempted_prompt_is_recalled_before_its_blocks_are_written(pair: Pair) -> None:
    """The step that takes them waits until no read of them can succeed; the prompt is then offered as usual."""
    begin_flow(pair)
    pair.prefill.step(("r", 5), blocks=[1, 2])
    pair.prefill.step(preempted=["r"])
    assert pair.prefill.runtime.statistics().serving.open_leases == 0
    ended = failed(pair.decode)
    assert isinstance(ended.error, PrefillFailed)
    assert "preempted" in str(ended.error)
    pair.prefill.step(("r", 7), blocks=[3, 4])
    params = pair.prefill.scheduler.request_finished("r", completed=True).params
    assert params is not None
    pair.decode.receive(params, [5, 6], request_id="again")
    pair.decode.until_loaded("again")


@pytest.mark.parametrize("computed", [0, 5])
def test_an_aborted_prompt_fails_its_reader_at_once(pair: Pair, computed: int) -> None:
    begin_flow(pair)
    if computed:
        pair.prefill.step(("r", computed), blocks=[1, 2])
    finished = pair.prefill.scheduler.request_finished("r", completed=False)
    assert finished.hold_blocks is (computed > 0)
    pair.prefill.step()
    assert isinstance(failed(pair.decode).error, PrefillFailed)


@pytest.mark.parametrize("tokens", [3, 6, 8])
def test_a_prompt_of_another_length_is_not_received(pair: Pair, tokens: int) -> None:
    """The reader has made room for its own; engines that do not agree on a prompt are found out before a byte lands."""
    begin_flow(pair, tokens=tokens)
    pair.prefill.step(("r", tokens), blocks=[1, 2])
    error = failed(pair.decode).error
    assert isinstance(error, PromptMismatch)
    assert "7 tokens are expected" in str(error)
    assert all((layer == -1.0).all() for layer in pair.decode.kv_caches.values())
    pair.prefill.scheduler.request_finished("r", completed=True)
    pair.prefill.until_read()  # it was told


@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize("end", ["cached", "aborted", "aborted at once"])
def test_a_flow_that_is_not_received_is_given_back(pair: Pair, end: str, opened: str) -> None:
    """As by a client that leaves while it waits, or a server that answers HTTP 400: prefill may come to it later."""
    params = pair.prefill.flow()
    idle = pair.decode.runtime.statistics().tasks
    if opened == "before":
        pair.prefill.step(("r", 5), blocks=[1, 2])
    pair.decode.scheduler.add(Request("d", 7, params))
    if end != "aborted at once":
        assert pair.decode.step().keep
    if end == "cached":
        pair.decode.scheduler.update_after_alloc("d", [5, 6], 0)
    pair.decode.scheduler.request_finished("d", completed=end == "cached")
    assert not pair.decode.step().keep
    pair.prefill.step(("r", 7), blocks=[1, 2])
    assert pair.prefill.scheduler.request_finished("r", completed=True).hold_blocks
    pair.prefill.until_read()
    until_blocking(lambda: pair.decode.runtime.statistics().tasks == idle)


def test_a_prompt_that_cannot_be_offered_is_declined(pair: Pair) -> None:
    """Its blocks are written by a load, which is the engine's mistake; its reader does not wait for it."""
    params = pair.decode.prefill("other")
    begin_flow(pair)
    faults = pair.prefill.transport.faults
    faults.hold = True
    pair.prefill.receive(params, [1, 2], request_id="busy")
    pair.prefill.step()
    until_blocking(lambda: pair.prefill.transport.held)
    pair.prefill.step(("r", 5), blocks=[1, 2])
    assert isinstance(failed(pair.decode).error, PrefillFailed)
    faults.hold = False
    on_loop(pair.prefill.runtime, pair.prefill.transport.perform)
    pair.prefill.until(load_ended)
    for request_id in ("busy", "r"):
        pair.prefill.scheduler.request_finished(request_id, completed=False)
    pair.decode.until(lease_ended)


def test_a_name_is_used_once_at_a_time(pair: Pair) -> None:
    """The second prompt of that name is not offered, which does not disturb the first one's reader."""
    begin_flow(pair)
    pair.prefill.step(("r", 5), blocks=[1, 2])
    pair.prefill.flow("twin")
    pair.prefill.step(("twin", 7), blocks=[3, 4])
    pair.prefill.step(("r", 7), blocks=[1, 2])
    pair.decode.until_loaded()
    for request_id in ("twin", "r"):
        pair.prefill.scheduler.request_finished(request_id, completed=True)
