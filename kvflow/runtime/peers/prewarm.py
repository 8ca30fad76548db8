"""Prewarming: handshakes before the first load, for users who know which engines they will read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvflow.checks import answer, shown
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError, RequestError, RuntimeBroken
from kvflow.runtime.peers.peer import check_parallelism
from kvflow.runtime.peers.reach import Reach, first_to_ask
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.tasks import for_each

_AT_ONCE_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewarmed:
    """The result for one engine: `ranks` are connected. Without an error these are all that loads from it need."""

    engine_id: str
    ranks: tuple[Rank, ...]
    error: KVFlowError | None


async def prewarm(
    reach: Reach, peers: Peers, engines: Iterable[PeerAddress | Ticket | Mapping[str, Any]]
) -> tuple[Prewarmed, ...]:
    """See `Runtime.prewarm`."""
    listed = None if isinstance(engines, str | bytes | Mapping) else answer(lambda: tuple(engines))
    if listed is None:
        raise RequestError(f"prewarm: expected PeerAddresses and tickets, got {shown(engines)}")
    # Decode engines that start together have the same list: each begins somewhere else, or they would meet at each one.
    start = reach.spread % len(listed) if len(listed) > _AT_ONCE_MAX else 0
    in_turn = (*listed[start:], *listed[:start])
    found = await for_each(in_turn, partial(_prewarm_one, reach, peers), _AT_ONCE_MAX)
    return (*found[len(listed) - start :], *found[: len(listed) - start])


async def _prewarm_one(reach: Reach, peers: Peers, engine: PeerAddress | Ticket | Mapping[str, Any]) -> Prewarmed:
    engine_id = ""
    ranks: list[Rank] = []
    error: KVFlowError | None = None
    try:
        if isinstance(engine, PeerAddress):
            engine_id = engine.engine_id
            wanted = await reach.ranks_at(engine)
        else:
            ticket = reach.read_ticket(engine)
            engine_id = ticket.engine_id
            await reach.check(ticket)
            wanted = reach.whereabouts(ticket)
            peer = peers.get(first_to_ask(ticket, wanted))
            check_parallelism(ticket, peer, await peers.connect(peer, None))
        for address in wanted:  # one after the other, and none after one that failed
            await peers.connect(peers.get(address), None)
            ranks.append(address.rank)
    except RuntimeBroken:
        raise
    except KVFlowError as problem:
        error = problem
    return Prewarmed(engine_id=engine_id, ranks=tuple(ranks), error=error)
