"""The life of a peer: asked once for all who wait, left alone while it fails, forgotten when nobody needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import msgspec
import pytest
from hand_overs import free_ports
from scripted import ScriptedSideChannel, ScriptedWorld, refusal
from tests_support import (
    PATIENT,
    altered,
    assert_all_ended,
    in_virtual_time,
    limited,
    small_cache,
    turns,
    until,
)

from kvflow import Config, LeaseOutcome, LoadReport, LoadRequest, PeerAddress, Runtime, ServeRequest, Ticket
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.states import PeerEvent, PeerState
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.errors import (
    KVFlowError,
    LeaseExpired,
    Overloaded,
    PeerIncompatible,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    TransferFailed,
)
from kvflow.runtime.peers.table import PeerStatistics
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, InprocPair, InprocTransport, ManualClock, inproc_pair
from kvflow.transport.base import PeerGone

CONFIG = PATIENT


@dataclass(frozen=True)
class Reader:
    """The pair as its consumer sees it."""

    pair: InprocPair
    scripted: ScriptedWorld

    @property
    def runtime(self) -> Runtime:
        return self.pair.consumer.runtime

    @property
    def clock(self) -> ManualClock:
        return self.scripted.clock

    @property
    def questions(self) -> int:
        """Handshakes so far."""
        return sum(isinstance(one, messages.MetadataRequest) for one in self.scripted.channel.asked)

    @property
    def peer(self) -> PeerStatistics:
        (peer,) = self.runtime.statistics().peers
        return peer

    @property
    def agents(self) -> int:
        """Agents that the transport knows."""
        return self.runtime.statistics().transport.open_peers

    def answer(self, *outcomes: messages.Reply | Exception | Callable[[messages.Reply], messages.Reply]) -> None:
        """What the next questions get."""
        self.scripted.channel.script.extend(outcomes)

    def fail_reads(self, count: int) -> None:
        self.pair.consumer.transport.faults.fail_next.extend([PeerGone("scripted")] * count)

    async def load(self, ticket: Ticket, block: int = 0) -> LoadReport:
        return await self.runtime.load_blocks(LoadRequest("req", ticket=ticket, block_ids=[block]))

    async def until_held(self) -> None:
        await until(lambda: self.pair.consumer.transport.held)

    async def until_agents(self, count: int) -> None:
        await until(lambda: self.agents == count)


@contextlib.asynccontextmanager
async def open_reader(config: Config = CONFIG, producer: World = World()) -> AsyncIterator[Reader]:  # noqa: B008
    scripted = ScriptedWorld()
    async with open_scripted(scripted, config, producer, scripted.world) as reader:
        yield reader


@contextlib.asynccontextmanager
async def open_virtual_reader(config: Config) -> AsyncIterator[Reader]:
    """For virtual time: the side channel is in process too."""
    world = InprocCluster().world()
    scripted = ScriptedWorld(ScriptedSideChannel(beneath=world.side_channel))
    consumer = replace(world, side_channel=scripted.channel, clock=lambda: scripted.clock)
    async with open_scripted(scripted, config, world, consumer) as reader:
        yield reader


@contextlib.asynccontextmanager
async def open_scripted(
    scripted: ScriptedWorld, config: Config, producer: World, consumer: World
) -> AsyncIterator[Reader]:
    async with inproc_pair(config=config, producer_world=producer, consumer_world=consumer) as pair:
        yield Reader(pair, scripted)
        await assert_all_ended(pair)
    assert scripted.clock.pending == 0, "a closed runtime leaves no timer"


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    async with open_reader() as reader:
        yield reader


# --- back-off


async def test_a_failed_handshake_fails_all_who_wait_and_the_next_loads_at_once(reader: Reader) -> None:
    reader.answer(refusal("not today"))
    lease = reader.pair.offer([3])
    results = await asyncio.gather(*(reader.load(lease.ticket, block) for block in range(4)), return_exceptions=True)
    assert [type(result) for result in results] == [PeerRefused] * 4
    assert all("not today" in str(result) for result in results)
    assert reader.questions == 1

    with pytest.raises(PeerUnreachable, match=r"not asked for another 0\.\d+ s .*: 1, the last: .*not today") as caught:
        await reader.load(lease.ticket)
    assert reader.questions == 1
    wait_s = caught.value.retry_after_s
    assert wait_s == reader.peer.retry_after_s
    assert wait_s is not None
    assert CONFIG.limits.peer_backoff_first_s / 2 <= wait_s < CONFIG.limits.peer_backoff_first_s
    assert (reader.peer.state, reader.peer.failures) == (PeerState.BACKING_OFF, 1)
    assert "not today" in reader.peer.last_error

    reader.clock.advance(wait_s)
    await reader.load(lease.ticket)
    assert await lease is LeaseOutcome.READ
    assert (reader.peer.state, reader.peer.failures, reader.peer.last_error) == (PeerState.READY, 0, "")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (PeerUnreachable("nobody", peer="p"), PeerUnreachable),
        (refusal("unknown engine"), PeerRefused),
        (refusal("no", version=7), PeerIncompatible),
        (messages.Ack(), ProtocolError),
    ],
    ids=["unreachable", "refused", "another version", "another answer"],
)
async def test_waits_double_while_it_fails_and_each_ends_with_one_question(
    reader: Reader, outcome: messages.Reply | Exception, error: type[KVFlowError]
) -> None:
    lease = reader.pair.offer([3])
    waits = []
    for failures in range(1, 9):
        reader.answer(outcome)
        loads = (reader.load(lease.ticket, block) for block in range(3))
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert [type(result) for result in results] == [error] * 3
        assert (reader.questions, reader.peer.failures) == (failures, failures)
        waits.append(reader.peer.retry_after_s)
        reader.clock.advance(waits[-1])
    for at, wait_s in enumerate(waits):
        whole_s = min(CONFIG.limits.peer_backoff_first_s * 2**at, CONFIG.limits.peer_backoff_max_s)
        assert whole_s / 2 <= wait_s <= whole_s + 1e-9
    await reader.load(lease.ticket)
    assert await lease is LeaseOutcome.READ


async def test_who_is_not_ready_yet_may_be_asked_again_at_once(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    reader.answer(refusal("no KV cache registered yet", transient=True))
    with pytest.raises(PeerNotReady, match="no KV cache registered yet"):
        await reader.load(lease.ticket)
    assert (reader.peer.state, reader.peer.failures) == (PeerState.UNKNOWN, 0)
    await reader.load(lease.ticket)
    assert await lease is LeaseOutcome.READ


async def test_not_ready_for_one_request_is_no_answer_for_another(reader: Reader) -> None:
    """Who shared the handshake asks for itself: a draining rank connects readers of its open leases only."""
    lease = reader.pair.offer([3])
    reader.answer(refusal("draining", transient=True))
    results = await asyncio.gather(*(reader.load(lease.ticket, block) for block in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [PeerNotReady, LoadReport, LoadReport]
    assert reader.questions == 2


async def test_a_ticket_of_another_life_may_try_at_once_but_only_once(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    reader.answer(*[PeerUnreachable("nobody", peer="p")] * 2)
    with pytest.raises(PeerUnreachable, match="nobody"):
        await reader.load(lease.ticket)
    reborn = altered(lease.ticket, incarnation="ffff")
    with pytest.raises(PeerUnreachable, match=r": nobody$"):
        await reader.load(reborn)
    assert reader.questions == 2
    for ticket in (reborn, lease.ticket):
        with pytest.raises(PeerUnreachable, match="is not asked"):
            await reader.load(ticket)
    assert reader.questions == 2
    lease.revoke()


async def test_a_failed_read_asks_again_at_once_and_a_row_of_them_waits(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    reader.fail_reads(2)
    with pytest.raises(TransferFailed):
        await reader.load(lease.ticket)
    assert (reader.peer.state, reader.peer.retry_after_s) == (PeerState.BROKEN, 0)
    with pytest.raises(TransferFailed):
        await reader.load(lease.ticket)
    assert (reader.questions, reader.peer.state, reader.peer.failures) == (2, PeerState.BACKING_OFF, 2)
    with pytest.raises(PeerUnreachable, match="scripted"):
        await reader.load(lease.ticket)
    reader.clock.advance(reader.peer.retry_after_s)
    await reader.load(lease.ticket)
    assert (reader.questions, reader.peer.failures, reader.agents) == (3, 0, 1)
    assert await lease is LeaseOutcome.READ


async def test_many_reads_that_fail_at_once_are_one_failure(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    transport = reader.pair.consumer.transport
    transport.faults.hold = True
    loads = [asyncio.create_task(reader.load(lease.ticket, block)) for block in range(5)]
    await until(lambda: len(transport.held) >= 5)
    reader.fail_reads(5)
    transport.faults.hold = False
    transport.perform()
    results = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(result) for result in results] == [TransferFailed] * 5
    assert (reader.peer.state, reader.peer.failures) == (PeerState.BROKEN, 1)
    await reader.load(lease.ticket)


def about_lease(ticket: Ticket) -> messages.LeaseRequest:
    target = messages.Target("producer", 0, 0, 0)
    return messages.LeaseRequest(
        reader="r", target=target, request_id=ticket.request_id, num_tokens=4, blocks_digest=ticket.blocks_digest
    )


async def test_a_peer_that_falls_silent_is_asked_a_few_things_only_and_fails_all_who_ask(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    await reader.load(lease.ticket)
    cache = reader.runtime._supervisor.cache
    assert cache is not None
    peer = cache.peers.get(Address("producer", Rank(0, 0, 0), lease.ticket.address))
    silence: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked = 0

    async def say_nothing(*_: object, **__: object) -> messages.Reply:
        nonlocal asked
        asked += 1
        await silence
        raise PeerUnreachable("no answer", peer="p")

    reader.scripted.channel.ask = say_nothing  # type: ignore[method-assign]
    question = about_lease(lease.ticket)
    asking = [asyncio.create_task(cache.peers.find_lease(peer, question)) for _ in range(100)]
    await turns(10)
    assert asked == 8
    silence.set_result(None)
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert asked == 8, "the others know then"
    assert [type(result) for result in results] == [PeerUnreachable] * 100
    assert str(results[-1]).endswith(": no answer")
    assert (reader.peer.state, reader.peer.failures) == (PeerState.BROKEN, 1)


async def test_a_rank_that_does_not_say_its_lease_has_failed_too(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    await reader.load(lease.ticket)
    cache = reader.runtime._supervisor.cache
    assert cache is not None
    peer = cache.peers.get(Address("producer", Rank(0, 0, 0), lease.ticket.address))
    reader.answer(PeerUnreachable("nobody", peer="p"))
    with pytest.raises(PeerUnreachable):
        await cache.peers.find_lease(peer, about_lease(lease.ticket))
    assert (reader.peer.state, reader.peer.failures) == (PeerState.BROKEN, 1)


async def test_a_failure_names_request_and_engine_and_each_once(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    address = lease.ticket.address
    where = rf"request 'req': engine 'producer' \(dp 0 pp 0 tp 0\) at {address}"
    reader.answer(refusal("not today"))
    with pytest.raises(PeerRefused, match=f"^{where}: refused: not today$") as refused:
        await reader.load(lease.ticket)
    last = r"\(failures in a row: 1, the last: refused: not today\)"
    with pytest.raises(PeerUnreachable, match=rf"^{where}: it is not asked for another 0\.\d+ s {last}$") as left_alone:
        await reader.load(lease.ticket)
    for error in (refused.value, left_alone.value):
        assert (error.request_id, error.engine_id, error.peer) == ("req", "producer", address)
    (warmed,) = await reader.runtime.prewarm([lease.ticket])
    assert isinstance(warmed.error, PeerUnreachable)
    assert (warmed.error.request_id, warmed.error.engine_id) == ("", "producer")
    lease.revoke()


async def test_what_a_peer_says_gets_into_messages_only_so_far(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    reader.answer(refusal("\x1b[31m\n" + "x" * 1_000_000))
    with pytest.raises(PeerRefused) as caught:
        await reader.load(lease.ticket)
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()
    assert len(reader.peer.last_error) < 1000
    lease.revoke()


# --- metadata


async def test_no_flipped_bit_of_agent_metadata_reaches_the_transport(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    (true,) = [await reader.pair.producer.transport.metadata()]
    for bit in range(len(true) * 8):
        flipped = bytearray(true)
        flipped[bit // 8] ^= 1 << (bit % 8)
        reader.answer(lambda reply, bad=bytes(flipped): msgspec.structs.replace(reply, agent_metadata=bad))
        with pytest.raises(ProtocolError, match=r"agent metadata checksum: computed 0x.*, sent 0x"):
            await reader.load(lease.ticket)
        assert reader.agents == 0
        reader.clock.advance(reader.peer.retry_after_s)
    await reader.load(lease.ticket)
    assert reader.agents == 1


@in_virtual_time
async def test_a_handshake_that_ends_while_the_transport_adds_the_agent_leaves_no_trace() -> None:
    async with open_virtual_reader(replace(CONFIG, handshake_timeout_s=0.05)) as reader:
        lease = reader.pair.offer([3])
        transport = reader.pair.consumer.transport
        add_peer = transport.add_peer

        async def add_and_stall(metadata: bytes) -> object:
            await add_peer(metadata)
            return await asyncio.get_running_loop().create_future()

        transport.add_peer = add_and_stall  # type: ignore[method-assign,assignment]
        with pytest.raises(PeerUnreachable, match=r"handshake not done within 0\.05 s"):
            await reader.load(lease.ticket)
        await reader.until_agents(0)
        transport.add_peer = add_peer  # type: ignore[method-assign]
        await reader.runtime.forget_peer("producer")
        await reader.load(lease.ticket)


# --- restarts


@contextlib.asynccontextmanager
async def reborn_producer(reader: Reader, port: int) -> AsyncIterator[Runtime]:
    """Another incarnation of the producer under the same name and address; its blocks hold fives."""
    network = reader.pair.producer.transport._network
    config = replace(CONFIG, engine_id="producer", listen=f"tcp://127.0.0.1:{port}")
    kv_caches, layout = small_cache(num_blocks=16, fill=5.0)
    async with Runtime(config, world=World(transport=lambda _, name: InprocTransport(name, network))) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
        yield runtime


async def test_a_producer_that_died_without_a_word_and_came_back() -> None:
    """Old connection, nobody there, new incarnation: no wait keeps its tickets out, no old ticket disturbs it."""
    dying = ScriptedWorld(clock=ManualClock())
    dying.channel.mute = (messages.Goodbye,)
    async with open_reader(producer=World(side_channel=dying.channel)) as reader:
        first, unread = reader.pair.offer([3]), reader.pair.offer([4], "unread", ttl_s=0.001)
        await reader.load(first.ticket)
        port = first.ticket.first.port
        closing = asyncio.create_task(reader.pair.producer.runtime.aclose())
        while not closing.done():  # it waits for its leases
            dying.clock.advance(1.0)
            await asyncio.sleep(0)
        with pytest.raises(TransferFailed, match="is gone"):
            await reader.load(unread.ticket)
        with pytest.raises(PeerUnreachable, match=r"[Cc]onnect"):
            await reader.load(unread.ticket)
        with pytest.raises(PeerUnreachable, match="is not asked"):
            await reader.load(unread.ticket)
        async with reborn_producer(reader, port) as reborn:
            lease = reborn.serve_blocks(ServeRequest("new", block_ids=[2], num_tokens=4))
            await reader.load(lease.ticket, 1)
            questions = reader.questions
            for _ in range(5):
                with pytest.raises(LeaseExpired, match="engine 'producer' has restarted"):
                    await reader.load(unread.ticket)
            assert reader.questions <= questions + 1
            again = reborn.serve_blocks(ServeRequest("newer", block_ids=[2], num_tokens=4))
            await reader.load(again.ticket, 1)
            assert reader.agents == 1
            assert [await lease, await again] == [LeaseOutcome.READ] * 2
    for tensor in reader.pair.consumer.kv_caches.values():
        assert (tensor[:, 1] == 5.0).all()


async def test_an_unknown_incarnation_asks_once_and_disturbs_nobody(reader: Reader) -> None:
    """The peer is who it was: its connection goes on, also for the load that was in the middle of a read."""
    lease = reader.pair.offer([3])
    transport = reader.pair.consumer.transport
    transport.faults.hold = True
    load = asyncio.create_task(reader.load(lease.ticket))
    await reader.until_held()
    for _ in range(3):
        with pytest.raises(LeaseExpired, match="the ticket is of incarnation ffff"):
            await reader.load(altered(lease.ticket, incarnation="ffff"), 1)
    assert (reader.questions, reader.agents, reader.peer.state) == (2, 1, PeerState.READY)
    transport.faults.hold = False
    transport.perform()
    assert (await load).blocks == 1


# --- eviction


async def test_a_peer_that_nobody_uses_is_forgotten_after_a_while(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    await reader.load(lease.ticket)
    reader.clock.advance(CONFIG.limits.peer_idle_s * 0.99)
    assert reader.peer.state is PeerState.READY
    reader.clock.advance(CONFIG.limits.peer_idle_s * 0.26)
    assert reader.runtime.statistics().peers == ()
    await reader.until_agents(0)
    assert reader.clock.pending == 0, "no timer without peers"
    again = reader.pair.offer([4], "again")
    await reader.load(again.ticket)
    assert (reader.questions, reader.agents) == (2, 1)


async def test_a_peer_that_failed_is_forgotten_too(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    reader.answer(refusal("no"))
    with pytest.raises(PeerRefused):
        await reader.load(lease.ticket)
    reader.clock.advance(CONFIG.limits.peer_idle_s * 1.25)
    assert reader.runtime.statistics().peers == ()
    lease.revoke()


async def test_a_peer_in_use_is_not_forgotten(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    transport = reader.pair.consumer.transport
    transport.faults.hold = True
    load = asyncio.create_task(reader.load(lease.ticket))
    await reader.until_held()
    reader.clock.advance(CONFIG.limits.peer_idle_s * 3)
    assert (reader.peer.state, reader.agents) == (PeerState.READY, 1)
    transport.faults.hold = False
    transport.perform()
    await load
    reader.clock.advance(CONFIG.limits.peer_idle_s * 0.99)
    assert reader.peer.state is PeerState.READY, "its time begins when its last read has ended"


async def test_there_are_never_more_peers_than_the_limit() -> None:
    async with open_reader(limited(CONFIG, peers_max=2)) as reader:
        lease = reader.pair.offer([3])
        tickets = [altered(lease.ticket, port=port) for port in (1, 2, 3)]
        for ticket in tickets[:2]:
            with pytest.raises(PeerUnreachable):
                await reader.load(ticket)
            reader.clock.advance(0.1)
        with pytest.raises(PeerUnreachable):
            await reader.load(tickets[2])
        assert [peer.address for peer in reader.runtime.statistics().peers] == [
            ticket.address for ticket in tickets[1:]
        ], "the oldest made room"
        lease.revoke()


async def test_peers_that_were_never_met_make_room_before_those_that_were() -> None:
    async with open_reader(limited(CONFIG, peers_max=2)) as reader:
        await reader.load(reader.pair.offer([3], "first").ticket)
        lease = reader.pair.offer([4])
        reader.fail_reads(1)
        with pytest.raises(TransferFailed):
            await reader.load(lease.ticket)
        for port in (1, 2, 3):
            reader.clock.advance(0.1)
            with pytest.raises(PeerUnreachable):
                await reader.load(altered(lease.ticket, port=port))
        peers = reader.runtime.statistics().peers
        assert [(peer.address, peer.met) for peer in peers] == [
            (lease.ticket.address, True),
            ("tcp://127.0.0.1:3", False),
        ]
        await reader.load(lease.ticket)


async def test_peers_that_were_lost_make_room_before_those_that_are_connected() -> None:
    async with open_reader(limited(CONFIG, peers_max=2)) as reader:
        lease, lost = reader.pair.offer([3]), reader.pair.offer([4], "lost")
        there = altered(lost.ticket, host="localhost")
        await reader.load(lease.ticket)
        reader.clock.advance(CONFIG.handshake_timeout_s)
        cache = reader.runtime._supervisor.cache
        assert cache is not None
        await reader.load(there)
        gone = cache.peers.get(Address("producer", Rank(0, 0, 0), there.address))
        cache.peers._disconnect(gone, PeerEvent.BREAK, "scripted")
        with pytest.raises(PeerUnreachable):
            await reader.load(altered(lease.ticket, port=1))
        assert [peer.address for peer in reader.runtime.statistics().peers] == [
            lease.ticket.address,
            "tcp://127.0.0.1:1",
        ]


async def test_a_connection_that_was_just_given_to_a_load_stays() -> None:
    async with open_reader(limited(CONFIG, peers_max=1)) as reader:
        lease = reader.pair.offer([3])
        await reader.load(lease.ticket)
        with pytest.raises(
            Overloaded, match=r"tcp://127\.0\.0\.1:1: no room for it: all 1 peers are in use \(peers_max\)"
        ):
            await reader.load(altered(lease.ticket, port=1))
        reader.clock.advance(CONFIG.handshake_timeout_s)
        with pytest.raises(PeerUnreachable):
            await reader.load(altered(lease.ticket, port=1))
        await reader.until_agents(0)


# --- forget_peer


async def test_forgetting_a_peer_makes_the_next_load_start_from_scratch(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    await reader.load(lease.ticket)
    assert await reader.runtime.forget_peer("somebody else")
    assert await reader.runtime.forget_peer("producer", "tcp://127.0.0.1:1")
    assert reader.agents == 1
    assert await reader.runtime.forget_peer("producer", lease.ticket.address)
    assert (reader.agents, reader.runtime.statistics().peers) == (0, ())
    again = reader.pair.offer([4], "again")
    await reader.load(again.ticket)
    assert reader.questions == 2


async def test_forgetting_a_peer_forgets_its_failures(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    reader.answer(refusal("no"))
    with pytest.raises(PeerRefused):
        await reader.load(lease.ticket)
    assert await reader.runtime.forget_peer("producer")
    await reader.load(lease.ticket)


@in_virtual_time
async def test_a_load_from_a_peer_that_is_forgotten_goes_on() -> None:
    async with open_virtual_reader(replace(CONFIG, handshake_timeout_s=0.1)) as reader:
        lease = reader.pair.offer([3])
        transport = reader.pair.consumer.transport
        transport.faults.hold = True
        load = asyncio.create_task(reader.load(lease.ticket))
        await reader.until_held()
        assert not await reader.runtime.forget_peer("producer")
        assert (reader.agents, reader.runtime.statistics().peers) == (1, ()), "nothing is torn down under a read"
        transport.faults.hold = False
        transport.perform()
        assert (await load).blocks == 1
        await reader.until_agents(0)


async def test_a_load_that_waits_for_a_lease_connects_again_to_a_peer_that_was_forgotten(reader: Reader) -> None:
    producer = reader.pair.producer.runtime
    first = reader.pair.offer([3])
    ticket = first.ticket.without_leases(request_id="late", block_ids=[4], num_tokens=4, ttl_s=30.0)
    load = asyncio.create_task(reader.load(ticket))
    await until(lambda: any(isinstance(question, messages.LeaseRequest) for question in reader.scripted.channel.asked))
    assert await reader.runtime.forget_peer("producer")
    late = producer.serve_blocks(ServeRequest("late", block_ids=[4], num_tokens=4))
    assert (await load).blocks == 1
    assert await late is LeaseOutcome.READ
    first.revoke()


async def test_forgetting_a_peer_in_a_handshake_lets_that_end_first(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    load = asyncio.create_task(reader.load(lease.ticket))
    await until(lambda: reader.questions)
    forgetting = asyncio.create_task(reader.runtime.forget_peer("producer"))
    (result,) = await asyncio.gather(load, return_exceptions=True)
    assert isinstance(result, LoadReport | TransferFailed)  # as it had begun to read, or not
    assert await forgetting
    assert (reader.agents, reader.runtime.statistics().peers) == (0, ())
    lease.revoke()


async def test_two_addresses_of_one_rank_share_its_agent(reader: Reader) -> None:
    lease, other = reader.pair.offer([3]), reader.pair.offer([4], "other")
    there = altered(other.ticket, host="localhost")
    await reader.load(there, 0)
    await reader.load(lease.ticket, 1)
    assert (reader.questions, reader.agents, len(reader.runtime.statistics().peers)) == (2, 1, 2)
    assert await reader.runtime.forget_peer("producer", there.address)
    assert (reader.agents, len(reader.runtime.statistics().peers)) == (1, 1)
    again = reader.pair.offer([5], "again")
    await reader.load(again.ticket)
    assert await reader.runtime.forget_peer("producer")
    assert reader.agents == 0


# --- prewarm


async def test_a_load_from_an_engine_that_was_prewarmed_asks_nobody(reader: Reader) -> None:
    address = reader.pair.producer.runtime.address
    (result,) = await reader.runtime.prewarm([PeerAddress(engine_id="producer", address=address)])
    assert (result.engine_id, result.ranks, result.error) == ("producer", (Rank(0, 0, 0),), None)
    assert (reader.questions, reader.agents) == (1, 1)
    lease = reader.pair.offer([3])
    await reader.load(lease.ticket)
    assert reader.questions == 1


async def test_prewarming_says_for_each_engine_what_came_of_it(reader: Reader) -> None:
    lease = reader.pair.offer([3])
    results = await reader.runtime.prewarm(
        [
            PeerAddress(engine_id="ghost", address="tcp://127.0.0.1:1"),
            lease.ticket.to_params(),
            PeerAddress(engine_id="ghost", address="nowhere"),
            lease.ticket,
            {"not": "a ticket"},
            PeerAddress(engine_id="ghost", address=lease.ticket.address),
        ]
    )
    assert [(result.engine_id, len(result.ranks)) for result in results] == [
        ("ghost", 0),
        ("producer", 1),
        ("ghost", 0),
        ("producer", 1),
        ("", 0),
        ("ghost", 0),
    ]
    texts = [str(result.error) for result in results]
    assert "Connect" in texts[0] or "connect" in texts[0]
    assert texts[1] == texts[3] == "None"
    assert "expected 'tcp://host:port', got 'nowhere'" in texts[2]
    assert "ticket: " in texts[4]
    assert "unknown engine: expected 'ghost'" in texts[5]
    lease.revoke()


async def test_prewarming_finds_the_ranks_that_loads_will_need(reader: Reader) -> None:
    """Rank 1 of 2 has nothing to read from rank 0 of 2, whose address was given, but from its neighbour."""
    network = reader.pair.producer.transport._network
    world = World(transport=lambda _, name: InprocTransport(name, network))
    async with contextlib.AsyncExitStack() as stack:
        port = free_ports(2)
        for engine_id, tp_rank, listen in (("two", 0, port), ("two", 1, port), ("reader", 1, 0)):
            config = Config(engine_id=engine_id, tp_rank=tp_rank, tp_size=2, listen=f"tcp://127.0.0.1:{listen}")
            runtime = await stack.enter_async_context(Runtime(config, world=world))
            await runtime.register_kv_caches(*small_cache())
        (result,) = await runtime.prewarm([PeerAddress(engine_id="two", address=f"tcp://127.0.0.1:{port}")])
        assert (result.ranks, result.error) == ((Rank(0, 0, 1),), None)
