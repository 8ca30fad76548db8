"""Draining: no new work, open work goes on; afterwards closing waits for nothing, and notifies readers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import msgspec
import pytest
from pairs import EnginePair, host_of, incarnation_of, known, load_request, open_pair
from scripted import ScriptedSideChannel, ScriptedWorld
from tests_support import PATIENT, WAIT_S, altered, limited, until

from kvflow import Config, LeaseOutcome, PeerAddress, Runtime, RuntimeState
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.states import PeerState
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.errors import PeerNotReady, RuntimeClosed, RuntimeDraining, UsageError
from kvflow.runtime.world import World

CONFIG = replace(PATIENT, drain_timeout_s=WAIT_S, cancel_grace_s=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides(EnginePair):
    channel: ScriptedSideChannel
    """The producer's."""

    @property
    def goodbyes(self) -> int:
        return sum(isinstance(one, messages.Goodbye) for one in self.channel.asked)

    @property
    def peer_state(self) -> PeerState:
        """The producer as its reader sees it."""
        (peer,) = self.reader.statistics().peers
        return peer.state

    @property
    def agents(self) -> int:
        return self.reader.statistics().transport.open_peers

    def goodbye(self, **changes: object) -> None:
        """Deliver the producer's goodbye, or a similar message, to the consumer."""
        said = messages.Goodbye(
            target=Address("consumer", Rank(0, 0, 0), "tcp://127.0.0.1:1"),
            sender=Address("producer", Rank(0, 0, 0), "tcp://127.0.0.1:1"),
            incarnation=known(self.writer._supervisor.registration).incarnation,
        )
        header = codec.our_header(host_of(self.reader).context.local.compatibility.fingerprint())
        reply = self.reader._supervisor._answer(header, msgspec.structs.replace(said, **changes))
        assert isinstance(reply, messages.Ack)


@contextlib.asynccontextmanager
async def open_sides(config: Config = CONFIG) -> AsyncIterator[Sides]:
    channel = ScriptedSideChannel()
    async with open_pair(config, producer=World(side_channel=channel)) as pair:
        yield Sides(producer=pair.producer, consumer=pair.consumer, channel=channel)


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    async with open_sides() as sides:
        yield sides


async def begin_to_drain(runtime: Runtime, deadline_s: float | None = None) -> asyncio.Task[bool]:
    draining = asyncio.create_task(runtime.drain(deadline_s))
    await until(lambda: runtime.state is not RuntimeState.OPEN)
    return draining


