"""Leases of stock producers: how long each can be trusted, and which notifications its producer gets.

A producer gets only the notifications that `stock.texts` makes: any other message crashes its engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime
from typing import TypeAlias

from kvflow.core.plan.topology import Rank
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol import messages
from kvflow.errors import LeaseExpired
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.peers.peer import Connection, Peer, Source
from kvflow.stock.deadline import Arrival, DeadlineProof, Terms
from kvflow.stock.params import StockTicket
from kvflow.stock.texts import heartbeat_texts, read_text

_Key: TypeAlias = tuple[str, str, str]  # engine, address, request
StockRequest: TypeAlias = tuple[float, dict[Rank, DeadlineProof]]
"""Time at which the parameters of a request arrived, and a DeadlineProof for each rank of its producer."""
_REQUESTS_MAX = 1 << 16
_AGENTS_MAX = 1 << 14
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Return an id of this machine since its last boot, or "". Processes with the same id have the same clock."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


def arrival() -> Arrival:
    """Return the current time as an Arrival, for `StockTicket.arrived`.

    Returns:
        Now, on this machine's clock.
    """
    return Arrival(machine_id(), clock_gettime(CLOCK_BOOTTIME))


class StockConnection(Connection):
    """Connection to a stock rank after its handshake."""

    reporters: int
    """Number of readers that notifications to the rank state, so that the rank knows how many reports to expect."""
    alive_s: float
    """Time at which the rank was last known to be alive."""
    stock_metadata: messages.Metadata
    """The rank's metadata, converted to kvflow's form."""


class StockLeases:
    """The latest requests that were read from stock producers.

    Notifies these producers, as `runtime.peers.peer.LeaseNotifier`.
    """

    def __init__(self, cache: RegisteredCache, terms: Terms) -> None:
        self.terms = terms
        self.heartbeat_s: float | None = terms.heartbeat_s
        self._machine = machine_id()
        self._clock = cache.clock
        self._transport = cache.transport
        self._requests = BoundedMap[_Key, StockRequest | None](_REQUESTS_MAX)
        """The latest requests, by engine, address and request id. None for a request with a producer that was notified
        that it was read, or is not needed."""
        self._agents = BoundedMap[tuple[str, str, Rank], tuple[str, float]](_AGENTS_MAX)
        """For each rank, by engine, address and rank, its agent, and the time at which the agent took the place of
        another agent; -inf for the first agent."""

    def request_of(self, ticket: StockTicket) -> StockRequest:
        """Return the arrival time and proofs of the request that `ticket` is for.

        If the ticket has no arrival, the first call for its request is the arrival. LeaseExpired if the request was
        read here before, or if the arrival is by another machine's clock.
        """
        key = (ticket.engine_id, ticket.address, ticket.request_id)
        if key not in self._requests:
            self._requests[key] = self._arrived_s(ticket), {}
        self._requests.move_to_end(key)
        request = self._requests[key]
        if request is None:
            raise _expired(ticket, "its producer was notified that it was read")
        return request

    def proof_of(self, request: StockRequest, ticket: StockTicket, peer: Peer, agent: str) -> DeadlineProof:
        """Return the proof for what is read from `peer`, a rank of the request's producer.

        LeaseExpired if the rank has restarted since the parameters arrived, or may have: parameters that arrive less
        than `router_s` after a new agent was seen may be from before the restart.
        """
        arrived_s, proofs = request
        if peer.rank in proofs and proofs[peer.rank].agent != agent:
            raise _expired(ticket, f"{peer.label} has restarted since its parameters arrived")
        if arrived_s < self._replaced_s(ticket, peer, agent) + self.terms.router_s:
            raise _expired(ticket, f"{peer.label} has restarted: its parameters may be from before the restart")
        if peer.rank not in proofs:
            clock, name = self._clock.now_s, ticket.request_id
            proofs[peer.rank] = DeadlineProof(arrived_s, self.terms, clock, self._unsent, request_id=name, agent=agent)
        return proofs[peer.rank]

    def notify_needed(self, sources: Sequence[Source]) -> int:
        """Send a heartbeat for the requests of `sources` to their rank, which is the same for all. Return their number.

        See `LeaseNotifier.notify_needed`.
        """
        proofs = {proof.request_id: proof for proof in map(_proof, sources)}
        for proof in proofs.values():
            proof.note_heartbeat()
        for text in heartbeat_texts(proofs):
            self._transport.notify(sources[0].connection.agent, text)
        return len(proofs)

    def notify_read(self, source: Source) -> None:
        """Notify a source's rank that its request was read, and allow no further read of it.

        See `LeaseNotifier.notify_read`.
        """
        connection, request_id = source.connection, _proof(source).request_id
        assert isinstance(connection, StockConnection), "a stock source has a StockConnection"
        self._requests[source.peer.engine_id, source.lease.address, request_id] = None
        self._transport.notify(connection.agent, read_text(request_id, connection.reporters))

    def _replaced_s(self, ticket: StockTicket, peer: Peer, agent: str) -> float:
        """Return when a restarted peer rank came back as `agent`, by the runtime's clock.

        -inf if no earlier agent of the rank is known.
        """
        key = (ticket.engine_id, peer.address, peer.rank)
        known, met_s = self._agents.get(key, (agent, -math.inf))
        if known != agent:
            met_s = self._clock.now_s()
        self._agents[key] = agent, met_s
        return met_s

    def _unsent(self) -> int:
        return self._transport.statistics.notifications_failed

    def _arrived_s(self, ticket: StockTicket) -> float:
        now_s = self._clock.now_s()
        if ticket.arrived is None:
            return now_s
        if ticket.arrived.machine != self._machine:
            raise _expired(ticket, "its arrival time is by the clock of another machine")
        return min(ticket.arrived.now_s, now_s)


def _proof(source: Source) -> DeadlineProof:
    assert isinstance(source.proof, DeadlineProof), "a stock source has a DeadlineProof"
    return source.proof


def _expired(ticket: StockTicket, why: str) -> LeaseExpired:
    what = f"request {ticket.request_id!r} of stock engine {ticket.engine_id!r}"
    return LeaseExpired(f"{what}: {why}", request_id=ticket.request_id, peer=ticket.address)
