"""Caches that are registered again (vLLM 0.33, after a sleep), over real NIXL: readers of both kinds connect again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from stock_engines import TOKENS, StockProducer, stock_producer
from tests_support import any_ticket

from kvflow.errors import LeaseExpired, RequestError
from kvflow.runtime.peers.peer import hold_connections
from kvflow.stock.params import Registrations, make_stock_params, read_stock_params
from tests.stock.test_border import PARAMS
from tests.stock.test_reading import PEERS, Reader, reader, stale

GENERATION = "remote_registration_generation"
PATIENT = replace(PEERS, terms=replace(PEERS.terms, router_s=20.0))
"""Everything that arrives during the test may be older than a new registration, unless its number shows otherwise."""


def remote_agents(ours: Reader) -> int:
    agents: Any = ours.runtime._supervisor.incarnation.peers._agents  # type: ignore[union-attr]
    return len(agents._open)


async def loads(ours: Reader, producer: StockProducer, name: str, **changes: Any) -> None:
    """Offer block 3 of `producer`, load it into block 7, and wait until the producer has freed it."""
    for tensor in ours.cache.values():
        tensor[7] = 0.0
    await ours.load({**producer.offer(name, [3], TOKENS), **changes}, [7])
    ours.assert_holds([7], [3])
    await producer.until(lambda: all(name in freed for freed in producer.freed))


async def test_a_number_that_has_risen_is_a_new_connection() -> None:
    async with stock_producer(generation=1) as producer, reader(PATIENT) as ours:
        await loads(ours, producer, "first")
        for again in range(3):
            producer.register_again(0)
            await loads(ours, producer, f"after {again}")
            await loads(ours, producer, f"and {again}")
        assert len(producer.asked) == 1 + 2 * 3, "twice for each rise: what has changed, and the new connection"
        assert remote_agents(ours) == 1


async def test_a_number_that_has_risen_for_another_rank_costs_one_question() -> None:
    async with stock_producer(tp_size=2, generation=2) as producer, reader(PATIENT) as ours:
        await loads(ours, producer, "first")
        before = connections(ours)
        producer.register_again(1)
        await loads(ours, producer, "after")
        await loads(ours, producer, "and")
        after = connections(ours)
        assert [one is other for one, other in zip(before, after, strict=True)] == [True, False]
        assert producer.asked[2:] == [(0, 0), (0, 1), (0, 1)]


def connections(ours: Reader) -> list[Any]:
    """The connections to the ranks of the producer, in order of the ranks."""
    peers = ours.runtime._supervisor.incarnation.peers.by_address.values()  # type: ignore[union-attr]
    return [peer.connection for peer in sorted(peers, key=lambda peer: peer.rank)]


async def test_an_old_ticket_is_refused_and_leaves_the_newer_connection_alone() -> None:
    async with stock_producer(generation=1) as producer, reader(PATIENT) as ours:
        await loads(ours, producer, "first")
        old = [producer.offer(f"old {number}", [4], TOKENS) for number in range(3)]
        producer.register_again(0)
        new = [producer.offer(f"new {number}", [3], TOKENS) for number in range(3)]
        outcomes = await asyncio.gather(
            *(ours.load(params, [at]) for at, params in enumerate(new)), return_exceptions=True
        )
        assert not [one for one in outcomes if isinstance(one, BaseException)]
        ours.assert_holds([0, 1, 2], [3, 3, 3])
        connected = connections(ours)
        for params in old:
            with pytest.raises(LeaseExpired, match="may be from before"):
                await ours.load(params, [8])
        await loads(ours, producer, "last")
        assert connections(ours) == connected


async def test_the_agent_is_replaced_once_no_load_uses_it_and_such_a_load_is_not_fresh() -> None:
    """A load that was under way when the number rose may have read other memory."""
    async with stock_producer(generation=1) as producer, reader(PATIENT) as ours:
        await loads(ours, producer, "first")
        params = producer.offer("old", [4], TOKENS)
        with ours.runtime.keep_leases(params):
            await producer.until(lambda: connections(ours)[0] is not None)
            (connection,) = connections(ours)
            under_way: Any = SimpleNamespace(connection=connection)
            producer.register_again(0)
            with hold_connections([under_way]):
                newer = asyncio.create_task(ours.load(producer.offer("new", [3], TOKENS), [7]))
                await producer.until(lambda: connection.replaced and len(producer.asked) == 3)
                assert not newer.done()
            await newer
            ours.assert_holds([7], [3])
            with pytest.raises(LeaseExpired):
                await ours.load(params, [8])


async def test_whoever_counts_nothing_is_found_out_after_a_while() -> None:
    """vLLM before 0.33, or a router that drops the number."""
    peers = replace(PEERS, terms=replace(PEERS.terms, router_s=1e-6))
    async with stock_producer() as producer, reader(peers) as ours:
        await loads(ours, producer, "first")
        for number in range(5):
            await loads(ours, producer, f"more {number}")
        assert producer.asked == [(0, 0)]
        producer.register_again(0)
        stale(ours)
        with pytest.raises(LeaseExpired, match="may be from before"):
            await ours.load(producer.offer("noticed", [3], TOKENS), [7])
        await loads(ours, producer, "after")


@pytest.mark.parametrize("fallen", [0, None, 1])
async def test_a_number_that_falls_or_is_missing_asks_nothing(fallen: int | None) -> None:
    async with stock_producer(generation=3) as producer, reader() as ours:
        await loads(ours, producer, "first")
        await loads(ours, producer, "fallen", **{GENERATION: fallen})
        await loads(ours, producer, "again")
        assert producer.asked == [(0, 0)]


async def test_after_a_restart_numbers_begin_anew() -> None:
    """Under the same engine id. A number of the life before does not make later parameters look old."""
    peers = replace(PEERS, terms=replace(PEERS.terms, router_s=1e-6))
    async with stock_producer(generation=5) as producer, reader(peers) as ours:
        await loads(ours, producer, "first")
        producer.restart()
        producer.generation = 1
        stale(ours)
        with pytest.raises(LeaseExpired):
            await ours.load(producer.offer("noticed", [3], TOKENS), [7])
        await loads(ours, producer, "after")
        producer.register_again(0)
        await loads(ours, producer, "risen")


async def test_a_number_that_is_a_lie_costs_a_question() -> None:
    """And no connection: the rank says itself that nothing has changed."""
    async with stock_producer(generation=1) as producer, reader(PATIENT) as ours:
        await loads(ours, producer, "first")
        before = connections(ours)
        await loads(ours, producer, "lie", **{GENERATION: (1 << 63) - 1})
        await loads(ours, producer, "truth")
        assert connections(ours) == before
        assert len(producer.asked) == 2


@pytest.mark.parametrize("wrong", [True, 1.5, float("nan"), -1, 1 << 63, 1 << 80, "1", [1]])
def test_what_is_no_number_is_refused_by_name(wrong: object) -> None:
    params = {**PARAMS, GENERATION: wrong}
    with pytest.raises(RequestError, match=GENERATION):
        read_stock_params(params, arrived=None, lease_s=30.0, block_ids_max=100)


@pytest.mark.parametrize(("given", "read"), [({}, 0), ({GENERATION: None}, 0), ({GENERATION: 7}, 7)])
def test_a_number_may_be_missing(given: dict[str, Any], read: int) -> None:
    params = {**PARAMS, **given}
    assert read_stock_params(params, arrived=None, lease_s=30.0, block_ids_max=100).generation == read


def test_registrations_are_counted_by_what_tickets_name() -> None:
    """Of any rank: a later ticket of an earlier registration keeps its number."""
    registrations, first = Registrations(), any_ticket()
    ranks = [msgspec.structs.replace(first.first, tp_rank=rank) for rank in (0, 1)]
    one, other = (msgspec.structs.replace(rank, incarnation="again") for rank in ranks)
    lives = [(ranks[0], ranks[1]), (ranks[0], other), (one, other)]
    tickets = [msgspec.structs.replace(first, tp_size=2, ranks=life) for life in lives]
    assert [registrations.number_of(ticket) for ticket in (*tickets, *tickets)] == [1, 2, 3, 1, 2, 3]
    assert make_stock_params(first, "0.33.0", generation=3)[GENERATION] == 3
    assert GENERATION not in make_stock_params(first, "0.32.0", generation=3)
