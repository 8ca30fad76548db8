"""Senders and receivers on SGLang's pools, stepped by hand: what moves, in which states, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend
from sglang.srt.environ import envs

import kvflow.sglang.manager as manager_module
from kvflow import blocking
from kvflow.connector.plugin_settings import RefusedOption
from kvflow.errors import ConfigError
from kvflow.sglang import _class_of
from kvflow.sglang.manager import KVFlowManager
from kvflow.sglang.receiver import KVFlowReceiver
from kvflow.sglang.server_settings import REFUSED_OPTIONS
from tests.sglang.sides import PAGE, PAGES, Request, Server, configured, pool_tensors, tensors, use, wait_until
from tests.sglang.states import StateRequest, StateServer


class Site:
    """Servers of one test."""

    def __init__(self) -> None:
        self.servers: list[Server] = []

    def pair(
        self, kind: str = "mha", prefill_tp: int = 1, decode_tp: int = 1, hidden: int = 16
    ) -> tuple[Server, Server]:
        prefill = self.prefill(kind, prefill_tp, hidden=hidden)
        decode = Server(DisaggregationMode.DECODE, kind, decode_tp, hidden=hidden)
        self.servers.append(decode.open())
        return prefill, decode

    def prefill(self, kind: str = "mha", tp_size: int = 1, port: int = 0, hidden: int = 16) -> Server:
        prefill = Server(DisaggregationMode.PREFILL, kind, tp_size, port, hidden).open()
        prefill.fill(seed=7)
        self.servers.append(prefill)
        return prefill

    def states(self, prefill: str, decode: str = "", prefill_tp: int = 1, decode_tp: int = 1) -> tuple[Server, Server]:
        """Servers with state; the kind of `decode` is that of `prefill` unless it is another."""
        one = StateServer(DisaggregationMode.PREFILL, prefill, prefill_tp).open()
        other = StateServer(DisaggregationMode.DECODE, decode or prefill, decode_tp, one.port)
        self.servers += [one, other.open()]
        one.fill(seed=7)
        return one, other

    def close(self) -> None:
        for server in reversed(self.servers):
            server.close()

    def quiet(self) -> None:
        """Nothing is left of any request."""
        for rank in (rank for server in self.servers for rank in server.ranks):
            manager = rank.manager
            assert not manager.request_status
            assert not manager.failure_records
            assert not manager.senders
            assert not getattr(manager, "transfer_infos", None)
            for pool in manager.pools:
                wait_until(lambda pool=pool: is_quiet(pool.runtime))


def is_quiet(runtime: blocking.Runtime) -> bool:
    now = runtime.statistics()
    return not (now.loading.open_loads or now.loading.quarantines or now.serving.open_leases)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with configured():
        site = Site()
        try:
            yield site
        finally:
            site.close()


@pytest.fixture
def fresh(site: Site) -> Iterator[Site]:
    """For servers that no other test has use for."""
    fresh = Site()
    try:
        yield fresh
    finally:
        fresh.close()


@pytest.fixture(scope="module")
def pair(site: Site) -> tuple[Server, Server]:
    return site.pair()


@pytest.fixture(scope="module")
def wide(site: Site) -> tuple[Server, Server]:
    """Of heads so large that a chunk is read while the next one is computed."""
    return site.pair("wide")


def finish(request: Request) -> None:
    request.until_receivers(KVPoll.Success)
    request.until_senders(KVPoll.Success)
    request.check_bytes()
    request.clear()


def test_pages_and_the_first_token_arrive_chunk_by_chunk(site: Site, wide: tuple[Server, Server]) -> None:
    """A chunk of some MB is read while the prefill goes on; smaller ones are put together."""
    request = Request(*wide, room=11, pages=[*range(1, 31)], targets=[*range(30, 0, -1)])
    request.begin()
    request.send(0, 20)
    request.until_receivers(KVPoll.Transferring)
    (load,) = request.receivers[0]._loads
    assert next(progress.tokens for progress in load if progress.tokens >= 20 * 16) == 20 * 16
    request.send(20, 25)
    request.send(25)
    assert request.senders[0].poll() in (KVPoll.Transferring, KVPoll.Success)
    finish(request)
    site.quiet()


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_tensor_parallelism(site: Site, kind: str, prefill_tp: int, decode_tp: int) -> None:
    servers = site.pair(kind, prefill_tp, decode_tp)
    request = Request(*servers, room=12, pages=[3, 9, 4], targets=[5, 6, 7])
    request.begin()
    request.send(0, 2)
    request.send(2)
    finish(request)
    site.quiet()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_windows_have_pages_of_their_own(site: Site, prefill_tp: int, decode_tp: int) -> None:
    servers = site.pair("swa", prefill_tp, decode_tp)
    places = {"pages": [3, 9, 4, 8], "targets": [5, 6, 7, 1], "state": [11, 12], "target_state": [2, 21]}
    request = Request(*servers, room=13, **places)
    request.begin()
    request.send(0, 2)
    request.send(2)
    finish(request)
    site.quiet()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    "kind", ["gdn", "ple", "kda", "kda-dsa", "dsa", "dsa-tail", "qsa", "mxfp8", "minimax", "v4", "rows"]
)
def test_state_goes_with_the_pages(fresh: Site, kind: str, tp_size: int) -> None:
    """All components that SGLang has, in its own pools; `rows` are plain tensors: see there.

    What SGLang gives as a request's items is not changed: an array of no dimension for recurrent state, six numbers
    for a DSA tail.
    """
    servers = fresh.states(kind, prefill_tp=tp_size, decode_tp=tp_size)
    request = StateRequest(*servers, pages=[3, 9, 4], targets=[5, 6, 7])
    request.begin()
    request.send(0, 2)
    request.send(2)
    finish(request)
    fresh.quiet()


@pytest.mark.parametrize("kind", ["qsa", "mxfp8", "minimax"])
def test_state_of_a_prefix_that_decode_has_stays_as_it_is(fresh: Site, kind: str) -> None:
    """SGLang names it with the rest. Two requests with the same prefix do not get into each other's way."""
    servers = fresh.states(kind)
    requests = [
        StateRequest(*servers, pages=[3, 9], targets=[5, 6], prefix=[1], alone=False),
        StateRequest(
            *servers, pages=[4, 8], targets=[2, 7], prefix=[1], alone=False, slot=4, target_slot=6, row=3, target_row=4
        ),
    ]
    for request in requests:
        request.begin(prefix=16)
    for request in requests:
        request.send()
    for request in requests:
        finish(request)
    fresh.quiet()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["dsa", "dsa-tail", "v4", "rows"])
