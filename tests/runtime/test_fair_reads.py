"""Backpressure: the order of reads, the bytes in flight, and the cost of waiting (docs/decisions/0010)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from pairs import EnginePair, open_pair, virtual_pair
from tests_support import PATIENT, in_virtual_time, limited, turns, until

from kvflow import LoadReport, LoadRequest, ServeRequest
from kvflow.errors import DeadlineExceeded, Overloaded, RequestError, RuntimeClosed, TransferFailed
from kvflow.runtime.world import World
from kvflow.testing import ManualClock
from kvflow.transport.base import CaughtUp, TransportError
from kvflow.transport.inproc import InprocRead

BLOCK_BYTES = 1024
SEAL_BYTES = 16
# A slice is one block; a load has one in flight, and so has a peer.
ONE_BY_ONE = limited(
    replace(PATIENT, cancel_grace_s=0.05, drain_timeout_s=0.5),
    slice_bytes_max=BLOCK_BYTES,
    slices_in_flight_max=1,
    peer_in_flight_bytes_max=1,
)


ONE_LOAD = limited(replace(ONE_BY_ONE, loads_waiting_max=2), source_ranks_max=1)
ONE_BLOCK = (BLOCK_BYTES + SEAL_BYTES, 5, 1)
STILL = World(clock=ManualClock)
Loads = list[asyncio.Task[LoadReport]]


async def start_in_order(pair: EnginePair, *loads: tuple[Sequence[int], int]) -> Loads:
    """Loads of (blocks, priority), on the same blocks of both sides; each has asked for a read before the next."""
    pair.transport.faults.hold = True
    tasks = []
    for blocks, priority in loads:
        tasks.append(pair.start(pair.offer(blocks, f"blocks {blocks}"), blocks, priority=priority))
        await until_reads_ask(pair, len(tasks))
    return tasks


async def start_three(pair: EnginePair) -> Loads:
    """Loads 0, 1 and 2, of a block each: the first one is read, the others wait."""
    return await start_in_order(pair, ([0], 0), ([4], 0), ([8], 0))


async def until_reads_ask(pair: EnginePair, count: int) -> None:
    """Wait until `count` reads are posted or wait for their turn."""
    await until(lambda: len(pair.transport.held) + pair.loading.waiting_reads >= count)


def load_of(pair: EnginePair, read: InprocRead) -> int:
    """Which load a held read is of, where load k fills some of the blocks 4 * k to 4 * k + 3."""
    address = int(read.descriptors.local[0])  # the last may be a seal
    for tensor in pair.consumer.kv_caches.values():
        offset = address - tensor.data_ptr()
        if 0 <= offset < tensor.nbytes:
            return offset % tensor[0].nbytes // tensor[0, 0].nbytes // 4
    raise AssertionError("a read of a seal alone")


async def step(pair: EnginePair, *tasks: asyncio.Task[LoadReport]) -> list[int]:
    """Perform reads one by one until the tasks are done; which loads the reads of blocks were of."""
    order = []
    while not all(task.done() for task in tasks):
        if pair.transport.held:
            if pair.transport.held[0].size_bytes > SEAL_BYTES:  # a load of several reads fetches its seal once more
                order.append(load_of(pair, pair.transport.held[0]))
            pair.transport.perform(1)
        await asyncio.sleep(0)
    return order


async def fail_next(pair: EnginePair, task: asyncio.Task[LoadReport]) -> None:
    """Let the held read of a load fail."""
    pair.transport.faults.fail_next.append(TransportError("scripted"))
    pair.transport.perform(1)
    with pytest.raises(TransferFailed, match="scripted"):
        await task


@pytest.fixture
async def narrow() -> AsyncIterator[EnginePair]:
    """A pair that has one read in flight; the consumer's clock stands still, so that no load is slow."""
    async with open_pair(ONE_BY_ONE, consumer=STILL) as pair:
        yield pair
        pair.transport.faults.hold = False


async def start_behind(pair: EnginePair, count: int) -> Loads:
    """Start `count` loads at once behind a transport that is held. Their first reads are held."""
    await pair.load(pair.offer([0]), [0])
    offers = offered(pair, count)
    pair.transport.faults.hold = pair.transport.faults.behind = True
    loads = burst(pair, offers)
    await turns(32)
    return loads


