"""Prewarming: connect to the engines from which loads will read, before the first load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from kvflow.checks import short_repr, try_call
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError, RequestError, RuntimeBroken
from kvflow.runtime.peers.peer import check_parallelism
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.peers.ticket_resolver import TicketResolver, first_to_ask
from kvflow.runtime.tasks import for_each

_AT_ONCE_MAX = 16


async def prewarm(
    resolver: TicketResolver, peers: Peers, engines: Iterable[PeerAddress | Ticket | Mapping[str, Any]]
) -> tuple[KVFlowError | None, ...]:
    """Connect the ranks of `engines` that loads will need. Return for each engine None, or the engine's error."""
    listed = None if isinstance(engines, str | bytes | Mapping) else try_call(lambda: tuple(engines))
    if listed is None:
        raise RequestError(f"prewarm: expected PeerAddresses and tickets, got {short_repr(engines)}")
    # Decode engines that start together have the same list. Each begins at another position, to spread handshakes.
    start = resolver.list_offset % len(listed) if len(listed) > _AT_ONCE_MAX else 0
    in_turn = (*listed[start:], *listed[:start])
    outcomes = await for_each(in_turn, partial(_prewarm_one, resolver, peers), _AT_ONCE_MAX)
    return (*outcomes[len(listed) - start :], *outcomes[: len(listed) - start])


async def _prewarm_one(
    resolver: TicketResolver, peers: Peers, engine: PeerAddress | Ticket | Mapping[str, Any]
) -> KVFlowError | None:
    try:
        if isinstance(engine, PeerAddress):
            wanted = await resolver.ranks_at(engine)
        else:
            ticket = resolver.read_ticket(engine)
            await resolver.check_compatible(ticket)
            wanted = resolver.addresses_of(ticket)
            peer = peers.get(first_to_ask(ticket, wanted))
            check_parallelism(ticket, peer, await peers.connect(peer, None))
        for address in wanted:  # one after another; the first failure ends it
            await peers.connect(peers.get(address), None)
    except RuntimeBroken:
        raise
    except KVFlowError as problem:
        return problem
    return None
