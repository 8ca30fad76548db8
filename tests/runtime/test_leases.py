"""How long leases last: renewal, old tickets, revoking and releasing. Time moves only when a test moves it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import pytest
from pairs import EnginePair, host_of
from tests_support import PATIENT, altered, limited, turns, until

from kvflow import Config, Lease, LeaseOutcome, ServeRequest, Ticket, secret_id
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages, notifications
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.notifications import ReadDone, Renew
from kvflow.errors import CacheUnregistered, LeaseExpired, PrefillFailed, RequestError, UsageError
from kvflow.runtime.clock import Timer
from kvflow.runtime.world import World
from kvflow.testing import ManualClock, assert_quiet, inproc_pair

BASE = limited(replace(PATIENT, lease_ttl_s=30.0, cancel_grace_s=0.05, drain_timeout_s=0.2), seal_hold_s=0.05)
SLICED = limited(BASE, slice_bytes_max=256, slices_in_flight_max=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPair(EnginePair):
    """A pair with two clocks that stand still and show different times."""

    writer_clock: ManualClock
    reader_clock: ManualClock

    async def pass_time(self, seconds: float) -> None:
        """Move both clocks in small steps; after each one everything that follows from it happens."""
        for _ in range(20):
            for clock in (self.reader_clock, self.writer_clock):
                clock.advance(seconds / 20)
                await settle()

    async def ended(self, lease: Lease) -> LeaseOutcome:
        """How a lease ends that only the hold keeps now."""
        await self.pass_time(1.0)
        return await lease

    async def kept(self) -> None:
        """Wait until a lease is kept: its renewal has a timer, beside the timer for idle peers."""
        await until(lambda: self.reader_clock.pending >= 2)

    def deliver(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.producer.transport.deliver(payload)


async def settle() -> None:
    """Let everything happen that needs no time to pass."""
    await turns(10)


@contextlib.asynccontextmanager
async def timed_pair(config: Config = BASE, writer_clock: type[ManualClock] = ManualClock) -> AsyncIterator[TimedPair]:
    clocks = (writer_clock(1e6), ManualClock(5.0))
    worlds = [World(clock=lambda clock=clock: clock) for clock in clocks]
    async with inproc_pair(config=config, producer_world=worlds[0], consumer_world=worlds[1]) as made:
        pair = TimedPair(producer=made.producer, consumer=made.consumer, writer_clock=clocks[0], reader_clock=clocks[1])
        yield pair
        pair.revoke_all()
        await pair.pass_time(3 * config.limits.seal_hold_s)
        for engine in (pair.producer, pair.consumer):
            assert_quiet(engine.runtime.statistics())


@pytest.fixture
async def timed() -> AsyncIterator[TimedPair]:
    async with timed_pair() as pair:
        yield pair


def renew(lease: Lease, reader: str = "reader") -> bytes:
    return codec.encode(Renew(lease_ids=(lease.ticket.lease_id,), reader=reader))


# --- the producer's side of renewal


@pytest.mark.parametrize(
    ("lifetime_s", "renewed_at_s", "ends_s"),
    [(600.0, [], 30.0), (600.0, [20.0], 50.0), (10.0, [5.0], 30.0), (100.0, range(11, 100, 11), 100.0)],
    ids=["never renewed", "renewed", "never shortened", "never beyond its lifetime"],
)
async def test_how_long_a_lease_lasts(lifetime_s: float, renewed_at_s: Sequence[float], ends_s: float) -> None:
    async with timed_pair(replace(BASE, lease_lifetime_s=lifetime_s)) as timed:
        lease, passed_s = timed.offer([3]), 0.0
        for at_s in renewed_at_s:
            await timed.pass_time(at_s - passed_s)
            timed.deliver(renew(lease))
            passed_s = at_s
        await timed.pass_time(ends_s - 0.1 - passed_s)
        assert (lease.done, timed.serving.renewals) == (False, len(renewed_at_s))
        await timed.pass_time(0.3)
        assert await lease is LeaseOutcome.EXPIRED


@pytest.mark.parametrize(
    ("at_s", "ttl_s", "ends_s"),
    [(20.0, None, 50.0), (20.0, 40.0, 60.0), (20.0, 1.0, 30.0), (0.0, 700.0, 700.0)],
    ids=["from the configuration", "given", "never shortened", "beyond the lifetime of before"],
)
async def test_a_lease_that_is_restarted_lasts_as_if_it_were_offered_then(
    timed: TimedPair, at_s: float, ttl_s: float | None, ends_s: float
) -> None:
    lease = timed.offer([3])
    await timed.pass_time(at_s)
    lease.restart(ttl_s)
    await timed.pass_time(ends_s - 0.1 - at_s)
    assert not lease.done
    await timed.pass_time(0.3)
    assert await lease is LeaseOutcome.EXPIRED
    lease.restart()  # no effect
    assert lease.done


class EagerClock(ManualClock):
    """Its timers fire early, as those of a loop that counts milliseconds may."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return super().call_later(delay_s * 0.9, callback)


