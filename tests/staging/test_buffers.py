"""Loads that cannot go straight: through scratch memory, through host buffers, through both; and the buffers' pool."""

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
from pairs import EnginePair, host_of
from tests_support import PATIENT, WAIT_S, in_virtual_time, limited, small_cache, until

from kvflow import Config, LeaseOutcome, LoadReport, Runtime, ServeRequest
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.policy.states import PeerState
from kvflow.errors import (
    ConfigError,
    DeadlineExceeded,
    HostBlocksBusy,
    LeaseExpired,
    PrefillFailed,
    RuntimeBroken,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.runtime.memory import CopyDirection, Pool
from kvflow.runtime.world import World
from kvflow.staging.copies import block_rows, copy_blocks, copy_on_host
from kvflow.testing import CacheSize, InprocCluster, TestEngine, assert_closed, assert_loaded
from kvflow.testing.copier import InlineCopier
from kvflow.testing.pair import Engine, open_engine
from kvflow.transport.inproc import InprocNetwork, InprocTransport

HEADS, HEAD_SIZE, LAYERS, BLOCKS = 4, 8, 2, 12
BLOCK_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * 4 * 4
SIZE = CacheSize(layers=LAYERS, num_blocks=BLOCKS, kv_heads=HEADS, head_size=HEAD_SIZE)

BASE = replace(PATIENT, listen="tcp://127.0.0.1:0", transport="inproc")
SMALL = replace(BASE, host_buffer_bytes_max=3 * BLOCK_BYTES)
BRIEF = limited(replace(BASE, drain_timeout_s=0.05, cancel_grace_s=0.05), transport_close_timeout_s=0.05)


@contextlib.asynccontextmanager
async def engines(*sides: tuple[str, Config, str]) -> AsyncIterator[EnginePair]:
    """Two, by name, config and order."""
    network = InprocNetwork()
    async with contextlib.AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(
                open_engine(
                    name, config, lambda _, agent: InprocTransport(agent, network), size=SIZE._replace(order=order)
                )
            )
            for name, config, order in sides
        ]
        pair = EnginePair(producer=made[0], consumer=made[1])
        yield pair
        await pair.assert_all_ended()


async def test_scratch_memory_reads_whole_blocks_and_not_pieces() -> None:
    """`test_topologies` compares the bytes, for every way."""
    async with engines(("producer", BASE, "NHD"), ("consumer", replace(BASE, scratch="always"), "HND")) as pair:
        report = await pair.load(pair.offer(range(BLOCKS)), range(BLOCKS))
        assert report.descriptors < 2 * LAYERS * (BLOCKS + 1)
        pair.assert_loaded(range(BLOCKS), range(BLOCKS))


