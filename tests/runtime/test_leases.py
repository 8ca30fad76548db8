"""How long leases last: renewal, doubt about clocks, revoking and releasing. Time moves only when a test moves it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import msgspec
import pytest
from tests_support import PATIENT, altered, limited, turns, until

from kvflow import Config, Lease, LeaseOutcome, LoadReport
from kvflow.core.protocol import messages
from kvflow.errors import LeaseExpired, RequestError
from kvflow.runtime.channel.protocol import ListenerStatistics
from kvflow.runtime.clock import Timer
from kvflow.runtime.consumer.load import LoadingStatistics
from kvflow.runtime.producer.lease import ServingStatistics
from kvflow.runtime.world import World
from kvflow.testing import InprocPair, ManualClock, assert_quiet, inproc_pair

BASE = limited(replace(PATIENT, lease_ttl_s=30.0, cancel_grace_s=0.05, drain_timeout_s=0.2), seal_hold_s=0.05)
SLICED = limited(BASE, slice_bytes_max=256, slices_in_flight_max=1)
SEAL_BYTES = 16


@dataclass(frozen=True, slots=True)
class Timed:
    """A pair whose clocks stand still, and show different times."""

    pair: InprocPair
    producer_clock: ManualClock
    consumer_clock: ManualClock

    async def pass_time(self, seconds: float) -> None:
        """Move both clocks in small steps; after each one everything that follows from it happens."""
        for _ in range(20):
            self.consumer_clock.advance(seconds / 20)
            await settle()
            self.producer_clock.advance(seconds / 20)
            await settle()

    @property
    def serving(self) -> ServingStatistics:
        statistics = self.pair.producer.runtime.statistics().serving
        assert statistics is not None
        return statistics

    @property
    def loading(self) -> LoadingStatistics:
        statistics = self.pair.consumer.runtime.statistics().loading
        assert statistics is not None
        return statistics

    @property
    def listener(self) -> ListenerStatistics:
        statistics = self.pair.producer.runtime.statistics().listener
        assert statistics is not None
        return statistics

    @property
    def leased(self) -> int:
        blocks = self.pair.producer.runtime.statistics().blocks
        assert blocks is not None
        return blocks.leased

    async def load(self, lease: Lease, block_ids: list[int]) -> LoadReport:
        return await self.pair.consumer.runtime.load_blocks(self.pair.wanted(lease, block_ids))

    async def start_held_load(self, lease: Lease, block_ids: list[int]) -> asyncio.Task[LoadReport]:
        """A load whose first read is posted and held by the transport."""
        transport = self.pair.consumer.transport
        transport.faults.hold = True
        before = len(transport.held)
        task = asyncio.create_task(self.load(lease, block_ids))
        await until(lambda: len(transport.held) != before)
        return task

    async def let_go(self, task: asyncio.Task[LoadReport]) -> LoadReport:
        """Perform whatever is held until the load has ended."""
        while not task.done():
            self.pair.consumer.transport.perform()
            await asyncio.sleep(0)
        self.pair.consumer.transport.faults.hold = False
        return await task

    def overwrite(self) -> None:
        """The producer reuses its blocks."""
        for tensor in self.pair.producer.kv_caches.values():
            tensor.fill_(12345.0)


async def settle() -> None:
    """Let everything happen that needs no time to pass."""
    await turns(10)


@contextlib.asynccontextmanager
async def timed_pair(config: Config = BASE) -> AsyncIterator[Timed]:
    clocks = (ManualClock(1e6), ManualClock(5.0))
    worlds = [World(clock=lambda clock=clock: clock) for clock in clocks]
    async with inproc_pair(config=config, producer_world=worlds[0], consumer_world=worlds[1]) as pair:
        timed = Timed(pair, *clocks)
        yield timed
        await timed.pass_time(2 * config.limits.seal_hold_s)
        for engine in (pair.producer, pair.consumer):
            assert_quiet(engine.runtime.statistics())


async def ended(timed: Timed, lease: Lease) -> LeaseOutcome:
    """How a lease ends that only the hold keeps now."""
    await timed.pass_time(1.0)
    return await lease


def renew(lease: Lease, reader: str = "reader") -> bytes:
    return messages.encode(messages.Renew(lease_ids=(lease.ticket.lease_id,), reader=reader))


# --- the producer's side of renewal


async def test_a_lease_ends_when_its_time_is_over_and_not_before() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        await timed.pass_time(29.9)
        assert not lease.done
        await timed.pass_time(0.2)
        assert await lease is LeaseOutcome.EXPIRED


async def test_a_renewal_gives_a_lease_its_time_again() -> None:
    async with timed_pair() as timed:
        lease, other = timed.pair.offer([3]), timed.pair.offer([4], "other")
        await timed.pass_time(20.0)
        timed.pair.producer.transport.deliver(renew(lease))
        await timed.pass_time(29.0)
        assert (other.done, lease.done, timed.serving.renewals) == (True, False, 1)
        await timed.pass_time(2.0)
        assert await lease is LeaseOutcome.EXPIRED


async def test_a_renewal_never_shortens_a_lease() -> None:
    async with timed_pair(replace(BASE, lease_lifetime_s=10.0)) as timed:
        lease = timed.pair.offer([3])  # its time is longer than what renewals may make of it
        await timed.pass_time(5.0)
        timed.pair.producer.transport.deliver(renew(lease))
        await timed.pass_time(24.0)
        assert not lease.done
        await timed.pass_time(2.0)
        assert await lease is LeaseOutcome.EXPIRED


async def test_no_reader_keeps_a_lease_beyond_its_lifetime() -> None:
    async with timed_pair(replace(BASE, lease_lifetime_s=100.0)) as timed:
        lease = timed.pair.offer([3])
        for _ in range(9):
            await timed.pass_time(11.0)
            timed.pair.producer.transport.deliver(renew(lease))
        assert not lease.done
        await timed.pass_time(1.5)
        assert await lease is LeaseOutcome.EXPIRED


async def test_renewals_that_are_late_unknown_or_duplicate_change_nothing() -> None:
    async with timed_pair() as timed:
        transport = timed.pair.producer.transport
        ended, lease = timed.pair.offer([4], "ended"), timed.pair.offer([3], reader_count=2)
        ended.revoke()
        done = messages.ReadDone(lease_id=lease.ticket.lease_id, reader="faster", numerator=1, denominator=1)
        unknown = messages.encode(messages.Renew(lease_ids=("ab" * 16,), reader="reader"))
        for payload in (renew(ended), unknown, messages.encode(done), renew(lease, "faster")):
            transport.deliver(payload)  # the last one was overtaken by its reader's own end
        await settle()
        assert (timed.serving.late_notifications, timed.serving.renewals) == (3, 0)
        for _ in range(3):
            transport.deliver(renew(lease))
        await timed.pass_time(31.0)
        assert await lease is LeaseOutcome.EXPIRED
        transport.deliver(renew(lease))
        await settle()
        assert (timed.serving.late_notifications, timed.serving.open_leases) == (4, 0)


class EagerClock(ManualClock):
    """Its timers fire early, as those of a loop that counts milliseconds may."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return super().call_later(delay_s * 0.9, callback)


