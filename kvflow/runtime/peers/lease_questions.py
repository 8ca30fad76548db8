"""The question about a lease, as a reader asks it: until there is something to tell.

A rank answers a `LeaseRequest` once there is something that the reader does not know, or after some seconds. What may
be there later is asked for again: at once after a question that has waited, else after a pause.
"""

from __future__ import annotations

import asyncio

import msgspec

from kvflow.checks import counted, is_name
from kvflow.core.bounds import INCARNATION_CHARS_MAX
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.messages import Told
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket, check_lease
from kvflow.errors import LeaseExpired, PeerError, PrefillFailed, ProtocolError, RequestError
from kvflow.hosts import split_address
from kvflow.runtime.peers.peer import LocalRank, Peer, words
from kvflow.runtime.peers.table import Peers


class LeaseQuestions:
    """Asks ranks about their leases."""

    def __init__(self, local: LocalRank, peers: Peers, lease_wait_s: float) -> None:
        self._local = local
        self._peers = peers
        self._lease_wait_s = lease_wait_s

    async def standing(self, ticket: Ticket, peer: Peer) -> messages.LeaseAnswer:
        """Ask a rank that the ticket does not name about its lease, for `limits.lease_wait_s`. Raises a PeerError.

        The first question does not wait: so few are under way to one rank, whatever the number of its requests.
        """
        self._peers.check_wait(peer, None)
        give_up_s = asyncio.get_running_loop().time() + self._lease_wait_s
        question = messages.LeaseRequest(
            reader=self._local.reader,
            target=peer.at.target,
            request_id=ticket.request_id,
            num_tokens=ticket.num_tokens,
            blocks_digest=ticket.blocks_digest,
        )
        answer = await self._peers.find_lease(peer, question)
        return answer if answer.state is not Told.WAITING else await self._peers.ask_until(peer, question, give_up_s)

    async def find(self, ticket: Ticket, peer: Peer) -> RankLease:
        """Ask a rank that the ticket does not name for its lease. Raises a PeerError, LeaseExpired, PrefillFailed."""
        answer = await self.standing(ticket, peer)
        who = f"{ticket.engine_id!r} ({peer.rank}) at {peer.address}"
        if answer.state is Told.FAILED:
            what = f"request {ticket.request_id!r}: {who} will not compute the prompt: {words(answer.reason)}"
            raise PrefillFailed(what, request_id=ticket.request_id, peer=peer.address)
        if answer.state is Told.WAITING:
            raise expired(
                ticket, peer, f"{who} has no lease for it: none within {self._lease_wait_s} s (limits.lease_wait_s)"
            )
        if answer.state is Told.ENDED or answer.lease is None:
            raise expired(ticket, peer, f"{who} has no lease for it: it has ended")
        lease = lease_told(peer.at, answer.lease)
        try:
            check_lease(lease, ticket)
        except RequestError as error:
            raise wrong_lease(peer.at, error) from error
        return lease


def lease_told(at: Address, lease: RankLease) -> RankLease:
    """Return the lease of a rank's answer, with the rank and address that were asked. ProtocolError if it is none."""
    if not lease.lease_id or not is_name(lease.incarnation, INCARNATION_CHARS_MAX):
        what = f"lease_id of {counted(len(lease.lease_id), 'character')}, incarnation {words(lease.incarnation, 80)!r}"
        raise at.failure(ProtocolError, f"the lease that it tells of cannot be right: {what}")
    host, port = split_address(at.address, what="peer")
    place = {"pp_rank": at.rank.pp, "tp_rank": at.rank.tp, "host": host, "port": port}
    return msgspec.structs.replace(lease, **place)


def wrong_lease(at: Address, error: RequestError) -> PeerError:
    """Error of a rank that tells of a lease that cannot be right."""
    return at.failure(ProtocolError, f"the lease that it tells of cannot be right: {error}")


def expired(ticket: Ticket, peer: Peer, why: str) -> LeaseExpired:
    what = f"request {ticket.request_id!r}"
    return LeaseExpired(f"{what}: {why}", request_id=ticket.request_id, peer=peer.address)
