"""Leases that other engines hold open for this rank: renewed while they are needed, then given back.

*Renewing*: one notification per peer names the leases that are still needed. The first renewal is sent at most 0.25 s
after a lease is needed, the next ones every third of the lease's ttl, so two renewals in a row may be lost. Most loads
end before the first renewal. An engine with vLLM's own NixlConnector gets heartbeats instead
(`Connection.lease_notifier`).

*Giving back* a lease means to notify its rank, after a read or instead of a read: all blocks of a request may be cached
already, or the request may be rejected before decode. A rank to which the transport is not connected gets one question
on the side channel instead, from which it computes the share of the lease that the reader reports.

Both are best effort: the seal says whether a lease was open during a read (`core.protocol.proof`), and a lease that is
not given back expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvflow.core.protocol import codec, messages, notifications
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.notifications import ReadDone, Renew, join_read_done, leases_max
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    CacheUnregistered,
    KVFlowError,
    Overloaded,
    PeerError,
    PeerUnreachable,
    RuntimeUnavailable,
    UsageError,
)
from kvflow.logs import logger_of
from kvflow.runtime.clock import Alarm
from kvflow.runtime.optional import OptionalParts, PendingTickets
from kvflow.runtime.peers.peer import Resolver, Source, check_parallelism
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.peers.ticket_resolver import TicketResolver, lease_from_answer
from kvflow.runtime.rank import RankContext
from kvflow.transport.base import AgentName, Transport

logger = logger_of(__name__)

_PAUSE_LEAST_S = 0.01  # between renewals, whatever ttl a ticket has
_FIRST_RENEWAL_AFTER_S = 0.25  # most loads have ended by then, and renew nothing; soon, since a ticket may be old


@dataclass(slots=True)
class _RenewedLease:
    """A lease of another engine that this rank renews every `pause_s` seconds, next at the time `due_s`."""

    source: Source
    pause_s: float
    due_s: float


class KeptLeases:
    """The leases of a ticket, while `Runtime.keep_leases` renews them."""

    def __init__(self) -> None:
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def opened(self) -> None:
        """Wait until the producer has opened the leases: of a pending ticket, until the prompt is offered.

        An engine can wait with this before it takes blocks for the request. Cancelling stops only the waiting.

        Raises:
            LoadError: no lease will be opened (PrefillFailed), or it has ended (LeaseExpired).
            PeerError: the producer cannot be asked.
            RequestError: the ticket or the offer is impossible.
            CacheUnregistered: the registration of the cache has ended before.
            UsageError: the `with` body of `keep_leases` has ended before.
        """
        await asyncio.shield(self._opened)

    def note_opened(self) -> None:
        """Only for `RemoteLeases`: end the wait of `opened`. No effect if it has ended."""
        if not self._opened.done():
            self._opened.set_result(None)

    def fail(self, error: KVFlowError) -> None:
        """Only for `RemoteLeases`: make `opened` raise `error`. No effect if the wait has ended."""
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # mark it as retrieved: most callers only load


class LeaseIdNotifier:
    """Sends notifications to producers that run kvflow: this rank still needs leases, or has finished with them.

    A notification names leases by their ids.
    """

    heartbeat_s: float | None = None

    def __init__(self, transport: Transport, reader: str) -> None:
        self._transport = transport
        self._reader = reader
        self._batch_max = leases_max(self._reader, notifications.NOTIFICATION_BYTES_MAX)
        self._join = partial(join_read_done, lease_ids_max=self._batch_max)

    def notify_needed(self, sources: Sequence[Source]) -> int:
        """Notify a producer's rank that the leases of `sources`, all at that rank, are still needed.

        Return the number of leases.
        """
        agent = sources[0].connection.agent
        lease_ids = tuple(dict.fromkeys(source.lease.lease_id for source in sources))
        for start in range(0, len(lease_ids), self._batch_max):
            message = Renew(lease_ids=lease_ids[start : start + self._batch_max], reader=self._reader)
            self._transport.notify(agent, codec.encode(message))
        return len(lease_ids)

    def notify_read(self, source: Source) -> None:
        """Notify the rank of `source` that this rank has finished with the lease of `source`, read or not."""
        self.report_read(source.connection.agent, source.lease.lease_id, *source.connection.report_share)

    def report_read(self, agent: AgentName, lease_id: str, numerator: int, denominator: int) -> None:
        """Notify the peer `agent` that this rank has finished with its share of a lease, `numerator` / `denominator`.

        The shares of all ranks of a reader add up to 1. If this rank's share is 0, do nothing.
        """
        if numerator > 0:  # else other ranks report it
            message = ReadDone(lease_ids=(lease_id,), reader=self._reader, numerator=numerator, denominator=denominator)
            self._transport.notify(agent, codec.encode(message), self._join)


def warn_if_never_entered(entered: Sequence[bool], request_id: str) -> None:
    """Log a warning if a context manager of `keep_leases` was dropped without being entered (`entered` is empty)."""
    if not entered:
        logger.warning(
            "request %r: keep_leases() was called without `with`, so nothing renews its leases: write "
            "`with runtime.keep_leases(ticket):`",
            request_id,
        )


class RemoteLeases:
    """Renews the leases on other engines that this rank needs, and gives back leases that it does not need."""

    def __init__(
        self,
        context: RankContext,
        peers: Peers,
        resolver: Resolver,
        kvflow_resolver: TicketResolver,
        notifier: LeaseIdNotifier,
        optional: OptionalParts,
    ) -> None:
        """`resolver` resolves any ticket, `kvflow_resolver` the tickets of kvflow engines."""
        self._config = context.config
        self._local = context.local
        self._clock = context.clock
        self._spawn = context.spawn
        self._peers = peers
        self._resolver = resolver
        self._kvflow_resolver = kvflow_resolver
        self._notifier = notifier
        self._optional = optional
        self._renewed: dict[object, list[_RenewedLease]] = {}
        self._alarm = Alarm(context.clock, self._renew)
        self._closed = False
        self.renewals_sent = 0
        """Number of renewals sent; one notification may renew several leases."""

    def start_renewing(self, owner: object, ttl_s: float, source: Source) -> None:
        """Renew the lease of `source` regularly until `stop_renewing(owner)` is called.

        `owner`: any object as a key, such as the load. `ttl_s`: time to live of the lease.
        """
        now_s, pause_s = self._clock.now_s(), source.connection.lease_notifier.heartbeat_s
        if pause_s is None:
            pause_s = max(ttl_s / 3, _PAUSE_LEAST_S)
            due_s = now_s + min(pause_s, _FIRST_RENEWAL_AFTER_S)
        else:
            due_s = now_s + pause_s
        self._renewed.setdefault(owner, []).append(_RenewedLease(source, pause_s, due_s))
        source.peer.leases_kept += 1
        if due_s < self._alarm.due_s and not self._closed:
            self._alarm.set(due_s)

    def stop_renewing(self, owner: object) -> None:
        """Stop renewing all leases for which `start_renewing` was called with `owner`."""
        for kept in self._renewed.pop(owner, ()):
            kept.source.peer.leases_kept -= 1

    @contextmanager
    def renewing(self, ticket: Ticket) -> Iterator[KeptLeases]:
        """Renew the leases of a checked ticket until the `with` block ends, for a request that waits for its load.

        A task also connects the ticket's ranks. If a lease cannot be renewed, nothing is raised here, but the request's
        load will fail. RuntimeClosed if the runtime is closed.
        """
        kept, owner = KeptLeases(), object()
        if ticket.offers_nothing:
            kept.note_opened()
            yield kept  # an empty offer: its leases have ended already
            return
        task = self._spawn(self._renew_until_cancelled(owner, ticket, kept), name=f"kvflow-keep {ticket.request_id}")
        over = CacheUnregistered(f"request {ticket.request_id!r}: its leases were not open before the cache's end")
        task.add_done_callback(lambda _: kept.fail(over))
        try:
            yield kept
        finally:
            task.cancel()
            self.stop_renewing(owner)
            kept.fail(UsageError(f"request {ticket.request_id!r}: keep_leases: its `with` body has ended"))

    def notify_finished(self, sources: Sequence[Source]) -> None:
        """Notify the producer rank of each source that this reader no longer needs the source's lease, read or not."""
        for source in sources:
            source.connection.lease_notifier.notify_read(source)

    async def release(self, given: Ticket | Mapping[str, Any]) -> bool:
        """Give back all leases of a ticket without reading them, for `Runtime.release_blocks`.

        First notify one rank. If that rank has, or had, a lease for the ticket's request, notify the others too. Return
        True if every rank that holds a lease was notified. RequestError if the ticket is invalid, or the address of a
        rank cannot be known.
        """
        ticket, problems = self._resolver.read_ticket(given), list[KVFlowError]()
        notified = await self._release(ticket, problems)
        for problem in problems:
            logger.warning("lease not given back: %s", problem)
        return notified

    def release_soon(self, ticket: Ticket) -> None:
        """Start a task that gives the leases of `ticket` back. Errors are logged or dropped.

        If a rank cannot be reached, try again later, as long as the rank's lease may be open.
        """
        give_up_s = self._clock.now_s() + min(ticket.ttl_s, self._config.lease_lifetime_s)
        self._begin_release(ticket, give_up_s, 0.0)

    def _begin_release(self, ticket: Ticket, give_up_s: float, paused_s: float) -> None:
        """Start a task that gives the leases of a ticket back.

        `give_up_s`: time after which there is no further attempt. `paused_s`: seconds of the pause before this attempt,
        from which the next pause is computed; 0 for the first attempt.
        """
        with contextlib.suppress(RuntimeUnavailable):
            work = self._release_with_retries(ticket, give_up_s, paused_s)
            self._spawn(work, name=f"kvflow-release {ticket.request_id}")

    async def _release_with_retries(self, ticket: Ticket, give_up_s: float, paused_s: float) -> None:
        """Give the leases of `ticket` back. If a rank cannot be reached, try again after a pause, until `give_up_s`.

        Task `kvflow-release <request>`: begun by `release_blocks` of a pending ticket, and for each ticket that a load
        of several tickets, or a search for a prefix, does not need. It ends when the leases are given back. If a rank
        cannot be reached, another such task tries again later.
        """
        limits, problems = self._config.limits, list[KVFlowError]()
        try:
            await self._release(ticket, problems)
        except KVFlowError:
            return
        for problem in problems:
            logger.log(logging.DEBUG if paused_s else logging.WARNING, "lease not given back: %s", problem)
        waits_s = [one.retry_after_s or 0.0 for one in problems if isinstance(one, PeerError) and one.retryable]
        pause_s = max([min(2 * paused_s, limits.peer_backoff_max_s), limits.peer_backoff_first_s, *waits_s])
        if waits_s and self._clock.now_s() + pause_s < give_up_s:
            self._clock.call_later(pause_s, partial(self._begin_release, ticket, give_up_s, pause_s))

    async def _release(self, ticket: Ticket, problems: list[KVFlowError]) -> bool:
        """Give the leases of a checked ticket back. Return whether every rank that holds a lease was notified.

        If not, append the errors that say why to `problems`.
        """
        bound_s = self._config.handshake_timeout_s + self._opens_within_s(ticket)
        try:
            async with asyncio.timeout(bound_s):
                if ticket.awaited:
                    return await self._pending_tickets(ticket).release(ticket)
                return await self._release_offered(ticket, problems)
        except TimeoutError:
            why = f"leases of all its ranks not given back within {bound_s} s"
            problem = PeerUnreachable(why, peer=ticket.address, engine_id=ticket.engine_id)
            problems.append(problem.of_request(ticket.request_id, ticket.engine_id))
            return False

    def _pending_tickets(self, ticket: Ticket) -> PendingTickets:
        """Return what waits for the offer of a pending ticket."""
        return self._optional.growing(f"request {ticket.request_id!r}: a pending ticket").pending_tickets

    def _opens_within_s(self, ticket: Ticket) -> float:
        """Return how many seconds the lease of a pending ticket may take to be opened; 0 for other tickets."""
        return min(ticket.ttl_s, self._config.lease_lifetime_s) if ticket.awaited else 0.0

    async def _release_offered(self, ticket: Ticket, problems: list[KVFlowError]) -> bool:
        if ticket.offers_nothing:
            return True  # an empty offer: its leases have ended already
        if not ticket.leases_can_be_asked:
            return await self._release_by_notification(ticket, problems)
        notified = True

        async def visit(at: Address) -> bool:
            nonlocal notified
            try:
                released = await self._release_one(ticket, at) if notified else False
                notified = notified and released  # another visit may have failed meanwhile
            except (PeerError, Overloaded) as error:
                problems.append(error.of_request(ticket.request_id, ticket.engine_id))
                notified = False
            return notified

        return len(await self._kvflow_resolver.visit_ranks(ticket, visit)) > 0 and notified

    async def _release_by_notification(self, ticket: Ticket, problems: list[KVFlowError]) -> bool:
        try:
            self.notify_finished(await self._resolver.resolve(ticket, lambda _: None))
        except KVFlowError as error:
            problems.append(error)
            return False
        return True

    def close(self) -> None:
        """Stop all renewals for good. After this, `start_renewing` renews nothing."""
        self._closed = True
        self._alarm.set(math.inf)

    async def _renew_until_cancelled(self, owner: object, ticket: Ticket, kept: KeptLeases) -> None:
        """Look up the leases of a ticket, and renew them until the task is cancelled. Tell `kept` once they are open.

        Task `kvflow-keep <request>`: begun by `keep_leases`, and by pulls and loads of several tickets for the tickets
        that they may read next. It ends when these no longer need the leases.
        """
        bound_s = self._config.load_deadline_s + self._opens_within_s(ticket)
        try:
            async with asyncio.timeout(bound_s):
                if ticket.awaited:
                    ticket = await self._pending_tickets(ticket).await_offers(
                        ticket, lambda source, ttl_s: self.start_renewing(owner, ttl_s, source)
                    )
                    kept.note_opened()
                await self._resolver.resolve(ticket, partial(self.start_renewing, owner, ticket.ttl_s))
            kept.note_opened()
            await asyncio.get_running_loop().create_future()
        except (KVFlowError, TimeoutError) as error:
            what = f"request {ticket.request_id} from {ticket.engine_id}: its leases could not be kept"
            late = PeerUnreachable(
                f"{what}: not found within {bound_s} s", peer=ticket.address, engine_id=ticket.engine_id
            )
            kept.fail(error if isinstance(error, KVFlowError) else late)
            logger.info("%s: %s", what, error or f"not found within {bound_s} s")
        finally:
            self.stop_renewing(owner)  # once more: a lease may be found while the task ends

    def _renew(self) -> None:
        """Callback of `_alarm`: renew the leases that are due now or soon, with few notifications to each peer."""
        now_s = self._clock.now_s()
        due: dict[AgentName, list[Source]] = {}
        for kept in (kept for leases in self._renewed.values() for kept in leases):
            if kept.due_s - kept.pause_s / 2 <= now_s:
                due.setdefault(kept.source.connection.agent, []).append(kept.source)
                kept.source.peer.last_used_s = now_s  # the peer is not idle, so its connection stays
                kept.due_s = now_s + kept.pause_s
        for sources in due.values():
            self.renewals_sent += sources[0].connection.lease_notifier.notify_needed(sources)
        self._alarm.set(min((kept.due_s for leases in self._renewed.values() for kept in leases), default=math.inf))

    async def _release_one(self, ticket: Ticket, at: Address) -> bool:
        """Give back the lease of `ticket` at the rank `at`. PeerError or Overloaded if the rank cannot be asked.

        Return True if the rank was notified, or if the lease had ended already.
        """
        named, local = ticket.find(at.rank), self._local
        lease = named if named is not None and named.lease_id else None
        peer = self._peers.get(at)
        if peer.connection is not None:
            check_parallelism(ticket, peer, peer.connection)
            if lease is not None and peer.connection.incarnation == lease.incarnation:
                self._notifier.report_read(peer.connection.agent, lease.lease_id, *peer.connection.report_share)
                return True
        if lease is None:
            answer = await self._kvflow_resolver.ask_about_lease(ticket, peer)
            if answer.lease is None:
                return answer.state is not messages.LeaseAnswerState.WAITING  # it has ended: nothing to release
            lease = lease_from_answer(at, answer.lease)
        question = messages.ReleaseRequest(
            reader=local.reader,
            target=at,
            lease_id=lease.lease_id,
            cache_shares=local.cache_shares,
        )
        return (await self._peers.send(peer, question)).incarnation == lease.incarnation
