"""Backpressure: who is read when, what stays in flight, and what waiting costs a load (docs/decisions/0010)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import torch
from tests_support import PATIENT, in_virtual_time, leases_ended, limited, small_cache, until, virtual_pair

from kvflow import Config, Lease, LoadReport, LoadRequest, Runtime, ServeRequest
from kvflow.errors import DeadlineExceeded, Overloaded, RequestError, RuntimeClosed, TransferFailed
from kvflow.runtime.consumer.load import LoadingStatistics
from kvflow.runtime.world import World
from kvflow.testing import InprocPair, ManualClock, inproc_pair
from kvflow.transport.base import TransportError
from kvflow.transport.inproc import InprocRead, InprocTransport

BLOCK_BYTES = 1024
SEAL_BYTES = 16
# A slice is one block; a load has one in flight, and so has a peer.
ONE_BY_ONE = limited(
    replace(PATIENT, cancel_grace_s=0.05, drain_timeout_s=0.5),
    slice_bytes_max=BLOCK_BYTES,
    slices_in_flight_max=1,
    peer_in_flight_reads_max=1,
)


def loading(pair: InprocPair) -> LoadingStatistics:
    found = pair.consumer.runtime.statistics().loading
    assert found is not None
    return found


def start(
    pair: InprocPair, lease: Lease, blocks: Sequence[int], *, priority: int = 0, deadline_s: float | None = None
) -> asyncio.Task[LoadReport]:
    request = replace(pair.wanted(lease, blocks, deadline_s=deadline_s), priority=priority)
    return asyncio.create_task(pair.consumer.runtime.load_blocks(request))


async def start_in_order(pair: InprocPair, *loads: tuple[Sequence[int], int]) -> list[asyncio.Task[LoadReport]]:
    """Loads of (blocks, priority), on the same blocks of both sides; each has asked for a read before the next."""
    pair.consumer.transport.faults.hold = True
    tasks = []
    for blocks, priority in loads:
        tasks.append(start(pair, pair.offer(blocks, f"blocks {blocks}"), blocks, priority=priority))
        await until_reads_ask(pair, len(tasks))
    return tasks


async def until_reads_ask(pair: InprocPair, count: int) -> None:
    """Until so many reads are posted or wait for their turn."""
    await until(lambda: len(pair.consumer.transport.held) + loading(pair).waiting_reads >= count)


def load_of(pair: InprocPair, read: InprocRead) -> int:
    """Which load a held read is of, where load k fills some of the blocks 4 * k to 4 * k + 3."""
    address = int(read.descriptors.local[-1])  # the first may be a seal
    for tensor in pair.consumer.kv_caches.values():
        offset = address - tensor.data_ptr()
        if 0 <= offset < tensor.nbytes:
            return offset % tensor[0].nbytes // tensor[0, 0].nbytes // 4
    raise AssertionError("a read of a seal alone")


async def step(pair: InprocPair, *tasks: asyncio.Task[LoadReport]) -> list[int]:
    """Perform reads one by one until the tasks are done; which loads they were of."""
    transport = pair.consumer.transport
    order = []
    while not all(task.done() for task in tasks):
        if transport.held:
            order.append(load_of(pair, transport.held[0]))
            transport.perform(1)
        await asyncio.sleep(0)
    return order


@pytest.fixture
async def narrow() -> AsyncIterator[InprocPair]:
    """A pair that has one read in flight; the consumer's clock stands still, so that no load is slow."""
    async with inproc_pair(config=ONE_BY_ONE, consumer_world=World(clock=ManualClock)) as pair:
        yield pair
        pair.consumer.transport.faults.hold = False


# --- whose turn it is


async def test_loads_take_turns_slice_by_slice(narrow: InprocPair) -> None:
    huge, small, other = await start_in_order(narrow, ([0, 1, 2, 3], 0), ([4], 0), ([8, 9], 0))
    assert await step(narrow, huge, small, other) == [0, 1, 2, 0, 2, 0, 0, 0]
    narrow.assert_loaded([0, 1, 2, 3, 4, 8, 9], [0, 1, 2, 3, 4, 8, 9])


async def test_a_smaller_priority_is_read_first(narrow: InprocPair) -> None:
    tasks = await start_in_order(narrow, ([0, 1], 0), ([4], 9), ([8], -1))
    assert await step(narrow, *tasks) == [0, 2, 0, 1]


@contextlib.asynccontextmanager
async def second_producer(pair: InprocPair) -> AsyncIterator[tuple[Runtime, dict[str, torch.Tensor]]]:
    """Another engine that the pair's consumer can load from."""
    network = pair.consumer.transport._network
    world = World(transport=lambda _, name: InprocTransport(name, network))
    config = Config(engine_id="producer-2", listen="tcp://127.0.0.1:0", transport="inproc")
    async with Runtime(config, world=world) as runtime:
        kv_caches, layout = small_cache(fill=7.0)
        await runtime.register_kv_caches(kv_caches, layout)
        yield runtime, kv_caches


