"""Loads whose ticket is a rendezvous wait for their offer here. From then on they are as any other load."""

from __future__ import annotations

from functools import partial

from kvflow.errors import COMPUTE
from kvflow.runtime.load.expected import check_met
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.load.load import Carry, Load, Work
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.peers.peer import LocalRank, Meet, Source


class Meeting:
    """Carries loads that have to wait for their offers, and hands them over to the carrier of all others."""

    def __init__(self, local: LocalRank, meet: Meet, remote_leases: RemoteLeases, carry: Carry) -> None:
        self._local = local
        self.groups = local.groups
        self._meet = meet
        self._remote_leases = remote_leases
        self._carry = carry

    async def carry(self, load: Load, work: Work) -> LoadReport:
        """Wait until its offer is known, then hand over."""
        work.enter("handshake")

        def found(source: Source, ttl_s: float) -> None:
            self._remote_leases.keep(load, ttl_s, source)

        work.ticket = await self._meet(work.ticket, found, partial(work.compute, lambda: "its lease is not opened yet"))
        if work.phase == COMPUTE:
            work.enter("handshake")
        check_met(self.groups, load.request, work.ticket, work.tables)
        return await self._carry(load, work)

    def then(self, carry: Carry) -> Carry:
        """A meeting that hands over to another carrier."""
        return Meeting(self._local, self._meet, self._remote_leases, carry).carry
