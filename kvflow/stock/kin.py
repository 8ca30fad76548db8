"""Engines of our own make that are met as stock ones: a router has dropped all that their parameters had of kvflow.

The name of the agent that such a rank shows says whose it is. Then it is believed by the seals of its leases, as ever:
the parameters name the request, its blocks and an address, and the ranks are asked for the rest. Only which prompt the
blocks are of is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from kvflow.config import split_address
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.ticket import RankLease, Ticket
from kvflow.core.stock.params import StockTicket
from kvflow.runtime.peers.peer import Connection, Source
from kvflow.runtime.peers.reach import Reach
from kvflow.runtime.peers.table import Peers
from kvflow.stock.handshake import KinConnection


async def reach_kin(
    peers: Peers, reach: Reach, ticket: StockTicket, kin: KinConnection, found: Callable[[Source], None]
) -> list[Source]:
    """See `Reach.reach`, of an engine of our own make whose parameters look like a stock one's; `kin` is what its first
    rank has shown.
    """
    peer = peers.get(Address(ticket.engine_id, kin.rank, ticket.address))
    connection = await peers.connect(peer, kin.life, ticket.request_id)
    own = reach.parse_ticket(_own_ticket(ticket, kin.rank, connection))
    first, more = own.block_ids, own.more_block_ids
    sources = []
    for source in await reach.reach(own, found):
        lease = source.lease
        if lease.block_ids is None:
            lease = msgspec.structs.replace(lease, block_ids=first, more_block_ids=more)
        sources.append(replace(source, lease=lease))
    return sources


def _own_ticket(ticket: StockTicket, rank: Rank, connection: Connection) -> Ticket:
    """Ticket for what the engine has offered, as far as it is known: who is asked for its lease says the rest."""
    groups, cut = connection.groups, connection.parallelism
    size, num_tokens = groups[0].block_size, ticket.num_tokens
    padding = -(-(num_tokens + ticket.left) // size) + num_tokens // -size
    first, *more = (ids[: len(ids) - padding] for ids in ticket.block_tables)
    host, port = split_address(ticket.address, what="stock address")
    lease = RankLease(
        pp_rank=rank.pp,
        tp_rank=rank.tp,
        lease_id="",
        seal_index=0,
        incarnation=connection.incarnation,
        expires_s=0.0,
        host=host,
        port=port,
    )
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
        ranks=(lease,),
    )