async def test_a_timer_that_is_early_shortens_neither_a_lease_nor_a_hold() -> None:
    clock = EagerClock()
    async with inproc_pair(
        config=BASE, producer_world=World(clock=lambda: clock), consumer_world=World(clock=ManualClock)
    ) as pair:
        lease = pair.offer([3])
        clock.advance(29.99)
        assert not lease.done
        assert lease.state == "offered"
        clock.advance(0.01)
        assert lease.state == "expired"
        clock.advance(0.0499)
        assert not lease.done
        clock.advance(0.0002)
        assert await lease is LeaseOutcome.EXPIRED


# --- the consumer's side


async def test_a_load_keeps_its_lease_open_for_as_long_as_it_takes() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        task = await timed.start_held_load(lease, [0])
        await timed.pass_time(300.0)
        assert not lease.done
        await timed.let_go(task)
        assert await ended(timed, lease) is LeaseOutcome.READ
        timed.pair.assert_loaded([0], [3])
        assert timed.serving.renewals == timed.loading.renewals > 300 / 30


async def test_renewals_begin_at_half_of_the_time_left_and_go_on_at_thirds() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        task = await timed.start_held_load(lease, [0])
        clock = timed.consumer_clock
        seen = []
        for second in range(60):
            clock.advance(1.0)
            if timed.loading.renewals > len(seen):
                seen.append(second + 1)
        await settle()
        assert seen == [15, 25, 35, 45, 55]
        await timed.let_go(task)
        assert await ended(timed, lease) is LeaseOutcome.READ


