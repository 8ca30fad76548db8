"""The consumer's side: one load from ticket to report, and the one place where it ends.

What kind of load it is, is decided when it is accepted: one that offers nothing, one with nothing to fill, one that
fills blocks, or one that has to meet its offer first. A load passes through phases (`load.PHASES`), all under one
deadline. What it may raise is typed; whatever happens, its local blocks are either safe when it returns or carried by
the error as a quarantine (invariant I1), and success is reported only if the proof of every rank that was read calls
the whole read fresh (invariant I2).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeAlias

from kvflow.checks import count
from kvflow.config import Config
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.plan.room import check_end, check_room
from kvflow.core.policy.history import History
from kvflow.core.policy.queue import FairQueue
from kvflow.core.protocol.prompts import check_prompt
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    CacheUnregistered,
    DeadlineExceeded,
    KVFlowError,
    LeaseExpired,
    LoadError,
    Overloaded,
    PeerError,
    PrefillFailed,
    PromptMismatch,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeUnavailable,
    TransferFailed,
    UsageError,
)
from kvflow.logs import logger_of
from kvflow.runtime.context import RankContext
from kvflow.runtime.load.around import Verifying, held, until
from kvflow.runtime.load.flight import CopyFailed, Flight, Gear
from kvflow.runtime.load.gate import TURN_S, Gate
from kvflow.runtime.load.growing import GrowingLoads
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.load.load import (
    PHASES,
    InFlight,
    Load,
    LoadingStatistics,
    LoadReport,
    LoadRequest,
    PeerLoad,
    Verification,
    Work,
    checked_load_request,
    request_name,
    said_priority,
)
from kvflow.runtime.load.news import LeaseOver
from kvflow.runtime.load.plan import Plan, planned
from kvflow.runtime.load.route import Route
from kvflow.runtime.load.verifying import Verifier
from kvflow.runtime.peers.peer import LocalRank, Reaching, Source, blocks_by_group
from kvflow.runtime.records import CANCELLED, LOADED, LoadRecord
from kvflow.transport.base import TransportError

Steps: TypeAlias = Callable[[Load, Work], Coroutine[Any, Any, LoadReport]]

logger = logger_of(__name__)

_OVER = "the offer is over (expired, withdrawn, or read by all it was for): compute the prompt again"
_PAST_DEADLINE = "it ended later than its producer is known to hold the blocks: compute the prompt again"
_BROKEN = "its producer could not compute the prompt, and says so: have another one compute it"
_AHEAD_S = 1e-3  # what it takes at most to see the end of a read and to post another one


class Loader:
    """All loads of a registration."""

    def __init__(
        self,
        context: RankContext,
        local: LocalRank,
        reach: Reaching,
        remote_leases: RemoteLeases,
        route: Route,
        gear: Gear,
    ) -> None:
        self._config = context.config
        self._context = context
        self._now_s = context.clock.now_s
        self._local = local
        self._reach = reach
        self._read_ticket = reach.read_ticket
        self._remote_leases = remote_leases
        self._route = route
        self._gear = gear
        self._gate = Gate(gear.poller)
        self._growing = GrowingLoads(context, local, reach, route)
        verifier = Verifier(context.config, local, reach, gear.digests, context.token_hex)
        self._verifying = Verifying(verifier)
        self._look: asyncio.TimerHandle | None = None
        self._look_s = math.inf
        self._loads: dict[Load, Work] = {}  # in order, so that a simulation can be replayed
        self._unsafe: dict[Flight, Load] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = self._unregistered = False
        self._counts = dict.fromkeys(("succeeded", "failed", "cancelled", "refused", "bytes"), 0)
        self._verified: Counter[Verification] = Counter()

    @property
    def statistics(self) -> LoadingStatistics:
        queue = self._gear.queue
        return LoadingStatistics(
            open_loads=len(self._loads),
            waiting_loads=self._gear.words.waiting,
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
        return [load.request_id for load in dict.fromkeys([*self._loads, *self._unsafe.values()])]

    @property
    def quarantines(self) -> tuple[Load, ...]:
        """Loads that have ended and whose blocks are not safe yet."""
        return tuple(load for load in self._unsafe.values() if load.done)

    def load(self, request: LoadRequest) -> Coroutine[Any, Any, LoadReport]:
        """See `Runtime.load_blocks`."""
        begun_s = self._now_s()
        if self._gate.at_once(begun_s):
            load, work = self._accept(request, begun_s)
            return self._carry_out(load, work)
        return self._load_in_turn(request, begun_s)

    def start(self, request: LoadRequest) -> Load:
        """See `Runtime.start_load`; raises what is wrong with the request."""
        load, work = self._accept(request, self._now_s())
        load.begin(partial(self._start_in_turn, load, work)).add_done_callback(partial(self._over, load, work))
        return load

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
        for work in self._loads.values():
            work.end_now()

    def all_stopped(self) -> None:
        """The transport was closed in good order, so no byte can land any more: nothing stays quarantined."""
        for flight in list(self._unsafe):
            flight.all_stopped()

    async def drained(self) -> None:
        """Wait until no load is under way and no block is quarantined."""
        await self._quiet.wait()

    async def _load_in_turn(self, request: LoadRequest, begun_s: float) -> LoadReport:
        await self._gate.come(said_priority(request))
        load, work = self._accept(request, begun_s)
        return await self._carry_out(load, work)

    async def _start_in_turn(self, load: Load, work: Work) -> LoadReport:
        """The body of a load's own task."""
        if not self._gate.at_once(self._now_s()):
            await self._gate.come(load.request.priority)
        return await self._carry_out(load, work)

    def _accept(self, request: LoadRequest, begun_s: float) -> tuple[Load, Work]:
        """Check all that can be judged without the peer: from here on it is open. Its time runs already."""
        config = self._config
        try:
            if config.role == "producer":
                raise UsageError(f"load_blocks: the role of engine {config.engine_id!r} is 'producer'")
            chars_max, ids_max = config.limits.request_id_chars_max, config.limits.block_ids_max
            plain = checked_load_request(request, chars_max, ids_max)
            what = f"request {plain.request_id!r}"
            ticket = self._read_ticket(plain.ticket, ids_max)
            says_tokens = plain.prompt is not None or plain.num_tokens is not None
            if says_tokens and not ticket.awaited:
                _check_offer(ticket, plain)
            if plain.verify:
                self._verifying.check(self._gear.digests.own, what)
            tables, entries = self._gear.ledger.find(plain.block_ids, f"{what}: block_ids")
            if says_tokens:
                self._check_room(plain, ticket, tables)
        except KVFlowError as error:
            self.refuse(request, error)
            raise
        deadline_s = config.load_deadline_s if plain.deadline_s is None else plain.deadline_s
        work = Work(ticket, tables, entries, self._now_s, begun_s)
        work.ends_s = asyncio.get_running_loop().time() + deadline_s - (self._now_s() - begun_s)
        load = Load(plain, tables, work)
        self._loads[load] = work
        self._quiet.clear()
        if work.ends_s < self._look_s and not self._closed:
            self._look_at(work.ends_s)
        return load, work

    def _check_room(self, request: LoadRequest, ticket: Ticket, tables: Sequence[BlockIds]) -> None:
        """RequestError if there are more blocks than the tokens fill, as far as these are known by now."""
        what, groups, tokens = f"request {request.request_id!r}", self._local.groups, ticket.offered_tokens
        if not ticket.awaited and tokens:
            check_room(groups, tables, tokens, what, f"the {tokens} tokens that {_whose(ticket)} offers")
        elif ticket.awaited and request.prompt is not None:
            tokens = count(request.prompt, f"{what}: prompt")
            check_room(groups, tables, tokens, what, f"the {tokens} tokens of its prompt")

    def _check_met(self, request: LoadRequest, work: Work) -> None:
        """As a load whose offer was known; and PromptMismatch if its blocks end with a prompt that goes on."""
        ticket = work.ticket
        _check_offer(ticket, request)
        if request.prompt is not None or request.num_tokens is not None:
            self._check_room(request, ticket, work.tables)
        if request.prompt is not None and request.num_tokens is None and not ticket.offers_nothing:
            sizes, what = (len(request.prompt), ticket.offered_tokens), f"request {request.request_id!r}"
            check_end(self._local.groups, work.tables, *sizes, what, _whose(ticket))

    def _look_at(self, when_s: float) -> None:
        """Look for loads past their deadline then, and no earlier. There is one timer for all: most loads are quick."""
        if self._look is not None:
            self._look.cancel()
        self._look, self._look_s = None, when_s
        if when_s < math.inf:
            self._look = asyncio.get_running_loop().call_at(when_s, self._end_overdue)

    def _end_overdue(self) -> None:
        now_s, next_s = asyncio.get_running_loop().time(), math.inf
        for work in self._loads.values():
            if work.ends_s > now_s:
                next_s = min(next_s, work.ends_s)
            else:
                work.end_now()
        self._look_at(next_s)

    async def _carry_out(self, load: Load, work: Work) -> LoadReport:
        """From the first step to the outcome: the one place where a load ends."""
        task = work.task = asyncio.current_task()
        assert task is not None, "loads are carried out by tasks"
        work.cancelling = task.cancelling()
        try:
            if self._closed or work.ends_s <= asyncio.get_running_loop().time():
                raise self._late(load, work)
            report = await self._steps_of(work)(load, work)
        except asyncio.CancelledError as cancelled:
            if not work.was_late():
                self._end(load, work, cancelled, "cancelled", CANCELLED)
                raise
            error = self._failed(load, work, self._late(load, work))
        except KVFlowError as problem:
            work.was_late()
            error = self._failed(load, work, problem)
        except BaseException as bug:
            self._end(load, work, bug, "failed", type(bug).__name__, str(bug))
            raise
        else:
            if work.overdue:  # in the moment in which it was done
                work.was_late()
            self._counts["bytes"] += report.bytes
            self._end(load, work, report, "succeeded", LOADED)
            return report
        raise error from error.__cause__

    def _failed(self, load: Load, work: Work, error: KVFlowError) -> KVFlowError:
        """End it with an error that names it, and carries it if bytes may still land."""
        if isinstance(error, PeerError | LoadError | RequestError):  # of its ticket, or which others meet, too
            error = error.of_request(load.request_id, work.ticket.engine_id)
        error.quarantine = load if work.flight is not None and not work.flight.safe else None
        logger.info("load %s failed in phase %s: %s", load.request_id, work.where, error)
        self._end(load, work, error, "failed", type(error).__name__, str(error))
        return error

    def _over(self, load: Load, work: Work, task: asyncio.Task[LoadReport]) -> None:
        """A load's own task has ended, perhaps cancelled before its first step."""
        if work.task is None:
            self._end(load, work, asyncio.CancelledError(), "cancelled", CANCELLED)
        if not task.cancelled():
            task.exception()  # seen: it is logged, and whoever awaits the load gets it

    def _steps_of(self, work: Work) -> Steps:
        """What kind of load it is."""
        ticket = work.ticket
        if ticket.awaited:
            return self._meet
        if len(work.entries) and (ticket.block_ids or not ticket.offers_nothing):
            return self._fill
        return self._nothing if ticket.offers_nothing else self._empty

    async def _meet(self, load: Load, work: Work) -> LoadReport:
        """A rendezvous: wait until its offer is known, then do what follows from that."""
        work.enter("handshake")

        def found(source: Source, ttl_s: float) -> None:
            self._remote_leases.keep(load, ttl_s, source)

        work.ticket = await self._reach.meet(work.ticket, found)
        self._check_met(load.request, work)
        return await self._steps_of(work)(load, work)

    async def _nothing(self, load: Load, work: Work) -> LoadReport:
        """Nothing is offered: its leases ended when they were made, and nobody waits for us."""
        return work.report(load.request_id)

    async def _empty(self, load: Load, work: Work) -> LoadReport:
        """A full hit: nothing is read, the producer is told. If it cannot be, its lease runs out: no loss to us.

        If a payload is to come it is waited for.
        """
        ticket = work.ticket
        if not any(rank.payload for rank in ticket.ranks):
            work.enter("notify")
            told = not load.request.keep_offer and await self._remote_leases.release(ticket)
            return work.report(load.request_id, notified=told)
        work.enter("handshake")
        sources = await self._reach.reach(ticket, partial(self._remote_leases.keep, load, ticket.ttl_s))
        work.enter("wire")
        self._growing.follow(load, sources, {})
        return await self._tell(load, work, sources)

    async def _fill(self, load: Load, work: Work) -> LoadReport:
        """Reach the ranks, plan, claim, read, and tell them."""
        ticket, keep = work.ticket, partial(self._remote_leases.keep, load, work.ticket.ttl_s)
        sources = self._reach.reach_at_once(ticket, keep)
        if sources is None:
            work.enter("handshake")
            sources = await self._reach.reach(ticket, keep)
        work.enter("plan")
        if work.seconds["handshake"] > TURN_S:  # many may have waited for the same one
            await self._gate.come(load.request.priority, again=True)
        plan = planned(f"request {load.request_id!r}", ticket, work.tables, self._local.groups, sources)
        work.sources, work.tokens = plan.sources, plan.tokens
        work.freshness = plan.sources[0].proof.kind if plan.sources else ""
        if load.request.after is not None or not self._gear.words.take(plan.sources):
            await self._admitted(load, work)
        flight = Flight(load.request_id, work.entries, plan.sources, load.request.priority, self._gear, self._landed)
        self._unsafe[flight], work.flight = load, flight
        try:
            fresh = await self._reading(load, work, plan, sources)
            flight.land()
        except (TransportError, CopyFailed) as error:
            if flight.failed is not None:
                self._reach.failed(flight.failed, str(error))
            await flight.stop(self._config.cancel_grace_s)
            raise work.failure(load, TransferFailed, f"the transfer failed: {error}") from error
        except BaseException:
            await flight.stop(self._config.cancel_grace_s)
            raise
        self._reach.succeeded(plan.sources)
        if not fresh:
            raise self._over_error(load, work)
        return await self._tell(load, work, sources)

    def _reading(self, load: Load, work: Work, plan: Plan, sources: Sequence[Source]) -> Awaitable[bool]:
        """How its bytes are read: at once or as they come, and compared where that is asked for. Chosen only here."""
        flight, ticket = work.flight, work.ticket
        assert flight is not None, "it was claimed"
        grows = payload = False
        for source in sources:
            grows, payload = grows or source.proof.grows, payload or source.lease.payload
        if payload or ticket.extends:
            asked = [one for one in sources if one.lease.payload or (one.lease.pending and one in plan.sources)]
            self._growing.follow(load, asked, plan.matched)
        work.enter("wire")
        if grows or ticket.extends:
            if any(source.lease.pending for source in plan.sources):
                work.landed = History(self._now_s, work.begun_s)
            read: Callable[[], Awaitable[bool]] = partial(self._growing.read, load, flight, plan.matched)
        else:
            read = partial(self._route.read, flight, plan.sources, work.tables)
        verify = load.request.verify
        if verify or (verify is None and self._config.verify_share and self._verifying.drawn()):
            return self._verifying.read(load, work, read)
        return read()

    async def _admitted(self, load: Load, work: Work) -> None:
        """Wait for the caller's event, and until as many more ranks may be read from. Overloaded if too many loads wait
        already. A connection that breaks meanwhile stays until we have found out.
        """
        request, words, waiting_max = load.request, self._gear.words, self._config.loads_waiting_max
        ranks, ranks_max = len(work.sources), self._config.limits.loads_max
        with held(work.sources):
            if request.after is not None:
                await until(request.after, self._gear.copy_thread, load, work)
            if ranks > ranks_max:
                raise RequestError(f"request {load.request_id!r}: reads from {ranks} ranks, loads_max is {ranks_max}")
            if not words.take(work.sources):
                if words.waiting >= waiting_max:
                    waiting = f"{waiting_max} loads (loads_waiting_max) wait already"
                    raise work.failure(load, Overloaded, waiting)
                work.enter("queued")
                await words.wait(work.sources, request.priority)
                work.enter("plan")

    async def _tell(self, load: Load, work: Work, sources: Sequence[Source]) -> LoadReport:
        """All is there, but perhaps the payload: when it has come, every rank that holds a lease for us is told, unless
        others are to read the same.
        """
        if work.news is not None:
            try:
                work.payload = await work.news.payload()
            except LeaseOver:
                raise self._over_error(load, work) from None
        work.enter("notify")
        told = not load.request.keep_offer
        if told:
            self._remote_leases.tell(sources)
        return work.report(load.request_id, notified=told)

    def _over_error(self, load: Load, work: Work) -> LoadError:
        """Its leases have ended too early: because a prompt could not be computed, or for another reason."""
        if work.freshness == "deadline":
            return work.failure(load, LeaseExpired, _PAST_DEADLINE)
        told = [one.failed for one in work.news.followed if one.failed] if work.news is not None else []
        if told or any(source.proof.failed for source in work.sources):
            return work.failure(load, PrefillFailed, told[0] if told else _BROKEN)
        return work.failure(load, LeaseExpired, _OVER)

    def _late(self, load: Load, work: Work) -> KVFlowError:
        """Why it has no more time. If the transport died under it, that is why."""
        phase, lost = work.where, work.flight.lost if work.flight is not None else None
        if isinstance(lost, RuntimeBroken):
            return lost
        if self._closed:
            return self._closed_error(load, phase)
        return work.failure(load, DeadlineExceeded, f"deadline exceeded in phase {phase!r}", phase=phase)

    def _closed_error(self, load: Load, phase: str) -> RuntimeUnavailable:
        if self._unregistered:
            why = f"the cache of {self._config.engine_id!r} was unregistered in phase {phase!r}"
            return CacheUnregistered(f"request {load.request_id!r}: {why}")
        why = f"the runtime {self._config.engine_id!r} was closed, or had drained, in phase {phase!r}"
        return RuntimeClosed(f"request {load.request_id!r}: {why}")

    def _landed(self, flight: Flight) -> None:
        """No byte of a flight can land any more."""
        del self._unsafe[flight]
        if self._gate.paused:
            self._gate.resume()
        if not self._loads and not self._unsafe:
            self._quiet.set()

    def _end(
        self,
        load: Load,
        work: Work,
        result: LoadReport | BaseException,
        counted: str,
        outcome: str,
        error: str = "",
    ) -> None:
        """Forget a load, count how it has ended, and tell its handle and the observers."""
        load.end(result)
        if work.news is not None:
            work.news.close()
        self._loads.pop(load, None)
        self._remote_leases.forget(load)
        self._counts[counted] += 1
        if work.verification is not Verification.OFF:
            self._verified[work.verification] += 1
        if not self._loads and not self._unsafe:
            self._quiet.set()
        if self._context.observers.all:
            self._context.observers.load_ended(self._record(load, work, outcome, error))

    def _record(self, load: Load, work: Work, outcome: str, error: str) -> LoadRecord:
        flight, ticket = work.flight, work.ticket
        if outcome != LOADED:  # else its report has ended them
            work.end_phases()
        return LoadRecord(
            engine_id=self._config.engine_id,
            rank=self._context.identity.rank,
            request_id=load.request_id,
            peer_engine_id=ticket.engine_id,
            remote_request_id=ticket.request_id,
            peer=ticket.address,
            outcome=outcome,
            error=error,
            phase=work.phase,
            bytes=flight.size_bytes if flight else 0,
            blocks=sum(map(len, work.tables)),
            blocks_by_group=blocks_by_group(self._local.groups, work.tables),
            descriptors=flight.descriptor_count if flight else 0,
            seconds=work.seconds,
            verification=work.verification,
            freshness=work.freshness,
            landed=work.landed.moments if work.landed is not None else (),
            traceparent=ticket.traceparent,
        )


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


def reads_in_flight(config: Config, *, grows: bool) -> FairQueue:
    """What may be in flight at once, in all and from one rank, which may grow with its speed."""
    most = config.limits
    of_peer = most.peer_in_flight_bytes_max, most.peer_in_flight_descriptors_max, most.peer_in_flight_reads_max
    in_all = config.in_flight_bytes_max, most.in_flight_descriptors_max, most.in_flight_reads_max
    return FairQueue(in_all, of_peer, ahead_s=_AHEAD_S if grows else 0.0)
