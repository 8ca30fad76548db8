"""Loads that survive their source: sources are read one after the other, until one has given all of the prompt.

Such a load has several tickets of one prompt, or is brought another one (`LoadRequest.again`).

Each attempt is an ordinary load into the same local blocks, by the ordinary carriers: bytes count only under the seals
of the source that gave all of them. The next one begins when no byte of the one before can land any more, and the
blocks stay claimed from the first attempt to the last. Outcome, deadline and record are the load's, as is any
quarantine: a source whose reads do not stop holds its blocks, and the load ends at its deadline.

What leads to the next source is an error of this one, or that it *stands still* while another one is left, or `again`
could bring one: no phase of it, and no read, takes more than its share of the time that is left, as much as each of the
others gets. Of several tickets it is also left when it is *late by its own history*: none of its reads has ended for
many times as long as its longest one has taken lately. Reads that wait behind those of other loads are not late. When
no other source is left, those that stood still get the rest of the time. Whoever is in this engine's way (RequestError,
Overloaded, the deadline, cancellation, its end) ends the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvflow.checks import answer, said, shown
from kvflow.core.protocol.prompts import check_alike
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    COMPUTE,
    ChecksumMismatch,
    KVFlowError,
    LeaseExpired,
    PeerError,
    PeerUnreachable,
    PrefillFailed,
    RequestError,
    TransferFailed,
)
from kvflow.growing.pending_loads import Meeting, check_expected
from kvflow.logs import logger_of
from kvflow.runtime.clock import Timer
from kvflow.runtime.context import RankContext
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.gear import Gear
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.load.load import Carry, Load, Work
from kvflow.runtime.load.requests import VERIFY, LoadReport, LoadRequest
from kvflow.runtime.peers.peer import Reaching
from kvflow.runtime.records import LOADED, Attempt

logger = logger_of(__name__)

SOURCES_MAX = 16
LATE, ENDED = "late", "ended"
LATE_TIMES = 8
LATE_LEAST_S = 0.5
"""Lateness: no read has ended for so many times the longest one, and for so long at least. The bound for a peer that
was never read from is Config.handshake_timeout_s, as on the side channel."""
_LOOK_EVERY_S = 0.05
_KEEP_AFTER = 0.25  # share of the ttl_s of waiting tickets: most loads are over by then, and renew nothing

_LEAD_ON = (PeerError, LeaseExpired, PrefillFailed, TransferFailed, ChecksumMismatch)
_OVER = ("LeaseExpired", "PrefillFailed")
_STAGES = ("queued", "handshake", COMPUTE, "plan", "post", "wire", VERIFY, "notify")


class Surviving:
    """Accepts loads that may have several sources, for one registration."""

    def __init__(
        self,
        context: RankContext,
        meeting: Meeting,
        reach: Reaching,
        remote_leases: RemoteLeases,
        gear: Gear,
        whole: Carry,
    ) -> None:
        self.handshake_timeout_s = context.config.handshake_timeout_s
        self.clock = context.clock
        self.meeting = meeting
        self.groups = meeting.groups
        self.reach = reach
        self.remote_leases = remote_leases
        self.ledger = gear.ledger
        self.whole = whole

    def accept(self, request: LoadRequest, block_ids_max: int) -> tuple[tuple[Ticket, ...], Carry]:
        """Check a request's tickets, and choose its carrier. RequestError; PromptMismatch if their prompts differ."""
        what, given = f"request {request.request_id!r}", request.ticket
        several: Sequence[Any] | None = (given,)
        if isinstance(given, list | tuple):
            several = answer(lambda: tuple(given))
        if several is None:
            raise RequestError(f"{what}: ticket: expected a ticket or a list of them, got {shown(given)}")
        if not 0 < len(several) <= SOURCES_MAX:
            raise RequestError(f"{what}: {len(several)} tickets, expected 1 to {SOURCES_MAX}")
        try:
            tickets = tuple(self.reach.read_ticket(one, block_ids_max) for one in several)
        except RequestError as error:
            raise RequestError(f"{what}: {error}") from error
        for other in tickets[1:]:
            check_alike(tickets[0], other, what)
        if len(tickets) == 1 and request.again is None:
            return tickets, self.meeting.carry if tickets[0].awaited else self.whole
        return tickets, lambda load, work: _Course(self, tickets, load, work).carry()


