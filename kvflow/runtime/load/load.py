"""`Load`: the handle of one load, which the caller, the steps of the load and the loader share."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvflow import checks
from kvflow.core.plan.descriptors import BlockIds, GivenBlockIds
from kvflow.core.policy.events import DeviceEvent
from kvflow.core.policy.history import History
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError, LoadError, RequestError, UsageError, without_secrets
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.requests import EVERY_PHASE, PHASES, LoadReport, LoadRequest, Progress, Verification
from kvflow.runtime.peers.peer import Source
from kvflow.runtime.records import Attempt
from kvflow.runtime.tasks import require_loop, shielded_from_scopes

_LABEL_OF = attrgetter("peer.label")
_DEFAULT_PRIORITY = 0
_NAME_CHARS_MAX = 512
_NO_BLOCKS = np.empty(0, dtype=np.int64)

LoadPerformer: TypeAlias = "Callable[[Load], Awaitable[LoadReport]]"
"""Function that performs all steps of an accepted load, and returns the load's report."""


def priority_of_unchecked(request: LoadRequest) -> int:
    """Return the priority of a request that is not checked yet, or the default priority if it is invalid."""
    if type(request) is LoadRequest and type(request.priority) is int:
        return request.priority
    priority = checks.try_call(lambda: checks.whole(request.priority, "priority"))
    return _DEFAULT_PRIORITY if priority is None else priority


class LeaseNews(Protocol):
    """What a load hears from the ranks of its leases that are not complete, until `close`."""

    @property
    def failed(self) -> str:
        """Reason why the prompt could not be computed, from the first rank that gave one; else empty."""

    async def payload(self) -> bytes | None:
        """Wait for the promised payload, empty if none is promised; None if a lease has ended without it."""

    def close(self) -> None: ...


class LateBlocks(Protocol):
    """The local blocks of a load that gets them while it runs (`LoadRequest.extends`), until `close`."""

    @property
    def lacking(self) -> bool:
        """True while tokens are computed for which the load has no block yet."""

    def extend(self, block_ids: object, after: object) -> None: ...

    def close(self) -> None: ...


