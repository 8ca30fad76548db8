"""Tickets that name some ranks of an engine: how readers find the leases of the others, and what goes wrong there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch
from tests_support import PATIENT, WAIT_S, altered, leases_ended, limited, turns

from kvflow import CacheLayout, Config, Lease, LeaseOutcome, LoadRequest, Runtime, ServeRequest, Ticket, merge_tickets
from kvflow.core.protocol import messages
from kvflow.errors import ConfigError, LeaseExpired, PeerIncompatible, PeerRefused, RequestError
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.producer.serving import Serving
from kvflow.runtime.world import World
from kvflow.testing import ManualClock
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.hand_overs import free_ports

HEADS, BLOCKS, BLOCK_SIZE, HEAD_SIZE = 4, 8, 4, 8


@dataclass(frozen=True, slots=True)
class Engines:
    """A prefill engine of two ranks and a decode engine of one."""

    ranks: tuple[Runtime, Runtime]
    caches: tuple[torch.Tensor, torch.Tensor]
    reader: Runtime
    cache: torch.Tensor

    def offer(self, rank: int, block_ids: tuple[int, ...] = (1, 2), num_tokens: int = 8) -> Lease:
        return self.ranks[rank].serve_blocks(ServeRequest("req", block_ids=block_ids, num_tokens=num_tokens))

    @property
    def opened(self) -> int:
        """Peers that the reader's transport knows."""
        return self.reader.statistics().transport.open_peers

    async def load(self, ticket: Ticket) -> None:
        request = LoadRequest("req", ticket=ticket.to_params(), block_ids=[5, 6])
        await self.reader.load_blocks(request)

    def assert_loaded(self) -> None:
        """Each rank's heads are where they belong."""
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
    base = limited(
        replace(PATIENT, engine_id="decode", listen="tcp://127.0.0.1:0", lease_ttl_s=lease_ttl_s),
        lease_wait_s=lease_wait_s,
    )
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
            await leases_ended(runtime)


async def test_one_ranks_ticket_leads_to_the_others() -> None:
    async with engines() as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        await both.load(leases[1].ticket)
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2
        both.assert_loaded()


async def test_a_rank_that_serves_late_is_waited_for() -> None:
    async with engines() as both:
        first = both.offer(0)
        load = asyncio.create_task(both.load(first.ticket))
        while (seen := both.ranks[1].statistics().listener) is None or seen.answered < 3:  # asked and asked again
            await asyncio.sleep(0)
        assert not load.done()
        second = both.offer(1)
        await load
        assert [await first, await second] == [LeaseOutcome.READ] * 2
        both.assert_loaded()


async def test_the_lease_of_one_rank_is_renewed_while_another_is_waited_for() -> None:
    clock = ManualClock()
    async with engines(clock=lambda: clock, lease_ttl_s=30.0) as both:
        first = both.offer(0)
        load = asyncio.create_task(both.load(first.ticket))
        while (seen := both.ranks[1].statistics().listener) is None or seen.answered < 3:
            await asyncio.sleep(0)
        for _ in range(20):
            clock.advance(5.0)
            await turns(5)
        assert not first.done
        second = both.offer(1)
        await load
        clock.advance(1.0)
        assert [await first, await second] == [LeaseOutcome.READ] * 2
        both.assert_loaded()


async def test_a_release_tells_the_ranks_that_the_ticket_does_not_name_too() -> None:
    async with engines() as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        assert await both.reader.release_blocks(leases[1].ticket)
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2
        assert both.opened == 0


async def test_a_release_that_reaches_some_ranks_only_says_so() -> None:
    async with engines(lease_wait_s=0.02) as both:
        lease = both.offer(0)
        assert not await both.reader.release_blocks(lease.ticket)
        assert await lease is LeaseOutcome.READ


