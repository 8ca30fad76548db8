"""A load under way: the check of its request, `Load`, which its caller holds, and `Work`, which its carriers share."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

from kvflow import checks
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.history import History
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import COMPUTE, KVFlowError, LoadError, UsageError
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.requests import EVERY_PHASE, PHASES, LoadReport, LoadRequest, Progress, Verification
from kvflow.runtime.peers.peer import Source
from kvflow.runtime.records import Attempt
from kvflow.runtime.tasks import require_loop

_LABEL_OF = attrgetter("peer.label")
_USUAL_PRIORITY = 0
_NAME_CHARS_MAX = 512

Carry: TypeAlias = "Callable[[Load, Work], Awaitable[LoadReport]]"
"""Carries a load out: from its offer, as far as that is known, to its report."""


class LeaseNews:
    """What ranks tell of leases that a load reads under, beside their seals: `kvflow.growing` asks them."""

    @property
    def failed(self) -> str:
        """The reason in words for which a prompt could not be computed; "" if nobody has told one."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop asking."""
        raise NotImplementedError

    async def payload(self) -> bytes | None:
        """Wait for the end of the leases that promise a payload.

        Returns:
            The payload; empty if none was promised. None if a lease has ended without it.

        Raises:
            PeerError: it will not be known.
        """
        raise NotImplementedError


class Work:
    """A load under way, for the loader and its carriers: its offer, its phase, its sources and its flight."""

    def __init__(
        self,
        ticket: Ticket,
        tables: tuple[BlockIds, ...],
        entries: BlockIds,
        now_s: Callable[[], float],
        begun_s: float,
    ) -> None:
        """`entries` are the local blocks as the ledger counts them, `tables` those of each group."""
        self.ticket = ticket
        self.attempts: Sequence[Attempt] | None = None
        """Outcome of each of its sources, of a load that may have several."""
        self.tables = tables
        self.entries = entries
        self.begun_s = self._since_s = begun_s
        self.ends_s = math.inf
        """Deadline, by the loop's clock."""
        self.phase = "queued"
        self.waits_for: Callable[[], str] | None = None
        """What the phase waits for and has of it by now, in words, where its name does not say that."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.task: asyncio.Task[Any] | None = None
        """Task that carries it out, once it has begun."""
        self.cancelling = 0
        """Cancellations of that task before the load began."""
        self.overdue = False
        """True once the loader has cancelled it: its deadline has passed, or the loader closes."""
        self.held_up = ""
        """What held it up at that moment, for an error's message; "" if the phase's name says it."""
        self.sources: Sequence[Source] = ()
        """The ranks that are read from, once there is a plan."""
        self.freshness = ""
        """Proof of its bytes, as in a `LoadReport`; "" before it is known from whom they are."""
        self.tokens = 0
        """Tokens that are read."""
        self.flight: Flight | None = None
        self.news: LeaseNews | None = None
        """Questions about leases that are still to come to an end."""
        self.grown: Callable[[Source], None] | None = None
        """Callback told of each answer, while what grows is read."""
        self.landed: History | None = None
        """History of a load of leases that grow: when how many tokens had landed."""
        self.verification = Verification.OFF
        self.payload = b""
        self._now_s = now_s

    def enter(self, phase: str, waits_for: Callable[[], str] | None = None) -> None:
        """Begin a phase. It may be entered again, as `queued` is for every permit."""
        now_s, self.waits_for = self._now_s(), waits_for
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now_s - self._since_s
        self.phase, self._since_s = phase, now_s

    def compute(self, waits_for: Callable[[], str]) -> None:
        """Begin to wait for the producer, which has yet to compute what this load needs."""
        self.enter(COMPUTE, waits_for)

    def leave_source(self) -> None:
        """Forget all that belongs to its source: the next one begins anew."""
        self.end_phases()
        if self.news is not None:
            self.news.close()
        self.sources, self.freshness, self.tokens, self.payload = (), "", 0, b""
        self.flight = self.news = self.grown = self.landed = None
        self.verification = Verification.OFF

    def end_now(self) -> None:
        """Cancel its task, once, since its time is over. One that has yet to begin finds out when it does."""
        if self.task is not None and not self.overdue:
            self.overdue, self.held_up = True, self._held_up()
            self.task.cancel()

    def was_late(self) -> bool:
        """True if its task was cancelled by `end_now` alone; that cancellation is taken back."""
        return self.overdue and self.task is not None and self.task.uncancel() <= self.cancelling

    def failure(self, load: Load, kind: Callable[..., LoadError], why: str, **facts: str) -> LoadError:
        """Make the error of a load that fails: it names the request and the peer."""
        ticket, request_id = self.ticket, load.request_id
        what = f"request {request_id!r} from {ticket.engine_id!r} at {ticket.address}"
        return kind(f"{what}: {why}", request_id=request_id, peer=ticket.address, **facts)

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
        since_s = self._now_s() - self.flight.heard_s
        return f": no read has ended for {since_s:.3g} s, {reads} are under way: the peer or the network stands still"

    def end_phases(self) -> None:
        """End the phases. Time that its flight has spent waiting for permits, or posting, does not count as "wire"."""
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

    def report(self, request_id: str, *, notified: bool = False) -> LoadReport:
        flight = self.flight
        self.end_phases()
        return LoadReport(
            request_id=request_id,
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

    def __init__(self, request: LoadRequest, tables: Sequence[BlockIds] = (), work: Work | None = None) -> None:
        self.request_id = request.request_id
        self.request = request
        self.work = work
        """Only for the loader and its carriers; None of a load that was refused."""
        self._tables = tables
        self._task: asyncio.Task[LoadReport] | None = None
        self._outcome: LoadReport | BaseException | None = None
        self.followed = False
        """True once its progress was asked for."""
        self.progress: Progress | None = None
        """Progress that was seen last, while it is under way; None before the first tokens of a load that grows."""
        self._news: asyncio.Event | None = None

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
        return self.block_tables[0] if self._tables else ()

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """The local blocks that it fills, by group."""
        return tuple(tuple(ids.tolist()) for ids in self._tables)

    @property
    def done(self) -> bool:
        """True once it has ended: awaiting it returns or raises at once."""
        return self._outcome is not None or (self._task is not None and self._task.done())

    @property
    def safe(self) -> bool:
        """True once it has ended and no byte can land in its blocks any more. May be asked from any thread."""
        return self.done and (self.work is None or self.work.flight is None or self.work.flight.safe)

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
        if self.work is not None and self.work.flight is not None:
            await self.work.flight.settled()

    def follow(self) -> None:
        """Ask for its progress from now on."""
        self.followed = True
        if self.work is not None and self.work.flight is not None:
            self.work.flight.nudge()

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
        if self.work is not None and self.work.attempts is None:  # else another source may write there again
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
    """A load that was over before it began: awaiting it raises `error`."""
    load = Load(LoadRequest(request_name(request), {}, ()))
    load.end(error)
    return load


def request_name(request: LoadRequest) -> str:
    """Id of an unchecked request, as messages and records may show it."""
    named = checks.answer(lambda: request.request_id)
    return named[:_NAME_CHARS_MAX] if type(named) is str and checks.encodes(named) else checks.shown(named)
