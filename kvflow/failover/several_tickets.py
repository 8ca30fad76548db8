"""Loads that survive their source: sources are read one after the other, until one has given all of the prompt.

Such a load has several tickets of one prompt, or is brought another one (`LoadRequest.again`).

Each attempt is an ordinary load into the same local blocks, by the ordinary carriers: bytes count only under the seals
of the source that gave all of them. The next one begins when no byte of the one before can land any more, and the
blocks stay claimed from the first attempt to the last. Outcome, deadline and record are the load's, as is any
quarantine.

Only an error of a source leads to the next one. A source that stands still is not left: posted reads cannot be taken
back, so the load ends at its deadline, and its blocks are quarantined until the reads stop. RequestError, Overloaded,
the deadline, cancellation and the end of this engine end the load as well.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

from kvflow.checks import said
from kvflow.core.protocol.prompts import check_alike
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
from kvflow.runtime.clock import Alarm
from kvflow.runtime.load.load import Carry, Load, Work
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.load.plan import check_expected
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.records import LOADED, Attempt

logger = logger_of(__name__)

ENDED = "ended"
_KEEP_AFTER = 0.25  # share of the ttl_s of waiting tickets: most loads are over by then, and renew nothing

_LEAD_ON = (PeerError, LeaseExpired, PrefillFailed, TransferFailed, ChecksumMismatch)
_OVER = (LeaseExpired, PrefillFailed)


def carrier(loader: Loader, tickets: Sequence[Ticket]) -> Carry:
    """Return the carrier of a load of these tickets, the best first."""
    return lambda load, work: Course(loader, tickets, load, work).carry()


class Course:
    """One load's way from source to source."""

    def __init__(self, loader: Loader, tickets: Sequence[Ticket], load: Load, work: Work) -> None:
        self._loader = loader
        self._read: Carry = loader.whole
        """Carrier of each attempt."""
        self._load = load
        self._work = work
        self._first = tickets[0]
        self._waiting = list(tickets)
        """Tickets of sources that have not had their turn."""
        self._brought: list[Ticket] = []
        """Tickets that `again` gave: nobody else knows of them."""
        self._to_release: list[Ticket] = []
        """Tickets whose leases may be open although nobody reads them any more."""
        self._taken = False
        """True while a source has its turn."""
        self._asked = 0
        self._attempts: list[Attempt] = []
        self._begun_s = loader.clock.now_s()
        self._kept = contextlib.ExitStack()
        """Keeps the leases of waiting sources, once the load takes long."""
        work.attempts = self._attempts

    async def carry(self) -> LoadReport:
        """Read one source after the other. Whatever it raises, its last flight has stopped, or is quarantined."""
        ledger, work = self._loader.resources.ledger, self._work
        ledger.keep(work.entries)
        alarm = Alarm(self._loader.clock, self._keep_waiting)
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
            if not self._load.request.keep_offer and (work.flight is None or work.flight.safe):
                for ticket in self._brought:
                    self._loader.remote_leases.release_soon(ticket)
            raise
        finally:
            alarm.set(math.inf)
            self._kept.close()
            ledger.let_go(work.entries, safe=work.flight is None or work.flight.safe)

    async def _attempt(self) -> LoadReport | None:
        """Read the next source. None if it failed and another one is left; raises why the load ends."""
        work, loader = self._work, self._loader
        work.ticket = self._next()
        self._begun_s, self._taken = loader.clock.now_s(), True
        try:
            carry: Carry = self._known
            if work.ticket.awaited:
                carry = loader.met(carry, f"request {self._load.request_id!r}")
            report = await carry(self._load, work)
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
        """The best source that has not had its turn; those that failed lately, and are not asked for now, come last."""
        ticket = min(self._waiting, key=self._loader.peers.backs_off)
        self._waiting.remove(ticket)
        return ticket

    async def _known(self, load: Load, work: Work) -> LoadReport:
        """Read an offer that is known by now. PromptMismatch if its prompt is not that of the first offer."""
        check_alike(self._first, work.ticket, f"request {load.request_id!r}")
        if self._first.awaited:
            self._first = work.ticket
        return await self._read(load, work)

    async def _leave(self, error: KVFlowError) -> None:
        """Wait until nothing of a source can land any more; raises `error` if there is no other one."""
        work, loader = self._work, self._loader
        if work.flight is not None:
            await work.flight.settled()
        self._note(type(error).__name__, str(error))
        if not isinstance(error, _OVER):
            self._to_release.append(work.ticket)
        if not self._waiting:
            await self._ask_again(error)
        last = self._attempts[-1]
        logger.warning("load %s leaves %s at %s: %s", self._load.request_id, last.engine_id, last.address, last.error)
        loader.remote_leases.forget(self._load)
        work.leave_source()

    async def _ask_again(self, error: KVFlowError) -> None:
        """Have another ticket brought; raises `error` if there is none."""
        request, loader, what = self._load.request, self._loader, f"request {self._load.request_id!r}"
        given = None
        if request.again is not None and self._asked < request.again_max:
            self._asked += 1
            self._work.enter("handshake", lambda: "no source is left, and `again` has not brought another ticket")
            try:
                given = await request.again(tuple(self._attempts))
            except KVFlowError:
                raise
            except Exception as problem:
                why = f"no source is left, and `again` failed: {type(problem).__name__}: {said(problem)}"
                raise self._work.failure(self._load, PrefillFailed, why) from problem
        if given is None:
            for other in self._attempts[:-1]:
                error.add_note(f"before that, {other.engine_id!r} at {other.address}: {other.outcome}: {other.error}")
            raise error
        try:
            ticket = loader.resolver.read_ticket(given)
        except RequestError as problem:
            raise RequestError(f"{what}: again: {problem}") from problem
        self._brought.append(ticket)
        check_alike(self._first, ticket, what)
        check_expected(loader.groups, request, ticket, self._work.tables)
        self._waiting.append(ticket)

    def _note(self, outcome: str, error: str = "") -> None:
        """Note the end of a source's turn."""
        self._taken = False
        ticket, flight = self._work.ticket, self._work.flight
        self._attempts.append(
            Attempt(
                engine_id=ticket.engine_id,
                address=ticket.address,
                outcome=outcome,
                error=error,
                bytes=flight.size_bytes if flight is not None else 0,
                seconds=self._loader.clock.now_s() - self._begun_s,
            )
        )

    def _release_unused(self) -> None:
        """Give back the leases that will not be read. After a failure the caller keeps its tickets."""
        if not self._load.request.keep_offer:
            for ticket in (*self._to_release, *self._waiting):
                self._loader.remote_leases.release_soon(ticket)

    def _keep_waiting(self) -> None:
        """Callback of an alarm: the load takes long, so keep the leases of waiting tickets."""
        with contextlib.suppress(KVFlowError):  # it closes
            for ticket in self._waiting:
                self._kept.enter_context(self._loader.remote_leases.keep_while(ticket))
