"""The loader: it accepts loads, performs them, and ends each load in one place.

The kind of a load is decided when the load is accepted: its offer is known or still to come, from one ticket or from
several. When a load ends, no further byte can land in its local blocks, or the load is the `quarantine` of its error
(invariant I1). A load succeeds only if the proof of every rank that was read says that the whole read was fresh
(invariant I2).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.plan.descriptors import BlockIds, GivenBlockIds
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol.prompts import check_same_prompt
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    CacheUnregistered,
    DeadlineExceeded,
    InvalidInput,
    KVFlowError,
    LoadError,
    PeerError,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
    UsageError,
    without_secrets,
)
from kvflow.logs import logger_of
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.flight_resources import FlightResources, LoadThrottle
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.load.load import Load, LoadPerformer, priority_of_unchecked, request_name
from kvflow.runtime.load.plan import check_against_ticket
from kvflow.runtime.load.requests import (
    PHASES,
    TICKETS_MAX,
    GivenTicket,
    InFlight,
    LoadingStatistics,
    LoadReport,
    LoadRequest,
    PeerLoad,
    Verification,
)
from kvflow.runtime.load.steps import LoadSteps
from kvflow.runtime.optional import OptionalParts
from kvflow.runtime.peers.peer import Resolver, blocks_by_group
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.rank import RankContext
from kvflow.runtime.records import CANCELLED, LOADED, LoadRecord

logger = logger_of(__name__)


NEVER_READ_AT = 3
"""Number of failed loads from an engine, without any success, after which a warning is logged. More than 2, because the
restart of a peer makes one or two loads fail."""
_ENGINES_MAX = 1024


class Loader:
    """Accepts, performs, counts and ends the loads into one registered cache."""

    load_type: type[Load] = Load
    """Class of the loads that are accepted. `testing.watch_loads` replaces it by a subclass that counts who awaits."""

    def __init__(
        self,
        context: RankContext,
        peers: Peers,
        resolver: Resolver,
        leases: RemoteLeases,
        resources: FlightResources,
        throttle: LoadThrottle,
        steps: LoadSteps,
        optional: OptionalParts,
    ) -> None:
        self._config = context.config
        self._rank = context.rank
        self._local = context.local
        self._weights = context.weights
        self._observers = context.observers
        self._clock = context.clock
        self._now_s = context.clock.now_s
        self._peers = peers
        self._resolver = resolver
        self._leases = leases
        self._resources = resources
        self._throttle = throttle
        self._steps = steps
        self._optional = optional
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._deadline_timer_s = math.inf
        self._loads: dict[Load, None] = {}  # in order, so that a simulation can be replayed
        self._quarantined: dict[Flight, Load] = {}
        """Ended loads with blocks in quarantine, because bytes may still land in them, keyed by the load's flight."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = self._unregistered = False
        self._counts = dict.fromkeys(("succeeded", "failed", "cancelled", "refused", "bytes", "sources_left"), 0)
        self._verified: Counter[Verification] = Counter()
        self._never_read: BoundedMap[str, int] = BoundedMap(_ENGINES_MAX)
        """Number of failed loads by engine id, for engines from which no load has ever succeeded."""
        self._one_sided: BoundedMap[str, None] = BoundedMap(_ENGINES_MAX)
        """Engines for which `_note_one_sided_prompt` has logged its warning."""

    @property
    def statistics(self) -> LoadingStatistics:
        queue = self._resources.permit_queue
        return LoadingStatistics(
            open_loads=len(self._loads),
            waiting_loads=self._resources.seal_slots.waiting,
            loads_lacking_blocks=sum(load.late_blocks is not None and load.late_blocks.lacking for load in self._loads),
            waiting_reads=queue.waiting,
            in_flight=InFlight(*queue.used),
            peers={
                peer: PeerLoad(in_flight=InFlight(*used), waiting_reads=waiting)
                for peer, used, waiting in queue.peers()
            },
            quarantines=len(self.quarantines),
            renewals=self._leases.renewals_sent,
            never_read=sum(
                many >= NEVER_READ_AT and not self._peers.has_delivered(one) for one, many in self._never_read.items()
            ),
            **self._counts,
            **{str(one): self._verified[one] for one in Verification if one is not Verification.OFF},
        )

    @property
    def open_requests(self) -> list[str]:
        """Ids of requests with a load under way, or with quarantined blocks."""
        return [load.request_id for load in dict.fromkeys([*self._loads, *self._quarantined.values()])]

    @property
    def quarantines(self) -> tuple[Load, ...]:
        return tuple(self._quarantined.values())

    def load(self, request: LoadRequest) -> Coroutine[Any, Any, LoadReport]:
        """Return a coroutine that performs the load of `request`, for `Runtime.load_blocks`.

        Normally this call itself accepts the request, or raises the error with which the request is refused. If too
        many loads start at the same time, the coroutine does so instead, after it has waited for the load's turn.
        """
        begun_s = self._now_s()
        if self._throttle.try_start(begun_s):
            return self._perform_and_record(*self._accept(request, begun_s, waited_s=0.0))
        return self._load_in_turn(request, begun_s)

    def tables_of(self, block_ids: GivenBlockIds, request_id: str) -> tuple[BlockIds, ...]:
        """Return the local blocks of a request, one array of ids for each group. RequestError if an id is invalid."""
        return self._resources.ledger.find_entries(block_ids, f"request {request_id!r}: block_ids")[0]

    def start(self, request: LoadRequest) -> Load:
        """Accept `request`, start a task that performs the load, and return its handle, for `Runtime.start_load`."""
        load, perform = self._accept(request, self._now_s(), waited_s=0.0)
        load.start_task(partial(self._start_in_turn, load, perform)).add_done_callback(
            partial(self._end_unstarted, load)
        )
        return load

    def refuse(self, request: LoadRequest, error: KVFlowError) -> None:
        """Count a load that was not accepted because of `error`, log it, and report it to the observers."""
        self._counts["refused"] += 1
        logger.info("refused a load: %s", error)
        if self._observers.all:
            self._observers.load_ended(
                LoadRecord(
                    engine_id=self._config.engine_id,
                    rank=self._rank,
                    request_id=without_secrets(request_name(request)),
                    outcome=type(error).__name__,
                    error=str(error),
                    phase="queued",
                    seconds=dict.fromkeys(PHASES, 0.0),
                )
            )

    def resume(self) -> None:
        """Let waiting loads begin, because the transport is no longer `behind`."""
        self._throttle.resume()

    def close(self, *, unregistered: bool = False) -> None:
        """Make all loads under way fail soon: with CacheUnregistered if `unregistered`, else with RuntimeClosed."""
        self._closed, self._unregistered = True, self._unregistered or unregistered
        self._set_deadline_timer(math.inf)
        self._leases.close()
        for load in self._loads:
            load.cancel_overdue()

    def note_all_stopped(self) -> None:
        """End all quarantines, because the transport was closed in good order and no further byte can land."""
        for flight in [*(load.flight for load in self._loads), *self._quarantined]:
            if flight is not None:
                flight.note_all_stopped()

    async def drained(self) -> None:
        """Wait until no load is under way and no block is quarantined."""
        await self._idle.wait()

    async def _load_in_turn(self, request: LoadRequest, begun_s: float) -> LoadReport:
        await self._throttle.wait_for_turn(priority_of_unchecked(request))
        return await self._perform_and_record(*self._accept(request, begun_s, waited_s=self._now_s() - begun_s))

    async def _start_in_turn(self, load: Load, perform: LoadPerformer) -> LoadReport:
        """Body of the task of a started load: wait until the load may begin, then perform it."""
        if not self._throttle.try_start(self._now_s()):
            await self._throttle.wait_for_turn(load.request.priority)
        return await self._perform_and_record(load, perform)

    def _accept(self, request: LoadRequest, begun_s: float, *, waited_s: float) -> tuple[Load, LoadPerformer]:
        """Check `request` as far as possible without the peer. Return its load and the function that performs it.

        `waited_s`: seconds that the request has waited, which count towards the load's deadline. If the request is not
        accepted, this counts a refused load and raises the error.
        """
        config = self._config
        try:
            if config.role == "producer":
                raise UsageError(f"load_blocks: the role of engine {config.engine_id!r} is 'producer'")
            plain = checks.normalize_request(request, LoadRequest, "load_blocks", config.limits.block_ids_max)
            what = f"request {plain.request_id!r}"
            tickets = self._parse_tickets(plain.ticket, what)
            perform: LoadPerformer = self._steps.perform
            if len(tickets) > 1 or plain.again is not None:
                needing = f"{what}: a load of several tickets, or with `again`,"
                perform = self._optional.failover(needing).performer(tickets)
            elif tickets[0].awaited:
                perform = self._optional.growing(f"{what}: a load with a pending ticket").pending_tickets.perform
            if plain.verify and (problem := self._optional.verify(f"{what}: verify").problem):
                raise RequestError(f"{what}: verify: {problem}")
            tables, entries = self._resources.ledger.find_entries(plain.block_ids, f"{what}: block_ids")
            load = self.load_type(plain, tickets[0], tables, entries, self._clock, begun_s)
            if plain.extends:
                perform = self._optional.growing(f"{what}: extends").add_late_blocks(load, tickets)
            if plain.prompt is not None or plain.num_tokens is not None:
                for one in tickets:
                    check_against_ticket(self._local.groups, plain, one, load.tables)
            # Connectors compare prompts in their schedulers: their requests have `num_tokens`.
            if plain.num_tokens is None and (plain.prompt is None) is (tickets[0].prompt_digest != ""):
                self._note_one_sided_prompt(plain, tickets[0])
        except KVFlowError as error:
            self.refuse(request, error)
            raise
        deadline_s = config.load_deadline_s if plain.deadline_s is None else plain.deadline_s
        load.weights = self._weights.version
        if deadline_s <= 0:
            load.stall_text = f": its deadline_s was {deadline_s:g} when it was requested"
        load.deadline_at_s = asyncio.get_running_loop().time() + deadline_s - waited_s
        self._loads[load] = None
        self._idle.clear()
        if load.deadline_at_s < self._deadline_timer_s and not self._closed:
            self._set_deadline_timer(load.deadline_at_s)
        return load, perform

    def _parse_tickets(self, given: GivenTicket | Sequence[GivenTicket], what: str) -> list[Ticket]:
        """Parse the ticket or tickets of a request. Return a list of at least one ticket.

        RequestError, naming `what`, if a ticket is invalid, if there are too many, or if they are for different
        prompts.
        """
        several: Sequence[Any] | None = (given,)
        if isinstance(given, list | tuple):
            several = checks.try_call(lambda: tuple(given))
        if several is None:
            raise RequestError(f"{what}: ticket: expected a ticket or a list of them, got {checks.short_repr(given)}")
        if not 0 < len(several) <= TICKETS_MAX:
            raise RequestError(f"{what}: {counted(len(several), 'ticket')}, expected 1 to {TICKETS_MAX}")
        tickets: list[Ticket] = []
        for one in several:
            try:
                tickets.append(self._resolver.read_ticket(one))
            except RequestError as error:
                raise RequestError(f"{what}: {error}") from error
            if len(tickets) > 1:
                check_same_prompt(tickets[0], tickets[-1], what)
        return tickets

    def _set_deadline_timer(self, when_s: float) -> None:
        """Set the deadline timer to fire at `when_s` and cancel the loads past their deadline; infinity stops it."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer, self._deadline_timer_s = None, when_s
        if when_s < math.inf:
            self._deadline_timer = asyncio.get_running_loop().call_at(when_s, self._end_overdue)

    def _end_overdue(self) -> None:
        now_s, next_s = asyncio.get_running_loop().time(), math.inf
        for load in self._loads:
            if load.deadline_at_s > now_s:
                next_s = min(next_s, load.deadline_at_s)
            else:
                load.cancel_overdue()
        self._set_deadline_timer(next_s)

    async def _perform_and_record(self, load: Load, perform: LoadPerformer) -> LoadReport:
        """Perform an accepted load by calling `perform`, and record its outcome. Every begun load ends here."""
        task = load.performing_task = asyncio.current_task()
        assert task is not None, "loads are carried out by tasks"
        load.outer_cancellations = task.cancelling()
        try:
            if self._closed or load.deadline_at_s <= asyncio.get_running_loop().time():
                raise self._overdue_error(load)
            report = await perform(load)
        except asyncio.CancelledError as cancelled:
            if not load.take_back_cancel():
                self._end(load, cancelled, "cancelled", CANCELLED)
                raise
            error = self._end_failed(load, self._overdue_error(load))
        except KVFlowError as problem:
            load.take_back_cancel()
            error = self._end_failed(load, problem)
        except BaseException as bug:
            self._end(load, bug, "failed", type(bug).__name__, str(bug))
            raise
        else:
            if load.overdue:  # it was cancelled just when it was done
                load.take_back_cancel()
            self._counts["bytes"] += report.bytes
            self._end(load, report, "succeeded", LOADED)
            return report
        raise error from error.__cause__

    def _end_failed(self, load: Load, error: KVFlowError) -> KVFlowError:
        """End a load with `error`. Return the error with the load's request named in it.

        If bytes may still land in the load's blocks, set the error's attribute `quarantine` to the load.
        """
        if isinstance(error, PeerError | LoadError | InvalidInput):  # loads of one handshake may share it
            error = error.of_request(load.request_id, load.ticket.engine_id)
        if isinstance(error, PeerError | LoadError) and load.attempts is None and load.current_phase != "queued":
            self._note_never_read(load.ticket.engine_id, str(error))
        error.quarantine = load if load.flight is not None and not load.flight.safe else None
        logger.info("load %s failed in phase %s: %s", load.request_id, load.current_phase, error)
        self._end(load, error, "failed", type(error).__name__, str(error))
        return error

    def _note_one_sided_prompt(self, request: LoadRequest, ticket: Ticket) -> None:
        """Log a warning, once for each engine, that prompts are not compared, since only one side has given them."""
        known = ticket.engine_id in self._one_sided or ticket.awaited
        if known or not (ticket.has_blocks and ticket.leases_can_be_asked):
            return
        self._one_sided[ticket.engine_id] = None
        given, lacking = f"the ticket of engine {ticket.engine_id!r}", "LoadRequest"
        if request.prompt is not None:
            given, lacking = "LoadRequest", f"ServeRequest of engine {ticket.engine_id!r}"
        logger.warning(
            "request %r: a ticket of another prompt would not be noticed: %s has a prompt, but %s has none: "
            "give prompt= on both sides, or on none",
            request.request_id,
            given,
            lacking,
        )

    def _note_never_read(self, engine_id: str, why: str) -> None:
        """Count a failed load, unless a load has read from that engine before. At `NEVER_READ_AT`, log a warning.

        If a router sends failed requests to another engine, their callers see no errors, only that prompts take long.
        This warning says why.
        """
        if self._peers.has_delivered(engine_id):
            self._never_read.pop(engine_id, None)
            return
        many = self._never_read[engine_id] = self._never_read.get(engine_id, 0) + 1
        if many == NEVER_READ_AT:
            logger.warning(
                "engine %r: loads with its tickets failed %s, and none has ever read from it; the last error: %s; "
                "`kvflow doctor --pair` shows the cause",
                engine_id,
                counted(many, "time"),
                why,
            )

    def _end_unstarted(self, load: Load, task: asyncio.Task[LoadReport]) -> None:
        """Callback at the end of a load's task: end the load if the task was cancelled before its first step."""
        if load.performing_task is None:
            self._end(load, asyncio.CancelledError(), "cancelled", CANCELLED)

    def _overdue_error(self, load: Load) -> KVFlowError:
        """Return the error of a load that ran out of time, or that ends because the loader or the transport ended."""
        phase, lost = load.current_phase, load.flight.loss_error if load.flight is not None else None
        if isinstance(lost, RuntimeBroken):
            return lost
        what = f"request {load.request_id!r}"
        if self._unregistered:
            why = f"the cache of {self._config.engine_id!r} was unregistered in phase {phase!r}"
            return CacheUnregistered(f"{what}: {why}")
        if self._closed:
            why = f"the runtime {self._config.engine_id!r} was closed, or had drained, in phase {phase!r}"
            return RuntimeClosed(f"{what}: {why}")
        return load.failure(DeadlineExceeded, f"deadline exceeded in phase {phase!r}{load.stall_text}", phase=phase)

    def _quarantine_ended(self, flight: Flight) -> None:
        """Callback of a flight when no further byte can land in its quarantined blocks: forget the flight."""
        del self._quarantined[flight]
        if not self._loads and not self._quarantined:
            self._idle.set()

    def _end(
        self,
        load: Load,
        result: LoadReport | BaseException,
        counted: str,
        outcome: str,
        error: str = "",
    ) -> None:
        """Set a load's outcome, count it, report it to the observers, and drop the load from the open loads.

        `result`: what awaiting the load returns or raises. `counted`: name of the count to increase. `outcome`,
        `error`: texts for the record.
        """
        load.set_outcome(result)
        if load.lease_questions is not None:
            load.lease_questions.close()
        if load.late_blocks is not None:
            load.late_blocks.close()
        if counted != "succeeded" and load.flight is not None and not load.flight.safe:
            self._quarantined[load.flight], load.flight.on_safe = load, self._quarantine_ended
        self._loads.pop(load, None)
        self._leases.stop_renewing(load)
        self._counts[counted] += 1
        if load.attempts:
            self._counts["sources_left"] += len(load.attempts) - 1
            for attempt in load.attempts:
                if attempt.error:
                    self._note_never_read(attempt.engine_id, attempt.error)
        if load.verification is not Verification.OFF:
            self._verified[load.verification] += 1
        if self._throttle.paused:
            self._throttle.resume()
        if not self._loads and not self._quarantined:
            self._idle.set()
        if self._observers.all:
            self._observers.load_ended(self._record(load, outcome, error))

    def _record(self, load: Load, outcome: str, error: str) -> LoadRecord:
        flight, ticket = load.flight, load.ticket
        if outcome != LOADED:  # a load with a report has ended its phases already
            load.end_phases()
        return LoadRecord(
            engine_id=self._config.engine_id,
            rank=self._rank,
            request_id=without_secrets(load.request_id),
            peer_engine_id=ticket.engine_id,
            remote_request_id=without_secrets(ticket.request_id),
            peer=ticket.address,
            outcome=outcome,
            error=error,
            phase=load.phase,
            bytes=flight.size_bytes if flight else 0,
            blocks=sum(map(len, load.tables)),
            blocks_by_group=blocks_by_group(self._local.groups, load.tables),
            descriptors=flight.descriptor_count if flight else 0,
            seconds=load.seconds,
            verification=load.verification,
            freshness=load.freshness,
            landed=load.landed.moments if load.landed is not None else (),
            traceparent=ticket.traceparent,
            attempts=load.attempts or (),
        )