async def test_lost_renewals_cost_the_load_and_nothing_else() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        task = await timed.start_held_load(lease, [0])
        timed.pair.consumer.transport.faults.drop_notifications = True
        await timed.pass_time(40.0)
        assert await lease is LeaseOutcome.EXPIRED
        timed.overwrite()
        with pytest.raises(LeaseExpired):
            await timed.let_go(task)


async def test_a_reader_that_never_ends_loses_its_lease_at_the_end_of_its_lifetime() -> None:
    async with timed_pair(replace(BASE, lease_lifetime_s=100.0)) as timed:
        lease = timed.pair.offer([3])
        task = await timed.start_held_load(lease, [0])
        await timed.pass_time(99.0)
        assert not lease.done
        await timed.pass_time(2.0)
        assert await lease is LeaseOutcome.EXPIRED
        with pytest.raises(LeaseExpired):
            await timed.let_go(task)


async def test_short_loads_renew_nothing_and_leave_no_timer_behind() -> None:
    async with timed_pair() as timed:
        for number in range(5):
            lease = timed.pair.offer([3], f"req-{number}")
            await timed.load(lease, [0])
            assert timed.consumer_clock.pending <= 2, "one for renewals, one that looks for idle peers"
        await timed.pass_time(40.0)
        assert (timed.consumer_clock.pending, timed.loading.renewals, timed.serving.renewals) == (1, 0, 0)


async def test_a_load_that_has_ended_renews_no_more() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3], reader_count=2)
        task = await timed.start_held_load(lease, [0])
        await timed.pass_time(20.0)
        assert timed.loading.renewals == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await timed.let_go(task)
        await timed.pass_time(60.0)
        assert (await lease, timed.loading.renewals) == (LeaseOutcome.EXPIRED, 1)


@pytest.mark.parametrize(("bytes_max", "messages"), [(4096, 1), (400, 1), (200, 2), (1, 8)])
async def test_a_peer_gets_one_message_for_all_its_leases(bytes_max: int, messages: int) -> None:
    """As far as they fit; a producer whose limit is too small for one drops them, counted."""
    async with timed_pair(limited(BASE, notification_bytes_max=bytes_max)) as timed:
        leases = [timed.pair.offer([block], f"req-{block}") for block in range(8)]
        tasks = [await timed.start_held_load(lease, [index]) for index, lease in enumerate(leases)]
        timed.consumer_clock.advance(16.0)
        await settle()
        assert timed.loading.renewals == 8
        assert timed.pair.consumer.transport.statistics.notifications_sent == messages
        if bytes_max > 1:
            assert timed.serving.renewals == 8
        for task in tasks:
            await timed.let_go(task)
        for lease in leases:
            lease.revoke()


async def test_a_lease_that_has_time_is_not_renewed_with_others() -> None:
    async with timed_pair() as timed:
        first, second = timed.pair.offer([3], "first"), timed.pair.offer([4], "second", ttl_s=300.0)
        tasks = [await timed.start_held_load(lease, [index]) for index, lease in enumerate((first, second))]
        timed.consumer_clock.advance(60.0)
        await settle()
        assert timed.loading.renewals == 5  # of the first, at 15, 25, ... s
        timed.consumer_clock.advance(60.0)  # the second one goes with those of the first: half of its pause early
        await settle()
        assert timed.loading.renewals == 5 + 6 + 1
        for task in tasks:
            await timed.let_go(task)


