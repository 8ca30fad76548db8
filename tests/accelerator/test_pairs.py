"""Pairs of unlike engines: one of the two is staged, or has another layout, block size or number of blocks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from kvflow.errors import PeerIncompatible
from kvflow.testing import assert_loaded
from tests.accelerator.sides import HERE, THERE, Engine, Side, Site, finish
from tests.accelerator.standin import StandIn
from tests.support.tests_support import until

pytestmark = pytest.mark.usefixtures("no_blocking_calls")

# As vLLM has them: Gaudi's blocks of 128 tokens, NVIDIA's of 16.
WIDE = Side(order="NHD", style="apart", blocks=6, block_size=128, dtype=torch.bfloat16)
NARROW = Side(order="HND", style="blocks_first", blocks=40, block_size=16, dtype=torch.bfloat16)
FUSED = replace(NARROW, order="NHD", style="fused")
KV_FIRST = replace(NARROW, style="kv_first", blocks=24, block_size=32)
SHAPES = {"wide": WIDE, "narrow": NARROW, "fused": FUSED, "K first": KV_FIRST}
PLACES = {"device": HERE, "host": "cpu"}
TOKENS = 300


def ids(engine: Engine, seed: int) -> list[int]:
    """Blocks for the prompt, in no order."""
    count = -(-TOKENS // engine.layout.block_size)
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randperm(engine.layout.num_blocks, generator=generator)[:count].tolist()
    return found


async def hand_over(standin: StandIn, producer: Engine, consumer: Engine) -> None:
    theirs, ours = ids(producer, 1), ids(consumer, 2)
    staged = {producer.device, consumer.device} != {"cpu"}
    with standin.held():
        lease = producer.serve(theirs, num_tokens=TOKENS)
        load = asyncio.ensure_future(consumer.load(lease, ours))
        if staged:
            await until(lambda: standin.waiting() or load.done())
            assert not load.done()
    report = await load
    assert report.tokens == TOKENS
    found = consumer.seen()
    finish()
    assert_loaded(found, ours, producer.seen(), theirs, num_tokens=TOKENS)


@pytest.mark.parametrize("consumer", SHAPES)
@pytest.mark.parametrize("producer", SHAPES)
@pytest.mark.parametrize("places", ["device to host", "host to device", "device to device"])
async def test_layouts_and_block_sizes_differ(standin: StandIn, places: str, producer: str, consumer: str) -> None:
    there, here = (PLACES[place] for place in places.split(" to "))
    async with Site("inproc") as site:
        ours = replace(SHAPES[consumer], device=THERE if here == HERE else here)
        await hand_over(standin, *await site.pair(replace(SHAPES[producer], device=there), ours))


@pytest.mark.nixl
@pytest.mark.parametrize("consumer", SHAPES)
@pytest.mark.parametrize("producer", SHAPES)
async def test_mapped_layouts_and_block_sizes_differ(standin: StandIn, producer: str, consumer: str) -> None:
    """What one list of descriptors says, one batch copies, however small its pieces are."""
    never = {"scratch": "never"}
    async with Site("mapped") as site:
        engines = await site.pair(
            replace(SHAPES[producer], device=HERE, settings=never),
            replace(SHAPES[consumer], device=THERE, settings=never),
        )
        theirs, ours = (ids(engine, seed) for seed, engine in enumerate(engines))
        with standin.held():
            load = asyncio.ensure_future(engines[1].load(engines[0].serve(theirs, num_tokens=TOKENS), ours))
            await until(lambda: load.done() or engines[1].runtime.statistics().transport.open_reads)
            assert not load.done()
        assert (await load).tokens == TOKENS
        found = engines[1].seen()
        finish()
        assert_loaded(found, ours, engines[0].seen(), theirs, num_tokens=TOKENS)


@pytest.mark.nixl
@pytest.mark.parametrize("places", ["device to host", "host to device"])
async def test_a_wide_cache_and_a_narrow_one_over_nixl(standin: StandIn, places: str) -> None:
    there, here = (PLACES[place] for place in places.split(" to "))
    async with Site("nixl") as site:
        await hand_over(standin, *await site.pair(replace(WIDE, device=there), replace(NARROW, device=here)))


@pytest.mark.parametrize("scratch", ["always", "never"])
async def test_a_device_that_is_read_directly_and_one_that_is_staged(standin: StandIn, scratch: str) -> None:
    async with Site("direct") as site:
        settings = {"scratch": scratch}
        staged = replace(WIDE, device=HERE, settings={"staging": "always", **settings})
        direct = replace(NARROW, device=THERE, settings=settings)
        await hand_over(standin, *await site.pair(staged, direct))
    async with Site("direct") as site:
        await hand_over(standin, *await site.pair(direct, staged))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16], ids=str)
@pytest.mark.parametrize("places", ["device to host", "host to device"])
async def test_numbers_of_another_kind_are_refused_with_both(standin: StandIn, places: str, dtype: torch.dtype) -> None:
    there, here = (PLACES[place] for place in places.split(" to "))
    async with Site("inproc") as site:
        producer, consumer = await site.pair(replace(NARROW, device=there, dtype=dtype), replace(NARROW, device=here))
        lease = producer.serve([1], num_tokens=16)
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(PeerIncompatible, match=f"dtype: ours 'bfloat16', theirs '{name}'"):
            await consumer.load(lease, [1])
        consumer.seen().assert_untouched()
        await lease.revoke()
