"""Several requests of one room, prefill servers that stand still or do not fit, and requests that one server gives up.

Senders and receivers on SGLang's pools, stepped by hand.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

import numpy as np
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.decode import DecodeTransferQueue
from sglang.srt.environ import envs

from kvflow.errors import ConfigError
from kvflow.sglang.bootstrap import INTRODUCTION
from kvflow.sglang.hooks import prompt_of
from kvflow.sglang.manager import KVFlowManager
from kvflow.sglang.receiver import KVFlowReceiver
from kvflow.sglang.rooms import LEFTOVER_S, RoomMessage
from kvflow.sglang.sender import KVFlowSender
from kvflow.sglang.server_settings import SETTINGS
from kvflow.transport.inproc import DEFAULT_NETWORK
from tests.sglang.sides import KVArgs, Request, Server, configured, pool_tensors, use, wait_until
from tests.sglang.test_classes import Site, assert_fails, finish


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with configured():
        site = Site()
        try:
            yield site
        finally:
            site.close()


@pytest.fixture(scope="module")
def pair(site: Site) -> tuple[Server, Server]:
    return site.pair()


@pytest.fixture
def fresh(site: Site) -> Iterator[Site]:
    fresh = Site()
    try:
        yield fresh
    finally:
        fresh.close()


def several(pair: tuple[Server, Server], room: int, count: int) -> list[Request]:
    places: Any = [{"pages": [at * 3 + 1, at * 3 + 2], "targets": [at * 3 + 2, at * 3 + 1]} for at in range(count)]
    return [Request(*pair, room=room, row=at, target_row=at, **places[at]) for at in range(count)]


def offer(request: Request, prefix: int = 0) -> None:
    request.until_senders(KVPoll.WaitingForInput)
    for sender in request.senders:
        assert sender.pop_decode_prefix_len() == prefix
        sender.init(len(request.pages), request.row)


# --- one room


def test_the_second_of_a_room_can_be_polled_after_the_first_has_ended(site: Site, pair: tuple[Server, Server]) -> None:
    first, second = several(pair, 77, 2)
    first.begin()
    second.make_receivers()
    first.send()
    finish(first)
    assert [receiver.poll() for receiver in second.receivers] == [KVPoll.WaitingForInput]
    second.make_senders()
    second.send_metadata()
    offer(second)
    second.send()
    finish(second)
    site.quiet()


@pytest.mark.parametrize("decode_first", [True, False])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_samples_of_one_prompt_have_one_room(fresh: Site, prefill_tp: int, decode_tp: int, decode_first: bool) -> None:
    """As of `n` above 1. Each gets its own pages and its own first token, whichever comes and ends first."""
    pair = fresh.pair("mha", prefill_tp, decode_tp)
    requests = several(pair, 78, 4)
    for request in requests:
        if decode_first:
            request.make_receivers()
            request.send_metadata()
    for request in requests:
        request.make_senders()
    for request in requests:
        if not decode_first:
            request.make_receivers()
            request.send_metadata()
    for request in requests:
        offer(request)
    for request in reversed(requests):
        request.send()
    for request in (requests[2], requests[0], requests[3], requests[1]):
        finish(request)
    fresh.quiet()


def test_an_abort_ends_one_of_a_room(site: Site, pair: tuple[Server, Server]) -> None:
    first, second = several(pair, 79, 2)
    for request in (first, second):
        request.begin()
    first.receivers[0].abort()
    first.until_receivers(KVPoll.Failed)
    first.until_senders(KVPoll.Failed)
    assert_fails(first.senders[0], "the decode server has aborted the request: Aborted by AbortReq.")
    second.send()
    finish(second)
    first.clear()
    site.quiet()


def test_a_prefill_server_refuses_one_of_a_room(site: Site, pair: tuple[Server, Server]) -> None:
    first, second = several(pair, 80, 2)
    pair[0].ranks[0].manager.refuse(80, "the prompt is too long")
    second.make_senders()
    for request in (first, second):
        request.make_receivers()
        request.send_metadata()
    first.until_receivers(KVPoll.Failed)
    assert_fails(first.receivers[0], "PrefillFailed", "the prompt is too long")
    offer(second)
    second.send()
    finish(second)
    first.clear()
    site.quiet()


def test_requests_that_sglang_drops_without_a_word_leave_nothing(site: Site, pair: tuple[Server, Server]) -> None:
    """Its prefill scheduler aborts some, and never clears them."""
    (request,) = several(pair, 81, 1)
    request.begin()
    request.senders[0].abort()
    request.until_receivers(KVPoll.Failed)
    assert_fails(request.receivers[0], "PrefillFailed")
    request.receivers.clear()
    request.senders.clear()
    gc.collect()
    site.quiet()


@pytest.mark.parametrize("room", [0, -1, 1 << 63])
def test_a_room_that_metadata_cannot_hold_is_refused(site: Site, pair: tuple[Server, Server], room: int) -> None:
    """SGLang's row of metadata has 0 until it is written, and signed numbers."""
    request = Request(*pair, room=room, pages=[4], targets=[5])
    request.make_receivers()
    request.make_senders()
    for one in (*request.receivers, *request.senders):
        assert one.poll() == KVPoll.Failed
        assert_fails(one, "bootstrap_room: expected 1 to 2**63 - 1", str(room))
    request.clear()


