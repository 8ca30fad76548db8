"""Engines of our own make that are met as stock ones: a router has dropped the part of kvflow from their parameters.

The agent's name that such a rank shows says that it is ours. The parameters name the request, its blocks and an
address; the ranks are asked for the rest, and the seals of their leases prove the read as ever. Only the prompt cannot
be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket
from kvflow.hosts import split_address
from kvflow.runtime.peers.peer import Connection, Source
from kvflow.runtime.peers.reach import Reach
from kvflow.runtime.peers.table import Peers
from kvflow.stock.params import StockTicket
from kvflow.stock.stock_handshake import KinConnection


async def reach_kin(
    peers: Peers, reach: Reach, ticket: StockTicket, kin: KinConnection, found: Callable[[Source], None]
) -> list[Source]:
    """Reach (`Reach.reach`) an engine of our own make by parameters like a stock one's; `kin` is its first rank."""
    peer = peers.get(Address(ticket.engine_id, kin.rank, ticket.address))
    connection = await peers.connect(peer, kin.life, ticket.request_id)
    own = reach.read_ticket(_own_ticket(ticket, kin.rank, connection))
    first, more = own.block_ids, own.more_block_ids
    sources = []
    for source in await reach.reach(own, found):
        lease = source.lease
        if lease.block_ids is None:
            lease = msgspec.structs.replace(lease, block_ids=first, more_block_ids=more)
        sources.append(replace(source, lease=lease))
    return sources


def _own_ticket(ticket: StockTicket, rank: Rank, connection: Connection) -> Ticket:
    """Ticket of the offer as far as the parameters tell; the ranks that are asked for their leases tell the rest."""
    groups, cut = connection.groups, connection.parallelism
    size, num_tokens = groups[0].block_size, ticket.num_tokens
    padding = -(-(num_tokens + ticket.left) // size) + num_tokens // -size
    first, *more = (ids[: len(ids) - padding] for ids in ticket.block_tables)
    host, port = split_address(ticket.address, what="stock address")
    return Ticket(
        engine_id=ticket.engine_id,
        request_id=ticket.request_id,
        block_ids=first,
        more_block_ids=tuple(more),
        num_tokens=num_tokens,
        ttl_s=ticket.ttl_s,
        tp_size=cut.tp_size,
        pp_size=cut.pp_size,
        dp_rank=rank.dp,
        block_size=cut.block_size,
        kv_heads=cut.kv_heads,
        model_kv_heads=cut.model_kv_heads,
        more_kinds=cut.more,
        groups=connection.told_groups,
        fixed_ports=True,
        traceparent="",
        prompt_digest="",
        ranks=(RankLease.unasked(rank, connection.incarnation, host, port),),
    )
