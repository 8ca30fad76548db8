"""Questions for leases, to ranks that a ticket does not name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket, check_lease
from kvflow.errors import LeaseExpired, PeerError, PrefillFailed, ProtocolError, RequestError
from kvflow.hosts import split_address
from kvflow.runtime.peers.peer import LocalRank, Peer, words
from kvflow.runtime.peers.table import Peers

ResultT = TypeVar("ResultT")

_ASK_AGAIN_FIRST_S, _ASK_AGAIN_MOST_S = 0.002, 0.05


class LeaseQuestions:
    """Asks ranks for their leases. One that has none is asked again for a while: it may open its lease soon."""

    def __init__(self, local: LocalRank, peers: Peers, lease_wait_s: float) -> None:
        self._local = local
        self._peers = peers
        self._lease_wait_s = lease_wait_s

    async def when_served(self, ask: Callable[[], Awaitable[ResultT | messages.NoLease]]) -> ResultT | messages.NoLease:
        """Ask until a rank has the lease. NoLease if that has ended, or is not there after Limits.lease_wait_s."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._lease_wait_s
        pause_s = _ASK_AGAIN_FIRST_S
        while True:
            reply = await ask()
            if not isinstance(reply, messages.NoLease) or reply.ended or loop.time() >= give_up_s:
                return reply
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _ASK_AGAIN_MOST_S)

    async def find(self, ticket: Ticket, peer: Peer, room: asyncio.Semaphore) -> RankLease:
        """Ask a rank that the ticket does not name for its lease. Raises a PeerError, LeaseExpired, PrefillFailed."""
        question = messages.LeaseRequest(
            reader=self._local.reader,
            target=peer.at.target,
            request_id=ticket.request_id,
            num_tokens=ticket.num_tokens,
            blocks_digest=ticket.blocks_digest,
        )

        async def ask() -> messages.LeaseFound | messages.NoLease:
            async with room:
                return await self._peers.find_lease(peer, question)

        reply = await self.when_served(ask)
        if isinstance(reply, messages.NoLease):
            why = "it has ended" if reply.ended else f"none within {self._lease_wait_s} s (limits.lease_wait_s)"
            who = f"{ticket.engine_id!r} ({peer.rank}) at {peer.address}"
            if reply.failed is not None:
                what = f"request {ticket.request_id!r}: {who} will not compute the prompt: {words(reply.failed)}"
                raise PrefillFailed(what, request_id=ticket.request_id, peer=peer.address)
            raise expired(ticket, peer, f"{who} has no lease for it: {why}")
        lease = lease_told(peer.at, reply)
        try:
            check_lease(lease, ticket)
        except RequestError as error:
            raise wrong_lease(peer.at, error) from error
        return lease


def lease_told(at: Address, found: messages.LeaseFound) -> RankLease:
    """The lease in a rank's answer. ProtocolError if it cannot be right."""
    host, port = split_address(at.address, what="peer")
    try:
        return RankLease(
            pp_rank=at.rank.pp,
            tp_rank=at.rank.tp,
            lease_id=found.lease_id,
            seal_index=found.seal_index,
            incarnation=found.incarnation,
            host=host,
            port=port,
            block_ids=found.block_ids,
            more_block_ids=found.more_block_ids,
            pending=found.pending,
            payload=found.payload,
            held=found.held,
        )
    except RequestError as error:
        raise wrong_lease(at, error) from error


def wrong_lease(at: Address, error: RequestError) -> PeerError:
    """Error of a rank that tells of a lease that cannot be right."""
    return at.failure(ProtocolError, f"the lease that it tells of cannot be right: {error}")


def expired(ticket: Ticket, peer: Peer, why: str) -> LeaseExpired:
    what = f"request {ticket.request_id!r}"
    return LeaseExpired(f"{what}: {why}", request_id=ticket.request_id, peer=peer.address)