def burst(pair: EnginePair, offers: Sequence[LoadRequest], how: str = "load_blocks") -> Loads:
    """Loads at once."""
    return [asyncio.ensure_future(getattr(pair.reader, how)(wanted)) for wanted in offers]


def offered(pair: EnginePair, count: int) -> list[LoadRequest]:
    """One load of each of the first blocks."""
    return [pair.wanted(pair.offer([index], f"load {index}"), [index]) for index in range(count)]


# --- whose turn it is


async def test_loads_take_turns_slice_by_slice(narrow: EnginePair) -> None:
    huge, small, other = await start_in_order(narrow, ([0, 1, 2, 3], 0), ([4], 0), ([8, 9], 0))
    assert await step(narrow, huge, small, other) == [0, 1, 2, 0, 2, 0, 0, 0]
    narrow.assert_loaded([0, 1, 2, 3, 4, 8, 9], [0, 1, 2, 3, 4, 8, 9])


async def test_a_smaller_priority_is_read_first(narrow: EnginePair) -> None:
    tasks = await start_in_order(narrow, ([0, 1], 0), ([4], 9), ([8], -1))
    assert await step(narrow, *tasks) == [0, 2, 0, 1]


async def test_all_peers_together_are_bounded() -> None:
    limit = limited(replace(ONE_BY_ONE, in_flight_bytes_max=2 * BLOCK_BYTES), peer_in_flight_bytes_max=8 * BLOCK_BYTES)
    async with open_pair(limit, consumer=STILL) as pair:
        tasks = await start_three(pair)
        # One block and its seal leave less than a block.
        assert (len(pair.transport.held), pair.loading.waiting_reads) == (1, 2)
        assert pair.loading.in_flight == ONE_BLOCK
        assert await step(pair, *tasks) == [0, 1, 2]
        assert pair.loading.in_flight == (0, 0, 0)


async def test_waiting_is_no_part_of_a_read() -> None:
    """A load that has waited for its place for long, and is quick then, needs no second look at the seal."""
    clock = ManualClock()
    async with open_pair(ONE_BY_ONE, consumer=World(clock=lambda: clock)) as pair:
        held, waiting = await start_in_order(pair, ([0], 0), ([4], 0))
        clock.advance(1.0)
        assert load_of(pair, pair.transport.held[0]) == 0
        pair.transport.perform(1)  # a slow one: its seal is fetched once more
        await until(lambda: len(pair.transport.held) == 1)
        while not held.done():
            pair.transport.perform(1)
            await asyncio.sleep(0)
        reads = pair.transport.statistics.reads
        while not waiting.done():
            pair.transport.perform(1)
            await asyncio.sleep(0)
        assert (reads, pair.transport.statistics.reads) == (3, 3)
        pair.assert_loaded([0, 4], [0, 4])


