"""Several groups of layers in one fleet with stock engines: reading from stock engines, and being read by them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from stock_engines import HASH, HEAD, LAYERS, MODEL_HEADS, TOKENS, StockConsumer, fill, stock_producer, value_of
from tests_support import any_ticket

from kvflow import CacheGroup, CacheLayout, Config, LoadRequest, Runtime, ServeRequest, Ticket
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.errors import ConfigError, KVFlowError, LeaseExpired, PeerIncompatible, RequestError
from kvflow.runtime.producer.lease import LeaseOutcome
from kvflow.stock import Arrival, StockPeers, arrival, ask_rank
from kvflow.stock.params import freed_block, is_stock_params, make_stock_params, needed_blocks, read_stock_params
from kvflow.testing import assert_quiet

CONFIG = Config(engine_id="ours", listen="tcp://127.0.0.1:0", model="/m", drain_timeout_s=1.0)
PEERS = StockPeers(hashes=(HASH,), serve_version="0.32.0", attn_backend_name="CPU_ATTN")
WINDOW = 6
FULL = GroupFacts(name="full", block_size=TOKENS)
SLIDING = GroupFacts(name="window", block_size=TOKENS, kind=GroupKind.SLIDING, window=WINDOW)
FIRST_NAMES = [f"model.layers.{2 * region}.self_attn.attn" for region in range(LAYERS)]
HYBRID: dict[str, Any] = {"region_group_ids": [-1] * LAYERS, "region_names": FIRST_NAMES}
"""Of a stock rank: each region holds a layer with a window, and behind it one without."""


def cache_of(tensors: list[torch.Tensor]) -> list[CacheGroup]:
    """Two groups over the same memory, as vLLM lays them."""
    groups = []
    for name, offset, window in (("window", 0, WINDOW), ("full", 1, None)):
        layers = {f"model.layers.{2 * at + offset}.self_attn.attn": one for at, one in enumerate(tensors)}
        layout = CacheLayout.infer(layers, order="HND", block_size=TOKENS)
        groups.append(CacheGroup(name, layers, layout, window=window, pool="vllm"))
    return groups[::-1]


class Engine:
    """One rank of ours with two groups of layers."""

    def __init__(self, runtime: Runtime, tensors: list[torch.Tensor]) -> None:
        self.runtime = runtime
        self.tensors = tensors

    async def load(self, params: Any, cached_tokens: int = 0, **tables: list[int]) -> Any:
        request = LoadRequest("req", ticket=params, block_ids=tables, cached_tokens=cached_tokens)
        return await self.runtime.load_blocks(request)

    def assert_holds(self, local: list[int], remote: list[int], tokens: int = TOKENS, first_head: int = 0) -> None:
        for region, tensor in enumerate(self.tensors):
            for mine, theirs in zip(local, remote, strict=True):
                for head in range(tensor.shape[1]):
                    expected = value_of(region, theirs, first_head + head) + torch.arange(tokens) / 100.0
                    assert torch.allclose(tensor[mine, head, :tokens, 0], expected), (region, mine, head)


@asynccontextmanager
async def engine(
    peers: StockPeers = PEERS, *, filled: bool = False, tp_rank: int = 0, tp_size: int = 1
) -> AsyncIterator[Engine]:
    config = replace(CONFIG, tp_rank=tp_rank, tp_size=tp_size, num_kv_heads=MODEL_HEADS)
    async with Runtime(config, parts=[peers]) as runtime:
        tensors = [torch.zeros(16, MODEL_HEADS // tp_size, TOKENS, HEAD) for _ in range(LAYERS)]
        if filled:
            fill({str(at): one for at, one in enumerate(tensors)})
        await runtime.register_kv_caches(cache_of(tensors))
        yield Engine(runtime, tensors)
        assert_quiet(runtime.statistics())


@pytest.mark.parametrize(("tp_size", "ours_size"), [(1, 1), (2, 1), (1, 2)])
async def test_each_group_is_read_by_its_own_table(tp_size: int, ours_size: int) -> None:
    """Of 15 tokens in 4 blocks the window has the last 6: vLLM lists one block more than they may lie in."""
    peers = replace(PEERS, serve_version="")
    async with stock_producer(tp_size=tp_size) as producer:
        producer.change = HYBRID
        params = producer.offer("two", [[3, 9, 4, 1], [7, 2, 5]], 15)
        for rank in range(ours_size):
            async with engine(peers, tp_rank=rank, tp_size=ours_size) as ours:
                report = await ours.load(params, full=[10, 11, 12, 13], window=[6, 8])
                assert (report.freshness, report.tokens) == ("deadline", 15)
                first = rank * MODEL_HEADS // ours_size
                ours.assert_holds([10, 11, 12, 6], [3, 9, 4, 2], first_head=first)
                ours.assert_holds([13, 8], [1, 5], tokens=3, first_head=first)
        await producer.until(lambda: producer.freed == [["two"]] * tp_size)
        assert not producer.unknown


async def test_of_a_cached_prefix_the_rest_is_read() -> None:
    async with stock_producer() as producer, engine() as ours:
        producer.change = HYBRID
        await ours.load(producer.offer("hit", [[3, 9, 4, 1], [7, 2, 5]], 16), 12, full=[13], window=[8])
        ours.assert_holds([13, 8], [1, 5])


async def test_a_deadline_holds_for_all_groups() -> None:
    now = arrival()
    async with stock_producer() as producer, engine() as ours:
        producer.change = HYBRID
        for late_s, fresh in ((5.0, True), (25.0, False)):
            params = producer.offer(f"late {late_s}", [[3, 9], [7, 2]], 2 * TOKENS)
            came = Arrival(now.machine, now.now_s - late_s)
            ticket = read_stock_params(params, arrived=came, lease_s=30.0, block_ids_max=100)
            if fresh:
                assert (await ours.load(ticket, full=[10, 11], window=[6, 8])).freshness == "deadline"
            else:
                with pytest.raises(LeaseExpired, match="later than the producer surely holds"):
                    await ours.load(ticket, full=[12, 13], window=[1, 2])


WRONG: dict[str, dict[str, Any]] = {
    "one group": {"region_group_ids": [0] * LAYERS},
    "groups apart": {"region_group_ids": [0, 1, 0]},
    "groups not said": {"region_group_ids": None},
    "other layers first": {"region_names": [f"model.layers.{2 * at + 1}.self_attn.attn" for at in range(LAYERS)]},
    "blocks that differ": {"block_lens": [512, 512, 256]},
    "state": {"ssm_sizes": [64, 64]},
    "packed layers": {"packed_member_layouts": {"a": [0, 64]}},
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_rank_that_is_laid_out_otherwise_is_refused_and_named(name: str) -> None:
    async with stock_producer() as producer, engine() as ours:
        producer.change = {**HYBRID, **WRONG[name]}
        with pytest.raises(PeerIncompatible, match="stock-p"):
            await ours.load(producer.offer("odd", [[3], [7]], TOKENS), full=[0], window=[1])
        assert not any(map(torch.count_nonzero, ours.tensors))


async def test_tables_that_cannot_be_are_refused() -> None:
    async with stock_producer() as producer, engine() as ours:
        producer.change = HYBRID
        tables: list[list[list[int]]] = [
            [[3, 9, 4, 1]],
            [[3, 9, 4, 1], [7, 2], [5]],
            [[3, 9, 4], [7, 2, 5]],
            [[3, 9, 4, 1], [5]],
            [[3, 9, 4, 1], [7, 0, 5]],
            [[3, 9, 4, 1], [1, 2, 3, 4, 5]],
            [[3, 9, 4, 1], [7, 2, 99]],
        ]
        for at, wrong in enumerate(tables):
            with pytest.raises(KVFlowError, match=r"block|group"):
                await ours.load(producer.offer(f"wrong {at}", wrong, 15), full=[10, 11, 12, 13], window=[6, 8])
        await ours.load(producer.offer("null in front", [[3, 9, 4, 1], [0, 2, 5]], 15), 12, full=[10], window=[6, 8])
        assert producer.unexpected is None


def stock_ticket(tables: list[list[int]], num_tokens: int, left: int) -> Any:
    ticket = make_stock_params(two_groups(9), "0.32.0")
    params = {key: value for key, value in ticket.items() if key != "kvflow"}
    params |= {"remote_block_ids": tables, "remote_num_tokens": num_tokens}
    return read_stock_params(params, arrived=None, lease_s=30.0, block_ids_max=100, left=left)


def test_every_length_needs_what_its_tokens_see() -> None:
    """As vLLM lists it: a window's table has ceil(window / block) + 1 blocks, those given back are null."""
    for num_tokens in range(1, 60):
        for left in (0, 1):
            count = -(-num_tokens // TOKENS)
            whole = list(range(100, 100 + count))
            freed = max(num_tokens - 1 - WINDOW, 0) // TOKENS
            held = [0 if at < freed else 200 + at for at in range(count)][-(-(-(WINDOW + 1) // TOKENS) + 1) :]
            full, window = needed_blocks(stock_ticket([whole, held], num_tokens, left), (FULL, SLIDING))
            tokens = num_tokens - left
            assert len(full) == -(-tokens // TOKENS)
            first = max(tokens - WINDOW, 0) // TOKENS
            assert list(full) == list(range(100, 100 - (-tokens // TOKENS)))
            assert list(window) == list(range(200 + first, 200 - (-tokens // TOKENS)))


def test_a_window_that_has_moved_on_is_seen_before_anybody_is_asked() -> None:
    ticket = stock_ticket([[3, 9, 4, 1], [2, 5]], 4 * TOKENS, 0)
    first = max(4 * TOKENS - WINDOW, 0) // TOKENS
    assert 0 < first < 3
    held = [0] * first + [7] * (4 - first)
    assert freed_block(ticket, SLIDING, held) is None
    assert freed_block(ticket, SLIDING, [*held[:first], 0, *held[first + 1 :]]) == first
    assert freed_block(ticket, FULL, [0] * 4) is None
    assert freed_block(ticket, SLIDING, [0] * 9) is None  # blocks of another size: nobody knows yet


def two_groups(num_tokens: int) -> Ticket:
    ticket, blocks = any_ticket(block_size=TOKENS), -(-num_tokens // TOKENS)
    ticket = msgspec.structs.replace(ticket, groups=(FULL, SLIDING), more_block_ids=((),))
    window = range(20, 20 + SLIDING.blocks_needed(num_tokens))
    tables = [range(1, 1 + blocks), window]
    return ticket.without_leases(request_id="secret", block_ids=tables, num_tokens=num_tokens, ttl_s=9.0)


@pytest.mark.parametrize("left", [0, 1])
def test_stock_readers_find_room_for_the_whole_prompt(left: int) -> None:
    """A stock reader expects a table as long as its own, and reads from the end."""
    for num_tokens in range(1, 30):
        ticket = two_groups(num_tokens)
        params = make_stock_params(ticket, "0.32.0", left=left)
        prompt = num_tokens + left
        assert params["remote_num_tokens"] == prompt
        full, window = params["remote_block_ids"]
        count, first = -(-prompt // TOKENS), max(prompt - WINDOW, 0) // TOKENS
        assert len(full) == count
        assert len(window) >= count - first
        assert full[: len(ticket.block_ids)] == list(ticket.block_ids)
        assert {*full} == {*ticket.block_ids}, "blocks of this prompt, and no other's"
        assert {*window} == {*ticket.more_block_ids[0]}
        assert Ticket.from_params(params) == ticket, "a reader of ours has what is offered"
        known = {key: value for key, value in params.items() if key != "kvflow"}
        assert Ticket.from_params(known) == ticket
        foreign = {**known, "remote_request_id": ticket.request_id}
        assert is_stock_params(foreign)
        assert (
            read_stock_params(foreign, arrived=None, lease_s=30.0, block_ids_max=100, left=left).num_tokens
            == num_tokens
        )


def test_what_stock_readers_cannot_read_is_not_made() -> None:
    ticket = two_groups(15)
    full, window = ticket.block_tables
    for wrong in (
        {"block_ids": full[1:]},
        {"more_block_ids": (window[1:],)},
        {"more_block_ids": ((*window, 1),)},
        {"groups": (FULL, msgspec.structs.replace(SLIDING, block_size=8))},
        {"groups": (FULL, GroupFacts(name="s", block_size=1, kind=GroupKind.STATE))},
        {"pp_size": 2},
    ):
        with pytest.raises(RequestError):
            make_stock_params(msgspec.structs.replace(ticket, **wrong), "0.32.0")


async def test_stock_readers_are_shown_what_their_own_rank_has() -> None:
    names = tuple(f"model.layers.{at}.self_attn.attn" for at in range(2 * LAYERS))
    async with engine(replace(PEERS, region_names=names)) as ours:
        found = (await ask_rank(ours.runtime.address, timeout_s=60)).metadata
        assert found.region_group_ids == [-1] * LAYERS
        assert found.region_names == FIRST_NAMES
        assert found.kv_caches_base_addr == [one.data_ptr() for one in ours.tensors]
        assert found.region_num_blocks == [16] * LAYERS


async def test_a_stock_engine_reads_a_group() -> None:
    """It may take regions of any groups: here those of both, in one table."""
    async with engine(filled=True) as ours:
        request = ServeRequest("both", {"full": [3, 9], "window": [7, 2]}, 2 * TOKENS)
        lease = ours.runtime.serve_blocks(request)
        params = make_stock_params(lease.ticket, "0.32.0")
        assert params["remote_block_ids"] == [[3, 9], [7, 2]]
        consumer = StockConsumer()
        try:
            await consumer.handshake(params)
            await consumer.read({**params, "remote_block_ids": [params["remote_block_ids"][1]]}, [4, 5])
        finally:
            consumer.close()
        assert await lease is LeaseOutcome.READ
        for region, tensor in enumerate(consumer.cache.values()):
            assert tensor[4, 2, 1, 0].item() == pytest.approx(value_of(region, 7, 2) + 0.01)


async def test_groups_of_other_sizes_are_refused_at_the_start() -> None:
    async with Runtime(CONFIG, parts=[PEERS]) as runtime:
        groups = []
        for at, size in enumerate((TOKENS, 2 * TOKENS)):
            layers = {f"layers.{at}": torch.zeros(16, MODEL_HEADS, size, HEAD)}
            groups.append(CacheGroup(f"g{at}", layers, CacheLayout.infer(layers, order="HND", block_size=size)))
        with pytest.raises(ConfigError, match="stock peers: our cache: groups have block sizes"):
            await runtime.register_kv_caches(groups)
