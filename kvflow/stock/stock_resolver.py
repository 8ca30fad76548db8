"""StockResolver: the way from a stock producer's parameters to the ranks that a load reads from or reports to.

The first rank is asked before any other, because a question about a rank that does not exist ends the engine's
listener: what it shows has to confirm the number of ranks that the parameters claim. Each stage of a pipeline confirms
the next one in the same way: there is one only where layers are missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from kvflow.checks import counted
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PeerIncompatible
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import Peer, Source
from kvflow.runtime.peers.reach import Reach
from kvflow.runtime.peers.table import Peers
from kvflow.stock.own_engines import reach_kin
from kvflow.stock.params import StockTicket, is_stock, needed_blocks, read_stock
from kvflow.stock.shape import Unfit, check_stage
from kvflow.stock.sights import Sight
from kvflow.stock.stock_handshake import KinConnection, StockConnection, StockHandshakes, Whereabouts
from kvflow.stock.telling import StockSource
from kvflow.stock.texts import read_text


class StockResolver:
    """The way from a ticket of either kind to its ranks; see `runtime.peers.peer.Resolver`."""

    def __init__(self, context: RankContext, peers: Peers, own: Reach, handshakes: StockHandshakes) -> None:
        self._block_ids_max = context.config.limits.block_ids_max
        self._peers = peers
        self._own = own
        self._sights = handshakes.sights
        self._handshakes = handshakes

    def read_ticket(self, ticket: Ticket | Mapping[str, Any]) -> Ticket:
        """The ticket, checked even if it was read before, since anybody can make one. Raises RequestError."""
        lease_s, most = self._sights.terms.lease_s, self._block_ids_max
        if not isinstance(ticket, StockTicket):
            if not isinstance(ticket, Mapping) or not is_stock(ticket):
                return self._own.read_ticket(ticket)
            return read_stock(ticket, arrived=None, lease_s=lease_s, block_ids_max=most)
        params, arrived, left = ticket.params, ticket.arrived, ticket.left
        return read_stock(params, arrived=arrived, lease_s=lease_s, block_ids_max=most, left=left)

    def reach_at_once(self, ticket: Ticket, found: Callable[[Source], None]) -> list[Source] | None:
        """See `Reach.reach_at_once`. A stock producer may have restarted: it is looked at first."""
        return None if isinstance(ticket, StockTicket) else self._own.reach_at_once(ticket, found)

    async def reach(self, ticket: Ticket, found: Callable[[Source], None]) -> list[Source]:
        """See `Reach.reach`. LeaseExpired, too, for what has been read here already."""
        if not isinstance(ticket, StockTicket):
            return await self._own.reach(ticket, found)
        sight = self._sights.of(ticket)
        where = Whereabouts(ticket.address, ticket.tp_size, ticket.pp_size)
        sources: list[Source] = []
        async with aclosing(self._ranks(where, ticket)) as ranks:
            async for peer, connection in ranks:
                if isinstance(connection, KinConnection):
                    return await reach_kin(self._peers, self._own, ticket, connection, found)
                if connection.report_share.numerator:
                    sources.append(self._source(ticket, sight, peer, connection))
                    found(sources[-1])
        return sources

    def _source(self, ticket: StockTicket, sight: Sight, peer: Peer, connection: StockConnection) -> StockSource:
        """A connected rank, and which of its blocks are read. Raises as `needed_blocks` and `Sights.deadline_of` do."""
        deadline = self._sights.deadline_of(sight, peer, connection.agent, ticket)
        count, split = sum(map(len, ticket.block_tables)), connection.split
        if count * split > self._block_ids_max:
            most = f"at most {self._block_ids_max} in all (limits.block_ids_max)"
            why = f"{counted(count, 'block')} of {counted(split, 'physical one')} each: {most}"
            raise peer.at.failure(PeerIncompatible, why)
        tables, rank = needed_blocks(ticket, connection.groups, split), peer.rank
        lease = msgspec.structs.replace(
            ticket.first, pp_rank=rank.pp, tp_rank=rank.tp, block_ids=tables[0], more_block_ids=tables[1:]
        )
        text = read_text(ticket.request_id, connection.reporters)
        return StockSource(peer, connection, lease, 0, deadline, sight=sight, text=text)

    async def _ranks(self, where: Whereabouts, ticket: StockTicket) -> AsyncGenerator[tuple[Peer, StockConnection]]:
        """The ranks that concern us, and each stage's first one: connected, in an order in which each is there.

        PeerIncompatible for an engine that has more stages, or fewer, than it is said to.
        """
        ranks: Sequence[Rank] = ()
        held: set[int] = set()
        for stage in range(where.pp_size):
            at = where.of_rank(ticket.engine_id, Rank(0, stage, 0))
            if stage:
                self._check_stage(at, stage, where, held)
            peer, connection = await self._connect(at)
            yield peer, connection
            held |= {layer for layers in connection.layers.values() for layer in layers}
            if not stage and where.tp_size * where.pp_size > 1:
                ranks = self._own.ranks_of(connection.parallelism, 0, f"stock request {ticket.request_id!r}")
            for rank in ranks:
                if rank.pp == stage and rank.tp:
                    yield await self._connect(where.of_rank(ticket.engine_id, rank))
        if where.pp_size > 1:
            self._check_stage(at, where.pp_size, where, held)

    def _check_stage(self, at: Address, stage: int, where: Whereabouts, held: Collection[int]) -> None:
        try:
            check_stage(stage, where.pp_size, held, self._handshakes.ours)
        except Unfit as error:
            misfit = at.failure(PeerIncompatible, str(error))
            self._peers.note_incompatible(misfit)
            raise misfit from error

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
