"""Carries a load whose offer is known, step by step: reach its ranks, plan, claim, read, vouch, tell.

Optional steps are chosen once, after the plan: growth, a payload that is yet to come, a comparison with the producer's
bytes. Loads of no blocks are carried by `_empty`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvflow.checks import counted, said
from kvflow.core.plan.descriptors import FEW, check_block_ids, match_few, read_few
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.policy.history import History
from kvflow.errors import (
    LeaseExpired,
    LoadError,
    Overloaded,
    PrefillFailed,
    RequestError,
    TransferFailed,
)
from kvflow.runtime.copy_thread import CopyFailed
from kvflow.runtime.load.flight import Flight, Read
from kvflow.runtime.load.flight_resources import TURN_S, LoadThrottle
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.load.plan import Plan, check_offered, planned
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.load.straight import Reader
from kvflow.runtime.peers.peer import Source, held
from kvflow.transport.base import TransportError

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache

_OVER = "the offer is over (expired, withdrawn, or read by all it was for): compute the prompt again"
_PAST_DEADLINE = "it ended later than its producer is known to hold the blocks: compute the prompt again"
_DRAWN_OF = 1 << 32
_BROKEN = "its producer could not compute the prompt, and says so: have another one compute it"


class Whole:
    """Carries loads from a ticket to a report."""

    def __init__(self, cache: RegisteredCache) -> None:
        config, limits = cache.config, cache.config.limits
        self._cache = cache
        self._config = config
        self._now_s = cache.clock.now_s
        self._groups = cache.local.groups
        self._peers = cache.peers
        self._resolver = cache.resolver
        self._remote_leases = cache.remote_leases
        self.straight = cache.straight
        self._resources = cache.resources
        self.throttle: LoadThrottle = LoadThrottle(cache.resources.poller)
        self._few_max = FEW if not config.verify_share and self._groups[0].whole else 0
        """Blocks of a load that `_few` may plan: not of one that may be compared, and not of a window."""
        self._slice_max = (limits.slice_bytes_max, limits.slice_descriptors_max)

    async def carry(self, load: Load, work: Work) -> LoadReport:
        """Carry a load from its ticket to its report. Whatever it raises, its flight has stopped, or is quarantined."""
        ticket, request = work.ticket, load.request
        if not len(work.entries) or not (ticket.block_ids or ticket.has_blocks):
            return await self._empty(load, work)
        keep = partial(self._remote_leases.keep, load, ticket.ttl_s)
        sources = self._resolver.reach_at_once(ticket, keep)
        if sources is None:
            work.enter("handshake")
            sources = await self._resolver.reach(ticket, keep)
        work.enter("plan")
        if work.seconds["handshake"] > TURN_S:  # many loads may have waited for the same handshake
            await self.throttle.come(request.priority, again=True)
        plan = self._plan(load, work, sources)
        if request.after is not None or not self._resources.seal_slots.take(plan.sources):
            await self._admitted(load, work)
        flight = work.flight = Flight(load.request_id, work.entries, plan.sources, request.priority, self._resources)
        try:
            fresh = await self._read(load, work, plan, sources)
            flight.land()
        except (TransportError, CopyFailed) as error:
            if flight.failed is not None:
                self._peers.failed(flight.failed.connection, str(error))
            await flight.stop(self._config.cancel_grace_s)
            raise work.failure(load, TransferFailed, f"the transfer failed: {error}") from error
        except BaseException:
            await flight.stop(self._config.cancel_grace_s)
            raise
        self._peers.succeeded(plan.sources, fresh=fresh)
        if not fresh:
            raise self._over_error(load, work)
        return await self._tell(load, work, sources)

    def _plan(self, load: Load, work: Work, sources: Sequence[Source]) -> Plan:
        """Plan which blocks go where. RequestError if theirs and ours do not go together."""
        request = load.request
        plan = self._few(work, sources[0], request.cached_tokens) if len(sources) == 1 and not request.verify else None
        if plan is None:
            check_offered(self._groups, request, work.ticket, work.tables)
            plan = planned(f"request {load.request_id!r}", work.ticket, work.tables, self._groups, sources)
        work.sources, work.tokens = plan.sources, plan.tokens
        work.freshness = plan.sources[0].proof.kind if plan.sources else ""
        return plan

    def _few(self, work: Work, source: Source, cached_tokens: int) -> Plan | None:
        """Plan of a load of a few whole blocks from one rank, in one slice; None if the load is any other."""
        connection, lease, ticket, count = source.connection, source.lease, work.ticket, len(work.entries)
        pairs = connection.alike
        if pairs is None or count > self._few_max or source.proof.grows or ticket.extends or lease.payload:
            return None
        bytes_max, descriptors_max = self._slice_max
        if count * pairs.chunk_size_bytes > bytes_max or count * pairs.pieces > descriptors_max:
            return None
        given = ticket.block_ids if lease.block_ids is None else lease.block_ids
        what = f"request {ticket.request_id!r}: remote_block_ids of {ticket.engine_id!r}"
        check_block_ids(given, num_blocks=connection.num_blocks[0], what=what)
        blocks = match_few(work.tables[0], given, pairs.tokens, cached_tokens, ticket.num_tokens)
        return None if blocks is None else Plan((source,), {}, count * pairs.tokens, blocks)

    def _read(self, load: Load, work: Work, plan: Plan, sources: Sequence[Source]) -> Awaitable[bool]:
        """Choose the way to read: at once or as blocks are computed, and compared where that is asked for."""
        flight, ticket = work.flight, work.ticket
        assert flight is not None, "it was claimed"
        if plan.few:
            work.enter("wire")
            (source,) = sources
            head = flight.head(source) if source.connection.carries_seals and not source.proof.asked else None
            return flight.fly((Read(source, read_few(source.connection.alike, plan.few, head), head is not None),))
        grows = payload = False
        for source in sources:
            grows, payload = grows or source.proof.grows, payload or source.lease.payload
        if payload or ticket.extends:
            asked = [one for one in sources if one.lease.payload or (one.lease.pending and one in plan.sources)]
            self._growing(load).follow(load, asked, plan.matched)
        work.enter("wire")
        if grows or ticket.extends:
            if any(source.lease.pending for source in plan.sources):
                work.landed = History(self._now_s, work.begun_s)
            reader: Reader = self._growing(load)
        else:
            reader = self.buffered(load, plan) or self.straight
        verify = load.request.verify
        if verify or (verify is None and self._config.verify_share and self._drawn()):
            reader = self._cache.part("verify", f"request {load.request_id!r}: a load that is verified").verified(
                reader
            )
        return reader.read(flight, load, work, plan)

    def _growing(self, load: Load) -> Any:
        """Return the part that carries loads of leases that grow."""
        return self._cache.part("growing", f"request {load.request_id!r}: a load of a lease that grows")

    def buffered(self, load: Load, plan: Plan) -> Any:
        """Return the part that reads through buffers; None if all of the load goes straight into the cache."""
        for source in plan.sources:
            if not source.connection.straight and not self.straight.takes(source.connection):
                return self._cache.part("staging", f"request {load.request_id!r}: a load through buffers")
        return None

    def _drawn(self) -> bool:
        """Draw one more load. Return whether it is of the share that is verified."""
        return int(self._cache.token_hex(4), 16) < self._config.verify_share * _DRAWN_OF

    async def _admitted(self, load: Load, work: Work) -> None:
        """Wait for the caller's event, and until as many more ranks may be read from. Overloaded if too many loads wait
        already. A connection that breaks meanwhile stays until we have found out.
        """
        request, slots, waiting_max = load.request, self._resources.seal_slots, self._config.loads_waiting_max
        ranks, ranks_max = len(work.sources), self._config.limits.loads_max
        with held(work.sources):
            if request.after is not None:
                await self._happened(request.after, load, work)
            if ranks > ranks_max:
                raise RequestError(
                    f"request {load.request_id!r}: reads from {counted(ranks, 'rank')}, limits.loads_max is {ranks_max}"
                )
            if not slots.take(work.sources):
                if slots.waiting >= waiting_max:
                    waiting = f"{counted(waiting_max, 'load')} (loads_waiting_max) wait already"
                    raise work.failure(load, Overloaded, waiting)
                work.enter("queued")
                await slots.wait(work.sources, request.priority)
                work.enter("plan")

    async def _happened(self, event: DeviceEvent, load: Load, work: Work) -> None:
        """Wait until the device does nothing to the blocks any more. TransferFailed if that will never be known."""
        work.enter("queued", lambda: "its event `after` has not happened on this engine's device")
        try:
            await self._resources.copy_thread.happened(event)
        except Exception as error:
            raise work.failure(load, TransferFailed, f"its event `after` failed: {said(error)}") from error
        work.enter("plan")

    async def _empty(self, load: Load, work: Work) -> LoadReport:
        """Carry a load of no blocks: tell the producer, if it waits for us; wait for the payload, if one is promised.

        A producer that cannot be told loses nothing: its lease runs out.
        """
        ticket = work.ticket
        if ticket.offers_nothing:
            return work.report(load.request_id)  # its leases ended when they were made
        if not any(rank.payload for rank in ticket.ranks):
            work.enter("notify")
            told = not load.request.keep_offer and await self._remote_leases.release(ticket)
            return work.report(load.request_id, notified=told)
        work.enter("handshake")
        sources = await self._resolver.reach(ticket, partial(self._remote_leases.keep, load, ticket.ttl_s))
        work.enter("wire")
        self._growing(load).follow(load, sources, {})
        return await self._tell(load, work, sources)

    async def _tell(self, load: Load, work: Work, sources: Sequence[Source]) -> LoadReport:
        """Wait for the payload, if one was promised; then tell every rank that holds a lease for us.

        Nobody is told if other loads are to read the same offer.
        """
        if work.news is not None:
            tokens = counted(work.tokens, "token")
            work.compute(lambda: f"{tokens} read, the whole prompt, but the payload that was promised has not come")
            payload = await work.news.payload()
            if payload is None:
                raise self._over_error(load, work)
            work.payload = payload
        work.enter("notify")
        told = not load.request.keep_offer
        if told:
            self._remote_leases.tell(sources)
        return work.report(load.request_id, notified=told)

    def _over_error(self, load: Load, work: Work) -> LoadError:
        """Error of a load whose leases have ended too early: the prompt could not be computed, or another reason."""
        if work.freshness == "deadline":
            return work.failure(load, LeaseExpired, _PAST_DEADLINE)
        told = work.news.failed if work.news is not None else ""
        if told or any(source.proof.failed for source in work.sources):
            return work.failure(load, PrefillFailed, told or _BROKEN)
        return work.failure(load, LeaseExpired, _OVER)