# --- who gives up


def is_given_up(prefill: Server, room: int) -> bool:
    manager = prefill.ranks[0].manager
    with manager._rooms_lock:
        return any(asked.given_up for asked in manager._rooms.requests.get(room, ()))


@pytest.mark.parametrize("moment", ["before its pages", "waiting"])
def test_a_decode_server_gives_up_before_prefill_has_heard(
    site: Site, pair: tuple[Server, Server], moment: str
) -> None:
    """The prefill server's request fails when it comes, with decode's reason; the room can be used again."""
    for _ in range(2):
        request = Request(*pair, room=82, pages=[4, 20], targets=[5, 6])
        request.make_receivers()
        if moment == "waiting":
            request.send_metadata()
        request.receivers[0].abort()
        request.until_receivers(KVPoll.Failed)
        request.clear()
        wait_until(lambda: is_given_up(pair[0], 82))
        request.make_senders()
        request.until_senders(KVPoll.Failed)
        assert_fails(request.senders[0], "the decode server has aborted the request: Aborted by AbortReq.")
        request.clear()
        site.quiet()
    request = Request(*pair, room=82, pages=[4, 20], targets=[5, 6])
    request.begin()
    request.send()
    finish(request)
    site.quiet()


def test_a_decode_server_that_refuses_a_prompt_tells_prefill(site: Site, pair: tuple[Server, Server]) -> None:
    """It makes no receiver then: its door tells (`hooks._after_decode_add`)."""
    from kvflow.sglang import hooks

    request = Request(*pair, room=83, pages=[4, 20], targets=[5, 6])
    request.make_senders()
    queue = SimpleNamespace(kv_manager=pair[1].ranks[0].manager, queue=[])
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair[0].port, "bootstrap_room": 83}
    reason = SimpleNamespace(message="exceeds the maximum number of tokens")
    hooks._after_decode_add(
        KVFlowManager, None, queue, SimpleNamespace(finished_reason=reason, to_finish=None, **where)
    )
    request.until_senders(KVPoll.Failed)
    assert_fails(request.senders[0], "the decode server refuses the prompt: exceeds the maximum number of tokens")
    request.clear()
    site.quiet()


def test_nobody_else_can_give_a_request_up(site: Site, pair: tuple[Server, Server]) -> None:
    """Rooms are no secrets: an abort by room alone, or of another name, ends nothing that has begun."""
    (request,) = several(pair, 84, 1)
    request.begin()
    manager = pair[0].ranks[0].manager
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(f"tcp://{manager.local_ip}:{manager.rank_port}")
    forged = RoomMessage(room=84, name="sglang-84-guessed", reader="x", readers=1, given_up="forged")
    for frames in ([b"ABORT", b"84"], [b"KVFLOW", b"{}"], [b"KVFLOW"], [b""], forged.frames()):
        socket.send_multipart(frames)
    wait_until(lambda: 84 in manager._rooms.requests)
    request.send()
    finish(request)
    socket.close(0)
    with manager._rooms_lock:
        assert [asked.given_up for asked in manager._rooms.requests[84]] == ["forged"]
        manager._rooms._forget_leftovers(84, time.monotonic() + 2 * LEFTOVER_S)
    site.quiet()


