"""Handshakes before the first load: for users who know whom they will read from, so that no load waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvflow.config import PORT_MAX, rank_offset, split_address
from kvflow.core.ticket import Ticket
from kvflow.core.topology import Rank
from kvflow.errors import KVFlowError, RequestError, RuntimeBroken
from kvflow.runtime.connection import Address
from kvflow.runtime.peers import Peers
from kvflow.runtime.sources import Sources, check_cut, first_to_ask

_AT_ONCE_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """One rank of an engine, and where its side channel listens (`Runtime.address`).

    The engine's other ranks are found by their ports, as `Config.listen` gives them out.
    """

    engine_id: str
    address: str
    dp_rank: int = 0
    pp_rank: int = 0
    tp_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewarmed:
    """What came of one engine: `ranks` are connected; all that loads from it need, unless there is an error."""

    engine_id: str
    ranks: tuple[Rank, ...]
    error: KVFlowError | None


async def prewarm(
    sources: Sources, peers: Peers, engines: Iterable[PeerAddress | Ticket | Mapping[str, Any]]
) -> tuple[Prewarmed, ...]:
    """See `Runtime.prewarm`."""
    room = asyncio.Semaphore(_AT_ONCE_MAX)

    async def one(engine: PeerAddress | Ticket | Mapping[str, Any]) -> Prewarmed:
        async with room:
            return await _prewarm_one(sources, peers, engine)

    return tuple(await asyncio.gather(*map(one, engines)))


async def _prewarm_one(sources: Sources, peers: Peers, engine: PeerAddress | Ticket | Mapping[str, Any]) -> Prewarmed:
    engine_id = engine.engine_id if isinstance(engine, PeerAddress) else ""
    ranks: list[Rank] = []
    try:
        if isinstance(engine, PeerAddress):
            wanted = await _ask(sources, peers, engine)
        else:
            ticket = sources.read(engine)
            engine_id = ticket.engine_id
            await sources.check(ticket)
            wanted = await _confirm(sources, peers, ticket)
        for address in wanted:  # one after the other, and none after one that failed
            await peers.connect(peers.get(*address), None)
            ranks.append(address.rank)
    except RuntimeBroken:
        raise
    except KVFlowError as error:
        return Prewarmed(engine_id=engine_id, ranks=tuple(ranks), error=error)
    return Prewarmed(engine_id=engine_id, ranks=tuple(ranks), error=None)


async def _confirm(sources: Sources, peers: Peers, ticket: Ticket) -> list[Address]:
    """The ranks that loads with a ticket need, once one of them has said that its engine is cut as the ticket says."""
    wanted = sources.whereabouts(ticket)
    peer = peers.get(*first_to_ask(ticket, wanted))
    check_cut(ticket, peer, await peers.connect(peer, None))
    return wanted


async def _ask(sources: Sources, peers: Peers, engine: PeerAddress) -> list[Address]:
    """The ranks that loads from an engine need, and where they listen, by how one of its ranks says that it is cut."""
    host, port = split_address(engine.address, what="prewarm")
    here = Rank(engine.dp_rank, engine.pp_rank, engine.tp_rank)
    cut = (await peers.connect(peers.get(engine.engine_id, here, engine.address), None)).cut
    base = port - rank_offset(*here, tp_size=cut.tp_size, pp_size=cut.pp_size)
    wanted = []
    for rank in sources.ranks_of(cut, engine.dp_rank, f"prewarm: engine {engine.engine_id!r} at {engine.address}"):
        there = base + rank_offset(*rank, tp_size=cut.tp_size, pp_size=cut.pp_size)
        if not 0 < there <= PORT_MAX:
            raise RequestError(f"prewarm: port {port} of {here} puts {rank} at port {there}")
        wanted.append(Address(engine.engine_id, rank, f"tcp://{host}:{there}"))
    return wanted
