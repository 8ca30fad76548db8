"""Loads that stand still: the error names what the load waits for, how much is missing, and whose fault it is."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from typing import Any

import pytest

from kvflow import LeaseOutcome, LoadRequest, Ticket
from kvflow.errors import Blame, DeadlineExceeded, PrefillFailed
from kvflow.testing import InprocPair, assert_quiet
from tests.runtime.test_events import Event
from tests.support.growing_pairs import BLOCKS, TAKEN, opened, pair_of, wanted
from tests.support.tests_support import Records, each, in_virtual_time


async def late(pair: InprocPair, request: LoadRequest) -> DeadlineExceeded:
    with pytest.raises(DeadlineExceeded, match=r"^request 'req' from 'producer' at tcp://127\.0\.0\.1:\d+: ") as caught:
        await pair.consumer.runtime.load_blocks(request)
    error = caught.value
    assert pickle.loads(pickle.dumps(error)).blame is error.blame
    return error


@each("staging", ["never", "always"])
@each("computed", [0, 8])
@in_virtual_time
async def test_a_prompt_that_is_never_computed_is_its_producers_fault(staging: str, computed: int) -> None:
    async with pair_of(staging) as pair:
        lease, records = opened(pair), Records()
        with pair.consumer.runtime._observers.adding(records):
            lease.advance(computed)
            error = await late(pair, wanted(pair, lease, deadline_s=2.0))
        assert str(error).endswith(f"deadline exceeded in phase 'compute': {computed} of 16 tokens computed")
        assert (error.phase, error.blame, error.retryable, error.quarantine) == ("compute", Blame.PEER, True, None)
        (record,) = records.loads
        assert record.phase == "compute"
        assert record.seconds["compute"] > 1.9
        assert sum(record.seconds.values()) == pytest.approx(2.0)
        lease.revoke()
        await lease
        assert_quiet(pair.consumer.runtime.statistics())


@in_virtual_time
async def test_a_load_that_waits_for_its_producer_says_how_long() -> None:
    """The network's times must not contain the time to compute a prompt."""
    async with pair_of() as pair:
        lease = opened(pair)
        load = pair.consumer.runtime.start_load(wanted(pair, lease))
        await asyncio.sleep(1.0)
        pair.producer.cache.fill(BLOCKS)
        lease.advance(16)
        report = await load
        assert list(report.seconds) == ["queued", "handshake", "plan", "post", "compute", "wire", "notify"]
        assert report.seconds["compute"] == pytest.approx(1.0, abs=0.01)
        assert report.seconds["wire"] < 0.01
        assert (
            "compute"
            not in (await pair.consumer.runtime.load_blocks(wanted(pair, pair.offer(BLOCKS, "whole")))).seconds
        )


@in_virtual_time
async def test_a_producer_that_stands_still_while_its_prompt_is_awaited() -> None:
    """Its progress is known as of the last look."""
    async with pair_of() as pair:
        lease = opened(pair)
        lease.advance(8)
        pair.producer.cache.fill(BLOCKS[:2])
        load = pair.consumer.runtime.start_load(wanted(pair, lease, deadline_s=3.0))
        await asyncio.sleep(1.0)
        pair.consumer.transport.faults.hold = True
        with pytest.raises(
            DeadlineExceeded, match=r"8 of 16 tokens computed, as far as is known: a fetch of its .* s$"
        ) as caught:
            await load
        assert caught.value.blame is Blame.PEER
        pair.consumer.transport.faults.hold = False
        pair.consumer.transport.perform()
        await load.settled()
        lease.revoke()


@in_virtual_time
async def test_a_rendezvous_whose_lease_is_never_opened_is_its_producers_fault() -> None:
    async with pair_of() as pair:
        hello = pair.producer.runtime.introduce()
        ticket = Ticket.rendezvous(hello, "req", ttl_s=9.0)
        error = await late(pair, LoadRequest("req", ticket, TAKEN, deadline_s=1.0))
        assert (error.phase, error.blame) == ("compute", Blame.PEER)
        assert str(error).endswith("deadline exceeded in phase 'compute': its lease is not opened yet")


@in_virtual_time
async def test_a_payload_that_never_comes_is_its_producers_fault() -> None:
    async with pair_of() as pair:
        lease = opened(pair, payload=True)
        pair.producer.cache.fill(BLOCKS)
        lease.advance(16)
        error = await late(pair, wanted(pair, lease, deadline_s=1.0))
        assert (error.phase, error.blame) == ("compute", Blame.PEER)
        assert str(error).endswith(": all 16 tokens are read, but the promised payload has not come")
        lease.revoke()


@in_virtual_time
async def test_reads_that_do_not_end_are_counted() -> None:
    async with pair_of() as pair:
        pair.consumer.transport.faults.hold = True
        error = await late(pair, wanted(pair, pair.offer(BLOCKS), deadline_s=1.0))
        assert (error.phase, error.blame) == ("wire", Blame.NOBODY)
        assert "in phase 'wire': no read has ended for 1 s, " in str(error)
        assert str(error).endswith(" are under way: the peer or the network stands still")
        pair.consumer.transport.perform()
        assert error.quarantine is not None
        await error.quarantine.settled()


@in_virtual_time
async def test_an_event_that_does_not_happen_is_named() -> None:
    async with pair_of() as pair:
        error = await late(pair, wanted(pair, pair.offer(BLOCKS), deadline_s=1.0, after=Event()))
        assert (error.phase, error.blame) == ("queued", Blame.NOBODY)
        assert str(error).endswith("in phase 'queued': its event `after` has not happened on this engine's device")


@in_virtual_time
async def test_a_ticket_that_is_not_brought_is_named() -> None:
    async with pair_of() as pair:
        over = pair.offer(BLOCKS)
        over.revoke()
        assert await over is LeaseOutcome.REVOKED

        async def again(attempts: Any) -> Any:
            await asyncio.get_running_loop().create_future()

        error = await late(pair, replace(wanted(pair, over, deadline_s=1.0), again=again))
        assert str(error).endswith(
            "in phase 'handshake': no ticket is left, and `again` has not returned another ticket"
        )


@in_virtual_time
async def test_an_offer_that_fails_is_no_deadline() -> None:
    async with pair_of() as pair:
        lease = opened(pair)
        load = pair.consumer.runtime.start_load(wanted(pair, lease, deadline_s=9.0))
        await asyncio.sleep(1.0)
        lease.fail("out of memory")
        with pytest.raises(PrefillFailed, match="out of memory"):
            await load
