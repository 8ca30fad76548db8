"""Tells producers that their blocks are needed no more: after a read, and instead of one.

A request whose blocks were all cached, or that was rejected before its decode started, gives its lease back without a
read. Where there is a connection that is a notification, as after a read; elsewhere one question on the side
channel: nothing is exchanged to read with, and the transport never hears of the peer. The rank works out itself what
share of the lease such a reader answers for.

What a ticket says of its engine is believed step by step here, too: one rank is told, and the others only if that one
holds a lease for the ticket's request, or held one.

All of it is best effort: a lease of which nobody says that it is done runs out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvflow.config import Config
from kvflow.core.protocol import messages
from kvflow.core.protocol.ticket import RankLease, Ticket
from kvflow.errors import Overloaded, PeerError
from kvflow.runtime.peers.link import Address, Connection, LocalRank
from kvflow.runtime.peers.reach import DIALS_AT_ONCE_MAX, Source, Sources, check_cut, first_to_ask, wait_for_all
from kvflow.runtime.peers.table import Peers
from kvflow.transport.base import Transport

logger = logging.getLogger(__name__)


class Releases:
    """Gives leases back to their producers."""

    def __init__(
        self, config: Config, *, local: LocalRank, sources: Sources, peers: Peers, transport: Transport
    ) -> None:
        self._config = config
        self._local = local
        self._sources = sources
        self._peers = peers
        self._transport = transport

    def tell(self, sources: Sequence[Source]) -> None:
        """Tell every rank that holds a lease for us that we have read, also those that nothing was read from."""
        for source in sources:
            self._tell(source.connection, source.lease)

    async def release(self, given: Ticket | Mapping[str, Any]) -> bool:
        """Give a ticket's leases back unread; whether every rank that holds one was told.

        Takes Config.handshake_timeout_s at most. RequestError if the ticket cannot be right, or a rank's address cannot
        be known. Cancelling stops it; some ranks may have been told then.
        """
        ticket = self._sources.read(given)
        if not ticket.block_ids:
            return True  # its leases ended when they were made
        ranks = self._sources.whereabouts(ticket)
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                return len(ranks) > 0 and await self._release_all(ticket, ranks)
        except TimeoutError:
            what = f"request {ticket.request_id!r} from {ticket.engine_id!r}"
            bound_s = self._config.handshake_timeout_s
            logger.warning("%s: could not tell all of its ranks within %s s that it is not needed", what, bound_s)
            return False

    async def _release_all(self, ticket: Ticket, ranks: Sequence[Address]) -> bool:
        """Tell one rank, then the others, a few at a time; none any more once one could not be told."""
        first = first_to_ask(ticket, ranks)
        room = asyncio.Semaphore(DIALS_AT_ONCE_MAX)
        reached = await self._try_one(ticket, first)

        async def one(at: Address) -> bool:
            nonlocal reached
            async with room:
                told = reached and await self._try_one(ticket, at)
            reached = reached and told
            return told

        return reached and all(await wait_for_all([one(at) for at in ranks if at != first]))

    async def _try_one(self, ticket: Ticket, at: Address) -> bool:
        """Whether a rank was told. One that could not be is logged."""
        try:
            return await self._release_one(ticket, at)
        except (PeerError, Overloaded) as error:
            problem = error.of_request(ticket.request_id, ticket.engine_id)
            logger.warning("a lease could not be given back: %s", problem)
            return False

    async def _release_one(self, ticket: Ticket, at: Address) -> bool:
        named = ticket.find(at.rank)
        lease = named if named is not None and named.lease_id else None
        peer = self._peers.get(*at)
        if peer.current is not None:
            check_cut(ticket, peer, peer.current)
            if lease is not None and peer.current.incarnation == lease.incarnation:
                self._tell(peer.current, lease)
                return True
        question = messages.ReleaseRequest(
            reader=self._local.reader,
            target=at.target,
            request_id=ticket.request_id,
            num_tokens=ticket.num_tokens,
            blocks_digest=ticket.blocks_digest,
            lease_id=lease.lease_id if lease else None,
            cache_share=self._local.cache_share,
        )
        reply = await self._sources.when_served(partial(self._peers.release, peer, question))
        if isinstance(reply, messages.NoLease):
            return reply.ended  # then there is nothing to tell
        return lease is None or reply.incarnation == lease.incarnation

    def _tell(self, connection: Connection, lease: RankLease) -> None:
        if connection.share == 0:
            return  # we hold nothing of what it holds: others tell it
        message = messages.ReadDone(
            lease_id=lease.lease_id, reader=self._local.reader, share=connection.share, whole=connection.whole
        )
        self._transport.notify(connection.agent, messages.encode(message))
