"""The loader: accepts loads, has them carried out, and ends them, in one place.

The kind of a load is decided when it is accepted: its offer is known or still to come, from one source or from several.
A load passes through phases (`requests.PHASES`), all under one deadline. Its errors are typed. However it ends, its
local blocks are safe when it returns, or the error carries them as a quarantine (invariant I1). It succeeds only if
the proof of every rank that was read calls the whole read fresh (invariant I2).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.plan.descriptors import BlockIds, GivenBlockIds
from kvflow.core.policy.latest import Latest
from kvflow.core.protocol.prompts import check_alike
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    CacheUnregistered,
    DeadlineExceeded,
    KVFlowError,
    LoadError,
    PeerError,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    RuntimeUnavailable,
    UsageError,
)
from kvflow.logs import logger_of
from kvflow.parts import part
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.load import Carry, Load, Work, request_name, said_priority
from kvflow.runtime.load.plan import check_expected
from kvflow.runtime.load.requests import (
    PHASES,
    TICKETS_MAX,
    InFlight,
    LoadingStatistics,
    LoadReport,
    LoadRequest,
    PeerLoad,
    Verification,
)
from kvflow.runtime.peers.peer import blocks_by_group
from kvflow.runtime.records import CANCELLED, LOADED, LoadRecord

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache

logger = logger_of(__name__)


NEVER_READ_AT = 3
"""Failures after which an engine is said never to have been read from. A peer that restarts costs one or two."""
_ENGINES_MAX = 1024


class Loader:
    """All loads of a registration."""

    def __init__(self, cache: RegisteredCache) -> None:
        config = cache.config
        self._cache = cache
        self._config = config
        self._bounds = (config.limits.block_ids_max, config.load_deadline_s)
        self._observers = cache.observers
        self.clock = cache.clock
        self._now_s = cache.clock.now_s
        self.groups = cache.local.groups
        self.peers = cache.peers
        self.resolver = cache.resolver
        self.remote_leases = cache.remote_leases
        self.resources = cache.resources
        self.whole = cache.whole.carry
        """Carrier of a load whose offer is known."""
        self._throttle = cache.whole.throttle
        self._look: asyncio.TimerHandle | None = None
        self._look_s = math.inf
        self._loads: dict[Load, Work] = {}  # in order, so that a simulation can be replayed
        self._unsafe: dict[Flight, Load] = {}
        """Flights in quarantine: their loads have ended, their bytes may land still."""
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closed = self._unregistered = False
        self._counts = dict.fromkeys(("succeeded", "failed", "cancelled", "refused", "bytes", "sources_left"), 0)
        self._verified: Counter[Verification] = Counter()
        self._never_read: Latest[str, int] = Latest(_ENGINES_MAX)
        """Failed loads by engines that none had ever read from."""

    @property
    def statistics(self) -> LoadingStatistics:
        queue = self.resources.queue
        return LoadingStatistics(
            open_loads=len(self._loads),
            waiting_loads=self.resources.seal_slots.waiting,
            waiting_reads=queue.waiting,
            in_flight=InFlight(*queue.used),
            peers={
                peer: PeerLoad(in_flight=InFlight(*used), waiting_reads=waiting)
                for peer, used, waiting in queue.peers()
            },
            quarantines=len(self.quarantines),
            renewals=self.remote_leases.sent,
            never_read=sum(
                many >= NEVER_READ_AT and not self.peers.delivered(one) for one, many in self._never_read.items()
            ),
            **self._counts,
            **{str(one): self._verified[one] for one in Verification if one is not Verification.OFF},
        )

    @property
    def open_requests(self) -> list[str]:
        """Requests whose loads are under way, or whose bytes may still land."""
        return [load.request_id for load in dict.fromkeys([*self._loads, *self._unsafe.values()])]

    @property
    def quarantines(self) -> tuple[Load, ...]:
        """Loads that have ended and whose blocks are not safe yet."""
        return tuple(self._unsafe.values())

    def load(self, request: LoadRequest) -> Coroutine[Any, Any, LoadReport]:
        """See `Runtime.load_blocks`."""
        begun_s = self._now_s()
        if self._throttle.at_once(begun_s):
            return self._carry_out(*self._accept(request, begun_s, waited_s=0.0))
        return self._load_in_turn(request, begun_s)

    def tables_of(self, block_ids: GivenBlockIds, request_id: str) -> tuple[BlockIds, ...]:
        """Local blocks as a request gives them, by group. RequestError if they cannot be right."""
        return self.resources.ledger.find(block_ids, f"request {request_id!r}: block_ids")[0]

    def start(self, request: LoadRequest) -> Load:
        """See `Runtime.start_load`; raises what is wrong with the request."""
        load, work, carry = self._accept(request, self._now_s(), waited_s=0.0)
        load.begin(partial(self._start_in_turn, load, work, carry)).add_done_callback(partial(self._over, load, work))
        return load

    def refuse(self, request: LoadRequest, error: KVFlowError) -> None:
        """Note that a load was not accepted, and why."""
        self._counts["refused"] += 1
        logger.info("refused a load: %s", error)
        if self._observers.all:
            self._observers.load_ended(
                LoadRecord(
                    engine_id=self._config.engine_id,
                    rank=self._cache.rank,
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
        self.remote_leases.close()
        for work in self._loads.values():
            work.end_now()

    def all_stopped(self) -> None:
        """End all quarantines: the transport was closed in good order, so no byte can land any more."""
        for flight in [*(work.flight for work in self._loads.values()), *self._unsafe]:
            if flight is not None:
                flight.all_stopped()

    async def drained(self) -> None:
        """Wait until no load is under way and no block is quarantined."""
        await self._quiet.wait()

    async def _load_in_turn(self, request: LoadRequest, begun_s: float) -> LoadReport:
        await self._throttle.come(said_priority(request))
        return await self._carry_out(*self._accept(request, begun_s, waited_s=self._now_s() - begun_s))

    async def _start_in_turn(self, load: Load, work: Work, carry: Carry) -> LoadReport:
        """Body of a load's own task."""
        if not self._throttle.at_once(self._now_s()):
            await self._throttle.come(load.request.priority)
        return await self._carry_out(load, work, carry)

    def _accept(self, request: LoadRequest, begun_s: float, *, waited_s: float) -> tuple[Load, Work, Carry]:
        """Check all that can be judged without the peer, and open the load, with its carrier. Its time runs already."""
        ids_max, usual_s = self._bounds
        try:
            if self._config.role == "producer":
                raise UsageError(f"load_blocks: the role of engine {self._config.engine_id!r} is 'producer'")
            plain = checks.settled_request(request, LoadRequest, "load_blocks", ids_max)
            what = f"request {plain.request_id!r}"
            given = plain.ticket
            if plain.again is None and (type(given) is dict or isinstance(given, Ticket)):
                try:
                    tickets: tuple[Ticket, ...] = (self.resolver.read_ticket(given),)
                except RequestError as error:
                    raise RequestError(f"{what}: {error}") from error
                carry = self.met(self.whole, what) if tickets[0].awaited else self.whole
            else:
                tickets, carry = self._several(plain)
            if plain.verify and (problem := self._cache.part("verify", f"{what}: verify").problem):
                raise RequestError(f"{what}: verify: {problem}")
            tables, entries = self.resources.ledger.find(plain.block_ids, f"{what}: block_ids")
            if plain.prompt is not None or plain.num_tokens is not None:
                for one in tickets:
                    check_expected(self.groups, plain, one, tables)
        except KVFlowError as error:
            self.refuse(request, error)
            raise
        deadline_s = usual_s if plain.deadline_s is None else plain.deadline_s
        work = Work(tickets[0], tables, entries, self._now_s, begun_s)
        work.ends_s = asyncio.get_running_loop().time() + deadline_s - waited_s
        load = Load(plain, tables, work)
        self._loads[load] = work
        self._quiet.clear()
        if work.ends_s < self._look_s and not self._closed:
            self._look_at(work.ends_s)
        return load, work, carry

    def _several(self, request: LoadRequest) -> tuple[tuple[Ticket, ...], Carry]:
        """Read the tickets of a request that may have several, and choose the carrier of its load."""
        what, given = f"request {request.request_id!r}", request.ticket
        several: Sequence[Any] | None = (given,)
        if isinstance(given, list | tuple):
            several = checks.answer(lambda: tuple(given))
        if several is None:
            raise RequestError(f"{what}: ticket: expected a ticket or a list of them, got {checks.shown(given)}")
        if not 0 < len(several) <= TICKETS_MAX:
            raise RequestError(f"{what}: {counted(len(several), 'ticket')}, expected 1 to {TICKETS_MAX}")
        try:
            tickets = tuple(self.resolver.read_ticket(one) for one in several)
        except RequestError as error:
            raise RequestError(f"{what}: {error}") from error
        for other in tickets[1:]:
            check_alike(tickets[0], other, what)
        if len(tickets) > 1 or request.again is not None:
            needing = f"{what}: a load of several tickets, or with `again`,"
            carry: Carry = part("failover", needing).carrier(self, tickets)
            return tickets, carry
        return tickets, self.met(self.whole, what) if tickets[0].awaited else self.whole

    def met(self, carry: Carry, what: str) -> Carry:
        """Return a carrier that waits for the offer of a rendezvous, and then hands over to `carry`."""
        met: Carry = self._cache.part("growing", f"{what}: a load of a rendezvous").rendezvous.met(carry)
        return met

    def _look_at(self, when_s: float) -> None:
        """Set the timer that looks for loads past their deadline. There is one for all: most loads are quick."""
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

    async def _carry_out(self, load: Load, work: Work, carry: Carry) -> LoadReport:
        """Carry a load out to its outcome. Every load ends here."""
        task = work.task = asyncio.current_task()
        assert task is not None, "loads are carried out by tasks"
        work.cancelling = task.cancelling()
        try:
            if self._closed or work.ends_s <= asyncio.get_running_loop().time():
                raise self._late(load, work)
            report = await carry(load, work)
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
            if work.overdue:  # it was cancelled in the moment in which it was done
                work.was_late()
            self._counts["bytes"] += report.bytes
            self._end(load, work, report, "succeeded", LOADED)
            return report
        raise error from error.__cause__

    def _failed(self, load: Load, work: Work, error: KVFlowError) -> KVFlowError:
        """End a load with an error that names it, and carries it as `quarantine` if bytes may still land."""
        if isinstance(error, PeerError | LoadError | RequestError):  # shared by loads of one handshake, perhaps
            error = error.of_request(load.request_id, work.ticket.engine_id)
        if isinstance(error, PeerError | LoadError) and work.attempts is None:
            self._note_never_read(work.ticket.engine_id, str(error))
        error.quarantine = load if work.flight is not None and not work.flight.safe else None
        logger.info("load %s failed in phase %s: %s", load.request_id, work.where, error)
        self._end(load, work, error, "failed", type(error).__name__, str(error))
        return error

    def _note_never_read(self, engine_id: str, why: str) -> None:
        """Count a failed load with a ticket of an engine that no load has ever read from, and log it once.

        A router that sends the request elsewhere hides the error of a load. If all loads of a pair fail, prompts take
        long, and nothing else shows.
        """
        if self.peers.delivered(engine_id):
            self._never_read.pop(engine_id, None)
            return
        many = self._never_read[engine_id] = self._never_read.get(engine_id, 0) + 1
        if many == NEVER_READ_AT:
            logger.warning(
                "engine %r: loads with its tickets failed %s, and none has ever read from it; the last: %s; "
                "`kvflow doctor --pair` tells which rule says no",
                engine_id,
                counted(many, "time"),
                why,
            )

    def _over(self, load: Load, work: Work, task: asyncio.Task[LoadReport]) -> None:
        """End a load whose own task was cancelled before its first step."""
        if work.task is None:
            self._end(load, work, asyncio.CancelledError(), "cancelled", CANCELLED)
        if not task.cancelled():
            task.exception()  # seen: it is logged, and whoever awaits the load gets it

    def _late(self, load: Load, work: Work) -> KVFlowError:
        """Error of a load that has no more time: of the transport, if that died under it."""
        phase, lost = work.where, work.flight.lost if work.flight is not None else None
        if isinstance(lost, RuntimeBroken):
            return lost
        if self._closed:
            return self._closed_error(load, phase)
        return work.failure(load, DeadlineExceeded, f"deadline exceeded in phase {phase!r}{work.held_up}", phase=phase)

    def _closed_error(self, load: Load, phase: str) -> RuntimeUnavailable:
        if self._unregistered:
            why = f"the cache of {self._config.engine_id!r} was unregistered in phase {phase!r}"
            return CacheUnregistered(f"request {load.request_id!r}: {why}")
        why = f"the runtime {self._config.engine_id!r} was closed, or had drained, in phase {phase!r}"
        return RuntimeClosed(f"request {load.request_id!r}: {why}")

    def _landed(self, flight: Flight) -> None:
        """Callback of a quarantined flight: no byte of it can land any more."""
        del self._unsafe[flight]
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
        if counted != "succeeded" and work.flight is not None and not work.flight.safe:
            self._unsafe[work.flight], work.flight.on_safe = load, self._landed
        self._loads.pop(load, None)
        self.remote_leases.forget(load)
        self._counts[counted] += 1
        if work.attempts:
            self._counts["sources_left"] += len(work.attempts) - 1
            for attempt in work.attempts:
                if attempt.error:
                    self._note_never_read(attempt.engine_id, attempt.error)
        if work.verification is not Verification.OFF:
            self._verified[work.verification] += 1
        if self._throttle.paused:
            self._throttle.resume()
        if not self._loads and not self._unsafe:
            self._quiet.set()
        if self._observers.all:
            self._observers.load_ended(self._record(load, work, outcome, error))

    def _record(self, load: Load, work: Work, outcome: str, error: str) -> LoadRecord:
        flight, ticket = work.flight, work.ticket
        if outcome != LOADED:  # a report has ended its phases already
            work.end_phases()
        return LoadRecord(
            engine_id=self._config.engine_id,
            rank=self._cache.rank,
            request_id=load.request_id,
            peer_engine_id=ticket.engine_id,
            remote_request_id=ticket.request_id,
            peer=ticket.address,
            outcome=outcome,
            error=error,
            phase=work.phase,
            bytes=flight.size_bytes if flight else 0,
            blocks=sum(map(len, work.tables)),
            blocks_by_group=blocks_by_group(self.groups, work.tables),
            descriptors=flight.descriptor_count if flight else 0,
            seconds=work.seconds,
            verification=work.verification,
            freshness=work.freshness,
            landed=work.landed.moments if work.landed is not None else (),
            traceparent=ticket.traceparent,
            attempts=work.attempts or (),
        )
