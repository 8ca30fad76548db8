"""From a stock producer's parameters to the ranks that a load reads from or reports to.

The first rank is asked before any other: what it shows has to bear out how many ranks its engine is said to have, since
a question about a rank that is not there ends its listener.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.ticket import Ticket
from kvflow.core.stock.params import StockTicket, is_stock, read_stock
from kvflow.core.stock.shape import expanded
from kvflow.core.stock.texts import read_text
from kvflow.errors import PeerIncompatible, RequestError
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import Peer, Reaching, Source
from kvflow.runtime.peers.reach import Reach
from kvflow.runtime.peers.table import Peers
from kvflow.stock.handshake import StockConnection, StockHandshakes, Whereabouts
from kvflow.stock.sights import Sight, Sights


@dataclass(frozen=True, slots=True, kw_only=True)
class StockSource(Source):
    """One rank of a stock producer, connected, and how long it may be believed."""

    sight: Sight
    text: bytes
    """What it is told once we have read."""


class StockReach:
    """Finds the sources of loads from stock producers."""

    def __init__(
        self, context: RankContext, peers: Peers, own: Reach, sights: Sights, handshakes: StockHandshakes
    ) -> None:
        self.block_ids_max = context.config.limits.block_ids_max
        self._peers = peers
        self._own = own
        self._sights = sights
        self._handshakes = handshakes

    def read_ticket(self, ticket: StockTicket | Mapping[str, Any], block_ids_max: int) -> StockTicket:
        """The ticket, checked: also one that was read before, since anybody can make one. Raises RequestError."""
        lease_s = self._sights.terms.lease_s
        params, arrived = (ticket.params, ticket.arrived) if isinstance(ticket, StockTicket) else (ticket, None)
        return read_stock(params, arrived=arrived, lease_s=lease_s, block_ids_max=block_ids_max)

    async def reach(self, ticket: StockTicket, found: Callable[[Source], None]) -> list[Source]:
        """See `Reach.reach`. LeaseExpired, too, for what has been read here already."""
        sight = self._sights.of(ticket)
        where = Whereabouts(ticket.address, ticket.tp_size)
        first = await self._connect(where.of_rank(ticket.engine_id, 0))
        ranks: Sequence[Rank] = (Rank(0, 0, 0),)
        if ticket.tp_size > 1:
            what = f"stock request {ticket.request_id!r}"
            ranks = self._own.ranks_of(first[1].parallelism, 0, what)
        sources: list[Source] = []
        for rank in ranks:
            peer, connection = first
            if rank.tp:
                peer, connection = await self._connect(where.of_rank(ticket.engine_id, rank.tp))
            if not connection.report_share.numerator:
                continue
            deadline = self._sights.deadline_of(sight, peer, connection.agent, ticket)
            lease = msgspec.structs.replace(
                ticket.first, tp_rank=rank.tp, block_ids=_blocks(ticket, peer, connection), more_block_ids=()
            )
            text = read_text(ticket.request_id, connection.reporters)
            source = StockSource(peer, connection, lease, deadline.bound_s, 0, deadline, sight=sight, text=text)
            sources.append(source)
            found(source)
        return sources

    async def _connect(self, at: Address) -> tuple[Peer, StockConnection]:
        """A rank that lives, as far as it has shown lately: a process that is gone may have left its number."""
        peer = self._peers.get(at)
        connection = await self._peers.connect(peer, None)
        assert isinstance(connection, StockConnection), "by its address"
        if not await self._handshakes.lives(peer, connection):
            self._peers.failed(connection, "it has restarted")
            connection = await self._peers.connect(self._peers.get(at), None)
            assert isinstance(connection, StockConnection), "by its address"
        return peer, connection


def _blocks(ticket: StockTicket, peer: Peer, connection: StockConnection) -> tuple[int, ...]:
    """The rank's own blocks. PeerIncompatible unless they are as many as the prompt fills: all of it, and no more."""
    if len(ticket.block_tables) != 1:
        why = f"groups: the parameters have {len(ticket.block_tables)}, one is read from stock engines"
        raise peer.at.failure(PeerIncompatible, why)
    size = connection.parallelism.block_size * connection.split
    filled = -(-ticket.num_tokens // size)
    if len(ticket.block_ids) != filled:
        found = f"{len(ticket.block_ids)} block ids, but {ticket.num_tokens} tokens fill {filled} blocks of {size}"
        raise RequestError(f"stock request {ticket.request_id!r}: {found}")
    return expanded(ticket.block_ids, connection.split)


class BothReach:
    """The way from a ticket of either kind to its ranks; see `runtime.peers.peer.Reaching`."""

    def __init__(self, own: Reaching, stock: StockReach) -> None:
        self._own = own
        self._stock = stock
        self.walk, self.when_served, self.ask_digests = own.walk, own.when_served, own.ask_digests
        self.meet, self.ask_patiently = own.meet, own.ask_patiently
        self.hold, self.release, self.succeeded, self.failed = own.hold, own.release, own.succeeded, own.failed

    def read_ticket(self, ticket: Ticket | Mapping[str, Any], block_ids_max: int) -> Ticket:
        """A ticket of either kind, checked. RequestError names what is wrong with it."""
        if isinstance(ticket, StockTicket):
            return self._stock.read_ticket(ticket, block_ids_max)
        if isinstance(ticket, Mapping) and is_stock(ticket):
            return self._stock.read_ticket(ticket, block_ids_max)
        return self._own.read_ticket(ticket, block_ids_max)

    def parse_ticket(self, ticket: Ticket | Mapping[str, Any]) -> Ticket:
        """The same, within the bounds of this runtime."""
        return self.read_ticket(ticket, self._stock.block_ids_max)

    async def reach(self, ticket: Ticket, found: Callable[[Source], None]) -> list[Source]:
        """See `Reach.reach`."""
        if isinstance(ticket, StockTicket):
            return await self._stock.reach(ticket, found)
        return await self._own.reach(ticket, found)
