"""The producer's side: what the lease book decides, carried out: blocks taken and given back, a timer, handles.

An engine of several ranks serves a request on each of them, under the same id: each rank's lease is its own, and
readers that were given another rank's ticket find it by the request (`find`).

A lease is in the book, and its seal set, before `serve` returns, so a fast reader can never beat it. Whatever ends it
wipes the seal at once; the blocks are given back after the hold (invariant I3). A lease whose blocks cannot be staged
is revoked. Late, duplicate and malformed notifications are counted and change nothing.

Why no read that reports success can touch blocks that were given back: such a read found the seal intact. Either after
its last byte had landed: then the wipe came later, the blocks later still. Or it found the seal at a moment t of the
read, and the whole read took less than half of the hold: the wipe came after t, so the blocks came back a hold after t
at the earliest, when the read had ended (`core.protocol.freshness`). That needs a hold that is never shorter than
promised, so the one timer for all leases, which a loop may round, only has the book look at the clock. Reads that lose
this race may take as long as they like: their memory stays registered, what they see is thrown away, and their load is
LeaseExpired.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from functools import partial

from kvflow import checks
from kvflow.core.plan import topology
from kvflow.core.plan.descriptors import count_block_ids
from kvflow.core.plan.topology import parallelism_of
from kvflow.core.policy.events import DeviceEvent, checked_event, has_happened
from kvflow.core.policy.lease_book import Counted, LeaseBook, LeaseEntry, LeaseTerms
from kvflow.core.policy.states import LeaseEvent
from kvflow.core.protocol import messages
from kvflow.core.protocol.prompts import offered_digest
from kvflow.core.protocol.ticket import RankLease, Ticket
from kvflow.errors import RequestError, UsageError
from kvflow.runtime.clock import Timer
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import LocalRank, blocks_by_group, told_groups
from kvflow.runtime.producer.blocks import HeldBlocks, OfferedBlocks
from kvflow.runtime.producer.lease import Lease, LeaseOutcome, ServeRequest, ServingStatistics, checked_serve_request
from kvflow.runtime.records import LeaseRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    """A lease that is open or holds its blocks: its handle, what it has taken, and who waits for its end."""

    lease: Lease
    held: HeldBlocks
    outcome: asyncio.Future[LeaseOutcome]


class Serving:
    """All open leases of a runtime."""

    def __init__(self, context: RankContext, local: LocalRank, blocks: OfferedBlocks) -> None:
        self._context = context
        self._config = context.config
        self._clock = context.clock
        self._local = local
        self._blocks = blocks
        self._book = LeaseBook(hold_s=context.config.limits.seal_hold_s, lifetime_s=context.config.lease_lifetime_s)
        self._offers: dict[LeaseEntry, _Offer] = {}
        self._timer: Timer | None = None
        self._timer_due_s = math.inf
        self._renewals = 0
        self._outcomes = dict.fromkeys(map(str, LeaseOutcome), 0)
        self._notifications = dict.fromkeys(Counted, 0)
        self.digests = {"digests": 0, "digests_refused": 0}
        """What became of questions for digests; for `digests.DigestAnswers` to count."""
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    @property
    def statistics(self) -> ServingStatistics:
        return ServingStatistics(
            open_leases=len(self._offers),
            renewals=self._renewals,
            late_notifications=self._notifications[Counted.LATE],
            duplicate_notifications=self._notifications[Counted.DUPLICATE],
            malformed_notifications=self._notifications[Counted.MALFORMED],
            **self._outcomes,
            **self.digests,
        )

    @property
    def open_requests(self) -> list[str]:
        """The requests whose leases are open, or hold their blocks still."""
        return [entry.terms.request_id for entry in self._offers]

    def serve(self, request: ServeRequest) -> Lease:
        """Open a lease. Raises RequestError or UsageError, and changes nothing then."""
        request = checked_serve_request(request, self._config)
        if self._config.role == "consumer" and count_block_ids(request.block_ids, self._config.limits.block_ids_max):
            what = f"request {request.request_id!r}: serve_blocks"
            raise UsageError(f"{what}: the role of engine {self._config.engine_id!r} is 'consumer'")
        if self._book.serving(request.request_id) is not None:
            raise RequestError(f"request {request.request_id!r}: it is being served already")
        digest = offered_digest(request.request_id, request.prompt, request.num_tokens)
        lease_id, what = self._context.token_hex(messages.LEASE_ID_CHARS // 2), f"request {request.request_id!r}"
        awaited = None if request.ready is None or has_happened(request.ready, f"{what}: ready") else request.ready
        computed = request.num_tokens if request.computed_tokens is None else request.computed_tokens
        if computed > request.num_tokens:
            raise RequestError(f"{what}: computed_tokens is {computed}, num_tokens is {request.num_tokens}")
        held = self._blocks.take(request.block_ids, request.num_tokens, what, lease_id)
        if len(held.entries):
            self._blocks.advance(held, computed, awaited)
        offered_s = self._clock.now_s()
        ticket = _ticket(self._context, self._local, request, held, digest=digest, now_s=offered_s)
        entry = self._book.open(
            LeaseTerms(
                lease_id=held.lease_id,
                request_id=request.request_id,
                ttl_s=ticket.ttl_s,
                reader_count=request.reader_count,
                holds_blocks=len(held.entries) > 0,
            ),
            offered_s,
        )
        outcome: asyncio.Future[LeaseOutcome] = asyncio.get_running_loop().create_future()
        lease = Lease(
            ticket,
            entry,
            outcome,
            partial(self._end, entry, LeaseEvent.REVOKE),
            partial(self._restart, entry),
            partial(self._advance, entry),
        )
        self._offers[entry] = _Offer(lease, held, outcome)
        self._all_ended.clear()
        self._blocks.open(held, partial(self._not_there, entry))
        if len(held.entries) == 0:
            self._end(entry, LeaseEvent.ALL_READ)  # nothing to read, so nobody will report
        else:
            self._set_timer()
        return lease

    def on_notification(self, payload: bytes) -> None:
        """Take a reader's message: the one way in for what peers say about leases."""
        try:
            if len(payload) > self._config.limits.notification_bytes_max:
                raise messages.WireError(f"{len(payload)} bytes")
            message = messages.decode_notification(payload)
        except messages.WireError as error:
            self._notifications[Counted.MALFORMED] += 1
            logger.info("dropped a notification: %s", error)
            return
        match message:
            case messages.ReadDone():
                self._note_read(message)
            case messages.Renew(lease_ids=lease_ids, reader=reader):
                for lease_id in lease_ids:
                    self._renew(lease_id, reader)

    def find(self, question: messages.LeaseRequest | messages.ReleaseRequest) -> messages.LeaseFound | messages.NoLease:
        """The open lease for a request, if it is of the same blocks and tokens."""
        entry = self._book.serving(question.request_id)
        if entry is None:
            return messages.NoLease(ended=self._book.served(question.request_id))
        offer = self._offers[entry]
        ticket = offer.lease.ticket
        if (ticket.num_tokens, ticket.blocks_digest) != (question.num_tokens, question.blocks_digest):
            return messages.NoLease(ended=True)
        own = ticket.first
        return messages.LeaseFound(
            incarnation=own.incarnation,
            clock_s=self._clock.now_s(),
            expires_s=entry.expires_s,
            lease_id=own.lease_id,
            seal_index=own.seal_index,
            block_ids=own.block_ids,
            more_block_ids=own.more_block_ids,
            pending=offer.held.computed < offer.held.num_tokens,
        )

    def held(self, lease_id: str, request_id: str) -> tuple[Ticket, HeldBlocks] | None:
        """An open lease, for a reader that knows its secret: what its ticket says, and its blocks."""
        entry = self._book.find(lease_id)
        if entry is None or not entry.is_open or entry.terms.request_id != request_id:
            return None
        offer = self._offers[entry]
        return offer.lease.ticket, offer.held

    def serves(self, request_id: str | None) -> bool:
        """Whether there is an open lease for the request."""
        return self._book.serving(request_id) is not None

    def release(self, question: messages.ReleaseRequest) -> messages.Released | messages.NoLease:
        """A reader that is not connected needs a lease's blocks no more. WireError if it cannot be what it says."""
        messages.check_cache_shares(question.cache_shares)
        problems = topology.differences(self._local.cache_shares, question.cache_shares)
        if problems:
            raise messages.WireError("; ".join(problems))
        share = topology.report_share(question.cache_shares, self._local.cache_shares)
        if share.numerator > 0:  # else other readers release it
            lease_id = question.lease_id
            if lease_id is None:
                found = self.find(question)
                if isinstance(found, messages.NoLease):
                    return found
                lease_id = found.lease_id
            self._note_read(messages.ReadDone(lease_id, question.reader, *share))
        return messages.Released(incarnation=self._context.identity.incarnation)

    async def drained(self) -> None:
        """Wait until no lease is open."""
        await self._all_ended.wait()

    def close(self) -> None:
        """Revoke what is still open."""
        for entry in list(self._offers):
            self._end(entry, LeaseEvent.REVOKE)

    def _note_read(self, message: messages.ReadDone) -> None:
        entry = self._book.find(message.lease_id)
        share = (message.numerator, message.denominator)
        counted = self._book.read(message.lease_id, message.reader, share, self._clock.now_s())
        self._notifications[counted] += 1
        if counted is Counted.NOTED and entry is not None and not entry.is_open:
            self._ended(entry)
            self._set_timer()

    def _renew(self, lease_id: str, reader: str) -> None:
        counted = self._book.renew(lease_id, reader, self._clock.now_s())
        self._notifications[counted] += 1
        self._renewals += counted is Counted.NOTED

    def _restart(self, entry: LeaseEntry, ttl_s: float | None) -> None:
        self._book.restart(entry, self._config.lease_ttl_s if ttl_s is None else ttl_s, self._clock.now_s())

    def _advance(self, entry: LeaseEntry, num_tokens: int, ready: DeviceEvent | None) -> None:
        what = f"request {entry.terms.request_id!r}"
        tokens, event = checks.whole(num_tokens, f"{what}: num_tokens", least=0), checked_event(ready, f"{what}: ready")
        awaited = None if event is None or has_happened(event, f"{what}: ready") else event
        if not entry.is_open:
            return
        held = self._offers[entry].held
        if not held.told <= tokens <= held.num_tokens:
            known = f"{held.told} are computed already, {held.num_tokens} are offered"
            raise RequestError(f"{what}: advance() to {tokens} tokens: {known}")
        self._blocks.advance(held, tokens, awaited)
        self._blocks.grow(held)

    def _not_there(self, entry: LeaseEntry, error: BaseException) -> None:
        logger.error(
            "request %s: its blocks cannot be read, its lease is withdrawn", entry.terms.request_id, exc_info=error
        )
        self._end(entry, LeaseEvent.REVOKE)

    def _end(self, entry: LeaseEntry, event: LeaseEvent) -> None:
        """End a lease, unless it has ended."""
        if self._book.end(entry, event, self._clock.now_s()):
            self._ended(entry)
            self._set_timer()

    def _ended(self, entry: LeaseEntry) -> None:
        """The book has ended a lease: its seal is wiped now, its blocks are given back after the hold."""
        self._blocks.close(self._offers[entry].held)
        logger.info("lease %s: offered -> %s", entry.terms.request_id, entry.state)
        if not entry.terms.holds_blocks:
            self._give_back(entry)

    def _set_timer(self) -> None:
        """Have the book looked at when it next has something to do."""
        next_s = self._book.next_s
        if next_s is not None and next_s >= self._timer_due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_due_s = None, math.inf
        if next_s is not None:
            self._timer_due_s = next_s
            self._timer = self._clock.call_later(max(next_s - self._clock.now_s(), 0.0), self._look)

    def _look(self) -> None:
        """The timer: whatever is due by the clock. It may be early, or late."""
        self._timer, self._timer_due_s = None, math.inf
        now_s = self._clock.now_s()
        for entry in self._book.expire(now_s):
            self._ended(entry)
        for entry in self._book.release(now_s):
            self._give_back(entry)
        self._set_timer()

    def _give_back(self, entry: LeaseEntry) -> None:
        """The hold is over."""
        self._blocks.give_back(self._offers[entry].held, partial(self._settle, entry))

    def _settle(self, entry: LeaseEntry) -> None:
        """The blocks are free: wake who awaits the lease, and tell the observers how it has ended."""
        offer, outcome = self._offers.pop(entry), LeaseOutcome(entry.state)
        offer.outcome.set_result(outcome)
        self._outcomes[outcome] += 1
        if self._context.observers.all:
            self._context.observers.lease_ended(self._record(entry, offer.lease.ticket, outcome))
        if not self._offers:
            self._all_ended.set()

    def _record(self, entry: LeaseEntry, ticket: Ticket, outcome: LeaseOutcome) -> LeaseRecord:
        return LeaseRecord(
            engine_id=self._config.engine_id,
            rank=self._context.identity.rank,
            request_id=ticket.request_id,
            outcome=outcome,
            blocks=sum(map(len, ticket.block_tables)),
            blocks_by_group=blocks_by_group(self._local.groups, ticket.block_tables),
            tokens=ticket.num_tokens,
            readers=len(entry.readers),
            seconds={"offered": entry.ended_s - entry.offered_s, "held": self._clock.now_s() - entry.ended_s},
            traceparent=ticket.traceparent,
        )


