"""Growth of one registration: its leases that grow, its loads of such leases, and offers that are still to come."""

from __future__ import annotations

from functools import partial

from kvflow.errors import COMPUTE
from kvflow.growing.growing_leases import GrowingLeases
from kvflow.growing.growing_loads import GrowingLoads
from kvflow.growing.pending_tickets import Rendezvous
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.load.expected import check_met
from kvflow.runtime.load.load import Carry, Load, Work
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.peers.peer import Source

__all__ = ["Growing", "GrowingLeases", "begin"]


def begin(cache: RegisteredCache) -> Growing:
    """Return the part of a registration."""
    return Growing(cache)


class Growing:
    """Leases that grow, loads of them, and tickets whose offer is still to come."""

    def __init__(self, cache: RegisteredCache) -> None:
        self.loads = GrowingLoads(cache)
        self.rendezvous = Rendezvous(cache)
        self._groups = cache.local.groups
        self._remote_leases = cache.remote_leases

    def met(self, carry: Carry) -> Carry:
        """Return a carrier that waits for the offer of a rendezvous; from then on `carry` carries the load."""
        return partial(self._meet, carry)

    async def _meet(self, carry: Carry, load: Load, work: Work) -> LoadReport:
        work.enter("handshake")

        def found(source: Source, ttl_s: float) -> None:
            self._remote_leases.keep(load, ttl_s, source)

        waits = partial(work.compute, lambda: "its lease is not opened yet")
        work.ticket = await self.rendezvous.meet(work.ticket, found, waits)
        if work.phase == COMPUTE:
            work.enter("handshake")
        check_met(self._groups, load.request, work.ticket, work.tables)
        return await carry(load, work)
