"""Draining: no new work, what has begun goes on; then closing has nothing left to wait for, and tells readers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import msgspec
import pytest
from scripted import ScriptedWorld
from tests_support import PATIENT, WAIT_S, altered, assert_all_ended, limited, until

from kvflow import (
    Config,
    DrainReport,
    LeaseOutcome,
    LoadRequest,
    PeerAddress,
    Runtime,
    RuntimeState,
    ServeRequest,
)
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.states import PeerState
from kvflow.core.protocol import messages
from kvflow.errors import PeerNotReady, RuntimeClosed, RuntimeDraining, TransferFailed, UsageError
from kvflow.runtime.producer.farewells import Farewells
from kvflow.runtime.world import World
from kvflow.testing import InprocPair, inproc_pair

CONFIG = replace(PATIENT, drain_timeout_s=WAIT_S, cancel_grace_s=0.05)


@dataclass(frozen=True)
class Sides:
    pair: InprocPair
    producer: Runtime
    consumer: Runtime
    told: list[messages.Request]
    """What the producer has asked others."""

    @property
    def goodbyes(self) -> int:
        return sum(isinstance(one, messages.Goodbye) for one in self.told)

    @property
    def peer_state(self) -> PeerState:
        """The producer as its reader sees it."""
        (peer,) = self.consumer.statistics().peers
        return peer.state


@contextlib.asynccontextmanager
async def open_sides(config: Config = CONFIG) -> AsyncIterator[Sides]:
    scripted = ScriptedWorld()
    world = World(side_channel=scripted.channel)
    async with inproc_pair(config=config, producer_world=world) as pair:
        yield Sides(pair, pair.producer.runtime, pair.consumer.runtime, scripted.channel.asked)
        await assert_all_ended(pair)


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    async with open_sides() as sides:
        yield sides


async def begin_to_drain(runtime: Runtime, deadline_s: float | None = None) -> asyncio.Task[DrainReport]:
    draining = asyncio.create_task(runtime.drain(deadline_s))
    await until(lambda: runtime.state is not RuntimeState.OPEN)
    return draining


async def test_draining_what_is_idle_is_over_at_once(sides: Sides) -> None:
    assert await sides.producer.drain() == DrainReport(finished=True)
    assert sides.producer.state is RuntimeState.DRAINING
    assert await sides.producer.drain() == DrainReport(finished=True), "draining twice is fine"
    await sides.producer.aclose()
    with pytest.raises(RuntimeClosed):
        await sides.producer.drain()


async def test_draining_before_a_cache_is_registered() -> None:
    config = Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc")
    runtime = Runtime(config)
    with pytest.raises(UsageError, match="not open yet"):
        await runtime.drain()
    async with runtime:
        assert await runtime.drain() == DrainReport(finished=True)


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("inf"), float("nan")])
async def test_a_deadline_that_is_none(sides: Sides, deadline_s: float) -> None:
    with pytest.raises(UsageError, match="drain: deadline_s"):
        await sides.producer.drain(deadline_s)
    assert sides.producer.state is RuntimeState.OPEN


async def test_new_work_is_refused_and_old_work_goes_on(sides: Sides) -> None:
    """Also a reader that was never connected may come, with a ticket of a lease that is open."""
    lease, other = sides.pair.offer([3]), sides.pair.offer([4], "other")
    draining = await begin_to_drain(sides.producer)
    with pytest.raises(RuntimeDraining, match=r"'producer' .* drains: it takes no new work"):
        sides.producer.serve_blocks(ServeRequest("new", block_ids=[5], num_tokens=4))
    with pytest.raises(RuntimeDraining):
        await sides.producer.load_blocks(LoadRequest("new", ticket=lease.ticket, block_ids=[0]))
    with pytest.raises(RuntimeDraining):
        await sides.producer.prewarm([])
    assert sides.producer.address == lease.ticket.address
    await sides.consumer.load_blocks(sides.pair.wanted(lease, [0]))
    await sides.consumer.load_blocks(sides.pair.wanted(other, [1]))
    assert await draining == DrainReport(finished=True, leases_read=2)
    assert [await lease, await other] == [LeaseOutcome.READ] * 2
    sides.pair.assert_loaded([0, 1], [3, 4])


async def test_a_consumer_that_drains_gives_back_what_it_will_not_read(sides: Sides) -> None:
    """That is when a decode engine's queue is of no use any more."""
    load_held = sides.pair.offer([4], "held")
    sides.pair.consumer.transport.faults.hold = True
    load = sides.consumer.start_load(sides.pair.wanted(load_held, [1]))
    await until(lambda: sides.pair.consumer.transport.held)
    lease = sides.pair.offer([3])
    draining = await begin_to_drain(sides.consumer)
    assert await sides.consumer.release_blocks(lease.ticket)
    assert await lease is LeaseOutcome.READ
    sides.pair.consumer.transport.faults.hold = False
    sides.pair.consumer.transport.perform()
    await load
    await draining
    await load_held


