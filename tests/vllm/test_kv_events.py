"""A subscriber of vLLM's KV events: vLLM's encoder and publisher as classes, and a server with a changing cache."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from vllm.distributed import kv_events
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.request import Request

from kvflow.core.protocol.prompts import marked_by_keys
from kvflow.prefix import prefix_keys
from kvflow.prefix.kv_events import EventSource, PrefixMap, Publisher, Subscriber
from kvflow.prefix.kv_events.batches import AllBlocksCleared, BlockStored, decode_batch, encode_batch
from kvflow.vllm.engine_requests import tokens_of
from tests.support.ports import free_port
from tests.support.recorded_events import VLLM, vllm_batch
from tests.vllm.conftest import Site
from tests.vllm.servers import MODELS, Setup

SMALL = 16
BLOCK, BLOCKS = 32, 80
"""Of the server; vLLM on a CPU has kernels for multiples of 32."""
WAIT_S = 120.0
ANYWHERE = "tcp://127.0.0.1:0"


async def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, condition
        await asyncio.sleep(0.01)


def tokens_known(known: PrefixMap, prompt: Sequence[int], block: int = BLOCK) -> int:
    return dict(known.holders(prefix_keys(prompt, block), block)).get("engine", 0)


def test_its_encoder_makes_what_is_recorded() -> None:
    """As maps: that of a stored block has one more possible field since vLLM 0.33, and a longer header."""
    made = msgspec.msgpack.encode(vllm_batch(kv_events))
    assert msgspec.msgpack.decode(made) == msgspec.msgpack.decode(VLLM)
    assert list(decode_batch(made)) == list(decode_batch(VLLM))


def test_its_decoder_reads_what_is_published_here() -> None:
    events = [event for event in decode_batch(VLLM) if not isinstance(event, AllBlocksCleared)]
    found = msgspec.msgpack.decode(encode_batch(events, ts=1.5, data_parallel_rank=0), type=kv_events.KVEventBatch)
    expected = msgspec.msgpack.decode(VLLM, type=kv_events.KVEventBatch)
    expected.events[1].session_id = None  # is not carried on
    del expected.events[4:]
    assert found == expected


def test_a_replay_of_its_publisher_brings_all_that_it_keeps() -> None:
    """All of 10,000 batches, although its socket drops some; and then the live batches."""
    port = free_port()
    endpoint, replay = (f"tcp://127.0.0.1:{number}" for number in (port, port + 1))
    publisher = kv_events.ZmqEventPublisher(
        0, endpoint=endpoint.replace("127.0.0.1", "*"), replay_endpoint=replay, buffer_steps=10_000, topic="kv"
    )

    def publish(number: int) -> None:
        parent = number - 1 if number else None
        event = kv_events.BlockStored(
            block_hashes=[number],
            parent_block_hash=parent,
            token_ids=[number],
            block_size=1,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        publisher.publish(kv_events.KVEventBatch(ts=1.5, events=[event]))

    async def follow() -> None:
        known = PrefixMap()
        for number in range(10_000):
            publish(number)
        await until(lambda: publisher._event_queue.empty())
        source = EventSource(holder="engine", endpoint=endpoint, replay_endpoint=replay, topic="kv")
        async with Subscriber(known, [source]) as subscriber:
            await until(lambda: tokens_known(known, range(10_000), 1) == 10_000)
            for number in range(10_000, 10_050):
                publish(number)
            await until(lambda: tokens_known(known, range(10_050), 1) >= 10_049)
            print(subscriber.statistics())
            assert subscriber.statistics()["engine"].forgotten == 0

    try:
        asyncio.run(follow())
    finally:
        publisher.shutdown()


def test_its_replays_are_answered_here() -> None:
    """Its frames, as its example of a subscriber reads them."""
    import zmq.asyncio

    async def ask() -> list[list[bytes]]:
        async with Publisher(ANYWHERE, replay_endpoint=ANYWHERE) as publisher:
            publisher.publish([BlockStored(block_hashes=[1], token_ids=[1], block_size=1)])
            with zmq.asyncio.Context.instance().socket(zmq.DEALER) as socket:
                socket.connect(publisher.replay_endpoint)
                await socket.send_multipart([b"", bytes(8)])
                return [await socket.recv_multipart() for _ in range(2)]

    (_, _, number, payload), (_, _, end, _) = asyncio.run(ask())
    (event,) = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch).events
    assert (int.from_bytes(number, "big"), event.block_hashes) == (0, [1])
    assert end == kv_events.ZmqEventPublisher.END_SEQ


PICTURES = [("one", 0, 3), ("two", 5, 30), ("three", 47, 1)]


@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("pictures", [[], PICTURES, PICTURES[1:]])
def test_an_events_keys_are_those_of_the_request(salt: str | None, pictures: list[tuple[str, int, int]]) -> None:
    """From vLLM's own extra keys of each block, as its block pool puts them into events."""
    tokens = list(range(64))
    features = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=length))
        for name, offset, length in pictures
    ]
    request = Request("r", tokens, SamplingParams(), None, mm_features=features, cache_salt=salt)
    extra, at = [], 0
    for begin in range(0, 64, SMALL):
        found, at = generate_block_hash_extra_keys(request, begin, begin + SMALL, at)
        extra.append(found)
    event = kv_events.BlockStored(
        block_hashes=list(range(4)),
        parent_block_hash=None,
        token_ids=tokens,
        block_size=SMALL,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=to_event_extra_keys(extra),
        group_idx=0,
    )
    known = PrefixMap()
    for told in decode_batch(msgspec.msgpack.encode(kv_events.KVEventBatch(ts=1.5, events=[event]))):
        known.apply("engine", told)
    prompt = tokens_of(request, request.num_prompt_tokens, picture_ids_from_content=True)
    assert prompt is not None
    assert tokens_known(known, prompt, SMALL) == 64
    assert (tokens_known(known, tokens, SMALL) == 64) == (salt is None and not pictures)


