"""Pending tickets: ask the ranks of a pending ticket for their offers, and wait for the answers.

A pending ticket (`Ticket.rendezvous`) names the ranks of an engine, and a request that the engine may not know yet. The
reader connects to each rank that it reads from or reports to, and asks that rank for its offer: one rank first and,
after its answer, the others. All ranks must offer the same. The result is an ordinary ticket with the leases of all
ranks.

A router may send the prompt to another engine than the ticket names, such as another data-parallel rank of the same
server. That engine then notifies the named ranks (`redirect_readers`), and these redirect their waiting readers, once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import msgspec

from kvflow.core.bounds import REASON_CHARS_MAX
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.messages import LeaseAnswerState
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket, read_ticket, too_many_block_ids, with_changes
from kvflow.errors import (
    COMPUTE,
    KVFlowError,
    LeaseExpired,
    LoadError,
    PrefillFailed,
    ProtocolError,
    RequestError,
    RuntimeUnavailable,
)
from kvflow.growing.decline_request import DeclineRequest
from kvflow.growing.late_blocks import LateBlocks
from kvflow.logs import logger_of
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.plan import check_awaited_offer
from kvflow.runtime.load.requests import GivenTicket, LoadReport
from kvflow.runtime.part import PartHost
from kvflow.runtime.peers.peer import Peer, Source, check_parallelism, peer_text
from kvflow.runtime.peers.ticket_resolver import VISITS_AT_ONCE_MAX, lease_from_answer

logger = logger_of(__name__)

ErrorT = TypeVar("ErrorT", bound=LoadError)

_GUESSED_CHARS = 8
"""Names with fewer characters can be guessed within hours, at the questions per second that a side channel answers."""
_EQUAL_FIELDS = ("num_tokens", "block_ids", "extends", "prompt_digest")


_RankOffer: TypeAlias = tuple[Address, messages.Offer, RankLease | None]
"""A rank's address, its offer, and its lease; the lease is None if the offer has no blocks."""