def test_state_of_latents_goes_to_another_tensor_parallelism(
    fresh: Site, kind: str, prefill_tp: int, decode_tp: int
) -> None:
    """All ranks have the same latents, so one rank is read."""
    servers = fresh.states(kind, prefill_tp=prefill_tp, decode_tp=decode_tp)
    request = StateRequest(*servers, pages=[3, 9, 4], targets=[5, 6, 7])
    request.begin()
    request.send()
    finish(request)
    fresh.quiet()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["gdn", "ple", "kda", "kda-dsa", "qsa"])
def test_recurrent_state_of_another_tensor_parallelism_is_refused(
    fresh: Site, kind: str, prefill_tp: int, decode_tp: int
) -> None:
    """Before a byte has moved. The prefill server is notified."""
    servers = fresh.states(kind, prefill_tp=prefill_tp, decode_tp=decode_tp)
    request = StateRequest(*servers, pages=[3], targets=[5])
    request.make_senders()
    request.make_receivers()
    told = f"its tensor parallelism is {prefill_tp}, ours {decode_tp}; mamba.0"
    for receiver in request.receivers:
        assert receiver.poll() == KVPoll.Failed
        assert_fails(receiver, "PeerIncompatible", servers[0].address, told)
    request.until_senders(KVPoll.Failed)
    for sender in request.senders:
        assert_fails(sender, "the decode server has aborted")
    request.clear()
    fresh.quiet()


