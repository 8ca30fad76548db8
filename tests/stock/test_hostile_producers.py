"""Stock producers that lie about themselves, over real NIXL: an error with their name, and nothing has landed."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from stock_engines import LAYERS, TOKENS, stock_producer

from kvflow.errors import KVFlowError
from kvflow.stock.wire import agent_name_of
from tests.fuzz.mutants import packed_bent, torn
from tests.stock.test_reading import CONFIG, PEERS, Reader, reader

EAGER = replace(CONFIG.limits, peer_backoff_first_s=1e-6, peer_backoff_max_s=1e-6)
"""It asks lying peers again and again."""

MOST = (1 << 31) - 1
FORGED: dict[str, dict[str, Any]] = {
    "a product that explodes": {"num_blocks": MOST, "block_strides": [1 << 46] * LAYERS},
    "counts that explode": {"region_num_blocks": [MOST] * LAYERS, "block_strides": [(1 << 47) - 1] * LAYERS},
    "more than can be counted": {"num_blocks": (1 << 64) - 1},
    "blocks of no tokens": {"block_size": 0},
    "a block of more than there is": {"block_lens": [1 << 46] * LAYERS, "block_strides": [1 << 46] * LAYERS},
    "blocks that overlap": {"block_strides": [1] * LAYERS},
    "negative blocks": {"num_blocks": -1},
    "negative strides": {"block_strides": [-512] * LAYERS},
    "negative addresses": {"kv_caches_base_addr": [-4096] * LAYERS},
    "addresses at the end": {"kv_caches_base_addr": [(1 << 63) - 1] * LAYERS},
    "addresses of nobody": {"kv_caches_base_addr": [4096] * LAYERS},
    "a million regions": {"kv_caches_base_addr": [4096] * 1_000_000},
    "blocks of infinite parts": {"physical_blocks_per_logical_kv_block": MOST},
    "no parts": {"physical_blocks_per_logical_kv_block": 0},
    "numbers that are texts": {"num_blocks": "16"},
    "one layer twice": {"region_names": ["model.layers.1.self_attn.attn"] * LAYERS},
    "layers without end": {"region_names": [f"model.layers.{10**30 + n}.self_attn.attn" for n in range(LAYERS)]},
    "layers of endless numbers": {
        "region_names": [f"model.layers.{10**150 + n}.self_attn.attn" for n in range(LAYERS)],
    },
    "a name that is no text": {"engine_id": b"\xff"},
    "metadata of no agent": {"agent_metadata": b"x" * 100},
    "metadata that breaks off": {"agent_metadata": b"nixlSerDes|Agent\x03"},
    "an agent with a name for a shell": {"agent_metadata": b"nixlSerDes|Agent\x03" + bytes(7) + b"a\nb|"},
}


def untouched(ours: Reader, *but: int) -> bool:
    """Return whether all blocks but `but` are still empty."""
    others = [number for number in range(16) if number not in but]
    return not any(torch.count_nonzero(tensor[others]) for tensor in ours.cache.values())


async def test_metadata_that_cannot_be_is_refused() -> None:
    async with stock_producer() as producer, reader(limits=EAGER) as ours:
        for name, producer.change in FORGED.items():
            with pytest.raises(KVFlowError, match="stock-p") as caught:
                await ours.load(producer.offer(name, [3], TOKENS), [0])
            assert not getattr(caught.value, "quarantine", None), name
            assert len(str(caught.value)) < 1000, name
            assert untouched(ours), name
            assert producer.held[0][name] == 0, "and it is not told that we have read"
            await ours.runtime.forget_peer("stock-p")


async def test_an_agent_that_is_another_peers_is_refused_and_that_peer_keeps_its_own() -> None:
    """A peer with another's agent would be read in the other's name; and a peer may show our own agent."""
    async with stock_producer() as honest, stock_producer(engine_id="stock-x") as liar, reader() as ours:
        await ours.load(honest.offer("first", [3], TOKENS), [0])
        incarnation = ours.runtime._supervisor.incarnation
        assert incarnation is not None
        for stolen in (honest.agents[0].native.getLocalMD(), incarnation._metadata.agent_metadata):
            liar.change = {"agent_metadata": bytes(stolen)}
            with pytest.raises(KVFlowError, match="stock-x"):
                await ours.load(liar.offer(agent_name_of(bytes(stolen)), [3], TOKENS), [1])
        assert untouched(ours, 0)
        await ours.load(honest.offer("second", [5], TOKENS), [0])
        ours.assert_holds([0], [5])
        await honest.until(lambda: honest.freed == [["first", "second"]])


async def test_a_rank_that_shows_another_rank_is_not_read_as_itself() -> None:
    async with stock_producer(tp_size=2) as producer, reader() as ours:
        producer.show = lambda rank: 0
        with pytest.raises(KVFlowError, match="stock-p"):
            await ours.load(producer.offer("one", [3], TOKENS), [0])
        assert untouched(ours)


async def test_answers_gone_wrong_end_in_typed_errors() -> None:
    """Mutants of what an honest one would say, but for the inside of NIXL's own blob, which NIXL alone can read."""
    rng, errors = Random(17), 0
    at_once = replace(PEERS, terms=replace(PEERS.terms, router_s=1e-6))
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(stock_producer())
        ours = await stack.enter_async_context(reader(at_once, limits=EAGER))
        honest = await stack.enter_async_context(stock_producer(engine_id="good"))
        for turn in range(200):
            producer.twist = lambda frames: twisted(rng, frames)
            try:
                await ours.load(producer.offer(f"turn {turn}", [3], TOKENS), [0], deadline_s=2.0)
            except KVFlowError:
                errors += 1
            await ours.runtime.forget_peer("stock-p")
            if turn % 50 == 0:
                await ours.load(honest.offer(f"honest {turn}", [5], TOKENS), [1])
                ours.assert_holds([1], [5])
        assert errors > 100
        assert untouched(ours, 0, 1)
        producer.twist = None
        await ours.load(producer.offer("truth", [3], TOKENS), [0])
        ours.assert_holds([0], [3])


def twisted(rng: Random, frames: list[bytes]) -> list[bytes]:
    payload = msgspec.msgpack.decode(frames[0])
    metadata = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
    match rng.randrange(5):
        case 0:
            return rng.choice(([], frames[:1], frames * 2, [b"", *frames], [frames[0], rng.randbytes(9)]))
        case 1:
            return [packed_bent(rng, {**payload, "agent_metadata_bytes": b""}), frames[1]]
        case 2:
            return [frames[0][: rng.randrange(len(frames[0]))], frames[1]]
        case 3:
            return [frames[0], torn(rng, frames[1])]
    blob = metadata.pop("agent_metadata")
    while True:
        found = msgspec.msgpack.decode(packed_bent(rng, metadata))
        if isinstance(found, dict):
            payload["agent_metadata_bytes"] = msgspec.msgpack.encode({**found, "agent_metadata": blob})
            return [msgspec.msgpack.encode(payload), frames[1]]
