"""Loads that get local blocks while they run: `LoadRequest.extends`, `Load.extend` and `Load.computed`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvflow import Lease, LeaseOutcome, Load, LoadRequest, ServeRequest, Ticket, secret_id
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import (
    BlocksBusy,
    DeadlineExceeded,
    LeaseExpired,
    PrefillFailed,
    PromptMismatch,
    RequestError,
    TransferFailed,
)
from kvflow.growing.growing_loads import SEAL_FETCH_ASKED_S
from kvflow.testing import InprocCluster, InprocPair, assert_blocks_equal, assert_quiet, run_virtual
from kvflow.transport.base import AgentName, PostedRead
from tests.growing.test_growing import Cleared, landed
from tests.runtime.test_events import Event
from tests.runtime.test_groups import FAMILIES
from tests.runtime.test_topologies import hand_overs
from tests.support.budgets import examples
from tests.support.growing_pairs import BLOCKS, TAKEN, opened, pair_of
from tests.support.hand_overs import HandOver, run
from tests.support.pairs import known
from tests.support.tests_support import each, in_virtual_time


def begun(pair: InprocPair, lease: Lease, block_ids: Sequence[int] = (), **more: Any) -> Load:
    """A load that has the first of its blocks, or none."""
    ticket = lease.ticket.to_params()
    return pair.consumer.runtime.start_load(LoadRequest("req", ticket, block_ids, extends=True, **more))


def in_flight(pair: InprocPair) -> int:
    return known(pair.consumer.runtime.statistics().blocks).in_flight


def lacking(pair: InprocPair) -> int:
    return known(pair.consumer.runtime.statistics().loading).loads_lacking_blocks


@each("staging", ["never", "always"])
@each("verify", [None, True])
@each("first", [0, 1, 4])
@in_virtual_time
async def test_blocks_are_taken_as_tokens_are_computed(staging: str, verify: bool | None, first: int) -> None:
    async with pair_of(staging) as pair:
        lease = opened(pair)
        load = begun(pair, lease, TAKEN[:first], verify=verify)
        tokens, have = 0, first
        for count in range(1, 5):
            pair.producer.cache.fill(BLOCKS[:count])
            lease.advance(4 * count)
            found = await load.computed(tokens)
            assert found == 4 * count
            tokens = found
            if have < count:
                await asyncio.sleep(1.0)
                assert landed(pair) == TAKEN[:have]
                assert (lacking(pair), in_flight(pair)) == (1, have)
                load.extend(TAKEN[have:count])
                have = count
            assert load.block_ids == tuple(TAKEN[:have])
            assert (lacking(pair), in_flight(pair)) == (0, have)
            await asyncio.sleep(0.1)
            assert landed(pair) == TAKEN[:count]
        report = await load
        assert (report.tokens, report.blocks) == (16, 4)
        assert report.verified is bool(verify)
        pair.assert_loaded(TAKEN, BLOCKS)
        assert await load.computed(0) is None
        assert await lease is LeaseOutcome.READ
        for runtime in (pair.producer.runtime, pair.consumer.runtime):
            assert_quiet(runtime.statistics())


@each("awaited", [False, True])
@in_virtual_time
async def test_a_prompt_that_is_complete_is_read_as_it_gets_blocks(awaited: bool) -> None:
    async with pair_of() as pair:
        producer, name = pair.producer.runtime, secret_id("req")
        ticket = Ticket.rendezvous(producer.introduce().to_params(), name, ttl_s=30.0)
        request = LoadRequest("req", ticket, [], extends=True)
        load = pair.consumer.runtime.start_load(request) if awaited else None
        if load is not None:
            load.extend(TAKEN[:1])
            await asyncio.sleep(1.0)
            assert (load.computed_tokens, in_flight(pair), lacking(pair)) == (0, 0, 0)
        lease = producer.serve_blocks(ServeRequest(name, BLOCKS, num_tokens=16))
        if load is None:
            load = pair.consumer.runtime.start_load(replace(request, ticket=lease.ticket))
            load.extend(TAKEN[:1])
        assert await load.computed(0) == 16
        await asyncio.sleep(1.0)
        assert landed(pair) == TAKEN[:1]
        load.extend(TAKEN[1:3])
        await asyncio.sleep(1.0)
        assert landed(pair) == TAKEN[:3]
        load.extend(TAKEN[3:])
        assert (await load).tokens == 16
        pair.assert_loaded(TAKEN, BLOCKS)
        assert await lease is LeaseOutcome.READ


@in_virtual_time
async def test_a_prompt_that_waits_for_blocks_costs_little() -> None:
    """Its seal is fetched now and then, and its lease renewed: the producer holds the blocks meanwhile."""
    async with pair_of() as pair:
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", BLOCKS, num_tokens=16, ttl_s=2.0))
        load = begun(pair, lease)
        await load.computed(0)
        posted = []
        transport = pair.consumer.transport
        post_read = transport.post_read

        def noted(peer: AgentName, descriptors: Descriptors) -> PostedRead:
            posted.append(descriptors)
            return post_read(peer, descriptors)

        transport.post_read = noted  # type: ignore[method-assign]
        await asyncio.sleep(8.0)
        assert not lease.done
        assert len(posted) <= 8.0 / SEAL_FETCH_ASKED_S
        load.extend(TAKEN)
        assert (await load).tokens == 16
        pair.assert_loaded(TAKEN, BLOCKS)


@in_virtual_time
async def test_what_is_cached_needs_no_blocks() -> None:
    async with pair_of() as pair:
        lease = opened(pair)
        load = begun(pair, lease, cached_tokens=8)
        pair.producer.cache.fill(BLOCKS)
        lease.advance(12)
        assert await load.computed(8) == 12
        load.extend(TAKEN[2:3])
        with pytest.raises(
            RequestError, match=r"3 local blocks in all, expected at most 2 of 4 for 16 .*cached_tokens 8"
        ):
            load.extend(TAKEN[:2])
        await asyncio.sleep(0.1)
        assert landed(pair) == TAKEN[2:3]
        lease.advance(16)
        load.extend(TAKEN[3:])
        report = await load
        assert (report.tokens, report.blocks) == (8, 2)
        lease = opened(pair)
        lease.advance(16)
        assert (await begun(pair, lease, cached_tokens=16)).blocks == 0


@in_virtual_time
async def test_blocks_that_cannot_be() -> None:
    async with pair_of() as pair:
        consumer = pair.consumer.runtime
        lease = opened(pair)
        load = begun(pair, lease, TAKEN[:1])
        pair.producer.cache.fill(BLOCKS)
        lease.advance(4)
        await load.computed(0)
        held = consumer.serve_blocks(ServeRequest("held", [5], num_tokens=4))
        for ids, problem in (
            ([1000], r"'req': extend\(\): block_ids: block id 1000 is not in 0.."),
            ([-1], r"block id -1 is not in"),
            ([1, 1], r"block id 1 is given twice"),
            (TAKEN[:1], rf"block id {TAKEN[0]} is given twice"),
            ([0, 1, 2, 3], r"'req': 5 local blocks in all, expected at most 4 of 4 for 16 tokens"),
            ("ab", r"extend\(\): block_ids"),
            ([1.5], r"extend\(\): block_ids"),
        ):
            with pytest.raises(RequestError, match=problem):
                load.extend(ids)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"extend\(\): after: expected an event"):
            load.extend([1], after=3)  # type: ignore[arg-type]
        with pytest.raises(BlocksBusy, match="block 5 cannot be loaded: it is leased"):
            load.extend([1, 5])
        assert load.block_ids == tuple(TAKEN[:1])
        assert in_flight(pair) == 1
        await held.revoke()
        lease.advance(16)
        load.extend(TAKEN[1:])
        await load
        load.extend([1, 2])
        load.extend([1, 2])
        assert in_flight(pair) == 0, "the load has ended: it takes no blocks"
        pair.assert_loaded(TAKEN, BLOCKS)


@in_virtual_time
async def test_requests_that_cannot_be() -> None:
    async with pair_of() as pair:
        consumer, lease = pair.consumer.runtime, opened(pair)
        ticket = lease.ticket.to_params()

        async def again(_: object) -> None:
            return None

        request = LoadRequest("req", ticket, [], extends=True)
        for wrong, problem in (
            (replace(request, ticket=[ticket, ticket]), "'req': extends: a load of several tickets"),
            (replace(request, again=again), "'req': extends: a load of several tickets, or with `again`"),
            (replace(request, block_ids=[0, 1, 2, 3, 4]), "5 local blocks in all, expected at most 4"),
            (replace(request, extends=1), "'req': extends: expected"),
        ):
            with pytest.raises(RequestError, match=problem):
                await consumer.start_load(wrong)  # type: ignore[arg-type]
        with pytest.raises(PromptMismatch, match=r"expected 12 tokens, .* offers 16"):
            await consumer.start_load(replace(request, num_tokens=12))
        with pytest.raises(
            RequestError, match="'req': extends: load_blocks returns no handle to extend: use start_load"
        ):
            await consumer.load_blocks(request)
        plain = consumer.start_load(LoadRequest("req", ticket, TAKEN))
        with pytest.raises(RequestError, match=r"'req': extend\(\): its LoadRequest has no extends=True"):
            plain.extend([1])
        lease.advance(16)
        await plain
        assert await plain.computed(0) is None
        plain.extend([1])
        assert_quiet(consumer.statistics())


@each("given_late", [False, True])
@in_virtual_time
async def test_an_offer_for_which_there_are_too_many_blocks(given_late: bool) -> None:
    async with pair_of() as pair:
        producer, name = pair.producer.runtime, secret_id("req")
        ticket = Ticket.rendezvous(producer.introduce().to_params(), name, ttl_s=30.0)
        request = LoadRequest("req", ticket, [] if given_late else TAKEN, extends=True)
        load = pair.consumer.runtime.start_load(request)
        if given_late:
            load.extend(TAKEN[:2])
            load.extend(TAKEN[2:])
        lease = producer.serve_blocks(ServeRequest(name, BLOCKS[:3], num_tokens=12))
        with pytest.raises(RequestError, match="'req': 4 local blocks in all, expected at most 3 of 4 for 12 tokens"):
            await load
        assert in_flight(pair) == 0
        await lease.revoke()


@in_virtual_time
async def test_nothing_lands_before_the_event_of_the_blocks() -> None:
    async with pair_of() as pair:
        lease = opened(pair)
        load = begun(pair, lease)
        pair.producer.cache.fill(BLOCKS)
        lease.advance(16)
        first, second = Event(), Event()
        load.extend(TAKEN[:1], after=first)
        load.extend(TAKEN[1:2], after=second)
        load.extend(TAKEN[2:])
        second.happen()
        await asyncio.sleep(1.0)
        assert landed(pair) == []
        assert in_flight(pair) == 4
        first.happen()
        assert (await load).tokens == 16
        pair.assert_loaded(TAKEN, BLOCKS)


@in_virtual_time
async def test_an_event_that_fails() -> None:
    async with pair_of() as pair:
        lease = opened(pair)
        load = begun(pair, lease)
        lease.advance(4)
        event = Event()
        load.extend(TAKEN[:1], after=event)
        event.error = OSError("no device")
        with pytest.raises(TransferFailed, match="its event `after` failed: no device"):
            await load
        assert landed(pair) == []
        assert in_flight(pair) == 0


@each("end", ["cancel", "deadline", "fail", "revoke"])
@in_virtual_time
async def test_a_load_that_ends_with_half_of_its_blocks_gives_them_back(end: str) -> None:
    async with pair_of() as pair:
        lease = opened(pair)
        load = begun(pair, lease, TAKEN[:1], deadline_s=3.0)
        pair.producer.cache.fill(BLOCKS)
        lease.advance(12)
        await load.computed(0)
        load.extend(TAKEN[1:2])
        await asyncio.sleep(0.5)
        assert landed(pair) == TAKEN[:2]
        assert in_flight(pair) == 2
        if end == "cancel":
            load.cancel()
            load.extend(TAKEN[2:3])  # its task has not noticed yet
            with pytest.raises(asyncio.CancelledError):
                await load
        elif end == "deadline":
            problem = r"phase 'queued': it has local blocks for 8 of 16 tokens, 12 are computed \(Load.extend\)"
            with pytest.raises(DeadlineExceeded, match=problem):
                await load
        elif end == "fail":
            lease.fail("no more")
            with pytest.raises(PrefillFailed, match="no more"):
                await load
        else:
            lease.revoke()
            with pytest.raises(LeaseExpired):
                await load
        await load.settled()
        assert (in_flight(pair), lacking(pair)) == (0, 0)
        load.extend(TAKEN[3:])
        assert in_flight(pair) == 0
        lease.revoke()


@in_virtual_time
async def test_late_blocks_are_quarantined_until_their_reads_have_stopped() -> None:
    async with pair_of() as pair:
        transport = pair.consumer.transport
        lease = opened(pair)
        load = begun(pair, lease, TAKEN[:1])
        pair.producer.cache.fill(BLOCKS)
        lease.advance(16)
        await load.computed(0)
        transport.faults.hold = True
        load.extend(TAKEN[1:])
        await asyncio.sleep(0.1)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert not load.safe
        assert known(pair.consumer.runtime.statistics().blocks).quarantined == 4
        load.extend([1])
        assert in_flight(pair) == 0
        transport.faults.hold = False
        transport.perform()
        await load.settled()
        assert_quiet(pair.consumer.runtime.statistics())
        await lease.revoke()


@in_virtual_time
async def test_two_prompts_that_hold_half_of_what_the_other_needs() -> None:
    """Neither can end. The engine gives one back, and loads it again: its lease is kept, no token is computed again."""
    async with pair_of() as pair:
        consumer = pair.consumer.runtime
        leases, loads = [], []
        pool = [0, 1, 2, 3]
        for name, theirs in (("first", [1, 2, 3]), ("second", [5, 6, 7])):
            pair.producer.cache.fill(theirs)
            request = ServeRequest(name, theirs, num_tokens=12, ttl_s=2.0)
            leases.append(pair.producer.runtime.serve_blocks(request))
            load = consumer.start_load(LoadRequest(name, leases[-1].ticket.to_params(), [], extends=True))
            assert await load.computed(0) == 12
            load.extend([pool.pop(), pool.pop()])
            loads.append(load)
        await asyncio.sleep(5.0)
        assert lacking(pair) == 2
        first, second = loads
        with consumer.keep_leases(leases[1].ticket.to_params()):
            second.cancel()
            await second.settled()
            pool += second.block_ids
            first.extend([pool.pop()])
            assert (await first).tokens == 12
            assert_blocks_equal(pair.consumer.cache, first.block_ids, pair.producer.cache, [1, 2, 3])
            pool += first.block_ids
            await asyncio.sleep(5.0)
            again = consumer.start_load(LoadRequest("second", leases[1].ticket.to_params(), [], extends=True))
            again.extend([pool.pop() for _ in range(3)])
            assert (await again).tokens == 12
            assert_blocks_equal(pair.consumer.cache, again.block_ids, pair.producer.cache, [5, 6, 7])
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2
        assert_quiet(consumer.statistics())


@examples(20, 250)
@given(data=st.data(), family=st.sampled_from([*FAMILIES, "one group"]), grows=st.booleans())
def test_whatever_the_groups_ranks_and_buffers_are(data: st.DataObject, family: str, grows: bool) -> None:
    """Blocks come in any portions, before and after their tokens, and are read when both are there."""
    case = exactly_needed(data.draw(FAMILIES[family] if family in FAMILIES else hand_overs()))
    steps = sorted(data.draw(st.lists(st.integers(0, case.num_tokens), max_size=3)))
    pauses = st.sampled_from([0.0, 0.01, 0.05])

    async def compute(producers: Sequence[Any], leases: Sequence[Lease]) -> None:
        cleared = [Cleared(case, rank) for rank in producers]
        for tokens in (*steps, case.num_tokens):
            for one, lease in zip(cleared, leases, strict=True):
                one.fill(tokens)
                lease.advance(tokens)
            await asyncio.sleep(data.draw(pauses))

    counts = [len(ids) for ids in case.ids(1)]
    shares = [*sorted(data.draw(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.8]), max_size=3))), 1.0]
    pause_s = data.draw(pauses)  # here: `give` runs in a task of its own

    async def give(loads: list[Load]) -> None:
        for load in loads:
            before = [0] * len(counts)
            for share in shares:
                upto = [math.ceil(share * count) for count in counts]
                load.extend(case.request_ids(1, list(map(slice, before, upto))))
                before = upto
                await asyncio.sleep(pause_s)

    grows = grows and family in FAMILIES  # the others may offer fewer blocks than the prompt has tokens for
    run_virtual(run(case, InprocCluster().world(), compute if grows else None, give=give))


def exactly_needed(case: HandOver) -> HandOver:
    """Give the consumer of a window exactly its blocks: a load that is extended has room for no others."""
    if case.merged[1]:
        return case
    tokens = min(
        [case.num_tokens, *(len(x.offered) * x.producer.block_tokens for x in case.parts if not x.attention.window)]
    )
    parts = []
    for part in case.parts:
        size = part.consumer.block_tokens
        first = max(part.attention.first_block(tokens, size), case.cached_tokens // size)
        needed = -(-tokens // size) - first if case.cached_tokens < tokens else 0
        assume(len(part.wanted) >= needed)
        parts.append(replace(part, wanted=part.wanted[len(part.wanted) - needed :]))
    return replace(case, parts=tuple(parts))