async def test_a_peer_without_room_does_not_hold_up_another(narrow: InprocPair) -> None:
    async with second_producer(narrow) as (runtime, kv_caches):
        held, waiting = await start_in_order(narrow, ([0], 0), ([4], 0))
        lease = runtime.serve_blocks(ServeRequest("elsewhere", block_ids=[3], num_tokens=4))
        elsewhere = start(narrow, lease, [8], priority=9)
        await until_reads_ask(narrow, 3)
        assert [load_of(narrow, read) for read in narrow.consumer.transport.held] == [0, 2]
        of_peers = {name: (peer.in_flight, peer.waiting_reads) for name, peer in loading(narrow).peers.items()}
        one_block = (BLOCK_BYTES + SEAL_BYTES, 5, 1)
        assert sorted(of_peers.values()) == [(one_block, 0), (one_block, 1)]
        await step(narrow, held, waiting, elsewhere)
        assert torch.equal(narrow.consumer.kv_caches["layers.0"][:, 8], kv_caches["layers.0"][:, 3])
        await leases_ended(runtime)


async def test_all_peers_together_are_bounded(narrow: InprocPair) -> None:
    limit = limited(replace(ONE_BY_ONE, in_flight_bytes_max=2 * BLOCK_BYTES), peer_in_flight_reads_max=8)
    async with inproc_pair(config=limit, consumer_world=World(clock=ManualClock)) as pair:
        tasks = await start_in_order(pair, ([0], 0), ([4], 0), ([8], 0))
        # One block and its seal leave less than a block.
        assert (len(pair.consumer.transport.held), loading(pair).waiting_reads) == (1, 2)
        assert loading(pair).in_flight == (BLOCK_BYTES + SEAL_BYTES, 5, 1)
        assert await step(pair, *tasks) == [0, 1, 2]
        assert loading(pair).in_flight == (0, 0, 0)


@pytest.mark.parametrize("limit", ["in_flight_bytes_max", "peer_in_flight_bytes_max", "peer_in_flight_descriptors_max"])
async def test_a_slice_larger_than_a_limit_goes_alone(limit: str) -> None:
    config = limited(ONE_BY_ONE, slices_in_flight_max=4, peer_in_flight_reads_max=8)
    config = replace(config, **{limit: 1}) if hasattr(config, limit) else limited(config, **{limit: 1})
    async with inproc_pair(config=config, consumer_world=World(clock=ManualClock)) as pair:
        (load,) = await start_in_order(pair, ([0, 1, 2], 0))
        await until_reads_ask(pair, 2)
        assert len(pair.consumer.transport.held) == 1
        assert await step(pair, load) == [0, 0, 0]


# --- ends while waiting


async def test_a_cancelled_load_gives_its_place_up(narrow: InprocPair) -> None:
    held, waiting, behind = await start_in_order(narrow, ([0], 0), ([4], 0), ([8], 0))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert loading(narrow).waiting_reads == 1
    assert narrow.consumer.runtime.quarantines == ()
    assert await step(narrow, held, behind) == [0, 2]
    narrow.assert_loaded([0, 8], [0, 8])
    revoke_all(narrow)


async def test_a_load_that_is_cancelled_as_its_turn_comes_passes_it_on(narrow: InprocPair) -> None:
    held, waiting, behind = await start_in_order(narrow, ([0], 0), ([4], 0), ([8], 0))
    narrow.consumer.transport.perform(1)
    await until(lambda: loading(narrow).waiting_reads != 2)
    assert not narrow.consumer.transport.held, "the turn is given, the read not posted yet"
    waiting.cancel()
    assert await step(narrow, held, behind) == [2]
    with pytest.raises(asyncio.CancelledError):
        await waiting
    revoke_all(narrow)


@in_virtual_time
async def test_a_deadline_that_passes_while_waiting_names_the_phase() -> None:
    async with virtual_pair(ONE_BY_ONE, consumer_clock=ManualClock) as pair:
        (held,) = await start_in_order(pair, ([0], 0))
        late = start(pair, pair.offer([1], "late"), [1], deadline_s=0.1)
        with pytest.raises(DeadlineExceeded, match="in phase 'queued'") as caught:
            await late
        assert (caught.value.phase, caught.value.quarantine) == ("queued", None)
        await step(pair, held)
        revoke_all(pair)


async def test_the_wait_for_a_turn_counts_as_queued(narrow: InprocPair) -> None:
    clock = narrow.consumer.runtime._supervisor._clock
    assert isinstance(clock, ManualClock)
    held, waiting = await start_in_order(narrow, ([0], 0), ([1], 0))
    clock.advance(0.007)
    await step(narrow, held)
    await until(lambda: narrow.consumer.transport.held)
    clock.advance(0.002)
    await step(narrow, waiting)
    seconds = (await waiting).seconds
    assert (seconds["queued"], seconds["wire"]) == (pytest.approx(0.007), pytest.approx(0.002))
    assert (await waiting).total_s == pytest.approx(0.009)


