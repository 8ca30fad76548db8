"""An engine of another make and real vLLM in one fleet, both ways: texts are those of one engine, and were received."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import kvflow
from kvflow.errors import PeerIncompatible
from tests.vllm.conftest import DECODE, PREFILL, Site
from tests.vllm.own_engine import BLOCK, OwnCache, OwnEngine
from tests.vllm.servers import NAME, Server, prefill
from tests.vllm.test_hand_over import ALONE, ENDED, EXTERNAL, received_tokens

LENGTHS = (3, 127, 128, 129, 417)
TOKENS = 16


@pytest.fixture(scope="module")
def sides(site: Site) -> tuple[Server, Server]:
    producer, consumer = site.have(PREFILL, DECODE)
    return producer, consumer


def run(folder: Path, what: Callable[[OwnEngine], Coroutine[Any, Any, Any]]) -> Any:
    """Have an engine of our own, for the time of a call."""

    async def go() -> Any:
        own = await OwnEngine.open(folder)
        try:
            return await what(own)
        finally:
            await own.aclose()

    return asyncio.run(go())


def test_own_prefill_and_vllms_decode(sides: tuple[Server, Server], story: list[int], tmp_path: Path) -> None:
    _, consumer = sides
    prompts = [story[-length:] for length in LENGTHS]
    expected = [consumer.ids(prompt, TOKENS, **ALONE) for prompt in prompts]
    consumer.post("/reset_prefix_cache")
    before = received_tokens(consumer)

    async def hand_over(own: OwnEngine) -> list[tuple[list[int], list[int]]]:
        found = []
        for number, prompt in enumerate(prompts):
            async with own.offered(prompt, f"own-{number}") as params:
                tokens = await asyncio.to_thread(consumer.ids, prompt, TOKENS, kv_transfer_params=params)
            found.append((tokens, await own.alone(prompt, TOKENS)))
        return found

    found = run(tmp_path, hand_over)
    assert [tokens for tokens, _ in found] == expected
    assert [tokens for _, tokens in found] == expected, "the engines differ by themselves: this would show nothing"
    consumer.wait_metric(EXTERNAL, before + sum(LENGTHS), source="external_kv_transfer")
    assert received_tokens(consumer) == before + sum(LENGTHS)


def test_vllms_prefill_and_own_decode(sides: tuple[Server, Server], story: list[int], tmp_path: Path) -> None:
    producer, _ = sides
    prompts = [story[100 : 100 + length] for length in LENGTHS]
    expected = [producer.ids(prompt, TOKENS, **ALONE) for prompt in prompts]
    read = producer.metric(ENDED, outcome="read")
    tickets = [prefill(producer, prompt) for prompt in prompts]

    async def take(own: OwnEngine) -> list[list[int]]:
        asked = enumerate(zip(prompts, tickets, strict=True))
        return [await own.answer(prompt, params, f"taken-{at}", TOKENS) for at, (prompt, params) in asked]

    assert run(tmp_path, take) == expected
    producer.wait_metric(ENDED, read + len(prompts), outcome="read")


def test_what_does_not_fit_is_said_before_traffic(sides: tuple[Server, Server], story: list[int]) -> None:
    """`prewarm` compares the caches, with any ticket of the other engine, or the address of one of its ranks."""
    ticket = kvflow.Ticket.from_params(prefill(sides[0], story[:3]))

    async def errors(**changes: Any) -> list[BaseException | None]:
        own_cache = OwnCache(30, 3, 64)
        config = kvflow.Config(engine_id="own", model=changes.pop("model", NAME), listen="tcp://127.0.0.1:0")
        async with kvflow.Runtime(config) as runtime:
            layout = own_cache.layout()
            tensors: Any = own_cache.tensors
            if changes.pop("plain", False):
                layout = kvflow.CacheLayout.infer(tensors, order="HND", block_size=BLOCK)
            await runtime.register_kv_caches(tensors, layout)
            engines = [ticket, kvflow.PeerAddress(engine_id=ticket.engine_id, address=ticket.address)]
            return list(await runtime.prewarm(engines))

    assert asyncio.run(errors()) == [None, None]
    for changes, message in (
        ({"model": "another"}, f"model: ours 'another', theirs '{NAME}'"),
        ({"plain": True}, "kv_format: ours .*, theirs 'cpu_fused_vec'"),
    ):
        for error in asyncio.run(errors(**changes)):
            assert isinstance(error, PeerIncompatible)
            with pytest.raises(PeerIncompatible, match=message):
                raise error
