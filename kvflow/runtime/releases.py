"""Tells producers that their blocks are needed no more: after a read, and instead of one.

A request whose blocks were all cached, or that was rejected before its decode started, gives its lease back without a
read. Where there is a connection that is a notification, as after a read; elsewhere one question on the side
channel: nothing is exchanged to read with, and the transport never hears of the peer. The rank works out itself what
share of the lease such a reader answers for.

All of it is best effort: a lease of which nobody says that it is done runs out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvflow.config import Config
from kvflow.core import wire
from kvflow.core.ticket import RankLease, Ticket
from kvflow.errors import LeaseExpired, PeerError
from kvflow.runtime.connection import Connection
from kvflow.runtime.peers import Peer, Peers
from kvflow.runtime.sources import Source, Sources, wait_for_all
from kvflow.transport.base import Transport

logger = logging.getLogger(__name__)


class Releases:
    """Gives leases back to their producers."""

    def __init__(self, config: Config, *, reader: str, sources: Sources, peers: Peers, transport: Transport) -> None:
        self._config = config
        self._reader = reader
        self._sources = sources
        self._peers = peers
        self._transport = transport

    def tell(self, sources: Sequence[Source]) -> None:
        """Tell every rank that holds a lease for us that we have read, also those that nothing was read from."""
        for source in sources:
            self._tell(source.connection, source.lease)

    async def release(self, ticket: Ticket) -> bool:
        """Give a checked ticket's leases back unread; whether every rank that holds one was told.

        Takes Config.handshake_timeout_s at most. RequestError if a rank's address cannot be known. Cancelling stops it;
        some ranks may have been told then.
        """
        if not ticket.block_ids:
            return True  # its leases ended when they were made
        ranks = self._sources.ranks(ticket)
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                told = await wait_for_all([self._release_one(ticket, peer, named) for peer, named in ranks])
        except TimeoutError:
            logger.warning("request %s: could not tell all of %s in time", ticket.request_id, ticket.engine_id)
            return False
        return len(told) > 0 and all(told)

    async def _release_one(self, ticket: Ticket, peer: Peer, named: RankLease | None) -> bool:
        try:
            lease = named or await self._sources.ask_for_lease(ticket, peer)
            if peer.current is not None and peer.current.incarnation == lease.incarnation:
                self._tell(peer.current, lease)
                return True
            return await self._peers.release(peer, lease.lease_id) == lease.incarnation
        except (PeerError, LeaseExpired) as error:
            logger.warning("request %s: could not tell the producer: %s", ticket.request_id, error)
            return False

    def _tell(self, connection: Connection, lease: RankLease) -> None:
        if connection.share == 0:
            return  # we hold nothing of what it holds: others tell it
        message = wire.ReadDone(
            lease_id=lease.lease_id, reader=self._reader, share=connection.share, whole=connection.whole
        )
        self._transport.notify(connection.agent, wire.encode(message))
