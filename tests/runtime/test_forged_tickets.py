"""Tickets are not signed: a forged ticket fails its own load, and honest loads are not affected (I6, I7, I8).

Time is virtual, and the test sees every question of the consumer: its peer, and how many wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from pairs import EnginePair, load_request, open_pair
from tests_support import altered, in_virtual_time, limited, turns, until

from kvflow import Config, Lease, LeaseOutcome, LoadReport, PeerAddress, Runtime, Ticket
from kvflow.core.policy.states import PeerState
from kvflow.errors import (
    Blame,
    DeadlineExceeded,
    KVFlowError,
    Overloaded,
    PeerError,
    PeerIncompatible,
    PeerUnreachable,
    RequestError,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.runtime.peers.ticket_resolver import VISITS_AT_ONCE_MAX
from kvflow.testing import InprocCluster, assert_quiet
from kvflow.testing.pair import CacheSize, TestEngine
from kvflow.testing.side_channel import Frames, InprocSideChannel, set_reply
from kvflow.transport.base import PeerGone

LAYERS = 16
CONFIG = Config(engine_id="any", drain_timeout_s=1.0, load_deadline_s=2.0, handshake_timeout_s=2.0)
ONE_AT_A_TIME = limited(replace(CONFIG, handshake_timeout_s=1.0, load_deadline_s=30.0), first_contacts_max=1)
ONE_PEER = limited(CONFIG, peers_max=1)
PATIENCE_S = CONFIG.handshake_timeout_s / 10 + 0.01
"""After so long a silent newcomer has made way."""
TOO_LATE = (DeadlineExceeded, PeerUnreachable)


@dataclass
class Field:
    """A producer with an offer, a consumer that is watched, and another producer that it has loaded from.

    Addresses that no engine has are silent, or refuse if the host says so.
    """

    cluster: InprocCluster = field(default_factory=InprocCluster)
    asked: list[str] = field(default_factory=list)
    open: int = 0
    most_open: int = 0

    def send(self, address: str, frames: Frames, answered: asyncio.Future[Frames]) -> None:
        self.asked.append(address)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        answered.add_done_callback(self._ended)
        listener = self.cluster._exchange.listeners.get(address)
        if listener is not None:
            listener.arrive(frames, lambda reply: set_reply(answered, reply))
        elif "refusing" in address:
            set_reply(answered, None)

    def _ended(self, _: asyncio.Future[Frames]) -> None:
        self.open -= 1

    @property
    def absent_addresses(self) -> set[str]:
        """Addresses that were asked and belong to no engine of the cluster."""
        return set(self.asked) - set(self.cluster._exchange.listeners)

    def join(self, producer: TestEngine, consumer: TestEngine) -> None:
        self.pair = EnginePair(producer=producer, consumer=consumer)
        self.runtime = consumer.runtime
        self.lease = self.pair.offer([3])

    async def load_of(self, known: TestEngine) -> Callable[[], Awaitable[LoadReport]]:
        """Load from another producer, now, and by a second lease when the test says so."""
        old = EnginePair(producer=known, consumer=self.pair.consumer)
        await old.load(old.offer([1], "first"), [2])
        second = old.offer([1], "second")
        return lambda: old.load(second, [2])

    async def honest(self) -> float:
        """Load by the offer; how long that took."""
        began_s = now_s()
        await self.pair.load(self.lease)
        took_s = now_s() - began_s
        assert await self.lease is LeaseOutcome.READ
        return took_s

    def bad(self, at: int) -> Ticket:
        """A forged ticket, each of another engine on another host."""
        return forged(self.lease.ticket, engine_id=f"forged-{at}", host=f"silent-{at}")

    @contextlib.asynccontextmanager
    async def flood(self, count: int) -> AsyncIterator[list[object]]:
        """Load `count` forged tickets at once. Yield the list that collects their outcomes."""
        endings: list[object] = []

        async def one(at: int) -> None:
            endings.append(await ended(self.runtime.load_blocks(load_request(self.bad(at), [1]))))

        async with asyncio.TaskGroup() as group:
            for at in range(count):
                group.create_task(one(at), name=f"forged {at}")
            await turns(10)
            yield endings
        assert {type(ending) for ending in endings} <= {*TOO_LATE, Overloaded}
        assert len(endings) == count


@contextlib.asynccontextmanager
async def opened(config: Config = CONFIG, **producer: int) -> AsyncIterator[Field]:
    """The consumer's engine has one rank; every layer is on both sides unless the producer is a stage."""
    made = Field()
    layers = CacheSize(layers=1 if producer else LAYERS)
    world = made.cluster.world
    async with made.cluster.engine("producer", config=replace(config, **producer), size=layers) as one:
        watched = replace(
            world(), side_channel=lambda own: InprocSideChannel(made.cluster._exchange, own, send=made.send)
        )
        made.cluster.world = lambda **_: watched  # type: ignore[method-assign]
        async with made.cluster.engine("consumer", config=config, size=CacheSize(layers=LAYERS)) as other:
            made.cluster.world = world  # type: ignore[method-assign]
            made.join(one, other)
            yield made
            assert_quiet(other.runtime.statistics())
        made.pair.revoke_all()