# --- requests that wait for their load


async def found(timed: Timed) -> None:
    """Wait until a lease is kept: there is a timer for its renewal, beside the one that looks for idle peers."""
    await until(lambda: timed.consumer_clock.pending >= 2)


async def test_a_lease_is_kept_for_a_request_that_waits() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        with timed.pair.consumer.runtime.keep_leases(lease.ticket.to_params()):
            await found(timed)
            await timed.pass_time(300.0)
            assert not lease.done
            await timed.load(lease, [0])
        assert await ended(timed, lease) is LeaseOutcome.READ
        timed.pair.assert_loaded([0], [3])
        assert timed.serving.renewals == timed.loading.renewals > 300 / 30


async def test_a_lease_that_the_ticket_does_not_name_is_found_and_kept() -> None:
    """As in a connector, whose scheduler writes the ticket."""
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        ticket = lease.ticket.without_leases(request_id="req", block_ids=(3,), num_tokens=4, ttl_s=30.0)
        assert ticket.lease_id == ""
        with timed.pair.consumer.runtime.keep_leases(ticket):
            await found(timed)
            await timed.pass_time(100.0)
            assert not lease.done
        assert timed.listener.answered == 2, "one handshake, one question about the lease"
        lease.revoke()


async def test_a_request_that_waits_no_more_renews_nothing() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        with timed.pair.consumer.runtime.keep_leases(lease.ticket):
            await found(timed)
            await timed.pass_time(20.0)
        assert timed.loading.renewals == 1
        await timed.pass_time(60.0)
        assert (await lease, timed.loading.renewals) == (LeaseOutcome.EXPIRED, 1)
        assert timed.consumer_clock.pending == 1, "the one that looks for idle peers"


async def test_two_requests_may_wait_for_one_ticket() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        runtime = timed.pair.consumer.runtime
        with runtime.keep_leases(lease.ticket):
            with runtime.keep_leases(lease.ticket):
                await found(timed)
                await timed.pass_time(40.0)
            await timed.pass_time(40.0)
            assert not lease.done
        lease.revoke()


async def test_waiting_ends_while_the_lease_is_being_found() -> None:
    """Early or late; nothing is renewed afterwards. What is found last of all is in `test_keeping`."""
    async with timed_pair() as timed:
        for steps in range(40):
            lease = timed.pair.offer([3], f"req-{steps}", ttl_s=1000.0)
            await timed.pair.consumer.runtime.forget_peer("producer")
            with timed.pair.consumer.runtime.keep_leases(lease.ticket):
                await turns(steps)
            lease.revoke()
            await settle()
        await timed.pass_time(2000.0)
        assert timed.loading.renewals == 0


async def test_a_lease_that_is_over_keeps_nobody_from_waiting() -> None:
    """The load says so."""
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        lease.revoke()
        assert await ended(timed, lease) is LeaseOutcome.REVOKED
        ticket = lease.ticket.without_leases(request_id="req", block_ids=(3,), num_tokens=4, ttl_s=30.0)
        with timed.pair.consumer.runtime.keep_leases(ticket):
            await timed.pass_time(10.0)
            with pytest.raises(LeaseExpired):
                await timed.load(lease, [0])
        assert timed.loading.renewals == 0


async def test_nothing_is_kept_for_a_ticket_that_cannot_be_right() -> None:
    async with timed_pair() as timed:
        with pytest.raises(RequestError, match="ticket"), timed.pair.consumer.runtime.keep_leases({}):
            raise AssertionError("not reached")