class _Course:
    """One load's way from source to source."""

    def __init__(self, surviving: Surviving, tickets: Sequence[Ticket], load: Load, work: Work) -> None:
        self._surviving = surviving
        self._load = load
        self._work = work
        self._first = tickets[0]
        self._waiting = list(tickets)
        """Tickets of sources that have not had their turn."""
        self._brought: list[Ticket] = []
        """Tickets that `again` gave: nobody else knows of them."""
        self._to_release: list[Ticket] = []
        """Tickets whose leases may be open although nobody reads them any more."""
        self._still: list[Ticket] = []
        """Tickets of sources that stood still, for when no other one is left."""
        self._taken = False
        """True while a source has its turn."""
        self._asked = 0
        self._attempts: list[Attempt] = []
        self._begun_s = self._looked_s = surviving.clock.now_s()
        self._stage = 0
        """The furthest phase of the source's turn."""
        self._progress = (-1, 0, 0.0)
        self._moved_s = 0.0
        """When it got on last, by its phase or by its bytes."""
        self._late = ""
        """Why the source is late, once its attempt was ended for that."""
        self._timer: Timer | None = None
        self._kept: contextlib.ExitStack | None = None
        """Keeps the leases of waiting sources, once the load takes long."""
        work.attempts = self._attempts

    async def carry(self) -> LoadReport:
        """Read one source after the other. Whatever it raises, its last flight has stopped, or is quarantined."""
        ledger, work = self._surviving.ledger, self._work
        ledger.keep(work.entries)
        try:
            while True:
                report = await self._attempt()
                if report is not None:
                    return replace(report, attempts=tuple(self._attempts))
        except BaseException:
            if self._taken:
                self._note(ENDED, self._late)
            if not self._load.request.keep_offer and (work.flight is None or work.flight.safe):
                for ticket in self._brought:
                    self._surviving.remote_leases.release_soon(ticket)
            raise
        finally:
            self._stop_looking()
            if self._kept is not None:
                self._kept.close()
            ledger.let_go(work.entries, safe=work.flight is None or work.flight.safe)

    async def _attempt(self) -> LoadReport | None:
        """Read the next source. None if it failed and another one is left; raises why the load ends."""
        work, surviving = self._work, self._surviving
        work.ticket = self._next()
        self._begun_s = self._moved_s = surviving.clock.now_s()
        self._taken, self._stage, self._progress = True, 0, (0, 0, 0.0)
        error: KVFlowError | None = None
        self._look_later()
        try:
            carry = surviving.meeting.then(self._known) if work.ticket.awaited else self._known
            report = await carry(self._load, work)
        except asyncio.CancelledError:
            if not self._was_late():
                raise
        except _LEAD_ON as problem:
            error = problem
        except KVFlowError as problem:
            self._note(type(problem).__name__, str(problem))
            raise
        else:
            self._note(LOADED)
            self._release_unused()
            return report
        finally:
            self._stop_looking()
        await self._leave(error)
        return None

    def _next(self) -> Ticket:
        """The best source that has not had its turn; those that failed lately, and are not asked for now, come last."""
        ticket = min(self._waiting, key=self._surviving.reach.backs_off)
        self._waiting.remove(ticket)
        return ticket

    async def _known(self, load: Load, work: Work) -> LoadReport:
        """Read an offer that is known by now. PromptMismatch if its prompt is not that of the first offer."""
        check_alike(self._first, work.ticket, f"request {load.request_id!r}")
        if self._first.awaited:
            self._first = work.ticket
        return await self._surviving.whole(load, work)

    async def _leave(self, error: KVFlowError | None) -> None:
        """Wait until nothing of a source can land any more; raises `error` if there is no other one."""
        work, surviving = self._work, self._surviving
        if error is None:
            kind = PeerUnreachable if work.flight is None else TransferFailed
            why = f"{work.ticket.engine_id!r} at {work.ticket.address}: {self._late}"
            error_if_last: KVFlowError = kind(why, request_id=self._load.request_id, peer=work.ticket.address)
            self._still.append(work.ticket)
            for source in work.sources:
                surviving.reach.failed(source, self._late)
        else:
            error_if_last = error
        if work.flight is not None:
            await work.flight.settled()
        outcome = LATE if error is None else type(error).__name__
        self._note(outcome, self._late if error is None else str(error))
        if outcome not in _OVER:
            self._to_release.append(work.ticket)
        if not self._waiting:
            await self._ask_again(error_if_last)
        last = self._attempts[-1]
        logger.warning("load %s leaves %s at %s: %s", self._load.request_id, last.engine_id, last.address, last.error)
        surviving.remote_leases.forget(self._load)
        work.leave_source()
        self._late = ""

    async def _ask_again(self, error: KVFlowError) -> None:
        """Have another ticket brought, or go back to those that stood still; raises `error` if there is none."""
        request, surviving, what = self._load.request, self._surviving, f"request {self._load.request_id!r}"
        given = None
        if self._may_ask:
            assert request.again is not None, "that is asked"
            self._asked += 1
            self._work.enter("handshake", lambda: "no source is left, and `again` has not brought another ticket")
            try:
                given = await request.again(tuple(self._attempts))
            except KVFlowError:
                raise
            except Exception as problem:
                why = f"no source is left, and `again` failed: {type(problem).__name__}: {said(problem)}"
                raise self._work.failure(self._load, PrefillFailed, why) from problem
        if given is None and self._still:
            self._waiting, self._still = self._still, []
            self._to_release = [ticket for ticket in self._to_release if ticket not in self._waiting]
            return
        if given is None:
            for other in self._attempts[:-1]:
                error.add_note(f"before that, {other.engine_id!r} at {other.address}: {other.outcome}: {other.error}")
            raise error
        try:
            ticket = surviving.reach.parse_ticket(given)
        except RequestError as problem:
            raise RequestError(f"{what}: again: {problem}") from problem
        self._brought.append(ticket)
        check_alike(self._first, ticket, what)
        check_expected(surviving.groups, request, ticket, self._work.tables)
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
                seconds=self._surviving.clock.now_s() - self._begun_s,
            )
        )

    def _release_unused(self) -> None:
        """Give back the leases that will not be read. After a failure the caller keeps its tickets."""
        if not self._load.request.keep_offer:
            for ticket in (*self._to_release, *self._waiting):
                self._surviving.remote_leases.release_soon(ticket)

    # --- lateness

    @property
    def _may_ask(self) -> bool:
        """True if `again` may bring another ticket."""
        return self._load.request.again is not None and self._asked < self._load.request.again_max

    def _was_late(self) -> bool:
        """True if the task was cancelled by `_look` alone; that cancellation is taken back."""
        task = self._work.task
        assert task is not None, "it is under way"
        return bool(self._late) and task.uncancel() <= self._work.cancelling

    def _look_later(self) -> None:
        if self._waiting or self._may_ask:
            self._looked_s = self._surviving.clock.now_s()
            self._timer = self._surviving.clock.call_later(_LOOK_EVERY_S, self._look)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Callback of the timer: end the attempt if its source is late, and keep the leases of waiting ones."""
        work, now_s = self._work, self._surviving.clock.now_s()
        stalled = now_s - self._looked_s > 2 * _LOOK_EVERY_S  # the loop was held up: ends of reads were not heard
        self._timer = None
        if not stalled and (why := self._why_left(now_s)):
            assert work.task is not None, "it is under way"
            self._late = why
            if work.flight is not None:
                work.flight.give_up()
            work.task.cancel()
            return
        shortest_s = min((one.ttl_s for one in self._waiting), default=math.inf)
        if self._kept is None and now_s - self._begun_s > _KEEP_AFTER * shortest_s:
            self._keep_waiting()
        self._look_later()

    def _why_left(self, now_s: float) -> str:
        """Why the source is left for another one, in words; "" if it is not."""
        work, flight = self._work, self._work.flight
        if flight is not None and self._waiting and (why := self._why_late(flight, now_s)):
            return why
        self._stage = max(self._stage, _STAGES.index(work.phase))
        size, heard_s = (0, 0.0) if flight is None else (flight.size_bytes, flight.heard_s)
        progress = (self._stage, size, heard_s if work.landed is None else 0.0)  # what grows is looked at all the time
        if progress != self._progress:
            self._progress, self._moved_s = progress, now_s
        since_s = self._moved_s
        if flight is not None and flight.waits:  # behind reads of the same peers
            since_s = max(since_s, *(source.peer.heard_s for source in work.sources))
        others = len(self._waiting) + self._may_ask
        still_s, left_s = now_s - since_s, work.ends_s - asyncio.get_running_loop().time()
        if still_s * others <= left_s:
            return ""
        return f"it has stood still for {still_s:.3g} s in phase {work.where!r}, and {left_s:.3g} s are left for others"

    def _why_late(self, flight: Flight, now_s: float) -> str:
        """Why the source is late by its own history, in words; "" if it is not."""
        peers = [source.peer for source in self._work.sources]
        if flight.reading:
            since_s = flight.heard_s
        elif flight.waits:  # behind reads of the same peers
            since_s = max(self._begun_s, *(peer.heard_s for peer in peers))
        else:
            return ""
        longest_s = max(peer.read_s for peer in peers)
        bound_s = max(LATE_TIMES * longest_s, LATE_LEAST_S) if longest_s else self._surviving.handshake_timeout_s
        if now_s - since_s <= bound_s:
            return ""
        return (
            f"no read of it has ended for {now_s - since_s:.3g} s; the longest of its last ones took {longest_s:.3g} s"
        )

    def _keep_waiting(self) -> None:
        self._kept = contextlib.ExitStack()
        with contextlib.suppress(KVFlowError):  # it closes
            for ticket in self._waiting:
                self._kept.enter_context(self._surviving.remote_leases.keep_while(ticket))
