"""Events of a device: no block is read before it is computed, nothing lands where the device still writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace

import pytest

from kvflow import LeaseOutcome, LoadRequest, Runtime, ServeRequest, Ticket
from kvflow.errors import DeadlineExceeded, LeaseExpired, PrefillFailed, RequestError, TransferFailed
from kvflow.runtime.copy_thread import CopyThread
from kvflow.testing import (
    CacheSize,
    InprocCluster,
    InprocPair,
    PatternCache,
    assert_blocks_equal,
    inproc_pair,
    nixl_pair,
)
from kvflow.testing.pair import Engine, TransportT
from tests.support.tests_support import PATIENT, WAIT_S, each, in_virtual_time, limited, until

CONFIG = limited(replace(PATIENT, listen="tcp://127.0.0.1:0"), slice_bytes_max=64)


class Event:
    """A device event that tests control."""

    def __init__(self) -> None:
        self.happened = False
        self.asked = 0
        self.error: Exception | None = None

    def query(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.happened

    def synchronize(self) -> None:
        raise AssertionError("nobody blocks")

    def happen(self) -> None:
        self.happened = True


def pair_of(staging: str = "never") -> AbstractAsyncContextManager[InprocPair]:
    world = InprocCluster().world()
    return inproc_pair(config=replace(CONFIG, staging=staging), producer_world=world, consumer_world=world)


def erase(engine: Engine[TransportT], block_ids: Sequence[int]) -> None:
    """Overwrite blocks, as if they were not computed."""
    for tensor in engine.kv_caches.values():
        tensor[:, list(block_ids)] = 0.0


@pytest.mark.parametrize("staging", ["never", "always"])
@in_virtual_time
async def test_nobody_reads_what_is_not_computed(staging: str) -> None:
    async with pair_of(staging) as pair:
        erase(pair.producer, [1, 2, 3])
        ready = Event()
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", [1, 2, 3], num_tokens=12, ready=ready))
        load = pair.consumer.runtime.start_load(pair.wanted(lease, [4, 5, 6]))
        await asyncio.sleep(0.2)
        assert not load.done
        pair.consumer.cache.assert_untouched()
        pair.producer.cache.fill([1, 2, 3])
        ready.happen()
        await load
        pair.assert_loaded([4, 5, 6], [1, 2, 3])
        assert await lease is LeaseOutcome.READ


@in_virtual_time
async def test_an_event_that_has_happened_is_asked_once() -> None:
    async with pair_of() as pair:
        event = Event()
        event.happen()
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4, ready=event))
        assert not lease.ticket.first.pending
        await pair.consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [4], after=event))
        assert event.asked == 2


@pytest.mark.parametrize("named", [True, False])
@in_virtual_time
async def test_a_rank_that_is_asked_says_that_it_still_computes(named: bool) -> None:
    """A ticket that names one of two ranks: the other one's lease is found by asking."""
    world, size = InprocCluster().world(), CacheSize(kv_heads=1)
    config = replace(CONFIG, engine_id="prefill", listen="tcp://127.0.0.1:5600", tp_size=2, num_kv_heads=2)
    async with AsyncExitStack() as stack:
        ranks = []
        for tp_rank in range(2):
            runtime = await stack.enter_async_context(Runtime(replace(config, tp_rank=tp_rank), world=world))
            kv_caches, cache = size.make("prefill")
            await runtime.register_kv_caches(kv_caches, cache.layout)
            ranks.append((runtime, PatternCache("prefill", kv_caches, cache.layout, first_head=tp_rank)))
            ranks[-1][1].fill()
        decode = await stack.enter_async_context(Runtime(replace(CONFIG, engine_id="decode"), world=world))
        kv_caches, found = CacheSize().make("decode")
        await decode.register_kv_caches(kv_caches, found.layout)

        events = [Event(), Event()]
        leases = [
            runtime.serve_blocks(ServeRequest("req", [1, 2], num_tokens=8, ready=event))
            for (runtime, _), event in zip(ranks, events, strict=True)
        ]
        events[0 if named else 1].happen()
        late = ranks[1 if named else 0][1]
        late.slots(0, 0)[1:3] = 0
        load = decode.start_load(LoadRequest("req", leases[0].ticket, [4, 5]))
        await asyncio.sleep(0.1)
        assert not load.done
        late.fill([1, 2])
        events[1 if named else 0].happen()
        await load
        for _, cache in ranks:
            assert_blocks_equal(found, [4, 5], cache, [1, 2])


@in_virtual_time
async def test_no_byte_lands_before_the_device_has_left_the_blocks_alone() -> None:
    async with pair_of() as pair:
        after = Event()
        load = pair.consumer.runtime.start_load(replace(pair.wanted(pair.offer([1]), [4]), after=after))
        await asyncio.sleep(0.2)
        pair.consumer.cache.assert_untouched()
        erase(pair.consumer, [4])  # the last step of who had the block before
        after.happen()
        report = await load
        assert report.seconds["queued"] > 0.19
        pair.assert_loaded([4], [1])


