"""Serving: carries out the lease book's decisions: takes and gives back blocks, has the timer, makes handles.

An engine of several ranks serves a request on each of them, under the same id: each rank's lease is its own, and
readers that were given another rank's ticket find it by the request (`find`).

A lease is in the book, and its seal set, before `serve` returns, so a fast reader can never beat it. Whatever ends it
wipes the seal at once; the blocks are given back after the hold (invariant I3). A lease whose blocks cannot be staged
has failed. Late, duplicate and malformed notifications are counted and change nothing.

No read that reports success can touch blocks that were given back, because it has found the seal intact:
- either after its last byte had landed: then the wipe came later, and the blocks came back later still;
- or at a moment t of the read, and the whole read took less than half of the hold: the wipe came after t, so the blocks
  came back a hold after t at the earliest, when the read had ended (`core.protocol.proof`). Readers of a lease without
  a hold, which says so, look after the last byte only.
The second way needs a hold that is never shorter than promised. A loop may round timers, so the one timer for all
leases only has the book look at the clock. A read that loses this race may take any time: its memory stays registered,
its bytes are thrown away, and its load is LeaseExpired.
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.bounds import LEASE_ID_CHARS
from kvflow.core.plan import topology
from kvflow.core.plan.topology import parallelism_of
from kvflow.core.policy.events import has_happened
from kvflow.core.policy.history import History
from kvflow.core.policy.lease_book import Counted, LeaseBook, LeaseEntry
from kvflow.core.policy.states import LeaseEvent, LeaseState
from kvflow.core.protocol import codec, messages, notifications
from kvflow.core.protocol.claims import check_cache_shares
from kvflow.core.protocol.notifications import ReadDone, Renew
from kvflow.core.protocol.prompts import offered_digest
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError, UsageError
from kvflow.logs import logger_of
from kvflow.parts import part
from kvflow.runtime.clock import Alarm
from kvflow.runtime.peers.peer import blocks_by_group, told_groups
from kvflow.runtime.producer.blocks import HeldBlocks, OfferedBlocks
from kvflow.runtime.producer.lease import Lease, LeaseOutcome, OpenLease, ServeRequest, ServingStatistics
from kvflow.runtime.producer.lease_answers import LeaseAnswers
from kvflow.runtime.records import LeaseRecord

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache

logger = logger_of(__name__)

INTRODUCTION = "introduction"
"""Request id of introductions."""


class Serving:
    """All open leases of a runtime."""

    def __init__(self, cache: RegisteredCache) -> None:
        """Nothing of it refers to the cache: handles of leases lead to it, and must not keep tensors."""
        config = cache.config
        self._config = config
        self._rank = cache.rank
        self._incarnation = cache.incarnation
        self._clock = cache.clock
        self._observers = cache.observers
        self._token_hex = cache.token_hex
        self._local = cache.local
        self._blocks = OfferedBlocks(cache)
        self._book = LeaseBook(hold_s=config.limits.seal_hold_s, lifetime_s=config.lease_lifetime_s)
        self._offers: dict[LeaseEntry, OpenLease] = {}
        self._alarm = Alarm(cache.clock, self._look)
        self._renewals = 0
        self._outcomes = dict.fromkeys(map(str, LeaseOutcome), 0)
        self._notifications = dict.fromkeys(Counted, 0)
        self.digests = {"digests": 0, "digests_refused": 0}
        """Questions for digests by their end; counted by `verify.Verifying`."""
        self._late_reads = 0
        self.news = LeaseAnswers(cache.clock, cache.incarnation, self.open_lease, self._book.served)
        self._growing: Any = None
        """The part that leases grow by, once it was asked for."""
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._lease_facts = _lease_facts(cache)
        self._ticket_facts = _ticket_facts(cache)
        """Fields that are equal in all tickets of this rank, found once."""

    @property
    def statistics(self) -> ServingStatistics:
        return ServingStatistics(
            open_leases=len(self._offers),
            renewals=self._renewals,
            late_notifications=self._notifications[Counted.LATE],
            duplicate_notifications=self._notifications[Counted.DUPLICATE],
            malformed_notifications=self._notifications[Counted.MALFORMED],
            late_reads=self._late_reads,
            **self._outcomes,
            **self.digests,
        )

    @property
    def open_requests(self) -> list[str]:
        """Requests whose leases are open, or still hold their blocks."""
        return [entry.request_id for entry in self._offers]

    def serve(self, request: ServeRequest, *, holds: bool = True, alone: bool = False) -> Lease:
        """Open a lease. Raises RequestError or UsageError, and changes nothing then.

        `holds`: its blocks are held for a moment after its end. `alone`: exactly one reader rank will read this lease.
        """
        ids_max = self._config.limits.block_ids_max
        request = checks.settled_request(request, ServeRequest, "serve_blocks", ids_max)
        if self._config.role == "consumer" and checks.count_block_ids(request.block_ids, ids_max):
            what = f"request {request.request_id!r}: serve_blocks"
            raise UsageError(f"{what}: the role of engine {self._config.engine_id!r} is 'consumer'")
        if self._book.serving(request.request_id) is not None:
            raise RequestError(f"request {request.request_id!r}: it is being served already")
        prompt = request.prompt
        digest = "" if prompt is None else offered_digest(request.request_id, prompt, request.num_tokens)
        held = self._take(request)
        offered_s = self._clock.now_s()
        if held.computed < held.num_tokens:
            held.history = History(self._clock.now_s, offered_s)
        ticket = self._make_ticket(request, held, digest, holds)
        entry = self._book.open(
            held.lease_id,
            request.request_id,
            offered_s,
            ttl_s=ticket.ttl_s,
            reader_count=0 if alone else request.reader_count,
            holds_blocks=holds and (len(held.entries) > 0 or held.extends),
        )
        outcome: asyncio.Future[LeaseOutcome] = asyncio.get_running_loop().create_future()
        payload = None if request.payload else b""
        opened = self._offers[entry] = OpenLease(entry, ticket, held, outcome, payload)
        self._all_ended.clear()
        held.on_error = partial(self._not_there, entry)
        self._blocks.grow(held)
        held.on_there = partial(self.news.tell, request.request_id)
        nothing = len(held.entries) == 0 and not held.extends and not request.payload
        self.news.opened(opened, nothing=nothing)
        if nothing:
            self._end(entry, "all_read")  # nobody will report a read
        elif entry.expires_s < self._alarm.due_s:
            self._alarm.set(entry.expires_s)
        return Lease(opened, self)

    def introduce(self) -> Ticket:
        """See `Runtime.introduce`."""
        return Ticket(
            **self._ticket_facts,
            request_id=INTRODUCTION,
            block_ids=(),
            more_block_ids=((),) * (len(self._local.groups) - 1),
            num_tokens=0,
            ttl_s=self._config.lease_ttl_s,
            ranks=(RankLease(**self._lease_facts, lease_id="", seal_index=0),),
            traceparent="",
            prompt_digest="",
        )

    def _make_ticket(self, request: ServeRequest, held: HeldBlocks, digest: str, holds: bool) -> Ticket:
        """Make the ticket of a lease that is about to be opened."""
        first, *more = map(np.ndarray.tolist, held.tables)
        host = [*map(np.ndarray.tolist, held.host_tables or ())]
        ttl_s, extends = request.ttl_s, request.extends or held.extends
        own = self._lease_facts | {
            "lease_id": held.lease_id,
            "seal_index": held.seal_index,
            "block_ids": host[0] if host else None,
            "more_block_ids": host[1:],
            "pending": (len(held.entries) > 0 and held.computed < held.num_tokens) or extends,
            "payload": request.payload,
            "held": holds,
        }
        offer = {
            "request_id": request.request_id,
            "block_ids": first,
            "more_block_ids": more,
            "num_tokens": request.num_tokens,
            "ttl_s": self._config.lease_ttl_s if ttl_s is None else ttl_s,
            "ranks": (own,),
            "traceparent": request.traceparent,
            "prompt_digest": digest,
            "extends": extends,
        }
        made: Ticket = msgspec.convert(self._ticket_facts | offer, Ticket)
        return made

    def _take(self, request: ServeRequest) -> HeldBlocks:
        """Take the blocks and the seal of a lease. Raises RequestError, and changes nothing then."""
        what, tokens, computed = f"request {request.request_id!r}", request.num_tokens, request.computed_tokens
        ready, lease_id = request.ready, self._token_hex(LEASE_ID_CHARS // 2)
        awaited = None if ready is None or has_happened(ready, f"{what}: ready") else ready
        extends = request.extends
        if computed is None and extends:
            raise RequestError(f"{what}: extends: computed_tokens has to say how many there are of {tokens}")
        if computed is not None:
            if computed > tokens:
                raise RequestError(f"{what}: computed_tokens is {computed}, num_tokens is {tokens}")
            extends = extends or self._blocks.extends(request.block_ids, tokens, what)
        if request.payload or extends or (computed is not None and computed < tokens):
            self.growing(request.request_id)
        held = self._blocks.take(request.block_ids, tokens, what, lease_id, extends=extends)
        if extends and (count := sum(held.counts)) > (most := self._config.limits.block_ids_max):
            self._blocks.give_up(held)  # no reader takes such a ticket
            needs = f"num_tokens {tokens} needs {counted(count, 'block')}"
            raise RequestError(f"{what}: {needs}, at most {most} (limits.block_ids_max)")
        if computed is not None and computed > (holds := self._blocks.holds(held)):
            self._blocks.give_up(held)
            raise RequestError(f"{what}: computed_tokens is {computed}, its blocks hold {holds}")
        if len(held.entries) or extends:
            self._blocks.advance(held, tokens if computed is None else computed, awaited)
        return held

    def on_notification(self, payload: bytes) -> None:
        """Take a reader's notification about leases."""
        try:
            if len(payload) > notifications.NOTIFICATION_BYTES_MAX:
                raise codec.WireError(f"{counted(len(payload), 'byte')}")
            message = codec.decode_notification(payload)
        except codec.WireError as error:
            self._notifications[Counted.MALFORMED] += 1
            logger.info("malformed notification of a reader dropped: %s", error)
            return
        match message:
            case ReadDone(lease_ids=lease_ids, reader=reader):
                for lease_id in lease_ids:
                    self._note_read(lease_id, reader, (message.numerator, message.denominator))
            case Renew(lease_ids=lease_ids, reader=reader):
                for lease_id in lease_ids:
                    self._renew(lease_id, reader)

    def known(self, lease_id: str, request_id: str) -> OpenLease | None:
        """An open lease, for a reader that knows its secret."""
        entry = self._book.find(lease_id)
        if entry is None or not entry.is_open or entry.request_id != request_id:
            return None
        return self._offers[entry]

    def open_lease(self, request_id: str) -> OpenLease | None:
        """The open lease of a request."""
        entry = self._book.serving(request_id)
        return None if entry is None else self._offers[entry]

    def decline(self, request_id: str, reason: str) -> None:
        """See `Runtime.decline`."""
        if self._book.serving(request_id) is not None:
            raise RequestError(f"request {request_id!r}: decline: it is being served already")
        self.news.decline(request_id, reason)

    def lease_id_of(self, request_id: str) -> str | None:
        """The open lease for a request, for readers that know its name only; None if there is none."""
        entry = self._book.serving(request_id)
        return None if entry is None else entry.lease_id

    def note_late_read(self) -> None:
        """Count a read by a reader that looks at no seal, after its lease had ended."""
        self._late_reads += 1

    def serves(self, request_id: str | None) -> bool:
        """True if there is an open lease for the request."""
        return self._book.serving(request_id) is not None

    def release(self, question: messages.ReleaseRequest) -> messages.Ack:
        """Note that a reader without a connection needs a lease no more. WireError if its cache shares are wrong."""
        check_cache_shares(question.cache_shares)
        problems = topology.differences(self._local.cache_shares, question.cache_shares)
        if problems:
            raise codec.WireError("; ".join(problems))
        share = topology.report_share(question.cache_shares, self._local.cache_shares)
        if share.numerator > 0:  # else other readers release it
            self._note_read(question.lease_id, question.reader, (share.numerator, share.denominator))
        return messages.Ack(incarnation=self._incarnation)

    async def drained(self) -> None:
        """Wait until no lease is open."""
        await self._all_ended.wait()

    def close(self) -> None:
        """Revoke what is still open, and tell readers that wait for leases that there will be none."""
        self.news.turn_away("it is closing, or gives its cache back")
        for entry in list(self._offers):
            self._end(entry, "revoke")

    def _note_read(self, lease_id: str, reader: str, share: tuple[int, int]) -> None:
        counted, ended = self._book.read(lease_id, reader, share, self._clock.now_s())
        self._notifications[counted] += 1
        if ended is not None:
            self._ended(ended)
            self._look_later()

    def _renew(self, lease_id: str, reader: str) -> None:
        counted = self._book.renew(lease_id, reader, self._clock.now_s())
        self._notifications[counted] += 1
        self._renewals += counted is Counted.NOTED

    def revoke(self, entry: LeaseEntry) -> None:
        """See `Lease.revoke`."""
        self._end(entry, "revoke")

    def fail(self, entry: LeaseEntry, reason: str) -> None:
        """See `Lease.fail`."""
        if entry.is_open:
            self._offers[entry].reason = reason
            logger.info("lease %s: its prompt will not be computed: %s", entry.request_id, reason)
            self._end(entry, "fail")

    def growing(self, request_id: str) -> Any:
        """Return the part that leases grow by. RequestError if it is not there."""
        if self._growing is None:
            needing = part("growing", f"request {request_id!r}: a lease that grows")
            self._growing = needing.GrowingLeases(self._blocks, self.news.tell, self._config.limits.block_ids_max)
        return self._growing

    def restart(self, entry: LeaseEntry, ttl_s: float | None) -> None:
        """See `Lease.restart`."""
        self._book.restart(entry, self._config.lease_ttl_s if ttl_s is None else ttl_s, self._clock.now_s())

    def _not_there(self, entry: LeaseEntry, error: BaseException) -> None:
        logger.error("request %s: its blocks cannot be read, its lease fails", entry.request_id, exc_info=error)
        self.fail(entry, f"{type(error).__name__}: {checks.said(error)}")

    def _end(self, entry: LeaseEntry, event: LeaseEvent) -> None:
        """End a lease, unless it has ended."""
        if self._book.end(entry, event, self._clock.now_s()):
            self._ended(entry)
            self._look_later()

    def _ended(self, entry: LeaseEntry) -> None:
        """Wipe the seal of a lease that the book has ended. Its blocks are given back after the hold."""
        offer, failed = self._offers[entry], entry.state is LeaseState.FAILED
        self._blocks.close(offer.held, failed=failed)
        if failed:
            self.news.decline(entry.request_id, offer.reason)
        else:
            self.news.tell(entry.request_id)
        nothing = entry.state is LeaseState.READ and len(offer.held.entries) == 0 and not offer.payload
        level = logging.DEBUG if nothing else logging.INFO  # a lease of nothing ends as it begins
        logger.log(level, "lease %s: offered -> %s", entry.request_id, entry.state)
        if not entry.holds_blocks:
            self._blocks.give_back(offer.held, partial(self._settle, entry))

    def _look_later(self) -> None:
        """Have the book looked at when it next has something to do; once before that does not matter."""
        next_s = self._book.next_s
        if next_s is None or next_s < self._alarm.due_s:
            self._alarm.set(math.inf if next_s is None else next_s)

    def _look(self) -> None:
        """Callback of the alarm, which may be early or late: do whatever is due by the clock."""
        now_s = self._clock.now_s()
        for entry in self._book.expire(now_s):
            self._ended(entry)
        for entry in self._book.release(now_s):
            self._blocks.give_back(self._offers[entry].held, partial(self._settle, entry))
        self._look_later()

    def _settle(self, entry: LeaseEntry) -> None:
        """Settle a lease whose blocks are free: wake who awaits it, and tell the observers how it has ended."""
        offer, outcome = self._offers.pop(entry), LeaseOutcome(entry.state)
        offer.outcome.set_result(outcome)
        self._outcomes[outcome] += 1
        if self._observers.all:
            self._observers.lease_ended(self._record(entry, offer, outcome))
        if not self._offers:
            self._all_ended.set()

    def _record(self, entry: LeaseEntry, offer: OpenLease, outcome: LeaseOutcome) -> LeaseRecord:
        ticket, tables, history = offer.ticket, offer.held.tables, offer.held.history
        return LeaseRecord(
            engine_id=self._config.engine_id,
            rank=self._rank,
            request_id=ticket.request_id,
            outcome=outcome,
            reason=offer.reason,
            blocks=sum(map(len, tables)),
            blocks_by_group=blocks_by_group(self._local.groups, tables),
            tokens=ticket.num_tokens,
            readers=len(entry.readers),
            seconds={"offered": entry.ended_s - entry.offered_s, "held": self._clock.now_s() - entry.ended_s},
            computed=history.moments if history is not None else (),
            traceparent=ticket.traceparent,
        )


def _lease_facts(cache: RegisteredCache) -> dict[str, Any]:
    """Return the fields that are equal in all leases of a rank."""
    config = cache.config
    return {
        "pp_rank": config.pp_rank,
        "tp_rank": config.tp_rank,
        "incarnation": cache.incarnation,
        "host": cache.host,
        "port": cache.port,
    }


def _ticket_facts(cache: RegisteredCache) -> dict[str, Any]:
    """Return the fields that are equal in all tickets of a rank."""
    config, kinds = cache.config, parallelism_of(cache.local.cache_shares)
    return {
        "engine_id": config.engine_id,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        "dp_rank": config.dp_rank,
        "block_size": kinds.block_size,
        "kv_heads": kinds.kv_heads,
        "model_kv_heads": kinds.model_kv_heads,
        "more_kinds": kinds.more,
        "groups": told_groups(cache.local.groups),
        "fixed_ports": config.listen_port > 0,
    }