def _ticket(
    context: RankContext,
    local: LocalRank,
    request: ServeRequest,
    held: HeldBlocks,
    *,
    digest: str,
    now_s: float,
) -> Ticket:
    config, identity = context.config, context.identity
    first, *more = (tuple(ids.tolist()) for ids in held.tables)
    host = [tuple(ids.tolist()) for ids in held.host_tables or ()]
    kinds = parallelism_of(local.cache_shares)
    ttl_s = config.lease_ttl_s if request.ttl_s is None else request.ttl_s
    own = RankLease(
        pp_rank=config.pp_rank,
        tp_rank=config.tp_rank,
        lease_id=held.lease_id,
        seal_index=held.seal_index,
        incarnation=identity.incarnation,
        expires_s=now_s + ttl_s,
        host=identity.host,
        port=identity.port,
        block_ids=host[0] if host else None,
        more_block_ids=tuple(host[1:]),
        pending=len(held.entries) > 0 and held.computed < held.num_tokens,
    )
    return Ticket(
        engine_id=config.engine_id,
        request_id=request.request_id,
        block_ids=first,
        more_block_ids=tuple(more),
        num_tokens=request.num_tokens,
        ttl_s=ttl_s,
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        dp_rank=config.dp_rank,
        block_size=kinds.block_size,
        kv_heads=kinds.kv_heads,
        model_kv_heads=kinds.model_kv_heads,
        more_kinds=kinds.more,
        groups=told_groups(local.groups),
        fixed_ports=config.listen_port > 0,
        ranks=(own,),
        traceparent=request.traceparent,
        prompt_digest=digest,
    )
