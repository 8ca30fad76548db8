"""Leases whose readers have died are given back soon; those of readers that may live are not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest

from kvflow import Lease, LeaseOutcome
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import life_of
from kvflow.core.protocol.notifications import ReadDone, Renew
from kvflow.errors import LeaseExpired
from kvflow.runtime.producer.attendance import LOOK_EVERY_S, REFUSED_MAX
from kvflow.testing import InprocCluster, inproc_pair
from kvflow.testing.side_channel import Exchange, InprocListener
from tests.runtime.test_rendezvous import rendezvous
from tests.support.pairs import EnginePair
from tests.support.tests_support import PATIENT, Records, each, in_virtual_time

CONFIG = replace(PATIENT, lease_ttl_s=100.0, cancel_grace_s=0.05)
OTHER = "other/0.0.0#1"
SOON_S = LOOK_EVERY_S * (2 + REFUSED_MAX)
"""A look that was due, the looks that show a death, and the one that acts on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene(EnginePair):
    """A pair, and what can befall the consumer's process as its producer sees it."""

    exchange: Exchange
    records: Records

    @property
    def address(self) -> str:
        return self.reader.address

    @property
    def listener_there(self) -> InprocListener:
        return self.exchange.listeners[self.address]

    def refuse(self) -> InprocListener:
        """Nobody listens there any more."""
        return self.exchange.listeners.pop(self.address)

    def answer_by(self, arrive: Callable[[list[bytes], Callable[[list[bytes]], None]], None]) -> None:
        self.listener_there.arrive = arrive  # type: ignore[method-assign]

    def fall_silent(self) -> None:
        """Connections are taken, and nothing is answered."""
        self.answer_by(lambda *_: None)

    def be_replaced(self, incarnation: str = "another") -> None:
        """Another process of that name listens there."""
        shown = messages.ClockShown(incarnation=incarnation, clock_s=0.0)
        self.answer_by(lambda _, reply: reply(codec.encode_frames(codec.our_header(b""), shown)))

    def tell(self, said: ReadDone | Renew) -> None:
        """The producer hears that."""
        self.producer.transport.deliver(codec.encode(said))

    def answer_as_ever(self) -> None:
        self.be_replaced(made_of(self.consumer.transport.name))

    async def reading(self, name: str = "r", **terms: int) -> tuple[Lease, asyncio.Task[object]]:
        """A lease, and a load that is in the middle of it and has said that it is there."""
        lease = self.offer([3, 4], name, **terms)
        load = await self.hold(lease, [0, 1])
        await asyncio.sleep(0.3)
        assert self.serving.renewals == 1
        return lease, load

    async def assert_stays(self, lease: Lease) -> None:
        await asyncio.sleep(20 * SOON_S)
        assert (lease.done, self.serving.deserted) == (False, 0)


def made_of(agent: str) -> str:
    """The incarnation in the name of an agent."""
    life = life_of(agent, "consumer")
    assert life is not None
    return life[1]


@contextlib.asynccontextmanager
async def scene(*, warm: bool = True) -> AsyncIterator[Scene]:
    cluster, records = InprocCluster(), Records()
    worlds = {"producer_world": cluster.world(), "consumer_world": cluster.world()}
    async with inproc_pair(config=CONFIG, observers=[records], **worlds) as pair:
        made = Scene(producer=pair.producer, consumer=pair.consumer, exchange=cluster._exchange, records=records)
        if warm:
            lease = made.offer([1], "warm")
            await made.load(lease)
            await lease
        yield made
        made.release_reads()
        await made.assert_all_ended()


async def gone(load: asyncio.Task[object], made: Scene) -> None:
    """What a reader that lived after all is told."""
    made.overwrite()
    made.release_reads()
    with pytest.raises(LeaseExpired):
        await load


@each("fate", [Scene.refuse, Scene.be_replaced])
@in_virtual_time
async def test_the_lease_of_a_reader_that_has_died_is_given_back(
    fate: Callable[[Scene], object], caplog: pytest.LogCaptureFixture
) -> None:
    async with scene() as made:
        lease, load = await made.reading()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            fate(made)
            async with asyncio.timeout(SOON_S):
                assert await lease is LeaseOutcome.EXPIRED
        assert (made.serving.deserted, made.serving.expired, made.offered.leased) == (1, 1, 0)
        (line,) = [text for text in caplog.messages if "given back" in text]
        assert line.startswith("lease r is given back: its reader engine 'consumer'")
        assert made.address in line
        (record,) = [one for one in made.records.leases if one.request_id == "r"]
        assert (record.outcome, record.reason in line) == (LeaseOutcome.EXPIRED, True)
        await gone(load, made)


