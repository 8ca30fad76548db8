"""A load under way: `Load`, which its caller holds and its carriers share, and the name of an unchecked request."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from kvflow import checks
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.history import History
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError, LoadError, UsageError
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.requests import EVERY_PHASE, PHASES, LoadReport, LoadRequest, Progress, Verification
from kvflow.runtime.peers.peer import Source
from kvflow.runtime.records import Attempt
from kvflow.runtime.tasks import require_loop

_LABEL_OF = attrgetter("peer.label")
_USUAL_PRIORITY = 0
_NAME_CHARS_MAX = 512
_NO_BLOCKS = np.empty(0, dtype=np.int64)

Carry: TypeAlias = "Callable[[Load], Awaitable[LoadReport]]"
"""Carries a load out: from its offer, as far as that is known, to its report."""


def said_priority(request: LoadRequest) -> int:
    """Priority of an unchecked request; the usual one if its own is none, since it is about to be refused."""
    found = checks.answer(lambda: checks.whole(request.priority, "priority"))
    return _USUAL_PRIORITY if found is None else found


class Load:
    """One load, under way or over. Await it for its `LoadReport`; also the `quarantine` of the error it ended with.

    Awaiting raises what `Runtime.load_blocks` raises. Cancelling a task that awaits a load cancels the load, as with
    any task; `asyncio.shield(load)` keeps it going.

    `async for progress in load` gives a `Progress` whenever more tokens have landed, and ends when the load does, or
    raises what it raises. A slow consumer sees only the latest progress. What a part says is vouched for: its tokens
    are the prompt's, read under a lease that was open, so a step that needs no more may use them. The rest of the
    blocks is written meanwhile, and a load that fails later leaves the part as it is: its blocks are the engine's, but
    nobody knows of a prompt that is complete. A group's window or state lies at the prompt's end, and so comes at its
    end. A load whose leases do not grow, or are complete before any of it was read, that is verified, or may have
    several sources, gives its last progress only. Several may iterate, and one may stop midway, which leaves the load
    as it is. Cancelling a task that waits for the next progress cancels the load, as awaiting it does; who only looks
    on waits with `progressed`. A task that is cancelled in the loop's body has to `cancel` the load itself, best in its
    `finally`.
    """

    def __init__(
        self,
        request: LoadRequest,
        ticket: Ticket | None = None,
        tables: Sequence[BlockIds] = (),
        entries: BlockIds = _NO_BLOCKS,
        clock: Clock | None = None,
        begun_s: float = 0.0,
    ) -> None:
        """Open a load. One that was refused has a request only.

        Args:
            request: the request, checked.
            ticket: the first of its tickets.
            tables: the local blocks, by group.
            entries: the local blocks as the ledger counts them.
            clock: the registration's clock.
            begun_s: when the load was asked for, by that clock.
        """
        self.request_id = request.request_id
        self.request = request
        self.followed = False
        """True once its progress was asked for."""
        self.progress: Progress | None = None
        """Progress that was seen last, while it is under way; None before the first tokens of a load that grows."""
        self._task: asyncio.Task[LoadReport] | None = None
        self._outcome: LoadReport | BaseException | None = None
        self._news: asyncio.Event | None = None
        self._clock = clock or SystemClock()
        # All that follows is only for the loader, its steps and the parts.
        if ticket is not None:
            self.ticket = ticket
            """The ticket that is read now."""
        self.attempts: list[Attempt] | None = None
        """Outcome of each source so far, if the load may have several."""
        self.tables = tables
        self.entries = entries
        self.begun_s = self._since_s = begun_s
        self.ends_s = math.inf
        """Deadline, by the loop's clock."""
        self.phase = "queued"
        self.waits_for: Callable[[], str] | None = None
        """What the phase waits for and has of it by now, in words, where its name does not say that."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.carrying: asyncio.Task[Any] | None = None
        """The task that carries the load out, once it has begun."""
        self.cancelling = 0
        """Cancellations of that task before the load began."""
        self.overdue = False
        """True once the loader has cancelled the load: its deadline has passed, or the loader closes."""
        self.held_up = ""
        """What held the load up at that moment, for an error's message; "" if the phase's name says it."""
        self.sources: Sequence[Source] = ()
        """The ranks that are read from, once there is a plan."""
        self.freshness = ""
        """Proof of its bytes, as in a `LoadReport`; "" before the plan."""
        self.tokens = 0
        """Tokens that are read."""
        self.flight: Flight | None = None
        self.lease_news: Any = None
        """The `growing.load_news.News` of leases that are still to come to an end; None if there are no such leases."""
        self.landed: History | None = None
        """When how many tokens had landed, of a load of leases that grow."""
        self.verification = Verification.OFF
        self.payload = b""

    def __repr__(self) -> str:
        state = "under way" if not self.done else "safe" if self.safe else "quarantined"
        return f"<Load {self.request_id} {state}>"

    def __await__(self) -> Generator[Any, None, LoadReport]:
        if self._task is not None and self._outcome is None:
            require_loop(self._task.get_loop(), f"request {self.request_id!r}: awaiting it")
            return self._task.__await__()
        return self._result().__await__()

    def __aiter__(self) -> AsyncIterator[Progress]:
        self.follow()
        return _Steps(self)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The local blocks that it fills; those of the first group, if there are several."""
        return self.block_tables[0] if self.tables else ()

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """The local blocks that it fills, by group."""
        return tuple(tuple(ids.tolist()) for ids in self.tables)

    @property
    def done(self) -> bool:
        """True once it has ended: awaiting it returns or raises at once."""
        return self._outcome is not None or (self._task is not None and self._task.done())

    @property
    def safe(self) -> bool:
        """True once it has ended and no byte can land in its blocks any more. May be asked from any thread."""
        return self.done and (self.flight is None or self.flight.safe)

    def cancel(self) -> None:
        """Ask it to end: awaiting it raises CancelledError within Config.cancel_grace_s. No effect once it is done.

        Its blocks may be reused when `settled()` returns, not before.

        Raises:
            UsageError: off the runtime's loop.
        """
        if self._task is None or self._task.done():
            return
        require_loop(self._task.get_loop(), f"request {self.request_id!r}: cancel()")
        self._task.cancel()

    async def settled(self) -> None:
        """Return once it has ended and no byte can land in its blocks any more, however it ended.

        Cancelling stops the waiting only.

        Raises:
            RuntimeBroken: that can never be known, because the transport died under its reads.
            UsageError: off the runtime's loop, unless there is nothing to wait for.
        """
        if self._task is not None and not self._task.done():
            require_loop(self._task.get_loop(), f"request {self.request_id!r}: settled()")
            await asyncio.wait([self._task])
        if self.flight is not None:
            await self.flight.settled()

    def follow(self) -> None:
        """Ask for its progress from now on."""
        self.followed = True
        if self.flight is not None:
            self.flight.nudge()

    async def progressed(self, tokens: int) -> Progress | None:
        """Wait for progress beyond what is known. Cancelling stops the waiting only.

        Args:
            tokens: how many landed tokens the caller knows of; -1 for none.

        Returns:
            The newest progress, of more than `tokens` tokens. None if the load has ended without that.

        Raises:
            UsageError: off the runtime's loop.
        """
        if self._task is not None:
            require_loop(self._task.get_loop(), f"request {self.request_id!r}: its progress")
        while self.progress is None or self.progress.tokens <= tokens:
            if self.done:
                return None
            if self._news is None:
                self._news = asyncio.Event()
            await self._news.wait()
        return self.progress

    def note_progress(self, tokens: int, tokens_in_all: int) -> None:
        """Only for `Loader`: more tokens have landed.

        Args:
            tokens: how many are in the local blocks of all groups, from the first one on.
            tokens_in_all: how many the load reads.
        """
        if self.attempts is None:  # else another source may write there again
            self.progress = Progress(tokens, tokens_in_all)
            self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    def begin(self, work: Callable[[], Coroutine[Any, Any, LoadReport]]) -> asyncio.Task[LoadReport]:
        """Only for `Loader`: carry the load out in a task of its own.

        Args:
            work: makes the coroutine that carries it out.

        Returns:
            The task, which awaiting the load awaits.

        Task `kvflow-load <request>`: begun by `start_load`; `load_blocks` runs in its caller's task. Ends
        with the load's outcome, within `cancel_grace_s` if it is cancelled. Whoever awaits the load gets its
        error.
        """
        self._task = asyncio.create_task(work(), name=f"kvflow-load {self.request_id}")
        return self._task

    def end(self, outcome: LoadReport | BaseException) -> None:
        """Only for `Loader`: settle what awaiting the load gives.

        Args:
            outcome: the report that it returns, or what it raises.
        """
        self._outcome = outcome
        if self._news is not None:
            self._wake()

    def enter(self, phase: str, waits_for: Callable[[], str] | None = None) -> None:
        """Only for steps of a load: begin a phase. It may be entered again, as `queued` is for every permit.

        Args:
            phase: its name, one of `requests.EVERY_PHASE`.
            waits_for: returns what the phase waits for, in words, where its name does not say that.
        """
        now_s, self.waits_for = self._clock.now_s(), waits_for
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now_s - self._since_s
        self.phase, self._since_s = phase, now_s

    def end_now(self) -> None:
        """Only for `Loader`: cancel the task that carries the load out, once.

        A load that has yet to begin finds out when it does.
        """
        if self.carrying is not None and not self.overdue:
            self.overdue, self.held_up = True, self._held_up()
            self.carrying.cancel()

    def was_late(self) -> bool:
        """Only for `Loader`: take back the cancellation by `end_now`.

        Returns:
            True if nobody else has cancelled the task.
        """
        return self.overdue and self.carrying is not None and self.carrying.uncancel() <= self.cancelling

    def failure(self, kind: Callable[..., LoadError], why: str, **facts: str) -> LoadError:
        """Only for steps of a load: make the error that it fails with, which names the request and the peer.

        Args:
            kind: the error's class.
            why: what has gone wrong.
            facts: further arguments of the class.

        Returns:
            The error.
        """
        what = f"request {self.request_id!r} from {self.ticket.engine_id!r} at {self.ticket.address}"
        return kind(f"{what}: {why}", request_id=self.request_id, peer=self.ticket.address, **facts)

    @property
    def where(self) -> str:
        """The phase that it is in, or was in when it ended: a flight that waits for a permit is queued."""
        return "queued" if self.flight is not None and self.flight.waits else self.phase

    def _held_up(self) -> str:
        if self.waits_for is not None:
            return f": {self.waits_for()}"
        reads = self.flight.under_way if self.flight is not None else 0
        if not reads or self.flight is None:
            return ""
        since_s = self._clock.now_s() - self.flight.heard_s
        return f": no read has ended for {since_s:.3g} s, {reads} are under way: the peer or the network stands still"

    def end_phases(self) -> None:
        """Only for steps of a load: end the phases.

        Time that the flight has spent waiting for permits, or posting, does not count as "wire".
        """
        self.enter(self.phase, self.waits_for)
        flight = self.flight
        if len(self.seconds) > len(PHASES):
            self.seconds = {phase: self.seconds[phase] for phase in EVERY_PHASE if phase in self.seconds}
        seconds = self.seconds
        if flight is not None:
            queued_s = min(flight.queued_s, seconds["wire"])
            post_s = min(flight.post_s, seconds["wire"] - queued_s)
            seconds["queued"] += queued_s
            seconds["post"] += post_s
            seconds["wire"] -= queued_s + post_s
            if flight.waits:
                self.phase = "queued"

    def report(self, *, notified: bool = False) -> LoadReport:
        """Only for steps of a load: end the phases of a load that has succeeded.

        Args:
            notified: whether the producer was told.

        Returns:
            The load's report.
        """
        flight = self.flight
        self.end_phases()
        return LoadReport(
            request_id=self.request_id,
            bytes=flight.size_bytes if flight else 0,
            blocks=sum(map(len, self.tables)) if flight else 0,
            tokens=self.tokens,
            descriptors=flight.descriptor_count if flight else 0,
            sources=tuple(map(_LABEL_OF, self.sources)),
            notified=notified,
            seconds=self.seconds,
            verification=self.verification,
            freshness=self.freshness or "seal",
            payload=self.payload,
        )

    async def _result(self) -> LoadReport:
        if isinstance(self._outcome, LoadReport):
            return self._outcome
        if self._outcome is None:
            raise UsageError(f"request {self.request_id!r}: load_blocks is awaited by its caller only")
        raise self._outcome


class _Steps:
    """Iterator that `async for` over a load uses."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tokens = -1

    def __aiter__(self) -> _Steps:
        return self

    async def __anext__(self) -> Progress:
        try:
            progress = await self._load.progressed(self._tokens)
        except asyncio.CancelledError:
            self._load.cancel()
            with contextlib.suppress(KVFlowError):
                await self._load
            raise
        if progress is None:
            report = await self._load
            progress = Progress(report.tokens, report.tokens)
            if progress.tokens <= self._tokens:
                raise StopAsyncIteration
        self._tokens = progress.tokens
        return progress


def refused_load(request: LoadRequest, error: KVFlowError) -> Load:
    """Return a load that was over before it began: awaiting it raises `error`."""
    load = Load(LoadRequest(request_name(request), {}, ()))
    load.end(error)
    return load


def request_name(request: LoadRequest) -> str:
    """Id of an unchecked request, as messages and records may show it."""
    named = checks.answer(lambda: request.request_id)
    return named[:_NAME_CHARS_MAX] if type(named) is str and checks.encodes(named) else checks.shown(named)