# --- prompts


def with_prompts(request: Request, prefill: list[int] | None, decode: list[int] | None) -> Request:
    for sender in request.senders:
        sender.prompt = prefill
    for receiver in request.receivers:
        receiver.prompt = decode
    return request


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_two_prompts_of_one_length_are_refused(fresh: Site, prefill_tp: int, decode_tp: int) -> None:
    """Before anything is computed or read, on both servers."""
    request = Request(*fresh.pair("mha", prefill_tp, decode_tp), room=85, pages=[4, 20], targets=[5, 6])
    request.make_receivers()
    request.make_senders()
    with_prompts(request, [1, 2, 3, 4], [1, 2, 3, 5])
    request.send_metadata()
    request.until_senders(KVPoll.Failed)
    request.until_receivers(KVPoll.Failed)
    for sender in request.senders:
        assert_fails(sender, "PromptMismatch", "room 85 has two prompts", "4 tokens")
    for receiver in request.receivers:
        assert_fails(receiver, "PrefillFailed", "PromptMismatch", "room 85 has two prompts")
    request.clear()
    fresh.quiet()


@pytest.mark.parametrize("told", [(True, True), (True, False), (False, True)])
def test_one_prompt_or_one_that_is_not_told_is_served(
    site: Site, pair: tuple[Server, Server], told: tuple[bool, bool]
) -> None:
    (request,) = several(pair, 86, 1)
    request.make_receivers()
    request.make_senders()
    with_prompts(request, [1, 2, 3] if told[0] else None, [1, 2, 3] if told[1] else None)
    request.send_metadata()
    offer(request)
    request.send()
    finish(request)
    site.quiet()


def test_what_of_a_prompt_is_compared() -> None:
    """SGLang's numbers for pictures may differ between servers; a prompt that is computed again has its answer, too."""
    plain = SimpleNamespace(origin_input_ids=[5, 6, 2_000_000], output_ids=[7], multimodal_inputs=None)
    assert prompt_of(plain).tolist() == [5, 6, 2_000_000]
    pictures = SimpleNamespace(**{**vars(plain), "multimodal_inputs": object()})
    assert prompt_of(pictures).tolist() == [5, 6, -1]
    again = SimpleNamespace(**vars(plain), pd_rebootstrap_in_progress=True)
    assert prompt_of(again).tolist() == [5, 6, 2_000_000, 7]


# --- a prefill server that hangs


@pytest.fixture
def held(fresh: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server, Any, Any]]:
    """A pair with held reads: the servers, the decode side's transport, and a function that lets the reads land."""
    monkeypatch.setenv(SETTINGS, '{"transport": "inproc", "cancel_grace_s": 0.05}')
    prefill, decode = fresh.pair()
    (pool,) = decode.ranks[0].manager.pools
    found = next(one for name, one in DEFAULT_NETWORK.agents.items() if name.startswith(pool.runtime.config.engine_id))
    found.faults.hold = True

    def let_go() -> None:
        if not found.faults.hold:
            return

        async def perform(_: object) -> None:
            found.faults.hold = False
            while found.held:
                found.perform()
                await asyncio.sleep(0)

        pool.runtime.start(perform).result(10.0)

    yield prefill, decode, found, let_go
    let_go()


