"""Loads that survive a failed producer: they read from one producer after the other, until one has delivered all.

A load has several tickets for one prompt, or gets another one from `LoadRequest.again`. Each attempt is an ordinary
load into the same local blocks. Bytes count only under the seals of the one producer that delivered all bytes. An
attempt begins when no byte of the previous attempt can land. The blocks stay claimed from the first attempt to the
last. Outcome, deadline, record and any quarantine belong to the load as a whole.

Only an error of a producer, or its other weights, leads to the next producer. A load does not leave a producer that
stands still: posted reads cannot be taken back, so the load ends at its deadline, and its blocks are quarantined until
the reads stop. Any other RequestError, Overloaded, the deadline, cancellation and the end of this engine also end the
load.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

from kvflow.checks import error_text
from kvflow.core.protocol.prompts import check_same_prompt
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    ChecksumMismatch,
    KVFlowError,
    LeaseExpired,
    PeerError,
    PrefillFailed,
    RequestError,
    TransferFailed,
    WeightsMismatch,
)
from kvflow.logs import logger_of
from kvflow.runtime.clock import Alarm
from kvflow.runtime.load.load import Load, LoadPerformer
from kvflow.runtime.load.plan import check_against_ticket
from kvflow.runtime.load.requests import LoadReport, Verification
from kvflow.runtime.optional import Failover
from kvflow.runtime.part import PartHost
from kvflow.runtime.records import LOADED, Attempt

logger = logger_of(__name__)

ENDED = "ended"
_RENEW_AFTER = 0.25  # share of the ttl_s of waiting tickets: most loads have ended by then, and renew nothing

_TRY_NEXT_ON = (PeerError, LeaseExpired, PrefillFailed, TransferFailed, ChecksumMismatch, WeightsMismatch)
_LEASE_ENDED_ERRORS = (LeaseExpired, PrefillFailed)


def begin(host: PartHost) -> Failover:
    """Return what performs loads of several tickets into the registered cache of `host`."""
    return LoadsOfSeveralTickets(host)


class LoadsOfSeveralTickets:
    """Performs loads of several tickets into one registered cache (`runtime.optional.Failover`)."""

    def __init__(self, host: PartHost) -> None:
        self._host = host

    def performer(self, tickets: Sequence[Ticket]) -> LoadPerformer:
        """Return a function that performs a load from the producers of `tickets`, one after the other."""
        return lambda load: Attempts(self._host, tickets, load).perform()


class Attempts:
    """One load with several tickets: reads from one producer after the other, until one has delivered the prompt."""

    def __init__(self, host: PartHost, tickets: Sequence[Ticket], load: Load) -> None:
        self._host = host
        self._load = load
        self._first_ticket = tickets[0]
        self._waiting_tickets = list(tickets)
        self._from_again: list[Ticket] = []
        """Tickets that `LoadRequest.again` returned. Only this load knows them, so it has to release their leases."""
        self._to_release: list[Ticket] = []
        """Tickets of failed producers with leases that may still be open; released after success."""
        self._reading = False
        self._again_calls = 0
        self._attempts: list[Attempt] = []
        self._begun_s = host.context.clock.now_s()
        self._renewals = contextlib.ExitStack()
        """Context managers that renew waiting tickets' leases; `_renew_waiting` adds them if the load takes long."""
        load.attempts = self._attempts

    async def perform(self) -> LoadReport:
        """Read from one producer after the other, until one has delivered the whole load. Return the load's report.

        If this raises, all posted reads have stopped, or the load's blocks are quarantined.
        """
        ledger, load = self._host.resources.ledger, self._load
        ledger.claim_for_sources(load.entries)
        alarm = Alarm(self._host.context.clock, self._renew_waiting)
        if self._waiting_tickets:
            alarm.set(self._begun_s + _RENEW_AFTER * min(one.ttl_s for one in self._waiting_tickets))
        try:
            while True:
                report = await self._try_next()
                if report is not None:
                    return replace(report, attempts=tuple(self._attempts))
        except BaseException:
            if self._reading:
                self._note_attempt(ENDED)
            if not load.request.keep_offer and (load.flight is None or load.flight.safe):
                for ticket in self._from_again:
                    self._host.leases.release_soon(ticket)
            raise
        finally:
            alarm.set(math.inf)
            self._renewals.close()
            ledger.end_claim(load.entries, safe=load.flight is None or load.flight.safe)

    async def _try_next(self) -> LoadReport | None:
        """Read from the next producer, and return the report.

        If that producer failed and another one can be read, return None. Raise an error that ends the load.
        """
        self._load.ticket = self._next_ticket()
        self._begun_s, self._reading = self._host.context.clock.now_s(), True
        try:
            report = await self._perform_attempt()
        except _TRY_NEXT_ON as problem:
            error = problem
        except KVFlowError as problem:
            self._note_attempt(type(problem).__name__, str(problem))
            raise
        else:
            self._note_attempt(LOADED)
            self._release_unused()
            return report
        await self._prepare_next(error)
        return None

    def _next_ticket(self) -> Ticket:
        """Remove and return the first waiting ticket without a rank in back-off; if there is none, the first ticket."""
        ticket = min(self._waiting_tickets, key=self._host.peers.in_back_off)
        self._waiting_tickets.remove(ticket)
        return ticket

    async def _perform_attempt(self) -> LoadReport:
        """Perform the load with its current ticket, `load.ticket`, and return the report.

        Raise PromptMismatch if that ticket is for another prompt than the first ticket.
        """
        load, what = self._load, f"request {self._load.request_id!r}"
        if load.ticket.awaited:
            growing = self._host.optional.growing(f"{what}: a load with a pending ticket")
            await growing.pending_tickets.await_offer_of(load)
        check_same_prompt(self._first_ticket, load.ticket, what)
        if self._first_ticket.awaited:
            self._first_ticket = load.ticket
        return await self._host.steps.perform(load)

    async def _prepare_next(self, error: KVFlowError) -> None:
        """Wait until no byte from the failed producer can land, then reset the load for the next producer.

        If no ticket is left and `again` returns none, raise `error`, the failed producer's error.
        """
        load = self._load
        if load.flight is not None:
            await load.flight.settled()
        self._note_attempt(type(error).__name__, str(error))
        if not isinstance(error, _LEASE_ENDED_ERRORS):
            self._to_release.append(load.ticket)
        if not self._waiting_tickets:
            await self._await_again(error)
        last = self._attempts[-1]
        logger.warning(
            "load %s: producer %s at %s failed, so the next one is read: %s",
            load.request_id,
            last.engine_id,
            last.address,
            last.error,
        )
        self._host.leases.stop_renewing(load)
        load.end_phases()
        if load.lease_questions is not None:
            load.lease_questions.close()
        load.sources, load.freshness, load.tokens, load.payload = (), "", 0, b""
        load.flight = load.lease_questions = load.landed = None
        load.verification = Verification.OFF

    async def _await_again(self, error: KVFlowError) -> None:
        """Await `LoadRequest.again`, and add the ticket that it returns to the waiting tickets.

        If there is no `again`, if `again` was awaited `again_max` times already, or if it returns None, raise `error`.
        """
        request, what = self._load.request, f"request {self._load.request_id!r}"
        given = None
        if request.again is not None and self._again_calls < request.again_max:
            self._again_calls += 1
            self._load.enter_phase(
                "handshake", lambda: "no ticket is left, and `again` has not returned another ticket"
            )
            try:
                given = await request.again(tuple(self._attempts))
            except KVFlowError:
                raise
            except Exception as problem:
                why = f"no ticket is left, and `again` failed: {type(problem).__name__}: {error_text(problem)}"
                raise self._load.failure(PrefillFailed, why) from problem
        if given is None:
            for other in self._attempts[:-1]:
                error.add_note(f"before that, {other.engine_id!r} at {other.address}: {other.outcome}: {other.error}")
            raise error
        try:
            ticket = self._host.resolver.read_ticket(given)
        except RequestError as problem:
            raise RequestError(f"{what}: again: {problem}") from problem
        self._from_again.append(ticket)
        check_same_prompt(self._first_ticket, ticket, what)
        check_against_ticket(self._host.context.local.groups, request, ticket, self._load.tables)
        self._waiting_tickets.append(ticket)

    def _note_attempt(self, outcome: str, error: str = "") -> None:
        """Append an `Attempt` at the current producer, with `outcome` and `error`, to the load's attempts."""
        self._reading = False
        ticket, flight = self._load.ticket, self._load.flight
        self._attempts.append(
            Attempt(
                engine_id=ticket.engine_id,
                address=ticket.address,
                outcome=outcome,
                error=error,
                bytes=flight.size_bytes if flight is not None else 0,
                seconds=self._host.context.clock.now_s() - self._begun_s,
            )
        )

    def _release_unused(self) -> None:
        """After success, start to release the leases of the tickets that the load did not need.

        This has no effect with `keep_offer`. It is not called after a failed load, since the caller may use the tickets
        again.
        """
        if not self._load.request.keep_offer:
            for ticket in (*self._to_release, *self._waiting_tickets):
                self._host.leases.release_soon(ticket)

    def _renew_waiting(self) -> None:
        """Callback of a timer, when the load takes long: begin to renew the leases of the tickets not used yet."""
        with contextlib.suppress(KVFlowError):  # the runtime closes
            for ticket in self._waiting_tickets:
                self._renewals.enter_context(self._host.leases.renewing(ticket))
