"""Looks at leases that grow: one read for all who wait for a rank, none when nobody does, at once when told to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvflow.runtime.consumer import seal_watch
from kvflow.runtime.consumer.seal_watch import LOOK_EVERY_S, SealWatches

from kvflow import Lease, LeaseOutcome, Limits, Load, LoadRequest, ServeRequest
from kvflow.errors import DeadlineExceeded, TransferFailed
from kvflow.runtime.load.news import Follower
from kvflow.testing import InprocPair
from kvflow.transport.base import TransportError
from tests.runtime.test_growing import pair_of
from tests.tests_support import in_virtual_time

COUNT = 6


def watches_of(pair: InprocPair) -> SealWatches:
    cache = pair.consumer.runtime._supervisor.cache
    assert cache is not None
    return cache.loader._gear.watches


def reads(pair: InprocPair) -> int:
    return pair.consumer.transport.statistics.reads


def many(pair: InprocPair, **more: Any) -> tuple[list[Lease], list[Any]]:
    """Leases of one block each, of which nothing is computed, and loads of them that wait."""
    serve, start = pair.producer.runtime.serve_blocks, pair.consumer.runtime.start_load
    leases = [serve(ServeRequest(f"req-{at}", [at], num_tokens=4, computed_tokens=0)) for at in range(COUNT)]
    loads = [start(LoadRequest(f"req-{at}", lease.ticket, [at], **more)) for at, lease in enumerate(leases)]
    return leases, loads


@in_virtual_time
async def test_one_look_is_for_all() -> None:
    async with pair_of() as pair:
        leases, loads = many(pair)
        await asyncio.sleep(0.1)
        assert len(watches_of(pair)) == 1
        before = reads(pair)
        await asyncio.sleep(0.1)
        looks = reads(pair) - before
        assert 10 <= looks <= 0.1 / LOOK_EVERY_S + 1, "a look is for all of them"
        await asyncio.sleep(5.0)
        before = reads(pair)
        await asyncio.sleep(1.0)
        assert 90 <= reads(pair) - before <= 101, "less often where nothing has changed for long"
        for lease in leases:
            lease.advance(4)
        await asyncio.gather(*loads)
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * COUNT
        assert len(watches_of(pair)) == 0
        before = reads(pair)
        await asyncio.sleep(1.0)
        assert reads(pair) == before, "nobody waits, nobody looks"


@in_virtual_time
async def test_a_nudge_is_a_look_at_once() -> None:
    async with pair_of() as pair:
        leases, loads = many(pair)
        await asyncio.sleep(5.0)
        before = reads(pair)
        watches_of(pair).nudge("of nobody")
        assert reads(pair) == before
        watches_of(pair).nudge(leases[1].ticket.first.lease_id)
        assert reads(pair) == before + 1
        watches_of(pair).nudge(leases[1].ticket.first.lease_id)
        assert reads(pair) == before + 1, "one look at a time: the next one follows it"
        for load in loads:
            load.cancel()
        await asyncio.wait([asyncio.ensure_future(load.settled()) for load in loads])
        for lease in leases:
            lease.revoke()


@in_virtual_time
async def test_small_steps_are_not_read_one_by_one() -> None:
    """Of a lease that advances by a token at a time little is worth a read of its own before it is complete."""
    async with pair_of(limits=Limits()) as pair:
        blocks, taken = [0, 1, 2, 3], [4, 5, 6, 7]
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", blocks, num_tokens=16, computed_tokens=0))
        load = pair.consumer.runtime.start_load(LoadRequest("req", lease.ticket, taken))
        for tokens in range(1, 16):
            lease.advance(tokens)
            await asyncio.sleep(0.02)
        assert not load.done
        pair.consumer.cache.assert_untouched(taken)
        lease.advance(16)
        await load
        pair.assert_loaded(taken, blocks)


@in_virtual_time
async def test_a_producer_tells_at_once_that_a_lease_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds that not all is there asks for news, also if what is there is not worth a read."""
    monkeypatch.setattr(seal_watch, "LOOK_EVERY_S", 10.0)
    monkeypatch.setattr(seal_watch, "_LOOK_MOST_S", 10.0)
    async with pair_of(limits=Limits()) as pair:
        blocks, taken = [0, 1, 2, 3], [4, 5, 6, 7]
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", blocks, num_tokens=16, computed_tokens=0))
        load = pair.consumer.runtime.start_load(LoadRequest("req", lease.ticket, taken))
        await asyncio.sleep(1.0)
        lease.advance(16)
        await asyncio.sleep(1.0)
        assert load.done
        pair.assert_loaded(taken, blocks)


@in_virtual_time
async def test_the_look_that_finds_a_lease_complete_wakes_who_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the producer does not tell of it."""

    async def told_nothing(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Follower, "_ask", told_nothing)
    monkeypatch.setattr(seal_watch, "LOOK_EVERY_S", 10.0)
    monkeypatch.setattr(seal_watch, "_LOOK_MOST_S", 10.0)
    async with pair_of(limits=Limits()) as pair:
        blocks, taken = [0, 1, 2, 3], [4, 5, 6, 7]
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", blocks, num_tokens=16, computed_tokens=0))
        load = pair.consumer.runtime.start_load(LoadRequest("req", lease.ticket, taken))
        seen = asyncio.create_task(_followed(load))
        await asyncio.sleep(1.0)
        lease.advance(16)
        watches_of(pair).nudge(lease.ticket.first.lease_id)
        await asyncio.sleep(1.0)
        assert load.done
        assert (await seen)[-1] == 16


async def _followed(load: Load) -> list[int]:
    return [progress.tokens async for progress in load]


@in_virtual_time
async def test_a_look_that_fails_ends_who_waits_for_it() -> None:
    async with pair_of() as pair:
        leases, loads = many(pair)
        await asyncio.sleep(0.1)
        pair.consumer.transport.faults.fail_next.append(TransportError("scripted"))
        for load in loads:
            with pytest.raises(TransferFailed):
                await load
        assert len(watches_of(pair)) == 0
        for lease in leases:
            lease.revoke()


@in_virtual_time
async def test_a_load_whose_time_is_over_waits_for_nobody() -> None:
    """Nor do the others for it."""
    async with pair_of() as pair:
        leases, loads = many(pair, deadline_s=0.5)
        for lease in leases[1:]:
            lease.advance(4)
        with pytest.raises(DeadlineExceeded):
            await loads[0]
        await asyncio.gather(*loads[1:])
        leases[0].revoke()
