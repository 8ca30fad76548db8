"""Memory safety (I1), freshness (I2) and reuse (I3) under cancellation, deadlines, faults and lease ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests_support import PATIENT, in_virtual_time, leases_ended, limited, turns, until, virtual_pair

from kvflow import LeaseOutcome, LoadReport
from kvflow.core.protocol import messages
from kvflow.errors import BlocksBusy, DeadlineExceeded, LeaseExpired, TransferFailed
from kvflow.testing import InprocPair, InprocTransport, inproc_pair
from kvflow.transport.base import PeerGone, TransportError

SLICED = limited(
    replace(PATIENT, cancel_grace_s=0.05, drain_timeout_s=0.2), slice_bytes_max=256, slices_in_flight_max=2
)


async def start_held_load(pair: InprocPair, lease_blocks: list[int], local: list[int]) -> asyncio.Task[LoadReport]:
    """A load whose first reads are posted and held by the transport."""
    transport = pair.consumer.transport
    transport.faults.hold = True
    lease = pair.offer(lease_blocks)
    task = asyncio.create_task(pair.consumer.runtime.load_blocks(pair.wanted(lease, local)))
    await until(lambda: transport.held)
    return task


async def run_held(task: asyncio.Task[LoadReport], transport: InprocTransport) -> LoadReport:
    """Perform whatever is posted until the load has ended."""
    while not task.done():
        transport.perform()
        await asyncio.sleep(0)
    return await task


async def test_a_cancelled_load_waits_for_its_bytes_and_then_its_blocks_are_safe(pair: InprocPair) -> None:
    task = await start_held_load(pair, [3], [0])
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "returned while bytes could still land"
    pair.consumer.transport.perform()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pair.consumer.runtime.quarantines == ()
    statistics = pair.consumer.runtime.statistics()
    assert statistics.blocks is not None
    assert statistics.blocks.free == statistics.blocks.total
    revoke_all(pair)


async def test_a_cancelled_load_whose_bytes_do_not_stop_leaves_a_quarantine() -> None:
    async with inproc_pair(config=SLICED) as pair:
        runtime = pair.consumer.runtime
        task = await start_held_load(pair, [3], [0])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (quarantine,) = runtime.quarantines
        assert (quarantine.request_id, quarantine.block_ids, quarantine.safe) == ("req", (0,), False)
        blocks = runtime.statistics().blocks
        assert blocks is not None
        assert blocks.quarantined == 1
        with pytest.raises(BlocksBusy, match="block 0 cannot be loaded: it is quarantined"):
            await runtime.load_blocks(pair.wanted(pair.offer([4], "other"), [0]))
        waiting = asyncio.create_task(quarantine.settled())
        pair.consumer.transport.faults.hold = False
        pair.consumer.transport.perform()
        await waiting
        assert quarantine.safe
        assert runtime.quarantines == ()


async def test_a_cancelled_load_posts_no_more_slices() -> None:
    async with inproc_pair(config=replace(SLICED, cancel_grace_s=PATIENT.cancel_grace_s)) as pair:
        transport = pair.consumer.transport
        task = await start_held_load(pair, list(range(8)), list(range(8)))
        transport.perform()  # the seal, which large loads fetch before
        await until(lambda: transport.held)
        task.cancel()
        await asyncio.sleep(0)
        posted = transport.statistics.reads
        transport.perform()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transport.statistics.reads == posted


async def test_a_second_cancel_is_held_back_too_and_not_lost(pair: InprocPair) -> None:
    task = await start_held_load(pair, [3], [0])
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    pair.consumer.transport.perform()
    with pytest.raises(asyncio.CancelledError):
        await task
    revoke_all(pair)


@in_virtual_time
async def test_a_deadline_in_the_wire_phase_names_it_and_carries_the_quarantine() -> None:
    async with virtual_pair(SLICED) as pair:
        pair.consumer.transport.faults.hold = True
        lease = pair.offer([3])
        with pytest.raises(DeadlineExceeded, match=r"request 'req' from 'producer' .* in phase 'wire'") as caught:
            await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0], deadline_s=0.05))
        assert caught.value.phase == "wire"
        quarantine = caught.value.quarantine
        assert quarantine is not None
        assert not quarantine.safe
        pair.consumer.transport.perform()
        await quarantine.settled()
        lease.revoke()


async def test_a_lease_that_ends_during_the_read_fails_the_load(pair: InprocPair) -> None:
    """The blocks are reused while they are read: stale bytes must not be reported as good."""
    task = await start_held_load(pair, [3], [0])
    expired = pair.producer.runtime.statistics()
    assert expired.blocks is not None
    assert expired.blocks.leased == 1
    revoke_all(pair)
    await leases_ended(pair.producer.runtime)
    for tensor in pair.producer.kv_caches.values():
        tensor[:, 3] = 12345.0
    with pytest.raises(LeaseExpired, match="the offer is over"):
        await run_held(task, pair.consumer.transport)


async def test_an_expired_ticket_never_loads(pair: InprocPair) -> None:
    lease = pair.offer([3], ttl_s=0.01)
    assert await lease is LeaseOutcome.EXPIRED
    with pytest.raises(LeaseExpired):
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))


async def test_a_used_ticket_never_loads_again(pair: InprocPair) -> None:
    """A router that retries elsewhere: the first reader has released the blocks, the second one is stale."""
    lease = pair.offer([3])
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
    assert await lease is LeaseOutcome.READ
    with pytest.raises(LeaseExpired):
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [1]))


async def test_a_ticket_of_a_restarted_producer_costs_one_handshake_however_often_it_is_used(pair: InprocPair) -> None:
    """Each further one would give a good connection up; NIXL loses file descriptors with every peer that is removed."""
    lease = pair.offer([3])
    old = pair.wanted(lease, [0])
    params = dict(old.ticket)
    params["kvflow"] = {**params["kvflow"], "ranks": [{**params["kvflow"]["ranks"][0], "incarnation": "before"}]}
    await pair.consumer.runtime.load_blocks(old)
    for _ in range(3):
        with pytest.raises(LeaseExpired):
            await pair.consumer.runtime.load_blocks(replace(old, ticket=params))
    listener = pair.producer.runtime.statistics().listener
    assert listener is not None
    assert listener.answered == 2
    assert await lease is LeaseOutcome.READ


async def test_a_seal_that_another_lease_uses_now_does_not_help_an_old_ticket(pair: InprocPair) -> None:
    old = pair.offer([3], "old")
    old.revoke()
    new = pair.offer([4], "new")
    assert old.ticket.first.seal_index == new.ticket.first.seal_index
    with pytest.raises(LeaseExpired):
        await pair.consumer.runtime.load_blocks(pair.wanted(old, [0]))
    new.revoke()


async def test_a_large_load_of_an_ended_lease_stops_after_its_first_slice() -> None:
    async with inproc_pair(config=limited(SLICED, slices_in_flight_max=1)) as pair:
        lease = pair.offer(list(range(8)))
        lease.revoke()
        with pytest.raises(LeaseExpired):
            await pair.consumer.runtime.load_blocks(pair.wanted(lease, list(range(8))))
        assert pair.consumer.transport.statistics.reads == 1


async def test_a_slow_read_needs_a_seal_that_was_fetched_after_it() -> None:
    """The seal comes intact with the first slice; then the lease ends, and the other slices are of reused blocks."""
    async with inproc_pair(config=SLICED) as pair:
        task = await start_held_load(pair, list(range(8)), list(range(8)))
        pair.consumer.transport.perform(1)
        revoke_all(pair)
        await leases_ended(pair.producer.runtime)
        for tensor in pair.producer.kv_caches.values():
            tensor.fill_(12345.0)
        with pytest.raises(LeaseExpired):
            await run_held(task, pair.consumer.transport)


async def test_a_transfer_that_fails_names_the_cause_and_the_next_load_works(pair: InprocPair) -> None:
    pair.consumer.transport.faults.fail_next.append(PeerGone("scripted"))
    lease = pair.offer([3])
    with pytest.raises(TransferFailed, match="the transfer failed: scripted") as caught:
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
    assert caught.value.quarantine is None
    assert isinstance(caught.value.__cause__, PeerGone)
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
    pair.assert_loaded([0], [3])
    assert await lease is LeaseOutcome.READ
    listener = pair.producer.runtime.statistics().listener
    assert listener is not None
    assert listener.answered == 2, "the broken connection was not made anew"


async def test_one_failed_slice_fails_the_load_after_the_others_have_stopped() -> None:
    async with inproc_pair(config=SLICED) as pair:
        transport = pair.consumer.transport
        task = await start_held_load(pair, list(range(8)), list(range(8)))
        transport.perform()
        await until(lambda: len(transport.held) >= 2)
        transport.faults.fail_next.append(TransportError("scripted"))
        transport.perform(1)
        await turns(5)
        assert not task.done(), "failed while another slice could still land"
        transport.perform()
        with pytest.raises(TransferFailed, match="scripted"):
            await task
        revoke_all(pair)


@in_virtual_time
async def test_a_lost_notification_costs_time_and_nothing_else() -> None:
    async with virtual_pair() as pair:
        pair.consumer.transport.faults.drop_notifications = True
        lease = pair.offer([3])
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
        assert await lease is LeaseOutcome.EXPIRED
        pair.assert_loaded([0], [3])


async def test_duplicate_and_late_notifications_change_nothing(pair: InprocPair) -> None:
    pair.consumer.transport.faults.duplicate_notifications = True
    lease = pair.offer([3])
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
    assert await lease is LeaseOutcome.READ
    second = pair.offer([5], "second")
    serving = pair.producer.runtime.statistics().serving
    assert serving is not None
    assert (serving.read, serving.late_notifications, serving.open_leases) == (1, 1, 1)
    second.revoke()


async def test_forged_notifications_release_nothing(pair: InprocPair) -> None:
    lease = pair.offer([3])
    transport = pair.producer.transport
    for payload in (
        b"",
        b"\xff" * 10,
        messages.encode(messages.ReadDone(lease_id="abc", reader="x", numerator=1, denominator=1)),
        b"x" * 100_000,
    ):
        transport.deliver(payload)
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
    assert await lease is LeaseOutcome.READ
    serving = pair.producer.runtime.statistics().serving
    assert serving is not None
    assert (serving.malformed_notifications, serving.late_notifications) == (3, 1)


async def test_a_revoked_lease_gives_its_blocks_back_at_once_and_only_once(pair: InprocPair) -> None:
    lease = pair.offer([3])
    lease.revoke()
    lease.revoke()
    assert await lease is LeaseOutcome.REVOKED
    assert await lease is LeaseOutcome.REVOKED


async def test_cancelling_who_awaits_a_lease_leaves_the_lease(pair: InprocPair) -> None:
    lease = pair.offer([3])

    async def wait_for_it() -> LeaseOutcome:
        return await lease

    waiter = asyncio.create_task(wait_for_it())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not lease.done
    await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0]))
    assert await lease is LeaseOutcome.READ


@pytest.mark.parametrize("steps", range(12))
async def test_cancelling_at_any_step_leaves_nothing_behind(pair: InprocPair, steps: int) -> None:
    """Cancel after a growing number of loop iterations: in every await on the way, handshake included."""
    lease = pair.offer([3, 4])
    task = asyncio.create_task(pair.consumer.runtime.load_blocks(pair.wanted(lease, [0, 1])))
    await turns(steps * 3)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        await pair.consumer.runtime.load_blocks(pair.wanted(lease, [0, 1]))
    pair.assert_loaded([0, 1], [3, 4])
    assert await lease is LeaseOutcome.READ


def revoke_all(pair: InprocPair) -> None:
    """End every lease of the producer, as `lease.revoke` does."""
    cache = pair.producer.runtime._supervisor.cache
    assert cache is not None
    cache.serving.close()