async def test_a_failed_read_gives_its_share_back(narrow: InprocPair) -> None:
    failing, waiting = await start_in_order(narrow, ([0, 1], 0), ([2], 0))
    narrow.consumer.transport.faults.fail_next.append(TransportError("scripted"))
    narrow.consumer.transport.perform(1)
    with pytest.raises(TransferFailed, match="scripted"):
        await failing
    await step(narrow, waiting)
    narrow.assert_loaded([2], [2])
    revoke_all(narrow)


async def test_a_load_that_fails_while_it_waits_posts_no_more() -> None:
    """Of two slices one is in flight and one waits; the first one fails."""
    config = limited(ONE_BY_ONE, slices_in_flight_max=2)
    async with inproc_pair(config=config) as pair:
        (load,) = await start_in_order(pair, ([0, 1], 0))
        await until_reads_ask(pair, 2)
        pair.consumer.transport.faults.fail_next.append(TransportError("scripted"))
        pair.consumer.transport.perform(1)
        with pytest.raises(TransferFailed, match="scripted"):
            await load
        assert pair.consumer.transport.statistics.reads == 1
        revoke_all(pair)


async def test_quarantined_reads_keep_their_share_until_they_have_stopped(narrow: InprocPair) -> None:
    given_up, waiting = await start_in_order(narrow, ([0], 0), ([4], 0))
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    (quarantine,) = narrow.consumer.runtime.quarantines
    assert loading(narrow).in_flight.reads == 1
    assert (len(narrow.consumer.transport.held), loading(narrow).waiting_reads) == (1, 1)
    assert await step(narrow, waiting) == [0, 1]
    assert quarantine.safe
    revoke_all(narrow)


async def test_closing_ends_loads_that_wait() -> None:
    async with inproc_pair(config=replace(ONE_BY_ONE, drain_timeout_s=0.02)) as pair:
        held, waiting = await start_in_order(pair, ([0], 0), ([1], 0))
        closing = asyncio.create_task(pair.consumer.runtime.aclose())
        with pytest.raises(RuntimeClosed, match=r"'blocks \[1\]': the runtime .* was closed"):
            await waiting
        pair.consumer.transport.perform()
        with pytest.raises(RuntimeClosed):
            await held
        await closing
        revoke_all(pair)


# --- more loads than may be open


ONE_LOAD = limited(replace(ONE_BY_ONE, loads_waiting_max=2), loads_max=1)


async def test_loads_over_the_limit_wait_and_one_more_is_overloaded() -> None:
    async with inproc_pair(config=ONE_LOAD, consumer_world=World(clock=ManualClock)) as pair:
        (first,) = await start_in_order(pair, ([0], 0))
        waiting = []
        for block, priority in ((4, 0), (8, -1)):
            waiting.append(start(pair, pair.offer([block], f"waits {block}"), [block], priority=priority))
            await until(lambda: loading(pair).waiting_loads >= len(waiting))
        refused = pair.wanted(pair.offer([12], "one too many"), [12])
        with pytest.raises(Overloaded, match=r"'one too many' from .*: 2 loads \(loads_waiting_max\) wait already"):
            await pair.consumer.runtime.load_blocks(refused)
        assert await step(pair, first, *waiting) == [0, 2, 1]
        await pair.consumer.runtime.load_blocks(replace(refused, block_ids=[]))


@in_virtual_time
async def test_a_load_waits_for_a_place_under_its_deadline() -> None:
    async with virtual_pair(ONE_LOAD, consumer_clock=ManualClock) as pair:
        (first,) = await start_in_order(pair, ([0], 0))
        with pytest.raises(DeadlineExceeded, match="in phase 'queued'"):
            await start(pair, pair.offer([1], "late"), [1], deadline_s=0.1)
        assert loading(pair).waiting_loads == 0
        await step(pair, first)
        revoke_all(pair)


async def test_quarantined_loads_keep_their_place() -> None:
    async with inproc_pair(config=ONE_LOAD, consumer_world=World(clock=ManualClock)) as pair:
        (given_up,) = await start_in_order(pair, ([0], 0))
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        waiting = start(pair, pair.offer([4], "waits"), [4])
        await until(lambda: loading(pair).waiting_loads)
        assert await step(pair, waiting) == [0, 1]
        revoke_all(pair)


@pytest.mark.parametrize("priority", [True, 1.0, "1", None])
async def test_a_priority_is_an_integer(pair: InprocPair, priority: int) -> None:
    lease = pair.offer([3])
    request = LoadRequest("req", ticket=lease.ticket, block_ids=[0], priority=priority)
    with pytest.raises(RequestError, match=f"^request 'req': priority: expected a whole number .*, got {priority!r}$"):
        await pair.consumer.runtime.load_blocks(request)
    lease.revoke()


def revoke_all(pair: InprocPair) -> None:
    """End what was offered to loads that failed."""
    cache = pair.producer.runtime._supervisor.cache
    assert cache is not None
    cache.serving.close()
