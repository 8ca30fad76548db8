"""Loads that cannot go straight: through scratch memory, through host buffers, through both."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests_support import PATIENT, WAIT_S, in_virtual_time, leases_ended, limited, until

from kvflow import CacheLayout, Config, Lease, LeaseOutcome, LoadReport, LoadRequest, Runtime, ServeRequest
from kvflow.core.cache.tensors import KVCaches
from kvflow.errors import (
    ConfigError,
    DeadlineExceeded,
    LeaseExpired,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.runtime.memory.copies import copy_blocks
from kvflow.runtime.memory.host_buffers import CopyDirection
from kvflow.runtime.world import World
from kvflow.testing import (
    CacheSize,
    InprocCluster,
    TestEngine,
    assert_blocks_equal,
    assert_closed,
    assert_loaded,
    assert_quiet,
)
from kvflow.testing.copier import InlineCopier
from kvflow.testing.pair import Engine, open_engine
from kvflow.transport.inproc import InprocNetwork, InprocTransport

HEADS, HEAD_SIZE, LAYERS, BLOCKS = 4, 8, 2, 12
PROMPT = 37


Side = TestEngine
SIZE = CacheSize(layers=LAYERS, num_blocks=BLOCKS, kv_heads=HEADS, head_size=HEAD_SIZE)


@contextlib.asynccontextmanager
async def engines(
    producer: Config, consumer: Config, orders: tuple[str, str] = ("NHD", "HND"), sizes: tuple[int, int] = (4, 4)
) -> AsyncIterator[tuple[Side, Side]]:
    network = InprocNetwork()

    def make(_: Config, name: str) -> InprocTransport:
        return InprocTransport(name, network)

    one_size, other_size = (
        SIZE._replace(order=order, block_size=size) for order, size in zip(orders, sizes, strict=True)
    )
    async with (
        open_engine("producer", producer, make, size=one_size) as one,
        open_engine("consumer", consumer, make, size=other_size) as other,
    ):
        yield one, other
        for side in (one, other):
            if side.runtime.statistics().serving is not None:
                assert_quiet(side.runtime.statistics())


BASE = replace(PATIENT, listen="tcp://127.0.0.1:0", transport="inproc")
ALWAYS = replace(BASE, scratch="always")
STAGED = replace(BASE, staging="always", host_buffer_bytes_max=6 * 2 * LAYERS * HEADS * HEAD_SIZE * 4 * 4)


async def hand_over(one: Side, other: Side, prefix_blocks: int = 0) -> LoadReport:
    """Offer a prompt whose last block is partly filled, load what is not cached, and look at every byte."""
    ours, theirs = other.layout.block_size, one.layout.block_size
    offered = list(range(BLOCKS))[::-1][: -(-PROMPT // theirs)]
    local = [(7 * block + 3) % BLOCKS for block in range(-(-PROMPT // ours))]
    lease = one.runtime.serve_blocks(ServeRequest("req", block_ids=offered, num_tokens=PROMPT))
    wanted = local[prefix_blocks:]
    report = await other.runtime.load_blocks(LoadRequest("req", ticket=lease.ticket.to_params(), block_ids=wanted))
    assert await lease is LeaseOutcome.READ
    start = prefix_blocks * ours
    assert report.tokens == PROMPT - start
    assert_loaded(other.cache, wanted, one.cache, offered, num_tokens=PROMPT)
    return report


@pytest.mark.parametrize("prefix_blocks", [0, 1])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4), (16, 4)], ids=str)
@pytest.mark.parametrize("orders", [("NHD", "HND"), ("HND", "NHD"), ("HND", "HND")], ids=str)
@pytest.mark.parametrize(
    ("producer", "consumer"),
    [(BASE, ALWAYS), (STAGED, BASE), (BASE, STAGED), (STAGED, replace(STAGED, scratch="always"))],
    ids=["scratch", "staged producer", "staged consumer", "all"],
)
async def test_every_way_moves_the_right_bytes(
    producer: Config, consumer: Config, orders: tuple[str, str], sizes: tuple[int, int], prefix_blocks: int
) -> None:
    blocks_max = producer.host_buffer_bytes_max // (2 * LAYERS * HEADS * HEAD_SIZE * 4 * sizes[0])
    if producer.staging == "always" and blocks_max * sizes[0] < PROMPT:
        producer = replace(producer, host_buffer_bytes_max=1 << 20)
    async with engines(producer, consumer, orders, sizes) as (one, other):
        report = await hand_over(one, other, prefix_blocks)
        if consumer.scratch == "always" and orders[0] != orders[1] and sizes == (4, 4):
            assert report.descriptors < 2 * LAYERS * (BLOCKS + 1)  # whole blocks, not pieces
        assert one.runtime.statistics().buffers_used == other.runtime.statistics().buffers_used == 0


# --- a device that the transport cannot reach, and an engine that copies


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A tensor on a device of a kind that no transport reaches; only its engine can copy it."""

    inside: torch.Tensor

    @property
    def device(self) -> torch.device:
        return torch.device("xpu", 0)

    @property
    def shape(self) -> Sequence[int]:
        return self.inside.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.inside.dtype

    def stride(self) -> Sequence[int]:
        return self.inside.stride()

    def element_size(self) -> int:
        return self.inside.element_size()

    def data_ptr(self) -> int:
        return self.inside.data_ptr()