@each("fate", [Scene.fall_silent, Scene.answer_as_ever])
@in_virtual_time
async def test_a_reader_that_may_live_keeps_its_lease(fate: Callable[[Scene], object]) -> None:
    """It is stopped, or cut off; or all is well."""
    async with scene() as made:
        lease, load = await made.reading()
        fate(made)
        await made.assert_stays(lease)
        await made.let_go(load)
        assert await lease is LeaseOutcome.READ


@in_virtual_time
async def test_a_listener_that_is_gone_for_a_moment_is_no_death() -> None:
    async with scene() as made:
        lease, load = await made.reading()
        for _ in range(10):
            listener = made.refuse()
            await asyncio.sleep(LOOK_EVERY_S * (REFUSED_MAX - 1.1))
            made.exchange.listeners[made.address] = listener
            await asyncio.sleep(LOOK_EVERY_S)
        assert not lease.done
        await made.let_go(load)


@each("why", ["its address never led there", "it said nothing"])
@in_virtual_time
async def test_of_a_reader_that_it_has_not_seen_the_producer_cannot_know(why: str) -> None:
    """It may be behind something that translates addresses."""
    async with scene(warm=why == "it said nothing") as made:
        listener = made.refuse()
        lease, load = (made.offer([3], "r"), None) if why == "it said nothing" else await made.reading()
        await made.assert_stays(lease)
        made.exchange.listeners[made.address] = listener
        if load is not None:
            await made.let_go(load)


@in_virtual_time
async def test_a_lease_that_others_are_to_read_is_kept_for_them() -> None:
    async with scene() as made:
        lease, load = await made.reading(reader_count=2)
        made.refuse()
        await made.assert_stays(lease)
        made.tell(ReadDone((lease.ticket.lease_id,), OTHER, 1, 1))
        async with asyncio.timeout(SOON_S):
            assert await lease is LeaseOutcome.EXPIRED
        await gone(load, made)


@in_virtual_time
async def test_another_reader_that_has_come_keeps_the_lease() -> None:
    """As one that a router has sent there after the first one died."""
    async with scene() as made:
        lease, load = await made.reading()
        made.refuse()
        made.tell(Renew((lease.ticket.lease_id,), OTHER))
        await made.assert_stays(lease)
        await made.let_go(load)


@in_virtual_time
async def test_a_word_of_a_reader_shows_that_it_lives_after_all() -> None:
    async with scene() as made:
        lease, load = await made.reading(reader_count=2)
        listener = made.refuse()
        await asyncio.sleep(SOON_S)
        made.exchange.listeners[made.address] = listener
        for reader in (made.consumer.transport.name, OTHER):
            made.tell(Renew((lease.ticket.lease_id,), reader))
        made.tell(ReadDone((lease.ticket.lease_id,), OTHER, 1, 1))
        await made.assert_stays(lease)
        await made.let_go(load)
        assert await lease is LeaseOutcome.READ


@each("how", ["asked early", "asked", "keeps"])
@in_virtual_time
async def test_who_has_asked_for_an_offer_or_keeps_a_lease_is_at_it(how: str) -> None:
    """It may die before the offer is there."""
    async with scene() as made, contextlib.AsyncExitStack() as kept:
        ticket = rendezvous(made, "r")
        lease = None if how == "asked early" else made.offer([3, 4], "r")
        if how == "keeps":
            assert lease is not None
            kept.enter_context(made.reader.keep_leases(lease.ticket))
        else:
            made.transport.faults.hold = True
            load = made.start(ticket, [0, 1])
        await asyncio.sleep(0.3)
        made.refuse()
        await asyncio.sleep(1.0)
        lease = lease or made.offer([3, 4], "r")
        async with asyncio.timeout(SOON_S):
            assert await lease is LeaseOutcome.EXPIRED
        if how != "keeps":
            await gone(load, made)


@in_virtual_time
async def test_readers_without_open_leases_are_left_alone() -> None:
    async with scene() as made:
        asked = 0

        def count(frames: list[bytes], reply: Callable[[list[bytes]], None]) -> None:
            nonlocal asked
            asked += 1

        made.answer_by(count)
        await asyncio.sleep(60.0)
        assert asked == 0