class Scheduler:
    """The handling of a failed request by SGLang's decode scheduler, by SGLang's own code."""

    def __init__(self, request: Request) -> None:
        self.queue = DecodeTransferQueue.__new__(DecodeTransferQueue)
        self.queue._deferred_releases = []
        self.queue.enable_host_receive = False
        self.queue.deferred_kv_release_timeout = 0.0
        self.queue.enable_staging = False
        self.queue.gloo_group = None
        self.released: list[Any] = []
        self.queue._release_request = self.released.append  # type: ignore[method-assign, assignment]
        self.queue.metadata_buffers = request.decode.ranks[0].aux
        self.queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=self.released.append)  # type: ignore[assignment]
        self.queue.scheduler = SimpleNamespace(metrics_reporter=SimpleNamespace(enable_metrics=False))  # type: ignore[assignment]
        self.one = SimpleNamespace(
            req=SimpleNamespace(bootstrap_room=request.room),
            kv_receiver=request.receivers[0],
            metadata_buffer_index=request.target_row,
            host_staged=False,
        )

    def fail(self, *words: str) -> None:
        receiver = self.one.kv_receiver
        assert_fails(receiver, *words)
        assert receiver.kv_mgr.enable_deferred_decode_kv_release
        receiver.ensure_abort_notified(force_arm=True)
        assert receiver.abort_notified, "else SGLang releases the pages at once"
        self.queue._defer_release(self.one)  # type: ignore[arg-type]

    def step(self) -> bool:
        """True once the pages are free."""
        self.queue.resolve_deferred_releases()
        return bool(self.released)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.disaggregation.decode as decode_module

    monkeypatch.setattr(decode_module, "all_reduce_flags", lambda *, flags, group, op: flags)


@pytest.mark.parametrize("how", ["heartbeat", "deadline", "abort"])
def test_prefill_stands_still_in_the_middle_of_a_read(
    held: tuple[Server, Server, Any, Any],
    one_rank: None,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client gets an error, the pages are not used again before the read has stopped, and the log has one line."""
    prefill, decode, transport, let_go = held
    manager = decode.ranks[0].manager
    if how == "deadline":
        monkeypatch.setattr(manager, "waiting_timeout", 0.3)
    request = Request(prefill, decode, room=87, pages=[4, 20], targets=[5, 6])
    request.begin()
    request.send()
    wait_until(lambda: transport.held or request.receivers[0].poll() == KVPoll.Failed)
    before = [tensor.clone() for tensor in pool_tensors(decode.ranks[0].pool, decode.kind)]
    if how == "heartbeat":
        manager._handle_node_failure(prefill.address)
    elif how == "abort":
        request.receivers[0].abort()
    request.until_receivers(KVPoll.Failed)
    (load,) = request.receivers[0]._loads
    assert not load.safe
    scheduler = Scheduler(request)
    said = {"heartbeat": "Lost connection", "deadline": "DeadlineExceeded", "abort": "Aborted"}
    with caplog.at_level(logging.INFO, "kvflow.sglang"):
        scheduler.fail(said[how])
        for _ in range(3):
            assert not scheduler.step(), "a byte may still land in them, whatever time has passed"
        ours = [one for one in caplog.records if one.name.startswith("kvflow.sglang")]
        alarms = [one.getMessage() for one in ours if one.levelno >= logging.WARNING]
        assert len(alarms) == 1
        assert f"prefill server {prefill.address}: reads of its memory have not stopped" in alarms[0]
        assert all((a == b).all() for a, b in zip(before, pool_tensors(decode.ranks[0].pool, "mha"), strict=True))
        let_go()
        wait_until(scheduler.step)
        assert load.safe
    request.clear()


def test_another_rank_fails_while_this_one_reads(held: tuple[Server, Server, Any, Any], one_rank: None) -> None:
    """SGLang takes the worst state of all ranks: this one's receiver is ended in the middle of its read."""
    prefill, decode, transport, let_go = held
    request = Request(prefill, decode, room=88, pages=[4, 20], targets=[5, 6])
    request.begin()
    request.send()
    wait_until(lambda: transport.held)
    assert request.receivers[0].poll() == KVPoll.Transferring
    scheduler = Scheduler(request)
    scheduler.fail("another rank")
    assert not scheduler.step()
    let_go()
    wait_until(scheduler.step)
    request.until_senders(KVPoll.Failed, KVPoll.Success)
    request.clear()


def test_pages_are_never_left_to_a_timeout(pair: tuple[Server, Server]) -> None:
    rank = pair[1].ranks[0]
    manager, name = rank.manager, "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    off = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.override(False)
    with use(rank), off, pytest.raises(ConfigError, match=name):
        KVFlowManager(manager.kv_args, manager.disaggregation_mode, manager.server_args, False)


# --- a prefill server that does not fit


def asked(request: Request) -> None:
    """As SGLang's decode scheduler does it for a server that it does not know: the receiver first."""
    for rank in request.decode.ranks:
        with use(rank):
            request.receivers.append(KVFlowReceiver(rank.manager, request.prefill.address, request.room))
            assert not rank.manager.try_ensure_parallel_info(request.prefill.address)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("page_size", 32, "Page size mismatch: prefill server has page_size=16"),
        ("kv_cache_dtype_str", "float16", "KV cache dtype mismatch"),
        ("kv_layout", "nhd", "KV layout mismatch"),
    ],
)
def test_a_prefill_server_that_does_not_fit_fails_its_requests(
    fresh: Site,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
    told: str,
) -> None:
    """Nothing is raised in its scheduler's loop, within the pause before it asks again, and on the prefill server."""
    kept = KVArgs.kv_layout
    monkeypatch.setattr(KVArgs, "kv_layout", "hnd" if name == "kv_layout" else kept)
    prefill, decode = fresh.pair()
    manager = decode.ranks[0].manager
    monkeypatch.setattr(prefill.bootstrap, "kv_layout", "hnd" if name == "kv_layout" else None)
    monkeypatch.setattr(manager.kv_args if name == "page_size" else manager, name, value)
    requests = [Request(prefill, decode, room=90 + at, pages=[3], targets=[5]) for at in range(3)]
    with caplog.at_level(logging.ERROR, "kvflow.sglang"):
        asked(requests[0])
        asked(requests[1])
    with use(decode.ranks[0]):
        requests[2].receivers.append(KVFlowReceiver(manager, prefill.address, requests[2].room))
    for request in requests:
        request.make_senders()
        assert request.receivers[0].poll() == KVPoll.Failed
        assert_fails(request.receivers[0], "PeerIncompatible", prefill.address, told)
        request.until_senders(KVPoll.Failed)
        assert_fails(request.senders[0], "the decode server has aborted the request: PeerIncompatible", told)
        request.clear()
    assert len([one for one in caplog.records if one.name.startswith("kvflow.sglang")]) == 1
    monkeypatch.undo()
    fresh.quiet()