@pytest.mark.parametrize("kind", ["mxfp8", "minimax"])
def test_what_sglang_itself_refuses_of_another_tensor_parallelism(fresh: Site, kind: str) -> None:
    """The request fails, and nothing is raised in SGLang's scheduler's loop."""
    request = StateRequest(*fresh.states(kind, prefill_tp=2), pages=[3], targets=[5])
    (rank,) = request.decode.ranks
    with use(rank):
        receiver = KVFlowReceiver(rank.manager, request.prefill.address, request.room)
        assert not rank.manager.try_ensure_parallel_info(request.prefill.address)
    assert receiver.poll() == KVPoll.Failed
    assert_fails(receiver, "PeerIncompatible", request.prefill.address, "TP sizes")
    receiver.clear()


def test_state_of_another_dtype_is_refused(fresh: Site) -> None:
    """`--mamba-ssm-dtype`, which SGLang keeps in this variable: numbers of 16 bits look alike in memory."""
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        prefill, _ = fresh.states("gdn")
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("float16"):
        decode = StateServer(DisaggregationMode.DECODE, "gdn", 1, prefill.port)
        fresh.servers.append(decode.open())
    request = StateRequest(prefill, decode, pages=[3], targets=[5])
    request.begin()
    request.send()
    request.until_receivers(KVPoll.Failed)
    assert_fails(request.receivers[0], "PeerIncompatible", "bfloat16.float16", "bfloat16.bfloat16")
    request.until_senders(KVPoll.Failed)
    request.clear()


@pytest.mark.parametrize(("name", "value"), [("page_size", 32), ("kv_cache_dtype_str", "bfloat16")])
def test_what_sglang_compares_is_refused_before_a_byte_moves(
    fresh: Site, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh.pair()
    (rank,) = decode.ranks
    holder = rank.manager if hasattr(rank.manager, name) else rank.manager.kv_args
    monkeypatch.setattr(holder, name, value)
    with use(rank):
        receiver = KVFlowReceiver(rank.manager, prefill.address, 77)
        assert not rank.manager.try_ensure_parallel_info(prefill.address)
    assert receiver.poll() == KVPoll.Failed
    assert_fails(receiver, "PeerIncompatible", prefill.address, str(value))
    receiver.clear()


def test_servers_with_other_components_of_state_are_refused(fresh: Site) -> None:
    request = StateRequest(*fresh.states("gdn", "qsa"), pages=[3], targets=[5])
    request.make_receivers()
    assert request.receivers[0].poll() == KVPoll.Failed
    theirs, ours = "it has 2 pools", "this decode server has 4: kv, mamba.0, qsa_pending.1, qsa_compressed.2"
    assert_fails(request.receivers[0], "PeerIncompatible", request.prefill.address, theirs, ours)
    request.clear()


@pytest.mark.parametrize(("prefill", "decode"), [("gdn", "ple"), ("dsa-tail", "dsa-tail-longer")])
def test_state_of_another_shape_is_refused(fresh: Site, prefill: str, decode: str) -> None:
    """For example a DSA tail with room for speculative tokens on one side; SGLang's own backends copy the live part."""
    request = StateRequest(*fresh.states(prefill, decode), pages=[3], targets=[5])
    request.begin()
    request.send()
    request.until_receivers(KVPoll.Failed)
    assert_fails(request.receivers[0], "PeerIncompatible")
    request.until_senders(KVPoll.Failed)
    assert_fails(request.senders[0], "decode server has aborted")
    request.clear()
    fresh.quiet()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)], ids=["prefill", "decode", "both"])