async def test_a_timer_that_is_early_shortens_neither_a_lease_nor_a_hold() -> None:
    async with timed_pair(writer_clock=EagerClock) as timed:
        lease = timed.offer([3])
        for passed_s, state, done in ((29.99, "offered", False), (0.01, "expired", False), (0.0499, "expired", False)):
            timed.writer_clock.advance(passed_s)
            assert (lease.state, lease.done) == (state, done)
        timed.writer_clock.advance(0.0002)
        assert await lease is LeaseOutcome.EXPIRED


# --- the consumer's side


async def test_a_load_keeps_its_lease_open_for_as_long_as_it_takes(timed: TimedPair) -> None:
    lease = timed.offer([3])
    task = await timed.hold(lease)
    await timed.pass_time(300.0)
    assert not lease.done
    await timed.let_go(task)
    assert await timed.ended(lease) is LeaseOutcome.READ
    timed.assert_loaded([0], [3])
    assert timed.serving.renewals == timed.loading.renewals > 300 / 30


async def test_a_lease_is_renewed_soon_and_then_at_thirds(timed: TimedPair) -> None:
    task, seen = await timed.hold(timed.offer([3])), []
    for second in range(60):
        timed.reader_clock.advance(1.0)
        if timed.loading.renewals > len(seen):
            seen.append(second + 1)
    await settle()
    assert seen == [1, 11, 21, 31, 41, 51]
    await timed.let_go(task)


async def test_an_old_ticket_is_renewed_in_time(timed: TimedPair) -> None:
    """It says nothing of its age."""
    lease = timed.offer([3])
    await timed.pass_time(29.5)
    task = await timed.hold(lease)
    await timed.pass_time(20.0)
    assert (lease.done, timed.serving.renewals) == (False, 2)
    await timed.let_go(task)
    timed.assert_loaded([0], [3])


@pytest.mark.parametrize(("lost", "ends_s"), [(True, 30.0), (False, 100.0)], ids=["lost", "for too long"])
async def test_renewals_that_are_lost_or_go_on_for_too_long_cost_the_load(lost: bool, ends_s: float) -> None:
    async with timed_pair(replace(BASE, lease_lifetime_s=100.0)) as timed:
        lease = timed.offer([3])
        task = await timed.hold(lease)
        timed.transport.faults.drop_notifications = lost
        await timed.pass_time(ends_s - 1.0)
        assert not lease.done
        await timed.pass_time(2.0)
        assert await lease is LeaseOutcome.EXPIRED
        timed.overwrite()
        with pytest.raises(LeaseExpired):
            await timed.let_go(task)


async def test_short_loads_renew_nothing_and_leave_no_timer_behind(timed: TimedPair) -> None:
    for number in range(5):
        await timed.load(timed.offer([3], f"req-{number}"))
        assert timed.reader_clock.pending <= 2, "one for renewals, one that looks for idle peers"
    await timed.pass_time(40.0)
    assert (timed.reader_clock.pending, timed.loading.renewals, timed.serving.renewals) == (1, 0, 0)


