"""Tickets that name some ranks of an engine: how readers find the leases of the others, and what goes wrong there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import pytest
import torch
from pairs import host_of, known, load_request
from tests_support import PATIENT, WAIT_S, altered, leases_ended, limited, turns, until

from kvflow import CacheLayout, Config, Lease, LeaseOutcome, LoadReport, Runtime, ServeRequest, Ticket, merge_tickets
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.errors import ConfigError, LeaseExpired, PeerIncompatible, PeerRefused, ProtocolError, RequestError
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.producer.lease import OpenLease
from kvflow.runtime.world import World
from kvflow.testing import ManualClock
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.support.hand_overs import free_ports

HEADS, BLOCKS, BLOCK_SIZE, HEAD_SIZE = 4, 8, 4, 8
DECODE = replace(PATIENT, engine_id="decode", listen="tcp://127.0.0.1:0")
READ = [LeaseOutcome.READ] * 2
Failure = TypeVar("Failure", bound=Exception)


@dataclass(frozen=True, slots=True)
class Engines:
    """A prefill engine of two ranks and a decode engine of one."""

    ranks: tuple[Runtime, Runtime]
    caches: tuple[torch.Tensor, torch.Tensor]
    reader: Runtime
    cache: torch.Tensor

    def offer(self, rank: int, block_ids: Sequence[int] = (1, 2), num_tokens: int = 8, name: str = "req") -> Lease:
        return self.ranks[rank].serve_blocks(ServeRequest(name, block_ids=block_ids, num_tokens=num_tokens))

    def offers(self, **options: str) -> tuple[list[Lease], Ticket]:
        """Of both ranks, and their tickets merged."""
        leases = [self.offer(rank, **options) for rank in (0, 1)]
        return leases, merge_tickets([lease.ticket for lease in leases])

    def answered(self, rank: int) -> int:
        return known(self.ranks[rank].statistics().listener).answered

    async def until_asked_again(self) -> None:
        """The second rank was met, asked, and asked again by a question that waits."""
        await until(lambda: self.answered(1) >= 2 and host_of(self.ranks[1]).serving.lease_answers.waiting == 1)

    async def load(self, ticket: Ticket) -> LoadReport:
        return await self.reader.load_blocks(load_request(ticket.to_params(), [5, 6]))

    async def fails(self, error: type[Failure] | tuple[type[Failure], ...], ticket: Ticket, match: str) -> None:
        with pytest.raises(error, match=match):
            await self.load(ticket)

    async def assert_loaded(self, *leases: Lease) -> None:
        """Each rank's heads are where they belong, and the leases have ended."""
        assert [await lease for lease in leases] == READ
        for rank, cache in enumerate(self.caches):
            assert torch.equal(self.cache[:, 5:7, :, 2 * rank : 2 * rank + 2], cache[:, 1:3])


async def open_rank(
    stack: AsyncExitStack,
    network: InprocNetwork,
    config: Config,
    heads: int,
    fill: float,
    clock: Callable[[], Clock] = SystemClock,
) -> tuple[Runtime, torch.Tensor]:
    cache = torch.full((2, BLOCKS, BLOCK_SIZE, heads, HEAD_SIZE), fill)
    caches = {"layers.0": cache}
    runtime = Runtime(config, world=World(transport=lambda _, name: InprocTransport(name, network), clock=clock))
    await stack.enter_async_context(runtime)
    await runtime.register_kv_caches(caches, CacheLayout.infer(caches, order="NHD", block_size=BLOCK_SIZE))
    return runtime, cache


