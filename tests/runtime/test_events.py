"""Events of a device: nobody reads what is not computed, nothing lands where the device still writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvflow import CacheLayout, Config, LeaseOutcome, LoadRequest, Runtime, ServeRequest, blocking
from kvflow.errors import DeadlineExceeded, LeaseExpired, RequestError, TransferFailed
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster
from tests.tests_support import PATIENT, WAIT_S, in_virtual_time, limited, until

CONFIG = limited(replace(PATIENT, listen="tcp://127.0.0.1:0"), slice_bytes_max=64)


class Event:
    """What a device does, as tests decide."""

    def __init__(self) -> None:
        self.at: Callable[[], bool] = threading.Event().is_set
        self.asked = 0
        self.error: Exception | None = None

    def query(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.at()

    def synchronize(self) -> None:
        raise AssertionError("nobody blocks")

    def happen(self) -> None:
        self.at = lambda: True


@dataclass
class Side:
    runtime: Runtime
    cache: torch.Tensor


async def opened(world: World | None, config: Config, **more: Any) -> Side:
    runtime = Runtime(config, world=world)
    await runtime.__aenter__()
    cache = torch.zeros(2, 8, 4, 1, 8)
    await runtime.register_kv_caches({"layers.0": cache}, layout_of(cache), **more)
    return Side(runtime, cache)


def layout_of(cache: torch.Tensor) -> CacheLayout:
    return CacheLayout.infer({"layers.0": cache}, order="NHD", block_size=4)


async def pair(world: World | None, staging: str = "never") -> tuple[Side, Side]:
    producer = await opened(world, replace(CONFIG, engine_id="prefill", staging=staging))
    return producer, await opened(world, replace(CONFIG, engine_id="decode"))


async def closed(*sides: Side) -> None:
    for side in sides:
        await side.runtime.aclose()


@pytest.mark.parametrize("staging", ["never", "always"])
@in_virtual_time
async def test_nobody_reads_what_is_not_computed(staging: str) -> None:
    producer, consumer = await pair(InprocCluster().world(), staging)
    ready = Event()
    lease = producer.runtime.serve_blocks(ServeRequest("req", [1, 2, 3], num_tokens=12, ready=ready))
    load = consumer.runtime.start_load(LoadRequest("req", lease.ticket.to_params(), [4, 5, 6]))
    await asyncio.sleep(0.2)
    assert not load.done
    assert not consumer.cache.any()
    producer.cache[:, 1:4] = torch.rand(2, 3, 4, 1, 8)
    assert not load.done
    ready.happen()
    await load
    assert torch.equal(consumer.cache[:, 4:7], producer.cache[:, 1:4])
    assert await lease is LeaseOutcome.READ
    await closed(producer, consumer)


@in_virtual_time
async def test_an_event_that_has_happened_costs_nothing() -> None:
    producer, consumer = await pair(InprocCluster().world())
    ready = Event()
    ready.happen()
    lease = producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4, ready=ready))
    assert not lease.ticket.first.pending
    await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [4], after=ready))
    assert ready.asked == 2
    await closed(producer, consumer)


@pytest.mark.parametrize("named", [True, False])
@in_virtual_time
async def test_a_rank_that_is_asked_says_that_it_still_computes(named: bool) -> None:
    """A ticket that names one of two ranks: the other one's lease is found by asking."""
    world = InprocCluster().world()
    config = replace(CONFIG, engine_id="prefill", listen="tcp://127.0.0.1:5600", tp_size=2, num_kv_heads=2)
    ranks = [await opened(world, replace(config, tp_rank=rank)) for rank in range(2)]
    cache = torch.zeros(2, 8, 4, 2, 8)
    consumer = Runtime(replace(CONFIG, engine_id="decode"), world=world)
    await consumer.__aenter__()
    await consumer.register_kv_caches({"layers.0": cache}, layout_of(cache))
    events = [Event(), Event()]
    events[0 if named else 1].happen()
    leases = [
        rank.runtime.serve_blocks(ServeRequest("req", [1, 2], num_tokens=8, ready=event))
        for rank, event in zip(ranks, events, strict=True)
    ]
    load = consumer.start_load(LoadRequest("req", leases[0].ticket, [4, 5]))
    await asyncio.sleep(0.1)
    assert not load.done
    for rank, event in zip(ranks, events, strict=True):
        rank.cache[:, 1:3] = torch.rand(2, 2, 4, 1, 8)
        event.happen()
    if named:  # what rank 0 said to have computed was read before this test wrote it
        await load
        assert torch.equal(cache[:, 4:6, :, 1:], ranks[1].cache[:, 1:3])
    else:
        await load
        assert torch.equal(cache[:, 4:6, :, :1], ranks[0].cache[:, 1:3])
    await consumer.aclose()
    await closed(*ranks)


