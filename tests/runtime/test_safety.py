"""Memory safety (I1), freshness (I2) and reuse (I3) under cancellation, deadlines, faults and lease ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from pairs import EnginePair, open_pair, virtual_pair
from tests_support import PATIENT, in_virtual_time, limited, turns, until

from kvflow import LeaseOutcome
from kvflow.core.protocol import codec
from kvflow.core.protocol.notifications import ReadDone
from kvflow.errors import BlocksBusy, DeadlineExceeded, LeaseExpired, TransferFailed
from kvflow.transport.base import TransportError

SLICED = limited(
    replace(PATIENT, cancel_grace_s=0.05, drain_timeout_s=0.2), slice_bytes_max=256, slices_in_flight_max=2
)


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_cancelled_load_waits_for_its_bytes_and_then_its_blocks_are_safe(
    pair: EnginePair, cancels: int
) -> None:
    """Further cancels are held back too."""
    task = await pair.hold(pair.offer([3]))
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done(), "returned while bytes could still land"
    pair.transport.perform()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pair.reader.quarantines == ()
    assert pair.consumer_blocks.free == pair.consumer_blocks.total


async def test_a_cancelled_load_whose_bytes_do_not_stop_leaves_a_quarantine() -> None:
    async with open_pair(SLICED) as pair:
        quarantine = await pair.quarantined(await pair.hold(pair.offer([3])))
        assert (quarantine.request_id, quarantine.block_ids, quarantine.safe) == ("req", (0,), False)
        assert pair.consumer_blocks.quarantined == 1
        await pair.fails(BlocksBusy, pair.offer([4], "other"), match="block 0 cannot be loaded: it is quarantined")
        waiting = asyncio.create_task(quarantine.settled())
        pair.release_reads()
        await waiting
        assert (quarantine.safe, pair.reader.quarantines) == (True, ())


async def test_a_cancelled_load_posts_no_more_slices() -> None:
    async with open_pair(replace(SLICED, cancel_grace_s=PATIENT.cancel_grace_s)) as pair:
        task = await pair.hold(pair.offer(range(8)), range(8))
        pair.transport.perform()  # the seal, which large loads fetch before
        await until(lambda: pair.transport.held)
        task.cancel()
        await asyncio.sleep(0)
        posted = pair.transport.statistics.reads
        pair.transport.perform()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.transport.statistics.reads == posted


@in_virtual_time
async def test_a_deadline_in_the_wire_phase_names_it_and_carries_the_quarantine() -> None:
    async with virtual_pair(SLICED) as pair:
        pair.transport.faults.hold = True
        error = await pair.fails(
            DeadlineExceeded,
            pair.offer([3]),
            match=r"request 'req' from 'producer' .* in phase 'wire'",
            deadline_s=0.05,
        )
        assert error.phase == "wire"
        assert error.quarantine is not None
        assert not error.quarantine.safe
        pair.transport.perform()
        await error.quarantine.settled()


async def test_a_seal_that_another_lease_uses_now_does_not_help_an_old_ticket(pair: EnginePair) -> None:
    old = pair.offer([3], "old")
    old.revoke()
    new = pair.offer([4], "new")
    assert old.ticket.first.seal_index == new.ticket.first.seal_index
    await pair.fails(LeaseExpired, old)


async def test_a_large_load_of_an_ended_lease_stops_after_its_first_slice() -> None:
    async with open_pair(limited(SLICED, slices_in_flight_max=1)) as pair:
        lease = pair.offer(range(8))
        lease.revoke()
        await pair.fails(LeaseExpired, lease, range(8), match="the lease has ended")
        assert pair.transport.statistics.reads == 1


@pytest.mark.parametrize("cancelled", [False, True])
async def test_one_failed_slice_fails_the_load_after_the_others_have_stopped(cancelled: bool) -> None:
    """A cancel that comes meanwhile is held back, and not lost."""
    async with open_pair(SLICED) as pair:
        task = await pair.hold(pair.offer(range(8)), range(8))
        pair.transport.perform()
        await until(lambda: len(pair.transport.held) >= 2)
        pair.transport.faults.fail_next.append(TransportError("scripted"))
        pair.transport.perform(1)
        await turns(50)
        if cancelled:
            task.cancel()
            await turns(5)
        assert not task.done(), "ended while another slice could still land"
        pair.transport.perform()
        with pytest.raises(asyncio.CancelledError if cancelled else TransferFailed):
            await task


async def test_a_cancel_is_not_lost_while_a_failed_load_waits_for_its_last_slice() -> None:
    """The third slice waits for a permit; it gets the failed one's, finds the failure, and the second is still out."""
    async with open_pair(limited(replace(SLICED, in_flight_bytes_max=600), slices_in_flight_max=3)) as pair:
        task = await pair.hold(pair.offer(range(8)), range(8))
        pair.transport.perform()
        await until(lambda: len(pair.transport.held) == 2)
        pair.transport.faults.fail_next.append(TransportError("scripted"))
        pair.transport.perform(1)
        await turns(50)
        task.cancel()
        await turns(5)
        assert not task.done(), "ended while another slice could still land"
        pair.transport.perform()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_notifications_that_are_duplicate_late_or_forged_change_nothing(pair: EnginePair) -> None:
    pair.transport.faults.duplicate_notifications = True
    lease, second = pair.offer([3]), pair.offer([5], "second")
    done = ReadDone(lease_ids=("abc",), reader="x", numerator=1, denominator=1)
    for payload in (b"", b"\xff" * 10, b"x" * 100_000, codec.encode(done)):
        pair.producer.transport.deliver(payload)
    await pair.load(lease)
    assert await lease is LeaseOutcome.READ
    assert (pair.serving.malformed_notifications, pair.serving.late_notifications) == (3, 2)
    assert (pair.serving.read, pair.serving.open_leases, second.state) == (1, 1, "offered")


async def test_cancelling_who_awaits_a_lease_leaves_the_lease(pair: EnginePair) -> None:
    lease = pair.offer([3])

    async def wait_for_it() -> LeaseOutcome:
        return await lease

    waiter = asyncio.create_task(wait_for_it())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not lease.done
    await pair.load(lease)
    assert await lease is LeaseOutcome.READ
