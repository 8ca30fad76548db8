"""The producer's side: leases, their seals, their timers, and the notifications that end them.

An engine of several ranks serves a request on each of them, under the same id: each rank's lease is its own, and
readers that were given another rank's ticket find it by the request (`find`).

A lease ends at a moment that its readers may move: each renewal gives it its whole ttl_s again, up to its lifetime
(`Config.lease_lifetime_s`). Its timer looks when it fires whether it has been moved, so a renewal costs a few lookups.

With host staging a lease is open before its blocks can be read: they are copied to host blocks group by group, and the
seal says how many are still missing. A failed copy revokes the lease.

A lease is registered, and its seal set, before `serve` returns, so a fast reader can never beat it. It ends exactly
once (invariant I4): read by all its readers, expired, or revoked. Whatever ends it wipes the seal at once; the blocks
are given back after a short hold (invariant I3). Late, duplicate and malformed notifications are counted and change
nothing.

Why no read that reports success can touch blocks that were given back: such a read found the seal intact. Either after
its last byte had landed: then the wipe came later, the blocks later still. Or it found the seal at a moment t of the
read, and the whole read took less than half of the hold: the wipe came after t, so the blocks came back a hold after t
at the earliest, when the read had ended (`core.seals`). That needs a hold that is never shorter than promised, so its
timer, which a loop may round, is checked against the clock. Reads that lose this race may go on for as long as
they like: their memory stays registered, what they see is thrown away, and their load is LeaseExpired.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from kvflow.config import Config
from kvflow.core import topology, wire
from kvflow.core.ledger import BlockLedger
from kvflow.core.plan import BlockIds, check_block_ids
from kvflow.core.prompts import offered_digest
from kvflow.core.seals import SealTable
from kvflow.core.states import LeaseEvent, lease_open
from kvflow.core.ticket import RankLease, Ticket
from kvflow.core.topology import Holding, Rank
from kvflow.errors import RequestError
from kvflow.runtime.copier import Copier
from kvflow.runtime.lease import Lease, LeaseOutcome, ServeRequest, ServingStatistics, checked_serve_request
from kvflow.runtime.records import LeaseRecord, Observers
from kvflow.runtime.staging import HostBuffers
from kvflow.runtime.world import Clock, Timer

logger = logging.getLogger(__name__)

_WHOLE_MAX = 1 << 32
_RECENT_MAX = 1 << 12


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A lease, when it ends, and what is given back then."""

    lease: Lease
    ids: BlockIds
    offered_s: float
    expires_s: float
    lifetime_ends_s: float
    """Renewals do not move `expires_s` beyond this."""
    timer: Timer
    staged: _Staged | None
    ended_s: float = 0.0
    """Set when the lease ends: its blocks are held from then on."""


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
        holding: Holding,
        ledger: BlockLedger,
        seals: SealTable,
        *,
        num_blocks: int,
        block_size_bytes: int,
        staging: HostBuffers | None,
        copier: Copier,
        clock: Clock,
        token_hex: Callable[[int], str],
        observers: Observers,
        incarnation: str,
        port: int,
    ) -> None:
        self._config = config
        self._holding = holding
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
        self._entries: dict[str, _Entry] = {}
        self._open_requests: dict[str, Lease] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._ended = dict.fromkeys(LeaseOutcome, 0)
        self._renewals = 0
        self._late = 0
        self._duplicate = 0
        self._malformed = 0
        self._group_blocks = max(config.slice_bytes_max // block_size_bytes, 1)
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    @property
    def statistics(self) -> ServingStatistics:
        return ServingStatistics(
            open_leases=len(self._entries),
            read=self._ended[LeaseOutcome.READ],
            expired=self._ended[LeaseOutcome.EXPIRED],
            revoked=self._ended[LeaseOutcome.REVOKED],
            renewals=self._renewals,
            late_notifications=self._late,
            duplicate_notifications=self._duplicate,
            malformed_notifications=self._malformed,
        )

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
        lease = Lease(request, ticket, self._end)
        entry = self._open(lease, ids, staged)
        if staged is not None:
            self._copy_next(entry, staged)
        if len(ids) == 0:
            self._end(lease, LeaseEvent.ALL_READ)  # nothing to read, so nobody will report
        return lease

    def on_notification(self, payload: bytes) -> None:
        """Take a reader's message: the one way in for what peers say about leases."""
        try:
            if len(payload) > self._config.notification_bytes_max:
                raise wire.WireError(f"{len(payload)} bytes")
            message = wire.decode_notification(payload)
        except wire.WireError as error:
            self._malformed += 1
            logger.info("dropped a notification: %s", error)
            return
        match message:
            case wire.ReadDone():
                self._note_read(message)
            case wire.Renew(lease_ids=lease_ids, reader=reader):
                for lease_id in lease_ids:
                    self._renew(lease_id, reader)

    def find(self, question: wire.LeaseRequest | wire.ReleaseRequest) -> wire.LeaseFound | wire.NoLease:
        """The open lease for a request, if it is of the same blocks and tokens."""
        lease = self._open_requests.get(question.request_id)
        if lease is None:
            return wire.NoLease(ended=question.request_id in self._recent)
        ticket = lease.ticket
        if (ticket.num_tokens, wire.digest_of(ticket.block_ids)) != (question.num_tokens, question.blocks_digest):
            return wire.NoLease(ended=True)
        own = ticket.first
        return wire.LeaseFound(
            incarnation=own.incarnation,
            clock_s=self._clock.now_s(),
            expires_s=self._entries[own.lease_id].expires_s,
            lease_id=own.lease_id,
            seal_index=own.seal_index,
            block_ids=own.block_ids,
        )

    def serves(self, request_id: str | None) -> bool:
        """Whether there is an open lease for the request."""
        return request_id in self._open_requests

    def release(self, question: wire.ReleaseRequest) -> wire.Released | wire.NoLease:
        """A reader that is not connected needs a lease's blocks no more. WireError if it cannot be what it says."""
        wire.check_holding(question.holding)
        problems = topology.differences(self._holding, question.holding)
        if problems:
            raise wire.WireError("; ".join(problems))
        share, whole = topology.report_of(question.holding, self._holding) or (0, 1)
        if share > 0:  # else other readers answer for all of it
            lease_id = question.lease_id
            if lease_id is None:
                found = self.find(question)
                if isinstance(found, wire.NoLease):
                    return found
                lease_id = found.lease_id
            self._note_read(wire.ReadDone(lease_id, question.reader, share, whole))
        return wire.Released(incarnation=self._incarnation)

    async def drained(self) -> None:
        """Wait until no lease is open."""
        await self._all_ended.wait()

    def close(self) -> None:
        """Revoke what is still open."""
        for entry in list(self._entries.values()):
            self._end(entry.lease, LeaseEvent.REVOKE)

    def _note_read(self, message: wire.ReadDone) -> None:
        entry = self._entries.get(message.lease_id)
        if entry is None or not lease_open(entry.lease.state):
            self._late += 1
        elif not 0 < message.share <= message.whole <= _WHOLE_MAX:
            self._malformed += 1
        elif not entry.lease.add_reader(message.reader, Fraction(message.share, message.whole)):
            self._duplicate += 1
        elif entry.lease.all_read:
            self._end(entry.lease, LeaseEvent.ALL_READ)

    def _renew(self, lease_id: str, reader: str) -> None:
        """Give a lease its ttl_s again. One who has said that it has read does not need that: its message is late."""
        entry = self._entries.get(lease_id)
        if entry is None or not lease_open(entry.lease.state) or entry.lease.has_reader(reader):
            self._late += 1
            return
        self._renewals += 1
        entry.expires_s = min(self._clock.now_s() + entry.lease.ticket.ttl_s, entry.lifetime_ends_s)

    def _check(self, request: ServeRequest) -> BlockIds:
        """What cannot be right with this cache and these leases; the block ids, if all can."""
        what = f"request {request.request_id!r}"
        if request.request_id in self._open_requests:
            raise RequestError(f"{what}: it is being served already")
        ids = check_block_ids(request.block_ids, num_blocks=self._num_blocks, what=f"{what}: block_ids")
        size = self._holding.block_size
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

    def _copy_next(self, entry: _Entry, staged: _Staged) -> None:
        """Copy the next group of blocks to the host, until all are there or the lease has ended."""
        assert self._staging is not None
        ids = entry.ids[staged.copied : staged.copied + self._group_blocks]
        if not lease_open(entry.lease.state) or len(ids) == 0:
            return
        host_ids = staged.host_ids[staged.copied : staged.copied + len(ids)]
        staged.copying = True
        self._copier.submit(
            partial(self._staging.to_host, ids, host_ids), partial(self._copied, entry, staged, len(ids))
        )

    def _copied(self, entry: _Entry, staged: _Staged, count: int, error: BaseException | None) -> None:
        """One group has been copied: readers may have it. A lease that has ended waited for this with its blocks."""
        staged.copying = False
        if error is not None:
            logger.error("request %s: its blocks cannot be copied", entry.lease.request_id, exc_info=error)
            self._end(entry.lease, LeaseEvent.REVOKE)
        elif lease_open(entry.lease.state):
            staged.copied += count
            own = entry.lease.ticket.first
            self._seals.seal(own.seal_index, own.lease_id, len(entry.ids) - staged.copied)
            self._copy_next(entry, staged)
        if entry.lease.held:
            self._give_back(entry)

    def _make_ticket(
        self, request: ServeRequest, ids: BlockIds, staged: _Staged | None, seal_index: int, ttl_s: float, digest: str
    ) -> Ticket:
        config, holding = self._config, self._holding
        own = RankLease(
            pp_rank=config.pp_rank,
            tp_rank=config.tp_rank,
            lease_id=self._token_hex(wire.LEASE_ID_CHARS // 2),
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
            block_size=holding.block_size,
            kv_heads=holding.kv_heads,
            model_kv_heads=holding.model_kv_heads,
            fixed_ports=config.listen_port > 0,
            ranks=(own,),
            traceparent=request.traceparent,
            prompt_digest=digest,
        )

    def _open(self, lease: Lease, ids: BlockIds, staged: _Staged | None) -> _Entry:
        own, ttl_s = lease.ticket.first, lease.ticket.ttl_s
        self._seals.seal(own.seal_index, own.lease_id, 0 if staged is None else len(ids))
        entry = self._entries[own.lease_id] = _Entry(
            lease=lease,
            ids=ids,
            offered_s=own.expires_s - ttl_s,
            expires_s=own.expires_s,
            lifetime_ends_s=own.expires_s - ttl_s + max(ttl_s, self._config.lease_lifetime_s),
            timer=self._clock.call_later(ttl_s, partial(self._expire, own.lease_id)),
            staged=staged,
        )
        self._open_requests[lease.request_id] = lease
        self._recent.pop(lease.request_id, None)
        self._all_ended.clear()
        return entry

    def _expire(self, lease_id: str) -> None:
        """The timer of an open lease: end it, unless it was renewed meanwhile or the timer was early."""
        entry = self._entries[lease_id]
        left_s = entry.expires_s - self._clock.now_s()
        if left_s > 0:
            entry.timer = self._clock.call_later(left_s, partial(self._expire, lease_id))
        else:
            self._end(entry.lease, LeaseEvent.EXPIRE)

    def _end(self, lease: Lease, event: LeaseEvent) -> None:
        """The one way for a lease to end: its seal is wiped now, its blocks are given back after the hold."""
        if not lease_open(lease.state):
            return
        entry = self._entries[lease.ticket.lease_id]
        entry.timer.cancel()
        self._seals.give_back(lease.ticket.first.seal_index)
        del self._open_requests[lease.request_id]
        self._remember(lease.request_id)
        lease.fire(event)
        entry.ended_s = self._clock.now_s()
        if len(entry.ids) == 0:
            self._give_back(entry)
        else:
            self._clock.call_later(self._config.seal_hold_s, partial(self._held, entry))

    def _held(self, entry: _Entry) -> None:
        """The hold is over, unless the timer was early; a copy that still runs is waited for."""
        left_s = entry.ended_s + self._config.seal_hold_s - self._clock.now_s()
        if left_s > 0:
            self._clock.call_later(left_s, partial(self._held, entry))
            return
        entry.lease.held = True
        if entry.staged is None or not entry.staged.copying:
            self._give_back(entry)

    def _remember(self, request_id: str) -> None:
        """Keep in mind that there was a lease: a reader that comes late need not wait for one to be opened."""
        self._recent[request_id] = None
        if len(self._recent) > _RECENT_MAX:
            self._recent.popitem(last=False)

    def _give_back(self, entry: _Entry) -> None:
        """Nobody can take the blocks for good any more: the producer may reuse them (invariant I3)."""
        del self._entries[entry.lease.ticket.lease_id]
        self._ledger.release(entry.ids)
        if entry.staged is not None and self._staging is not None:
            self._staging.pool.give_back(entry.staged.host_ids)
        outcome = entry.lease.settle()
        self._ended[outcome] += 1
        self._record(entry, outcome)
        if not self._entries:
            self._all_ended.set()

    def _record(self, entry: _Entry, outcome: LeaseOutcome) -> None:
        """Tell the observers how a lease has ended."""
        if not self._observers.any:
            return
        lease = entry.lease
        seconds = {"offered": entry.ended_s - entry.offered_s, "held": self._clock.now_s() - entry.ended_s}
        self._observers.lease_ended(
            LeaseRecord(
                engine_id=self._config.engine_id,
                rank=Rank.of(self._config),
                request_id=lease.request_id,
                outcome=outcome,
                blocks=len(entry.ids),
                tokens=lease.ticket.num_tokens,
                readers=lease.readers_done,
                seconds=seconds,
                traceparent=lease.ticket.traceparent,
            )
        )