class PendingTickets:
    """Waits for the offers of pending tickets. Makes readers that wait at another engine wait at this engine."""

    def __init__(self, host: PartHost) -> None:
        self._steps = host.steps
        self._peers = host.peers
        self._spawn = host.context.spawn
        self._limits = host.context.config.limits
        self._local = host.context.local
        self._incarnation = host.context.incarnation
        self._lease_answers = host.serving.lease_answers
        self._resolver = host.kvflow_resolver
        self._remote_leases = host.leases
        self._guessable_logged = False

    async def perform(self, load: Load) -> LoadReport:
        """Wait for the offer of the load's pending ticket, then perform the load as usual, and return its report."""
        await self.await_offer_of(load)
        return await self._steps.perform(load)

    async def await_offer_of(self, load: Load) -> None:
        """Wait for the offer of the load's pending ticket, and replace `load.ticket` by a ticket with that offer.

        The offered leases are renewed for the load. If there is no offer, raise PrefillFailed, LeaseExpired, a
        PeerError or RequestError. If the offer does not fit the request, raise PromptMismatch or RequestError.
        """
        load.enter_phase("handshake")
        if len(load.ticket.request_id) < _GUESSED_CHARS and not self._guessable_logged:
            self._guessable_logged = True
            logger.warning(
                "request %r: the name of its pending ticket is short enough to be guessed, and any engine that knows "
                "the name may read the blocks: name it by kvflow.secret_id(...)",
                load.request_id,
            )

        def on_lease(source: Source, ttl_s: float) -> None:
            self._remote_leases.start_renewing(load, ttl_s, source)

        def connected() -> None:
            load.enter_phase(COMPUTE, lambda: "its lease is not opened yet")

        load.ticket = await self.await_offers(load.ticket, on_lease, connected)
        if load.phase == COMPUTE:
            load.enter_phase("handshake")
        if isinstance(load.late_blocks, LateBlocks):
            load.late_blocks.settle(load.ticket)
        check_awaited_offer(self._local.groups, load.request, load.ticket, load.tables)

    async def await_offers(
        self,
        ticket: Ticket,
        on_lease: Callable[[Source, float], None],
        connected: Callable[[], None] | None = None,
    ) -> Ticket:
        """Wait for the offers of a pending ticket. Return an ordinary ticket with these offers.

        The waiting takes at most the `ttl_s` of the pending ticket. For each rank, `connected` is called when the rank
        is connected, before the rank's offer is awaited; `on_lease` is called when the rank has offered a lease, with
        the rank's source and the `ttl_s` of the offer. Cancelling stops the waiting; handshakes that have begun
        continue. Raise PrefillFailed if the engine declines the request, or opens no lease in time; LeaseExpired if the
        lease has ended already, or a rank has restarted; a PeerError, such as PeerNotReady if the engine drains;
        RequestError if the ticket or the offer is invalid.
        """
        give_up_s = asyncio.get_running_loop().time() + ticket.ttl_s
        redirects: list[tuple[Address, bytes]] = []
        try:
            return await self._await_offers_once(ticket, on_lease, connected, give_up_s, redirects)
        except PrefillFailed as error:
            if not redirects:
                raise
            logger.info("%s", error)
        elsewhere = self._redirect_ticket(ticket, *redirects[0])
        return await self._await_offers_once(elsewhere, on_lease, connected, give_up_s, [])

    async def release(self, ticket: Ticket) -> bool:
        """Wait for the offer of a pending ticket, and give its leases back. Return whether an offer came.

        If cancelled, or when the cache is unregistered, stop waiting.
        """
        offered: list[Ticket] = []
        waiting = self._spawn(
            self._await_offer_and_release(ticket, offered), name=f"kvflow-release {ticket.request_id}"
        )
        try:
            await asyncio.wait([waiting])
        finally:
            waiting.cancel()
        return len(offered) > 0

    async def _await_offer_and_release(self, ticket: Ticket, offered: list[Ticket]) -> None:
        """Wait for the offer of a pending ticket, and give its leases back.

        `offered`: list to which this appends the ticket with the offer. It stays empty if there is no offer.
        """
        try:
            notify = self._remote_leases.notify_finished
            offered.append(await self.await_offers(ticket, lambda source, _: notify((source,))))
        except KVFlowError as error:
            logger.info("request %s from %s: nothing to give back: %s", ticket.request_id, ticket.engine_id, error)

    def redirect(self, notice: DeclineRequest) -> messages.Ack:
        """Answer the readers that wait at this rank: the router has sent their request to the sender of `notice`."""
        self._lease_answers.redirect(notice.request_id, notice.reason, notice.instead)
        return messages.Ack(incarnation=self._incarnation)

    def redirect_readers(self, request_id: str, reason: str, at: GivenTicket, instead: GivenTicket | None) -> None:
        """Notify the ranks of the pending ticket `at` that the request came to this engine, or will not be served.

        Start a task that sends the notifications. `instead`: a pending ticket for this engine, given to the readers
        that wait at those ranks. If None, the loads of these readers fail with the text `reason`. RequestError if one
        of the two is no pending ticket of the request `request_id`.
        """
        places = [self._resolver.read_ticket(one) for one in (at, instead) if one is not None]
        for ticket in places:
            if not ticket.awaited or ticket.request_id != request_id:
                what = f"request {request_id!r}: decline: expected a pending ticket of it"
                raise RequestError(f"{what}, got a ticket of {ticket.request_id[:80]!r}")
        awaited, reason = places[0], reason[:REASON_CHARS_MAX]
        params = b"" if instead is None else msgspec.msgpack.encode(places[1].to_params())
        fits = params if len(params) <= messages.REDIRECT_BYTES_MAX else b""
        with contextlib.suppress(RuntimeUnavailable):
            self._spawn(self._send_redirects(awaited, reason, fits), name=f"kvflow-send-on {awaited.request_id}")

    async def _send_redirects(self, awaited: Ticket, reason: str, instead: bytes) -> None:
        """Notify each rank of the pending ticket `awaited`. `instead`: encoded ticket for waiting readers, or empty.

        If a rank cannot be reached, the readers that wait at this rank learn late that the request is served elsewhere,
        or not at all.

        Task `kvflow-send-on <request>`: begun by `decline` of a request with readers that wait at another engine. The
        task ends when each rank of that engine has answered, or has failed to answer within `handshake_timeout_s`.
        """
        room = asyncio.Semaphore(VISITS_AT_ONCE_MAX)

        async def notify_rank(lease: RankLease) -> None:
            at = Address(awaited.engine_id, Rank(awaited.dp_rank, lease.pp_rank, lease.tp_rank), lease.address)
            notice = DeclineRequest(
                reader=self._local.reader,
                target=at,
                request_id=awaited.request_id,
                reason=reason,
                instead=instead,
            )
            async with room:
                try:
                    await self._peers.send(self._peers.get(at), notice)
                except KVFlowError as error:
                    logger.info("request %s: its readers are not redirected: %s", awaited.request_id, error)

        await asyncio.gather(*map(notify_rank, awaited.ranks))

    def _redirect_ticket(self, ticket: Ticket, at: Address, params: bytes) -> Ticket:
        """Return the pending ticket to which the rank `at` redirects readers of `ticket`, decoded from `params`.

        Raise ProtocolError if the decoded ticket is invalid, not pending, or for another request.
        """
        try:
            elsewhere = read_ticket(msgspec.msgpack.decode(params), self._limits.block_ids_max)
        except (msgspec.DecodeError, RecursionError, RequestError) as error:
            raise at.failure(ProtocolError, f"its redirect is not a valid ticket: {error}") from error
        if not elsewhere.awaited or elsewhere.request_id != ticket.request_id:
            raise at.failure(ProtocolError, f"it redirects readers to another request: {elsewhere.request_id!r}")
        return elsewhere

    async def _await_offers_once(
        self,
        ticket: Ticket,
        on_lease: Callable[[Source, float], None],
        connected: Callable[[], None] | None,
        give_up_s: float,
        redirects: list[tuple[Address, bytes]],
    ) -> Ticket:
        """Wait for the offers of the pending ticket, until the time `give_up_s`. Return a ticket with these offers.

        If a rank redirects its readers, append (rank's address, new pending ticket) to `redirects` and raise
        PrefillFailed. Also raise the errors that `await_offers` lists.
        """
        room: dict[Address, tuple[int, ...]] = {}

        async def visit(at: Address) -> _RankOffer | None:
            peer, connection = await self._resolver.connect_rank(ticket, at)
            check_parallelism(ticket, peer, connection)
            if connection.report_share.numerator == 0:
                return None
            if connected is not None:
                connected()
            offer, opened = await self._ask_offer(ticket, peer, give_up_s, redirects)
            if (count := sum(map(len, offer.block_ids))) > (most := self._limits.block_ids_max):
                raise too_many_block_ids(count, most, f"request {ticket.request_id!r}: the offer of {at}")
            lease = None
            if opened is not None:
                lease = lease_from_answer(at, opened)
                tables = lease.block_tables or offer.block_ids
                on_lease(self._resolver.source_from_answer(ticket, peer, connection, lease, tables), offer.ttl_s)
            elif any(offer.block_ids) or offer.extends:
                raise at.failure(ProtocolError, "an offer of blocks without a lease")
            room[at] = connection.num_blocks
            return at, offer, lease

        await self._resolver.check_compatible(ticket)
        offers = await self._resolver.visit_ranks(ticket, visit)
        agreed = self._merge_offers(ticket, [one for one in offers if one is not None])
        for at, counts in room.items():
            if any(total > count for total, count in zip(agreed.block_counts, counts, strict=True)):
                why = f"blocks that it offers in the end: {agreed.block_counts}, but there are {counts}"
                raise at.failure(ProtocolError, why)
        return agreed

    async def _ask_offer(
        self, ticket: Ticket, peer: Peer, give_up_s: float, redirects: list[tuple[Address, bytes]]
    ) -> tuple[messages.Offer, RankLease | None]:
        """Wait for the offer of the rank `peer`. Return the offer and the lease, which is None for an empty offer.

        Raise PrefillFailed if the rank declines the request, redirects its readers, or opens no lease in time, and
        LeaseExpired if the lease has ended.
        """
        question = messages.LeaseRequest(reader=self._local.reader, target=peer.at, request_id=ticket.request_id)
        answer = await self._peers.ask_until_answered(peer, question, give_up_s)
        match answer.state:
            case LeaseAnswerState.FAILED if answer.instead:
                redirects.append((peer.at, answer.instead))
                raise _failure(PrefillFailed, ticket, peer, peer_text(answer.reason))
            case LeaseAnswerState.FAILED:
                raise _failure(
                    PrefillFailed, ticket, peer, f"it will not serve the request: {peer_text(answer.reason)}"
                )
            case LeaseAnswerState.ENDED:
                raise _failure(LeaseExpired, ticket, peer, "its lease has ended: compute the prompt again")
            case LeaseAnswerState.WAITING:
                why = f"it opened no lease for the request in time, {ticket.ttl_s:g} s (the ticket's ttl_s)"
                raise _failure(PrefillFailed, ticket, peer, why)
        if answer.offer is None:
            raise peer.at.failure(ProtocolError, f"a lease that is {answer.state}, without its offer")
        return answer.offer, answer.lease

    def _merge_offers(self, ticket: Ticket, offers: list[_RankOffer]) -> Ticket:
        """Return `ticket` as an ordinary ticket, with the offer that all ranks make and the leases of all ranks.

        Raise ProtocolError if the offers of two ranks differ, or are impossible, and RequestError if there is no offer.
        """
        if not offers:
            raise RequestError(f"ticket of request {ticket.request_id!r}: none of its ranks offers blocks to this rank")
        first_at, first, _ = offers[0]
        for at, other, _ in offers:
            for name in _EQUAL_FIELDS:
                ours, theirs = getattr(first, name), getattr(other, name)
                if ours != theirs:
                    both = f"{first_at.rank} says {str(ours)[:80]}, {at.rank} says {str(theirs)[:80]}"
                    raise at.failure(ProtocolError, f"its ranks offer different things: {name}: {both}")
        leases = {(at.rank.pp, at.rank.tp): lease for at, _, lease in offers if lease is not None}
        ranks = [leases.pop((rank.pp_rank, rank.tp_rank), rank) for rank in ticket.ranks]
        tables = first.block_ids or ((),)
        try:
            offered = with_changes(
                ticket,
                awaited=False,
                block_ids=tables[0],
                more_block_ids=tables[1:],
                num_tokens=first.num_tokens,
                ttl_s=min(offer.ttl_s for _, offer, _ in offers),
                extends=first.extends,
                prompt_digest=first.prompt_digest,
                ranks=(*ranks, *leases.values()),
            )
        except RequestError as error:
            raise first_at.failure(ProtocolError, f"its offer is impossible: {error}") from error
        if (count := offered.block_ids_count) > (most := self._limits.block_ids_max):
            raise too_many_block_ids(count, most, f"request {ticket.request_id!r}: the offer of {first_at}")
        return offered


def _failure(kind: type[ErrorT], ticket: Ticket, peer: Peer, why: str) -> ErrorT:
    what = f"request {ticket.request_id!r} from {peer.label}"
    return kind(f"{what}: {why}", request_id=ticket.request_id, peer=peer.address)
