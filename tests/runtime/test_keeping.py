"""The task that keeps a request's leases, with every other part in the hands of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from kvflow import Config, Ticket
from kvflow.runtime.consumer.keeping import Keeping
from kvflow.runtime.consumer.renewals import Renewals
from kvflow.runtime.peers.reach import Source, Sources


class LateSources:
    """One of several ranks is found while the search for them is being cancelled."""

    def __init__(self) -> None:
        self.searching = asyncio.Event()

    def read(self, ticket: Ticket) -> Ticket:
        return ticket

    async def check(self, ticket: Ticket) -> None:
        pass

    async def find(self, ticket: Ticket, found: Callable[[Source], None]) -> list[Source]:
        self.searching.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            found(cast(Source, None))


class Kept:
    """Renewals that only remember for whom."""

    def __init__(self) -> None:
        self.owners: list[object] = []

    def keep(self, owner: object, ttl_s: float, source: Source) -> None:
        self.owners.append(owner)

    def forget(self, owner: object) -> None:
        self.owners = [one for one in self.owners if one is not owner]


class AnyTicket:
    request_id = "req"
    block_ids = (1,)
    ttl_s = 30.0


async def test_a_lease_that_is_found_too_late_is_not_kept() -> None:
    """Nobody would ever forget it."""
    sources, kept = LateSources(), Kept()
    tasks: list[asyncio.Task[None]] = []

    def spawn(body: Any, *, name: str) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(body, name=name))
        return tasks[-1]

    keeping = Keeping(
        Config(engine_id="any"), sources=cast(Sources, sources), renewals=cast(Renewals, kept), spawn=spawn
    )
    with keeping.keep(cast(Ticket, AnyTicket())):
        await sources.searching.wait()
    await asyncio.wait(tasks)
    assert tasks[0].cancelled()
    assert kept.owners == []
