"""Prefills that break: `lease.fail` ends a lease, its readers learn why at once, and its blocks come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvflow import LeaseOutcome, LoadRequest, ServeRequest, blocking
from kvflow.core.protocol.proof import FAILED
from kvflow.errors import LeaseExpired, PrefillFailed, RequestError, UsageError
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.testing import CacheSize, assert_quiet, inproc_pair
from tests.runtime.test_growing import BLOCKS, CONFIG, TAKEN, landed, opened, pair_of, wanted
from tests.support.tests_support import WAIT_S, each, in_virtual_time


class Kept:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.leases: list[LeaseRecord] = []

    def lease_ended(self, record: LeaseRecord) -> None:
        self.leases.append(record)

    def load_ended(self, record: LoadRecord) -> None:
        pass


@each("staging", ["never", "always"])
@each("tokens", [0, 8, 16])
@in_virtual_time
async def test_a_prefill_that_breaks_ends_its_loads(staging: str, tokens: int) -> None:
    """Whatever has landed: before the first token, in the middle, and also when all were there."""
    async with pair_of(staging) as pair:
        lease = opened(pair)
        load = pair.consumer.runtime.start_load(wanted(pair, lease, deadline_s=9.0))
        if tokens < 16:
            lease.advance(tokens)
            await asyncio.sleep(0.1)
            assert len(landed(pair)) == tokens // 4
        assert lease.fail("out of memory") is lease
        with pytest.raises(PrefillFailed, match=r"request 'req' from 'producer' at .*could not compute the prompt"):
            await load
        assert await lease is LeaseOutcome.FAILED
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
        seals, index = pair.producer.runtime._supervisor._seals, lease.ticket.first.seal_index
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
        pair.producer.runtime._supervisor.cache.serving.close()


@each("end", ["fail", "decline"])
@in_virtual_time
async def test_a_reader_that_has_to_ask_for_the_lease_is_told_so(end: str) -> None:
    """Its ticket names no lease, such as one that a scheduler made; it waits for none that will not come."""
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
        producer._supervisor.cache.serving.close()


@in_virtual_time
async def test_a_load_of_a_complete_lease_that_fails_is_no_success() -> None:
    """A ticket that was made when all was there: its load finds out by the seal that comes with its first read."""
    async with pair_of() as pair:
        lease = pair.offer(BLOCKS)
        lease.fail("the device was lost")
        with pytest.raises(PrefillFailed):
            await pair.consumer.runtime.load_blocks(pair.wanted(lease, TAKEN))
        assert await lease is LeaseOutcome.FAILED


@in_virtual_time
async def test_what_is_recorded() -> None:
    async with pair_of() as pair:
        kept = Kept()
        with pair.producer.runtime.observed_by(kept):
            await opened(pair).fail("out of memory")
        assert [(one.outcome, one.reason) for one in kept.leases] == [("failed", "out of memory")]


@in_virtual_time
async def test_one_rank_that_fails_is_enough() -> None:
    """... and the lease of another request is not concerned."""
    async with pair_of() as pair:
        broken = opened(pair)
        whole = pair.offer([8], "whole")
        broken.fail()
        await pair.consumer.runtime.load_blocks(pair.wanted(whole, [1]))
        assert (await whole, await broken) == (LeaseOutcome.READ, LeaseOutcome.FAILED)


async def test_what_is_no_reason_and_no_loop() -> None:
    async with inproc_pair() as pair:
        lease = opened(pair)
        with pytest.raises(RequestError, match="'req': fail: reason"):
            lease.fail(7)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"'req': fail\(\)"):
            await asyncio.to_thread(lease.fail)
        with pytest.raises(RequestError, match="num_tokens"):
            pair.producer.runtime.serve_blocks(ServeRequest("many", [7], num_tokens=FAILED))
        lease.revoke()


@pytest.mark.nixl
def test_in_a_callers_thread() -> None:
    kv_caches, cache = CacheSize().make("prefill")
    with blocking.Runtime(replace(CONFIG, engine_id="prefill")) as producer:
        producer.register_kv_caches(kv_caches, cache.layout)
        lease = producer.serve_blocks(ServeRequest("req", BLOCKS, num_tokens=16, ttl_s=60.0, computed_tokens=0))
        assert lease.fail("out of memory").wait(WAIT_S) is LeaseOutcome.FAILED