async def test_a_connection_stays_while_requests_wait() -> None:
    async with timed_pair(limited(BASE, peer_idle_s=50.0)) as timed:
        lease = timed.pair.offer([3])
        with timed.pair.consumer.runtime.keep_leases(lease.ticket):
            await found(timed)
            await timed.pass_time(300.0)
            assert len(timed.pair.consumer.runtime.statistics().peers) == 1
        assert not lease.done
        lease.revoke()


async def test_closing_ends_the_keeping() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        with timed.pair.consumer.runtime.keep_leases(lease.ticket):
            await found(timed)
            await timed.pass_time(20.0)
            await timed.pair.consumer.runtime.aclose()
            assert timed.pair.consumer.runtime.statistics().tasks == 0
        lease.revoke()


# --- doubt


async def test_an_expired_ticket_costs_a_seal_and_nothing_of_the_cache() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer(list(range(8)))
        await timed.pass_time(31.0)
        with pytest.raises(LeaseExpired):
            await timed.load(lease, list(range(8)))
        statistics = timed.pair.consumer.transport.statistics
        assert (statistics.reads, statistics.bytes_read) == (1, SEAL_BYTES)
        timed.pair.assert_loaded([], [])


async def test_a_lease_that_somebody_else_renewed_is_read_after_a_look_at_its_seal() -> None:
    """Clocks alone never fail a load."""
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        await timed.pass_time(20.0)
        timed.pair.producer.transport.deliver(renew(lease))
        await timed.pass_time(20.0)
        await timed.load(lease, [0])
        timed.pair.assert_loaded([0], [3])
        assert timed.pair.consumer.transport.statistics.reads == 2
        assert await ended(timed, lease) is LeaseOutcome.READ


@pytest.mark.parametrize("read_ahead_s", [29.0, 31.0])
async def test_a_reader_is_in_doubt_when_the_lease_may_have_run_out(read_ahead_s: float) -> None:
    """Its own clock is ahead of the producer's since they were compared: it can only be too careful."""
    async with timed_pair() as timed:
        await timed.load(timed.pair.offer([4], "first"), [1])
        lease = timed.pair.offer([3])
        before = timed.pair.consumer.transport.statistics.reads
        timed.consumer_clock.advance(read_ahead_s)
        await timed.load(lease, [0])
        asked = timed.pair.consumer.transport.statistics.reads - before
        assert asked == (2 if read_ahead_s > 30.0 else 1)


async def test_a_clock_is_asked_for_again_beside_a_load_once_it_is_old() -> None:
    async with timed_pair(limited(BASE, clock_age_s=60.0)) as timed:
        await timed.load(timed.pair.offer([4], "1"), [1])
        await timed.pass_time(59.0)
        await timed.load(timed.pair.offer([4], "2"), [1])
        assert timed.listener.answered == 1  # the handshake
        await timed.pass_time(2.0)
        for number in range(3, 6):
            await timed.load(timed.pair.offer([4], str(number)), [1])
        await until(lambda: timed.listener.answered >= 2)
        await until(lambda: timed.pair.consumer.runtime.statistics().tasks <= 3)  # its answer has come
        await timed.load(timed.pair.offer([4], "6"), [1])
        assert timed.listener.answered == 2


# --- revoking


async def test_revoked_blocks_come_back_after_the_hold() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        waiting = asyncio.ensure_future(lease.revoke())
        await timed.pass_time(0.049)
        assert (timed.leased, waiting.done()) == (1, False)
        await timed.pass_time(0.002)
        assert (timed.leased, await waiting) == (0, LeaseOutcome.REVOKED)
        with pytest.raises(LeaseExpired):
            await timed.load(lease, [0])


async def test_revoking_twice_and_too_late_changes_nothing() -> None:
    async with timed_pair() as timed:
        revoked, read = timed.pair.offer([3]), timed.pair.offer([4], "read")
        revoked.revoke()
        await timed.load(read, [0])
        await settle()
        waiting = [asyncio.ensure_future(lease.revoke()) for lease in (revoked, read, revoked, read)]
        await timed.pass_time(0.06)
        assert [await one for one in waiting] == [LeaseOutcome.REVOKED, LeaseOutcome.READ] * 2
        assert await revoked.revoke() is LeaseOutcome.REVOKED
        assert (timed.serving.revoked, timed.serving.read) == (1, 1)


