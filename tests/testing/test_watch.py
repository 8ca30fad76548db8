"""What patterns, comparisons and watches find, one wrong thing at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings

from kvflow import Lease
from kvflow.core.cache.layout import KVStyle
from kvflow.errors import UsageError
from kvflow.testing import BlockWatch, InprocPair, PatternCache, compare_blocks, inproc_pair, watch_blocks, watch_offers
from tests.core.caches import Cache, Recipe, recipes


class Allocator:
    """Four blocks; does whatever it is told."""

    def __init__(self) -> None:
        self.free = [3, 4, 5, 6]

    def take(self, *blocks: int) -> list[int]:
        self.free = [block for block in self.free if block not in blocks]
        return list(blocks)

    def give_back(self, blocks: list[int]) -> None:
        self.free += blocks


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


def watched(pair: InprocPair, allocator: Allocator) -> AbstractContextManager[BlockWatch]:
    runtime = pair.producer.runtime
    return watch_blocks(runtime, allocator, take="take", free="give_back", free_blocks=lambda: allocator.free)


@settings(max_examples=50)
@given(recipe=recipes())
def test_a_pattern_is_in_every_element_and_every_change_is_seen(recipe: Recipe) -> None:
    cache = Cache(recipe)
    before = cache.snapshot()
    pattern = PatternCache("engine", cache.tensors, cache.infer())
    pattern.fill()
    pattern.assert_untouched()
    layer, block, slot = recipe.layers - 1, recipe.blocks - 1, recipe.tokens - 1
    digests = pattern.digests([block])
    elements = pattern.slots(layer, cache.kv_count - 1)[block, slot]
    kept = elements.clone()
    elements[-1, -1] ^= 1
    assert (pattern.digests([block]) != digests).nonzero().tolist() == [[layer, cache.kv_count - 1, 0, slot]]
    with pytest.raises(AssertionError, match=f"block {block}, slot {slot} head {elements.shape[0] - 1} was written to"):
        pattern.assert_untouched()
    elements[:] = kept
    for each in range(recipe.layers):
        for kv in range(cache.kv_count):
            pattern.slots(each, kv).zero_()
    assert cache.snapshot() == before, "something outside of the blocks was written"


def test_patterns_are_finite_and_tell_engines_apart() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        recipe = Recipe(style=KVStyle.MLA, order="NHD", layers=2, blocks=8, tokens=4, heads=1, dim=8, dtype=dtype)
        one, other = Cache(recipe), Cache(recipe)
        ours, theirs = (PatternCache(name, cache.tensors, cache.infer()) for name, cache in (("a", one), ("b", other)))
        ours.fill()
        theirs.fill()
        assert all(tensor.float().isfinite().all() for tensor in one.tensors.values())
        assert "it holds what is in no place of engine 'b'" in str(compare_blocks(ours, [1], theirs, [1]))


async def test_an_offer_that_changes_is_found_at_any_moment(kvflow_pair: InprocPair) -> None:
    cache = kvflow_pair.producer.cache
    found = pytest.raises(AssertionError, match=r"V, block 4, slot 1: token 5 of request 'req' was overwritten while")
    with found, watch_offers(kvflow_pair.producer.runtime, cache) as watch:
        lease = kvflow_pair.offer([3, 4])
        watch.assert_unchanged()
        cache.slots(1, 1)[4, 1, 0, 0] ^= 1
        with pytest.raises(AssertionError, match=r"layer 'layers\.1', V, block 4, slot 1"):
            watch.assert_unchanged()
        await lease.revoke()
    assert "serve_blocks" not in vars(kvflow_pair.producer.runtime)


async def test_what_follows_the_lease_or_the_last_token_may_change(kvflow_pair: InprocPair) -> None:
    cache = kvflow_pair.producer.cache
    with watch_offers(kvflow_pair.producer.runtime, cache):
        await kvflow_pair.offer([3]).revoke()
        cache.slots(0, 0)[3] ^= 1


async def test_an_allocator_that_does_everything_right(kvflow_pair: InprocPair, allocator: Allocator) -> None:
    with watched(kvflow_pair, allocator) as watch:
        blocks = allocator.take(3, 4)
        watch.assert_conserved()
        allocator.give_back(blocks)


async def test_a_block_freed_under_a_lease(kvflow_pair: InprocPair, allocator: Allocator) -> None:
    found = pytest.raises(AssertionError, match=r"block 3 was freed at .* while it is leased to readers")
    with found, watched(kvflow_pair, allocator):
        lease = kvflow_pair.offer(allocator.take(3))
        allocator.give_back([3])
    await lease.revoke()


@pytest.mark.parametrize(
    ("taken", "freed", "found"),
    [
        ([3, 3], [], "block 3 was given out twice: at .*test_watch.py"),
        ([9], [], "block 9 was given out at .*; free were 4 others"),
        ([3], [3, 3], "block 3 was freed at .*, but nobody had it"),
        ([3, 4], [3], "block 4 was taken at .*test_watch.py.* and never freed"),
    ],
)
async def test_an_allocator_that_loses_count(
    kvflow_pair: InprocPair, allocator: Allocator, taken: list[int], freed: list[int], found: str
) -> None:
    with pytest.raises(AssertionError, match=found), watched(kvflow_pair, allocator):
        allocator.take(*taken)
        allocator.give_back(freed)


async def test_a_free_list_that_loses_a_block(kvflow_pair: InprocPair, allocator: Allocator) -> None:
    found = pytest.raises(AssertionError, match="block 5 is free 0 times, taken at no place")
    with found, watched(kvflow_pair, allocator):
        allocator.free.remove(5)


async def test_an_offer_of_several_groups_is_refused_and_not_half_watched() -> None:
    lease = SimpleNamespace(request_id="req", block_tables=((1,), (2,)), done=False)
    async with inproc_pair() as pair:
        with (
            watch_offers(pair.producer.runtime, pair.producer.cache) as offers,
            pytest.raises(UsageError, match="'req'"),
        ):
            offers.offer(cast(Lease, lease))