async def test_draining_what_is_idle_is_over_at_once_also_the_second_time_and_without_a_cache() -> None:
    runtime = Runtime(Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc"))
    with pytest.raises(UsageError, match="not open yet"):
        await runtime.drain()
    async with runtime:
        for deadline_s in (0, -1.0, float("inf"), float("nan")):
            with pytest.raises(UsageError, match="drain: deadline_s"):
                await runtime.drain(deadline_s)
        assert runtime.state is RuntimeState.OPEN
        for _ in range(2):
            assert await runtime.drain()
            assert runtime.state is RuntimeState.DRAINING
    with pytest.raises(RuntimeClosed):
        await runtime.drain()


async def test_new_work_is_refused_and_old_work_goes_on(sides: Sides) -> None:
    """Also a reader that was never connected may come, with a ticket of a lease that is open."""
    lease, other = sides.offer([3]), sides.offer([4], "other")
    draining = await begin_to_drain(sides.writer)
    with pytest.raises(RuntimeDraining, match=r"'producer' .* drains: it takes no new work"):
        sides.offer([5], "new")
    for refused in (sides.writer.load_blocks(load_request(lease)), sides.writer.prewarm([])):
        with pytest.raises(RuntimeDraining):
            await refused
    assert sides.writer.address == lease.ticket.address
    await sides.load(lease, [0])
    await sides.load(other, [1])
    assert await draining
    assert [await lease, await other] == [LeaseOutcome.READ] * 2
    sides.assert_loaded([0, 1], [3, 4])


async def test_a_consumer_that_drains_gives_back_what_it_will_not_read_and_ends_its_loads(sides: Sides) -> None:
    """A decode engine that drains does not need its queue."""
    load, lease = await sides.hold(sides.offer([4], "held"), [1]), sides.offer([3])
    draining = await begin_to_drain(sides.reader)
    assert await sides.reader.release_blocks(lease.ticket)
    assert await lease is LeaseOutcome.READ
    assert (await sides.let_go(load)).blocks == 1
    assert await draining


async def test_readers_without_an_open_lease_are_sent_elsewhere(sides: Sides) -> None:
    lease = sides.offer([3])
    draining = await begin_to_drain(sides.writer)
    (result,) = await sides.reader.prewarm([PeerAddress(engine_id="producer", address=sides.writer.address)])
    assert isinstance(result, PeerNotReady)
    ended = altered(lease.ticket, request_id="ended long ago")
    await sides.fails(PeerNotReady, ended, match="engine 'producer' is draining")
    await sides.load(lease)
    assert await draining


async def test_at_the_deadline_leases_are_revoked_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    scripted = ScriptedWorld()
    async with open_pair(CONFIG, producer=scripted.world) as pair:
        short, long = pair.offer([3], "short", ttl_s=1.0), pair.offer([4], "long", ttl_s=1000.0)
        draining = await begin_to_drain(pair.writer, 0.01)
        scripted.clock.advance(2.0)
        while not draining.done():  # blocks are held for a moment after their lease has ended
            scripted.clock.advance(CONFIG.limits.seal_hold_s)
            await asyncio.sleep(0)
            assert scripted.clock.now_s() < 1e6
        assert not draining.result()
        assert [await short, await long] == [LeaseOutcome.EXPIRED, LeaseOutcome.REVOKED]
        assert pair.writer.state is RuntimeState.DRAINING
    said = "engine 'producer': open after draining for 0.01 s, ending it now: leases of ['long'], loads of []"
    assert said in caplog.text


async def test_at_the_deadline_loads_are_ended(sides: Sides) -> None:
    load = await sides.hold(sides.offer([3]))
    draining = asyncio.create_task(sides.reader.drain(0.01))
    with pytest.raises(RuntimeClosed):
        await load
    sides.transport.perform()
    assert not await draining
    assert sides.loading.failed == 1


async def test_cancelling_a_drain_leaves_the_runtime_draining(sides: Sides) -> None:
    lease = sides.offer([3])
    draining = await begin_to_drain(sides.writer, 0.001)
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    assert sides.writer.state is RuntimeState.DRAINING
    assert not lease.done, "nothing was revoked"
    with pytest.raises(RuntimeDraining):
        sides.offer([4], "new")
    await sides.load(lease)
    assert await sides.writer.drain()


async def test_closing_in_the_middle_of_a_drain() -> None:
    """Closing has its own bound; the drain that waits returns."""
    async with open_sides(replace(CONFIG, drain_timeout_s=0.02)) as sides:
        lease = sides.offer([3], ttl_s=1000.0)
        draining = await begin_to_drain(sides.writer, 1000.0)
        await sides.writer.aclose()
        assert await lease is LeaseOutcome.REVOKED
        assert await draining


# --- goodbye


async def test_a_reader_goes_on_with_a_peer_that_drains_and_is_told_when_it_closes(sides: Sides) -> None:
    """Once, however often it has asked."""
    second = sides.offer([4], "second")
    for number in range(3):
        await sides.reader.forget_peer("producer")
        await sides.load(sides.offer([3], f"req-{number}"))
    assert sides.writer.statistics().readers == 1
    draining = await begin_to_drain(sides.writer)
    await sides.load(second, [1])
    assert await draining
    assert (sides.peer_state, sides.goodbyes, sides.agents) == (PeerState.READY, 0, 1)
    await sides.writer.aclose()
    (peer,) = sides.reader.statistics().peers
    assert (peer.state, peer.failures) == (PeerState.BROKEN, 0)
    await until(lambda: not sides.agents)
    assert sides.goodbyes == 1


async def test_a_reader_that_is_gone_does_not_delay_closing(sides: Sides) -> None:
    lease = sides.offer([3])
    await sides.load(lease)
    await lease
    await sides.reader.aclose()
    await sides.writer.aclose()
    assert sides.writer.statistics().readers == 0, "who cannot be reached is forgotten"


def reader_at(address: str, engine_id: str = "x") -> Address:
    return Address(engine_id, Rank(0, 0, 0), address)


async def test_a_mute_reader_costs_the_bound() -> None:
    """Somebody gave an address where nothing answers."""
    async with open_sides(limited(CONFIG, goodbye_timeout_s=0.05)) as sides:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            incarnation_of(sides.writer).goodbyes.remember(reader_at(f"tcp://127.0.0.1:{mute.getsockname()[1]}"))
            await sides.writer.aclose()
        assert sides.goodbyes == 1


async def test_a_forged_goodbye_changes_nothing(sides: Sides) -> None:
    await sides.load(sides.offer([3]))
    ranks = [("producer", Rank(0, 0, 1)), ("somebody", Rank(0, 0, 0)), ("producer", Rank(1 << 60, -1, 0))]
    senders = [Address(*rank, "tcp://127.0.0.1:1") for rank in ranks]
    for changes in ({"incarnation": "ffff"}, *({"sender": sender} for sender in senders)):
        sides.goodbye(**changes)
        await asyncio.sleep(0)
        assert sides.peer_state is PeerState.READY, changes
    sides.goodbye()
    await asyncio.sleep(0)
    assert sides.peer_state is PeerState.BROKEN, "the true one would have been understood"


async def test_a_forged_goodbye_costs_a_handshake_at_most_and_no_load(sides: Sides) -> None:
    """A peer that knows the incarnation may forge its goodbye; a load in the middle of its read does not notice."""
    lease = sides.offer([3], reader_count=2)
    load = await sides.hold(lease)
    sides.goodbye()
    await asyncio.sleep(0)
    assert sides.agents == 1
    assert (await sides.let_go(load)).blocks == 1
    assert (await sides.load(lease, [1])).blocks == 1


async def test_readers_are_remembered_up_to_a_limit_and_only_if_they_can_be() -> None:
    bad = ("junk", "tcp://0.0.0.0:5", "tcp://*:5", "tcp://h:0", "tcp://h:99999", "ipc:///tmp/x", "x" * 9999)
    async with open_sides(limited(CONFIG, readers_max=2)) as sides:
        readers = incarnation_of(sides.writer).goodbyes
        for caller in (*map(reader_at, bad), reader_at("tcp://127.0.0.1:1", "")):
            readers.remember(caller)
        assert readers.count == 0
        for port in (1, 2, 3, 3):
            readers.remember(reader_at(f"tcp://127.0.0.1:{port}"))
        assert readers.count == 2
        await readers.send_all()
        assert readers.count == 0
        assert sides.goodbyes == 2
