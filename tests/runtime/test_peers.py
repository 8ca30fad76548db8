"""The life of a peer: asked once for all waiting loads, left alone while it fails, forgotten when it is not used."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import msgspec
import pytest
from hand_overs import free_ports
from pairs import EnginePair, engine_world, host_of, open_pair
from scripted import Outcome, ScriptedSideChannel, ScriptedWorld, refusal
from tests_support import PATIENT, altered, in_virtual_time, limited, small_cache, turns, until

from kvflow import Config, LeaseOutcome, LoadReport, PeerAddress, Runtime, ServeRequest, Ticket
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.states import PeerState
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
from kvflow.testing import InprocCluster, ManualClock
from kvflow.transport.base import PeerGone

LIMITS = PATIENT.limits
NOBODY = PeerUnreachable("nobody", peer="p")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedPair(EnginePair):
    """The consumer's questions and its clock are in the test's hands."""

    scripted: ScriptedWorld

    @property
    def clock(self) -> ManualClock:
        return self.scripted.clock

    @property
    def questions(self) -> int:
        """Handshakes so far."""
        return sum(isinstance(one, messages.MetadataRequest) for one in self.scripted.channel.asked)

    @property
    def peers(self) -> tuple[PeerStatistics, ...]:
        return self.reader.statistics().peers

    @property
    def peer(self) -> PeerStatistics:
        (peer,) = self.peers
        return peer

    @property
    def failed(self) -> tuple[PeerState, int]:
        return self.peer.state, self.peer.failures

    @property
    def agents(self) -> int:
        """Agents that the transport knows."""
        return self.reader.statistics().transport.open_peers

    def answer(self, *outcomes: Outcome) -> None:
        """Set the outcomes of the next questions."""
        self.scripted.channel.script.extend(outcomes)

    def fail_reads(self, count: int) -> None:
        self.transport.faults.fail_next.extend([PeerGone("scripted")] * count)

    async def results(self, ticket: Ticket, count: int) -> list[type[object]]:
        """Return the outcomes of `count` loads at once."""
        loads = (self.load(ticket, [block]) for block in range(count))
        return [type(result) for result in await asyncio.gather(*loads, return_exceptions=True)]

    async def until_agents(self, count: int) -> None:
        await until(lambda: self.agents == count)


@contextlib.asynccontextmanager
async def scripted_pair(
    config: Config = PATIENT,
    *,
    producer: World = World(),  # noqa: B008 - frozen
    virtual: bool = False,
) -> AsyncIterator[ScriptedPair]:
    """For virtual time the side channel is in process too."""
    beneath = InprocCluster().world() if virtual else producer
    scripted = ScriptedWorld(ScriptedSideChannel(beneath=beneath.side_channel) if virtual else ScriptedSideChannel())
    consumer = replace(beneath if virtual else World(), side_channel=scripted.channel, clock=lambda: scripted.clock)
    async with open_pair(config, producer=beneath, consumer=consumer) as pair:
        yield ScriptedPair(producer=pair.producer, consumer=pair.consumer, scripted=scripted)
    assert scripted.clock.pending == 0, "a closed runtime leaves no timer"


@pytest.fixture
async def pair() -> AsyncIterator[ScriptedPair]:
    async with scripted_pair() as pair:
        yield pair


# --- back-off


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (NOBODY, PeerUnreachable),
        (refusal("unknown engine"), PeerRefused),
        (refusal("no", version=7), PeerIncompatible),
        (messages.Ack(incarnation="i"), ProtocolError),
    ],
    ids=["unreachable", "refused", "another version", "another answer"],
)
async def test_waits_double_while_it_fails_and_each_ends_with_one_question(
    pair: ScriptedPair, outcome: Outcome, error: type[KVFlowError]
) -> None:
    """A failed handshake fails all who wait, and the next loads at once: what does not fit is no matter of time."""
    lease = pair.offer([3])
    for failures in range(1, 9):
        pair.answer(outcome)
        assert await pair.results(lease.ticket, 3) == [error] * 3
        left_alone = await pair.fails(error, lease, match="in back-off for another ")
        assert (pair.questions, *pair.failed) == (failures, PeerState.BACKING_OFF, failures)
        wait_s = pair.peer.retry_after_s
        whole_s = min(LIMITS.peer_backoff_first_s * 2 ** (failures - 1), LIMITS.peer_backoff_max_s)
        assert left_alone.retry_after_s == wait_s
        assert whole_s / 2 <= wait_s <= whole_s + 1e-9
        pair.clock.advance(wait_s)
    await pair.load(lease)
    assert await lease is LeaseOutcome.READ
    assert (*pair.failed, pair.peer.last_error) == (PeerState.READY, 0, "")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.getMessage() for one in caplog.records if one.levelname == "WARNING" and "every load" in one.getMessage()
    ]


async def test_a_peer_that_never_fits_is_a_warning_once_for_each_reason(
    pair: ScriptedPair, caplog: pytest.LogCaptureFixture
) -> None:
    lease = pair.offer([3])
    for version in (7, 7, 8, 7, 8):
        pair.answer(refusal("no", version=version))
        assert await pair.results(lease.ticket, 3) == [PeerIncompatible] * 3
        pair.clock.advance(pair.peer.retry_after_s)
    told = warnings_of(caplog)
    assert [text.split(";")[0].rpartition(" ")[2] for text in told] == ["7", "8"]
    assert all("'producer'" in text and lease.ticket.address in text for text in told)
    pair.answer(NOBODY)
    await pair.fails(PeerUnreachable, lease)
    assert warnings_of(caplog) == told, "what is a matter of time is none"


async def test_who_is_not_ready_yet_may_be_asked_again_at_once(pair: ScriptedPair) -> None:
    """Each sharer of the handshake asks again: a draining rank connects readers of its open leases only."""
    lease = pair.offer([3])
    pair.answer(refusal("no KV cache registered yet", transient=True))
    await pair.fails(PeerNotReady, lease, match="no KV cache registered yet")
    assert pair.failed == (PeerState.UNKNOWN, 0)
    pair.answer(refusal("draining", transient=True))
    assert await pair.results(lease.ticket, 3) == [PeerNotReady, LoadReport, LoadReport]
    assert pair.questions == 3


async def test_a_ticket_of_another_life_may_try_at_once_but_only_once(pair: ScriptedPair) -> None:
    lease = pair.offer([3])
    reborn = altered(lease.ticket, incarnation="ffff")
    pair.answer(NOBODY, NOBODY)
    for ticket in (lease.ticket, reborn):
        await pair.fails(PeerUnreachable, ticket, match=r": nobody$")
    for ticket in (reborn, lease.ticket):
        await pair.fails(PeerUnreachable, ticket, match="in back-off")
    assert pair.questions == 2


async def test_a_failed_read_asks_again_at_once_and_a_row_of_them_waits(pair: ScriptedPair) -> None:
    lease = pair.offer([3])
    pair.fail_reads(2)
    failed = await pair.fails(TransferFailed, lease, match="the transfer failed: scripted")
    assert (failed.quarantine, type(failed.__cause__)) == (None, PeerGone)
    assert (pair.peer.state, pair.peer.retry_after_s) == (PeerState.BROKEN, 0)
    await pair.fails(TransferFailed, lease)
    assert (pair.questions, *pair.failed) == (2, PeerState.BACKING_OFF, 2)
    await pair.fails(PeerUnreachable, lease, match="scripted")
    pair.clock.advance(pair.peer.retry_after_s)
    await pair.load(lease)
    assert (pair.questions, pair.peer.failures, pair.agents) == (3, 0, 1)
    assert await lease is LeaseOutcome.READ
    pair.assert_loaded([0], [3])


async def test_many_reads_that_fail_at_once_are_one_failure(pair: ScriptedPair) -> None:
    lease = pair.offer([3])
    loads = [await pair.hold(lease, [block]) for block in range(5)]
    pair.fail_reads(5)
    pair.release_reads()
    results = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(result) for result in results] == [TransferFailed] * 5
    assert pair.failed == (PeerState.BROKEN, 1)
    await pair.load(lease)


async def test_a_peer_that_falls_silent_is_asked_a_few_things_only_and_fails_all_who_ask(pair: ScriptedPair) -> None:
    ticket = pair.offer([3]).ticket
    await pair.load(ticket)
    peers = host_of(pair.reader).peers
    silence: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asked = 0

    async def say_nothing(*_: object, **__: object) -> messages.Reply:
        nonlocal asked
        asked += 1
        await silence
        raise PeerUnreachable("no answer", peer="p")

    pair.scripted.channel.ask = say_nothing  # type: ignore[method-assign]
    peer = peers.get(Address("producer", Rank(0, 0, 0), ticket.address))
    find = host_of(pair.reader).kvflow_resolver.find_lease
    asking = [asyncio.create_task(find(ticket, peer)) for _ in range(100)]
    await turns(10)
    assert asked == 8
    silence.set_result(None)
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert asked == 8, "the others know then"
    assert [type(result) for result in results] == [PeerUnreachable] * 100
    assert str(results[-1]).endswith(": no answer")
    assert pair.failed == (PeerState.BROKEN, 1)


async def test_a_failure_names_request_and_engine_and_each_once(pair: ScriptedPair) -> None:
    lease = pair.offer([3])
    address = lease.ticket.address
    where = rf"request 'req': engine 'producer' \(dp 0 pp 0 tp 0\) at {address}"
    pair.answer(refusal("not today"))
    refused = await pair.fails(PeerRefused, lease, match=f"^{where}: refused: not today$")
    last = r"\(failures in a row: 1, the last: refused: not today\)"
    left_alone = await pair.fails(PeerRefused, lease, match=rf"^{where}: in back-off for another 0\.\d+ s {last}$")
    for error in (refused, left_alone):
        assert (error.request_id, error.engine_id, error.peer) == ("req", "producer", address)
    (warmed,) = await pair.reader.prewarm([lease.ticket])
    assert isinstance(warmed, PeerRefused)
    assert (warmed.request_id, warmed.engine_id) == ("", "producer")


async def test_what_a_peer_says_gets_into_messages_only_so_far(pair: ScriptedPair) -> None:
    pair.answer(refusal("\x1b[31m\n" + "x" * 1_000_000))
    text = str(await pair.fails(PeerRefused, pair.offer([3])))
    assert len(text) < 1000
    assert text.isprintable()
    assert len(pair.peer.last_error) < 1000


# --- metadata


async def test_no_flipped_bit_of_agent_metadata_reaches_the_transport(pair: ScriptedPair) -> None:
    lease = pair.offer([3])
    true = await pair.producer.transport.metadata()
    for bit in range(len(true) * 8):
        flipped = bytearray(true)
        flipped[bit // 8] ^= 1 << (bit % 8)
        pair.answer(lambda reply, bad=bytes(flipped): msgspec.structs.replace(reply, agent_metadata=bad))
        await pair.fails(ProtocolError, lease, match=r"agent metadata checksum: computed 0x.*, sent 0x")
        assert pair.agents == 0
        pair.clock.advance(pair.peer.retry_after_s)
    await pair.load(lease)
    assert pair.agents == 1


async def test_no_flipped_bit_of_device_memory_reaches_the_transport(pair: ScriptedPair) -> None:
    """A handle with a wrong bit may stand for other memory, of which a seal would say that it is right."""
    lease, true = pair.offer([3]), b"\x00handles\xff"
    for bit in range(len(true) * 8):
        flipped = bytearray(true)
        flipped[bit // 8] ^= 1 << (bit % 8)
        values = {"device_memory": bytes(flipped), "device_memory_crc32": zlib.crc32(true)}
        pair.answer(lambda reply, values=values: msgspec.structs.replace(reply, **values))
        await pair.fails(ProtocolError, lease, match=r"device memory checksum: computed 0x.*, sent 0x")
        assert pair.agents == 0
        pair.clock.advance(pair.peer.retry_after_s)
    await pair.load(lease)


@in_virtual_time
async def test_a_handshake_that_ends_while_the_transport_adds_the_agent_leaves_no_trace() -> None:
    async with scripted_pair(replace(PATIENT, handshake_timeout_s=0.05), virtual=True) as pair:
        lease = pair.offer([3])
        add_peer = pair.transport.add_peer

        async def add_and_stall(*metadata: bytes) -> object:
            await add_peer(*metadata)
            return await asyncio.get_running_loop().create_future()

        pair.transport.add_peer = add_and_stall  # type: ignore[method-assign,assignment]
        await pair.fails(PeerUnreachable, lease, match=r"handshake not done within 0\.05 s")
        await pair.until_agents(0)
        pair.transport.add_peer = add_peer  # type: ignore[method-assign]
        await pair.reader.forget_peer("producer")
        await pair.load(lease)


# --- restarts


@pytest.mark.parametrize("silently", [True, False])
async def test_a_producer_that_died_and_came_back(silently: bool) -> None:
    """Old connection, no process, new incarnation: no waiting time blocks its tickets, no old ticket disturbs it."""
    dying = ScriptedWorld()
    dying.channel.mute = (messages.Goodbye,) if silently else ()
    async with scripted_pair(producer=dying.world) as pair:
        unread = pair.offer([4], "unread", ttl_s=0.001)
        await pair.load(pair.offer([3]))
        closing = asyncio.create_task(pair.writer.aclose())
        while not closing.done():  # it waits for its leases
            dying.clock.advance(1.0)
            await asyncio.sleep(0)
        if silently:
            await pair.fails(TransferFailed, unread, match="is gone")
            await pair.fails(PeerUnreachable, unread, match=r"[Cc]onnect")
            await pair.fails(PeerUnreachable, unread, match="in back-off")
        again = replace(PATIENT, engine_id="producer", listen=f"tcp://127.0.0.1:{unread.ticket.first.port}")
        async with Runtime(again, world=engine_world(pair)) as reborn:
            await reborn.register_kv_caches(*small_cache(num_blocks=16, fill=5.0))
            new = [reborn.serve_blocks(ServeRequest(name, block_ids=[2], num_tokens=4)) for name in ("new", "newer")]
            await pair.load(new[0], [1])
            questions = pair.questions
            same = reborn.serve_blocks(ServeRequest("unread", block_ids=[4], num_tokens=4))
            for _ in range(5):
                await pair.fails(LeaseExpired, unread, match="engine 'producer' has restarted")
            assert not await pair.reader.release_blocks(unread.ticket)
            assert not (await pair.load(unread, [])).notified
            assert same.state == "offered"
            same.revoke()
            assert pair.questions <= questions + 1
            await pair.load(new[1], [1])
            assert pair.agents == 1
            assert [await lease for lease in new] == [LeaseOutcome.READ] * 2
    for tensor in pair.consumer.kv_caches.values():
        assert (tensor[:, 1] == 5.0).all()


async def test_an_unknown_incarnation_asks_once_and_disturbs_nobody(pair: ScriptedPair) -> None:
    """The peer is who it was: its connection goes on, also for the load that was in the middle of a read.

    NIXL loses file descriptors with every peer that is removed.
    """
    lease = pair.offer([3])
    load = await pair.hold(lease)
    for _ in range(3):
        forged = altered(lease.ticket, incarnation="ffff")
        await pair.fails(LeaseExpired, forged, [1], match="the ticket is of incarnation ffff")
    assert (pair.questions, pair.agents, pair.peer.state) == (2, 1, PeerState.READY)
    assert (await pair.let_go(load)).blocks == 1


async def test_a_connected_consumer_needs_no_side_channel(pair: ScriptedPair) -> None:
    """Also not to find out that a lease has ended."""
    await pair.load(pair.offer([3], "first"))
    pair.scripted.channel.mute = (messages.MetadataRequest, messages.LeaseRequest, messages.ReleaseRequest)
    lease = pair.offer([4])
    await pair.load(lease)
    assert await lease is LeaseOutcome.READ
    await pair.fails(LeaseExpired, lease)
    assert pair.questions == 1


# --- eviction


async def test_a_peer_that_nobody_uses_is_forgotten_after_a_while(pair: ScriptedPair) -> None:
    """A failed peer, too."""
    pair.answer(refusal("no"))
    await pair.fails(PeerRefused, pair.offer([5], "failed"))
    pair.clock.advance(LIMITS.peer_idle_s * 1.25)
    assert pair.peers == ()
    await pair.load(pair.offer([3]))
    pair.clock.advance(LIMITS.peer_idle_s * 0.99)
    assert pair.peer.state is PeerState.READY
    pair.clock.advance(LIMITS.peer_idle_s * 0.26)
    assert pair.peers == ()
    await pair.until_agents(0)
    assert pair.clock.pending == 0, "no timer without peers"
    await pair.load(pair.offer([4], "again"))
    assert (pair.questions, pair.agents) == (3, 1)


async def test_a_peer_in_use_is_not_forgotten(pair: ScriptedPair) -> None:
    load = await pair.hold(pair.offer([3]))
    pair.clock.advance(LIMITS.peer_idle_s * 3)
    assert (pair.peer.state, pair.agents) == (PeerState.READY, 1)
    await pair.let_go(load)
    pair.clock.advance(LIMITS.peer_idle_s * 0.99)
    assert pair.peer.state is PeerState.READY, "its time begins when its last read has ended"


async def meet_nobody(pair: ScriptedPair, ticket: Ticket, *ports: int) -> list[str]:
    """Load from addresses without a process, one moment after the other. Return the known addresses."""
    for port in ports:
        pair.clock.advance(0.1)
        await pair.fails(PeerUnreachable, altered(ticket, port=port))
    return [peer.address.removeprefix("tcp://127.0.0.1:") for peer in pair.peers]


async def test_there_are_never_more_peers_than_the_limit() -> None:
    """The oldest peer makes room; peers that never answered make room first."""
    async with scripted_pair(limited(PATIENT, peers_max=2)) as pair:
        lease = pair.offer([4])
        assert await meet_nobody(pair, lease.ticket, 1, 2, 3) == ["2", "3"]
        await pair.load(pair.offer([3], "first"))
        pair.fail_reads(1)
        await pair.fails(TransferFailed, lease)
        assert await meet_nobody(pair, lease.ticket, 4, 5, 6) == [str(lease.ticket.first.port), "6"]
        assert [peer.was_connected for peer in pair.peers] == [True, False]
        await pair.load(lease)


async def test_peers_that_were_lost_make_room_before_those_that_are_connected() -> None:
    async with scripted_pair(limited(PATIENT, peers_max=2)) as pair:
        lease = pair.offer([3], reader_count=2)
        there = altered(lease.ticket, host="localhost")
        await pair.load(lease)
        pair.clock.advance(PATIENT.handshake_timeout_s)
        await pair.load(there)
        peers = host_of(pair.reader).peers
        gone = peers.get(Address("producer", Rank(0, 0, 0), there.address))
        peers._disconnect(gone, "break", "scripted")
        assert await meet_nobody(pair, lease.ticket, 1) == [str(lease.ticket.first.port), "1"]


async def test_a_connection_that_was_just_given_to_a_load_stays() -> None:
    async with scripted_pair(limited(PATIENT, peers_max=1)) as pair:
        lease = pair.offer([3])
        await pair.load(lease)
        full = r"tcp://127\.0\.0\.1:1: no room for it: 1 peer in use \(limits.peers_max\)"
        await pair.fails(Overloaded, altered(lease.ticket, port=1), match=full)
        pair.clock.advance(PATIENT.handshake_timeout_s)
        assert await meet_nobody(pair, lease.ticket, 1) == ["1"]
        await pair.until_agents(0)


# --- forget_peer


async def test_forgetting_a_peer_makes_the_next_load_start_from_scratch(pair: ScriptedPair) -> None:
    """Its failures are forgotten, too."""
    lease = pair.offer([3])
    pair.answer(refusal("no"))
    await pair.fails(PeerRefused, lease)
    assert await pair.reader.forget_peer("producer")
    await pair.load(lease)
    assert await pair.reader.forget_peer("somebody else")
    assert await pair.reader.forget_peer("producer", "tcp://127.0.0.1:1")
    assert pair.agents == 1
    assert await pair.reader.forget_peer("producer", lease.ticket.address)
    assert (pair.agents, pair.peers) == (0, ())
    await pair.load(pair.offer([4], "again"))
    assert pair.questions == 3


@in_virtual_time
async def test_a_load_from_a_peer_that_is_forgotten_goes_on() -> None:
    async with scripted_pair(replace(PATIENT, handshake_timeout_s=0.1), virtual=True) as pair:
        load = await pair.hold(pair.offer([3]))
        assert not await pair.reader.forget_peer("producer")
        assert (pair.agents, pair.peers) == (1, ()), "nothing is torn down under a read"
        assert (await pair.let_go(load)).blocks == 1
        await pair.until_agents(0)


async def test_a_load_that_waits_for_a_lease_connects_again_to_a_peer_that_was_forgotten(pair: ScriptedPair) -> None:
    ticket = pair.offer([3]).ticket.without_leases(request_id="late", block_ids=[4], num_tokens=4, ttl_s=30.0)
    load = pair.start(ticket)
    await until(lambda: any(isinstance(question, messages.LeaseRequest) for question in pair.scripted.channel.asked))
    assert await pair.reader.forget_peer("producer")
    late = pair.offer([4], "late")
    assert (await load).blocks == 1
    assert await late is LeaseOutcome.READ


async def test_forgetting_a_peer_in_a_handshake_lets_that_end_first(pair: ScriptedPair) -> None:
    load = pair.start(pair.offer([3]))
    await until(lambda: pair.questions)
    forgetting = asyncio.create_task(pair.reader.forget_peer("producer"))
    (result,) = await asyncio.gather(load, return_exceptions=True)
    assert isinstance(result, LoadReport | TransferFailed)  # as it had begun to read, or not
    assert await forgetting
    assert (pair.agents, pair.peers) == (0, ())


async def test_two_addresses_of_one_rank_share_its_agent(pair: ScriptedPair) -> None:
    there = altered(pair.offer([4], "other").ticket, host="localhost")
    await pair.load(there, [0])
    await pair.load(pair.offer([3]), [1])
    assert (pair.questions, pair.agents, len(pair.peers)) == (2, 1, 2)
    assert await pair.reader.forget_peer("producer", there.address)
    assert (pair.agents, len(pair.peers)) == (1, 1)
    await pair.load(pair.offer([5], "again"))
    assert await pair.reader.forget_peer("producer")
    assert pair.agents == 0


# --- prewarm


async def test_prewarming_says_for_each_engine_what_came_of_it(pair: ScriptedPair) -> None:
    """A load from a prewarmed engine asks no peer."""
    lease = pair.offer([3])
    engines = {
        PeerAddress(engine_id="ghost", address="tcp://127.0.0.1:1"): "onnect",
        lease.ticket: "None",
        PeerAddress(engine_id="producer", address=lease.ticket.address): "None",
        PeerAddress(engine_id="ghost", address=lease.ticket.address): "unknown engine: expected 'ghost'",
    }
    results = await pair.reader.prewarm([*engines, lease.ticket.to_params(), {"not": "a ticket"}])
    expected = [*engines.values(), "None", "ticket: "]
    for result, error in zip(results, expected, strict=True):
        assert error in str(result)
    questions = pair.questions
    await pair.load(lease)
    assert (pair.questions, pair.agents) == (questions, 1)


async def test_prewarming_finds_the_ranks_that_loads_will_need(pair: ScriptedPair) -> None:
    """Rank 1 of 2 reads nothing from rank 0 of 2, which has the given address, but from its neighbour."""
    async with contextlib.AsyncExitStack() as stack:
        port = free_ports(2)
        for engine_id, tp_rank, listen in (("two", 0, port), ("two", 1, port), ("reader", 1, 0)):
            config = Config(engine_id=engine_id, tp_rank=tp_rank, tp_size=2, listen=f"tcp://127.0.0.1:{listen}")
            runtime = await stack.enter_async_context(Runtime(config, world=engine_world(pair)))
            await runtime.register_kv_caches(*small_cache())
        (result,) = await runtime.prewarm([PeerAddress(engine_id="two", address=f"tcp://127.0.0.1:{port}")])
        assert result is None
        assert [peer.rank for peer in runtime.statistics().peers] == [Rank(0, 0, 0), Rank(0, 0, 1)]