async def test_every_rank_of_a_reader_has_to_release() -> None:
    """What share of the lease a rank answers for is worked out by the producer, from what the rank holds."""
    base = replace(PATIENT, engine_id="decode", listen="tcp://127.0.0.1:0")
    network = InprocNetwork()
    async with AsyncExitStack() as stack:
        producer, _ = await open_rank(stack, network, replace(base, engine_id="prefill"), HEADS, 1.0)
        readers = [
            (await open_rank(stack, network, replace(base, tp_size=2, tp_rank=rank), HEADS // 2, 0.0))[0]
            for rank in (0, 1)
        ]
        lease = producer.serve_blocks(ServeRequest("req", block_ids=[1, 2], num_tokens=8))
        assert await readers[0].release_blocks(lease.ticket)
        assert await readers[0].release_blocks(lease.ticket)
        assert not lease.done
        assert lease.state == "offered"
        assert await readers[1].release_blocks(lease.ticket)
        assert await lease is LeaseOutcome.READ


async def test_a_rank_that_never_serves_costs_a_bound() -> None:
    async with engines(lease_wait_s=0.02) as both:
        lease = both.offer(0)
        with pytest.raises(LeaseExpired, match=r"\(dp 0 pp 0 tp 1\) at .* no lease for it: none within 0\.02"):
            await both.load(lease.ticket)
        lease.revoke()


async def test_a_rank_whose_lease_has_ended_is_not_waited_for() -> None:
    async with engines(lease_wait_s=60.0) as both:
        lease = both.offer(0)
        both.offer(1).revoke()
        with pytest.raises(LeaseExpired, match="no lease for it: it has ended"):
            await both.load(lease.ticket)
        lease.revoke()


@pytest.mark.parametrize(("block_ids", "num_tokens"), [((1, 3), 8), ((1, 2), 7)])
async def test_a_rank_that_serves_something_else_under_the_same_id(block_ids: tuple[int, ...], num_tokens: int) -> None:
    async with engines() as both:
        leases = [both.offer(0), both.offer(1, block_ids, num_tokens)]
        with pytest.raises(LeaseExpired, match="no lease for it: it has ended"):
            await both.load(leases[0].ticket)
        for lease in leases:
            lease.revoke()


async def test_ports_of_the_systems_choice_need_a_merged_ticket() -> None:
    async with engines(fixed_ports=False) as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        with pytest.raises(RequestError, match=r"listen port 0.*merge the ranks' tickets"):
            await both.load(leases[0].ticket)
        await both.load(merge_tickets([lease.ticket for lease in leases]))
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2
        both.assert_loaded()


async def test_a_merged_ticket_asks_nobody() -> None:
    async with engines() as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        await both.load(merge_tickets([lease.ticket for lease in leases]))
        for rank in both.ranks:
            seen = rank.statistics().listener
            assert seen is not None
            assert seen.answered == 1  # the handshake


async def test_another_rank_at_the_address_is_named() -> None:
    async with engines() as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        merged = merge_tickets([lease.ticket for lease in leases])
        wrong = altered(merged, port=leases[1].ticket.first.port)
        with pytest.raises(PeerRefused, match="expected dp 0 pp 0 tp 0, this is dp 0 pp 0 tp 1"):
            await both.load(wrong)
        for lease in leases:
            lease.revoke()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_heads", 4, r"num_kv_heads: ours 4 on each of 1 ranks, theirs 4 on each of 2 ranks|kv_heads: the ticket"),
        ("block_size", 8, "block_size: the ticket says 8, the rank 4"),
        ("model_kv_heads", 8, "num_kv_heads"),
    ],
)
async def test_a_ticket_that_is_wrong_about_its_engine(field: str, value: int, message: str) -> None:
    async with engines() as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        with pytest.raises((PeerIncompatible, PeerRefused), match=message):
            await both.load(altered(merge_tickets([lease.ticket for lease in leases]), **{field: value}))
        assert (both.cache == 0).all()
        for lease in leases:
            lease.revoke()


async def test_a_lease_lost_on_one_rank_fails_the_load() -> None:
    async with engines() as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        ticket = merge_tickets([lease.ticket for lease in leases])
        leases[1].revoke()
        with pytest.raises(LeaseExpired, match="the offer is over"):
            await both.load(ticket)
        assert not leases[0].done
        leases[0].revoke()


async def test_a_rank_that_answers_with_a_lease_of_no_id_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not pass for a rank of which nothing is needed: its heads would be missing."""
    find = Serving.find

    def nameless(self: Serving, question: messages.LeaseRequest) -> messages.LeaseFound | messages.NoLease:
        return msgspec.structs.replace(find(self, question), lease_id="")

    monkeypatch.setattr(Serving, "find", nameless)
    async with engines() as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        with pytest.raises(LeaseExpired):
            await both.load(leases[0].ticket)
        for lease in leases:
            lease.revoke()


def asking(ticket: Ticket, request_id: str = "req") -> Ticket:
    """A ticket for the same blocks that names its ranks and no lease."""
    return ticket.without_leases(
        request_id=request_id, block_ids=ticket.block_ids, num_tokens=ticket.num_tokens, ttl_s=1.0
    )


@pytest.mark.parametrize("fixed_ports", [True, False])
async def test_a_ticket_without_leases_asks_every_rank(fixed_ports: bool) -> None:
    async with engines(fixed_ports=fixed_ports) as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        await both.load(asking(merge_tickets([lease.ticket for lease in leases])))
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2
        both.assert_loaded()


async def test_a_ticket_without_leases_can_be_there_before_them() -> None:
    async with engines() as both:
        introductions = [both.offer(rank, (), 0).ticket for rank in (0, 1)]  # leases of nothing end at once
        ticket = merge_tickets(introductions).without_leases(
            request_id="later", block_ids=(1, 2), num_tokens=8, ttl_s=1.0
        )
        load = asyncio.create_task(both.load(ticket))
        while (seen := both.ranks[1].statistics().listener) is None or seen.answered < 3:  # asked and asked again
            await asyncio.sleep(0)
        leases = [rank.serve_blocks(ServeRequest("later", block_ids=(1, 2), num_tokens=8)) for rank in both.ranks]
        await load
        assert [await lease for lease in leases] == [LeaseOutcome.READ] * 2
        both.assert_loaded()


async def test_a_ticket_without_leases_is_good_for_its_request_only() -> None:
    async with engines(lease_wait_s=0.02) as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        ticket = asking(merge_tickets([lease.ticket for lease in leases]), "another")
        with pytest.raises(LeaseExpired, match="no lease for it: none within"):
            await both.load(ticket)
        for lease in leases:
            lease.revoke()


async def test_a_ticket_without_leases_of_an_earlier_incarnation_is_not_waited_with() -> None:
    """The ranks' incarnations tell that the engine has restarted, before anybody is asked for a lease."""
    async with engines(lease_wait_s=60.0) as both:
        leases = [both.offer(rank) for rank in (0, 1)]
        ticket = altered(asking(merge_tickets([lease.ticket for lease in leases])), incarnation="earlier")
        with pytest.raises(LeaseExpired, match="has restarted: the ticket is of incarnation earlier"):
            await both.load(ticket)
        for lease in leases:
            lease.revoke()