def test_a_server_tells_what_its_prefix_cache_holds(site: Site) -> None:
    """Stored, salted, grown by another prompt, evicted, cleared; a late subscriber gets the same by a replay."""
    port = free_port()
    endpoint, replay = (f"tcp://127.0.0.1:{number}" for number in (port, port + 1))
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint.replace("127.0.0.1", "*"),
        "replay_endpoint": replay,
    }
    options = ("--kv-events-config", json.dumps(config), "--block-size", str(BLOCK), "--skip-tokenizer-init")
    (server,) = site.have(Setup(role="kv_producer", core=0, blocks=BLOCKS, model=MODELS / "full", options=options))
    source = EventSource(holder="engine", endpoint=endpoint, replay_endpoint=replay)
    first, second = list(range(100, 170)), [*range(100, 140), *range(300, 360)]

    async def ask(prompt: list[int], **more: Any) -> None:
        await asyncio.to_thread(server.ids, prompt, 1, **more)

    async def follow() -> None:
        known, late = PrefixMap(), PrefixMap()
        async with Subscriber(known, [source]) as subscriber:
            await ask(first)
            await until(lambda: tokens_known(known, first) == 64)
            assert tokens_known(known, second) == 32
            await ask(second)
            await until(lambda: tokens_known(known, second) == 96)
            await ask(first, cache_salt="tenant")
            salted = marked_by_keys(first, {0: [("cache_salt", "tenant")]})
            await until(lambda: tokens_known(known, salted) == 64)
            assert tokens_known(known, salted, 2 * BLOCK) == 64
            async with Subscriber(late, [source]):
                await until(lambda: late.blocks == known.blocks)
                for prompt in (first, second, salted):
                    assert tokens_known(late, prompt) == tokens_known(known, prompt) > 0
            for number in range(BLOCKS // 5):  # each takes 9 blocks
                await ask([number, *range(600, 900)])
            await until(lambda: not tokens_known(known, first))
            assert known.blocks < BLOCKS
            await asyncio.to_thread(server.post, "/reset_prefix_cache")
            await ask(first)  # the engine tells it with its next step
            await until(lambda: known.blocks == tokens_known(known, first) // BLOCK == 2)
            print(subscriber.statistics())
            assert subscriber.statistics()["engine"].forgotten == 0

    asyncio.run(follow())