@contextlib.asynccontextmanager
async def engines(
    *,
    fixed_ports: bool = True,
    lease_wait_s: float = WAIT_S,
    lease_ttl_s: float = PATIENT.lease_ttl_s,
    clock: Callable[[], Clock] = SystemClock,
) -> AsyncIterator[Engines]:
    network = InprocNetwork()
    base = limited(replace(DECODE, lease_ttl_s=lease_ttl_s), lease_wait_s=lease_wait_s)
    async with AsyncExitStack() as stack:
        while True:
            port = free_ports(2) if fixed_ports else 0
            prefill = replace(base, engine_id="prefill", tp_size=2, listen=f"tcp://127.0.0.1:{port}")
            try:
                first, ours = await open_rank(stack, network, prefill, HEADS // 2, 1.0, clock)
                second, theirs = await open_rank(stack, network, replace(prefill, tp_rank=1), HEADS // 2, 2.0, clock)
            except ConfigError as error:
                if "cannot bind" in str(error):
                    continue  # somebody else on this machine was faster
                raise
            break
        reader, cache = await open_rank(stack, network, base, HEADS, 0.0, clock)
        yield Engines((first, second), (ours, theirs), reader, cache)
        for runtime in (first, second):
            known(runtime._supervisor.incarnation).serving.close()
            await leases_ended(runtime)


@pytest.fixture
async def both() -> AsyncIterator[Engines]:
    async with engines() as both:
        yield both


async def test_a_rank_that_serves_late_is_waited_for_and_the_lease_of_the_other_is_renewed() -> None:
    clock = ManualClock()
    async with engines(clock=lambda: clock, lease_ttl_s=30.0) as both:
        first = both.offer(0)
        load = asyncio.create_task(both.load(first.ticket))
        await both.until_asked_again()
        for _ in range(20):
            clock.advance(5.0)
            await turns(5)
        assert (first.done, load.done()) == (False, False)
        second = both.offer(1)
        await load
        clock.advance(1.0)
        await both.assert_loaded(first, second)


async def test_a_release_tells_the_ranks_that_the_ticket_does_not_name_too(both: Engines) -> None:
    leases, _ = both.offers()
    assert await both.reader.release_blocks(leases[1].ticket)
    assert [await lease for lease in leases] == READ
    assert both.reader.statistics().transport.open_peers == 0


async def test_every_rank_of_a_reader_has_to_release() -> None:
    """The producer derives a rank's share of the lease from the rank's holding."""
    network = InprocNetwork()
    async with AsyncExitStack() as stack:
        producer, _ = await open_rank(stack, network, replace(DECODE, engine_id="prefill"), HEADS, 1.0)
        readers = [
            (await open_rank(stack, network, replace(DECODE, tp_size=2, tp_rank=rank), HEADS // 2, 0.0))[0]
            for rank in (0, 1)
        ]
        lease = producer.serve_blocks(ServeRequest("req", block_ids=[1, 2], num_tokens=8))
        for reader in (readers[0], readers[0], readers[1]):
            assert lease.state == "offered"
            assert await reader.release_blocks(lease.ticket)
        assert await lease is LeaseOutcome.READ


async def test_a_rank_that_never_serves_costs_a_bound() -> None:
    """A release that reaches the others only says so."""
    async with engines(lease_wait_s=0.02) as both:
        lease = both.offer(0)
        missing = r"\(dp 0 pp 0 tp 1\) at .* no lease for it: none within 0\.02"
        await both.fails(LeaseExpired, lease.ticket, missing)
        assert not await both.reader.release_blocks(lease.ticket)
        assert await lease is LeaseOutcome.READ


@pytest.mark.parametrize(("block_ids", "num_tokens"), [((1, 2), 8), ((1, 3), 8), ((1, 2), 7)])
async def test_a_rank_whose_lease_has_ended_or_is_for_something_else_is_not_waited_for(
    both: Engines, block_ids: tuple[int, ...], num_tokens: int
) -> None:
    lease, other = both.offer(0), both.offer(1, block_ids, num_tokens)
    if (block_ids, num_tokens) == ((1, 2), 8):
        other.revoke()
    await both.fails(LeaseExpired, lease.ticket, "no lease for it: it has ended")


async def test_ports_of_the_systems_choice_need_a_merged_ticket() -> None:
    async with engines(fixed_ports=False) as both:
        leases, merged = both.offers()
        await both.fails(RequestError, leases[0].ticket, r"listen port 0.*merge the ranks' tickets")
        await both.load(merged)
        await both.assert_loaded(*leases)
        assert (both.answered(0), both.answered(1)) == (1, 1), "the handshakes: a merged ticket asks for no lease"


async def test_another_rank_at_the_address_is_named(both: Engines) -> None:
    leases, merged = both.offers()
    wrong = altered(merged, port=leases[1].ticket.first.port)
    await both.fails(PeerRefused, wrong, "expected dp 0 pp 0 tp 0, this is dp 0 pp 0 tp 1")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_heads", 4, r"num_kv_heads: ours 4 on each of 1 rank, theirs 4 on each of 2 ranks|kv_heads: the ticket"),
        ("block_size", 8, "block_size: the ticket says 8, the rank 4"),
        ("model_kv_heads", 8, "num_kv_heads"),
    ],
)
async def test_a_ticket_that_is_wrong_about_its_engine(both: Engines, field: str, value: int, message: str) -> None:
    _, merged = both.offers()
    await both.fails((PeerIncompatible, PeerRefused), altered(merged, **{field: value}), message)
    assert (both.cache == 0).all()


async def test_a_lease_lost_on_one_rank_fails_the_load(both: Engines) -> None:
    leases, merged = both.offers()
    leases[1].revoke()
    await both.fails(LeaseExpired, merged, "the lease has ended")
    assert not leases[0].done


async def test_a_rank_that_answers_with_a_lease_of_no_id_fails_the_load(
    both: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not pass for a rank that holds nothing of the prompt: its heads would be missing."""
    lease_of = OpenLease.rank_lease

    def nameless(self: OpenLease) -> RankLease:
        return msgspec.structs.replace(lease_of(self), lease_id="")

    monkeypatch.setattr(OpenLease, "rank_lease", nameless)
    leases, _ = both.offers()
    await both.fails(ProtocolError, leases[0].ticket, "lease_id")


def asking(ticket: Ticket, request_id: str = "req") -> Ticket:
    """A ticket for the blocks that are always offered, that names its ranks and no lease."""
    return ticket.without_leases(request_id=request_id, block_ids=(1, 2), num_tokens=8, ttl_s=1.0)


@pytest.mark.parametrize("fixed_ports", [True, False])
async def test_a_ticket_without_leases_asks_every_rank(fixed_ports: bool) -> None:
    async with engines(fixed_ports=fixed_ports) as both:
        leases, merged = both.offers()
        await both.load(asking(merged))
        await both.assert_loaded(*leases)


async def test_a_ticket_without_leases_can_be_there_before_them(both: Engines) -> None:
    introductions = [both.offer(rank, (), 0).ticket for rank in (0, 1)]  # leases of nothing end at once
    load = asyncio.create_task(both.load(asking(merge_tickets(introductions), "later")))
    await both.until_asked_again()
    leases, _ = both.offers(name="later")
    await load
    await both.assert_loaded(*leases)


async def test_a_ticket_without_leases_is_good_for_its_request_and_its_incarnation_only() -> None:
    """The ranks' incarnations tell that the engine has restarted, before anybody is asked for a lease."""
    async with engines(lease_wait_s=0.02) as both:
        _, merged = both.offers()
        await both.fails(LeaseExpired, asking(merged, "another"), "no lease for it: none within")
        earlier = altered(asking(merged), incarnation="earlier")
        await both.fails(LeaseExpired, earlier, "has restarted or slept: the ticket is of incarnation earlier")
