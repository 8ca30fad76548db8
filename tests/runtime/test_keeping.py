"""The task that keeps a request's leases, with every other part in the hands of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from pairs import virtual_pair
from tests_support import PATIENT, in_virtual_time, limited

from kvflow import Config, Ticket
from kvflow.core.policy.states import PeerState
from kvflow.runtime.clock import SystemClock
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.peers.peer import Resolver, Source
from kvflow.runtime.rank import RankContext

SOURCE = cast(
    Source,
    SimpleNamespace(
        peer=SimpleNamespace(leases_kept=0),
        connection=SimpleNamespace(lease_notifier=SimpleNamespace(heartbeat_s=None)),
    ),
)


class LateResolver:
    """One of several ranks is found while the search for them is being cancelled."""

    def __init__(self) -> None:
        self.searching = asyncio.Event()
        self.found = 0

    def read_ticket(self, ticket: Ticket) -> Ticket:
        return ticket

    async def resolve(self, ticket: Ticket, found: Callable[[Source], None]) -> list[Source]:
        self.searching.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            found(SOURCE)
            self.found += 1


class AnyTicket:
    request_id = "req"
    engine_id = "producer"
    block_tables = ((1,),)
    ttl_s = 30.0
    awaited = offers_nothing = False


async def test_a_lease_that_is_found_too_late_is_not_kept() -> None:
    """Nobody would ever forget it."""
    resolver = LateResolver()
    tasks: list[asyncio.Task[None]] = []

    def spawn(body: Any, *, name: str) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(body, name=name))
        return tasks[-1]

    context = SimpleNamespace(config=Config(engine_id="any"), clock=SystemClock(), spawn=spawn, local=None)
    unused: Any = None
    leases = RemoteLeases(cast(RankContext, context), unused, cast(Resolver, resolver), unused, unused, unused)
    with leases.renewing(cast(Ticket, AnyTicket())):
        await resolver.searching.wait()
    await asyncio.wait(tasks)
    assert tasks[0].cancelled()
    assert (resolver.found, leases._renewed) == (1, {})
    leases.close()


@in_virtual_time
async def test_a_peer_whose_lease_is_kept_is_not_idle() -> None:
    """Its connection stays, however seldom a long lease has to be renewed."""
    config = limited(replace(PATIENT, lease_ttl_s=1000.0, lease_lifetime_s=10_000.0), peer_idle_s=100.0)
    async with virtual_pair(config) as pair:
        lease = pair.offer([3, 4], "long")
        consumer = pair.consumer.runtime
        with consumer.keep_leases(lease.ticket):
            await asyncio.sleep(900)
            (peer,) = consumer.statistics().peers
            assert peer.state is PeerState.READY
        await asyncio.sleep(1000)
        assert consumer.statistics().peers == (), "nobody needs it any more"
        lease.revoke()
        await lease