class EngineCopier:
    """An engine's own copy function, which a test can hold up or break."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.calls: list[tuple[list[tuple[int, int]], CopyDirection]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.problem: Exception | None = None

    def __call__(self, host_caches: Any, pairs: Sequence[tuple[int, int]], direction: CopyDirection) -> None:
        self.calls.append((list(pairs), direction))
        self.gate.wait(WAIT_S)
        if self.problem is not None:
            raise self.problem
        device_ids, host_ids = (np.array(ids, dtype=np.int64) for ids in zip(*pairs, strict=True))
        layout = self.side.layout
        if direction is CopyDirection.TO_HOST:
            copy_blocks(self.side.kv_caches, host_caches, layout, device_ids, host_ids)
        else:
            copy_blocks(host_caches, self.side.kv_caches, layout, host_ids, device_ids)


@contextlib.asynccontextmanager
async def unreachable(
    network: InprocNetwork,
    config: Config,
    world: World = World(),  # noqa: B008 - frozen
) -> AsyncIterator[tuple[Side, EngineCopier]]:
    """An engine whose cache the transport cannot reach."""
    caches, cache = SIZE.make(config.engine_id)
    made: list[InprocTransport] = []

    def make(_: Config, name: str) -> InprocTransport:
        made.append(InprocTransport(name, network))
        return made[0]

    async with Runtime(config, world=replace(world, transport=make)) as runtime:
        side = Engine(runtime=runtime, transport=made[0], kv_caches=caches, layout=cache.layout, cache=cache)
        copier = EngineCopier(side)
        outside: KVCaches = {name: Elsewhere(tensor) for name, tensor in caches.items()}
        await runtime.register_kv_caches(outside, cache.layout, copy_blocks=copier)
        yield side, copier
        copier.gate.set()
        await leases_ended(runtime)
        assert_quiet(runtime.statistics())
    assert_closed(runtime.statistics())


@contextlib.asynccontextmanager
async def unreachable_pair(
    config: Config = BASE,
    *,
    consumer: Config | None = None,
    world: World = World(),  # noqa: B008 - frozen
) -> AsyncIterator[tuple[tuple[Side, EngineCopier], tuple[Side, EngineCopier]]]:
    """The consumer may have a config of its own."""
    network = InprocNetwork()
    async with (
        unreachable(network, replace(config, engine_id="producer"), world) as giver,
        unreachable(network, replace(consumer or config, engine_id="consumer"), world) as taker,
    ):
        yield giver, taker


def offer(side: Side, block_ids: Sequence[int], request_id: str = "req", ttl_s: float | None = None) -> Lease:
    tokens = len(block_ids) * side.layout.block_size
    return side.runtime.serve_blocks(ServeRequest(request_id, block_ids=block_ids, num_tokens=tokens, ttl_s=ttl_s))


async def ended(lease: Lease) -> LeaseOutcome:
    async with asyncio.timeout(WAIT_S):
        return await lease


def wanted(lease: Lease, block_ids: Sequence[int], deadline_s: float | None = None) -> LoadRequest:
    return LoadRequest(lease.request_id, ticket=lease.ticket.to_params(), block_ids=block_ids, deadline_s=deadline_s)


async def test_an_engine_copies_for_a_device_that_no_transport_reaches() -> None:
    async with unreachable_pair() as ((one, saved), (other, loaded)):
        lease = offer(one, [3, 7, 9])
        assert lease.ticket.block_ids == (3, 7, 9)
        await other.runtime.load_blocks(wanted(lease, [5, 0, 2]))
        assert await ended(lease) is LeaseOutcome.READ
        assert_loaded(other.cache, [5, 0, 2], one.cache, [3, 7, 9])
        assert [block for pairs, _ in saved.calls for block, _ in pairs] == [3, 7, 9]
        assert {direction for _, direction in saved.calls} == {CopyDirection.TO_HOST}
        assert [block for pairs, _ in loaded.calls for block, _ in pairs] == [5, 0, 2]
        assert {direction for _, direction in loaded.calls} == {CopyDirection.TO_DEVICE}


async def test_a_reader_that_comes_early_waits_for_the_blocks() -> None:
    async with unreachable_pair() as ((one, saved), (other, _)):
        saved.gate.clear()
        lease = offer(one, [3, 7])
        load = asyncio.create_task(other.runtime.load_blocks(wanted(lease, [0, 1])))
        await until(lambda: other.transport.statistics.reads >= 3)  # it looks at the seal again and again
        assert not load.done()
        seen = other.transport.statistics
        assert seen.bytes_read == 16 * (seen.reads - seen.open_reads)  # seals, and nothing else
        saved.gate.set()
        assert (await load).blocks == 2
        assert_blocks_equal(other.cache, [0, 1], one.cache, [3, 7])


@in_virtual_time
async def test_blocks_that_come_too_late_cost_the_deadline_and_nothing_else() -> None:
    slow = replace(InprocCluster().world(), copier=partial(InlineCopier, duration_s=lambda: 1.0))
    async with unreachable_pair(world=slow) as ((one, _), (other, _)):
        lease = offer(one, [3])
        with pytest.raises(DeadlineExceeded, match="in phase 'wire'"):
            await other.runtime.load_blocks(wanted(lease, [0], deadline_s=0.5))
        await other.runtime.load_blocks(wanted(lease, [0]))
        assert await ended(lease) is LeaseOutcome.READ


async def test_nothing_is_reported_before_it_is_on_the_device() -> None:
    async with unreachable_pair() as ((one, _), (other, loaded)):
        loaded.gate.clear()
        lease = offer(one, [3])
        load = asyncio.create_task(other.runtime.load_blocks(wanted(lease, [0])))
        await until(lambda: loaded.calls)
        assert not load.done()
        assert not lease.done
        blocks = other.runtime.statistics().blocks
        assert blocks is not None
        assert blocks.in_flight == 1
        loaded.gate.set()
        await load
        assert_blocks_equal(other.cache, [0], one.cache, [3])


async def test_closing_says_that_a_copy_still_writes() -> None:
    """It cannot be stopped; who frees the cache after an orderly end would have it written to."""
    brief = limited(replace(BASE, drain_timeout_s=0.05, cancel_grace_s=0.05), transport_close_timeout_s=0.05)
    async with unreachable_pair(consumer=brief) as ((one, _), (other, loaded)):
        loaded.gate.clear()
        lease = offer(one, [3])
        load = asyncio.create_task(other.runtime.load_blocks(wanted(lease, [0])))
        await until(lambda: loaded.calls)
        with pytest.raises(RuntimeBroken, match=r"'consumer' .*: a copy still runs"):
            await other.runtime.aclose()
        with pytest.raises(RuntimeClosed):
            await load
        (quarantine,) = other.runtime.quarantines
        loaded.gate.set()
        async with asyncio.timeout(WAIT_S):
            await quarantine.settled()
        lease.revoke()


async def test_a_failed_copy_to_the_host_revokes_the_lease() -> None:
    async with unreachable_pair() as ((one, saved), (other, _)):
        saved.problem = RuntimeError("the device is on fire")
        lease = offer(one, [3])
        assert await ended(lease) is LeaseOutcome.REVOKED
        with pytest.raises(LeaseExpired):
            await other.runtime.load_blocks(wanted(lease, [0]))
        saved.problem = None
        again = offer(one, [3])
        await other.runtime.load_blocks(wanted(again, [0]))


async def test_a_failed_copy_to_the_device_fails_the_load_and_blames_no_peer() -> None:
    async with unreachable_pair() as ((one, _), (other, loaded)):
        loaded.problem = RuntimeError("the device is on fire")
        lease = offer(one, [3])
        with pytest.raises(TransferFailed, match="the device is on fire"):
            await other.runtime.load_blocks(wanted(lease, [0]))
        loaded.problem = None
        await other.runtime.load_blocks(wanted(lease, [0]))
        assert_blocks_equal(other.cache, [0], one.cache, [3])
        listener = one.runtime.statistics().listener
        assert listener is not None
        assert listener.answered == 1  # no second handshake


async def test_a_partly_filled_block_that_cannot_be_fetched_fails_the_load() -> None:
    async with unreachable_pair() as ((one, _), (other, loaded)):
        loaded.problem = RuntimeError("the device is on fire")
        lease = one.runtime.serve_blocks(ServeRequest("req", block_ids=[3], num_tokens=2))
        with pytest.raises(TransferFailed, match="the device is on fire"):
            await other.runtime.load_blocks(wanted(lease, [0]))
        assert loaded.calls[0][1] is CopyDirection.TO_HOST
        assert other.runtime.statistics().buffers_used == 0
        loaded.problem = None
        await other.runtime.load_blocks(wanted(lease, [0]))


async def test_a_cancelled_load_gives_its_buffers_back_when_the_copy_has_ended() -> None:
    config = replace(BASE, cancel_grace_s=0.02)
    async with unreachable_pair(config) as ((one, _), (other, loaded)):
        loaded.gate.clear()
        lease = offer(one, [3])
        load = asyncio.create_task(other.runtime.load_blocks(wanted(lease, [0])))
        await until(lambda: loaded.calls)
        load.cancel()
        await asyncio.wait([load])
        (quarantine,) = other.runtime.quarantines
        assert quarantine.block_ids == (0,)
        assert other.runtime.statistics().buffers_used == 1
        loaded.gate.set()
        await quarantine.settled()
        assert other.runtime.statistics().buffers_used == 0
        lease.revoke()
        await ended(lease)


def holds(engine: Side) -> bool:
    """Whether a lease is open, or its hold is not over."""
    cache = engine.runtime._supervisor.cache
    return cache is not None and len(cache.serving._book) > 0


async def test_a_lease_that_ends_while_it_is_copied_keeps_its_blocks_until_then() -> None:
    async with unreachable_pair() as ((one, saved), _):
        saved.gate.clear()
        lease = offer(one, [3, 4], ttl_s=0.01)
        await until(lambda: not holds(one))
        assert not lease.done
        blocks = one.runtime.statistics().blocks
        assert blocks is not None
        assert blocks.leased == 2
        saved.gate.set()
        assert await ended(lease) is LeaseOutcome.EXPIRED
        assert one.runtime.statistics().buffers_used == 0


async def test_a_lease_that_is_revoked_while_it_is_copied_keeps_its_blocks_until_then() -> None:
    async with unreachable_pair() as ((one, saved), (other, _)):
        saved.gate.clear()
        lease = offer(one, [3, 4])
        load = asyncio.create_task(other.runtime.load_blocks(wanted(lease, [0, 1])))
        await until(lambda: other.transport.statistics.reads >= 2)
        lease.revoke()
        await until(lambda: not holds(one))
        lease.revoke()
        assert not lease.done
        blocks = one.runtime.statistics().blocks
        assert blocks is not None
        assert blocks.leased == 2
        with pytest.raises(LeaseExpired):
            await load
        saved.gate.set()
        assert await ended(lease) is LeaseOutcome.REVOKED
        assert one.runtime.statistics().buffers_used == 0


SMALL = replace(BASE, host_buffer_bytes_max=3 * 2 * LAYERS * HEADS * HEAD_SIZE * 4 * 4)


async def test_host_buffers_are_bounded_for_offers() -> None:
    async with unreachable_pair(SMALL) as ((one, _), (other, _)):
        first = offer(one, [0, 1], "first")
        with pytest.raises(RequestError, match=r"2 host blocks are needed, 1 of 3 are free \(host_buffer_bytes_max\)"):
            offer(one, [2, 3], "second")
        assert one.runtime.statistics().blocks.free == BLOCKS - 2  # type: ignore[union-attr]
        await other.runtime.load_blocks(wanted(first, [0, 1]))
        await ended(first)
        await other.runtime.load_blocks(wanted(offer(one, [2, 3], "second"), [2, 3]))


async def test_loads_larger_than_the_host_buffers_take_turns() -> None:
    async with unreachable(InprocNetwork(), replace(BASE, engine_id="x")):
        pass
    network = InprocNetwork()
    async with (
        unreachable(network, replace(BASE, engine_id="producer")) as (one, _),
        unreachable(network, replace(SMALL, engine_id="consumer")) as (other, loaded),
    ):
        leases = [offer(one, range(6), "a"), offer(one, range(6, 12), "b")]
        async with asyncio.TaskGroup() as group:
            group.create_task(other.runtime.load_blocks(wanted(leases[0], range(6))))
            group.create_task(other.runtime.load_blocks(wanted(leases[1], range(6, 12))))
        assert_blocks_equal(other.cache, range(12), one.cache, range(12))
        assert max(host for pairs, _ in loaded.calls for _, host in pairs) < 3
        assert [await ended(lease) for lease in leases] == [LeaseOutcome.READ] * 2


async def test_host_buffers_too_small_for_a_block_are_refused() -> None:
    config = replace(BASE, engine_id="x", staging="always", host_buffer_bytes_max=100)
    caches = {"layers.0": torch.zeros(2, BLOCKS, HEADS, 4, HEAD_SIZE)}
    world = World(transport=lambda _, name: InprocTransport(name, InprocNetwork()))
    async with Runtime(config, world=world) as runtime:
        with pytest.raises(ConfigError, match="host_buffer_bytes_max: 100 bytes hold no block, which has 1024"):
            await runtime.register_kv_caches(caches, CacheLayout.infer(caches, order="HND", block_size=4))
