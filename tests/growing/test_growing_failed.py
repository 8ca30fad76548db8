"""Prefills that break: `lease.fail` ends a lease, its readers learn why at once, and its blocks come back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kvflow import LeaseOutcome, LoadRequest
from kvflow.core.protocol.proof import FAILED
from kvflow.errors import LeaseExpired, PrefillFailed
from kvflow.testing import assert_quiet
from tests.growing.test_growing import landed
from tests.support.growing_pairs import BLOCKS, CONFIG, TAKEN, opened, pair_of, wanted
from tests.support.tests_support import Records, each, in_virtual_time


@each("staging", ["never", "always"])
@each("tokens", [0, 8, 16])
@in_virtual_time
async def test_a_prefill_that_breaks_ends_its_loads(staging: str, tokens: int) -> None:
    """With any number of landed tokens: none, some, all."""
    async with pair_of(staging) as pair, AsyncExitStack() as stack:
        records, lease = Records(), opened(pair)
        stack.enter_context(pair.producer.runtime._observers.adding(records))
        load = pair.consumer.runtime.start_load(wanted(pair, lease, deadline_s=9.0))
        if tokens < 16:
            lease.advance(tokens)
            await asyncio.sleep(0.1)
            assert len(landed(pair)) == tokens // 4
        assert lease.fail("out of memory") is lease
        with pytest.raises(PrefillFailed, match=r"request 'req' from 'producer' at .*could not compute the prompt"):
            await load
        assert await lease is LeaseOutcome.FAILED
        assert [(one.outcome, one.reason) for one in records.leases] == [("failed", "out of memory")]
        lease.fail("again")
        lease.advance(16)
        lease.revoke()
        assert (lease.state, pair.producer.runtime.statistics().serving.failed) == ("failed", 1)  # type: ignore[union-attr]
        for engine in (pair.producer, pair.consumer):
            assert_quiet(engine.runtime.statistics())
        pair.offer(BLOCKS, "next").revoke()


@each("grows", [True, False])
@in_virtual_time
async def test_the_seal_says_so_until_its_word_is_needed(grows: bool) -> None:
    """Whenever a reader comes: words that say so are the last that another lease gets."""
    async with pair_of(limits=replace(CONFIG.limits, leases_max=3)) as pair:
        lease = opened(pair) if grows else pair.offer(BLOCKS)
        seals, index = pair.producer.runtime._supervisor.seals, lease.ticket.first.seal_index
        secret = lease.ticket.first.lease_id
        lease.fail()
        assert seals.tokens_missing(index, secret) == FAILED
        late = pair.consumer.runtime.start_load(wanted(pair, lease))
        with pytest.raises(PrefillFailed):
            await late
        await lease
        assert seals.used == 0
        for name in ("one", "two", "three"):
            with pytest.raises(PrefillFailed, match=r"'req' .* could not compute the prompt"):
                await pair.consumer.runtime.load_blocks(wanted(pair, lease))
            pair.offer([8], name)
        assert seals.used == 3
        with pytest.raises(LeaseExpired):
            await pair.consumer.runtime.load_blocks(wanted(pair, lease))
        pair.producer.runtime._supervisor.incarnation.serving.close()


@each("end", ["fail", "decline"])
@in_virtual_time
async def test_a_reader_that_has_to_ask_for_the_lease_is_told_so(end: str) -> None:
    """Its ticket names no lease, like a ticket of a scheduler. It does not wait for a lease that will not come."""
    async with pair_of() as pair:
        producer, began_s = pair.producer.runtime, asyncio.get_running_loop().time()
        ticket = pair.offer([8], "hello").ticket.without_leases(
            request_id="req", block_ids=BLOCKS, num_tokens=16, ttl_s=9.0
        )
        if end == "fail":
            await opened(pair).fail("out of memory")
        else:
            producer.decline("req", "out of memory")
        with pytest.raises(PrefillFailed, match=r"'req': .*'producer'.* will not compute the prompt: out of memory"):
            await pair.consumer.runtime.load_blocks(LoadRequest("req", ticket, TAKEN))
        assert await pair.consumer.runtime.release_blocks(ticket), "there is nothing to give back"
        assert asyncio.get_running_loop().time() - began_s < CONFIG.limits.lease_wait_s
        again = pair.offer(BLOCKS)
        assert (await pair.consumer.runtime.load_blocks(LoadRequest("req", ticket, TAKEN))).tokens == 16
        assert await again is LeaseOutcome.READ
        producer._supervisor.incarnation.serving.close()
