"""Sights of stock requests: when their parameters came, of which life of a rank, and whether they were used."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeAlias

from kvflow.core.plan.topology import Rank
from kvflow.core.policy.latest import Latest
from kvflow.errors import LeaseExpired
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import Peer
from kvflow.stock.deadline import DeadlineProof, Terms
from kvflow.stock.params import StockTicket

_Key: TypeAlias = tuple[str, str, str]  # engine, address, request
_SEEN_MAX = 1 << 16
_MET_MAX = 1 << 14


@dataclass(slots=True, eq=False)
class Sight:
    """One request of a stock engine."""

    key: _Key
    arrived_s: float
    lives: dict[Rank, str] = field(default_factory=dict)
    """The NIXL agent of each rank when we first met it for this request: another one is another life."""
    deadlines: dict[Rank, DeadlineProof] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return self.key[-1]


class Sights:
    """All that have been seen lately, the latest last."""

    def __init__(self, terms: Terms, machine: str, context: RankContext) -> None:
        self.terms = terms
        self._machine = machine
        self._clock = context.clock
        self._transport = context.transport
        self._seen = Latest[_Key, Sight | None](_SEEN_MAX)
        """None: its producer was told that it was read, or is not needed. It holds nothing for us any more."""
        self._met = Latest[tuple[str, str, Rank], tuple[str, float]](_MET_MAX)
        """The life of each rank, and when it was met, if there was another one before."""

    def of(self, ticket: StockTicket) -> Sight:
        """Sight of a ticket's request; a first look at it is its arrival, unless it says when that was.

        Raises LeaseExpired if it has been read here, or arrived by another machine's clock.
        """
        key = (ticket.engine_id, ticket.address, ticket.request_id)
        if key not in self._seen:
            self._seen[key] = Sight(key, self._arrived_s(ticket))
        self._seen.move_to_end(key)
        sight = self._seen[key]
        if sight is None:
            raise expired(ticket, "its producer was told that it has been read")
        return sight

    def told(self, sight: Sight) -> None:
        """Read nothing for this request from now on."""
        self._seen[sight.key] = None

    def deadline_of(self, sight: Sight, peer: Peer, life: str, ticket: StockTicket) -> DeadlineProof:
        """Time until which a rank may be believed for this request.

        LeaseExpired if it is another life of that rank, or may be one: parameters can have been made `router_s` before
        they came, so those that come within that after a rank was met anew may be of its life before.
        """
        if sight.lives.setdefault(peer.rank, life) != life:
            raise expired(ticket, f"{peer.label} has restarted since its parameters came")
        if sight.arrived_s < self._met_s(ticket, peer, life) + self.terms.router_s:
            raise expired(ticket, f"{peer.label} has restarted: its parameters may be of before")
        if peer.rank not in sight.deadlines:
            sight.deadlines[peer.rank] = DeadlineProof(sight.arrived_s, self.terms, self._clock.now_s, self._unsent)
        return sight.deadlines[peer.rank]

    def _met_s(self, ticket: StockTicket, peer: Peer, life: str) -> float:
        """Time at which a rank was met that is another one than before; -inf for who was not known."""
        key = (ticket.engine_id, peer.address, peer.rank)
        known, met_s = self._met.get(key, (life, -math.inf))
        if known != life:
            met_s = self._clock.now_s()
        self._met[key] = life, met_s
        return met_s

    def _unsent(self) -> int:
        return self._transport.statistics.notifications_failed

    def _arrived_s(self, ticket: StockTicket) -> float:
        now_s = self._clock.now_s()
        if ticket.arrived is None:
            return now_s
        if ticket.arrived.machine != self._machine:
            raise expired(ticket, "when it came is known by the clock of another machine only")
        return min(ticket.arrived.now_s, now_s)


def expired(ticket: StockTicket, why: str) -> LeaseExpired:
    """The error for a ticket that nothing can be read for."""
    what = f"request {ticket.request_id!r} of stock engine {ticket.engine_id!r}"
    return LeaseExpired(f"{what}: {why}", request_id=ticket.request_id, peer=ticket.address)