async def test_what_is_left_at_the_deadline_is_named_in_the_log(sides: Sides, caplog: pytest.LogCaptureFixture) -> None:
    lease = sides.pair.offer([3], "slow")
    report = await sides.producer.drain(0.01)
    assert report.leases_revoked == 1
    assert await lease is LeaseOutcome.REVOKED
    said = "engine 'producer': open after draining for 0.01 s, ended now: leases of ['slow'], loads of []"
    assert said in caplog.text


async def test_readers_without_an_open_lease_are_sent_elsewhere(sides: Sides) -> None:
    lease = sides.pair.offer([3])
    draining = await begin_to_drain(sides.producer)
    (result,) = await sides.consumer.prewarm([PeerAddress(engine_id="producer", address=sides.producer.address)])
    assert isinstance(result.error, PeerNotReady)
    with pytest.raises(PeerNotReady, match="engine 'producer' is draining"):
        await sides.consumer.load_blocks(
            LoadRequest("req", ticket=altered(lease.ticket, request_id="ended long ago"), block_ids=[0])
        )
    await sides.consumer.load_blocks(sides.pair.wanted(lease, [0]))
    assert (await draining).finished


async def test_at_the_deadline_leases_are_revoked() -> None:
    scripted = ScriptedWorld()
    async with inproc_pair(config=CONFIG, producer_world=scripted.world) as pair:
        short, long = pair.offer([3], "short", ttl_s=1.0), pair.offer([4], "long", ttl_s=1000.0)
        draining = await begin_to_drain(pair.producer.runtime, 0.01)
        scripted.clock.advance(2.0)
        while not draining.done():  # blocks are held for a moment after their lease has ended
            scripted.clock.advance(CONFIG.limits.seal_hold_s)
            await asyncio.sleep(0)
            assert scripted.clock.now_s() < 1e6
        assert draining.result() == DrainReport(finished=False, leases_expired=1, leases_revoked=1)
        assert [await short, await long] == [LeaseOutcome.EXPIRED, LeaseOutcome.REVOKED]
        assert pair.producer.runtime.state is RuntimeState.DRAINING


async def test_draining_a_reader_waits_for_its_loads(sides: Sides) -> None:
    transport = sides.pair.consumer.transport
    transport.faults.hold = True
    lease = sides.pair.offer([3])
    load = asyncio.create_task(sides.consumer.load_blocks(sides.pair.wanted(lease, [0])))
    await until(lambda: transport.held)
    draining = await begin_to_drain(sides.consumer)
    transport.faults.hold = False
    transport.perform()
    assert (await load).blocks == 1
    assert await draining == DrainReport(finished=True, loads_succeeded=1)


async def test_at_the_deadline_loads_are_ended(sides: Sides) -> None:
    transport = sides.pair.consumer.transport
    transport.faults.hold = True
    lease = sides.pair.offer([3])
    load = asyncio.create_task(sides.consumer.load_blocks(sides.pair.wanted(lease, [0])))
    await until(lambda: transport.held)
    draining = asyncio.create_task(sides.consumer.drain(0.01))
    with pytest.raises(RuntimeClosed):
        await load
    transport.perform()
    assert await draining == DrainReport(finished=False, loads_failed=1)
    lease.revoke()


async def test_cancelling_a_drain_leaves_the_runtime_draining(sides: Sides) -> None:
    lease = sides.pair.offer([3])
    draining = await begin_to_drain(sides.producer, 0.001)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    assert sides.producer.state is RuntimeState.DRAINING
    assert not lease.done, "nothing was revoked"
    with pytest.raises(RuntimeDraining):
        sides.pair.offer([4], "new")
    await sides.consumer.load_blocks(sides.pair.wanted(lease, [0]))
    assert (await sides.producer.drain()).finished


async def test_closing_in_the_middle_of_a_drain() -> None:
    """Closing has its own bound; the drain that waits is told what became of the leases."""
    async with open_sides(replace(CONFIG, drain_timeout_s=0.02)) as sides:
        lease = sides.pair.offer([3], ttl_s=1000.0)
        draining = await begin_to_drain(sides.producer, 1000.0)
        await sides.producer.aclose()
        assert await lease is LeaseOutcome.REVOKED
        assert (await draining).leases_revoked == 1


# --- goodbye


async def test_a_reader_goes_on_with_a_peer_that_drains_and_is_told_when_it_closes(sides: Sides) -> None:
    first, second = sides.pair.offer([3]), sides.pair.offer([4], "second")
    await sides.consumer.load_blocks(sides.pair.wanted(first, [0]))
    assert sides.producer.statistics().readers == 1
    draining = await begin_to_drain(sides.producer)
    await sides.consumer.load_blocks(sides.pair.wanted(second, [1]))
    assert (await draining).finished
    assert (sides.peer_state, sides.goodbyes) == (PeerState.READY, 0)
    assert sides.consumer.statistics().transport.open_peers == 1
    await sides.producer.aclose()
    (peer,) = sides.consumer.statistics().peers
    assert (peer.state, peer.failures) == (PeerState.BROKEN, 0)
    await until(lambda: not sides.consumer.statistics().transport.open_peers)
    assert sides.goodbyes == 1