async def test_a_load_that_has_ended_renews_no_more(timed: TimedPair) -> None:
    lease = timed.offer([3], reader_count=2)
    task = await timed.hold(lease)
    await timed.pass_time(20.0)
    assert timed.loading.renewals == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await timed.let_go(task)
    await timed.pass_time(60.0)
    assert (await lease, timed.loading.renewals) == (LeaseOutcome.EXPIRED, 2)


@pytest.mark.parametrize(("bytes_max", "sent"), [(4096, 1), (400, 1), (220, 2), (1, 8)])
async def test_a_peer_gets_one_message_for_all_its_leases(
    bytes_max: int, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as fit in the message. A producer drops and counts leases that its message limit leaves out."""
    monkeypatch.setattr(notifications, "NOTIFICATION_BYTES_MAX", bytes_max)
    async with timed_pair(BASE) as timed:
        tasks = [await timed.hold(timed.offer([block], f"req-{block}"), [block]) for block in range(8)]
        timed.reader_clock.advance(1.0)
        await settle()
        assert (timed.loading.renewals, timed.transport.statistics.notifications_sent) == (8, sent)
        assert timed.serving.renewals == (8 if bytes_max > 1 else 0)
        for task in tasks:
            await timed.let_go(task)


async def test_a_lease_that_has_time_is_not_renewed_with_others(timed: TimedPair) -> None:
    first, second = timed.offer([3], "first"), timed.offer([4], "second", ttl_s=300.0)
    tasks = [await timed.hold(lease, [index]) for index, lease in enumerate((first, second))]
    timed.reader_clock.advance(45.0)
    await settle()
    assert timed.loading.renewals == 5 + 1  # of the first, at 0.25, 10.25, ... s; the second one at 0.25 s
    timed.reader_clock.advance(10.0)  # the second one goes with the first: half of its pause early
    await settle()
    assert timed.loading.renewals == 5 + 1 + 2
    for task in tasks:
        await timed.let_go(task)


# --- requests that wait for their load


async def test_a_lease_is_kept_for_a_request_that_waits_and_then_no_more(timed: TimedPair) -> None:
    """Also for two requests that have the same ticket."""
    lease, other = timed.offer([3]), timed.offer([4], "other")
    keep = timed.reader.keep_leases
    with keep(lease.ticket.to_params()), keep(other.ticket):
        with keep(other.ticket):
            await timed.kept()
            await timed.pass_time(100.0)
        await timed.pass_time(200.0)
        assert not lease.done
        assert not other.done
        await timed.load(lease)
    assert await timed.ended(lease) is LeaseOutcome.READ
    renewals = timed.loading.renewals
    assert renewals == timed.serving.renewals > 2 * 300 / 30
    await timed.pass_time(60.0)
    assert (await other, timed.loading.renewals) == (LeaseOutcome.EXPIRED, renewals)
    assert timed.reader_clock.pending == 1, "the one that looks for idle peers"


def unnamed(lease: Lease) -> Ticket:
    """Return a ticket without a lease, as the scheduler of a connector writes it."""
    ticket = lease.ticket.without_leases(request_id="req", block_ids=(3,), num_tokens=4, ttl_s=30.0)
    assert ticket.lease_id == ""
    return ticket


async def test_a_lease_that_the_ticket_does_not_name_is_found_and_kept(timed: TimedPair) -> None:
    lease = timed.offer([3])
    with timed.reader.keep_leases(unnamed(lease)):
        await timed.kept()
        await timed.pass_time(100.0)
        assert not lease.done
    assert timed.listener.answered == 2, "one handshake, one question about the lease"


async def test_waiting_ends_while_the_lease_is_being_found(timed: TimedPair) -> None:
    """Early or late; nothing is renewed afterwards. `test_keeping` has a lease that is found last of all."""
    for steps in range(40):
        lease = timed.offer([3], f"req-{steps}", ttl_s=1000.0)
        await timed.reader.forget_peer("producer")
        with timed.reader.keep_leases(lease.ticket):
            await turns(steps)
        lease.revoke()
        await settle()
    await timed.pass_time(2000.0)
    assert timed.loading.renewals == 0


async def test_a_lease_that_is_over_keeps_nobody_from_waiting(timed: TimedPair) -> None:
    """The load reports it. An invalid ticket is refused at once."""
    lease = timed.offer([3])
    lease.revoke()
    assert await timed.ended(lease) is LeaseOutcome.REVOKED
    with timed.reader.keep_leases(unnamed(lease)):
        await timed.pass_time(10.0)
        await timed.fails(LeaseExpired, lease)
    assert timed.loading.renewals == 0
    with pytest.raises(RequestError, match="ticket"), timed.reader.keep_leases({}):
        raise AssertionError("not reached")


async def test_who_keeps_leases_can_wait_until_they_are_open(timed: TimedPair) -> None:
    """Those of a pending ticket may be opened later, or never."""
    lease = timed.offer([3])
    with timed.reader.keep_leases(lease.ticket) as kept:
        await kept.opened()
        await kept.opened()
    introduction = timed.producer.runtime.introduce().to_params()
    names = [secret_id(name) for name in ("later", "never", "unopened")]
    later, never, unopened = (Ticket.rendezvous(introduction, name, ttl_s=30.0) for name in names)
    with timed.reader.keep_leases(later) as kept:
        opened = asyncio.ensure_future(kept.opened())
        await settle()
        assert not opened.done()
        lease = timed.producer.runtime.serve_blocks(ServeRequest(names[0], [4], num_tokens=4))
        await opened
    with timed.reader.keep_leases(never) as kept:
        timed.producer.runtime.decline(names[1], "no room")
        with pytest.raises(PrefillFailed, match="no room"):
            await kept.opened()
    with timed.reader.keep_leases(unopened) as kept:
        opened = asyncio.ensure_future(kept.opened())
        await settle()
    with pytest.raises(UsageError, match=r"'unopened.*': keep_leases: its `with` body has ended"):
        await opened
    with timed.reader.keep_leases(unopened) as kept:
        opened = asyncio.ensure_future(kept.opened())
        await settle()
        await timed.reader.aclose()
        with pytest.raises(CacheUnregistered, match="its leases were not open before"):
            await opened
    lease.revoke()


async def test_closing_ends_the_keeping(timed: TimedPair) -> None:
    with timed.reader.keep_leases(timed.offer([3]).ticket):
        await timed.kept()
        await timed.pass_time(20.0)
        await timed.reader.aclose()
        assert timed.reader.statistics().tasks == 0


# --- old tickets


async def test_an_expired_ticket_costs_the_slices_that_are_posted_before_its_seal_is_seen() -> None:
    """The blocks hold another prompt, and the read bytes are thrown away."""
    async with timed_pair(replace(SLICED, limits=replace(SLICED.limits, slices_in_flight_max=2))) as timed:
        lease = timed.offer(range(8))
        await timed.pass_time(31.0)
        timed.overwrite()
        await timed.fails(LeaseExpired, lease, range(8))
        assert timed.transport.statistics.reads == 2


async def test_a_lease_that_somebody_else_renewed_is_read_whatever_its_ticket_says(timed: TimedPair) -> None:
    lease = timed.offer([3])
    await timed.pass_time(20.0)
    timed.deliver(renew(lease))
    await timed.pass_time(20.0)
    await timed.load(lease)
    timed.assert_loaded([0], [3])
    assert timed.transport.statistics.reads == 1
    assert await timed.ended(lease) is LeaseOutcome.READ


# --- revoking


async def test_revoked_blocks_come_back_after_the_hold_and_only_once(timed: TimedPair) -> None:
    revoked, read = timed.offer([3]), timed.offer([4], "read")
    revoked.revoke()
    await timed.load(read)
    await settle()
    waiting = [asyncio.ensure_future(lease.revoke()) for lease in (revoked, read, revoked, read)]
    await timed.pass_time(0.049)
    assert (timed.producer_blocks.leased, any(one.done() for one in waiting)) == (2, False)
    await timed.pass_time(0.002)
    assert [await one for one in waiting] == [LeaseOutcome.REVOKED, LeaseOutcome.READ] * 2
    assert await revoked.revoke() is LeaseOutcome.REVOKED
    assert (timed.producer_blocks.leased, timed.serving.revoked, timed.serving.read) == (0, 1, 1)
    await timed.fails(LeaseExpired, revoked)


@pytest.mark.parametrize("landed", range(10))
@pytest.mark.parametrize("meanwhile", ["time passes", "no time passes", "the reader's machine is paused"])
async def test_a_lease_that_is_revoked_in_the_middle_of_a_read_is_never_read_stale(meanwhile: str, landed: int) -> None:
    """Revoked after each of its reads in turn; its blocks are reused as soon as they are back.

    The clock of a paused machine stands still, so a load of several reads fetches the seal after its last byte.
    """
    async with timed_pair(SLICED) as timed:
        lease = timed.offer([3, 4, 5, 6])
        task = await timed.hold(lease, [0, 1, 2, 3])
        for _ in range(landed):
            timed.transport.perform(1)
            await settle()
        lease.revoke()
        assert timed.producer_blocks.leased == 4
        if meanwhile == "time passes":
            await timed.pass_time(0.06)
        elif meanwhile != "no time passes":
            timed.writer_clock.advance(0.06)
        if meanwhile != "no time passes":
            assert await lease is LeaseOutcome.REVOKED
            timed.overwrite()
        with pytest.raises(LeaseExpired):
            await timed.let_go(task)


class StoppedClock(ManualClock):
    """The clock of a process that is stopped for a second each time that it has read the clock before `stops_until`."""

    stopped_s = 0.0
    stops_until: Callable[[], bool] = staticmethod(lambda: True)

    def now_s(self) -> float:
        now_s = super().now_s() + self.stopped_s
        if not self.stops_until():
            self.stopped_s += 1.0
        return now_s


@pytest.mark.parametrize("end", ["expires", "is revoked", "is read"])
async def test_a_hold_begins_when_the_seal_is_wiped(end: str) -> None:
    """Not when the producer, which may be stopped in between (SIGSTOP, a collection of garbage), read its clock.

    A reader may have fetched the seal just before it was wiped.
    """
    async with timed_pair(writer_clock=StoppedClock) as timed:
        lease, clock, seals = timed.offer([3]), timed.writer_clock, timed.producer.runtime._supervisor.seals
        assert isinstance(clock, StoppedClock)
        clock.stops_until = lambda: not seals.used
        if end == "expires":
            clock.advance(30.0)
        elif end == "is revoked":
            lease.revoke()
        else:
            timed.deliver(codec.encode(ReadDone((lease.ticket.lease_id,), reader="reader", numerator=1, denominator=1)))
            await settle()
        assert seals.used == 0
        clock.advance(0.049)
        assert timed.producer_blocks.leased == 1, "less than the hold since the wipe"
        clock.advance(0.002)
        assert timed.producer_blocks.leased == 0


# --- releasing unread


async def test_a_release_is_one_question_and_no_handshake(timed: TimedPair) -> None:
    """And a full hit is a release."""
    lease, hit, empty = timed.offer([3, 4]), timed.offer([5], "hit"), timed.offer([], "empty")
    assert await timed.reader.release_blocks(lease.ticket.to_params())
    report = await timed.load(hit, [])
    assert (report.bytes, report.blocks, report.descriptors, report.notified) == (0, 0, 0, True)
    assert await timed.reader.release_blocks(empty.ticket), "an offer without blocks needs no release"
    assert [await timed.ended(lease), await timed.ended(hit)] == [LeaseOutcome.READ] * 2
    assert (timed.listener.answered, timed.reader.statistics().transport.open_peers) == (2, 0)
    timed.assert_loaded([], [])


async def test_a_release_of_a_connected_peer_is_a_notification(timed: TimedPair) -> None:
    await timed.load(timed.offer([4], "first"))
    lease = timed.offer([3])
    assert await timed.reader.release_blocks(lease.ticket)
    assert await timed.ended(lease) is LeaseOutcome.READ
    assert timed.listener.answered == 1


async def test_a_release_that_is_late_or_comes_twice_changes_nothing(timed: TimedPair) -> None:
    lease = timed.offer([3], reader_count=2)
    for _ in range(2):
        assert await timed.reader.release_blocks(lease.ticket)
    assert (lease.done, timed.serving.duplicate_notifications) == (False, 1)
    lease.revoke()
    again = timed.offer([3])  # the same request, offered anew
    assert await timed.reader.release_blocks(lease.ticket)
    assert (again.state, timed.serving.late_notifications) == ("offered", 1)


async def test_a_producer_that_cannot_be_told_is_no_error(timed: TimedPair) -> None:
    lease = timed.offer([3])
    other_incarnation = {"incarnation": "0123456789abcdef", "lease_id": "ab" * 16}
    for change in ({"port": 1}, other_incarnation, {"engine_id": "somebody"}, {"kv_heads": 7}):
        assert not await timed.reader.release_blocks(altered(lease.ticket, **change))
    assert not lease.done


def answer_to_release(timed: TimedPair, lease: Lease, **change: object) -> messages.Reply:
    """Return the producer's answer to a release by a rank like the consumer, with `change` in its holding."""
    local = host_of(timed.reader).context.local
    question = messages.ReleaseRequest(
        reader="reader",
        target=Address("producer", Rank(0, 0, 0), "tcp://127.0.0.1:1"),
        lease_id=lease.ticket.lease_id,
        cache_shares=(msgspec.structs.replace(local.cache_shares[0], **change),),
    )
    return timed.writer._supervisor._answer(codec.our_header(local.compatibility.fingerprint()), question)


async def test_a_release_by_one_who_cannot_be_a_reader_is_refused(timed: TimedPair) -> None:
    lease = timed.offer([3])
    for change in ({"tp_size": 0}, {"block_size": 3}, {"layers": ()}, {"kv_heads": 5}):
        assert isinstance(answer_to_release(timed, lease, **change), messages.Refusal), change
    assert lease.state == "offered"


async def test_a_release_by_a_stage_that_holds_none_of_our_layers_changes_nothing(timed: TimedPair) -> None:
    lease = timed.offer([3])
    for _ in range(2):  # while it is open, and after it
        reply = answer_to_release(timed, lease, pp_size=2, pp_rank=1, layers=(5,))
        assert isinstance(reply, messages.Ack)
        lease.revoke()
    assert (timed.serving.malformed_notifications, timed.serving.late_notifications) == (0, 0)


async def test_a_release_of_a_ticket_that_names_no_lease_is_for_the_same_blocks_only(timed: TimedPair) -> None:
    """The rank is asked for the lease first, and for as long as it may be about to open it."""
    old = timed.offer([4])
    old.revoke()
    lease = timed.offer([3])  # the same request, offered anew
    given_back = old.ticket.without_leases(request_id="req", block_ids=[4], num_tokens=4, ttl_s=30.0)
    assert await timed.reader.release_blocks(given_back), "there is nothing to give back"
    assert lease.state == "offered"
    assert await timed.reader.release_blocks(unnamed(lease))
    assert lease.state == "read"
    assert await timed.reader.release_blocks(unnamed(lease))
    assert timed.serving.late_notifications == 0
    late = asyncio.ensure_future(
        timed.reader.release_blocks(
            lease.ticket.without_leases(request_id="late", block_ids=[5], num_tokens=4, ttl_s=9.0)
        )
    )
    await settle()
    opened = timed.offer([5], "late")
    assert await late
    assert opened.state == "read"


async def test_a_lease_of_nothing_leaves_no_line_of_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has read anything."""
    caplog.set_level("INFO")
    async with timed_pair() as pair:
        lease = pair.producer.runtime.serve_blocks(ServeRequest("nothing", [], 0))
        assert await lease is LeaseOutcome.READ
        assert "nothing" not in caplog.text
        pair.offer([3], "offered").revoke()
        assert "lease offered: offered -> revoked" in caplog.text
