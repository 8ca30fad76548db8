"""Loads from stock producers, over real NIXL: the bytes, the notifications to the producer, and refused loads."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from stock_engines import (
    HASH,
    LAYERS,
    MODEL_HEADS,
    TOKENS,
    StockProducer,
    layout_of,
    stock_cache,
    stock_producer,
    value_of,
)

from kvflow import CacheLayout, Config, LoadRequest, Runtime, ServeRequest
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER
from kvflow.errors import KVFlowError, LeaseExpired, PeerError, PeerIncompatible, RequestError, TransferFailed
from kvflow.observe.prometheus import PrometheusMetrics
from kvflow.runtime.records import LoadRecord
from kvflow.stock import StockPeers, Terms, arrival
from kvflow.stock.deadline import Arrival, DeadlineProof
from kvflow.stock.params import read_stock_params
from kvflow.testing import assert_quiet

CONFIG = Config(engine_id="ours", listen="tcp://127.0.0.1:0", model="/m", drain_timeout_s=1.0)
PEERS = StockPeers(hashes=(HASH,))


class Reader:
    """One rank of ours, and its cache."""

    def __init__(self, runtime: Runtime, cache: dict[str, torch.Tensor]) -> None:
        self.runtime = runtime
        self.cache = cache

    async def load(self, params: Any, block_ids: list[int], **more: Any) -> Any:
        return await self.runtime.load_blocks(LoadRequest("req", ticket=params, block_ids=block_ids, **more))

    def assert_holds(self, local: list[int], remote: list[int], first_head: int = 0, tokens: int = TOKENS) -> None:
        """`remote` counts the producer's blocks, of as many tokens as ours."""
        for layer, tensor in enumerate(self.cache.values()):
            for mine, theirs in zip(local, remote, strict=True):
                for head in range(tensor.shape[1]):
                    expected = value_of(layer, theirs, first_head + head) + torch.arange(tokens) / 100.0
                    assert torch.allclose(tensor[mine, head, :tokens, 0], expected), (layer, mine, head)