async def test_a_reader_is_told_once_however_often_it_asked(sides: Sides) -> None:
    for number in range(3):
        lease = sides.pair.offer([3], f"req-{number}")
        await sides.consumer.load_blocks(sides.pair.wanted(lease, [0]))
        await lease
        await sides.consumer.forget_peer("producer")
    assert sides.producer.statistics().readers == 1
    await sides.producer.aclose()
    assert sides.goodbyes == 1


async def test_a_reader_that_is_gone_does_not_delay_closing(sides: Sides) -> None:
    lease = sides.pair.offer([3])
    await sides.consumer.load_blocks(sides.pair.wanted(lease, [0]))
    await lease
    await sides.consumer.aclose()
    await sides.producer.aclose()
    assert sides.producer.statistics().readers == 0, "who cannot be reached is forgotten"


async def test_a_mute_reader_costs_the_bound() -> None:
    """Somebody gave an address where nothing answers."""
    async with open_sides(limited(CONFIG, goodbye_timeout_s=0.05)) as sides:
        cache = sides.producer._supervisor.cache
        assert cache is not None
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
            cache.readers.remember(messages.Caller(target=messages.Target("x", 0, 0, 0), address=address))
            await sides.producer.aclose()
        assert sides.goodbyes == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"incarnation": "ffff"},
        {"sender": messages.Target("producer", 0, 0, 1)},
        {"sender": messages.Target("somebody", 0, 0, 0)},
        {"sender": messages.Target("producer", 1 << 60, -1, 0)},
    ],
    ids=str,
)
async def test_a_forged_goodbye_changes_nothing(sides: Sides, changes: dict[str, object]) -> None:
    lease = sides.pair.offer([3])
    await sides.consumer.load_blocks(sides.pair.wanted(lease, [0]))
    true = goodbye(sides)
    await send(sides, msgspec.structs.replace(true, **changes))
    assert sides.peer_state is PeerState.READY
    await send(sides, true)
    assert sides.peer_state is PeerState.BROKEN, "the true one would have been understood"


async def test_a_forged_goodbye_costs_a_handshake_at_most_and_no_load(sides: Sides) -> None:
    """Whoever knows the incarnation may lie; a load in the middle of its read does not notice."""
    transport = sides.pair.consumer.transport
    transport.faults.hold = True
    lease = sides.pair.offer([3], reader_count=2)
    load = asyncio.create_task(sides.consumer.load_blocks(sides.pair.wanted(lease, [0])))
    await until(lambda: transport.held)
    await send(sides, goodbye(sides))
    assert sides.consumer.statistics().transport.open_peers == 1
    transport.faults.hold = False
    transport.perform()
    assert (await load).blocks == 1
    assert (await sides.consumer.load_blocks(sides.pair.wanted(lease, [1]))).blocks == 1
    lease.revoke()


async def test_readers_are_remembered_up_to_a_limit_and_only_if_they_can_be() -> None:
    async with open_sides(limited(CONFIG, readers_max=2)) as sides:
        cache = sides.producer._supervisor.cache
        assert cache is not None
        readers: Farewells = cache.readers
        for address in (
            "junk",
            "tcp://0.0.0.0:5",
            "tcp://*:5",
            "tcp://h:0",
            "tcp://h:99999",
            "ipc:///tmp/x",
            "x" * 9999,
        ):
            readers.remember(messages.Caller(target=messages.Target("x", 0, 0, 0), address=address))
        readers.remember(messages.Caller(target=messages.Target("", 0, 0, 0), address="tcp://127.0.0.1:1"))
        assert readers.count == 0
        for port in (1, 2, 3, 3):
            readers.remember(messages.Caller(target=messages.Target("x", 0, 0, 0), address=f"tcp://127.0.0.1:{port}"))
        assert readers.count == 2
        await readers.tell()
        assert readers.count == 0
        assert sides.goodbyes == 2


def goodbye(sides: Sides) -> messages.Goodbye:
    """What the producer would say when it closes."""
    return messages.Goodbye(
        target=messages.Target("consumer", *Rank(0, 0, 0)),
        sender=messages.Target("producer", *Rank(0, 0, 0)),
        incarnation=sides.producer._supervisor._incarnation,
    )


async def send(sides: Sides, message: messages.Goodbye) -> None:
    cache = sides.consumer._supervisor.cache
    assert cache is not None
    reply = sides.consumer._supervisor._answer(messages.our_header(cache.local.compatibility.fingerprint()), message)
    assert reply == messages.Ack()
    await asyncio.sleep(0)


async def test_a_load_that_was_not_told_finds_out(sides: Sides) -> None:
    """The reader's side channel is somewhere else now: its next read fails, typed."""
    lease, unread = sides.pair.offer([3]), sides.pair.offer([4], "unread", ttl_s=0.001)
    await sides.consumer.load_blocks(sides.pair.wanted(lease, [0]))
    cache = sides.producer._supervisor.cache
    assert cache is not None
    cache.readers._callers.clear()
    await sides.producer.aclose()
    with pytest.raises(TransferFailed, match="is gone"):
        await sides.consumer.load_blocks(sides.pair.wanted(unread, [1]))