@in_virtual_time
async def test_no_byte_lands_before_the_device_has_left_the_blocks_alone() -> None:
    producer, consumer = await pair(InprocCluster().world())
    producer.cache.fill_(7.0)
    lease = producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4))
    after = Event()
    load = consumer.runtime.start_load(LoadRequest("req", lease.ticket, [4], after=after))
    await asyncio.sleep(0.2)
    assert not consumer.cache.any()
    consumer.cache[:, 4] = 1.0  # the last step of who had the block before
    after.happen()
    report = await load
    assert report.seconds["queued"] > 0.19
    assert bool((consumer.cache[:, 4] == 7.0).all())
    await closed(producer, consumer)


@in_virtual_time
async def test_a_load_that_ends_while_it_waits_has_safe_blocks() -> None:
    producer, consumer = await pair(InprocCluster().world())
    lease = producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4))
    after, other = Event(), Event()
    with pytest.raises(DeadlineExceeded, match="in phase 'queued'"):
        await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [4], deadline_s=0.1, after=after))
    load = consumer.runtime.start_load(LoadRequest("req", lease.ticket, [4], after=after))
    await asyncio.sleep(0.05)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert load.safe
    asked = after.asked
    other.error = RuntimeError("illegal memory access")
    with pytest.raises(TransferFailed, match=r"'req'.*`after` failed: illegal memory access"):
        await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [4], after=other))
    await asyncio.sleep(1.0)
    assert after.asked == asked, "nobody waits any more"
    await closed(producer, consumer)


@in_virtual_time
async def test_a_lease_that_ends_before_its_prompt_is_computed() -> None:
    """Expired, revoked, or its event has failed: a reader finds out, whatever the event does later."""
    producer, consumer = await pair(InprocCluster().world())
    events = [Event() for _ in range(3)]
    leases = [
        producer.runtime.serve_blocks(ServeRequest(f"r{at}", [at], num_tokens=4, ttl_s=0.5, ready=event))
        for at, event in enumerate(events)
    ]
    loads = [
        consumer.runtime.start_load(LoadRequest(f"r{at}", lease.ticket, [at], deadline_s=9.0))
        for at, lease in enumerate(leases[1:], 1)
    ]
    await asyncio.sleep(0.1)
    leases[1].revoke()
    events[2].error = RuntimeError("illegal memory access")
    assert [await lease for lease in leases] == [LeaseOutcome.EXPIRED, LeaseOutcome.REVOKED, LeaseOutcome.REVOKED]
    for load in loads:
        with pytest.raises(LeaseExpired):
            await load
    asked = events[0].asked
    await asyncio.sleep(1.0)
    assert events[0].asked == asked
    events[1].happen()
    await asyncio.sleep(0.1)
    producer.runtime.serve_blocks(ServeRequest("next", [0, 1, 2], num_tokens=12)).revoke()
    await closed(producer, consumer)


@in_virtual_time
async def test_what_is_no_event_is_refused() -> None:
    producer, consumer = await pair(InprocCluster().world())
    broken = Event()
    broken.error = RuntimeError("not recorded")
    for ready, problem in (
        (7, "ready: expected an event with query"),
        (broken, r"ready: its query\(\) failed: not rec"),
    ):
        with pytest.raises(RequestError, match=f"'req': {problem}"):
            producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4, ready=ready))  # type: ignore[arg-type]
    lease = producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4))
    with pytest.raises(RequestError, match="'req': after: expected an event with query"):
        await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [4], after=7))  # type: ignore[arg-type]
    await closed(producer, consumer)


@pytest.mark.nixl
async def test_events_over_real_nixl() -> None:
    producer, consumer = await pair(None)
    ready, after = Event(), Event()
    lease = producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4, ready=ready))
    load = consumer.runtime.start_load(LoadRequest("req", lease.ticket, [4], after=after))
    await until(lambda: after.asked > 1)
    after.happen()
    await until(lambda: ready.asked > 9)
    producer.cache[:, 1] = 5.0
    ready.happen()
    await load
    assert bool((consumer.cache[:, 4] == 5.0).all())
    await lease
    await closed(producer, consumer)


@pytest.mark.nixl
def test_events_of_a_callers_thread() -> None:
    """In `kvflow.blocking`: the loop has a thread of its own."""
    cache = torch.zeros(2, 8, 4, 1, 8)
    with blocking.Runtime(replace(CONFIG, engine_id="prefill")) as producer:
        producer.register_kv_caches({"layers.0": cache}, layout_of(cache))
        ready = Event()
        lease = producer.serve_blocks(ServeRequest("req", [1], num_tokens=4, ttl_s=60.0, ready=ready))
        assert lease.ticket.first.pending
        ready.happen()
        lease.revoke()
        assert lease.wait(WAIT_S) is LeaseOutcome.REVOKED


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
