"""Loads that survive a failed source: sources are read one after the other, until one has delivered the whole prompt.

The load has several tickets for one prompt, or gets another one by `LoadRequest.again`.

Each attempt is an ordinary load into the same local blocks, by the ordinary steps. Bytes count only under the seals of
the one source that delivered all bytes. An attempt begins when no byte of the previous attempt can land. The blocks
stay claimed from the first attempt to the last. Outcome, deadline, record and any quarantine belong to the load as a
whole.

Only an error of a source leads to the next source. A load does not leave a source that stands still: posted reads
cannot be taken back, so the load ends at its deadline, and its blocks are quarantined until the reads stop.
RequestError, Overloaded, the deadline, cancellation and the end of this engine also end the load.
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
)
from kvflow.logs import logger_of
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.clock import Alarm
from kvflow.runtime.load.load import Carry, Load
from kvflow.runtime.load.plan import check_expected
from kvflow.runtime.load.requests import LoadReport, Verification
from kvflow.runtime.load.steps import carry
from kvflow.runtime.records import LOADED, Attempt

logger = logger_of(__name__)

ENDED = "ended"
_KEEP_AFTER = 0.25  # share of the ttl_s of waiting tickets: most loads have ended by then, and renew nothing

_LEAD_ON = (PeerError, LeaseExpired, PrefillFailed, TransferFailed, ChecksumMismatch)
_OVER = (LeaseExpired, PrefillFailed)


def carrier(cache: RegisteredCache, tickets: Sequence[Ticket]) -> Carry:
    """Return a function that performs a load from the sources of `tickets`, which are in order, the best first."""
    return lambda load: Attempts(cache, tickets, load).carry()


class Attempts:
    """One load with several tickets: reads from one source after the other, until one has delivered the prompt."""

    def __init__(self, cache: RegisteredCache, tickets: Sequence[Ticket], load: Load) -> None:
        self._cache = cache
        self._load = load
        self._first = tickets[0]
        self._waiting = list(tickets)
        """Tickets of sources that have not been read yet."""
        self._brought: list[Ticket] = []
        """Tickets that `again` returned, which only this load knows."""
        self._to_release: list[Ticket] = []
        """Tickets of failed sources with leases that may still be open."""
        self._taken = False
        """True while a source is being read."""
        self._asked = 0
        self._attempts: list[Attempt] = []
        self._begun_s = cache.clock.now_s()
        self._kept = contextlib.ExitStack()
        """Renews the leases of waiting tickets until it is closed; empty until the load takes long."""
        load.attempts = self._attempts

    async def carry(self) -> LoadReport:
        """Read from one source after the other, until one has delivered. Return the report.

        If this raises, the flight of the last source has stopped, or is quarantined.
        """
        ledger, load = self._cache.ledger, self._load
        ledger.claim_for_sources(load.entries)
        alarm = Alarm(self._cache.clock, self._keep_waiting)
        if self._waiting:
            alarm.set(self._begun_s + _KEEP_AFTER * min(one.ttl_s for one in self._waiting))
        try:
            while True:
                report = await self._attempt()
                if report is not None:
                    return replace(report, attempts=tuple(self._attempts))
        except BaseException:
            if self._taken:
                self._note(ENDED)
            if not load.request.keep_offer and (load.flight is None or load.flight.safe):
                for ticket in self._brought:
                    self._cache.remote_leases.release_soon(ticket)
            raise
        finally:
            alarm.set(math.inf)
            self._kept.close()
            ledger.end_claim(load.entries, safe=load.flight is None or load.flight.safe)

    async def _attempt(self) -> LoadReport | None:
        """Read from the next source. Return None if the load can go on with another source, else raise the error."""
        self._load.ticket = self._next()
        self._begun_s, self._taken = self._cache.clock.now_s(), True
        try:
            report = await self._read()
        except _LEAD_ON as problem:
            error = problem
        except KVFlowError as problem:
            self._note(type(problem).__name__, str(problem))
            raise
        else:
            self._note(LOADED)
            self._release_unused()
            return report
        await self._leave(error)
        return None

    def _next(self) -> Ticket:
        """Take out and return the best waiting ticket. Tickets of peers in back-off come last."""
        ticket = min(self._waiting, key=self._cache.peers.in_back_off)
        self._waiting.remove(ticket)
        return ticket

    async def _read(self) -> LoadReport:
        """Perform the load with its current ticket.

        PromptMismatch if that is for another prompt than the first offer.
        """
        load, what = self._load, f"request {self._load.request_id!r}"
        if load.ticket.awaited:
            await self._cache.part("growing", f"{what}: a load of a rendezvous").rendezvous.meet_for(load)
        check_same_prompt(self._first, load.ticket, what)
        if self._first.awaited:
            self._first = load.ticket
        return await carry(self._cache, load)

    async def _leave(self, error: KVFlowError) -> None:
        """Wait until no byte from a failed source can land, then prepare the load for the next source.

        If no source is left, raise `error`.
        """
        load = self._load
        if load.flight is not None:
            await load.flight.settled()
        self._note(type(error).__name__, str(error))
        if not isinstance(error, _OVER):
            self._to_release.append(load.ticket)
        if not self._waiting:
            await self._ask_again(error)
        last = self._attempts[-1]
        logger.warning("load %s leaves %s at %s: %s", load.request_id, last.engine_id, last.address, last.error)
        self._cache.remote_leases.forget(load)
        load.end_phases()
        if load.lease_news is not None:
            load.lease_news.close()
        load.sources, load.freshness, load.tokens, load.payload = (), "", 0, b""
        load.flight = load.lease_news = load.landed = None
        load.verification = Verification.OFF

    async def _ask_again(self, error: KVFlowError) -> None:
        """Await `again` for another ticket, and add it to the waiting tickets. Raise `error` if it returns none."""
        request, cache, what = self._load.request, self._cache, f"request {self._load.request_id!r}"
        given = None
        if request.again is not None and self._asked < request.again_max:
            self._asked += 1
            self._load.enter("handshake", lambda: "no source is left, and `again` has not brought another ticket")
            try:
                given = await request.again(tuple(self._attempts))
            except KVFlowError:
                raise
            except Exception as problem:
                why = f"no source is left, and `again` failed: {type(problem).__name__}: {error_text(problem)}"
                raise self._load.failure(PrefillFailed, why) from problem
        if given is None:
            for other in self._attempts[:-1]:
                error.add_note(f"before that, {other.engine_id!r} at {other.address}: {other.outcome}: {other.error}")
            raise error
        try:
            ticket = cache.resolver.read_ticket(given)
        except RequestError as problem:
            raise RequestError(f"{what}: again: {problem}") from problem
        self._brought.append(ticket)
        check_same_prompt(self._first, ticket, what)
        check_expected(cache.local.groups, request, ticket, self._load.tables)
        self._waiting.append(ticket)

    def _note(self, outcome: str, error: str = "") -> None:
        """Append an `Attempt` with the outcome of the current source to the load's attempts."""
        self._taken = False
        ticket, flight = self._load.ticket, self._load.flight
        self._attempts.append(
            Attempt(
                engine_id=ticket.engine_id,
                address=ticket.address,
                outcome=outcome,
                error=error,
                bytes=flight.size_bytes if flight is not None else 0,
                seconds=self._cache.clock.now_s() - self._begun_s,
            )
        )

    def _release_unused(self) -> None:
        """After a successful load, give back the leases of its other tickets.

        After a failed load, the caller keeps them.
        """
        if not self._load.request.keep_offer:
            for ticket in (*self._to_release, *self._waiting):
                self._cache.remote_leases.release_soon(ticket)

    def _keep_waiting(self) -> None:
        """Callback of an alarm: the load takes long, so begin to renew the leases of the tickets not read yet."""
        with contextlib.suppress(KVFlowError):  # the runtime closes
            for ticket in self._waiting:
                self._kept.enter_context(self._cache.remote_leases.keep_while(ticket))