@checks.hides_secrets
class Load:
    """One load, under way or over. Await it for its `LoadReport`.

    Awaiting raises what `Runtime.load_blocks` raises. If bytes may still land when the load fails, this load is the
    attribute `quarantine` of the error: await `error.quarantine.settled()` before the blocks are used again. Cancelling
    a task that awaits a load cancels the load, as with any task; `asyncio.shield(load)` keeps the load going.

    `async for progress in load` yields a `Progress` whenever more tokens have landed. A slow consumer gets only the
    latest one. The iteration ends when the load ends, or raises what the load raises:

        load = runtime.start_load(request)
        async for progress in load:
            print(f"{progress.tokens} of {progress.tokens_in_all} tokens have landed")
        report = await load

    Landed tokens may be used immediately, by a model step that needs no other tokens: they are the prompt's, and were
    read under an open lease. If the load fails later, they stay in the engine's blocks, but the prompt is not complete.
    The blocks of a sliding window or of recurrent state belong to the prompt's end, so they land last.

    Three kinds of loads yield only one progress, at their end: loads of a prompt that was complete before the first
    read, verified loads, and loads that may read from several producers.

    Several tasks may iterate, and each may stop midway without affecting the load. If a task is cancelled while it
    waits for the next progress, the load is cancelled too. If a task is cancelled while it waits in `progressed`, the
    load goes on. If a task is cancelled in the body of the `async for`, it has to call `cancel` itself, best in a
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
        """Make the handle of a load. For a refused load pass only `request`.

        `tables`: ids of the local blocks, one array for each group. `entries`: numbers of the same blocks in the block
        ledger. `begun_s`: time when the load was requested, by `clock`.
        """
        self.request_id = request.request_id
        self.request = request
        self.progress_wanted = False
        self.progress: Progress | None = None
        """Latest progress while the load is under way; None until the first tokens have landed."""
        self.computed_tokens = 0
        """Number of the prompt's first tokens that can be read now, as far as a load with `LoadRequest.extends` knows;
        0 for other loads."""
        self._task: asyncio.Future[LoadReport] | None = None
        self._outcome: LoadReport | BaseException | None = None
        self._progress_event: asyncio.Event | None = None
        self._clock = clock or SystemClock()
        # Everything below is only for the loader, the steps of a load and the parts.
        if ticket is not None:
            self.ticket = ticket
            """The ticket that the load reads from now."""
        self.attempts: list[Attempt] | None = None
        """Outcome of each producer that was read so far; None if the load has only one ticket."""
        self.tables = tables
        self.entries = entries
        self.begun_s = self._phase_begun_s = begun_s
        self.deadline_at_s = math.inf
        """Time of the load's deadline, by the event loop's clock."""
        self.weights = ""
        """Version of this engine's weights when the load was accepted. With others the load fails."""
        self.phase = "queued"
        self.waits_for: Callable[[], str] | None = None
        """Function that returns, as text for errors, what the current phase waits for. None if the phase's name says
        it."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.performing_task: asyncio.Task[Any] | None = None
        """The task that performs the load; None before the load has begun."""
        self.outer_cancellations = 0
        """Value of `performing_task.cancelling()` when the load began. The loader did not cause these cancellations."""
        self.overdue = False
        """True once the loader has cancelled the load, because its deadline has passed or the loader closes."""
        self.stall_text = ""
        """What the load waited for when it became `overdue`, as text for the error's message; may be empty."""
        self.sources: Sequence[Source] = ()
        """The ranks that are read from; empty before the load is planned."""
        self.freshness = ""
        """Kind of proof, as in a `LoadReport`; empty before the load is planned."""
        self.tokens = 0
        self.flight: Flight | None = None
        self.lease_questions: LeaseNews | None = None
        """What the load hears about its leases that are not complete; None if all are."""
        self.late_blocks: LateBlocks | None = None
        """The local blocks that the load gets while it runs; None if it has all from the start."""
        self.landed: History | None = None
        """The number of landed tokens over time; None unless the load reads leases that are not complete."""
        self.verification = Verification.OFF
        self.payload = b""

    def __repr__(self) -> str:
        state = "under way" if not self.done else "safe" if self.safe else "quarantined"
        return f"<Load {self.request_id} {state}>"

    def __await__(self) -> Generator[Any, None, LoadReport]:
        task = self._task
        if task is not None and (self._outcome is None or not task.done()):  # none if cancelled before its first step
            require_loop(task.get_loop(), f"request {self.request_id!r}: awaiting it")
            return _result_of(task).__await__()
        if task is not None and not task.cancelled():
            task.exception()  # mark it as retrieved: asyncio logs errors that nobody has retrieved
        return self._result().__await__()

    def __aiter__(self) -> AsyncIterator[Progress]:
        self.follow()
        return _ProgressIterator(self)

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Local blocks that the load fills; if there are several groups, only the blocks of the first group."""
        return self.block_tables[0] if self.tables else ()

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """Local blocks that the load fills, by group."""
        return tuple(tuple(ids[ids >= 0].tolist()) for ids in self.tables)

    @property
    def has_handle(self) -> bool:
        """True if `start_load` has returned this load, False if `load_blocks` performs it."""
        return self._task is not None

    @property
    def done(self) -> bool:
        """True once the load has ended, so that awaiting it returns or raises without waiting."""
        return self._outcome is not None or (self._task is not None and self._task.done())

    @property
    def safe(self) -> bool:
        """True once the load has ended and no further byte can land in its blocks. May be read on any thread."""
        return self.done and (self.flight is None or self.flight.safe)

    def cancel(self) -> None:
        """Ask the load to end: awaiting it then raises CancelledError. No effect if the load is done.

        The load ends within Config.cancel_grace_s. Do not reuse its blocks before `settled()` returns.

        Raises:
            UsageError: called off the runtime's loop.
        """
        if self._task is None or self._task.done():
            return
        require_loop(self._task.get_loop(), f"request {self.request_id!r}: cancel()")
        self._task.cancel()

    async def settled(self) -> None:
        """Wait until the load has ended, in whatever way, and no further byte can land in its blocks.

        Cancelling stops only the waiting.

        Raises:
            RuntimeBroken: that can never be known, because the transport died under the load's reads.
            UsageError: called off the runtime's loop, unless there is nothing to wait for.
        """
        if self._task is not None and not self._task.done():
            require_loop(self._task.get_loop(), f"request {self.request_id!r}: settled()")
            await asyncio.wait([self._task])
        if self.flight is not None:
            await self.flight.settled()

    def follow(self) -> None:
        """From this call on, update `progress` while the load is under way. `async for` calls this by itself."""
        self.progress_wanted = True
        if self.flight is not None:
            self.flight.nudge()

    async def progressed(self, tokens: int) -> Progress | None:
        """Wait until more than `tokens` tokens have landed. Cancelling stops only the waiting.

        Args:
            tokens: number of landed tokens that the caller knows of; -1 for none.

        Returns:
            The latest progress, of more than `tokens` tokens. None if the load ended before it reported so many.

        Raises:
            UsageError: called off the runtime's loop.
        """
        if self._task is not None:
            require_loop(self._task.get_loop(), f"request {self.request_id!r}: its progress")
        while self.progress is None or self.progress.tokens <= tokens:
            if self.done:
                return None
            await self._changed()
        return self.progress

    def extend(self, block_ids: GivenBlockIds, after: DeviceEvent | None = None) -> None:
        """Add the next local blocks, in prompt order, to a load that was started with `LoadRequest.extends`.

        In the end each group must have the blocks of all offered tokens from `cached_tokens` on; a sliding-window group
        only the blocks of the window at the end. The load reads the tokens that are computed and have blocks, and waits
        for the other blocks within its deadline. Like its first blocks, they are the load's until it has ended and
        `settled()` has returned. No effect on a load that has ended: it never writes to blocks that come too late.

        Args:
            block_ids: the added blocks only, in the form of `LoadRequest.block_ids`.
            after: as `LoadRequest.after`, for these blocks. The blocks of a later call wait for it, too.

        Raises:
            RequestError: the block ids are wrong, the load's already, or more than the offered tokens need; `after` is
                no event; or the load was started without `extends`. The load is unchanged.
            BlocksBusy: one of the blocks is leased or being loaded. The load is unchanged. Of blocks that came before
                the load reads, the load itself raises it.
            LayoutError: a tensor of the cache has moved since the cache was registered.
            UsageError: not called on the runtime's event loop.
        """
        if self.done and self.late_blocks is None:
            return  # it may be one that was refused
        if self._task is not None:
            require_loop(self._task.get_loop(), f"request {self.request_id!r}: extend()")
        if self.late_blocks is None:
            raise RequestError(f"request {self.request_id!r}: extend(): its LoadRequest has no extends=True")
        self.late_blocks.extend(block_ids, after)

    async def computed(self, tokens: int) -> int | None:
        """Wait until a load with `LoadRequest.extends` could read more than `tokens` tokens of the prompt.

        An engine can then take blocks for these from its pool, and call `extend`. Cancelling stops only the waiting.

        Args:
            tokens: number of computed tokens that the caller knows of; 0 for none.

        Returns:
            Number of the prompt's first tokens that the producer has computed, counted with the cached ones. None if
            the load has ended.

        Raises:
            UsageError: called off the runtime's loop.
        """
        if self._task is not None:
            require_loop(self._task.get_loop(), f"request {self.request_id!r}: its computed tokens")
        while not self.done:
            if self.computed_tokens > tokens:
                return self.computed_tokens
            await self._changed()
        return None

    def note_computed(self, tokens: int) -> None:
        """Only for `kvflow.growing`: record that the prompt's first `tokens` tokens can be read, and wake waiters."""
        self.computed_tokens = tokens
        self._wake()

    def note_progress(self, tokens: int, tokens_in_all: int) -> None:
        """Only for `kvflow.growing`: record that more tokens have landed, and wake tasks that wait for progress.

        `tokens`: number of tokens, counted after the cached ones, that have landed in every group of layers. No effect
        if the load may read from several producers.
        """
        if self.attempts is None:  # else another producer may write there again
            self.progress = Progress(tokens, tokens_in_all)
            self._wake()

    async def _changed(self) -> None:
        """Wait until there is progress, more tokens are computed, or the load has ended."""
        if self._progress_event is None:
            self._progress_event = asyncio.Event()
        await self._progress_event.wait()

    def _wake(self) -> None:
        if self._progress_event is not None:
            self._progress_event.set()
            self._progress_event = None

    def start_task(self, work: Callable[[], Coroutine[Any, Any, LoadReport]]) -> asyncio.Task[LoadReport]:
        """Only for `Loader`: start and return a task that performs the load by awaiting `work()`.

        Task `kvflow-load <request>`: begun by `start_load`; `load_blocks` runs in its caller's task. It ends when the
        load has its outcome; a cancelled load has it within `cancel_grace_s`. Awaiting the load raises the task's
        error. If nobody awaits it, asyncio logs the error.
        """
        self._task = task = asyncio.create_task(work(), name=f"kvflow-load {without_secrets(self.request_id)}")
        return task

    def set_outcome(self, outcome: LoadReport | BaseException) -> None:
        """Only for `Loader`: set the report that awaiting the load returns, or the exception that it raises."""
        self._outcome = outcome
        if self._progress_event is not None:
            self._wake()

    def enter_phase(self, phase: str, waits_for: Callable[[], str] | None = None) -> None:
        """Only for steps of a load: begin `phase`, one of `requests.EVERY_PHASE`. A phase may begin more than once.

        `waits_for`: returns, as text for errors, what the phase waits for; None if the phase's name says it.
        """
        now_s, self.waits_for = self._clock.now_s(), waits_for
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now_s - self._phase_begun_s
        self.phase, self._phase_begun_s = phase, now_s

    def cancel_overdue(self) -> None:
        """Only for `Loader`: cancel the task that performs the load, because time is up or the loader closes.

        A load that has not begun is not cancelled: the loader fails it when it begins.
        """
        if self.performing_task is not None and not self.overdue:
            self.overdue, self.stall_text = True, self._stall_text()
            self.performing_task.cancel()

    def take_back_cancel(self) -> bool:
        """Only for `Loader`: if `cancel_overdue` has cancelled the task, take that cancellation back.

        Return True if this was the only cancellation since the load began. The task may then raise another error in
        place of CancelledError.
        """
        return (
            self.overdue
            and self.performing_task is not None
            and self.performing_task.uncancel() <= self.outer_cancellations
        )

    def failure(self, kind: Callable[..., LoadError], why: str, **facts: str) -> LoadError:
        """Only for steps of a load: return an error of class `kind`, which names the request, the peer and `why`.

        `facts`: further arguments of the class.
        """
        what = f"request {self.request_id!r} from {self.ticket.engine_id!r} at {self.ticket.address}"
        return kind(f"{what}: {why}", request_id=self.request_id, peer=self.ticket.address, **facts)

    @property
    def current_phase(self) -> str:
        """The phase that the load is in, or was in when it ended; "queued" while a read waits for a permit."""
        return "queued" if self.flight is not None and self.flight.waits_for_permit else self.phase

    def _stall_text(self) -> str:
        if self.waits_for is not None:
            return f": {self.waits_for()}"
        reads = self.flight.under_way if self.flight is not None else 0
        if not reads or self.flight is None:
            return ""
        since_s = self._clock.now_s() - self.flight.last_read_s
        return f": no read has ended for {since_s:.3g} s, {reads} are under way: the peer or the network stands still"

    def end_phases(self) -> None:
        """Only for steps of a load: end the current phase, and correct the seconds of the phases.

        The seconds of "wire" include the waits for permits and the posting of reads. Count the waits as "queued" and
        the posting as "post" instead.
        """
        self.enter_phase(self.phase, self.waits_for)
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
            if flight.waits_for_permit:
                self.phase = "queued"

    def report(self, *, notified: bool = False) -> LoadReport:
        """Only for steps of a load: end the phases of a load that has succeeded, and return its report."""
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


async def _result_of(task: asyncio.Future[LoadReport]) -> LoadReport:
    """Return the result of a load's task, or raise its error. If cancelled, cancel the task and wait for its end."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancel():
            raise
        with shielded_from_scopes():
            return await task


class _ProgressIterator:
    """Async iterator over the progress of a load, for `async for progress in load`."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tokens = -1

    def __aiter__(self) -> _ProgressIterator:
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
    """Return a load that ended before it began: awaiting it raises `error`."""
    load = Load(LoadRequest(request_name(request), {}, ()))
    load.set_outcome(error)
    with contextlib.suppress(RuntimeError):  # without a running loop nothing logs errors that nobody has retrieved
        load._task = asyncio.get_running_loop().create_future()
        load._task.set_exception(error)
    return load


def request_name(request: LoadRequest) -> str:
    """Return the id, shortened, of a request that is not checked yet, or a text that describes an invalid id."""
    named = checks.try_call(lambda: request.request_id)
    return named[:_NAME_CHARS_MAX] if type(named) is str and checks.is_utf8(named) else checks.short_repr(named)