def test_a_draft_model_may_be_on_one_server(
    fresh: Site, sides: tuple[bool, bool], kind: str, prefill_tp: int, decode_tp: int
) -> None:
    """The model's own pages come all the same; a draft's come where both have one."""
    modes = (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
    port = 0
    for mode, tp_size, speculates in zip(modes, (prefill_tp, decode_tp), sides, strict=True):
        fresh.servers.append(Server(mode, kind, tp_size, port, speculates=speculates).open())
        port = fresh.servers[0].port
    prefill, decode = fresh.servers
    prefill.fill(seed=7)
    for at, rank in enumerate(prefill.ranks):
        if rank.draft is not None:
            for tensor in tensors(rank.draft):
                tensor.fill_(at + 1.0)
    request = Request(prefill, decode, pages=[4, 20], targets=[5, 6])
    request.begin()
    request.send()
    if kind == "mla" and prefill_tp != decode_tp and all(sides):  # what is not cut by heads beside it is not either
        request.until_receivers(KVPoll.Failed)
        assert_fails(request.receivers[0], "PeerIncompatible", "bytes of a head")
        request.clear()
        return
    finish(request)
    for at, rank in enumerate(decode.ranks):
        for tensor in tensors(rank.draft) if rank.draft is not None else ():
            heads = tensor.shape[2] // max(prefill_tp // decode_tp, 1)
            for head in range(tensor.shape[2]):
                came_from = at * prefill_tp // decode_tp + head // heads + 1.0 if all(sides) else 0.0
                assert (tensor[[5, 6], :, head] == came_from).all()
    fresh.quiet()


def test_a_prefill_server_of_another_backend_is_refused(fresh: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(KVFlowManager, "_register_topology_row", CommonKVManager._register_topology_row)
        prefill = fresh.prefill()
    decode = Server(DisaggregationMode.DECODE, port=prefill.port).open()
    fresh.servers.append(decode)
    request = Request(prefill, decode, pages=[3], targets=[5])
    request.make_receivers()
    assert request.receivers[0].poll() == KVPoll.Failed
    assert_fails(request.receivers[0], "PeerIncompatible", prefill.address, "its transfer backend is not kvflow")
    request.clear()


def test_a_prefix_that_decode_has_is_told(site: Site, pair: tuple[Server, Server]) -> None:
    request = Request(*pair, room=14, pages=[4, 20], targets=[5, 6])
    request.begin(prefix=48)
    request.send()
    finish(request)
    site.quiet()


def test_a_prompt_whose_pages_are_all_there_still_brings_its_first_token(
    site: Site, pair: tuple[Server, Server]
) -> None:
    request = Request(*pair, room=15, pages=[], targets=[])
    request.begin(prefix=48)
    request.send()
    finish(request)
    site.quiet()


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_hidden_states_go_as_pages_do(fresh: Site, kind: str, prefill_tp: int, decode_tp: int) -> None:
    """Metadata that is too much for a payload, as for speculative decoding. All ranks have the same."""
    servers = fresh.pair(kind, prefill_tp, decode_tp, hidden=4096)
    request = Request(*servers, pages=[4, 20], targets=[5, 6])
    request.begin()
    for rank in servers[0].ranks:
        rank.aux.output_hidden_states[request.row] = 2.5
    request.send()
    finish(request)
    for rank in servers[1].ranks:
        assert (rank.aux.output_hidden_states[request.target_row] == 2.5).all()
    fresh.quiet()


def test_decode_may_come_first(site: Site, pair: tuple[Server, Server]) -> None:
    request = Request(*pair, room=16, pages=[4, 20], targets=[5, 6])
    request.make_receivers()
    request.send_metadata()
    request.until_receivers(KVPoll.Transferring, KVPoll.WaitingForInput)
    request.make_senders()
    request.until_senders(KVPoll.WaitingForInput)
    request.senders[0].pop_decode_prefix_len()
    request.senders[0].init(2, request.row)
    request.send()
    finish(request)
    site.quiet()


def test_other_numbers_of_pages_fail_on_both_sides(site: Site, pair: tuple[Server, Server]) -> None:
    request = Request(*pair, room=17, pages=[4, 20, 21], targets=[5, 6])
    request.begin()
    request.send()
    request.until_receivers(KVPoll.Failed)
    assert_fails(request.receivers[0], "PromptMismatch")
    request.until_senders(KVPoll.Failed)
    assert_fails(request.senders[0], "decode server has aborted")
    request.clear()
    site.quiet()


def assert_fails(one: object, *words: str) -> None:
    with pytest.raises(KVTransferError) as caught:
        one.failure_exception()  # type: ignore[attr-defined]
    for word in words:
        assert word in str(caught.value)


# When something ends a request: before prefill may send, with an offer that is empty, between chunks, with the last.
MOMENTS = ["known", "offered", "computing", "complete"]


def reach(request: Request, moment: str) -> None:
    if moment == "known":
        request.make_receivers()
        request.make_senders()
        request.send_metadata()
        request.until_senders(KVPoll.WaitingForInput)
        return
    request.begin()
    if moment == "computing":
        request.send(0, 1)
    elif moment == "complete":
        request.send()


@pytest.mark.parametrize("moment", MOMENTS)
def test_decode_aborts(site: Site, pair: tuple[Server, Server], moment: str) -> None:
    request = Request(*pair, pages=[4, 20], targets=[5, 6])
    reach(request, moment)
    request.receivers[0].abort()
    request.until_receivers(KVPoll.Failed, KVPoll.Success)
    assert all(load.safe for load in request.receivers[0]._loads), "whatever comes now into the pages is SGLang's"
    request.until_senders(KVPoll.Failed, KVPoll.Success)
    for one in (*request.receivers, *request.senders):
        if one.conclude_state == KVPoll.Failed:
            assert_fails(one, "borted")
    request.clear()
    site.quiet()


@pytest.mark.parametrize("moment", MOMENTS)
def test_prefill_aborts(site: Site, pair: tuple[Server, Server], moment: str) -> None:
    request = Request(*pair, pages=[4, 20], targets=[5, 6])
    reach(request, moment)
    request.senders[0].abort()
    request.until_senders(KVPoll.Failed, KVPoll.Success)
    assert all(lease.done for lease in request.senders[0]._leases), "its pages may be reused"
    request.until_receivers(KVPoll.Failed, KVPoll.Success)
    if moment != "complete":
        assert_fails(request.receivers[0], "PrefillFailed")
        assert_fails(request.senders[0], "Aborted")
    elif request.receivers[0].conclude_state == KVPoll.Success:
        request.check_bytes()
    for one in (*request.receivers, *request.senders):
        if one.conclude_state == KVPoll.Failed:
            one.kv_mgr.failure_records.pop(request.room, None)
    request.clear()
    site.quiet()


@pytest.mark.parametrize(("sent", "is_read"), [(0, False), (20, False), (20, True), (31, False), (31, True)])
def test_no_load_succeeds_after_an_abort_in_mid_prefill(
    site: Site, wide: tuple[Server, Server], sent: int, is_read: bool
) -> None:
    """SGLang's scheduler frees the pages right after `abort`, whatever reads them.

    So the pages hold another prompt's bytes at once, also where decode had read everything that was sent. And once
    decode knows of the failure, its own pages may be another prompt's as well.
    """
    prefill, decode = wide
    prefill.fill(seed=7)
    request = Request(prefill, decode, pages=[*range(PAGES)], targets=[*range(PAGES)])
    request.begin()
    prefill.ranks[0].aux.output_ids[request.row], decode.ranks[0].aux.output_ids[request.target_row] = 7, 0
    if sent:
        request.send(0, sent)
    (load,) = request.receivers[0]._loads
    if is_read:
        next(progress for progress in load if progress.tokens >= sent * PAGE)
    request.senders[0].abort()
    overwrite(prefill, -1.0)
    request.until_receivers(KVPoll.Failed, KVPoll.Success)
    overwrite(decode, 5.0)
    assert request.receivers[0].conclude_state == KVPoll.Failed
    assert_fails(request.receivers[0], "PrefillFailed")
    assert (decode.ranks[0].aux.output_ids[request.target_row] == 0).all(), "there is no first token"
    request.until_senders(KVPoll.Failed)
    assert_fails(request.senders[0], "Aborted")
    request.clear()
    site.quiet()
    assert all((tensor == 5.0).all() for tensor in pool_tensors(decode.ranks[0].pool, decode.kind))


def overwrite(server: Server, value: float) -> None:
    for tensor in pool_tensors(server.ranks[0].pool, server.kind):
        tensor.fill_(value)


@pytest.mark.parametrize("moment", MOMENTS)
def test_clear_at_any_moment_leaves_nothing(site: Site, pair: tuple[Server, Server], moment: str) -> None:
    request = Request(*pair, pages=[4, 20], targets=[5, 6])
    reach(request, moment)
    request.receivers[0].clear()
    request.senders[0].clear()
    pair[0].ranks[0].manager.failure_records.pop(request.room, None)
    site.quiet()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_refused_prompt_fails_at_once(site: Site, pair: tuple[Server, Server], first: str) -> None:
    """A prefill server that refuses a prompt makes no sender: its door tells the manager (`_refused_at_the_door`)."""
    request = Request(*pair, pages=[4, 20], targets=[5, 6])
    manager = pair[0].ranks[0].manager
    request.make_receivers()
    if first == "prefill":
        manager.refuse(request.room, "the prompt is too long")
        request.send_metadata()
    else:
        request.send_metadata()
        wait_until(lambda: request.room in manager.transfer_infos)
        manager.refuse(request.room, "the prompt is too long")
    request.until_receivers(KVPoll.Failed)
    assert_fails(request.receivers[0], "PrefillFailed", "the prompt is too long")
    request.clear()
    site.quiet()


def test_a_room_is_used_again_after_success_and_after_failure(site: Site, pair: tuple[Server, Server]) -> None:
    for turn in range(6):
        request = Request(*pair, room=22, pages=[4 + turn, 20], targets=[5, 6])
        request.begin()
        if turn % 2:
            request.senders[0].abort()
            request.until_receivers(KVPoll.Failed)
            assert_fails(request.receivers[0], "PrefillFailed")
            request.until_senders(KVPoll.Failed)
            assert_fails(request.senders[0], "Aborted")
            request.clear()
        else:
            request.send()
            finish(request)
        site.quiet()


def test_a_prefill_server_restarts_and_decode_goes_on(site: Site) -> None:
    prefill, decode = site.pair()
    request = Request(prefill, decode, room=23, pages=[4, 20], targets=[5, 6])
    request.begin()
    request.send()
    finish(request)
    prefill.close()
    site.servers.remove(prefill)
    again = site.prefill(port=prefill.port)
    first = Request(again, decode, room=24, pages=[8, 9], targets=[5, 6])
    first.make_receivers()
    first.send_metadata()
    first.until_receivers(KVPoll.Failed)  # it was told of the ranks before
    assert_fails(first.receivers[0])
    first.clear()
    second = Request(again, decode, room=25, pages=[8, 9], targets=[5, 6])
    second.begin()
    second.send()
    finish(second)


def test_poll_asks_nobody(pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads flags: no call of the runtime's thread, in no state."""
    request = Request(*pair, room=26, pages=[4, 20], targets=[5, 6])
    request.begin()

    def refuse(*_: object) -> None:
        raise AssertionError("a poll has waited for the runtime's thread")

    def poll_all() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(blocking.loop_thread.LoopThread, "call", refuse)
            patched.setattr(blocking.loop_thread.LoopThread, "submit", refuse)
            for one in (*request.senders, *request.receivers):
                one.poll()

    poll_all()
    request.send(0, 1)
    poll_all()
    request.send(1)
    wait_until(lambda: (poll_all(), request.senders[0].poll())[1] == KVPoll.Success)
    request.until_receivers(KVPoll.Success)
    poll_all()
    request.clear()


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("option", REFUSED_OPTIONS, ids=lambda option: option.option)
def test_an_option_that_is_refused_is_named_at_the_start(
    pair: tuple[Server, Server], option: RefusedOption, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = pair[side].ranks[0]
    manager, name = rank.manager, option.field.rpartition(".")[2]
    holder = rank.configuration.features if "features" in option.field else rank.configuration
    monkeypatch.setattr(holder, name, "on")
    with use(rank), pytest.raises(ConfigError, match=f"{option.option} is on, supported is {option.off}: "):
        KVFlowManager(manager.kv_args, manager.disaggregation_mode, manager.server_args, False)


def test_a_layout_that_heads_cannot_be_cut_from_is_refused_at_the_start(pair: tuple[Server, Server]) -> None:
    rank = pair[0].ranks[0]
    manager, layout = rank.manager, envs.SGLANG_AITER_KV_CACHE_LAYOUT
    told = f"{layout.name} is vectorized_5d, supported is nhd"
    with use(rank), layout.override("vectorized_5d"), pytest.raises(ConfigError, match=told):
        KVFlowManager(manager.kv_args, manager.disaggregation_mode, manager.server_args, False)


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
def test_the_staging_buffer_is_refused_at_the_start(pair: tuple[Server, Server], side: int) -> None:
    """SGLang refuses it for the backend kvflow, but not for nixl, a name that kvflow may have."""
    rank = pair[side].ranks[0]
    manager, staging = rank.manager, envs.SGLANG_DISAGG_STAGING_BUFFER
    with use(rank), staging.override(True), pytest.raises(ConfigError, match=f"{staging.name} is on, supported is off"):
        KVFlowManager(manager.kv_args, manager.disaggregation_mode, manager.server_args, False)


@pytest.mark.parametrize(
    ("switch", "name", "rank_index", "lines"),
    [("1", "nixl", 0, 1), ("1", "nixl", 1, 0), ("1", "kvflow", 0, 0), ("0", "nixl", 0, 0)],
)
def test_one_line_of_a_server_says_that_nixl_is_kvflow(
    pair: tuple[Server, Server],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    switch: str,
    name: str,
    rank_index: int,
    lines: int,
) -> None:
    rank = pair[0].ranks[0]
    manager = rank.manager
    monkeypatch.setenv("KVFLOW_AS_NIXL", switch)
    monkeypatch.setattr(rank.configuration, "disaggregation_transfer_backend", name, raising=False)
    monkeypatch.setattr(manager.kv_args, "engine_rank", rank_index)
    monkeypatch.setattr(manager_module, "aux_buffers", lambda _: 1 / 0)  # what comes next
    with use(rank), pytest.raises(ZeroDivisionError):
        KVFlowManager(manager.kv_args, manager.disaggregation_mode, manager.server_args, False)
    found = [one for one in caplog.records if "KVFLOW_AS_NIXL=1: the transfer backend nixl" in one.getMessage()]
    assert [one.levelname for one in found] == ["WARNING"] * lines


@pytest.mark.parametrize("kind", ["manager", "sender", "receiver", "bootstrap_server", "kvargs"])
def test_with_the_switch_nixl_is_kvflow(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def class_of(switch: str, backend: TransferBackend) -> str:
        monkeypatch.setenv("KVFLOW_AS_NIXL", switch)
        return str(_class_of(lambda *_: "SGLang's", backend, KVClassType(kind)))

    ours = "SGLang's" if kind == "kvargs" else "kvflow.sglang."
    assert ours in class_of("1", TransferBackend.NIXL)
    assert class_of("0", TransferBackend.NIXL) == class_of("1", TransferBackend.MOONCAKE) == "SGLang's"


def test_many_at_once(site: Site, pair: tuple[Server, Server]) -> None:
    requests = [
        Request(*pair, room=100 + at, pages=[at * 4, at * 4 + 1], targets=[at * 4, at * 4 + 1], row=at, target_row=at)
        for at in range(8)
    ]
    for request in requests:
        request.begin()
    for request in requests:
        request.send(0, 1)
    for request in reversed(requests):
        request.send(1)
    for request in requests:
        finish(request)
    site.quiet()