@pytest.mark.parametrize("landed", range(10))
async def test_a_lease_that_is_revoked_in_the_middle_of_a_read_is_never_read_stale(landed: int) -> None:
    """Revoked after each of its reads in turn; its blocks are reused as soon as they are back."""
    async with timed_pair(SLICED) as timed:
        lease = timed.pair.offer([3, 4, 5, 6])
        task = await timed.start_held_load(lease, [0, 1, 2, 3])
        for _ in range(landed):
            timed.pair.consumer.transport.perform(1)
            await settle()
        lease.revoke()
        assert timed.leased == 4
        await timed.pass_time(0.06)
        assert await lease is LeaseOutcome.REVOKED
        timed.overwrite()
        with pytest.raises(LeaseExpired):
            await timed.let_go(task)


@pytest.mark.parametrize("landed", range(10))
async def test_a_read_that_was_quicker_than_the_hold_is_fresh_whenever_the_lease_was_revoked(landed: int) -> None:
    """No time passes: the blocks are still held, so what the seal of the first read vouches for is right."""
    async with timed_pair(SLICED) as timed:
        lease = timed.pair.offer([3, 4, 5, 6])
        task = await timed.start_held_load(lease, [0, 1, 2, 3])
        for _ in range(landed):
            timed.pair.consumer.transport.perform(1)
            await settle()
        lease.revoke()
        try:
            await timed.let_go(task)
        except LeaseExpired:
            assert landed == 0  # the seal had not been seen
        else:
            timed.pair.assert_loaded([0, 1, 2, 3], [3, 4, 5, 6])


# --- releasing unread


async def test_a_release_is_one_question_and_no_handshake() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3, 4])
        runtime = timed.pair.consumer.runtime
        assert await runtime.release_blocks(lease.ticket.to_params())
        assert await ended(timed, lease) is LeaseOutcome.READ
        assert (timed.listener.answered, runtime.statistics().transport.open_peers) == (1, 0)


async def test_a_release_of_a_connected_peer_is_a_notification() -> None:
    async with timed_pair() as timed:
        await timed.load(timed.pair.offer([4], "first"), [0])
        lease = timed.pair.offer([3])
        assert await timed.pair.consumer.runtime.release_blocks(lease.ticket)
        assert await ended(timed, lease) is LeaseOutcome.READ
        assert timed.listener.answered == 1


async def test_a_full_hit_is_a_release() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        report = await timed.load(lease, [])
        assert (report.notified, report.bytes) == (True, 0)
        assert await ended(timed, lease) is LeaseOutcome.READ
        assert timed.pair.consumer.runtime.statistics().transport.open_peers == 0


async def test_a_release_that_is_late_or_comes_twice_changes_nothing() -> None:
    async with timed_pair() as timed:
        runtime = timed.pair.consumer.runtime
        lease = timed.pair.offer([3], reader_count=2)
        assert await runtime.release_blocks(lease.ticket)
        assert await runtime.release_blocks(lease.ticket)
        assert (lease.done, timed.serving.duplicate_notifications) == (False, 1)
        lease.revoke()
        again = timed.pair.offer([3])  # the same request, offered anew
        assert await runtime.release_blocks(lease.ticket)
        assert (again.state, timed.serving.late_notifications) == ("offered", 1)
        again.revoke()


async def test_an_offer_without_blocks_needs_no_release() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([])
        assert await timed.pair.consumer.runtime.release_blocks(lease.ticket)
        assert timed.listener.answered == 0


