"""The consumer's side: one load from ticket to report.

A load passes through phases (`load.PHASES`), all under one deadline. What it may raise is typed; whatever happens, its
local blocks are either safe when it returns or carried by the error as a quarantine (invariant I1), and success is
reported only if the seal of every rank that was read was found intact after the last byte (invariant I2).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from kvflow.checks import count, said
from kvflow.config import Config
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Piece, check_block_ids, match_chunks
from kvflow.core.plan.room import check_end, check_room
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.policy.history import History
from kvflow.core.policy.queue import FairQueue, Permit, PermitState
from kvflow.core.protocol.freshness import SEAL_SIZE_BYTES, Freshness, Vouching
from kvflow.core.protocol.prompts import check_prompt
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    CacheUnregistered,
    ChecksumMismatch,
    DeadlineExceeded,
    KVFlowError,
    LeaseExpired,
    LoadError,
    Overloaded,
    PeerError,
    PrefillFailed,
    PromptMismatch,
    RequestError,
    RuntimeClosed,
    RuntimeUnavailable,
    TransferFailed,
    UsageError,
)
from kvflow.logs import logger_of
from kvflow.runtime.consumer.flight import CopyFailed, Flight, Gear, Routing, SourceRead
from kvflow.runtime.consumer.load import (
    PHASES,
    TURN_S,
    VERIFY,
    InFlight,
    Load,
    LoadingStatistics,
    LoadReport,
    LoadRequest,
    PeerLoad,
    Stopwatch,
    Turns,
    Verification,
    checked_load_request,
    request_name,
    said_priority,
)
from kvflow.runtime.consumer.news import Follower, Following, LeaseOver, known_so_far
from kvflow.runtime.consumer.verifying import LeaseEnded, NotCompared, Verifier
from kvflow.runtime.context import RankContext
from kvflow.runtime.memory.pool import granted
from kvflow.runtime.peers.peer import Keeping, LocalRank, Reaching, Source, blocks_by_group
from kvflow.runtime.records import CANCELLED, LOADED, LoadRecord
from kvflow.transport.base import TransportError

logger = logger_of(__name__)

_LABEL_OF = attrgetter("peer.label")
_OVER = "the offer is over (expired, withdrawn, or read by all it was for): compute the prompt again"
_PAST_DEADLINE = "it ended later than its producer is known to hold the blocks: compute the prompt again"
_BROKEN = "its producer could not compute the prompt, and says so: have another one compute it"
_FRESHNESS = ("seal", "deadline")  # by whether there is a deadline
_AHEAD_S = 1e-3  # what it takes at most to see the end of a read and to post another one


def _check_offer(ticket: Ticket, request: LoadRequest) -> None:
    """PromptMismatch if a ticket is not of the prompt that its reader has made room for, as far as both say."""
    what, offers = f"request {request.request_id!r}", f"{_whose(ticket)} offers {ticket.offered_tokens}"
    if request.prompt is not None:
        check_prompt(ticket, request.prompt, what)
        if len(request.prompt) < ticket.offered_tokens:
            raise PromptMismatch(f"{what}: its prompt has {len(request.prompt)} tokens, {offers}")
    if request.num_tokens is not None and request.num_tokens != ticket.offered_tokens:
        raise PromptMismatch(f"{what}: {request.num_tokens} tokens are expected, {offers}")


def _whose(ticket: Ticket) -> str:
    return f"{ticket.engine_id!r} at {ticket.address}"


def _tell_nobody(_: Sequence[Source]) -> None:
    """Others are to read the same."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way: what was asked, how far it is, and what it holds."""

    request: LoadRequest
    ticket: Ticket
    tables: tuple[BlockIds, ...]
    """The local blocks, by group."""
    entries: BlockIds
    """The same, as the ledger counts them."""
    timeout: asyncio.Timeout
    """Without a time, until its deadline has passed or the loader closes."""
    ends_s: float
    """Its deadline, by the loop's clock."""
    watch: Stopwatch
    handle: Load
    tell: Callable[[Sequence[Source]], None]
    """Of what has been read, whoever is to know."""
    started: bool = False
    read_from: list[Source] = field(default_factory=list)
    admission: Permit | None = None
    reads: list[SourceRead] = field(default_factory=list)
    """Of each rank that is read from, once the load is admitted."""
    flight: Flight | None = None
    landed: History | None = None
    """Of leases that grow: when how many tokens had landed."""
    verification: Verification = Verification.OFF
    following: Following | None = None
    """What it asks of leases that are still to come to an end."""
    payload: bytes = b""

    def failure(self, kind: Callable[..., LoadError], why: str, **facts: str) -> LoadError:
        """What went wrong with it, as an error that names it."""
        ticket, request_id = self.ticket, self.request.request_id
        what = f"request {request_id!r} from {ticket.engine_id!r} at {ticket.address}"
        return kind(f"{what}: {why}", request_id=request_id, peer=ticket.address, **facts)

    def report(self, *, tokens: int = 0, notified: bool = False) -> LoadReport:
        self.watch.enter("notify")
        seconds, flight = self.watch.seconds, self.flight
        if flight is not None:
            posted_s = min(flight.post_s, seconds["wire"])
            seconds["post"] += posted_s
            seconds["wire"] -= posted_s
        return LoadReport(
            request_id=self.request.request_id,
            bytes=flight.size_bytes if flight else 0,
            blocks=sum(map(len, self.tables)) if flight else 0,
            tokens=tokens,
            descriptors=flight.descriptor_count if flight else 0,
            sources=tuple(map(_LABEL_OF, self.read_from)),
            notified=notified,
            seconds=seconds,
            verification=self.verification,
            freshness=_FRESHNESS[bool(self.read_from) and self.read_from[0].deadline is not None],
            payload=self.payload,
        )


