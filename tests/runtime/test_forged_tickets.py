"""Tickets are not signed: whatever a forged one says, it costs itself, and honest loads are as they were (I6, I7, I8).

Time is virtual, and every question of the consumer is seen: whom it asks, and how many it waits for at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from tests_support import altered, limited, turns, until

from kvflow import Config, LeaseOutcome, LoadReport, LoadRequest, PeerAddress, Runtime, Ticket
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
from kvflow.runtime.peers.reach import VISITS_AT_ONCE_MAX
from kvflow.testing import InprocCluster, Pair, assert_quiet, inproc_pair, run_virtual
from kvflow.testing.pair import CacheSize, TestEngine
from kvflow.testing.side_channel import Frames, InprocSideChannel, settle
from kvflow.transport.base import PeerGone

LAYERS = 16
STAGES = CacheSize(layers=LAYERS)
CONFIG = Config(engine_id="any", drain_timeout_s=1.0, load_deadline_s=2.0, handshake_timeout_s=2.0)


@dataclass
class Field:
    """A cluster whose consumer is watched. Addresses that no engine has are silent, or refuse if the host says so."""

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
            listener.arrive(frames, lambda reply: settle(answered, reply))
        elif "refusing" in address:
            settle(answered, None)

    def _ended(self, _: asyncio.Future[Frames]) -> None:
        self.open -= 1

    def forget(self) -> None:
        self.asked.clear()
        self.most_open = self.open

    @property
    def strangers(self) -> set[str]:
        """Who was asked and is no engine of the cluster."""
        return set(self.asked) - set(self.cluster._exchange.listeners)

    @contextlib.asynccontextmanager
    async def consumer(self, config: Config = CONFIG, layers: int = LAYERS) -> AsyncIterator[TestEngine]:
        world = self.cluster.world
        watched = replace(
            world(), side_channel=lambda mine: InprocSideChannel(self.cluster._exchange, mine, send=self.send)
        )
        self.cluster.world = lambda **_: watched  # type: ignore[method-assign]
        try:
            async with self.cluster.engine("consumer", config=config, size=CacheSize(layers=layers)) as engine:
                self.cluster.world = world  # type: ignore[method-assign]
                yield engine
                assert_quiet(engine.runtime.statistics())
        finally:
            self.cluster.world = world  # type: ignore[method-assign]

    @contextlib.asynccontextmanager
    async def pair(self, config: Config = CONFIG, **producer: int) -> AsyncIterator[Pair[Any]]:
        """A producer, a consumer whose engine has one rank, and every layer on both unless the producer is a stage."""
        layers = LAYERS if not producer else 1
        of_producer = replace(config, engine_id="any", **producer)
        async with (
            self.cluster.engine("producer", config=of_producer, size=CacheSize(layers=layers)) as one,
            self.consumer(config) as other,
        ):
            yield Pair(producer=one, consumer=other)


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def pass_time(seconds: float) -> None:
    """Let virtual time go on."""
    passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(seconds, passed.set_result, None)
    await passed


async def ended(work: Awaitable[object]) -> object:
    """What becomes of a load: its report, or its error."""
    try:
        return await work
    except KVFlowError as error:
        return error


def forged(ticket: Ticket, tp: int = 1, pp: int = 1, *, named: int = 1, host: str = "silent", **changes: Any) -> Ticket:
    """A ticket that says that its engine has so many ranks, and names some of them, each on a host of its own."""
    heads = 2  # what the consumer holds
    ranks = tuple(
        msgspec.structs.replace(ticket.first, pp_rank=at // tp, tp_rank=at % tp, host=f"{host}-{at}", port=5600)
        for at in range(named)
    )
    ticket = altered(
        ticket, engine_id="forged", tp_size=tp, pp_size=pp, kv_heads=max(heads // tp, 1), model_kv_heads=heads
    )
    return msgspec.structs.replace(ticket, ranks=ranks, fixed_ports=True, **changes)


async def load(runtime: Runtime, ticket: Ticket) -> object:
    return await runtime.load_blocks(LoadRequest("mine", ticket=ticket.to_params(), block_ids=[0]))


async def release(runtime: Runtime, ticket: Ticket) -> object:
    return await runtime.release_blocks(ticket.to_params())


async def prewarm(runtime: Runtime, ticket: Ticket) -> object:
    (result,) = await runtime.prewarm([ticket.to_params()])
    if result.error is not None:
        raise result.error
    return result.ranks


async def keep(runtime: Runtime, ticket: Ticket) -> object:
    with runtime.keep_leases(ticket.to_params()):
        (task,) = [one for one in asyncio.all_tasks() if one.get_name().startswith("kvflow-keep")]
        await until(task.done)
    return None


Verb = Callable[[Runtime, Ticket], Awaitable[object]]
VERBS: list[Verb] = [load, release, prewarm]


def in_the_field(body: Callable[[Field], Coroutine[Any, Any, None]]) -> None:
    """Run a test's body in virtual time."""
    run_virtual(body(Field()))