@pytest.mark.parametrize("introduction", [[{}], 7, [{"kvflow": {"version": 99}}], ["text"]])
def test_an_introduction_that_cannot_be_read_fails_the_request(
    fresh: Site, introduction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another version, for example."""
    prefill, decode = fresh.pair()
    (place,) = prefill.bootstrap._introductions
    monkeypatch.setitem(prefill.bootstrap._introductions, place, introduction)
    request = Request(prefill, decode, room=95, pages=[3], targets=[5])
    request.make_senders()
    request.make_receivers()
    assert request.receivers[0].poll() == KVPoll.Failed
    assert_fails(request.receivers[0], "PeerIncompatible", prefill.address)
    request.until_senders(KVPoll.Failed)
    request.clear()
    assert INTRODUCTION
    fresh.quiet()


def test_a_silent_prefill_server_has_a_typed_failure(fresh: Site) -> None:
    """SGLang asks some times, then aborts the waiting request."""
    prefill, decode = fresh.pair()
    prefill.close()
    fresh.servers.remove(prefill)
    request = Request(prefill, decode, room=96, pages=[3], targets=[5])
    asked(request)
    assert request.receivers[0].poll() == KVPoll.Bootstrapping
    request.receivers[0].abort()
    assert_fails(request.receivers[0], "PeerUnreachable", prefill.address)
    request.clear()


def test_a_runtime_that_is_gone_is_a_failure_of_its_requests(fresh: Site) -> None:
    """Not of the scheduler's loop, in which all of it is called."""
    prefill, decode = fresh.pair()
    request = Request(prefill, decode, room=97, pages=[4, 20], targets=[5, 6])
    request.begin()
    request.send(0, 1)
    for server in (prefill, decode):
        server.ranks[0].manager.pools[0].runtime.close()
    request.send(1)
    request.until_senders(KVPoll.Failed)
    request.until_receivers(KVPoll.Failed)
    for one in (*request.senders, *request.receivers):
        with pytest.raises(KVTransferError):
            one.failure_exception()
    assert isinstance(request.senders[0], KVFlowSender)
    assert np.array(request.pages).size == 2
    request.clear()
