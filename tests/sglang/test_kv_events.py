"""SGLang's own KV events, followed: its encoder, its recorder on a radix cache, and its publisher as a class."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

import msgspec
import torch
from sglang.srt.disaggregation import kv_events
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvflow.prefix import prefix_keys
from kvflow.prefix.kv_events import EventSource, PrefixMap, Subscriber
from kvflow.prefix.kv_events.batches import decode_batch, encode_batch
from tests.support.ports import free_port
from tests.support.recorded_events import SGLANG, sglang_batch

PAGE = 4
WAIT_S = 120.0


async def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, condition
        await asyncio.sleep(0.01)


def tokens_known(known: PrefixMap, prompt: Sequence[int], page: int = PAGE) -> int:
    return dict(known.holders(prefix_keys(prompt, page), page)).get("engine", 0)


def test_its_encoder_makes_what_is_recorded() -> None:
    assert msgspec.msgpack.encode(sglang_batch(kv_events)) == SGLANG


def test_its_decoder_reads_what_is_published_here() -> None:
    events = list(decode_batch(SGLANG))
    found = msgspec.msgpack.decode(encode_batch(events, ts=1.5, data_parallel_rank=0), type=kv_events.KVEventBatch)
    expected = sglang_batch(kv_events)
    expected.events[1].session_id = None  # is not carried on
    del expected.events[2]
    assert found == expected


class Cache:
    """A radix cache without pools. Its own publisher sends its events."""

    def __init__(self, salted: bool = False) -> None:
        allocator = SimpleNamespace(device="cpu", free_segment=lambda indices, start_pos: None)
        self.tree = RadixCache.create_simulated(
            mock_allocator=allocator, page_size=PAGE, enable_kv_cache_events=True, dynamo_kv_event_format=salted
        )
        port = free_port()
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{number}" for number in (port, free_port()))
        self.publisher = kv_events.ZmqEventPublisher(
            0, endpoint=self.endpoint, replay_endpoint=self.replay, topic="kv", bind=True
        )

    def insert(self, prompt: Sequence[int], **more: Any) -> None:
        key = RadixKey(array("q", prompt), **more)
        self.tree.insert(InsertParams(key=key, value=torch.arange(len(prompt))))

    def publish(self) -> None:
        self.publisher.publish(kv_events.KVEventBatch(ts=1.5, events=self.tree.take_events()))


def test_a_radix_cache_is_known_as_it_splits_grows_and_evicts() -> None:
    cache = Cache()
    first, second = list(range(100, 132)), [*range(100, 116), *range(200, 216)]

    async def follow() -> None:
        known = PrefixMap()
        source = EventSource(holder="engine", endpoint=cache.endpoint, replay_endpoint=cache.replay, topic="kv")
        cache.insert(first)
        cache.publish()  # before anybody follows
        async with Subscriber(known, [source]) as subscriber:
            await until(lambda: tokens_known(known, first) == 32)
            cache.insert(second)
            cache.publish()
            cache.publish()  # nothing, and shows a gap to one who had not subscribed yet
            await until(lambda: tokens_known(known, second) == 32)
            assert (tokens_known(known, first), known.blocks) == (32, 12)
            cache.tree.evict(EvictParams(num_tokens=16))
            cache.publish()
            await until(lambda: known.blocks == 8)
            assert sorted(tokens_known(known, prompt) for prompt in (first, second)) == [16, 32]
            cache.tree.reset()
            cache.publish()
            await until(lambda: not known.blocks)
            assert subscriber.statistics()["engine"].forgotten == 0

    try:
        asyncio.run(follow())
    finally:
        cache.publisher.shutdown()


def test_prompts_with_a_salt_are_not_known_as_those_without() -> None:
    cache, known = Cache(salted=True), PrefixMap()
    prompt = list(range(100, 132))
    cache.insert(prompt, cache_salt="tenant")
    events = cache.tree.take_events()
    cache.publisher.shutdown()
    for event in decode_batch(msgspec.msgpack.encode(kv_events.KVEventBatch(ts=1.5, events=events))):
        known.apply("engine", event)
    assert [event.cache_salt for event in events if isinstance(event, kv_events.BlockStored)] == ["tenant"]
    assert known.blocks == 0
