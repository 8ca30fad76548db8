"""Serving: carries out the decisions of the lease book. It takes and frees blocks, runs the timer and makes handles.

An engine of several ranks serves a request on each rank under the same request id, each with a lease of its own. A
reader with another rank's ticket finds the lease by the request id (`open_lease`).

A lease is in the book and its seal is set before `serve` returns, so even the fastest reader finds both. Every end of a
lease wipes the seal; the blocks are given back only after a time, the hold (`limits.seal_hold_s`; invariant I3). If the
blocks of a lease cannot be copied for its readers, the lease fails. Late, duplicate and malformed notifications are
counted and change nothing.

No successful read has touched blocks that were given back, since the reader found the seal intact:
- either after the last byte had landed: then the seal was wiped later, and the blocks were given back later still;
- or at some time t during the read, which was a single one and took less than half of the hold: then the seal was
  wiped after t, so the blocks were given back at t plus the hold at the earliest, after the end of the read
  (`core.protocol.proof`). Readers of a lease without a hold, which the ticket shows, check only after the last byte.
The second case needs a hold that is never shorter than promised: the loop may round timers, so the timer only makes the
book look at the clock. A read that loses this race lands in registered memory, its bytes are discarded, and its load
fails with LeaseExpired.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from functools import partial
from typing import Any

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
from kvflow.errors import RequestError, UsageError, without_secrets
from kvflow.logs import logger_of
from kvflow.runtime.clock import Alarm
from kvflow.runtime.optional import lease_growth
from kvflow.runtime.peers.peer import blocks_by_group, ticket_groups
from kvflow.runtime.producer.blocks import HeldBlocks, OfferedBlocks
from kvflow.runtime.producer.lease import Lease, LeaseGrowth, LeaseOutcome, OpenLease, ServeRequest, ServingStatistics
from kvflow.runtime.producer.lease_answers import LeaseAnswers
from kvflow.runtime.rank import RankContext
from kvflow.runtime.records import LeaseRecord

logger = logger_of(__name__)

INTRODUCTION = "introduction"
"""Request id in every ticket from `Runtime.introduce`. Such a ticket describes a rank and offers no blocks."""


class Serving:
    """Opens and ends the leases of one registered cache, and holds each lease until its blocks are free."""

    def __init__(self, context: RankContext, blocks: OfferedBlocks) -> None:
        config = context.config
        self._config = config
        self._rank = context.rank
        self._incarnation = context.incarnation
        self._clock = context.clock
        self._observers = context.observers
        self._token_hex = context.token_hex
        self._local = context.local
        self._weights = context.weights
        self._blocks = blocks
        self._book = LeaseBook(hold_s=config.limits.seal_hold_s, lifetime_s=config.lease_lifetime_s)
        self._open_leases: dict[LeaseEntry, OpenLease] = {}
        self._alarm = Alarm(context.clock, self._on_alarm)
        self._renewals = 0
        self._outcomes = dict.fromkeys(map(str, LeaseOutcome), 0)
        self._notifications = dict.fromkeys(Counted, 0)
        self.part_counts = Counter[str]()
        """Counts that optional parts keep, by the name of their field in `ServingStatistics`."""
        self.lease_answers = LeaseAnswers(context.clock, self.open_lease, self._book.ended_recently)
        self._growth: LeaseGrowth | None = None
        """Serves leases that are opened before all tokens are computed; None until it is needed."""
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._lease_facts = _lease_facts(context)
        self._ticket_facts = _ticket_facts(context)
        """Ticket fields that have the same value in every ticket of this rank."""

    @property
    def statistics(self) -> ServingStatistics:
        return ServingStatistics(
            open_leases=len(self._open_leases),
            renewals=self._renewals,
            late_notifications=self._notifications[Counted.LATE],
            duplicate_notifications=self._notifications[Counted.DUPLICATE],
            malformed_notifications=self._notifications[Counted.MALFORMED],
            **self._outcomes,
            **self.part_counts,
        )

    @property
    def open_requests(self) -> list[str]:
        """Request ids of the leases that are open, or have ended and still hold their blocks."""
        return [entry.request_id for entry in self._open_leases]

    def serve(self, request: ServeRequest, *, hold_blocks: bool = True, one_reader_rank: bool = False) -> Lease:
        """Open a lease for `request` and return its handle.

        If this raises RequestError, UsageError or Overloaded, nothing has changed. `hold_blocks`: hold the blocks for
        `limits.seal_hold_s` after the end of the lease. `one_reader_rank`: exactly one reader rank will read this
        lease.
        """
        ids_max = self._config.limits.block_ids_max
        request = checks.normalize_request(request, ServeRequest, "serve_blocks", ids_max)
        if self._config.role == "consumer" and checks.count_block_ids(request.block_ids, ids_max):
            what = f"request {request.request_id!r}: serve_blocks"
            raise UsageError(f"{what}: the role of engine {self._config.engine_id!r} is 'consumer'")
        if self._book.open_lease_of(request.request_id) is not None:
            raise RequestError(f"request {request.request_id!r}: it is being served already")
        prompt = request.prompt
        digest = "" if prompt is None else offered_digest(request.request_id, prompt, request.num_tokens)
        held = self._take_blocks(request)
        offered_s = self._clock.now_s()
        if held.computed < held.num_tokens:
            held.history = History(self._clock.now_s, offered_s)
        ticket = self._make_ticket(request, held, digest, hold_blocks)
        entry = self._book.open(
            held.lease_id,
            request.request_id,
            offered_s,
            ttl_s=ticket.ttl_s,
            reader_count=0 if one_reader_rank else request.reader_count,
            holds_blocks=hold_blocks and (len(held.entries) > 0 or held.extends),
        )
        outcome: asyncio.Future[LeaseOutcome] = asyncio.get_running_loop().create_future()
        payload = None if request.payload else b""
        opened = self._open_leases[entry] = OpenLease(entry, ticket, held, outcome, payload)
        self._all_ended.clear()
        held.on_error = partial(self._fail_unreadable, entry)
        self._blocks.grow(held)
        # Only now: `opened` answers the questions that wait already.
        held.on_readable = partial(self.lease_answers.answer_waiting, request.request_id)
        nothing = len(held.entries) == 0 and not held.extends and not request.payload
        self.lease_answers.opened(opened, empty=nothing)
        if nothing:
            self._end_lease(entry, "all_read")  # no reader will report a read
        elif entry.expires_s < self._alarm.due_s:
            self._alarm.set(entry.expires_s)
        return Lease(opened, self)

    def introduce(self) -> Ticket:
        """Return a ticket without blocks that describes this rank, for prewarming and `Runtime.introduce`."""
        return Ticket(
            **self._ticket_facts,
            request_id=INTRODUCTION,
            block_ids=(),
            more_block_ids=((),) * (len(self._local.groups) - 1),
            num_tokens=0,
            ttl_s=self._config.lease_ttl_s,
            ranks=(RankLease(**self._lease_facts, lease_id="", seal_index=0, weights=self._weights.version),),
            traceparent="",
            prompt_digest="",
        )

    def _make_ticket(self, request: ServeRequest, held: HeldBlocks, digest: str, hold_blocks: bool) -> Ticket:
        """Return the ticket of the lease that is about to be opened for `request` with the blocks `held`.

        `digest`: digest of the prompt, or "". `hold_blocks`: the blocks stay held after the end of the lease.
        """
        first, *more = map(np.ndarray.tolist, held.tables)
        copies = [] if held.copies is None else [*map(np.ndarray.tolist, held.copies.tables)]
        ttl_s, extends = request.ttl_s, request.extends or held.extends
        own = self._lease_facts | {
            "lease_id": held.lease_id,
            "seal_index": held.seal_index,
            "block_ids": copies[0] if copies else None,
            "more_block_ids": copies[1:],
            "pending": (len(held.entries) > 0 and held.computed < held.num_tokens) or extends,
            "payload": request.payload,
            "held": hold_blocks,
            "weights": self._weights.version,
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

    def _take_blocks(self, request: ServeRequest) -> HeldBlocks:
        """Check `request`, lease its blocks, and reserve a seal and, if readers read copies, room for these."""
        request_id, ready, lease_id = request.request_id, request.ready, self._token_hex(LEASE_ID_CHARS // 2)
        awaited = None if ready is None or has_happened(ready, f"request {request_id!r}: ready") else ready
        if request.computed_tokens is not None or request.extends or request.payload:
            return self.lease_growth(request_id).take(request, lease_id, awaited)
        held = self._blocks.take(request_id, request.block_ids, request.num_tokens, lease_id, extends=False)
        if len(held.entries):
            self._blocks.advance(held, request.num_tokens, awaited)
        return held

    def on_notification(self, payload: bytes) -> None:
        """Decode a reader's notification. For each lease in the notification, record a read or renew the lease."""
        try:
            if len(payload) > notifications.NOTIFICATION_BYTES_MAX:
                raise codec.WireError(f"{counted(len(payload), 'byte')}")
            message = codec.decode_notification(payload)
        except codec.WireError as error:  # anybody who reaches the port can send it: it changes nothing (I4, I8)
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

    def find_lease(self, lease_id: str, request_id: str) -> OpenLease | None:
        """Return the open lease with both this lease id and this request id, or None.

        This lookup authorizes a reader's question: only readers of a lease know its lease id.
        """
        entry = self._book.find(lease_id)
        if entry is None or not entry.is_open or entry.request_id != request_id:
            return None
        return self._open_leases[entry]

    def open_lease(self, request_id: str) -> OpenLease | None:
        entry = self._book.open_lease_of(request_id)
        return None if entry is None else self._open_leases[entry]

    def decline(self, request_id: str, reason: str) -> None:
        """Answer readers that ask for request `request_id`: its prompt will not be computed, because of `reason`.

        RequestError if the request has an open lease.
        """
        if self._book.open_lease_of(request_id) is not None:
            raise RequestError(f"request {request_id!r}: decline: it is being served already")
        self.lease_answers.decline(request_id, reason)

    def has_open_lease(self, request_id: str | None) -> bool:
        return self._book.open_lease_of(request_id) is not None

    def release(self, question: messages.ReleaseRequest) -> messages.Ack:
        """Apply a `ReleaseRequest`, in which a reader says that it will not read a lease. Return the acknowledgement.

        The lease then counts as read by that reader. WireError if the reader's cache is incompatible.
        """
        check_cache_shares(question.cache_shares)
        problems = topology.differences(self._local.cache_shares, question.cache_shares)
        if problems:
            raise codec.WireError("; ".join(problems))
        share = topology.report_share(question.cache_shares, self._local.cache_shares)
        if share.numerator > 0:  # else other ranks of the reader release it
            self._note_read(question.lease_id, question.reader, (share.numerator, share.denominator))
        return messages.Ack(incarnation=self._incarnation)

    async def drained(self) -> None:
        """Wait until no lease is open and no ended lease holds blocks."""
        await self._all_ended.wait()

    def close(self) -> None:
        """Revoke all open leases, and refuse the questions of readers about leases that are not open yet.

        These are the questions that wait now, and later ones.
        """
        self.lease_answers.refuse_questions("it is closing, or its cache is being unregistered")
        self.revoke_all()

    def revoke_all(self) -> None:
        """Revoke all open leases. Others may be opened afterwards."""
        for entry in list(self._open_leases):
            self._end_lease(entry, "revoke")

    def _note_read(self, lease_id: str, reader: str, share: tuple[int, int]) -> None:
        counted, ended = self._book.note_read(lease_id, reader, share)
        self._notifications[counted] += 1
        if ended is not None:
            self._after_end(ended)
            self._set_alarm()

    def _renew(self, lease_id: str, reader: str) -> None:
        counted = self._book.renew(lease_id, reader, self._clock.now_s())
        self._notifications[counted] += 1
        self._renewals += counted is Counted.NOTED

    def revoke(self, entry: LeaseEntry) -> None:
        """End a lease as REVOKED: no load of it can succeed after this call. No effect if the lease has ended."""
        self._end_lease(entry, "revoke")

    def fail(self, entry: LeaseEntry, reason: str) -> None:
        """End a lease as FAILED, since its prompt will not be computed because of `reason`."""
        if entry.is_open:
            self._open_leases[entry].reason = reason
            logger.info("lease %s: its prompt will not be computed: %s", entry.request_id, reason)
            self._end_lease(entry, "fail")

    def lease_growth(self, request_id: str) -> LeaseGrowth:
        """Return what serves leases that are opened before all tokens are computed. The first call makes it.

        RequestError, with `request_id`, if `kvflow.growing` is not installed.
        """
        if self._growth is None:
            what, block_ids_max = f"request {request_id!r}: a lease that grows", self._config.limits.block_ids_max
            self._growth = lease_growth(self._blocks, self.lease_answers.answer_waiting, block_ids_max, what)
        return self._growth

    def restart(self, entry: LeaseEntry, ttl_s: float | None) -> None:
        """Set the `ttl_s` of an open lease (None: Config.lease_ttl_s), and let it last at least that long from now."""
        self._book.restart(entry, self._config.lease_ttl_s if ttl_s is None else ttl_s, self._clock.now_s())

    def _fail_unreadable(self, entry: LeaseEntry, error: BaseException) -> None:
        logger.error("request %s: its blocks cannot be read, its lease fails", entry.request_id, exc_info=error)
        self.fail(entry, f"{type(error).__name__}: {checks.error_text(error)}")

    def _end_lease(self, entry: LeaseEntry, event: LeaseEvent) -> None:
        """End a lease because of `event`, for example "revoke". No effect if the lease has ended."""
        if self._book.end(entry, event):
            self._after_end(entry)
            self._set_alarm()

    def _after_end(self, entry: LeaseEntry) -> None:
        """Wipe the seal of a lease that has just ended, begin its hold, and answer the questions that wait for it.

        If the blocks must stay unused for `limits.seal_hold_s` more (`entry.holds_blocks`), `_on_alarm` gives them back
        then; otherwise they are given back now.
        """
        offer, failed = self._open_leases[entry], entry.state is LeaseState.FAILED
        # The hold counts from the wipe, until which readers found the seal intact. A time read before it may be long
        # ago: the process was stopped, or many leases end at once.
        self._blocks.close(offer.held, failed=failed)
        self._book.hold(entry, self._clock.now_s())
        if failed:
            self.lease_answers.decline(entry.request_id, offer.reason)
        else:
            self.lease_answers.answer_waiting(entry.request_id)
        nothing = entry.state is LeaseState.READ and len(offer.held.entries) == 0 and not offer.payload
        level = logging.DEBUG if nothing else logging.INFO  # a lease without blocks ends as it begins
        logger.log(level, "lease %s: offered -> %s", entry.request_id, entry.state)
        if not entry.holds_blocks:
            self._blocks.give_back(offer.held, partial(self._complete_outcome, entry))

    def _set_alarm(self) -> None:
        """Set the alarm for the next time at which a lease expires or blocks become free. It may ring too early."""
        next_s = self._book.next_s
        if next_s is None or next_s < self._alarm.due_s:
            self._alarm.set(math.inf if next_s is None else next_s)

    def _on_alarm(self) -> None:
        """Expire the leases that are due, and give back the blocks of ended leases when their hold is over."""
        now_s = self._clock.now_s()
        for entry in self._book.expire(now_s):
            self._after_end(entry)
        for entry in self._book.release_held(now_s):
            self._blocks.give_back(self._open_leases[entry].held, partial(self._complete_outcome, entry))
        self._set_alarm()

    def _complete_outcome(self, entry: LeaseEntry) -> None:
        """Set the outcome of a lease, now that its blocks are free, and pass its `LeaseRecord` to the observers."""
        offer, outcome = self._open_leases.pop(entry), LeaseOutcome(entry.state)
        offer.outcome.set_result(outcome)
        self._outcomes[outcome] += 1
        if self._observers.all:
            self._observers.lease_ended(self._record(entry, offer, outcome))
        if not self._open_leases:
            self._all_ended.set()

    def _record(self, entry: LeaseEntry, offer: OpenLease, outcome: LeaseOutcome) -> LeaseRecord:
        ticket, tables, history = offer.ticket, offer.held.tables, offer.held.history
        return LeaseRecord(
            engine_id=self._config.engine_id,
            rank=self._rank,
            request_id=without_secrets(ticket.request_id),
            outcome=outcome,
            reason=without_secrets(offer.reason),
            blocks=sum(map(len, tables)),
            blocks_by_group=blocks_by_group(self._local.groups, tables),
            tokens=ticket.num_tokens,
            readers=len(entry.readers),
            seconds={"offered": entry.ended_s - entry.offered_s, "held": self._clock.now_s() - entry.ended_s},
            computed=history.moments if history is not None else (),
            traceparent=ticket.traceparent,
        )


def _lease_facts(context: RankContext) -> dict[str, Any]:
    """Return the fields of `RankLease`, the entry of a rank in a ticket, that are equal in every lease of this rank."""
    config = context.config
    return {
        "pp_rank": config.pp_rank,
        "tp_rank": config.tp_rank,
        "incarnation": context.incarnation,
        "host": context.host,
        "port": context.port,
    }


def _ticket_facts(context: RankContext) -> dict[str, Any]:
    config, kinds = context.config, parallelism_of(context.local.cache_shares)
    return {
        "engine_id": config.engine_id,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        "dp_rank": config.dp_rank,
        "block_size": kinds.block_size,
        "kv_heads": kinds.kv_heads,
        "model_kv_heads": kinds.model_kv_heads,
        "more_kinds": kinds.more,
        "groups": ticket_groups(context.local.groups),
        "fixed_ports": config.listen_port > 0,
    }