@in_virtual_time
async def test_a_load_that_ends_while_it_waits_has_safe_blocks() -> None:
    async with pair_of() as pair:
        wanted, decode = pair.wanted(pair.offer([1]), [4]), pair.consumer.runtime
        after, other = Event(), Event()
        with pytest.raises(DeadlineExceeded, match="in phase 'queued'"):
            await decode.load_blocks(replace(wanted, deadline_s=0.1, after=after))
        load = decode.start_load(replace(wanted, after=after))
        await asyncio.sleep(0.05)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert load.safe
        asked = after.asked
        other.error = RuntimeError("illegal memory access")
        with pytest.raises(TransferFailed, match=r"'req'.*`after` failed: illegal memory access"):
            await decode.load_blocks(replace(wanted, after=other))
        await asyncio.sleep(1.0)
        assert after.asked == asked, "nobody waits any more"
        await decode.load_blocks(wanted)


@in_virtual_time
async def test_a_lease_that_ends_before_its_prompt_is_computed() -> None:
    """Expired, revoked, or its event has failed: a reader finds out, whatever the event does later."""
    async with pair_of() as pair:
        producer, events = pair.producer.runtime, [Event() for _ in range(3)]
        leases = [
            producer.serve_blocks(ServeRequest(f"r{at}", [at], num_tokens=4, ttl_s=0.5, ready=event))
            for at, event in enumerate(events)
        ]
        loads = [
            pair.consumer.runtime.start_load(pair.wanted(lease, [at], deadline_s=9.0))
            for at, lease in enumerate(leases[1:], 1)
        ]
        await asyncio.sleep(0.1)
        leases[1].revoke()
        events[2].error = RuntimeError("illegal memory access")
        assert [await lease for lease in leases] == [LeaseOutcome.EXPIRED, LeaseOutcome.REVOKED, LeaseOutcome.FAILED]
        for load, error in zip(loads, (LeaseExpired, PrefillFailed), strict=True):
            with pytest.raises(error):
                await load
        asked = events[0].asked
        await asyncio.sleep(1.0)
        assert events[0].asked == asked
        events[1].happen()
        await asyncio.sleep(0.1)
        pair.consumer.cache.assert_untouched()
        pair.offer([0, 1, 2], "next").revoke()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("a caller's own code")


@each("error", [RuntimeError("\ud800"), RuntimeError("x" * 1_000_000), RuntimeError("a\nb\x1b[2J"), Unspeakable()])
@each("end", ["ready", "advance", "after"])
@in_virtual_time
async def test_an_event_may_fail_with_any_words(error: Exception, end: str) -> None:
    """Waiting readers and late readers get a reason that fits in a message."""
    async with pair_of() as pair:
        event = Event()
        grows = {"computed_tokens": 0} if end == "advance" else {"ready": event if end == "ready" else None}
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4, **grows))
        if end == "advance":
            lease.advance(4, event)
        wanted = pair.wanted(lease, [1], deadline_s=9.0)
        if end == "after":
            wanted = replace(wanted, after=event)
        late = replace(wanted, ticket=Ticket.rendezvous(lease.ticket, "req"), block_ids=[2], after=None)
        load = pair.consumer.runtime.start_load(wanted)
        await asyncio.sleep(0.1)
        event.error = error
        with pytest.raises(TransferFailed if end == "after" else PrefillFailed) as caught:
            await load
        assert str(caught.value).isprintable()
        if end == "after":
            lease.revoke()
        else:
            with pytest.raises(PrefillFailed) as caught:
                await pair.consumer.runtime.load_blocks(late)
            assert str(caught.value).isprintable()
            assert await lease is LeaseOutcome.FAILED
        assert len(str(caught.value)) < 1000
        pair.offer([0, 1, 2], "next").revoke()


@in_virtual_time
async def test_what_is_no_event_is_refused() -> None:
    async with pair_of() as pair:
        broken = Event()
        broken.error = RuntimeError("not recorded")
        for ready, problem in (
            (7, "ready: expected an event with query"),
            (broken, r"ready: its query\(\) failed: not rec"),
        ):
            with pytest.raises(RequestError, match=f"'req': {problem}"):
                pair.producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4, ready=ready))  # type: ignore[arg-type]
        wanted = pair.wanted(pair.offer([1]), [4])
        with pytest.raises(RequestError, match="'req': after: expected an event with query"):
            await pair.consumer.runtime.load_blocks(replace(wanted, after=7))  # type: ignore[arg-type]
        await pair.consumer.runtime.load_blocks(wanted)


@pytest.mark.nixl
async def test_events_over_real_nixl() -> None:
    async with nixl_pair(config=CONFIG) as pair:
        ready, after = Event(), Event()
        erase(pair.producer, [1])
        lease = pair.producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4, ready=ready))
        load = pair.consumer.runtime.start_load(replace(pair.wanted(lease, [4]), after=after))
        await until(lambda: after.asked > 1)
        after.happen()
        await until(lambda: ready.asked > 9)
        pair.consumer.cache.assert_untouched()
        pair.producer.cache.fill([1])
        ready.happen()
        await load
        pair.assert_loaded([4], [1])
        await lease


async def test_events_do_not_wait_for_each_other_nor_copies_for_them() -> None:
    thread = CopyThread("copies")
    never, soon = Event(), Event()
    ended: list[str] = []
    watch = thread.watch(never, lambda _: ended.append("never"))
    thread.watch(soon, lambda _: ended.append("soon"))
    await thread.run(lambda: None)
    await until(lambda: never.asked > 3)
    soon.happen()
    await until(lambda: ended == ["soon"])
    watch.dropped = True
    await thread.run(lambda: None)
    asked = never.asked
    await thread.run(lambda: None)
    assert never.asked == asked
    assert await thread.aclose(WAIT_S)
