"""Leases that grow: loads take what is computed as it comes, nothing before, and end with the last of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvflow import Lease, LeaseOutcome, Load, ServeRequest
from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.protocol.proof import SEAL_SIZE_BYTES
from kvflow.errors import CacheUnregistered, LeaseExpired, RequestError, RuntimeClosed
from kvflow.testing import (
    InprocCluster,
    InprocPair,
    ManualClock,
    assert_quiet,
    inproc_pair,
    run_virtual,
)
from kvflow.transport.base import AgentName, PostedRead
from tests.runtime.test_events import Event
from tests.support.growing_pairs import BLOCKS, CONFIG, TAKEN, opened, pair_of, wanted
from tests.support.hand_overs import Attention, HandOver, LayerPart, Paths, run
from tests.support.reference_model import Engine, Model
from tests.support.tests_support import each, in_virtual_time


def landed(pair: InprocPair) -> list[int]:
    """Which of the blocks that are loaded into have changed."""
    found = []
    for block in TAKEN:
        try:
            pair.consumer.cache.assert_untouched([block])
        except AssertionError:
            found.append(block)
    return found


@each("staging", ["never", "always"])
@each("tokens", [16, 18])
@in_virtual_time
async def test_what_is_computed_is_read_as_it_comes(staging: str, tokens: int) -> None:
    """Of 18 tokens that is what these blocks hold: full blocks only."""
    async with pair_of(staging) as pair:
        lease = opened(pair, tokens)
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        for count, computed in ((0, 3), (1, 4), (1, 7), (3, 13), (3, 15)):
            pair.producer.cache.fill(BLOCKS[:count])
            lease.advance(computed)
            await asyncio.sleep(0.1)
            assert landed(pair) == TAKEN[:count], f"{computed} tokens"
        assert not load.done
        pair.producer.cache.fill(BLOCKS)
        lease.advance(tokens)
        assert (await load).tokens == 16
        pair.assert_loaded(TAKEN, BLOCKS)
        assert await lease is LeaseOutcome.READ


@each("computed", ["before the load", "while it waits"])
@in_virtual_time
async def test_what_is_complete_before_any_of_it_is_read_is_read_in_the_order_of_the_memory(computed: str) -> None:
    """As a lease that does not grow: whole slices, each of blocks that are near each other."""
    async with pair_of() as pair:
        read: list[Descriptors] = []
        transport = pair.consumer.transport
        post_read = transport.post_read

        def noted(peer: AgentName, descriptors: Descriptors) -> PostedRead:
            read.append(descriptors)
            return post_read(peer, descriptors)

        transport.post_read = noted  # type: ignore[method-assign]
        whole = pair.producer.runtime.serve_blocks(ServeRequest("whole", BLOCKS, num_tokens=16))
        await pair.consumer.runtime.load_blocks(wanted(pair, whole))
        slices, read[:] = [one.remote[one.sizes > SEAL_SIZE_BYTES].tolist() for one in read], []

        lease = opened(pair)
        load = None if computed == "before the load" else pair.consumer.runtime.start_load(wanted(pair, lease))
        await asyncio.sleep(0.1)
        pair.producer.cache.fill(BLOCKS)
        for tokens in (4, 11, 16):
            lease.advance(tokens)
        await (load or pair.consumer.runtime.start_load(wanted(pair, lease)))
        pair.assert_loaded(TAKEN, BLOCKS)
        blocks = [one.remote[one.sizes > SEAL_SIZE_BYTES].tolist() for one in read]
        assert [one for one in blocks if one] == [one for one in slices if one]


@each("staged", [(False, False), (True, False), (True, True)])
def test_the_blocks_of_a_window_come_with_its_tokens(staged: tuple[bool, bool]) -> None:
    """They are the last ones of the prompt, though the first that their group offers."""
    engine = Engine(model=Model(layers=1, kv_heads=1, head_size=4), stages=((0,),), block_size=4, num_blocks=6)
    windowed = replace(engine, stages=((1,),))
    full = LayerPart(producer=engine, consumer=engine, offered=(3, 1, 0, 2), wanted=(1, 2, 3, 4))
    window = LayerPart(producer=windowed, consumer=windowed, attention=Attention(8), offered=(5, 2), wanted=(0, 3))
    case = HandOver(parts=(full, window), num_tokens=16, paths=Paths(staged=staged))

    async def compute(producers: Sequence[Any], leases: Sequence[Lease]) -> None:
        cleared = Cleared(case, producers[0])
        for tokens in (4, 8, 12, 16):
            cleared.fill(tokens)
            leases[0].advance(tokens)
            await asyncio.sleep(0.1)

    run_virtual(run(case, InprocCluster().world(), compute))


@each("extends", [False, True])
@each("staged", [(False, False), (True, False), (False, True)])
@each("sharded", [(True, False), (False, True), (True, True)])
def test_sharded_tokens_are_read_as_they_come(
    sharded: tuple[bool, bool], staged: tuple[bool, bool], extends: bool
) -> None:
    """Also to and from ranks that have fewer tokens of the prompt than others, or none yet."""
    model = Model(layers=2, kv_heads=1, head_size=4, latent=True)
    whole = Engine(model=model, tp_size=2, stages=((0, 1),), block_size=4, num_blocks=9)
    producer, consumer = (replace(whole, sharded=one) for one in sharded)
    for tokens in (3, 13, 26):
        tables = [tuple(range(1, 1 - -tokens // one.block_tokens)) for one in (producer, consumer)]
        part = LayerPart(producer=producer, consumer=consumer, offered=tables[0], wanted=tables[1][::-1])
        case = HandOver(parts=(part,), num_tokens=tokens, paths=Paths(staged=staged))

        async def compute(producers: Sequence[Any], leases: Sequence[Lease], case: HandOver = case) -> None:
            cleared, (ids,) = [Cleared(case, rank) for rank in producers], case.ids(0)
            size, known = case.parts[0].producer.block_tokens, 0
            for computed in sorted({*range(2, case.num_tokens, 5), case.num_tokens}):
                filled = -(-computed // size)
                for rank, lease in zip(cleared, leases, strict=True):
                    rank.fill(computed)
                    if extends and filled > known:
                        lease.extend(ids[known:filled])
                    lease.advance(computed)
                known = filled
                await asyncio.sleep(0.1)

        run_virtual(run(case, InprocCluster().world(), compute, extends=extends))


class Cleared:
    """A rank's blocks of the prompt, emptied; tokens come back as they are computed."""

    def __init__(self, case: HandOver, rank: Any) -> None:
        self._tokens = case.num_tokens
        self._slots = []
        for cache, ids in zip(rank.caches, case.ids(0), strict=True):
            for layer in range(len(cache.layout.layer_names)):
                for part in range(cache.engine.model.parts):
                    slots = cache.pattern.slots(layer, part)
                    self._slots.append((slots, slots.clone(), ids, cache))
        for slots, _, ids, _ in self._slots:
            slots[list(ids)] = 0

    def fill(self, tokens: int) -> None:
        for slots, kept, ids, cache in self._slots:
            size, of_block = cache.engine.block_size, cache.engine.block_tokens
            before = cache.place.tp * size if cache.engine.sharded else 0
            for at, block in enumerate(ids, -(-self._tokens // of_block) - len(ids)):
                computed = tokens - at * of_block - before
                count = size if tokens == self._tokens else min(max(computed, 0), size)
                slots[block, :count] = kept[block, :count]


@each("landed", [1, 3, 5])
@in_virtual_time
async def test_a_paused_reader_reports_no_token_of_another_prompt(landed: int) -> None:
    """The reader's machine is paused between reads of a load, its clock stands still, and the lease ends meanwhile."""
    cluster, still = InprocCluster(), ManualClock()
    worlds = {"producer_world": cluster.world(), "consumer_world": cluster.world(clock=lambda: still)}
    async with inproc_pair(config=CONFIG, **worlds) as pair:
        lease, seen = opened(pair), list[int]()
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        following = asyncio.create_task(followed(load, seen))
        pair.producer.cache.fill(BLOCKS)
        lease.advance(4)
        await asyncio.sleep(0.1)
        assert seen == [4], "proven, however long it took"
        pair.consumer.transport.faults.hold = True
        lease.advance(16)
        for _ in range(landed):
            await asyncio.sleep(0.1)
            assert pair.consumer.transport.perform(1) == 1
        await asyncio.sleep(0.1)
        await lease.revoke()
        for tensor in pair.producer.kv_caches.values():
            tensor.fill_(12345.0)
        pair.consumer.transport.faults.hold = False
        while not load.done:
            pair.consumer.transport.perform()
            await asyncio.sleep(0.01)
        with pytest.raises(LeaseExpired):
            await following
        pair.producer.cache.fill(BLOCKS)  # as they were
        taken, blocks = TAKEN[: seen[-1] // 4], BLOCKS[: seen[-1] // 4]
        for name, tensor in pair.producer.kv_caches.items():
            assert torch.equal(pair.consumer.kv_caches[name][:, taken], tensor[:, blocks]), seen


async def followed(load: Load, seen: list[int]) -> None:
    """Note the progress of a load in `seen`."""
    async for progress in load:
        seen.append(progress.tokens)


@each("staging", ["never", "always"])
@in_virtual_time
async def test_a_lease_that_ends_before_it_is_complete(staging: str) -> None:
    """Revoked, or its time is over: no load of it succeeds, whatever has landed, and later advances do nothing."""
    for revoked in (True, False):
        async with pair_of(staging, lease_lifetime_s=0.5) as pair:
            lease = opened(pair, ttl_s=0.5)
            load = pair.consumer.runtime.start_load(wanted(pair, lease, deadline_s=9.0))
            lease.advance(8)
            await asyncio.sleep(0.1)
            assert len(landed(pair)) == 2
            if revoked:
                lease.revoke()
            assert await lease is (LeaseOutcome.REVOKED if revoked else LeaseOutcome.EXPIRED)
            with pytest.raises(LeaseExpired):
                await load
            lease.advance(16)
            lease.advance(3)
            pair.offer(BLOCKS, "next").revoke()


@each("end", ["drain", "unregister", "close"])
@each("tokens", [0, 8])
@in_virtual_time
async def test_a_reader_that_goes_while_it_waits(end: str, tokens: int) -> None:
    """Its load ends, nothing lands afterwards, and another reader may have the lease."""
    async with pair_of() as pair:
        lease = opened(pair)
        runtime = pair.consumer.runtime
        load = runtime.start_load(wanted(pair, lease))
        lease.advance(tokens)
        await asyncio.sleep(0.1)
        assert len(landed(pair)) == tokens // 4
        match end:
            case "drain":
                await runtime.drain(0.2)
            case "unregister":
                await runtime.unregister()
            case "close":
                await runtime.aclose()
        with pytest.raises(CacheUnregistered if end == "unregister" else RuntimeClosed):
            await load
        assert load.safe
        pair.producer.cache.fill(BLOCKS)
        lease.advance(16)
        await asyncio.sleep(0.1)
        assert len(landed(pair)) == tokens // 4
        assert lease.state == "offered"
        await lease.revoke()
        assert_quiet(pair.producer.runtime.statistics())


@in_virtual_time
async def test_a_reader_renews_a_lease_whose_prompt_takes_long() -> None:
    async with pair_of() as pair:
        lease = opened(pair, ttl_s=0.3)
        load = pair.consumer.runtime.start_load(wanted(pair, lease, deadline_s=60.0))
        for tokens in (4, 8, 12, 16):
            await asyncio.sleep(0.5)
            pair.producer.cache.fill(BLOCKS[: tokens // 4])
            lease.advance(tokens)
        await load
        pair.assert_loaded(TAKEN, BLOCKS)


@in_virtual_time
async def test_advances_take_effect_in_order() -> None:
    """An event of a later advance says nothing about earlier ones."""
    async with pair_of() as pair:
        lease, events = opened(pair), [Event(), Event()]
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        for tokens, event in ((4, events[0]), (8, events[1]), (12, None)):
            lease.advance(tokens, event)
        events[1].happen()
        await asyncio.sleep(0.1)
        assert landed(pair) == []
        pair.producer.cache.fill(BLOCKS[:3])
        events[0].happen()
        await asyncio.sleep(0.1)
        assert landed(pair) == TAKEN[:3]
        pair.producer.cache.fill(BLOCKS)
        lease.advance(16)
        await load


@in_virtual_time
async def test_advances_that_cannot_be() -> None:
    async with pair_of() as pair:
        serve = pair.producer.runtime.serve_blocks
        with pytest.raises(RequestError, match="'req': computed_tokens is 17, num_tokens is 16"):
            serve(ServeRequest("req", BLOCKS, num_tokens=16, computed_tokens=17))
        lease = opened(pair)
        lease.advance(8)
        for tokens in (7, 17):
            problem = f"'req': advance\\(\\) to {tokens} tokens: 8 are computed already, 16 are offered"
            with pytest.raises(RequestError, match=problem):
                lease.advance(tokens)
        with pytest.raises(RequestError, match="'req': ready: expected an event"):
            lease.advance(9, ready=7)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="'req': num_tokens: expected `int`"):
            lease.advance(8.5)  # type: ignore[arg-type]
        lease.advance(8)
        whole = pair.offer([8], "whole")
        with pytest.raises(RequestError, match=r"'whole': advance\(\) to 3 tokens: 4 are computed already"):
            whole.advance(3)
        for one in (lease, whole):
            one.revoke()
