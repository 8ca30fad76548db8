"""Looks at the seals of leases that grow: when an answer came, and every so often where none does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvflow import Lease, LeaseOutcome, Limits, Load, LoadRequest, ServeRequest
from kvflow.errors import DeadlineExceeded, TransferFailed
from kvflow.growing import growing_loads
from kvflow.growing.growing_loads import SEAL_FETCH_ASKED_S, SEAL_FETCH_EVERY_S
from kvflow.growing.lease_questions import LeaseQuestions
from kvflow.testing import InprocPair
from kvflow.transport.base import TransportError
from kvflow.transport.inproc import InprocTransport
from tests.support.growing_pairs import pair_of
from tests.support.tests_support import in_virtual_time

COUNT = 6
OFFERED, LOADED = [0, 1, 2, 3], [4, 5, 6, 7]


def reads(pair: InprocPair) -> int:
    return pair.consumer.transport.statistics.reads


def many(pair: InprocPair, **more: Any) -> tuple[list[Lease], list[Any]]:
    """Leases of one block each, before they are computed, and loads that wait for them."""
    serve, start = pair.producer.runtime.serve_blocks, pair.consumer.runtime.start_load
    leases = [serve(ServeRequest(f"req-{at}", [at], num_tokens=4, computed_tokens=0)) for at in range(COUNT)]
    loads = [start(LoadRequest(f"req-{at}", lease.ticket, [at], **more)) for at, lease in enumerate(leases)]
    return leases, loads


@contextlib.asynccontextmanager
async def flowing() -> AsyncIterator[tuple[InprocPair, Lease, Load]]:
    """A lease before its prompt is computed, and its load, with the usual interval between looks."""
    async with pair_of(limits=Limits()) as pair:
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", OFFERED, num_tokens=16, computed_tokens=0))
        yield pair, lease, pair.consumer.runtime.start_load(LoadRequest("req", lease.ticket, LOADED))


def tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No question is ever answered."""

    async def told_nothing(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(LeaseQuestions, "_ask_until_ended", told_nothing)


@in_virtual_time
async def test_who_waits_looks_now_and_then() -> None:
    async with pair_of() as pair:
        leases, loads = many(pair)
        await asyncio.sleep(5.0)
        before = reads(pair)
        await asyncio.sleep(1.0)
        assert reads(pair) - before <= COUNT * (1.0 / SEAL_FETCH_ASKED_S + 1)
        for lease in leases:
            lease.advance(4)
        await asyncio.gather(*loads)
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * COUNT
        before = reads(pair)
        await asyncio.sleep(1.0)
        assert reads(pair) == before, "nobody waits, nobody looks"


@in_virtual_time
async def test_a_producer_expects_the_notifications_of_readers_once_a_lease_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease that advances often would otherwise keep the agents' thread polling at the shortest interval."""
    expected: list[int] = []
    monkeypatch.setattr(InprocTransport, "expect_notifications", lambda _: expected.append(lease._opened.held.computed))
    async with pair_of() as pair:
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", OFFERED, num_tokens=16, computed_tokens=0))
        for tokens in range(1, 16):
            lease.advance(tokens)
        assert expected == []
        lease.advance(16)
        assert expected == [16]
        await lease.revoke()


@in_virtual_time
async def test_small_steps_are_not_read_one_by_one() -> None:
    """Of a lease that advances by a token at a time little is worth a read of its own before it is complete."""
    async with flowing() as (pair, lease, load):
        for tokens in range(1, 16):
            lease.advance(tokens)
            await asyncio.sleep(0.02)
        assert not load.done
        pair.consumer.cache.assert_untouched(LOADED)
        lease.advance(16)
        await load
        pair.assert_loaded(LOADED, OFFERED)


@in_virtual_time
async def test_a_producer_tells_at_once_that_a_lease_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of an incomplete lease asks for changes, also if the new tokens are not worth a read."""
    monkeypatch.setattr(growing_loads, "SEAL_FETCH_EVERY_S", 10.0)
    async with flowing() as (pair, lease, load):
        await asyncio.sleep(1.0)
        lease.advance(16)
        await asyncio.sleep(1.0)
        assert load.done
        pair.assert_loaded(LOADED, OFFERED)


@in_virtual_time
async def test_where_no_answer_comes_a_look_finds_the_lease_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """And wakes who follows the load."""
    tell_nothing(monkeypatch)
    async with flowing() as (pair, lease, load):
        seen = asyncio.create_task(_followed(load))
        await asyncio.sleep(1.0)
        assert not load.done
        lease.advance(16)
        await asyncio.sleep(2 * SEAL_FETCH_EVERY_S)
        assert load.done
        assert (await seen)[-1] == 16
        pair.assert_loaded(LOADED, OFFERED)


async def _followed(load: Load) -> list[int]:
    return [progress.tokens async for progress in load]


@in_virtual_time
async def test_a_look_that_fails_ends_its_own_load_alone() -> None:
    async with pair_of() as pair:
        leases, loads = many(pair)
        await asyncio.sleep(0.05)
        pair.consumer.transport.faults.fail_next.append(TransportError("scripted"))
        await asyncio.sleep(SEAL_FETCH_EVERY_S)
        for lease in leases:
            lease.advance(4)
        ended = await asyncio.gather(*loads, return_exceptions=True)
        assert sum(isinstance(one, TransferFailed) for one in ended) == 1
        assert sum(isinstance(one, BaseException) for one in ended) == 1
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