# --- many at once


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("how", ["load_blocks", "start_load"])
async def test_many_loads_start_over_many_turns_of_the_loop(how: str, connected: bool) -> None:
    """Also loads that have waited for one handshake."""
    clock = ManualClock()
    async with open_pair(limited(PATIENT), consumer=World(clock=lambda: clock), num_blocks=128) as pair:
        if connected:
            await pair.load(pair.offer([0]), [0])
        offers = offered(pair, 128)
        pair.transport.faults.hold = True
        loads = burst(pair, offers, how)
        begun = [0]
        while begun[-1] < len(loads):
            await asyncio.sleep(0)
            clock.advance(0.0 if connected or begun[-1] else 0.01)
            begun.append(len(pair.transport.held))
        order = [load_of(pair, read) for read in pair.transport.held]
        pair.release_reads()
        await asyncio.gather(*loads)
        assert max(after - before for before, after in pairwise(begun)) <= 3
        late = [place // 4 - four for place, four in enumerate(order)]
        assert max(late) <= (0 if connected else 3), "a few that find the handshake just over may be ahead, not all"


@pytest.mark.parametrize("how", ["load_blocks", "start_load"])
async def test_who_is_urgent_starts_before_a_burst_that_came_earlier(how: str) -> None:
    async with open_pair(limited(PATIENT), consumer=STILL, num_blocks=66) as pair:
        await pair.load(pair.offer([0]), [0])
        offers = offered(pair, 66)
        pair.transport.faults.hold = True
        loads = burst(pair, offers[:64], how)
        await asyncio.sleep(0)
        loads += burst(pair, [replace(urgent, priority=-1) for urgent in offers[64:]], how)
        await until(lambda: len(pair.transport.held) == 66)
        order = [load_of(pair, read) for read in pair.transport.held]
        pair.release_reads()
        await asyncio.gather(*loads)
        first = order.index(16)
        assert first <= 12, "after those that had begun"
        assert order[first + 1] == 16
        assert sorted(order[first + 2 :]) == order[first + 2 :], "the others come in their order"


async def test_a_load_that_is_refused_or_cancelled_before_its_turn_holds_nobody_up() -> None:
    async with open_pair(limited(PATIENT), consumer=STILL) as pair:
        offers = offered(pair, 16)
        offers[8] = replace(offers[8], priority="now")  # type: ignore[arg-type]
        loads = burst(pair, offers)
        await asyncio.sleep(0)
        for load in loads[9:12]:
            load.cancel()
        with pytest.raises(RequestError, match="priority: expected `int`, got 'now'"):
            await loads[8]
        ended = await asyncio.gather(*loads[:8], *loads[9:], return_exceptions=True)
        assert [type(one) for one in ended] == [LoadReport] * 8 + [asyncio.CancelledError] * 3 + [LoadReport] * 4


@in_virtual_time
async def test_each_load_has_its_own_deadline() -> None:
    """There is one timer for all: it is set earlier, and later again, as loads come and go."""
    async with virtual_pair() as pair:

        async def load(block: int, deadline_s: float) -> float:
            offer = ServeRequest(f"load {block}", [block], num_tokens=4, computed_tokens=0)  # nothing of it ever comes
            begun_s = asyncio.get_running_loop().time()
            await pair.fails(DeadlineExceeded, pair.writer.serve_blocks(offer), [block], deadline_s=deadline_s)
            return asyncio.get_running_loop().time() - begun_s

        took_s = await asyncio.gather(load(0, 20.0), load(1, 1.0), load(2, 5.0), load(3, 5.0))
        assert took_s == pytest.approx([20.0, 1.0, 5.0, 5.0], abs=0.1)
        await load(4, 0.5)


@in_virtual_time
async def test_loads_begin_when_fewer_reads_wait_to_be_started() -> None:
    async with virtual_pair(consumer_clock=ManualClock) as pair:
        loads = await start_behind(pair, 16)
        assert len(pair.transport.held) == 5, "two at once, and one turn"
        for behind, held in ((True, 4), (False, 14)):
            pair.transport.faults.behind = behind
            pair.transport.perform(1)
            await turns(32)
            assert len(pair.transport.held) == held
        pair.release_reads()
        await asyncio.gather(*loads)


@in_virtual_time
async def test_loads_begin_as_soon_as_reads_that_waited_have_been_started() -> None:
    """Before any of these has ended: the loop and the transport's thread work at the same time."""
    async with virtual_pair(consumer_clock=ManualClock) as pair:
        loads = await start_behind(pair, 16)
        for behind, held in ((True, 5), (False, 16)):
            pair.transport.faults.behind = behind
            pair.transport._report(CaughtUp())
            await turns(32)
            assert len(pair.transport.held) == held
        pair.transport._report(CaughtUp())
        pair.release_reads()
        await asyncio.gather(*loads)


@in_virtual_time
async def test_loads_begin_in_a_while_whatever_the_transport_does() -> None:
    async with virtual_pair(consumer_clock=ManualClock) as pair:
        loads = await start_behind(pair, 16)
        before = len(pair.transport.held)
        await asyncio.sleep(0.006)
        assert len(pair.transport.held) == before + 3
        loads[before + 3].cancel()  # the next one
        await asyncio.sleep(0.02)
        assert len(pair.transport.held) == 15
        pair.release_reads()
        await asyncio.wait(loads)
        assert [load.cancelled() for load in loads].count(True) == 1


async def test_a_transport_that_is_behind_does_not_keep_a_runtime_from_closing() -> None:
    async with open_pair(limited(PATIENT), consumer=STILL) as pair:
        loads = await start_behind(pair, 16)
        pair.release_reads()
        await pair.consumer.runtime.aclose()
        ended = await asyncio.gather(*loads, return_exceptions=True)
        assert {type(one) for one in ended} <= {LoadReport, RuntimeClosed}


# --- ends while waiting


async def test_a_cancelled_load_gives_its_place_up(narrow: EnginePair) -> None:
    held, waiting, behind = await start_three(narrow)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (narrow.loading.waiting_reads, narrow.reader.quarantines) == (1, ())
    assert await step(narrow, held, behind) == [0, 2]
    narrow.assert_loaded([0, 8], [0, 8])


async def test_a_load_that_is_cancelled_as_its_turn_comes_passes_it_on(narrow: EnginePair) -> None:
    held, waiting, behind = await start_three(narrow)
    narrow.transport.perform(1)
    await until(lambda: narrow.loading.waiting_reads != 2)
    assert not narrow.transport.held, "the turn is given, the read not posted yet"
    waiting.cancel()
    assert await step(narrow, held, behind) == [2]
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("places", [False, True], ids=["for a read", "for a place"])
@in_virtual_time
async def test_a_deadline_that_passes_while_waiting_names_the_phase(places: bool) -> None:
    async with virtual_pair(ONE_LOAD if places else ONE_BY_ONE, consumer_clock=ManualClock) as pair:
        (held,) = await start_in_order(pair, ([0], 0))
        error = await pair.fails(
            DeadlineExceeded, pair.offer([1], "late"), [1], match="in phase 'queued'", deadline_s=0.1
        )
        assert (error.phase, error.quarantine, pair.loading.waiting_loads) == ("queued", None, 0)
        await step(pair, held)


async def test_the_wait_for_a_turn_counts_as_queued(narrow: EnginePair) -> None:
    clock = narrow.reader._supervisor.clock
    assert isinstance(clock, ManualClock)
    held, waiting = await start_in_order(narrow, ([0], 0), ([1], 0))
    clock.advance(0.007)
    await step(narrow, held)
    await until(lambda: narrow.transport.held)
    clock.advance(0.002)
    await step(narrow, waiting)
    seconds = (await waiting).seconds
    assert (seconds["queued"], seconds["wire"]) == (pytest.approx(0.007), pytest.approx(0.002))
    assert (await waiting).total_s == pytest.approx(0.009)


async def test_a_load_that_fails_while_it_waits_posts_no_more() -> None:
    """Of two slices one is in flight and one waits; the first one fails."""
    async with open_pair(limited(ONE_BY_ONE, slices_in_flight_max=2)) as pair:
        (load,) = await start_in_order(pair, ([0, 1], 0))
        await until_reads_ask(pair, 2)
        await fail_next(pair, load)
        assert pair.transport.statistics.reads == 1


@pytest.mark.parametrize("places", [False, True], ids=["share of reads", "place"])
async def test_quarantined_loads_keep_what_they_have_until_they_have_stopped(places: bool) -> None:
    async with open_pair(ONE_LOAD if places else ONE_BY_ONE, consumer=STILL) as pair:
        (given_up,) = await start_in_order(pair, ([0], 0))
        quarantine = await pair.quarantined(given_up)
        waiting = pair.start(pair.offer([4], "waits"), [4])
        await until(lambda: pair.loading.waiting_loads if places else pair.loading.waiting_reads)
        assert (pair.loading.in_flight.reads, len(pair.transport.held)) == (1, 1)
        assert await step(pair, waiting) == [0, 1]
        assert quarantine.safe


async def test_closing_ends_loads_that_wait() -> None:
    async with open_pair(replace(ONE_BY_ONE, drain_timeout_s=0.02)) as pair:
        held, waiting = await start_in_order(pair, ([0], 0), ([1], 0))
        closing = asyncio.create_task(pair.reader.aclose())
        with pytest.raises(RuntimeClosed, match=r"'blocks \[1\]': the runtime .* was closed"):
            await waiting
        pair.transport.perform()
        with pytest.raises(RuntimeClosed):
            await held
        await closing


# --- more loads than may be open


async def test_loads_over_the_limit_wait_and_one_more_is_overloaded() -> None:
    async with open_pair(ONE_LOAD, consumer=STILL) as pair:
        tasks = await start_in_order(pair, ([0], 0))
        for block, priority in ((4, 0), (8, -1)):
            tasks.append(pair.start(pair.offer([block], f"waits {block}"), [block], priority=priority))
            await until(lambda: pair.loading.waiting_loads >= len(tasks) - 1)
        refused = pair.offer([12], "one too many")
        overloaded = r"'one too many' from .*: 2 loads \(loads_waiting_max\) wait already"
        await pair.fails(Overloaded, refused, [12], match=overloaded)
        assert await step(pair, *tasks) == [0, 2, 1]
        await pair.load(refused, [])