@asynccontextmanager
async def reader(
    peers: StockPeers = PEERS, *, tp_rank: int = 0, tp_size: int = 1, tokens: int = TOKENS, **values: Any
) -> AsyncIterator[Reader]:
    config = replace(CONFIG, tp_rank=tp_rank, tp_size=tp_size, num_kv_heads=MODEL_HEADS, **values)
    async with Runtime(config, parts=[peers]) as runtime:
        cache = stock_cache(16, max(MODEL_HEADS // tp_size, 1), tokens)
        await runtime.register_kv_caches(cache, layout_of(cache))
        yield Reader(runtime, cache)
        assert_quiet(runtime.statistics())


@pytest.fixture
async def producer() -> AsyncIterator[StockProducer]:
    async with stock_producer() as made:
        yield made


@pytest.fixture(name="ours")
async def the_reader(producer: StockProducer) -> AsyncIterator[Reader]:
    """It ends before its producer."""
    async with reader() as made:
        yield made


async def test_a_draft_model_of_both_is_read_by_the_numbers_in_its_names(producer: StockProducer) -> None:
    """Ours are numbered apart, as kvflow's plugin for vLLM numbers them; a stock engine has them behind its model's."""
    config = replace(CONFIG, num_kv_heads=MODEL_HEADS)
    async with Runtime(config, parts=[PEERS]) as runtime:
        cache = stock_cache(16, MODEL_HEADS, TOKENS)
        indices = [*range(LAYERS - 1), FIRST_DRAFT_LAYER + LAYERS - 1]
        layout = CacheLayout.infer(cache, order="HND", block_size=TOKENS, layer_indices=indices)
        await runtime.register_kv_caches(cache, layout)
        ours = Reader(runtime, cache)
        await ours.load(producer.offer("cmpl-1", [3], TOKENS), [7])
        ours.assert_holds([7], [3])


async def test_params_are_used_once_and_then_their_name_is_remembered(producer: StockProducer, ours: Reader) -> None:
    """For as long as others' parameters of it may come: an engine reads a million prompts a day."""
    for number in range(8):
        params = producer.offer(f"cmpl-{number}-0-aabbccdd", [3], TOKENS)
        await ours.load(params, [7])
        with pytest.raises(LeaseExpired, match="was notified that it was read") as caught:
            await ours.load(params, [1])
        assert caught.value.request_id == "req", "the load's, not the ticket's"
    await producer.until(lambda: len(producer.freed[0]) == 8)
    assert not producer.unknown
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is DeadlineProof]


async def test_a_load_is_as_from_one_of_ours(producer: StockProducer, ours: Reader) -> None:
    params = producer.offer("cmpl-1-0-aabbccdd", [3, 9, 4], 3 * TOKENS - 1)
    report = await ours.load(params, [7, 1, 2])
    assert (report.freshness, report.tokens, report.notified) == ("deadline", 3 * TOKENS - 1, True)
    ours.assert_holds([7, 1], [3, 9])
    ours.assert_holds([2], [4], tokens=TOKENS - 1)
    await producer.until(lambda: producer.freed == [["cmpl-1-0-aabbccdd"]])
    assert producer.asked == [(0, 0)], "one question"
    for again in range(3):
        await ours.load(producer.offer(f"again {again}", [5], TOKENS), [again])
        ours.assert_holds([again], [5])
    assert set(producer.asked) == {(0, 0)}, "again after a while, and nothing else"
    assert not producer.unknown


async def test_records_and_metrics_tell_what_vouches() -> None:
    records: list[LoadRecord] = []
    registry = CollectorRegistry()
    metrics, now = PrometheusMetrics(registry), arrival()
    observer = SimpleNamespace(load_ended=records.append, lease_ended=lambda _: None)
    async with stock_producer() as producer, reader() as ours, reader(engine_id="second") as theirs:
        with ours.runtime._observers.adding(metrics), ours.runtime._observers.adding(observer):
            await ours.load(producer.offer("fresh", [3], TOKENS), [0])
            late = Arrival(now.machine, now.now_s - 1e6)
            ticket = read_stock_params(
                producer.offer("late", [3], TOKENS), arrived=late, lease_s=30.0, block_ids_max=100
            )
            with pytest.raises(LeaseExpired):
                await ours.load(ticket, [0])
            await ours.load(producer.offer("hit", [3], TOKENS), [])
            lease = theirs.runtime.serve_blocks(ServeRequest("sealed", [3], TOKENS))
            await ours.load(lease.ticket.to_params(), [0])
            await lease
    told = [("deadline", "loaded"), ("deadline", "LeaseExpired"), ("", "loaded"), ("seal", "loaded")]
    assert [(one.freshness, one.outcome) for one in records] == told
    for freshness, outcome in (told[0], told[1], told[3]):
        labels = {"engine": "ours", "dp": "0", "pp": "0", "tp": "0", "freshness": freshness, "outcome": outcome}
        assert registry.get_sample_value("kvflow_loads_vouched_total", labels) == 1


async def test_a_load_that_is_to_be_verified_asks_nothing_else(producer: StockProducer, ours: Reader) -> None:
    with pytest.raises(PeerError, match="asked for its metadata, and nothing else"):
        await ours.load(producer.offer("checked", [3], TOKENS), [7], verify=True)
    report = await ours.load(producer.offer("unchecked", [3], TOKENS), [7], verify=False)
    assert not report.verified
    assert producer.asked == [(0, 0)]


async def test_of_a_cached_prefix_the_end_is_read_and_what_is_not_read_is_given_back(
    producer: StockProducer, ours: Reader
) -> None:
    report = await ours.load(producer.offer("end", [3, 9, 4], 3 * TOKENS), [7], cached_tokens=2 * TOKENS)
    assert report.blocks == 1
    ours.assert_holds([7], [4])
    assert (await ours.load(producer.offer("hit", [3], TOKENS), [])).notified
    assert await ours.runtime.release_blocks(producer.offer("aborted", [4], TOKENS))
    await producer.until(lambda: producer.freed == [["end", "hit", "aborted"]])


@pytest.mark.parametrize(
    ("theirs", "ours_size"),
    [
        *((1, 2), (2, 1), (2, 2), (4, 2)),
        *(pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in ((1, 4), (8, 4), (4, 8))),
    ],
)
async def test_engines_are_cut_as_they_like(theirs: int, ours_size: int) -> None:
    told = [["cut"]] * theirs
    async with stock_producer(tp_size=theirs) as producer, AsyncExitStack() as stack:
        params = producer.offer("cut", [3, 5], 2 * TOKENS)
        peers = replace(PEERS, tp_sizes=(8,))
        readers = [
            await stack.enter_async_context(reader(peers, tp_rank=rank, tp_size=ours_size)) for rank in range(ours_size)
        ]
        for rank, one in enumerate(readers):
            assert producer.freed != told
            await one.load(params, [0, 1])
            one.assert_holds([0, 1], [3, 5], rank * MODEL_HEADS // ours_size)
        await producer.until(lambda: producer.freed == told)
        assert not producer.unknown


@pytest.mark.parametrize(("name", "claimed"), [*(("tp_size", claimed) for claimed in (2, 3, 64)), ("pp_size", 2)])
async def test_a_size_that_is_a_lie_asks_for_no_rank_that_is_not_there(name: str, claimed: int) -> None:
    """A stock listener expects questions about its engine's ranks only."""
    async with stock_producer() as producer, reader() as ours:
        with pytest.raises(RequestError if name == "pp_size" else KVFlowError, match=f"{name}|ranks"):
            await ours.load({**producer.offer("lie", [3], TOKENS), name: claimed}, [0])
        assert set(producer.asked) <= {(0, 0)}
        await ours.load(producer.offer("truth", [3], TOKENS), [0])


@pytest.mark.parametrize(("theirs", "ours_tokens"), [(8, 4), (4, 8)])
async def test_blocks_of_other_sizes(theirs: int, ours_tokens: int) -> None:
    async with stock_producer(tokens=theirs) as producer, reader(tokens=ours_tokens) as ours:
        num_tokens = 2 * theirs
        count = num_tokens // ours_tokens
        await ours.load(producer.offer("sizes", [3, 1], num_tokens), list(range(count)))
        found, wanted = [], []
        for token in range(num_tokens):
            block = [3, 1][token // theirs]
            wanted.append(value_of(1, block, 2) + (token % theirs) / 100.0)
            found.append(list(ours.cache.values())[1][token // ours_tokens, 2, token % ours_tokens, 0].item())
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted))


async def test_blocks_of_several_kernel_blocks_are_refused() -> None:
    async with stock_producer(split=2) as producer, reader() as ours:
        with pytest.raises(PeerIncompatible, match="a block of vLLM's is 2 blocks of its kernels"):
            await ours.load(producer.offer("split", [3], TOKENS), [0])


async def test_params_that_came_too_long_ago_are_refused(producer: StockProducer, ours: Reader) -> None:
    """By 25 seconds: what a request has waited elsewhere counts."""
    now = arrival()
    for late_s, fresh in ((5.0, True), (25.0, False), (1e6, False)):
        params = producer.offer(f"late {late_s}", [3], TOKENS)
        came = Arrival(now.machine, now.now_s - late_s)
        ticket = read_stock_params(params, arrived=came, lease_s=30.0, block_ids_max=100)
        if fresh:
            await ours.load(ticket, [0])
        else:
            with pytest.raises(LeaseExpired, match="later than the producer surely holds"):
                await ours.load(ticket, [0])
    elsewhere = read_stock_params(params, arrived=Arrival("other", 0.0), lease_s=30.0, block_ids_max=100)
    elsewhere = replace_id(elsewhere, "elsewhere")
    with pytest.raises(LeaseExpired, match="another machine"):
        await ours.load(elsewhere, [0])
    assert all(not torch.count_nonzero(one[1:]) for one in ours.cache.values())


def replace_id(ticket: Any, request_id: str) -> Any:
    params = {**ticket.params, "remote_request_id": request_id}
    return read_stock_params(params, arrived=ticket.arrived, lease_s=30.0, block_ids_max=100)


async def test_a_restarted_producer_is_another_one(producer: StockProducer, ours: Reader) -> None:
    """Its address and name are the same, but earlier questions do not concern it."""
    await ours.load(producer.offer("before", [3], TOKENS), [0])
    params = producer.offer("lost", [4], TOKENS)
    with ours.runtime.keep_leases(params):
        await producer.until(lambda: any(peer.state == "ready" for peer in ours.runtime.statistics().peers))
        await producer.until(lambda: kept_by(ours) == 1)
        producer.restart()
        stale(ours)
        with pytest.raises((LeaseExpired, TransferFailed)):
            await ours.load(params, [1])
    with pytest.raises(LeaseExpired, match=r"has restarted, or registered .* may be from before"):
        await ours.load(producer.offer("soon", [5], TOKENS), [2])


async def test_what_a_life_before_has_offered_and_came_after_its_end_is_not_read() -> None:
    """Parameters do not say which life made them: only that they were made `router_s` before they came."""
    peers = replace(PEERS, terms=replace(PEERS.terms, router_s=0.2))
    async with stock_producer() as producer, reader(peers) as ours:
        await ours.load(producer.offer("before", [3], TOKENS), [0])
        late = producer.offer("late", [4], TOKENS)
        producer.restart()
        stale(ours)
        with pytest.raises(LeaseExpired, match="may be from before"):
            await ours.load(late, [1])
        assert all(not torch.count_nonzero(one[1]) for one in ours.cache.values())
        for attempt in itertools.count():
            with contextlib.suppress(LeaseExpired):
                await ours.load(producer.offer(f"after {attempt}", [5], TOKENS), [2])
                break
        ours.assert_holds([2], [5])


def kept_by(ours: Reader) -> int:
    """How many leases are kept."""
    return sum(peer.leases_kept for peer in ours.runtime._supervisor.incarnation.peers.by_address.values())  # type: ignore[union-attr]


def stale(ours: Reader) -> None:
    """Age the knowledge about the peers."""
    for peer in ours.runtime._supervisor.incarnation.peers.by_address.values():  # type: ignore[union-attr]
        if peer.connection is not None:
            peer.connection.alive_s = -1e9  # type: ignore[attr-defined]


WRONG_METADATA: dict[str, Any] = {
    "engine_id": "another",
    "block_lens": [4] * LAYERS,
    "kv_cache_layout": "BLHNC",
    "region_names": [f"model.layers.{layer + 1}.self_attn.attn" for layer in range(LAYERS)],
    "kv_caches_base_addr": [4096] * (LAYERS - 1),
    "ssm_sizes": [1, 1],
    "region_group_ids": [0, 0, -1],
    "region_members": [["a", "b"]] * LAYERS,
    "dcp_size": 2,
    "agent_metadata": b"noise",
    "region_mem_types": ["DRAM", "VRAM", "DRAM"],
}


@pytest.mark.parametrize("name", WRONG_METADATA)
async def test_a_rank_that_does_not_fit_is_refused_and_named(producer: StockProducer, ours: Reader, name: str) -> None:
    producer.change = {name: WRONG_METADATA[name]}
    with pytest.raises(PeerError, match="stock-p") as caught:
        await ours.load(producer.offer("odd", [3], TOKENS), [0])
    assert not caught.value.quarantine
    assert producer.held[0]["odd"] == 0
    assert all(not torch.count_nonzero(one) for one in ours.cache.values())


async def test_another_hash_is_refused_with_both(producer: StockProducer, ours: Reader) -> None:
    producer.compatibility_hash = "0" * 64
    with pytest.raises(PeerIncompatible, match=f"ours {HASH[:12]}.*theirs {'0' * 64}"):
        await ours.load(producer.offer("odd", [3], TOKENS), [0])


WRONG_PARAMS: dict[str, list[Any]] = {
    "remote_block_ids": [[3], [], [[-1]], [[True]], [["3"]], [[3, 4]], [[3], [4]], None, [[1 << 40]], [[99]]],
    "remote_request_id": ["", "a,b", "HB:x", 3, None, "x" * 5000, "\ud800"],
    "remote_engine_id": ["", None, "a b"],
    "remote_host": ["", None, "*", "no host", 5],
    "remote_port": [0, 70000, None, "80"],
    "remote_num_tokens": [0, -1, None, 1 << 70, 100],
    "tp_size": [0, None, 1 << 20],
    "dcp_size": [2, None],
    "pp_size": [2, 0, None, 1 << 20],
    "transfer_mode": ["push", None],
    "do_remote_prefill": [False, None],
}


async def test_params_that_cannot_be_are_refused(producer: StockProducer, ours: Reader) -> None:
    good = producer.offer("good", [3], TOKENS)
    for name, values in WRONG_PARAMS.items():
        for value in values:
            with pytest.raises((RequestError, PeerError)):
                await ours.load({**good, name: value}, [0])
    old = {key: value for key, value in good.items() if key != "remote_blocks_expiry_time"}
    with pytest.raises(RequestError, match=r"before 0\.26"):
        await ours.load(old, [0])
    await ours.load(good, [0])


async def test_heartbeats_name_what_is_waited_for() -> None:
    peers = replace(PEERS, terms=Terms(lease_s=0.6, router_s=0.1, settle_s=0.001, allowance_s=0.001))
    async with stock_producer() as producer, reader(peers) as ours:
        params = producer.offer("kept", [3], TOKENS)
        with ours.runtime.keep_leases(params):
            await producer.until(lambda: len(producer.beats) > 2)
        assert set(producer.beats) == {"kept"}
        assert ours.runtime.statistics().loading.renewals > 2
        await ours.load(producer.offer("other", [4], TOKENS), [0])


async def test_a_dead_producer_fails_the_load_and_nothing_else() -> None:
    async with reader(handshake_timeout_s=0.3) as ours:
        producer = StockProducer()
        producer.port = 1
        with pytest.raises(PeerError):
            await ours.load(producer.offer("dead", [3], TOKENS), [0])
