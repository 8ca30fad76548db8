"""The producer's side: what the lease book decides, carried out: seals, blocks, host copies, timers, handles.

An engine of several ranks serves a request on each of them, under the same id: each rank's lease is its own, and
readers that were given another rank's ticket find it by the request (`find`).

With host staging a lease is open before its blocks can be read: they are copied to host blocks group by group, and the
seal says how many are still missing. A failed copy revokes the lease.

A lease is in the book, and its seal set, before `serve` returns, so a fast reader can never beat it. Whatever ends it
wipes the seal at once; the blocks are given back after the hold, and after a copy that still runs (invariant I3). Late,
duplicate and malformed notifications are counted and change nothing.

Why no read that reports success can touch blocks that were given back: such a read found the seal intact. Either after
its last byte had landed: then the wipe came later, the blocks later still. Or it found the seal at a moment t of the
read, and the whole read took less than half of the hold: the wipe came after t, so the blocks came back a hold after t
at the earliest, when the read had ended (`core.protocol.seals`). That needs a hold that is never shorter than promised,
so the one timer for all leases, which a loop may round, only has the book look at the clock. Reads that lose this race
may take as long as they like: their memory stays registered, what they see is thrown away, and their load is
LeaseExpired.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvflow.config import Config
from kvflow.core.plan import topology
from kvflow.core.plan.descriptors import BlockIds, check_block_ids
from kvflow.core.plan.topology import CacheShare, Rank
from kvflow.core.policy.lease_book import Counted, LeaseBook, LeaseEntry, LeaseTerms
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.states import LeaseEvent
from kvflow.core.protocol import messages
from kvflow.core.protocol.prompts import offered_digest
from kvflow.core.protocol.seals import SealTable
from kvflow.core.protocol.ticket import RankLease, Ticket
from kvflow.errors import RequestError
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.host_buffers import HostBuffers
from kvflow.runtime.producer.lease import Lease, LeaseOutcome, ServeRequest, ServingStatistics, checked_serve_request
from kvflow.runtime.records import LeaseRecord, Observers
from kvflow.runtime.world import Clock, Timer

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Offer:
    """A lease in the book, its handle, and what is given back after it."""

    entry: LeaseEntry
    lease: Lease
    ids: BlockIds
    staged: _Staged | None
    held: bool = True
    """Until the book says that the hold is over."""


@dataclass(slots=True, kw_only=True)
class _Staged:
    """The host blocks of a lease and how far they are filled."""

    host_ids: BlockIds
    copied: int = 0
    copying: bool = False


class Serving:
    """All open leases of a runtime."""

    def __init__(
        self,
        config: Config,
        cache_share: CacheShare,
        ledger: BlockLedger,
        seals: SealTable,
        *,
        num_blocks: int,
        block_size_bytes: int,
        staging: HostBuffers | None,
        copier: CopyThread,
        clock: Clock,
        token_hex: Callable[[int], str],
        observers: Observers,
        incarnation: str,
        port: int,
    ) -> None:
        self._config = config
        self._cache_share = cache_share
        self._num_blocks = num_blocks
        self._ledger = ledger
        self._staging = staging
        self._copier = copier
        self._clock = clock
        self._token_hex = token_hex
        self._observers = observers
        self._seals = seals
        self._incarnation = incarnation
        self._port = port
        self._book = LeaseBook(hold_s=config.limits.seal_hold_s, lifetime_s=config.lease_lifetime_s)
        self._offers: dict[LeaseEntry, _Offer] = {}
        self._timer: Timer | None = None
        self._timer_due_s = math.inf
        self._outcomes = dict.fromkeys(LeaseOutcome, 0)
        self._renewals = 0
        self._counted = dict.fromkeys(Counted, 0)
        self._group_blocks = max(config.limits.slice_bytes_max // block_size_bytes, 1)
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    @property
    def statistics(self) -> ServingStatistics:
        return ServingStatistics(
            open_leases=len(self._offers),
            read=self._outcomes[LeaseOutcome.READ],
            expired=self._outcomes[LeaseOutcome.EXPIRED],
            revoked=self._outcomes[LeaseOutcome.REVOKED],
            renewals=self._renewals,
            late_notifications=self._counted[Counted.LATE],
            duplicate_notifications=self._counted[Counted.DUPLICATE],
            malformed_notifications=self._counted[Counted.MALFORMED],
        )

    @property
    def open_requests(self) -> list[str]:
        """The requests whose leases are open, or hold their blocks still."""
        return [entry.terms.request_id for entry in self._offers]

    def serve(self, request: ServeRequest) -> Lease:
        """Open a lease. Raises RequestError, and changes nothing then."""
        request = checked_serve_request(request, self._config)
        ids = self._check(request)
        digest = offered_digest(request.request_id, request.prompt, request.num_tokens)
        ttl_s = self._config.lease_ttl_s if request.ttl_s is None else request.ttl_s
        seal_index = self._seals.take()
        if seal_index is None:
            raise RequestError(f"request {request.request_id!r}: {self._seals.count} leases are open (leases_max)")
        try:
            self._ledger.lease(ids)
        except RequestError:
            self._seals.give_back(seal_index)
            raise
        try:
            staged = self._take_host_blocks(request, len(ids))
        except RequestError:
            self._ledger.release(ids)
            self._seals.give_back(seal_index)
            raise
        ticket = self._make_ticket(request, ids, staged, seal_index, ttl_s, digest)
        offer = self._open(request, ticket, ids, staged)
        if staged is not None:
            self._copy_next(offer, staged)
        if len(ids) == 0:
            self._end(offer, LeaseEvent.ALL_READ)  # nothing to read, so nobody will report
        self._set_timer()
        return offer.lease

    def on_notification(self, payload: bytes) -> None:
        """Take a reader's message: the one way in for what peers say about leases."""
        try:
            if len(payload) > self._config.limits.notification_bytes_max:
                raise messages.WireError(f"{len(payload)} bytes")
            message = messages.decode_notification(payload)
        except messages.WireError as error:
            self._counted[Counted.MALFORMED] += 1
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
        ticket = self._offers[entry].lease.ticket
        if (ticket.num_tokens, messages.digest_of(ticket.block_ids)) != (question.num_tokens, question.blocks_digest):
            return messages.NoLease(ended=True)
        own = ticket.first
        return messages.LeaseFound(
            incarnation=own.incarnation,
            clock_s=self._clock.now_s(),
            expires_s=entry.expires_s,
            lease_id=own.lease_id,
            seal_index=own.seal_index,
            block_ids=own.block_ids,
        )

    def serves(self, request_id: str | None) -> bool:
        """Whether there is an open lease for the request."""
        return self._book.serving(request_id) is not None

    def release(self, question: messages.ReleaseRequest) -> messages.Released | messages.NoLease:
        """A reader that is not connected needs a lease's blocks no more. WireError if it cannot be what it says."""
        messages.check_cache_share(question.cache_share)
        problems = topology.differences(self._cache_share, question.cache_share)
        if problems:
            raise messages.WireError("; ".join(problems))
        share, whole = topology.report_of(question.cache_share, self._cache_share) or (0, 1)
        if share > 0:  # else other readers answer for all of it
            lease_id = question.lease_id
            if lease_id is None:
                found = self.find(question)
                if isinstance(found, messages.NoLease):
                    return found
                lease_id = found.lease_id
            self._note_read(messages.ReadDone(lease_id, question.reader, share, whole))
        return messages.Released(incarnation=self._incarnation)

    async def drained(self) -> None:
        """Wait until no lease is open."""
        await self._all_ended.wait()

    def close(self) -> None:
        """Revoke what is still open."""
        for offer in list(self._offers.values()):
            self._end(offer, LeaseEvent.REVOKE)
        self._set_timer()

    def _note_read(self, message: messages.ReadDone) -> None:
        entry = self._book.find(message.lease_id)
        share = (message.share, message.whole)
        counted = self._book.read(message.lease_id, message.reader, share, self._clock.now_s())
        self._counted[counted] += 1
        if counted is Counted.NOTED and entry is not None and not entry.is_open:
            self._ended(self._offers[entry])
            self._set_timer()

    def _renew(self, lease_id: str, reader: str) -> None:
        counted = self._book.renew(lease_id, reader, self._clock.now_s())
        self._counted[counted] += 1
        self._renewals += counted is Counted.NOTED

    def _check(self, request: ServeRequest) -> BlockIds:
        """What cannot be right with this cache and these leases; the block ids, if all can."""
        what = f"request {request.request_id!r}"
        if self._book.serving(request.request_id) is not None:
            raise RequestError(f"{what}: it is being served already")
        ids = check_block_ids(request.block_ids, num_blocks=self._num_blocks, what=f"{what}: block_ids")
        size = self._cache_share.block_size
        if len(ids) > -(-request.num_tokens // size):
            raise RequestError(
                f"{what}: {len(ids)} blocks of {size} tokens are more than num_tokens {request.num_tokens} fill"
            )
        return ids

    def _take_host_blocks(self, request: ServeRequest, count: int) -> _Staged | None:
        """Host blocks for a lease; RequestError if there are not enough now."""
        if self._staging is None or count == 0:
            return None
        host_ids = self._staging.pool.take_nowait(count)
        if host_ids is None:
            pool = self._staging.pool
            room = f"{pool.size - pool.used} of {pool.size} are free (host_buffer_bytes_max)"
            raise RequestError(f"request {request.request_id!r}: {count} host blocks are needed, {room}")
        return _Staged(host_ids=host_ids)

    def _copy_next(self, offer: _Offer, staged: _Staged) -> None:
        """Copy the next group of blocks to the host, until all are there or the lease has ended."""
        assert self._staging is not None
        ids = offer.ids[staged.copied : staged.copied + self._group_blocks]
        if not offer.entry.is_open or len(ids) == 0:
            return
        host_ids = staged.host_ids[staged.copied : staged.copied + len(ids)]
        staged.copying = True
        self._copier.submit(
            partial(self._staging.to_host, ids, host_ids), partial(self._copied, offer, staged, len(ids))
        )

    def _copied(self, offer: _Offer, staged: _Staged, count: int, error: BaseException | None) -> None:
        """One group has been copied: readers may have it. A lease that has ended waited for this with its blocks."""
        staged.copying = False
        if error is not None:
            logger.error("request %s: its blocks cannot be copied", offer.lease.request_id, exc_info=error)
            self._end(offer, LeaseEvent.REVOKE)
            self._set_timer()
        elif offer.entry.is_open:
            staged.copied += count
            own = offer.lease.ticket.first
            self._seals.seal(own.seal_index, own.lease_id, len(offer.ids) - staged.copied)
            self._copy_next(offer, staged)
        if not offer.held:
            self._give_back(offer)

    def _make_ticket(
        self, request: ServeRequest, ids: BlockIds, staged: _Staged | None, seal_index: int, ttl_s: float, digest: str
    ) -> Ticket:
        config, cache_share = self._config, self._cache_share
        own = RankLease(
            pp_rank=config.pp_rank,
            tp_rank=config.tp_rank,
            lease_id=self._token_hex(messages.LEASE_ID_CHARS // 2),
            seal_index=seal_index,
            incarnation=self._incarnation,
            expires_s=self._clock.now_s() + ttl_s,
            host=config.advertise_host or config.listen_host,
            port=self._port,
            block_ids=None if staged is None else tuple(staged.host_ids.tolist()),
        )
        return Ticket(
            engine_id=config.engine_id,
            request_id=request.request_id,
            block_ids=tuple(ids.tolist()),
            num_tokens=request.num_tokens,
            ttl_s=ttl_s,
            tp_size=config.tp_size,
            pp_size=config.pp_size,
            dp_rank=config.dp_rank,
            block_size=cache_share.block_size,
            kv_heads=cache_share.kv_heads,
            model_kv_heads=cache_share.model_kv_heads,
            fixed_ports=config.listen_port > 0,
            ranks=(own,),
            traceparent=request.traceparent,
            prompt_digest=digest,
        )

    def _open(self, request: ServeRequest, ticket: Ticket, ids: BlockIds, staged: _Staged | None) -> _Offer:
        own = ticket.first
        terms = LeaseTerms(
            lease_id=own.lease_id,
            request_id=request.request_id,
            ttl_s=ticket.ttl_s,
            reader_count=request.reader_count,
            holds_blocks=len(ids) > 0,
        )
        entry = self._book.open(terms, own.expires_s - ticket.ttl_s)
        lease = Lease(ticket, entry, partial(self._revoke, entry))
        offer = self._offers[entry] = _Offer(entry=entry, lease=lease, ids=ids, staged=staged)
        self._seals.seal(own.seal_index, own.lease_id, 0 if staged is None else len(ids))
        self._all_ended.clear()
        return offer

    def _revoke(self, entry: LeaseEntry) -> None:
        """See `Lease.revoke`."""
        offer = self._offers.get(entry)
        if offer is not None:
            self._end(offer, LeaseEvent.REVOKE)
            self._set_timer()

    def _end(self, offer: _Offer, event: LeaseEvent) -> None:
        """End a lease, unless it has ended."""
        if self._book.end(offer.entry, event, self._clock.now_s()):
            self._ended(offer)

    def _ended(self, offer: _Offer) -> None:
        """The book has ended a lease: its seal is wiped now, its blocks are given back after the hold."""
        self._seals.give_back(offer.lease.ticket.first.seal_index)
        offer.lease.end()
        if not offer.entry.terms.holds_blocks:
            self._hold_over(offer)

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
            self._ended(self._offers[entry])
        for entry in self._book.release(now_s):
            self._hold_over(self._offers[entry])
        self._set_timer()

    def _hold_over(self, offer: _Offer) -> None:
        """No read can take the blocks for good any more; a copy that still runs is waited for."""
        offer.held = False
        if offer.staged is None or not offer.staged.copying:
            self._give_back(offer)

    def _give_back(self, offer: _Offer) -> None:
        """The producer may reuse the blocks (invariant I3)."""
        del self._offers[offer.entry]
        self._ledger.release(offer.ids)
        if offer.staged is not None and self._staging is not None:
            self._staging.pool.give_back(offer.staged.host_ids)
        outcome = offer.lease.settle()
        self._outcomes[outcome] += 1
        self._record(offer, outcome)
        if not self._offers:
            self._all_ended.set()

    def _record(self, offer: _Offer, outcome: LeaseOutcome) -> None:
        """Tell the observers how a lease has ended."""
        if not self._observers.any:
            return
        lease, entry = offer.lease, offer.entry
        seconds = {"offered": entry.ended_s - entry.offered_s, "held": self._clock.now_s() - entry.ended_s}
        self._observers.lease_ended(
            LeaseRecord(
                engine_id=self._config.engine_id,
                rank=Rank.of(self._config),
                request_id=lease.request_id,
                outcome=outcome,
                blocks=len(offer.ids),
                tokens=lease.ticket.num_tokens,
                readers=lease.readers_done,
                seconds=seconds,
                traceparent=lease.ticket.traceparent,
            )
        )
