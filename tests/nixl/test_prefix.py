"""Prefixes over real NIXL: pulls from a live cache, and pulls from a source that dies during the pull."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvflow.prefix import HandedOnPrefix, PinnedPrefix, Prefixes, PrefixRequest, prefix_keys
from kvflow.prefix.seek_request import KEYS_MAX
from kvflow.prefix.testing import FakePrefixCache
from kvflow.testing import CacheSize, NixlPair, assert_loaded, nixl_pair
from tests.support.pairs import part_of

WAIT_S = 60.0
TOKENS = 16
SIZE = CacheSize(layers=4, num_blocks=512, block_size=TOKENS, kv_heads=4, head_size=64)
PROMPT = list(range(400 * TOKENS))
THEIRS = list(range(500, 100, -1))


@pytest.fixture
async def pair() -> AsyncIterator[NixlPair]:
    async with nixl_pair(size=SIZE, producer_parts=[Prefixes()], consumer_parts=[Prefixes()]) as pair:
        yield pair


def request(pair: NixlPair, blocks: int = 400) -> PrefixRequest:
    return PrefixRequest(
        "req",
        prefix_keys(PROMPT[: blocks * TOKENS], TOKENS),
        TOKENS,
        block_ids=list(range(blocks)),
        peers=[pair.producer.runtime.address],
        answer_within_s=WAIT_S,
    )


async def test_a_prefix_is_pulled_from_a_live_cache(pair: NixlPair) -> None:
    prefix_cache = FakePrefixCache(TOKENS)
    prefix_cache.put(PROMPT, THEIRS)
    part_of(pair.producer.runtime, Prefixes).share(prefix_cache, pinned_blocks_max=400)
    report = await part_of(pair.consumer.runtime, Prefixes).pull(request(pair))
    assert_loaded(pair.consumer.cache, range(400), pair.producer.cache, THEIRS)
    assert (report.num_tokens, report.bytes) == (400 * TOKENS, 400 * pair.producer.layout.block_size_bytes)
    async with asyncio.timeout(WAIT_S):
        while +prefix_cache.pins:
            await pair.producer.runtime.drain(WAIT_S)


async def test_a_successor_pulls_what_the_leaving_engine_hands_on(pair: NixlPair) -> None:
    """In one prefix of more keys than a question may have: the successor asks for all of them."""
    tokens = 4
    keys = prefix_keys(PROMPT, tokens)
    assert len(keys) > KEYS_MAX
    prefix_cache = FakePrefixCache(TOKENS)
    prefix_cache.put(PROMPT, THEIRS)
    leaving, successor = (part_of(one.runtime, Prefixes) for one in (pair.producer, pair.consumer))
    leaving.share(prefix_cache, pinned_blocks_max=400)

    async def take(offered: HandedOnPrefix) -> int:
        assert offered.keys == keys
        every = TOKENS // tokens
        asked = replace(request(pair), keys=offered.keys[every - 1 :: every], peers=[offered.holder])
        return (await successor.pull(asked)).pulled_tokens

    successor.accept(take, predecessors=[pair.producer.runtime.address])
    report = await leaving.hand_on(
        pair.consumer.runtime.introduce(), [keys], key_tokens=tokens, bytes_max=1 << 40, within_s=WAIT_S
    )
    assert (report.prefixes, report.tokens, report.reason) == (1, 400 * TOKENS, "")
    assert report.bytes == 400 * pair.producer.layout.block_size_bytes
    assert_loaded(pair.consumer.cache, range(400), pair.producer.cache, THEIRS)
    assert await pair.producer.runtime.drain(WAIT_S, successor=pair.consumer.runtime.introduce())


async def test_blocks_that_their_owner_takes_back_while_they_are_read_are_a_miss(pair: NixlPair) -> None:
    """The owner writes to them at once: bytes that were read afterwards are never reported."""

    class Reclaiming(FakePrefixCache):
        """Its owner takes everything back as soon as it was offered, and uses the blocks for something else."""

        def match(self, keys: object, key_tokens: int) -> PinnedPrefix | None:
            asyncio.get_running_loop().call_soon(take_back)
            return super().match(keys, key_tokens)  # type: ignore[arg-type]

    def take_back() -> None:
        assert sharing.reclaim(400) == 400
        for layer in pair.producer.kv_caches.values():
            layer.fill_(7.0)

    prefix_cache = Reclaiming(TOKENS)
    prefix_cache.put(PROMPT, THEIRS)
    sharing = part_of(pair.producer.runtime, Prefixes).share(prefix_cache, pinned_blocks_max=400)
    report = await part_of(pair.consumer.runtime, Prefixes).pull(request(pair))
    assert (report.num_tokens, sharing.statistics.reclaimed) == (0, 1)
    assert not +prefix_cache.pins


async def test_a_holder_that_is_gone_is_a_miss(pair: NixlPair) -> None:
    asked = request(pair, 4)
    await pair.producer.runtime.aclose()
    report = await part_of(pair.consumer.runtime, Prefixes).pull(asked)
    assert report.num_tokens == 0
    assert pair.producer.runtime.config.listen_host in report.answers[0].why