# --- one ticket


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("named", [1, 1024])
@pytest.mark.parametrize(
    ("tp", "pp", "why"),
    [
        (1024, 4, r"tp_size 1024, pp_size 4: .* 4096 ranks of it, at most 256 \(load_ranks_max\)"),
        (1024, 1024, "pp_size 1024, but the model has 16 layers"),
        (1, 1024, "pp_size 1024, but the model has 16 layers"),
        (1, 17, "pp_size 17, but the model has 16 layers"),
        (32, 16, r"512 ranks of it, at most 256"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_before_anybody_is_asked(
    verb: Verb, tp: int, pp: int, why: str, named: int
) -> None:
    async def body(field: Field) -> None:
        async with field.pair() as pair:
            lease = pair.offer([3])
            ticket = forged(lease.ticket, tp, pp, named=min(named, tp * pp))
            with pytest.raises(RequestError, match=rf"ticket of request 'req': .*{why}"):
                await verb(pair.consumer.runtime, ticket)
            assert field.asked == []
            assert pair.consumer.runtime.statistics().peers == ()
            lease.revoke()

    in_the_field(body)


def test_leases_of_an_engine_that_cannot_be_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    async def body(field: Field) -> None:
        async with field.pair() as pair:
            lease = pair.offer([3])
            bad = forged(lease.ticket, 1024, 4, named=1024)
            with caplog.at_level(logging.INFO, "kvflow"), pair.consumer.runtime.keep_leases(bad):
                await pass_time(0.1)
            assert field.asked == []
            lease.revoke()

    in_the_field(body)
    assert "request req from forged: its leases could not be kept: " in caplog.text


@pytest.mark.parametrize("named", [1, 256])
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_silent_engine_of_many_ranks_costs_one_question_and_ends_in_time(verb: Verb, named: int) -> None:
    async def body(field: Field) -> None:
        async with field.pair() as pair:
            lease = pair.offer([3])
            runtime, began_s = pair.consumer.runtime, now_s()
            ending = await ended(verb(runtime, forged(lease.ticket, 16, 16, named=named)))
            assert ending is False or isinstance(ending, DeadlineExceeded | PeerUnreachable)
            assert now_s() - began_s <= 2.05
            assert field.asked == ["tcp://silent-0:5600"]
            lease.revoke()

    in_the_field(body)


def test_keeping_leases_of_a_silent_engine_asks_one_rank() -> None:
    async def body(field: Field) -> None:
        async with field.pair() as pair:
            lease = pair.offer([3])
            with pair.consumer.runtime.keep_leases(forged(lease.ticket, 16, 16, named=256)):
                await pass_time(CONFIG.load_deadline_s)
            assert field.asked == ["tcp://silent-0:5600"]
            lease.revoke()

    in_the_field(body)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_rank_that_says_another_cut_than_the_ticket_ends_it(
    verb: Verb,
) -> None:
    """The ticket names an honest rank first, and then whom it wants to be asked."""

    async def body(field: Field) -> None:
        async with field.pair() as pair:
            lease = pair.offer([3])
            bad = forged(lease.ticket, 2, 1, named=2)
            honest = msgspec.structs.replace(lease.ticket.first, lease_id="")
            bad = msgspec.structs.replace(bad, engine_id="producer", request_id="other", ranks=(honest, bad.ranks[1]))
            ending = await ended(verb(pair.consumer.runtime, bad))
            assert ending is False or (isinstance(ending, PeerIncompatible) and "the ticket says 2" in str(ending))
            assert set(field.asked) == {lease.ticket.address}
            lease.revoke()

    in_the_field(body)


@pytest.mark.parametrize("host", ["silent", "refusing"])
@pytest.mark.parametrize("verb", [load, release], ids=lambda verb: verb.__name__)
def test_even_an_engine_that_is_cut_like_that_leads_to_a_few_addresses_only(verb: Verb, host: str) -> None:
    """One rank is real, and holds the lease; the ticket names hosts for all others."""

    async def body(field: Field) -> None:
        async with field.pair(pp_size=LAYERS) as pair:
            lease = pair.offer([3])
            others = forged(lease.ticket, 1, LAYERS, named=LAYERS, host=host).ranks[1:]
            ticket = msgspec.structs.replace(lease.ticket, ranks=(lease.ticket.first, *others))
            began_s = now_s()
            ending = await ended(verb(pair.consumer.runtime, ticket))
            assert ending is False or isinstance(ending, DeadlineExceeded | PeerUnreachable)
            assert now_s() - began_s <= 2.05
            assert 0 < len(field.strangers) <= VISITS_AT_ONCE_MAX
            assert field.most_open <= VISITS_AT_ONCE_MAX
            lease.revoke()

    in_the_field(body)


def test_prewarming_such_an_engine_asks_one_after_the_other() -> None:
    async def body(field: Field) -> None:
        async with field.pair(pp_size=LAYERS) as pair:
            lease = pair.offer([3])
            others = forged(lease.ticket, 1, LAYERS, named=LAYERS).ranks[1:]
            ticket = msgspec.structs.replace(lease.ticket, ranks=(lease.ticket.first, *others))
            results = await pair.consumer.runtime.prewarm(
                [ticket, PeerAddress(engine_id="producer", address=lease.ticket.address)]
            )
            assert all(isinstance(result.error, PeerError) for result in results)
            assert [len(result.ranks) for result in results] == [1, 1]
            assert len(field.strangers) <= 2
            lease.revoke()

    in_the_field(body)


def test_a_ticket_whose_ports_cannot_be_is_refused_before_anybody_is_asked() -> None:
    async def body(field: Field) -> None:
        async with field.pair() as pair:
            lease = pair.offer([3])
            for changes in ({"port": 65_530}, {"port": 5600, "fixed_ports": False}):
                ticket = altered(forged(lease.ticket, 16, 1), **changes)
                with pytest.raises(RequestError, match=r"^ticket: "):
                    await load(pair.consumer.runtime, ticket)
            assert field.asked == []
            lease.revoke()

    in_the_field(body)


# --- many tickets


@contextlib.asynccontextmanager
async def flood(runtime: Runtime, ticket: Ticket, count: int) -> AsyncIterator[list[object]]:
    """So many forged tickets at once, each of another engine on another host. What became of them is filled in."""
    endings: list[object] = []

    async def one(at: int) -> None:
        bad = forged(ticket, engine_id=f"forged-{at}", host=f"silent-{at}")
        endings.append(await ended(runtime.load_blocks(LoadRequest(f"bad-{at}", ticket=bad, block_ids=[1]))))

    async with asyncio.TaskGroup() as group:
        for at in range(count):
            group.create_task(one(at), name=f"forged {at}")
        await turns(10)
        yield endings


def test_a_flood_of_silent_engines_is_asked_a_few_at_a_time_and_ends_in_time() -> None:
    async def body(field: Field) -> None:
        async with field.pair() as pair:
            lease = pair.offer([3])
            began_s = now_s()
            async with flood(pair.consumer.runtime, lease.ticket, 500) as endings:
                pass
            assert now_s() - began_s <= 2.05
            assert field.most_open <= CONFIG.limits.first_contacts_max
            assert len(endings) == 500
            assert {type(ending) for ending in endings} <= {DeadlineExceeded, PeerUnreachable, Overloaded}
            lease.revoke()

    in_the_field(body)


def test_honest_loads_do_not_wait_behind_a_flood() -> None:
    async def body(field: Field) -> None:
        async with field.cluster.engine("known", config=CONFIG, size=STAGES) as known, field.pair() as pair:
            runtime = pair.consumer.runtime
            old = Pair(producer=known, consumer=pair.consumer)
            await runtime.load_blocks(old.wanted(old.offer([1], "first"), [2]))
            lease, another = pair.offer([3]), old.offer([1], "second")
            async with flood(runtime, lease.ticket, 300):
                began_s = now_s()
                await runtime.load_blocks(old.wanted(another, [2]))
                assert now_s() == began_s, "a peer that is connected waits for nobody"
                await runtime.load_blocks(pair.wanted(lease, [0]))
                assert now_s() - began_s <= CONFIG.handshake_timeout_s / 10 + 0.01
            assert await lease is LeaseOutcome.READ

    in_the_field(body)


def test_a_peer_that_was_lost_comes_back_in_a_flood() -> None:
    """It was met before: its handshake needs no turn."""

    async def body(field: Field) -> None:
        async with field.pair() as pair:
            runtime = pair.consumer.runtime
            await runtime.load_blocks(pair.wanted(pair.offer([3], "first"), [2]))
            pair.consumer.transport.faults.fail_next.append(PeerGone("scripted"))
            lease = pair.offer([3])
            assert isinstance(await ended(runtime.load_blocks(pair.wanted(lease, [2]))), TransferFailed)
            (peer,) = runtime.statistics().peers
            assert (peer.state, peer.met) == (PeerState.BROKEN, True)
            async with flood(runtime, lease.ticket, 300):
                began_s = now_s()
                await runtime.load_blocks(pair.wanted(lease, [0]))
                assert now_s() == began_s
            assert await lease is LeaseOutcome.READ

    in_the_field(body)


def test_a_flood_fills_the_table_with_nobody_that_matters() -> None:
    config = limited(CONFIG, peers_max=32, first_contacts_max=4)

    async def body(field: Field) -> None:
        async with field.cluster.engine("known", config=config, size=STAGES) as known, field.pair(config) as pair:
            runtime = pair.consumer.runtime
            old = Pair(producer=known, consumer=pair.consumer)
            await runtime.load_blocks(old.wanted(old.offer([1], "first"), [2]))
            lease = pair.offer([3])
            async with flood(runtime, lease.ticket, 200) as endings:
                await pass_time(CONFIG.handshake_timeout_s / 10 + 0.01)
                await runtime.load_blocks(pair.wanted(lease, [0]))
                field.forget()
                another = old.offer([1], "second")
                await runtime.load_blocks(old.wanted(another, [2]))
                assert known.runtime.address not in field.asked, "it has stayed connected"
            assert len(runtime.statistics().peers) <= 32
            outcomes = Counter(type(ending) for ending in endings)
            assert set(outcomes) <= {DeadlineExceeded, PeerUnreachable, Overloaded}
            assert await lease is LeaseOutcome.READ

    in_the_field(body)


def test_a_silent_newcomer_makes_room_for_the_next_one_and_its_load_is_told() -> None:
    config = limited(CONFIG, peers_max=1)

    async def body(field: Field) -> None:
        async with field.pair(config) as pair:
            runtime, lease = pair.consumer.runtime, pair.offer([3])
            silent = asyncio.create_task(ended(load(runtime, forged(lease.ticket))))
            await until(lambda: field.asked)
            with pytest.raises(Overloaded, match=r"all 1 peers are in use \(peers_max\)"):
                await runtime.load_blocks(pair.wanted(lease, [1]))  # it might answer any moment
            await pass_time(config.handshake_timeout_s / 10 + 0.01)
            await runtime.load_blocks(pair.wanted(lease, [1]))
            error = await silent
            assert isinstance(error, Overloaded)
            where = r"request 'mine': engine 'forged' \(dp 0 pp 0 tp 0\) at tcp://silent-0:5600"
            assert re.fullmatch(where + r": it made room for another of 1 peers \(peers_max\)", str(error))
            assert (error.request_id, error.peer) == ("mine", "tcp://silent-0:5600")
            assert field.open == 0, "its question has ended, too"

    in_the_field(body)


def test_closing_ends_loads_that_wait_for_their_turn() -> None:
    async def body(field: Field) -> None:
        async with field.pair(ONE_AT_A_TIME) as pair:
            runtime, lease = pair.consumer.runtime, pair.offer([3])
            tickets = [forged(lease.ticket, engine_id=f"forged-{at}", host=f"silent-{at}") for at in range(5)]
            loads = [asyncio.create_task(ended(load(runtime, ticket))) for ticket in tickets]
            await until(lambda: len(runtime.statistics().peers) == 5)
            lease.revoke()
            await runtime.aclose()
            assert {type(await one) for one in loads} <= {RuntimeClosed, PeerUnreachable}
            assert field.open == 0

    in_the_field(body)


def test_a_table_full_of_peers_in_use_is_not_the_callers_fault() -> None:
    config = limited(CONFIG, peers_max=1)

    async def body(field: Field) -> None:
        async with field.cluster.engine("known", config=config, size=STAGES) as known, field.pair(config) as pair:
            runtime, transport = pair.consumer.runtime, pair.consumer.transport
            old = Pair(producer=known, consumer=pair.consumer)
            transport.faults.hold = True
            busy = asyncio.create_task(runtime.load_blocks(old.wanted(old.offer([1], "first"), [2])))
            await until(lambda: transport.held)
            lease = pair.offer([3])
            with pytest.raises(Overloaded, match=r"^request 'req': engine 'producer' .* \(peers_max\)") as caught:
                await runtime.load_blocks(pair.wanted(lease, [0]))
            error = caught.value
            assert (error.request_id, error.peer) == ("req", lease.ticket.address)
            assert str(error).count("producer") == 1
            assert (error.blame, error.retryable, error.quarantine) == (Blame.ENGINE, True, None)
            assert not await runtime.release_blocks(lease.ticket)
            (warmed,) = await runtime.prewarm([lease.ticket])
            assert isinstance(warmed.error, Overloaded)
            transport.faults.hold = False
            transport.perform()
            assert isinstance(await busy, LoadReport)
            lease.revoke()

    in_the_field(body)


# --- turns


ONE_AT_A_TIME = limited(replace(CONFIG, handshake_timeout_s=1.0, load_deadline_s=30.0), first_contacts_max=1)


def test_who_waits_for_a_turn_and_gives_up_asks_nobody() -> None:
    async def body(field: Field) -> None:
        async with field.pair(ONE_AT_A_TIME) as pair:
            runtime, lease = pair.consumer.runtime, pair.offer([3])
            tickets = [forged(lease.ticket, engine_id=f"forged-{at}", host=f"silent-{at}") for at in range(2)]
            first = asyncio.create_task(load(runtime, tickets[0]))
            await until(lambda: field.asked)
            second = asyncio.create_task(load(runtime, tickets[1]))
            await until(lambda: len(runtime.statistics().peers) == 2)
            second.cancel()
            await asyncio.wait([second])
            assert [peer.state for peer in runtime.statistics().peers] == [PeerState.CONNECTING, PeerState.UNKNOWN]
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            assert field.open == 1, "what was begun goes on while it is in nobody's way"
            before_s = now_s()
            await runtime.load_blocks(pair.wanted(lease, [0]))
            assert now_s() == before_s, "and makes way when it is"
            assert field.strangers == {"tcp://silent-0-0:5600"}
            assert await lease is LeaseOutcome.READ

    in_the_field(body)


def test_who_gets_no_turn_in_time_is_told_so_and_the_peer_is_not_blamed() -> None:
    async def body(field: Field) -> None:
        async with field.pair(ONE_AT_A_TIME) as pair, asyncio.TaskGroup() as group:
            runtime, lease = pair.consumer.runtime, pair.offer([3])

            def attack(at: int) -> None:
                bad = forged(lease.ticket, engine_id=f"forged-{at}", host=f"silent-{at}")
                group.create_task(ended(load(runtime, bad)))

            attack(0)
            await until(lambda: field.asked)
            unlucky = group.create_task(ended(runtime.load_blocks(pair.wanted(lease, [1]))))
            for at in range(1, 25):  # one after the other comes later, and goes first
                attack(at)
                await pass_time(0.05)
            error = await unlucky
            assert isinstance(error, Overloaded)
            assert re.match(
                r"request 'req': engine 'producer' .*no turn .* 1\.0 s: 1 other .*first_contacts_max", str(error)
            )
            (peer,) = [peer for peer in runtime.statistics().peers if peer.engine_id == "producer"]
            assert (peer.state, peer.failures, peer.retry_after_s) == (PeerState.UNKNOWN, 0, 0)
            await runtime.load_blocks(pair.wanted(lease, [1]))
            assert await lease is LeaseOutcome.READ

    in_the_field(body)


# --- over the real side channel


@pytest.mark.parametrize("verb", [load, release, keep, prewarm], ids=lambda verb: verb.__name__)
async def test_one_connection_for_a_forged_ticket(verb: Verb) -> None:
    """A listening socket that never says a word counts who comes."""
    config = replace(CONFIG, handshake_timeout_s=0.3, load_deadline_s=0.3)
    connections: list[socket.socket] = []
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(1024)
        hole.setblocking(False)
        async with inproc_pair(config=config, layers=LAYERS) as pair:
            lease = pair.offer([3])
            ranks = [
                msgspec.structs.replace(rank, host="127.0.0.1", port=hole.getsockname()[1])
                for rank in forged(lease.ticket, 16, 16, named=256).ranks
            ]
            ticket = msgspec.structs.replace(forged(lease.ticket, 16, 16), ranks=tuple(ranks))
            with contextlib.suppress(DeadlineExceeded, PeerUnreachable):
                await verb(pair.consumer.runtime, ticket)
            with contextlib.suppress(BlockingIOError):
                while True:
                    connections.append(hole.accept()[0])
            for connection in connections:
                connection.close()
            assert len(connections) == 1
            lease.revoke()