# --- a device that the transport cannot reach, and an engine that copies


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A tensor on a device of a kind that no transport reaches; only its engine can copy it."""

    inside: torch.Tensor
    device = torch.device("xpu", 0)

    def __getattr__(self, name: str) -> Any:
        if name not in ("shape", "dtype", "stride", "element_size", "data_ptr"):
            raise AttributeError(name)
        return getattr(self.inside, name)


class EngineCopier:
    """An engine's own copy function, which a test can hold up or break."""

    def __init__(self, side: TestEngine) -> None:
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
        ours, hosts = (block_rows(caches, self.side.layout) for caches in (self.side.kv_caches, host_caches))
        if direction is CopyDirection.TO_HOST:
            copy_blocks(ours, hosts, device_ids, host_ids, copy_on_host)
        else:
            copy_blocks(hosts, ours, host_ids, device_ids, copy_on_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class FarPair(EnginePair):
    """Two engines with caches that the transport cannot reach, and the threads that copy."""

    saved: EngineCopier
    loaded: EngineCopier

    @property
    def bytes_read(self) -> int:
        """Seals included, which have 16 each."""
        return self.transport.statistics.bytes_read

    async def hold_copy(self, block: int = 3) -> asyncio.Task[LoadReport]:
        """Start a load. Its copy to the device waits until the gate opens."""
        self.loaded.gate.clear()
        task = self.start(self.offer([block]))
        await until(lambda: self.loaded.calls)
        return task


@contextlib.asynccontextmanager
async def unreachable(
    network: InprocNetwork, config: Config, world: World
) -> AsyncIterator[tuple[TestEngine, EngineCopier]]:
    caches, cache = SIZE.make(config.engine_id)
    made: list[InprocTransport] = []

    def make(_: Config, name: str) -> InprocTransport:
        made.append(InprocTransport(name, network))
        return made[0]

    async with Runtime(config, world=replace(world, transport=make)) as runtime:
        side = Engine(runtime=runtime, transports=made, kv_caches=caches, layout=cache.layout, cache=cache)
        copier = EngineCopier(side)
        outside: KVCaches = {name: Elsewhere(tensor) for name, tensor in caches.items()}
        await runtime.register_kv_caches(outside, cache.layout, copy_blocks=copier)
        yield side, copier
    assert_closed(runtime.statistics())


@contextlib.asynccontextmanager
async def far_pair(
    config: Config = BASE,
    *,
    consumer: Config | None = None,
    world: World = World(),  # noqa: B008 - frozen
) -> AsyncIterator[FarPair]:
    """The consumer may have a config of its own."""
    network = InprocNetwork()
    async with (
        unreachable(network, replace(config, engine_id="producer"), world) as (one, saved),
        unreachable(network, replace(consumer or config, engine_id="consumer"), world) as (other, loaded),
    ):
        pair = FarPair(producer=one, consumer=other, saved=saved, loaded=loaded)
        yield pair
        saved.gate.set()
        await pair.assert_all_ended()


@pytest.fixture
async def far() -> AsyncIterator[FarPair]:
    async with far_pair() as pair:
        yield pair


FIRE = RuntimeError("the device is on fire")


async def test_an_engine_copies_for_a_device_that_no_transport_reaches(far: FarPair) -> None:
    lease = far.offer([3, 7, 9])
    assert lease.ticket.block_ids == (3, 7, 9)
    await far.load(lease, [5, 0, 2])
    assert await lease is LeaseOutcome.READ
    far.assert_loaded([5, 0, 2], [3, 7, 9])
    for copier, blocks, way in (
        (far.saved, [3, 7, 9], CopyDirection.TO_HOST),
        (far.loaded, [5, 0, 2], CopyDirection.TO_DEVICE),
    ):
        assert [block for pairs, _ in copier.calls for block, _ in pairs] == blocks
        assert {direction for _, direction in copier.calls} == {way}


async def test_a_reader_that_comes_early_waits_for_the_blocks(far: FarPair) -> None:
    far.saved.gate.clear()
    load = far.start(far.offer([3, 7]), [0, 1])
    await until(lambda: far.transport.statistics.reads >= 3)  # it looks at the seal again and again
    assert not load.done()
    seen = far.transport.statistics
    assert seen.bytes_read == 16 * (seen.reads - seen.open_reads)  # seals, and nothing else
    far.saved.gate.set()
    assert (await load).blocks == 2
    far.assert_loaded([0, 1], [3, 7])


@in_virtual_time
async def test_blocks_that_come_too_late_cost_the_deadline_and_nothing_else() -> None:
    slow = replace(InprocCluster().world(), copy_thread=partial(InlineCopier, duration_s=lambda: 1.0))
    async with far_pair(world=slow) as far:
        lease = far.offer([3])
        await far.fails(DeadlineExceeded, lease, match="in phase 'compute': 0 of 4 tokens computed", deadline_s=0.5)
        await far.load(lease)
        assert await lease is LeaseOutcome.READ


async def test_closing_says_that_a_copy_still_writes() -> None:
    """It cannot be stopped; who frees the cache after an orderly end would have it written to."""
    async with far_pair(consumer=BRIEF) as far:
        load = await far.hold_copy()
        with pytest.raises(RuntimeBroken, match=r"'consumer' .*: a copy still runs"):
            await far.reader.aclose()
        with pytest.raises(RuntimeClosed):
            await load
        (quarantine,) = far.reader.quarantines
        far.loaded.gate.set()
        async with asyncio.timeout(WAIT_S):
            await quarantine.settled()


async def test_a_failed_copy_to_the_host_revokes_the_lease(far: FarPair) -> None:
    far.saved.problem = FIRE
    lease = far.offer([3])
    assert await lease is LeaseOutcome.FAILED
    await far.fails(PrefillFailed, lease)
    far.saved.problem = None
    await far.load(far.offer([3]))


async def test_a_failed_copy_of_a_lease_without_a_hold_gives_its_blocks_back_once(far: FarPair) -> None:
    """The failure ends the lease in the callback of its own copy. Another lease of the same block goes on."""
    other = far.offer([3], "other")
    await until(lambda: host_of(far.writer).serving.open_lease("other").complete)  # type: ignore[union-attr]
    far.saved.problem = FIRE
    request = ServeRequest("req", [3], num_tokens=4)
    assert await host_of(far.writer).serving.serve(request, hold_blocks=False) is LeaseOutcome.FAILED
    await asyncio.sleep(0)
    assert (far.producer_blocks.leased, far.writer.statistics().buffers_used) == (1, 1)
    await far.load(other)


@pytest.mark.parametrize("num_tokens", [4, 2], ids=["whole block", "partly filled block"])
async def test_a_failed_copy_at_the_consumer_fails_the_load_and_blames_no_peer(far: FarPair, num_tokens: int) -> None:
    """A block that is filled in part has to be fetched first."""
    far.loaded.problem = FIRE
    lease = far.writer.serve_blocks(ServeRequest("req", block_ids=[3], num_tokens=num_tokens))
    await far.fails(TransferFailed, lease, match="the device is on fire")
    assert far.loaded.calls[0][1] is (CopyDirection.TO_DEVICE if num_tokens == 4 else CopyDirection.TO_HOST)
    seen = far.reader.statistics()
    assert seen.buffers_used == 0
    assert [(peer.state, peer.failures) for peer in seen.peers] == [(PeerState.READY, 0)]
    far.loaded.problem = None
    await far.load(lease)
    assert_loaded(far.consumer.cache, [0], far.producer.cache, [3], num_tokens=num_tokens)


async def test_reads_go_on_beside_copies_and_no_more_than_these_may_be() -> None:
    """One read of a block and one copy at a time: the second is read while the first is copied, the third is not."""
    brief = limited(replace(BASE, cancel_grace_s=0.02), slice_bytes_max=BLOCK_BYTES, slices_in_flight_max=1)
    async with far_pair(consumer=brief) as far:
        lease = far.offer([3, 4, 5])
        await until(lambda: len(far.saved.calls) == 1)
        far.loaded.gate.clear()
        load = far.start(lease, [0, 1, 2])
        await until(lambda: far.bytes_read >= 2 * BLOCK_BYTES and far.loaded.calls)
        for _ in range(20):  # turns of the loop: nothing more comes
            await asyncio.sleep(0)
        assert len(far.loaded.calls) == 1
        assert far.bytes_read < 3 * BLOCK_BYTES
        quarantine = await far.quarantined(load)  # one copy runs, one waits for its turn
        far.loaded.gate.set()
        await quarantine.settled()
        assert len(far.loaded.calls) == 2
        assert far.reader.statistics().buffers_used == 0


async def test_a_cancelled_load_gives_its_buffers_back_when_the_copy_has_ended() -> None:
    """Nothing of it is reported before that."""
    async with far_pair(replace(BASE, cancel_grace_s=0.02)) as far:
        load = await far.hold_copy()
        assert not load.done()
        assert (far.producer_blocks.leased, far.consumer_blocks.in_flight) == (1, 1)
        quarantine = await far.quarantined(load)
        assert quarantine.block_ids == (0,)
        assert far.reader.statistics().buffers_used == 1
        far.loaded.gate.set()
        await quarantine.settled()
        assert far.reader.statistics().buffers_used == 0


@pytest.mark.parametrize("outcome", [LeaseOutcome.EXPIRED, LeaseOutcome.REVOKED])
async def test_a_lease_that_ends_while_it_is_copied_keeps_its_blocks_until_then(
    far: FarPair, outcome: LeaseOutcome
) -> None:
    book = host_of(far.writer).serving._book
    far.saved.gate.clear()
    expires = outcome is LeaseOutcome.EXPIRED
    lease = far.offer([3, 4], ttl_s=0.01 if expires else None)
    load = far.start(lease, [0, 1])
    if not expires:
        await until(lambda: far.transport.statistics.reads >= 2)
        lease.revoke()
    await until(lambda: len(book) == 0)  # the lease is not open, and its hold is over
    lease.revoke()
    assert not lease.done
    assert far.producer_blocks.leased == 2
    with pytest.raises(LeaseExpired):
        await load
    far.saved.gate.set()
    assert await lease is outcome
    assert far.writer.statistics().buffers_used == 0


async def test_host_buffers_are_bounded_for_offers() -> None:
    async with far_pair(SMALL) as far:
        first = far.offer([0, 1], "first")
        with pytest.raises(HostBlocksBusy, match=r"needed: 2 host blocks, 1 of 3 are free \(host_buffer_bytes_max\)"):
            far.offer([2, 3], "second")
        assert far.producer_blocks.free == BLOCKS - 2
        await far.load(first, [0, 1])
        await first
        await far.load(far.offer([2, 3], "second"), [2, 3])


async def test_loads_larger_than_the_host_buffers_take_turns() -> None:
    async with far_pair(consumer=SMALL) as far:
        halves = [range(6), range(6, 12)]
        leases = [far.offer(half, f"from {half.start}") for half in halves]
        await asyncio.gather(*map(far.load, leases, halves))
        far.assert_loaded(range(12), range(12))
        assert max(host for pairs, _ in far.loaded.calls for _, host in pairs) < 3
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2


async def test_host_buffers_too_small_for_a_block_are_refused() -> None:
    async with Runtime(replace(BASE, staging="always", host_buffer_bytes_max=100)) as runtime:
        with pytest.raises(ConfigError, match="host_buffer_bytes_max: 100 is less than a block has, 1024"):
            await runtime.register_kv_caches(*small_cache())


# --- the pool of numbered buffers: first come, first served, and what cancelling leaves behind


async def test_who_is_cancelled_in_the_turn_in_which_numbers_come_back_gives_its_place_up() -> None:
    """The future of a cancelled waiter is done at once, its task runs a turn later; numbers may come back between."""
    pool = Pool(1)
    taken = await pool.take(1)
    first, second = asyncio.create_task(pool.take(1)), asyncio.create_task(pool.take(1))
    await asyncio.sleep(0)
    first.cancel()
    pool.give_back(taken)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).tolist() == taken.tolist()
    assert pool.used == 1


async def test_numbers_granted_to_who_is_cancelled_meanwhile_come_back() -> None:
    pool = Pool(1)
    taken = await pool.take(1)
    waiting = asyncio.create_task(pool.take(1))
    await asyncio.sleep(0)
    pool.give_back(taken)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.used == 0


async def test_neighbours_stay_neighbours() -> None:
    """Copies of numbers that follow each other are faster."""
    pool = Pool(4)
    for _ in range(3):
        taken = await pool.take(3)
        assert taken.tolist() == [0, 1, 2]
        pool.give_back(taken)


async def test_who_waits_is_served_in_order() -> None:
    pool = Pool(3)
    first, rest = await pool.take(1), await pool.take(2)
    large, small = asyncio.create_task(pool.take(2)), asyncio.create_task(pool.take(1))
    await asyncio.sleep(0)
    pool.give_back(first)
    await asyncio.sleep(0)
    assert not small.done(), "passed one who came before"
    assert pool.take_nowait(1) is None
    pool.give_back(rest)
    got = np.concatenate(await asyncio.gather(large, small))
    assert sorted(got.tolist()) == [0, 1, 2]