@contextlib.asynccontextmanager
async def opened_with_another(config: Config = CONFIG) -> AsyncIterator[tuple[Field, TestEngine]]:
    async with (
        opened(config) as made,
        made.cluster.engine("known", config=config, size=CacheSize(layers=LAYERS)) as known,
    ):
        yield made, known


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def pass_time(seconds: float) -> None:
    """Let virtual time go on."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


async def ended(work: Awaitable[object]) -> object:
    """Await a load. Return its report or its error."""
    try:
        return await work
    except KVFlowError as error:
        return error


def forged(ticket: Ticket, tp: int = 1, pp: int = 1, *, named: int = 1, host: str = "silent", **changes: Any) -> Ticket:
    """Return a ticket with tp x pp ranks. It names `named` ranks, each on a host of its own."""
    heads = 2  # what the consumer holds
    ranks = tuple(
        msgspec.structs.replace(ticket.first, pp_rank=at // tp, tp_rank=at % tp, host=f"{host}-{at}", port=5600)
        for at in range(named)
    )
    cut = {"tp_size": tp, "pp_size": pp, "kv_heads": max(heads // tp, 1), "model_kv_heads": heads}
    ticket = altered(ticket, engine_id="forged", **cut)
    return msgspec.structs.replace(ticket, ranks=ranks, fixed_ports=True, **changes)


async def load(runtime: Runtime, ticket: Ticket) -> object:
    return await runtime.load_blocks(load_request(ticket.to_params()))


async def release(runtime: Runtime, ticket: Ticket) -> object:
    return await runtime.release_blocks(ticket.to_params())


async def prewarm(runtime: Runtime, ticket: Ticket) -> object:
    (result,) = await runtime.prewarm([ticket.to_params()])
    if result is not None:
        raise result
    return result


async def keep(runtime: Runtime, ticket: Ticket) -> object:
    with runtime.keep_leases(ticket.to_params()):
        (task,) = [one for one in asyncio.all_tasks() if one.get_name().startswith("kvflow-keep")]
        await asyncio.wait([task])
    return False


Verb = Callable[[Runtime, Ticket], Awaitable[object]]
each_verb = pytest.mark.parametrize("verb", [load, release, prewarm, keep], ids=lambda verb: verb.__name__)


# --- one ticket


@pytest.mark.parametrize("verb", [load, release, prewarm], ids=lambda verb: verb.__name__)
@pytest.mark.parametrize(
    ("tp", "pp", "named", "why"),
    [
        (1024, 4, 1024, r"tp_size 1024, pp_size 4: .* 4096 ranks of it, at most 256 \(limits.load_ranks_max\)"),
        (1024, 1024, 1, "pp_size 1024, but the model has 16 layers"),
        (1, 17, 17, "pp_size 17, but the model has 16 layers"),
        (32, 16, 1, r"512 ranks of it, at most 256"),
    ],
)
@in_virtual_time
async def test_an_engine_that_cannot_be_is_refused_before_anybody_is_asked(
    verb: Verb, tp: int, pp: int, named: int, why: str
) -> None:
    async with opened() as made:
        with pytest.raises(RequestError, match=rf"ticket of request 'req': .*{why}"):
            await verb(made.runtime, forged(made.lease.ticket, tp, pp, named=named))
        assert made.asked == []
        assert made.runtime.statistics().peers == ()


@in_virtual_time
async def test_a_ticket_whose_ports_cannot_be_is_refused_before_anybody_is_asked() -> None:
    async with opened() as made:
        for changes in ({"port": 65_530}, {"port": 5600, "fixed_ports": False}):
            with pytest.raises(RequestError, match=r"^ticket: "):
                await load(made.runtime, altered(forged(made.lease.ticket, 16, 1), **changes))
        assert made.asked == []


@pytest.mark.parametrize("named", [1, 256])
@each_verb
@in_virtual_time
async def test_a_silent_engine_of_many_ranks_costs_one_question_and_ends_in_time(verb: Verb, named: int) -> None:
    async with opened() as made:
        began_s = now_s()
        ending = await ended(verb(made.runtime, forged(made.lease.ticket, 16, 16, named=named)))
        assert ending is False or isinstance(ending, TOO_LATE)
        assert now_s() - began_s <= 2.05
        assert made.asked == ["tcp://silent-0:5600"]


@in_virtual_time
async def test_keeping_leases_of_an_engine_that_cannot_be_asks_nobody_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened() as made:
        with caplog.at_level(logging.INFO, "kvflow"):
            await keep(made.runtime, forged(made.lease.ticket, 1024, 4, named=256))
        assert made.asked == []
    assert "request req from forged: its leases could not be kept: " in caplog.text


@each_verb
@in_virtual_time
async def test_a_rank_that_says_another_cut_than_the_ticket_ends_it(verb: Verb) -> None:
    """The ticket names an honest rank first, and then the ranks that the forger wants to be asked."""
    async with opened() as made:
        bad = forged(made.lease.ticket, 2, 1, named=2)
        honest = msgspec.structs.replace(made.lease.ticket.first, lease_id="")
        bad = msgspec.structs.replace(bad, engine_id="producer", request_id="other", ranks=(honest, bad.ranks[1]))
        ending = await ended(verb(made.runtime, bad))
        assert ending is False or (isinstance(ending, PeerIncompatible) and "the ticket says 2" in str(ending))
        assert set(made.asked) == {made.lease.ticket.address}


def among_others(lease: Lease, host: str = "silent") -> Ticket:
    """One rank is real, and holds the lease; the ticket names hosts for all others."""
    others = forged(lease.ticket, 1, LAYERS, named=LAYERS, host=host).ranks[1:]
    return msgspec.structs.replace(lease.ticket, ranks=(lease.ticket.first, *others))


@pytest.mark.parametrize("host", ["silent", "refusing"])
@pytest.mark.parametrize("verb", [load, release], ids=lambda verb: verb.__name__)
@in_virtual_time
async def test_even_an_engine_that_is_cut_like_that_leads_to_a_few_addresses_only(verb: Verb, host: str) -> None:
    async with opened(pp_size=LAYERS) as made:
        began_s = now_s()
        ending = await ended(verb(made.runtime, among_others(made.lease, host)))
        assert ending is False or isinstance(ending, TOO_LATE)
        assert now_s() - began_s <= 2.05
        assert 0 < len(made.absent_addresses) <= VISITS_AT_ONCE_MAX
        assert made.most_open <= VISITS_AT_ONCE_MAX


@in_virtual_time
async def test_prewarming_such_an_engine_asks_one_after_the_other() -> None:
    async with opened(pp_size=LAYERS) as made:
        address = PeerAddress(engine_id="producer", address=made.lease.ticket.address)
        results = await made.runtime.prewarm([among_others(made.lease), address])
        assert all(isinstance(result, PeerError) for result in results)
        assert [peer.was_connected for peer in made.runtime.statistics().peers].count(True) == 1
        assert len(made.absent_addresses) <= 2


# --- many tickets


@in_virtual_time
async def test_a_flood_is_asked_a_few_at_a_time_and_ends_in_time_and_honest_loads_do_not_wait_behind_it() -> None:
    async with opened_with_another() as (made, known):
        second = await made.load_of(known)
        began_s = now_s()
        async with made.flood(500):
            await second()
            assert now_s() == began_s, "a peer that is connected waits for nobody"
            assert await made.honest() <= PATIENCE_S
        assert now_s() - began_s <= 2.05
        assert made.most_open <= CONFIG.limits.first_contacts_max


@in_virtual_time
async def test_a_peer_that_was_lost_comes_back_in_a_flood() -> None:
    """It was met before: its handshake needs no turn."""
    async with opened() as made:
        await made.pair.load(made.pair.offer([3], "first"), [2])
        made.pair.transport.faults.fail_next.append(PeerGone("scripted"))
        await made.pair.fails(TransferFailed, made.lease, [2])
        (peer,) = made.runtime.statistics().peers
        assert (peer.state, peer.was_connected) == (PeerState.BROKEN, True)
        async with made.flood(300):
            assert await made.honest() == 0


@in_virtual_time
async def test_a_flood_fills_the_table_with_nobody_that_matters() -> None:
    async with opened_with_another(limited(CONFIG, peers_max=32, first_contacts_max=4)) as (made, known):
        second = await made.load_of(known)
        async with made.flood(200):
            await pass_time(PATIENCE_S)
            await made.honest()
            made.asked.clear()
            await second()
            assert known.runtime.address not in made.asked, "it has stayed connected"
        assert len(made.runtime.statistics().peers) <= 32


@in_virtual_time
async def test_a_silent_newcomer_makes_room_for_the_next_one_and_its_load_is_told() -> None:
    async with opened(ONE_PEER) as made:
        silent = asyncio.create_task(ended(load(made.runtime, forged(made.lease.ticket))))
        await until(lambda: made.asked)
        # It might answer any moment.
        await made.pair.fails(Overloaded, made.lease, match=r"1 peer in use \(limits.peers_max\)")
        await pass_time(PATIENCE_S)
        await made.honest()
        error = await silent
        assert isinstance(error, Overloaded)
        where = "request 'req': engine 'forged' (dp 0 pp 0 tp 0) at tcp://silent-0:5600"
        assert str(error) == f"{where}: evicted for a new peer, 1 peer known (limits.peers_max)"
        assert (error.request_id, error.peer) == ("req", "tcp://silent-0:5600")
        assert made.open == 0, "its question has ended, too"


@in_virtual_time
async def test_closing_ends_loads_that_wait_for_their_turn() -> None:
    async with opened(ONE_AT_A_TIME) as made:
        loads = [asyncio.create_task(ended(load(made.runtime, made.bad(at)))) for at in range(5)]
        await until(lambda: len(made.runtime.statistics().peers) == 5)
        await made.runtime.aclose()
        assert {type(await one) for one in loads} <= {RuntimeClosed, PeerUnreachable}
        assert made.open == 0


@in_virtual_time
async def test_a_table_full_of_peers_in_use_is_not_the_callers_fault() -> None:
    async with opened_with_another(ONE_PEER) as (made, known):
        old = EnginePair(producer=known, consumer=made.pair.consumer)
        busy = await old.hold(old.offer([1], "first"), [2])
        error = await made.pair.fails(
            Overloaded, made.lease, match=r"^request 'req': engine 'producer' .* \(limits.peers_max\)"
        )
        assert (error.request_id, error.peer) == ("req", made.lease.ticket.address)
        assert str(error).count("producer") == 1
        assert (error.blame, error.retryable, error.quarantine) == (Blame.ENGINE, True, None)
        assert not await made.runtime.release_blocks(made.lease.ticket)
        (warmed,) = await made.runtime.prewarm([made.lease.ticket])
        assert isinstance(warmed, Overloaded)
        assert isinstance(await old.let_go(busy), LoadReport)


# --- turns


@in_virtual_time
async def test_who_waits_for_a_turn_and_gives_up_asks_nobody() -> None:
    async with opened(ONE_AT_A_TIME) as made:
        first = asyncio.create_task(load(made.runtime, made.bad(0)))
        await until(lambda: made.asked)
        second = asyncio.create_task(load(made.runtime, made.bad(1)))
        await until(lambda: len(made.runtime.statistics().peers) == 2)
        for task in (second, first):
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        assert [peer.state for peer in made.runtime.statistics().peers] == [PeerState.CONNECTING, PeerState.UNKNOWN]
        assert made.open == 1, "what was begun goes on while it is in nobody's way"
        assert await made.honest() == 0, "and makes way when it is"
        assert made.absent_addresses == {"tcp://silent-0-0:5600"}


@in_virtual_time
async def test_who_gets_no_turn_in_time_is_told_so_and_the_peer_is_not_blamed() -> None:
    async with opened(ONE_AT_A_TIME) as made, asyncio.TaskGroup() as group:
        group.create_task(ended(load(made.runtime, made.bad(0))))
        await until(lambda: made.asked)
        unlucky = made.pair.start(made.lease)
        for at in range(1, 25):  # one after the other comes later, and goes first
            group.create_task(ended(load(made.runtime, made.bad(at))))
            await pass_time(0.05)
        with pytest.raises(
            Overloaded,
            match=r"^request 'req': engine 'producer' .*no turn .* 1\.0 s: asked at once: 1 other .*first_contacts_max",
        ):
            await unlucky
        (peer,) = [peer for peer in made.runtime.statistics().peers if peer.engine_id == "producer"]
        assert (peer.state, peer.failures, peer.retry_after_s) == (PeerState.UNKNOWN, 0, 0)
        await made.honest()


# --- over the real side channel


@each_verb
async def test_one_connection_for_a_forged_ticket(verb: Verb) -> None:
    """A listening socket that never answers counts its connections."""
    for within_s in (0.3, 3.0, 30.0):  # a slow host makes none in so short a time
        if (connections := await _connections_of(verb, within_s)) != 0:
            break
    assert connections == 1


async def _connections_of(verb: Verb, within_s: float) -> int:
    config = replace(CONFIG, handshake_timeout_s=within_s, load_deadline_s=within_s)
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as hole:
        hole.setblocking(False)
        async with open_pair(config, layers=LAYERS) as pair:
            bad, port = forged(pair.offer([3]).ticket, 16, 16, named=256), hole.getsockname()[1]
            ranks = [msgspec.structs.replace(rank, host="127.0.0.1", port=port) for rank in bad.ranks]
            with contextlib.suppress(*TOO_LATE):
                await verb(pair.reader, msgspec.structs.replace(bad, ranks=tuple(ranks)))
            with contextlib.suppress(BlockingIOError):
                while True:
                    connections.append(hole.accept()[0])
            for connection in connections:
                connection.close()
    return len(connections)
