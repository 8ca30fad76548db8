"""The steps of a load with a known offer: connect to its ranks, plan, claim, read, check the proofs, notify the ranks.

Options are chosen once, after the plan: a growing lease, a promised payload, buffers, a comparison with the producer's
bytes. Most loads are read straight into the cache (`read_directly`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial

from kvflow.checks import counted, error_text
from kvflow.core.plan.descriptors import FEW_BLOCKS, check_block_ids, match_few, read_few, small_load_map
from kvflow.core.policy.history import History
from kvflow.errors import (
    COMPUTE,
    LeaseExpired,
    LoadError,
    Overloaded,
    PrefillFailed,
    RequestError,
    TransferFailed,
)
from kvflow.runtime.copy_thread import CopyFailed
from kvflow.runtime.load.flight import Flight, Read
from kvflow.runtime.load.flight_resources import TURN_S, FlightResources, LoadThrottle
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.plan import Plan, check_blocks_fit, plan_load
from kvflow.runtime.load.reads import direct_reads, may_use_scratch
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.memory import RankMemory
from kvflow.runtime.optional import Growing, OptionalParts, ReadBlocks, Staging
from kvflow.runtime.peers.peer import Connection, Resolver, Source, hold_connections
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.rank import RankContext
from kvflow.transport.base import TransportError

_LEASE_ENDED = "the lease has ended (expired, revoked, or read by all its readers): compute the prompt again"
_PAST_DEADLINE = "the read ended later than the producer surely holds the blocks: compute the prompt again"
_RANDOM_VALUES = 1 << 32
_PREFILL_FAILED = "its producer reports that it could not compute the prompt: have another engine compute it"


class LoadSteps:
    """Performs the loads of one registered cache: all steps of a load with a known offer."""

    def __init__(
        self,
        context: RankContext,
        peers: Peers,
        resolver: Resolver,
        leases: RemoteLeases,
        memory: RankMemory,
        resources: FlightResources,
        throttle: LoadThrottle,
        optional: OptionalParts,
    ) -> None:
        self._config = context.config
        self._local = context.local
        self._clock = context.clock
        self._token_hex = context.token_hex
        self._weights = context.weights
        self._peers = peers
        self._resolver = resolver
        self._leases = leases
        self._memory = memory
        self._resources = resources
        self._throttle = throttle
        self._optional = optional

    async def perform(self, load: Load) -> LoadReport:
        """Perform all steps of an accepted load, and return its report.

        If this raises, all posted reads of the load have stopped, or its blocks are quarantined.
        """
        ticket, request, grace_s = load.ticket, load.request, self._config.cancel_grace_s
        if not any(map(len, load.tables)) or not (ticket.block_ids or ticket.has_blocks):
            return await self._perform_empty(load)
        # Each lease is renewed as soon as its rank is known: the load may wait long for another rank, or for permits.
        keep = partial(self._leases.start_renewing, load, ticket.ttl_s)
        sources = self._resolver.resolve_nowait(ticket, keep)
        if sources is None:
            load.enter_phase("handshake")
            sources = await self._resolver.resolve(ticket, keep)
        load.enter_phase("plan")
        if load.seconds["handshake"] > TURN_S:  # many loads may have waited for the same handshake
            await self._throttle.wait_for_turn(request.priority, started_before=True)
        plan = self._plan(load, sources)
        if request.after is not None or not self._resources.seal_slots.take(plan.sources):
            await self._wait_for_admission(load)
        flight = load.flight = Flight(load.request_id, load.entries, plan.sources, request.priority, self._resources)
        try:
            fresh = await self._read(load, flight, plan, sources)
            flight.land()
        except (TransportError, CopyFailed) as error:
            if isinstance(flight.failed_source, Source):  # None after a failed copy, for which no peer is to blame
                self._peers.note_read_failure(flight.failed_source.connection, str(error))
            await flight.stop(grace_s)
            raise load.failure(TransferFailed, f"the transfer failed: {error}") from error
        except BaseException:
            await flight.stop(grace_s)
            raise
        # Also after stale bytes: the connection works, and only a read that ends resets a back-off (decision 0009).
        self._peers.note_read_success(plan.sources, fresh=fresh)
        if not fresh:
            raise _stale_error(load)
        if load.weights != self._weights.version:
            both = f"this engine's weights {load.weights!r} were replaced by {self._weights.version!r}"
            raise load.failure(LeaseExpired, f"{both} during the load: compute the prompt again")
        return await self._notify_and_report(load, sources)

    async def _perform_empty(self, load: Load) -> LoadReport:
        """Perform a load that reads no block: wait for a promised payload (extra bytes), then notify the producer.

        RequestError if it has local blocks, since an offer without blocks would leave them as they are.
        """
        ticket = load.ticket
        check_blocks_fit(self._local.groups, load.request, ticket, load.tables)
        if ticket.offers_nothing:
            return load.report()  # an empty offer: its leases have ended already
        if not any(rank.payload for rank in ticket.ranks):
            load.enter_phase("notify")
            told = not load.request.keep_offer and await self._leases.release(ticket)
            return load.report(notified=told)
        load.enter_phase("handshake")
        sources = await self._resolver.resolve(ticket, partial(self._leases.start_renewing, load, ticket.ttl_s))
        load.enter_phase("wire")
        self._growing(load).ask_about_leases(load, sources, {})
        return await self._notify_and_report(load, sources)

    def _plan(self, load: Load, sources: Sequence[Source]) -> Plan:
        """Return the plan of which remote block goes to which local block. RequestError if blocks do not match."""
        request, groups = load.request, self._local.groups
        plan = self._plan_few(load, sources[0]) if len(sources) == 1 and not request.verify else None
        if plan is None:
            check_blocks_fit(groups, request, load.ticket, load.tables)
            plan = plan_load(f"request {load.request_id!r}", load.ticket, load.tables, groups, sources)
        load.sources, load.tokens = plan.sources, plan.tokens
        load.freshness = plan.sources[0].proof.kind if plan.sources else ""
        return plan

    def _plan_few(self, load: Load, source: Source) -> Plan | None:
        """Return the plan of a small load: a few whole blocks from one rank, in one slice. None for other loads."""
        connection, lease, ticket, count = source.connection, source.lease, load.ticket, len(load.entries)
        limits, pairs = self._config.limits, connection.region_map
        if pairs is None or count > FEW_BLOCKS or source.proof.grows or ticket.extends or lease.payload:
            return None
        if load.request.extends:
            return None
        if (
            count * pairs.chunk_size_bytes > limits.slice_bytes_max
            or count * pairs.pieces > limits.slice_descriptors_max
        ):
            return None
        offered = ticket.block_ids if lease.block_ids is None else lease.block_ids
        what = f"request {ticket.request_id!r}: remote_block_ids of {ticket.engine_id!r}"
        check_block_ids(offered, num_blocks=connection.num_blocks[0], what=what)
        blocks = match_few(load.tables[0], offered, pairs.tokens, load.request.cached_tokens, ticket.num_tokens)
        return None if blocks is None else Plan((source,), {}, count * pairs.tokens, blocks)

    async def _wait_for_admission(self, load: Load) -> None:
        """Wait for the request's device event `after`, then for a free slot in host memory for the seal of each rank.

        Overloaded if too many loads wait for slots. RequestError if the load reads from more ranks than there are
        slots. During the waits, hold the load's connections, so that their agents stay in the transport.
        """
        request, slots, waiting_max = load.request, self._resources.seal_slots, self._config.loads_waiting_max
        ranks, ranks_max = len(load.sources), self._config.limits.source_ranks_max
        with hold_connections(load.sources):
            if request.after is not None:
                load.enter_phase("queued", lambda: "its event `after` has not happened on this engine's device")
                try:
                    await self._resources.copy_thread.wait_for_event(request.after)
                except Exception as error:
                    raise load.failure(TransferFailed, f"its event `after` failed: {error_text(error)}") from error
                load.enter_phase("plan")
            if ranks > ranks_max:  # this load would wait forever, and hold up all loads behind it (I7)
                raise RequestError(
                    f"request {load.request_id!r}: reads from {counted(ranks, 'rank')}, "
                    f"limits.source_ranks_max is {ranks_max}"
                )
            if not slots.take(load.sources):
                if slots.waiting >= waiting_max:
                    raise load.failure(Overloaded, f"{counted(waiting_max, 'load')} (loads_waiting_max) wait already")
                load.enter_phase("queued")
                await slots.wait_for_slots(load.sources, request.priority)
                load.enter_phase("plan")

    def _read(self, load: Load, flight: Flight, plan: Plan, sources: Sequence[Source]) -> Awaitable[bool]:
        """Choose how to read the load's blocks, and return an awaitable that reads them.

        Awaiting it gives True if the leases covered all reads.
        """
        ticket, verify = load.ticket, load.request.verify
        if plan.block_pairs:
            load.enter_phase("wire")
            (source,) = sources
            # As the last descriptor of the only read, the seal costs no round trip of its own (decision 0003).
            seal = (
                flight.seal_piece(source) if source.connection.carries_seals and not source.proof.fetch_posted else None
            )
            return flight.read_all(
                (Read(source, read_few(source.connection.region_map, plan.block_pairs, seal), seal is not None),)
            )
        grows, payload = load.request.extends, False
        for source in sources:
            grows, payload = grows or source.proof.grows, payload or source.lease.payload
        if payload or ticket.extends:
            asked = [
                source
                for source in sources
                if source.lease.payload or (source.lease.pending and source in plan.sources)
            ]
            self._growing(load).ask_about_leases(load, asked, plan.matched)
        load.enter_phase("wire")
        read: ReadBlocks | None = None
        if (grows or ticket.extends) and plan.sources:  # of sharded tokens, this rank may have none of a short prompt
            if any(source.lease.pending for source in plan.sources):
                load.landed = History(self._clock.now_s, load.begun_s)
            read = self._growing(load).read_growing
        elif (buffered := self.staging_for(load, plan)) is not None:
            read = buffered.read_buffered
        if verify or (verify is None and self._config.verify_share and self._verify_by_chance()):
            verifier = self._optional.verify(f"request {load.request_id!r}: a load that is verified")
            read = partial(verifier.read_verified, read)
        return self.read_directly(load, flight, plan) if read is None else read(load, flight, plan)

    async def _notify_and_report(self, load: Load, sources: Sequence[Source]) -> LoadReport:
        """Wait for the payload (extra bytes), if the ticket promises one. Then notify every rank with a lease.

        Return the load's report. With `LoadRequest.keep_offer` no rank is notified, since other loads are to read the
        same offer.
        """
        # The payload comes before the notifications: these end the lease, and an ended lease has no payload.
        if load.lease_questions is not None:
            tokens = counted(load.tokens, "token")
            load.enter_phase(COMPUTE, lambda: f"all {tokens} are read, but the promised payload has not come")
            payload = await load.lease_questions.payload()
            if payload is None:
                raise _stale_error(load)
            load.payload = payload
        load.enter_phase("notify")
        told = not load.request.keep_offer
        if told:
            self._leases.notify_finished(sources)
        return load.report(notified=told)

    def _growing(self, load: Load) -> Growing:
        """Return what reads growing leases."""
        return self._optional.growing(f"request {load.request_id!r}: a load of a lease that grows")

    def staging_for(self, load: Load, plan: Plan) -> Staging | None:
        """Return what fills blocks through buffers; None if the load needs no buffers."""
        for source in plan.sources:
            if not source.connection.reads_directly and not self._reads_directly(source.connection):
                return self._optional.staging(f"request {load.request_id!r}: a load through buffers")
        return None

    def _verify_by_chance(self) -> bool:
        """Return at random whether to verify a load: True with the probability Config.verify_share."""
        return int(self._token_hex(4), 16) < self._config.verify_share * _RANDOM_VALUES

    def _reads_directly(self, connection: Connection) -> bool:
        """Return whether all reads over `connection` go straight into the cache. Computed once per connection."""
        if connection.reads_directly is None:
            pieces = any(may_use_scratch(self._memory, block_map) for block_map in connection.block_maps)
            connection.reads_directly = not pieces and not self._memory.staging
            plain = self._local.groups[0].whole and connection.ticket_groups == () and not self._config.verify_share
            if connection.reads_directly and plain and len(connection.block_maps) == 1:
                connection.region_map = small_load_map(connection.block_maps[0])
        return connection.reads_directly

    def read_directly(self, load: Load, flight: Flight, plan: Plan) -> Awaitable[bool]:
        """Return an awaitable that reads the load straight into the cache.

        Awaiting it gives True if the leases covered all reads.
        """
        return flight.read_all(direct_reads(self._config.limits, plan.sources, flight.seal_piece))


def _stale_error(load: Load) -> LoadError:
    """Return the error of a load with a lease that ended too early to prove the read fresh.

    It is PrefillFailed if the prompt could not be computed, else LeaseExpired.
    """
    if load.freshness == "deadline":
        return load.failure(LeaseExpired, _PAST_DEADLINE)
    # A load that has asked no rank finds the failure in the seal: that says FAILED until its slot is reused.
    told = load.lease_questions.failed if load.lease_questions is not None else ""
    if told or any(source.proof.failed for source in load.sources):
        return load.failure(PrefillFailed, told or _PREFILL_FAILED)
    return load.failure(LeaseExpired, _LEASE_ENDED)
