"""StockLeases: how long a stock producer's leases can be trusted, and the notifications that the producer gets.

A producer gets only the notifications that `stock.texts` makes: a stock engine expects no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime
from typing import NamedTuple, TypeAlias

from kvflow.core.plan.topology import Rank
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol import messages
from kvflow.errors import LeaseExpired
from kvflow.runtime.clock import Clock
from kvflow.runtime.peers.peer import Connection, Peer, Source
from kvflow.stock.deadline import Arrival, DeadlineProof, Terms
from kvflow.stock.params import StockTicket
from kvflow.stock.texts import heartbeat_texts, read_text
from kvflow.transport.base import Transport

_Key: TypeAlias = tuple[str, str, str]  # engine, address, request
StockRequest: TypeAlias = tuple[float, dict[Rank, DeadlineProof]]
"""Arrival time of a request's parameters on this engine's clock, and the DeadlineProof of each producer rank."""
_REQUESTS_MAX = 1 << 16
_RANKS_MAX = 1 << 14
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Return an id of this machine's last boot, or "" if it cannot be read.

    Processes with the same id have the same CLOCK_BOOTTIME.
    """
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


def arrival() -> Arrival:
    """Return the current time as an Arrival: call it when a stock producer's parameters arrive.

    Returns:
        The time on this machine's clock, for `StockTicket.arrived`.
    """
    return Arrival(machine_id(), clock_gettime(CLOCK_BOOTTIME))


class StockConnection(Connection):
    reporters: int
    """The number N that this rank writes into the notification "ID:N", which reports the request ID as read.

    From N the stock rank knows after how many such notifications it may free the request's blocks.
    """
    alive_s: float
    """Time, on the runtime's clock, at which the rank was last known to be alive."""
    stock_metadata: messages.Metadata
    """The rank's metadata, converted to kvflow's own message."""
    generation: int = 0
    """The highest number of registrations in parameters that arrived before the rank last confirmed its metadata."""
    replaced: bool = False
    """True once the rank was found to have restarted, or to have registered its cache again."""


class _Registration(NamedTuple):
    """The registration of a stock rank's cache that was seen last."""

    agent: str
    incarnation: str
    generation: int
    replaced_s: float = -math.inf
    """Time, on the runtime's clock, at which this registration was first seen to replace another; -inf if none."""
    generation_before: float = math.inf
    """The highest number in parameters of the registration that this one has replaced; inf if they do not compare."""


class StockLeases:
    """Remembers the latest requests that stock producers have offered to this rank, and notifies these producers.

    Implements `runtime.peers.peer.LeaseNotifier`.
    """

    def __init__(self, clock: Clock, transport: Transport, terms: Terms) -> None:
        self.terms = terms
        self.heartbeat_s: float | None = terms.heartbeat_s
        self._machine = machine_id()
        self._clock = clock
        self._transport = transport
        self._requests = BoundedMap[_Key, StockRequest | None](_REQUESTS_MAX)
        """The latest requests, by engine id, engine address and request id. The value is None once the producer was
        notified that the request was read or is not needed."""
        self._registrations = BoundedMap[tuple[str, str, Rank], _Registration](_RANKS_MAX)
        """The current registration of each stock rank, by engine id, peer address and rank."""

    def request_of(self, ticket: StockTicket) -> StockRequest:
        """Return the arrival time and the proofs of the request that `ticket` is for.

        Without an arrival time in the ticket, the time of the first call for the request counts. LeaseExpired if this
        rank has already read the request, or if the arrival time is from another machine.
        """
        key = (ticket.engine_id, ticket.address, ticket.request_id)
        if key not in self._requests:
            self._requests[key] = self._arrived_s(ticket), {}
        self._requests.move_to_end(key)
        request = self._requests[key]
        if request is None:
            raise _expired(ticket, "its producer was notified that it was read")
        return request

    def proof_of(
        self, request: StockRequest, ticket: StockTicket, peer: Peer, connection: StockConnection
    ) -> DeadlineProof:
        """Return the proof for reads of a request from `peer`, a stock rank, over `connection`.

        LeaseExpired if the rank has restarted, or registered its cache again, since the request's parameters were made.
        If the parameters arrived less than `router_s` after that was noticed, they may be older, which also raises
        LeaseExpired, unless their number of registrations shows that they are not.
        """
        arrived_s, proofs = request
        now = self._registration(ticket, peer, connection)
        changed = f"{peer.label} has restarted, or registered its cache again"
        if peer.rank in proofs and proofs[peer.rank].incarnation != now.incarnation:
            raise _expired(ticket, f"{changed}, since its parameters arrived")
        newer = ticket.generation > now.generation_before and ticket.generation >= now.generation
        if arrived_s < now.replaced_s + self.terms.router_s and not newer:
            raise _expired(ticket, f"{changed}: its parameters may be from before that")
        if peer.rank not in proofs:
            proofs[peer.rank] = DeadlineProof(
                arrived_s,
                self.terms,
                self._clock.now_s,
                self._unsent,
                lambda: connection.replaced,
                request_id=ticket.request_id,
                incarnation=connection.incarnation,
            )
        return proofs[peer.rank]

    def notify_needed(self, sources: Sequence[Source]) -> int:
        """Send a heartbeat that names the requests of `sources` to a producer rank. Return the number of requests.

        All `sources` are reads from that one rank. Implements `LeaseNotifier.notify_needed`.
        """
        proofs = {proof.request_id: proof for proof in map(_proof, sources)}
        for proof in proofs.values():
            proof.note_heartbeat()
        for text in heartbeat_texts(proofs):
            self._transport.notify(sources[0].connection.agent, text)
        return len(proofs)

    def notify_read(self, source: Source) -> None:
        """Notify the rank of `source` that the request was read, and refuse further reads of the request here.

        Implements `LeaseNotifier.notify_read`.
        """
        connection, request_id = source.connection, _proof(source).request_id
        assert isinstance(connection, StockConnection), "a stock source has a StockConnection"
        self._requests[source.peer.engine_id, source.lease.address, request_id] = None
        self._transport.notify(connection.agent, read_text(request_id, connection.reporters))

    def _registration(self, ticket: StockTicket, peer: Peer, connection: StockConnection) -> _Registration:
        """Record the registration of `connection` as the present one of `peer`, and return it."""
        key = (ticket.engine_id, peer.address, peer.rank)
        now = _Registration(connection.agent, connection.incarnation, connection.generation)
        known = self._registrations.get(key, now)
        if known.incarnation == now.incarnation:
            now = known._replace(generation=now.generation)
        else:
            before = known.generation if known.agent == now.agent else math.inf  # a restarted engine counts anew
            now = now._replace(replaced_s=self._clock.now_s(), generation_before=before)
        self._registrations[key] = now
        return now

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
