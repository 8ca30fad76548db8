"""StockResolver: connects to the ranks that a stock producer's parameters name, for a load to read from or notify.

A stock listener expects questions about its engine's ranks only. So the first rank is asked before any other, and its
answer has to confirm the number of ranks that the parameters claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.ticket import Ticket
from kvflow.runtime.peers.peer import Peer, Source
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.peers.ticket_resolver import TicketResolver
from kvflow.runtime.rank import RankContext
from kvflow.stock.params import StockTicket, is_stock_params, needed_blocks, read_stock_params
from kvflow.stock.stock_handshake import StockHandshakes, peer_address
from kvflow.stock.stock_leases import StockConnection, StockRequest


class StockResolver:
    """Connects to the ranks that tickets of kvflow's own engines and of stock engines name.

    Implements `runtime.peers.peer.Resolver`.
    """

    def __init__(self, context: RankContext, peers: Peers, own: TicketResolver, handshakes: StockHandshakes) -> None:
        self._block_ids_max = context.config.limits.block_ids_max
        self._peers = peers
        self._own = own
        self._leases = handshakes.leases
        self._handshakes = handshakes

    def read_ticket(self, ticket: Ticket | Mapping[str, Any]) -> Ticket:
        """Return the checked Ticket or StockTicket for `ticket`, a ticket or `kv_transfer_params`.

        RequestError if `ticket` is not valid. A StockTicket is made again from its parameters, since any caller may
        have made it.
        """
        lease_s, most = self._leases.terms.lease_s, self._block_ids_max
        if not isinstance(ticket, StockTicket):
            if not isinstance(ticket, Mapping) or not is_stock_params(ticket):
                return self._own.read_ticket(ticket)
            return read_stock_params(ticket, arrived=None, lease_s=lease_s, block_ids_max=most)
        params, arrived, left = ticket.params, ticket.arrived, ticket.left
        return read_stock_params(params, arrived=arrived, lease_s=lease_s, block_ids_max=most, left=left)

    def resolve_nowait(self, ticket: Ticket, on_source: Callable[[Source], None]) -> list[Source] | None:
        """Return the result of `resolve` if that needs no waiting, else None.

        Always None for a stock ticket, since its ranks may have to be asked whether they have restarted.
        """
        return None if isinstance(ticket, StockTicket) else self._own.resolve_nowait(ticket, on_source)

    async def resolve(self, ticket: Ticket, on_source: Callable[[Source], None]) -> list[Source]:
        """Connect to all ranks that a load with `ticket` has to read or to notify, and return a Source for each rank.

        A Source has a rank's connection and lease, and the lease's proof. Call `on_source` with each Source as soon as
        its rank is connected. This raises the errors of `TicketResolver.resolve`, and LeaseExpired if this rank has
        already read the blocks of a stock ticket.
        """
        if not isinstance(ticket, StockTicket):
            return await self._own.resolve(ticket, on_source)
        request = self._leases.request_of(ticket)
        sources: list[Source] = []
        ranks = [Rank(0, 0, 0)]
        for rank in ranks:
            peer, connection = await self._connect(peer_address(ticket, rank), ticket.generation)
            if not rank.tp and ticket.tp_size > 1:
                more = self._own.ranks_of(connection.parallelism, 0, f"stock request {ticket.request_id!r}")
                ranks += (one for one in more if one.tp)
            if connection.report_share.numerator:
                sources.append(self._source(ticket, request, peer, connection))
                on_source(sources[-1])
        return sources

    def _source(self, ticket: StockTicket, request: StockRequest, peer: Peer, connection: StockConnection) -> Source:
        """Return the Source for the stock rank `peer`: the connection, the blocks to read, and the proof.

        RequestError if the ticket's blocks do not fit the rank's groups. LeaseExpired if the rank has restarted, or
        registered its cache again.
        """
        proof = self._leases.proof_of(request, ticket, peer, connection)
        tables, rank = needed_blocks(ticket, connection.groups), peer.rank
        lease = msgspec.structs.replace(
            ticket.first, pp_rank=rank.pp, tp_rank=rank.tp, block_ids=tables[0], more_block_ids=tables[1:]
        )
        return Source(peer, connection, lease, 0, proof)

    async def _connect(self, at: Address, generation: int) -> tuple[Peer, StockConnection]:
        """Return the stock rank at `at` as a peer, and a connection to the present registration of its cache.

        `generation` is the number of that registration in the parameters. If `StockHandshakes.is_current` finds that
        the rank has restarted or registered its cache again, drop the old connection and connect again. The new one
        replaces the agent once no load uses the old one.
        """
        peer, connection, asked = await self._connect_peer(at, generation)
        if not asked and not await self._handshakes.is_current(peer, connection, generation):
            connection.replaced = True
            self._peers.note_read_failure(connection, "it has restarted, or registered its cache again")
            peer, connection, _ = await self._connect_peer(at, generation)
        return peer, connection

    async def _connect_peer(self, at: Address, generation: int) -> tuple[Peer, StockConnection, bool]:
        """Return the stock rank at `at` as a peer, its connection, and whether this call has begun the handshake.

        If so, the rank was asked after its parameters had the number `generation`, so the connection has that number.
        """
        peer = self._peers.get(at)
        asked = peer.connection is None and peer.handshake is None
        connection = await self._peers.connect(peer, None)
        assert isinstance(connection, StockConnection), "by its address"
        if asked:
            connection.generation = max(connection.generation, generation)
        return peer, connection, asked
