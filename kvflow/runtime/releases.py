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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvflow.config import Config
from kvflow.core import wire
from kvflow.core.ticket import RankLease, Ticket
from kvflow.errors import PeerError
from kvflow.runtime.connection import Connection, LocalRank
from kvflow.runtime.peers import Peer, Peers
from kvflow.runtime.sources import Source, Sources, wait_for_all
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
        ranks = self._sources.ranks(ticket)
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                told = await wait_for_all([self._release_one(ticket, peer, named) for peer, named in ranks])
        except TimeoutError:
            logger.warning("request %s: could not tell all of %s in time", ticket.request_id, ticket.engine_id)
            return False
        return len(told) > 0 and all(told)

    async def _release_one(self, ticket: Ticket, peer: Peer, named: RankLease | None) -> bool:
        if named is not None and peer.current is not None and peer.current.incarnation == named.incarnation:
            self._tell(peer.current, named)
            return True
        question = wire.ReleaseRequest(
            reader=self._local.reader,
            target=peer.at.target,
            request_id=ticket.request_id,
            num_tokens=ticket.num_tokens,
            blocks_digest=wire.digest_of(ticket.block_ids),
            lease_id=named.lease_id if named else None,
            holding=self._local.holding,
        )
        try:
            reply = await self._sources.when_served(partial(self._peers.release, peer, question))
        except PeerError as error:
            logger.warning("request %s: could not tell the producer: %s", ticket.request_id, error)
            return False
        if isinstance(reply, wire.NoLease):
            return reply.ended  # then there is nothing to tell
        return named is None or reply.incarnation == named.incarnation

    def _tell(self, connection: Connection, lease: RankLease) -> None:
        if connection.share == 0:
            return  # we hold nothing of what it holds: others tell it
        message = wire.ReadDone(
            lease_id=lease.lease_id, reader=self._local.reader, share=connection.share, whole=connection.whole
        )
        self._transport.notify(connection.agent, wire.encode(message))
