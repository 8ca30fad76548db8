"""Faults that patterns, comparisons and watches find, one at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from kvflow import CacheGroup, CacheLayout, Config, Lease, LeaseOutcome, Runtime, ServeRequest, StateLayout, StateTensor
from kvflow.core.cache.layout import KVStyle
from kvflow.errors import UsageError
from kvflow.testing import (
    BlockWatch,
    InprocNetwork,
    InprocPair,
    InprocTransport,
    PatternCache,
    StateCache,
    World,
    compare_blocks,
    watch_blocks,
    watch_offers,
)
from tests.core.caches import Cache, Recipe, recipes
from tests.runtime.test_events import Event
from tests.support.tests_support import until


class Allocator:
    """An allocator of four blocks that does as a test says, also double frees."""

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


BLOCKS = [3, 4, 5]
GROWING = ServeRequest("req", BLOCKS, num_tokens=11, computed_tokens=0)


def compute(cache: PatternCache, tokens: range) -> None:
    """A step of the prefill writes these tokens of the prompt."""
    for token in tokens:
        cache.slots(1, 1)[BLOCKS[token // 4], token % 4] ^= 1


def prefill(lease: Lease, cache: PatternCache, steps: Sequence[int]) -> None:
    """All of a prompt, in steps; blocks come as they are needed."""
    done = 0
    for tokens in steps:
        more = BLOCKS[len(lease.block_ids) : -(-tokens // 4)]
        if more:
            lease.extend(more)
        compute(cache, range(done, tokens))
        lease.advance(tokens)
        done = tokens


@pytest.mark.parametrize(("given", "steps"), [(BLOCKS, [3, 6, 6, 11]), ([3], [8, 11]), ([], [3, 6, 11]), ([], [11])])
async def test_the_first_write_of_a_prefill_is_no_overwriting(
    kvflow_pair: InprocPair, given: list[int], steps: list[int]
) -> None:
    producer, consumer = kvflow_pair.producer, kvflow_pair.consumer
    with watch_offers(producer.runtime, producer.cache) as watch:
        lease = producer.runtime.serve_blocks(replace(GROWING, block_ids=given))
        load = consumer.runtime.start_load(kvflow_pair.wanted(lease, [0, 1, 2]))
        prefill(lease, producer.cache, steps)
        watch.assert_unchanged()
        await load
        assert await lease is LeaseOutcome.READ


@pytest.mark.parametrize(("given", "token"), [(BLOCKS, 0), (BLOCKS, 10), ([3], 2), ([3], 4), ([], 2), ([], 10)])
async def test_what_was_computed_and_is_written_again_is_found(
    kvflow_pair: InprocPair, given: list[int], token: int
) -> None:
    producer = kvflow_pair.producer
    place = f"V, block {BLOCKS[token // 4]}, slot {token % 4}: token {token} of request 'req' was overwritten"
    with pytest.raises(AssertionError, match=place), watch_offers(producer.runtime, producer.cache):
        lease = producer.runtime.serve_blocks(replace(GROWING, block_ids=given))
        prefill(lease, producer.cache, [3, 11])
        compute(producer.cache, range(token, token + 1))
        await lease.revoke()


@pytest.mark.parametrize("again", [2, 5])
async def test_a_step_that_writes_what_an_earlier_one_has_computed_is_found(
    kvflow_pair: InprocPair, again: int
) -> None:
    """Also in a block that was filled in part."""
    producer = kvflow_pair.producer
    found = pytest.raises(AssertionError, match=f"slot {again % 4}: token {again} of request 'req' was overwritten")
    with found, watch_offers(producer.runtime, producer.cache):
        lease = producer.runtime.serve_blocks(GROWING)
        for tokens in (range(6), range(again, 11)):
            compute(producer.cache, tokens)
            lease.advance(tokens.stop)
        await lease.revoke()


@pytest.mark.parametrize("first", [0, None])
async def test_what_an_event_stands_for_is_computed_when_it_has_happened(
    kvflow_pair: InprocPair, first: int | None
) -> None:
    producer, event = kvflow_pair.producer, Event()
    found = pytest.raises(AssertionError, match="token 7 of request 'req' was overwritten before")
    with found, watch_offers(producer.runtime, producer.cache) as watch:
        ready = event if first is None else None
        lease = producer.runtime.serve_blocks(replace(GROWING, computed_tokens=first, ready=ready))
        if first is not None:
            lease.advance(11, ready=event)
        compute(producer.cache, range(11))
        watch.assert_unchanged()
        event.happen()
        await until(lambda: lease._opened.held.computed)
        watch.assert_unchanged()
        compute(producer.cache, range(7, 8))
        await lease.revoke()


async def test_what_follows_the_lease_or_the_last_token_may_change(kvflow_pair: InprocPair) -> None:
    cache = kvflow_pair.producer.cache
    with watch_offers(kvflow_pair.producer.runtime, cache):
        await kvflow_pair.offer([3]).revoke()
        cache.slots(0, 0)[3] ^= 1


async def test_a_block_freed_under_a_lease(kvflow_pair: InprocPair, allocator: Allocator) -> None:
    found = pytest.raises(AssertionError, match=r"block 3 was freed at .* while it is leased to readers")
    with found, watched(kvflow_pair, allocator):
        lease = kvflow_pair.offer(allocator.take(3))
        allocator.give_back([3])
    await lease.revoke()


@pytest.mark.parametrize(
    ("taken", "freed", "lost", "found"),
    [
        ([3, 4], [3, 4], [], ""),
        ([3, 3], [], [], "block 3 was given out twice: at .*test_watch.py"),
        ([9], [], [], "block 9 was given out at .*; it was not free when the watch began"),
        ([3], [3, 3], [], "block 3 was freed at .*, but nobody had it"),
        ([3, 4], [3], [], "block 4 was taken at .*test_watch.py.* and never freed"),
        ([3], [3], [5], "block 5 is free 0 times, taken at no place"),
    ],
)
async def test_an_allocator_that_loses_count(
    kvflow_pair: InprocPair, allocator: Allocator, taken: list[int], freed: list[int], lost: list[int], found: str
) -> None:
    raising = pytest.raises(AssertionError, match=found) if found else nullcontext()
    with raising, watched(kvflow_pair, allocator) as watch:
        allocator.take(*taken)
        watch.assert_conserved()
        allocator.give_back(freed)
        for block in lost:
            allocator.free.remove(block)


async def test_an_offer_of_several_groups_is_watched_as_a_whole_or_refused() -> None:
    full = {"layers.0": torch.zeros(2, 8, 4, 1, 2)}
    local = {"layers.1": torch.zeros(2, 8, 2, 1, 2)}
    state = {"layers.2": (torch.zeros(8, 3), torch.zeros(8, 2, 2))}
    layouts = [
        CacheLayout.infer(full, order="NHD", block_size=4),
        CacheLayout.infer(local, order="NHD", block_size=2),
    ]
    of_state = StateLayout.infer(state, [StateTensor(name="conv"), StateTensor(name="ssm")])
    groups = [
        CacheGroup("full", full, layouts[0]),
        CacheGroup("local", local, layouts[1], window=3),
        CacheGroup("state", state, of_state),
    ]
    caches = [PatternCache("p", full, layouts[0]), PatternCache("p", local, layouts[1])]
    world = World(transport=lambda _, name: InprocTransport(name, InprocNetwork()))
    async with Runtime(Config(engine_id="p", listen="tcp://127.0.0.1:0"), world=world) as runtime:
        await runtime.register_kv_caches(groups)
        request = ServeRequest("req", {"full": [1, 2, 3], "local": [5, 6], "state": [4]}, num_tokens=11)
        with watch_offers(runtime, caches), pytest.raises(UsageError, match=r"'req': offers of 3 groups.*of 2"):
            runtime.serve_blocks(request)
        for tensor, where, found in (
            (full["layers.0"], (0, 3, 2), "layer 'layers.0', K, block 3, slot 2: token 10"),
            (local["layers.1"], (1, 5, 1), "layer 'layers.1', V, block 5, slot 1: token 9"),
            (state["layers.2"][1], (4, 1), "layer 'layers.2', ssm, block 4, slot 0: token 10"),
        ):
            again = replace(request, request_id=f"req {found}")
            with (
                pytest.raises(AssertionError, match=f"{re.escape(found)} of request .* was overwritten before"),
                watch_offers(runtime, [*caches, StateCache("p", state, of_state)]) as watch,
            ):
                lease = runtime.serve_blocks(again)
                full["layers.0"][0, 3, 3] += 1  # behind the last token
                local["layers.1"][0, 6, 1] += 1
                watch.assert_unchanged()
                tensor[where] += 1
                await lease.revoke()
        found = pytest.raises(AssertionError, match="conv, block 4, slot 0: token 10 of request 'growing'")
        with found, watch_offers(runtime, [*caches, StateCache("p", state, of_state)]) as watch:
            growing = replace(request, request_id="growing", block_ids={"full": [1], "local": [5]}, computed_tokens=0)
            lease = runtime.serve_blocks(growing)
            for tensor in (full["layers.0"], local["layers.1"], *state["layers.2"]):
                tensor += 1
            lease.advance(4)
            full["layers.0"][:, 2:4] += 1
            local["layers.1"] += 1  # holds tokens from the eighth on
            state["layers.2"][0][4] += 1
            lease.extend({"full": [2, 3], "local": [6], "state": [4]})
            lease.advance(11)
            watch.assert_unchanged()
            state["layers.2"][0][4] += 1
            await lease.revoke()