class Loader:
    """All loads of a runtime."""

    def __init__(
        self,
        context: RankContext,
        local: LocalRank,
        reach: Reaching,
        remote_leases: Keeping,
        route: Routing,
        gear: Gear,
    ) -> None:
        self._config = context.config
        self._context = context
        self._local = local
        self._reach = reach
        self._read_ticket = reach.read_ticket
        self._remote_leases = remote_leases
        self._route = route
        self._gear = gear
        self._turns = Turns(gear.poller)
        self._admissions = FairQueue((context.config.limits.loads_max,))
        self._look: asyncio.TimerHandle | None = None
        self._look_s = math.inf
        self._loads: dict[_Load, None] = {}  # in order, so that a simulation can be replayed
        self._unsafe: dict[Flight, _Load] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = self._unregistered = False
        self._counts = dict.fromkeys(("succeeded", "failed", "cancelled", "refused", "bytes"), 0)
        self._verifier = Verifier(context.config, local, reach, gear.digests, context.token_hex)
        self._verified: Counter[Verification] = Counter()
        self._follower = Follower(context, local, reach)

    @property
    def statistics(self) -> LoadingStatistics:
        queue = self._gear.queue
        return LoadingStatistics(
            open_loads=len(self._loads),
            waiting_loads=self._admissions.waiting,
            waiting_reads=queue.waiting,
            in_flight=InFlight(*queue.used),
            peers={
                peer: PeerLoad(in_flight=InFlight(*used), waiting_reads=waiting)
                for peer, used, waiting in queue.peers()
            },
            quarantines=len(self.quarantines),
            renewals=self._remote_leases.sent,
            **self._counts,
            **{str(one): self._verified[one] for one in Verification if one is not Verification.OFF},
        )

    @property
    def open_requests(self) -> list[str]:
        """The requests whose loads are under way, or whose bytes are."""
        return [load.handle.request_id for load in self._loads | dict.fromkeys(self._unsafe.values())]

    @property
    def quarantines(self) -> tuple[Load, ...]:
        """Loads that have ended and whose blocks are not safe yet."""
        return tuple(load.handle for load in self._unsafe.values() if load.handle.done)

    async def load(self, request: LoadRequest) -> LoadReport:
        """See `Runtime.load_blocks`."""
        begun_s = self._context.clock.now_s()
        if not self._turns.at_once(begun_s):
            await self._turns.come(said_priority(request))
        return await self._carry_out(self._accept(request, begun_s))

    def start(self, request: LoadRequest) -> Load:
        """See `Runtime.start_load`; raises what is wrong with the request."""
        load = self._accept(request, self._context.clock.now_s())
        load.handle.begin(partial(self._start_in_turn, load)).add_done_callback(partial(self._over, load))
        return load.handle

    def refuse(self, request: LoadRequest, error: KVFlowError) -> None:
        """Note that a load was not accepted, and why."""
        self._counts["refused"] += 1
        logger.info("refused a load: %s", error)
        if self._context.observers.all:
            self._context.observers.load_ended(
                LoadRecord(
                    engine_id=self._config.engine_id,
                    rank=self._context.identity.rank,
                    request_id=request_name(request),
                    outcome=type(error).__name__,
                    error=str(error),
                    phase="queued",
                    seconds=dict.fromkeys(PHASES, 0.0),
                )
            )

    def close(self, *, unregistered: bool = False) -> None:
        """Make every load under way end soon, with RuntimeClosed; with CacheUnregistered if that is why."""
        self._closed, self._unregistered = True, self._unregistered or unregistered
        self._look_at(math.inf)
        self._remote_leases.close()
        now_s = asyncio.get_running_loop().time()
        for load in self._loads:
            if load.started and load.timeout.when() is None:  # else it is ending already, or has yet to find out
                load.timeout.reschedule(now_s)

    def all_stopped(self) -> None:
        """The transport was closed in good order, so no byte can land any more: nothing stays quarantined."""
        for flight in list(self._unsafe):
            flight.all_stopped()

    async def drained(self) -> None:
        """Wait until no load is under way and no block is quarantined."""
        await self._quiet.wait()

    async def _start_in_turn(self, load: _Load) -> LoadReport:
        """The body of a load's own task."""
        if not self._turns.at_once(self._context.clock.now_s()):
            await self._turns.come(load.request.priority)
        return await self._carry_out(load)

    def _accept(self, request: LoadRequest, begun_s: float) -> _Load:
        """Check all that can be judged without the peer: from here on it is open. Its time runs already."""
        watch = Stopwatch(self._context.clock, begun_s)
        try:
            if self._config.role == "producer":
                raise UsageError(f"load_blocks: the role of engine {self._config.engine_id!r} is 'producer'")
            chars_max, ids_max = self._config.limits.request_id_chars_max, self._config.limits.block_ids_max
            plain = checked_load_request(request, chars_max, ids_max)
            what = f"request {plain.request_id!r}"
            ticket = self._read_ticket(plain.ticket, ids_max)
            says_tokens = plain.prompt is not None or plain.num_tokens is not None
            if says_tokens and not ticket.awaited:
                _check_offer(ticket, plain)
            if plain.verify and (problem := self._gear.digests.own.problem):
                raise RequestError(f"{what}: verify: {problem}")
            tables, entries = self._gear.ledger.find(plain.block_ids, f"{what}: block_ids")
            if says_tokens:
                self._check_room(plain, ticket, tables)
        except KVFlowError as error:
            self.refuse(request, error)
            raise
        deadline_s = self._config.load_deadline_s if plain.deadline_s is None else plain.deadline_s
        waited_s = self._context.clock.now_s() - begun_s
        ends_s = asyncio.get_running_loop().time() + deadline_s - waited_s
        load = _Load(
            plain,
            ticket,
            tables,
            entries,
            asyncio.timeout(None),
            ends_s,
            watch,
            Load(plain.request_id, tables),
            _tell_nobody if plain.keep_offer else self._remote_leases.tell,
        )
        self._loads[load] = None
        self._quiet.clear()
        if ends_s < self._look_s and not self._closed:
            self._look_at(ends_s)
        return load

    def _check_room(self, request: LoadRequest, ticket: Ticket, tables: Sequence[BlockIds]) -> None:
        """RequestError if there are more blocks than the tokens fill, as far as these are known by now."""
        what, groups, tokens = f"request {request.request_id!r}", self._local.groups, ticket.offered_tokens
        if not ticket.awaited and tokens:
            check_room(groups, tables, tokens, what, f"the {tokens} tokens that {_whose(ticket)} offers")
        elif ticket.awaited and request.prompt is not None:
            tokens = count(request.prompt, f"{what}: prompt")
            check_room(groups, tables, tokens, what, f"the {tokens} tokens of its prompt")

    def _check_met(self, load: _Load) -> None:
        """As a load whose offer was known; and PromptMismatch if its blocks end with a prompt that goes on."""
        request, ticket = load.request, load.ticket
        _check_offer(ticket, request)
        if request.prompt is not None or request.num_tokens is not None:
            self._check_room(request, ticket, load.tables)
        if request.prompt is not None and request.num_tokens is None and not ticket.offers_nothing:
            sizes, what = (len(request.prompt), ticket.offered_tokens), f"request {request.request_id!r}"
            check_end(self._local.groups, load.tables, *sizes, what, _whose(ticket))

    def _look_at(self, when_s: float) -> None:
        """Look for loads past their deadline then, and no earlier. There is one timer for all: most loads are quick."""
        if self._look is not None:
            self._look.cancel()
        self._look, self._look_s = None, when_s
        if when_s < math.inf:
            self._look = asyncio.get_running_loop().call_at(when_s, self._end_overdue)

    def _end_overdue(self) -> None:
        now_s, next_s = asyncio.get_running_loop().time(), math.inf
        for load in self._loads:
            if load.ends_s > now_s:
                next_s = min(next_s, load.ends_s)
            elif load.started and load.timeout.when() is None:  # else it finds out when it starts, or has
                load.timeout.reschedule(now_s)
        self._look_at(next_s)

    async def _carry_out(self, load: _Load) -> LoadReport:
        """From the first step to the outcome: the one place where a load ends."""
        load.started = True
        try:
            report = await self._run(load)
        except asyncio.CancelledError as cancelled:
            self._end(load, cancelled, "cancelled", CANCELLED)
            raise
        except KVFlowError as error:
            if isinstance(error, PeerError | LoadError | RequestError):  # of its ticket, or which others meet, too
                error = error.of_request(load.request.request_id, load.ticket.engine_id)
            error.quarantine = load.handle if load.flight is not None and not load.flight.safe else None
            logger.info("load %s failed in phase %s: %s", load.handle.request_id, load.watch.phase, error)
            self._end(load, error, "failed", type(error).__name__, str(error))
            raise error from error.__cause__
        except BaseException as bug:
            self._end(load, bug, "failed", type(bug).__name__, str(bug))
            raise
        self._counts["bytes"] += report.bytes
        self._end(load, report, "succeeded", LOADED)
        return report

    def _over(self, load: _Load, task: asyncio.Task[LoadReport]) -> None:
        """A load's own task has ended, perhaps cancelled before its first step."""
        if not load.started:
            self._end(load, asyncio.CancelledError(), "cancelled", CANCELLED)
        if not task.cancelled():
            task.exception()  # seen: it is logged, and whoever awaits the load gets it

    async def _run(self, load: _Load) -> LoadReport:
        ticket = load.ticket
        try:
            async with load.timeout:
                if self._closed:
                    raise self._closed_error(load)
                if load.ends_s <= asyncio.get_running_loop().time():
                    raise TimeoutError
                if not any(ticket.block_tables):
                    if await self._meet(load):
                        return load.report()
                    ticket = load.ticket
                if len(load.entries) == 0:
                    # A full hit: tell the producer. If it cannot be told its lease runs out, which costs us nothing.
                    if any(rank.payload for rank in ticket.ranks):
                        return await self._take_payload(load)
                    load.watch.enter("notify")
                    told = not load.request.keep_offer and await self._remote_leases.release(ticket)
                    return load.report(notified=told)
                load.watch.enter("handshake")
                sources = await self._reach.reach(ticket, partial(self._remote_leases.keep, load, ticket.ttl_s))
                load.watch.enter("plan")
                if load.watch.seconds["handshake"] > TURN_S:  # many may have waited for the same one
                    await self._turns.come(load.request.priority, again=True)
                return await self._read(load, sources)
        except TimeoutError:
            if self._closed:
                raise self._closed_error(load) from None
            phase = load.watch.phase
            raise load.failure(DeadlineExceeded, f"deadline exceeded in phase {phase!r}", phase=phase) from None

    async def _meet(self, load: _Load) -> bool:
        """What becomes of a ticket that names no blocks: whether that is all. With a rendezvous the offer is found."""
        if load.ticket.awaited:
            load.watch.enter("handshake")
            load.ticket = await self._reach.meet(load.ticket, partial(self._keep, load))
            self._check_met(load)
        return load.ticket.offers_nothing

    def _keep(self, load: _Load, source: Source, ttl_s: float) -> None:
        self._remote_leases.keep(load, ttl_s, source)

    async def _take_payload(self, load: _Load) -> LoadReport:
        """Nothing is read, but a payload comes: wait for it, then tell the producer."""
        load.watch.enter("handshake")
        sources = await self._reach.reach(load.ticket, partial(self._remote_leases.keep, load, load.ticket.ttl_s))
        load.watch.enter("wire")
        load.following = self._follower.follow(load.ticket, sources, lambda _: None)
        await self._wait_for_payload(load, load.following)
        load.watch.enter("notify")
        load.tell(sources)
        return load.report(notified=not load.request.keep_offer)

    def _follow(
        self, load: _Load, sources: Sequence[Source], chunks: Mapping[tuple[int, int], tuple[Chunks, ...]]
    ) -> None:
        """Ask the ranks whose leases are to come to an end what becomes of them."""
        reads = {read.origin: read for read in load.reads}
        asked = [one for one in sources if one.lease.payload or (one.lease.pending and one in reads)]
        load.following = self._follower.follow(load.ticket, asked, partial(self._told, load))
        for one in load.following.followed:
            if (read := reads.get(one.source)) is not None:
                maps = one.source.connection.block_maps
                one.attach(read, [some for block_map in maps for some in chunks[block_map.of_groups]])

    def _told(self, load: _Load, source: Source) -> None:
        """There is news of a lease: what waits for its seal looks again."""
        self._gear.watches.nudge(source.lease.lease_id)
        if load.flight is not None:
            load.flight.look_again()

    async def _wait_for_payload(self, load: _Load, following: Following) -> None:
        try:
            load.payload = await following.payload()
        except LeaseOver:
            raise self._over_error(load) from None

    def _over_error(self, load: _Load) -> LoadError:
        """Its leases have ended too early: because a prompt could not be computed, or for another reason."""
        told = [one.failed for one in load.following.followed if one.failed] if load.following is not None else []
        if told or any(read.freshness.failed for read in load.reads):
            return load.failure(PrefillFailed, told[0] if told else _BROKEN)
        return load.failure(LeaseExpired, _OVER)

    def _closed_error(self, load: _Load) -> RuntimeUnavailable:
        if self._unregistered:
            why = f"the cache of {self._config.engine_id!r} was unregistered in phase {load.watch.phase!r}"
            return CacheUnregistered(f"request {load.request.request_id!r}: {why}")
        why = f"the runtime {self._config.engine_id!r} was closed, or had drained, in phase {load.watch.phase!r}"
        return RuntimeClosed(f"request {load.request.request_id!r}: {why}")

    async def _read(self, load: _Load, sources: Sequence[Source]) -> LoadReport:
        ticket = load.ticket
        chunks: dict[tuple[int, int], tuple[Chunks, ...]] = {}
        offered: list[Sequence[BlockIds]] = []
        follows = told = False
        for source in sources:
            connection, wanted = source.connection, False
            follows = follows or source.lease.pending
            told = told or source.lease.payload or ticket.extends
            given = ticket.block_tables if source.lease.block_ids is None else source.lease.block_tables
            for block_map in connection.block_maps:
                if block_map.of_groups not in chunks:
                    chunks[block_map.of_groups] = self._match(load, block_map, connection.whole, given)
                wanted = wanted or len(chunks[block_map.of_groups]) > 0
            if wanted:
                load.read_from.append(source)
                if ticket.extends:
                    offered.append(known_so_far(ticket, source))
                    continue
                what = f"request {ticket.request_id!r}: remote_block_ids of {ticket.engine_id!r}"
                tables = []
                for ids, count in zip(given, connection.num_blocks, strict=True):
                    tables.append(check_block_ids(ids, num_blocks=count, what=what))
                offered.append(tables)
        self._reach.hold(load.read_from)  # a connection that breaks while we wait stays until we have found out
        try:
            if load.request.after is not None:
                await self._until(load, load.request.after)
            flight = self._take_off(load, await self._admit(load), offered)
        except BaseException:
            self._reach.release(load.read_from)
            raise
        try:
            for read in load.reads:
                for block_map in read.origin.connection.block_maps:
                    for some in chunks[block_map.of_groups]:
                        read.chunks.append((block_map, some.locate(read.tables[block_map.remote_group])))
            if told:
                self._follow(load, sources, chunks)
            elif follows:  # its seal may say already that all is there
                flight.on_wait = partial(self._follow, load, sources, chunks)
            verify = load.request.verify
            if verify is None and self._config.verify_share:
                verify = self._verifier.drawn()
            load.watch.enter("wire")
            if verify:
                fresh = await self._read_verified(load, flight)
            else:
                fresh = await flight.read(
                    load.reads,
                    self._route.groups(
                        load.reads, load.tables, load.ticket.num_tokens, load.handle.note_progress, load.landed
                    ),
                )
        except (TransportError, CopyFailed) as error:
            if flight.failed is not None:
                self._reach.failed(flight.failed.origin, str(error))
            await flight.stop(self._config.cancel_grace_s)
            raise load.failure(TransferFailed, f"the transfer failed: {error}") from error
        except BaseException:
            await flight.stop(self._config.cancel_grace_s)
            raise
        self._reach.succeeded(load.read_from)
        if not fresh:
            if load.read_from[0].deadline is not None:
                raise load.failure(LeaseExpired, _PAST_DEADLINE)
            raise self._over_error(load)
        if load.following is not None:
            await self._wait_for_payload(load, load.following)
        load.watch.enter("notify")
        load.tell(sources)
        tokens = 0
        for found in chunks.values():
            count = 0
            for some in found:
                count += len(some) * some.tokens
            tokens = max(tokens, count)
        return load.report(tokens=tokens, notified=not load.request.keep_offer)

    async def _read_verified(self, load: _Load, flight: Flight) -> bool:
        """Read, and compare with what the producer holds; where that differs read once more, and compare again.

        Whether the lease has covered all of it. Raises ChecksumMismatch, or why a load that has to be verified is not.
        """
        try:
            difference = await self._read_and_compare(load, flight)
            load.verification = Verification.VERIFIED
            if difference:
                load.verification = Verification.MISMATCH
                logger.warning("load %s is read once more: %s", load.handle.request_id, difference)
                for read in load.reads:
                    read.freshness = read.freshness.anew()
                difference = await self._read_and_compare(load, flight)
                if difference:
                    raise load.failure(ChecksumMismatch, f"what was read twice is not what is offered: {difference}")
                load.verification = Verification.REPAIRED
        except LeaseEnded:
            flight.land()
            return False
        except NotCompared as problem:
            self._not_verified(load, problem)
        flight.land()
        return True

    async def _read_and_compare(self, load: _Load, flight: Flight) -> str:
        """What differs, "" if nothing. Raises LeaseEnded or NotCompared when no read is under way any more."""
        async with self._verifier.asking(load.ticket.request_id, load.reads, load.tables) as comparison:
            load.watch.enter("wire")
            if not await flight.read(
                load.reads, self._route.groups(load.reads, load.tables, load.ticket.num_tokens), more=True
            ):
                raise LeaseEnded
            load.watch.enter(VERIFY)
            return await comparison.difference()

    def _not_verified(self, load: _Load, problem: NotCompared) -> None:
        """What was read could not be compared: raises what follows from that, if the load must not go on."""
        if load.verification is Verification.MISMATCH:
            why = f"what was read is not what is offered, and then could not be compared: {problem}"
            raise load.failure(ChecksumMismatch, why) from problem
        load.verification = Verification.UNVERIFIED
        logger.info("load %s is not verified: %s", load.handle.request_id, problem)
        if load.request.verify:
            if isinstance(problem.__cause__, PeerError):
                raise problem.__cause__ from None
            raise load.failure(TransferFailed, f"it cannot be verified: {problem}") from problem

    def _match(
        self, load: _Load, block_map: BlockMap, wholes: Sequence[bool], given: Sequence[Sequence[int]]
    ) -> tuple[Chunks, ...]:
        """Which chunks of one of their groups go to one of ours. RequestError if they do not go together.

        `wholes` says of each of theirs whether its blocks hold the prompt from its first token on; `given` are these.
        """
        ticket, whole = load.ticket, wholes[block_map.remote_group]
        tokens = ticket.offered_tokens if ticket.groups else ticket.num_tokens
        return match_chunks(
            load.tables[block_map.local_group],
            ticket.block_counts[block_map.remote_group] if ticket.extends else len(given[block_map.remote_group]),
            local_block_size=block_map.local.block.tokens,
            remote_block_size=block_map.remote.block.tokens,
            num_tokens=tokens,
            needed_from=0 if whole else self._local.groups[block_map.local_group].first_needed(tokens),
            whole=whole,
            what=f"request {load.request.request_id!r}",
        )

    async def _until(self, load: _Load, after: DeviceEvent) -> None:
        """Wait until the device has left the blocks alone. TransferFailed if that will never be known."""
        load.watch.enter("queued")
        try:
            await self._gear.copy_thread.happened(after)
        except Exception as error:
            raise load.failure(TransferFailed, f"its event `after` failed: {said(error)}") from error
        load.watch.enter("plan")

    async def _admit(self, load: _Load) -> Permit:
        """Wait until as many more ranks may be read from. Overloaded if too many loads wait already."""
        ranks, ranks_max = len(load.read_from), self._config.limits.loads_max
        if ranks > ranks_max:
            what = f"request {load.request.request_id!r}"
            raise RequestError(f"{what}: reads from {ranks} ranks, loads_max is {ranks_max}")
        permit = self._admissions.ask((ranks,), priority=load.request.priority)
        if permit.state is PermitState.WAITING:
            if self._admissions.waiting > self._config.loads_waiting_max:
                self._admissions.end(permit)
                waiting = f"{self._config.loads_waiting_max} loads (loads_waiting_max) wait already"
                raise load.failure(Overloaded, waiting)
            load.watch.enter("queued")
            await granted(self._admissions, permit)
            load.watch.enter("plan")
        return permit

    def _take_off(self, load: _Load, admission: Permit, offered: Sequence[Sequence[BlockIds]]) -> Flight:
        """Claim what a flight needs, now that it is admitted: its blocks, and a word for each rank's seal.

        From here on the connections that are held are the flight's to release.
        """
        gear, request = self._gear, load.request
        load.admission = admission
        try:
            enter = load.watch.enter
            flight = Flight(request.request_id, load.entries, request.priority, gear, enter, self._landed)
        except KVFlowError:
            self._admissions.end(admission)
            raise
        for source, tables in zip(load.read_from, offered, strict=True):
            connection, index = source.connection, gear.seals.take()
            assert index is not None, "there are as many words as ranks may be read from"
            seal = Piece(gear.seals.address(index), source.seal_address, SEAL_SIZE_BYTES)
            sure_s, quick_s = source.not_expired_before_s, connection.quick_read_max_s
            grows = connection.staged or source.lease.pending
            freshness: Vouching = (
                source.deadline
                if source.deadline is not None
                else Freshness(grows=grows, not_expired_before_s=sure_s, quick_read_max_s=quick_s)
            )
            load.reads.append(SourceRead(source, tables, seal, index, freshness))
            if source.lease.pending and load.landed is None:
                load.landed = History(self._context.clock.now_s, load.watch.begun_s)
        self._unsafe[flight] = load
        load.flight = load.handle.flight = flight
        flight.followed = load.handle.followed
        return flight

    def _landed(self, flight: Flight) -> None:
        """No byte of a flight can land any more: give back what it has claimed."""
        load = self._unsafe.pop(flight)
        for read in load.reads:
            self._gear.seals.give_back(read.seal_index)
        assert load.admission is not None, "a flight is admitted before it takes off"
        self._admissions.end(load.admission)
        self._reach.release(load.read_from)
        if self._turns.paused:
            self._turns.resume()
        if not self._loads and not self._unsafe:
            self._quiet.set()

    def _end(
        self, load: _Load, result: LoadReport | BaseException, counted: str, outcome: str, error: str = ""
    ) -> None:
        """Forget a load, count how it has ended, and tell its handle and the observers."""
        load.handle.end(result)
        if load.following is not None:
            load.following.close()
        self._loads.pop(load, None)
        self._remote_leases.forget(load)
        self._counts[counted] += 1
        self._verified[load.verification] += 1
        if not self._loads and not self._unsafe:
            self._quiet.set()
        if not self._context.observers.all:
            return
        load.watch.enter(load.watch.phase)
        flight = load.flight
        self._context.observers.load_ended(
            LoadRecord(
                engine_id=self._config.engine_id,
                rank=self._context.identity.rank,
                request_id=load.request.request_id,
                peer_engine_id=load.ticket.engine_id,
                remote_request_id=load.ticket.request_id,
                peer=load.ticket.address,
                outcome=outcome,
                error=error,
                phase=load.watch.phase,
                bytes=flight.size_bytes if flight else 0,
                blocks=sum(map(len, load.tables)),
                blocks_by_group=blocks_by_group(self._local.groups, load.tables),
                descriptors=flight.descriptor_count if flight else 0,
                seconds=load.watch.seconds,
                verification=load.verification,
                freshness=_FRESHNESS[load.read_from[0].deadline is not None] if load.read_from else "",
                landed=load.landed.moments if load.landed is not None else (),
                traceparent=load.ticket.traceparent,
            )
        )


def reads_in_flight(config: Config, *, grows: bool) -> FairQueue:
    """What may be in flight at once, in all and from one rank, which may grow with its speed."""
    most = config.limits
    of_peer = most.peer_in_flight_bytes_max, most.peer_in_flight_descriptors_max, most.peer_in_flight_reads_max
    in_all = config.in_flight_bytes_max, most.in_flight_descriptors_max, most.in_flight_reads_max
    return FairQueue(in_all, of_peer, ahead_s=_AHEAD_S if grows else 0.0)