async def test_a_producer_that_cannot_be_told_is_no_error() -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        runtime = timed.pair.consumer.runtime
        assert not await runtime.release_blocks(altered(lease.ticket, port=1))
        other_incarnation = altered(lease.ticket, incarnation="0123456789abcdef", lease_id="ab" * 16)
        assert not await runtime.release_blocks(other_incarnation)
        assert not await runtime.release_blocks(altered(lease.ticket, engine_id="somebody"))
        assert not await runtime.release_blocks(altered(lease.ticket, kv_heads=7))
        assert not lease.done
        lease.revoke()


async def test_a_release_needs_a_ticket() -> None:
    async with timed_pair(limited(BASE, block_ids_max=2)) as timed:
        runtime = timed.pair.consumer.runtime
        lease = timed.pair.offer([3])
        for ticket in ({}, altered(lease.ticket, port=0), altered(lease.ticket, block_ids=(1, 2, 3))):
            with pytest.raises(RequestError, match="ticket"):
                await runtime.release_blocks(ticket)
        lease.revoke()


def answer_to_release(timed: Timed, lease: Lease, *, named: bool = True, **change: object) -> messages.Reply:
    """What the producer says to a release by a rank like the consumer, but for a change in what it holds."""
    cache = timed.pair.consumer.runtime._supervisor.cache
    assert cache is not None
    question = messages.ReleaseRequest(
        reader="reader",
        target=messages.Target("producer", 0, 0, 0),
        request_id=lease.request_id,
        num_tokens=lease.ticket.num_tokens,
        blocks_digest=messages.digest_of(lease.ticket.block_ids),
        lease_id=lease.ticket.lease_id if named else None,
        cache_share=msgspec.structs.replace(cache.local.cache_share, **change),
    )
    header = messages.our_header(cache.local.compatibility.fingerprint())
    return timed.pair.producer.runtime._supervisor._answer(header, question)


@pytest.mark.parametrize("change", [{"tp_size": 0}, {"block_size": 3}, {"layers": ()}, {"kv_heads": 5}])
async def test_a_release_by_one_who_cannot_be_a_reader_is_refused(change: dict[str, object]) -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        assert isinstance(answer_to_release(timed, lease, **change), messages.Refusal)
        assert lease.state == "offered"
        lease.revoke()


@pytest.mark.parametrize("named", [True, False])
async def test_a_release_by_a_stage_that_holds_none_of_our_layers_changes_nothing(named: bool) -> None:
    async with timed_pair() as timed:
        lease = timed.pair.offer([3])
        for _ in range(2):  # while it is open, and after it
            reply = answer_to_release(timed, lease, named=named, pp_size=2, pp_rank=1, layers=(5,))
            assert isinstance(reply, messages.Released)
            lease.revoke()
        assert (timed.serving.malformed_notifications, timed.serving.late_notifications) == (0, 0)


async def test_a_release_without_a_lease_id_is_for_the_same_blocks_only() -> None:
    async with timed_pair() as timed:
        old = timed.pair.offer([4])
        old.revoke()
        lease = timed.pair.offer([3])  # the same request, offered anew
        assert answer_to_release(timed, old, named=False) == messages.NoLease(ended=True)
        assert lease.state == "offered"
        assert isinstance(answer_to_release(timed, lease, named=False), messages.Released)
        assert lease.state == "read"
        assert answer_to_release(timed, lease, named=False) == messages.NoLease(ended=True)


# --- what a cancelled load leaves


async def test_a_cancelled_load_is_among_the_quarantines_until_its_bytes_have_stopped() -> None:
    async with timed_pair() as timed:
        runtime = timed.pair.consumer.runtime
        leases = [timed.pair.offer([block], f"req-{block}") for block in (3, 4)]
        tasks = [await timed.start_held_load(lease, [index]) for index, lease in enumerate(leases)]
        assert runtime.quarantines == ()
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        (quarantine,) = runtime.quarantines
        assert (quarantine.request_id, quarantine.block_ids, quarantine.safe) == ("req-3", (0,), False)
        await timed.let_go(tasks[1])
        await quarantine.settled()
        assert quarantine.safe
        assert runtime.quarantines == ()
        leases[0].revoke()
