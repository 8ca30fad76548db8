"""A load as its caller sees it: the request, the handle, the report, and the counts of all. `loader` does them."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import enum
import heapq
import itertools
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvflow import checks
from kvflow.core.plan.descriptors import BlockIds, GivenBlockIds, count_block_ids
from kvflow.core.policy.events import DeviceEvent, checked_event
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError, RequestError, UsageError
from kvflow.runtime.clock import Clock
from kvflow.runtime.consumer.flight import Flight, Poller
from kvflow.runtime.own_loop import require_loop

PHASES = ("queued", "handshake", "plan", "post", "wire", "notify")
VERIFY = "verify"
"""The phase between "wire" and "notify" of a load that is verified; no other has it."""

_USUAL_PRIORITY = 0
TURN_S = 1e-3
"""More loads than a few in so short a time wait for their turn."""
_TURN_LOADS = 3
_PAUSE_MAX_S = 5e-3
_NAME_CHARS_MAX = 512


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Fill `block_ids`, in prompt order, from the blocks that `ticket` offers.

    With fewer local than offered blocks (a prefix was cached), the tail of the offer is read; with none (all was
    cached), nothing is read and the producer is told at once. For a cache of several groups they are a list for each,
    in order, or by the groups' names, where one that is missing has nothing to load.

    `ticket` is a Ticket or its dict. `deadline_s` covers every phase and defaults to Config.load_deadline_s. Where
    loads have to wait for each other, a smaller `priority` goes first; loads of equal priority take turns.
    """

    request_id: str
    ticket: Ticket | Mapping[str, Any]
    block_ids: GivenBlockIds
    deadline_s: float | None = None
    priority: int = 0
    prompt: Sequence[int] | None = None
    """Token ids of the prompt. PromptMismatch if the ticket is of another one, as far as its producer has told."""
    after: DeviceEvent | None = None
    """An event after which the device does nothing to the local blocks any more, such as a CUDA event behind the last
    step of who had them before: no byte lands earlier. **Without it the blocks have to be at rest when the load is
    asked for.**"""
    verify: bool | None = None
    """Whether its bytes are compared with the producer's by checksums: True fails the load where that is not possible,
    False never compares, None leaves it to Config.verify_share."""
    num_tokens: int | None = None
    """How many tokens the offer has to be of, for callers that have made room before they could know, as for a
    rendezvous: PromptMismatch if it is of more or fewer, before anything is read."""
    keep_offer: bool = False
    """Whether the producer is not told at the end, since other requests are to read the same: `Runtime.release_blocks`
    tells it, and `Runtime.keep_leases` keeps the blocks until then."""


def checked_load_request(request: object, id_chars_max: int, block_ids_max: int) -> LoadRequest:
    """The request with its numbers and texts as Python's own.

    RequestError names what cannot be right whatever the ticket and the cache are.
    """
    if type(request) is LoadRequest and type(request.request_id) is str and type(request.block_ids) in (list, tuple):
        plain_id = request.request_id.isascii() and 0 < len(request.request_id) <= id_chars_max
        plain_ids = len(request.block_ids) <= block_ids_max
        usual = request.deadline_s is None and request.after is None and request.priority is _USUAL_PRIORITY
        usual = usual and request.keep_offer is False
        if plain_id and plain_ids and usual and request.verify is None and request.num_tokens is None:
            return request  # in few steps
    given = checks.instance(request, LoadRequest, "load_blocks")
    request_id = checks.request_id(given.request_id, id_chars_max)
    try:
        count_block_ids(given.block_ids, block_ids_max)
        deadline_s = None if given.deadline_s is None else checks.seconds(given.deadline_s, "deadline_s")
        priority = checks.whole(given.priority, "priority")
        after = checked_event(given.after, "after")
        verify = None if given.verify is None else checks.flag(given.verify, "verify")
        num_tokens = None if given.num_tokens is None else checks.whole(given.num_tokens, "num_tokens", least=0)
        keep_offer = checks.flag(given.keep_offer, "keep_offer")
    except RequestError as error:
        raise RequestError(f"request {request_id!r}: {error}") from error
    plain = (request_id, given.ticket, given.block_ids, deadline_s, priority, given.prompt, after, verify, num_tokens)
    return LoadRequest(*plain, keep_offer)


class Verification(enum.StrEnum):
    """What came of comparing a load's bytes with its producer's."""

    OFF = "off"
    """They were not to be compared."""
    VERIFIED = "verified"
    """They are equal."""
    REPAIRED = "repaired"
    """They differed, and are equal since they were read once more."""
    MISMATCH = "mismatch"
    """They differ, and the load has failed."""
    UNVERIFIED = "unverified"
    """They could not be compared: the producer does not answer such questions, or not now."""


class Stopwatch:
    """Which phase a load is in, and how long each took. A phase can be entered again: `queued` is, for every permit."""

    def __init__(self, clock: Clock, begun_s: float) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase = "queued"
        self._now_s = clock.now_s
        self.begun_s = self._since_s = begun_s

    def enter(self, phase: str) -> None:
        now_s = self._now_s()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now_s - self._since_s
        self.phase, self._since_s = phase, now_s


def said_priority(request: LoadRequest) -> int:
    """Of a request that was not checked yet: the usual one if what it says is none, which is about to be refused."""
    found = checks.answer(lambda: checks.whole(request.priority, "priority"))
    return _USUAL_PRIORITY if found is None else found


class Turns:
    """How many loads start at once: a burst of them starts over many turns of the loop, and never holds it.

    Starting one takes a tenth of a millisecond, in which nothing else runs. Who comes alone does not notice. While many
    reads wait to be started no more loads begin, so that the loop is idle at times: the thread that starts them gets
    Python's lock from an idle loop, and waits a tenth of a second for it beside one that goes from turn to turn.
    """

    def __init__(self, poller: Poller) -> None:
        self.paused = False
        """Whether loads wait until fewer reads do: `resume` once that may be so."""
        self._poller = poller
        self._next_turn: asyncio.Handle | None = None
        self._since_s = -math.inf
        self._left = 0
        """How many more may start at once, until `TURN_S` after `_since_s`."""
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        """A heap: by priority, then who had a turn before, then who came first."""
        self._numbers = itertools.count()

    def at_once(self, now_s: float) -> bool:
        """Whether a load may start now; else its turn has to `come`."""
        if self._waiting:
            return False
        if now_s - self._since_s >= TURN_S:
            self._since_s, self._left = now_s, _TURN_LOADS
        self._left -= 1
        return self._left >= 0

    async def come(self, priority: int, *, again: bool = False) -> None:
        """Return when it is the load's turn. A smaller `priority` goes first; of equals, who had a turn before."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._next_turn = asyncio.get_running_loop().call_soon(self._next)
        heapq.heappush(self._waiting, (priority, not again, next(self._numbers), turn))
        await turn

    def _next(self) -> None:
        """A turn of the loop: what else is ready runs between this one and the next."""
        for _ in range(min(_TURN_LOADS, len(self._waiting))):
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
        loop, self.paused = asyncio.get_running_loop(), False
        if not self._waiting:
            return
        if self._poller.behind:
            self.paused, self._next_turn = True, loop.call_later(_PAUSE_MAX_S, self._next)
        else:
            self._next_turn = loop.call_soon(self._next)

    def resume(self) -> None:
        """While `paused`: a load is over."""
        if not self._poller.behind and self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn, self.paused = asyncio.get_running_loop().call_soon(self._next), False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one load did. `seconds` has an entry for each phase, "verify" if it was verified; they sum to `total_s`."""

    request_id: str
    bytes: int
    blocks: int
    tokens: int
    """Tokens that were read into the local blocks; the last of those may be partly filled."""
    descriptors: int
    sources: tuple[str, ...]
    """The ranks of the producer that were read from."""
    notified: bool
    """Whether every rank of the producer that holds a lease for us was told that it may free its blocks."""
    seconds: Mapping[str, float]
    verification: Verification = Verification.OFF
    freshness: str = "seal"
    """What vouches for the bytes: "seal", that of each producer's lease; or "deadline", arithmetic alone, for a load
    from an engine that keeps no seals (`kvflow.stock`)."""
    payload: builtins.bytes = b""
    """What came with the lease's end (`Lease.complete`); b"" if nothing was promised."""

    @property
    def verified(self) -> bool:
        """Whether every byte was compared with the producer's, and is equal."""
        return self.verification in (Verification.VERIFIED, Verification.REPAIRED)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is: what `async for` over it gives."""

    tokens: int
    """So many tokens of what it loads, from the first one on, are in the local blocks of all groups; in the end, as
    many as `LoadReport.tokens`."""
    tokens_in_all: int


class Load:
    """One load, under way or over. Await it for its `LoadReport`; also the `quarantine` of the error it ended with.

    Awaiting raises what `Runtime.load_blocks` raises. Cancelling a task that awaits a load cancels the load, as with
    any task; `asyncio.shield(load)` keeps it going.

    `async for progress in load` gives a `Progress` whenever more tokens have landed, the newest one to who is slow,
    and ends when the load does, or raises what it raises. What a part says is vouched for: its tokens are the prompt's,
    read under a lease that was open, so a step that needs no more may use them. The rest of the blocks is written
    meanwhile, and a load that fails later leaves the part as it is: its blocks are the engine's, but nobody knows of a
    prompt that is complete. A group's window or state lies at the prompt's end, and so comes at its end. A load whose
    leases do not grow, or are complete before any of it was read, or that is verified, gives its last progress only.
    Several may iterate, and one may stop midway, which leaves the load as it is. Cancelling a task that waits for the
    next progress cancels the load, as awaiting it does; who only looks on waits with `progressed`. A task that is
    cancelled in the loop's body has to `cancel` the load itself, best in its `finally`.
    """

    def __init__(self, request_id: str, tables: Sequence[BlockIds]) -> None:
        self.request_id = request_id
        self._tables = tables
        self._task: asyncio.Task[LoadReport] | None = None
        self.flight: Flight | None = None
        """Only for `Loader`: what it has posted."""
        self._outcome: LoadReport | BaseException | None = None
        self.followed = False
        """Whether somebody has asked how far it is."""
        self.progress: Progress | None = None
        """How far it was seen to be last, while it is under way; None before the first tokens of a load that grows."""
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
        """Whether it has ended: awaiting it returns or raises at once."""
        return self._outcome is not None or (self._task is not None and self._task.done())

    @property
    def safe(self) -> bool:
        """Whether it has ended and no byte can land in its blocks any more. May be asked from any thread."""
        return self.done and (self.flight is None or self.flight.safe)

    def cancel(self) -> None:
        """Ask it to end: awaiting it raises CancelledError within Config.cancel_grace_s. No effect once it is done.

        Its blocks may be reused when `settled()` returns, not before. Raises UsageError off the runtime's loop.
        """
        if self._task is None or self._task.done():
            return
        require_loop(self._task.get_loop(), f"request {self.request_id!r}: cancel()")
        self._task.cancel()

    async def settled(self) -> None:
        """Return once it has ended and no byte can land in its blocks any more, however it ended.

        Raises RuntimeBroken if that can never be known because the transport died under its reads; UsageError off the
        runtime's loop, unless there is nothing to wait for. Cancelling stops the waiting only.
        """
        if self._task is not None and not self._task.done():
            require_loop(self._task.get_loop(), f"request {self.request_id!r}: settled()")
            await asyncio.wait([self._task])
        if self.flight is not None and not self.flight.safe:
            await self.flight.settled()

    def follow(self) -> None:
        """Ask for its progress from now on."""
        self.followed = True
        if self.flight is not None:
            self.flight.followed = True

    async def progressed(self, tokens: int) -> Progress | None:
        """Wait until more than `tokens` tokens have landed; how many. None once it has ended without that.

        Raises UsageError off the runtime's loop. Cancelling stops the waiting only.
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
        """Only for `Loader`: so many tokens have landed, more than before."""
        self.progress = Progress(tokens, tokens_in_all)
        self._wake()

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    def begin(self, work: Callable[[], Coroutine[Any, Any, LoadReport]]) -> asyncio.Task[LoadReport]:
        """Only for `Loader`: carry the load out in a task of its own."""
        self._task = asyncio.create_task(work(), name=f"kvflow-load {self.request_id}")
        return self._task

    def end(self, outcome: LoadReport | BaseException) -> None:
        """Only for `Loader`: this is what came of it."""
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
    """What `async for` over a load iterates."""

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
    load = Load(request_name(request), ())
    load.end(error)
    return load


def request_name(request: LoadRequest) -> str:
    """The id of a request that may hold anything, as messages and records may show it."""
    named = checks.answer(lambda: request.request_id)
    return named[:_NAME_CHARS_MAX] if type(named) is str and checks.encodes(named) else checks.shown(named)


class InFlight(NamedTuple):
    """What is bounded of reads: the amount of their permits."""

    bytes: int
    descriptors: int
    reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """What is in flight from one rank, and how many reads wait to be."""

    in_flight: InFlight
    waiting_reads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingStatistics:
    """Loads under way now, how others ended, and blocks that no ended load could declare safe yet."""

    open_loads: int
    waiting_loads: int
    """Those of the open loads that wait because Limits.loads_max ranks are read from already."""
    waiting_reads: int
    """Reads that wait for room in the budgets of Config (`in_flight_bytes_max` and others)."""
    in_flight: InFlight
    """What is posted and has not stopped yet, reads into quarantined blocks included."""
    peers: Mapping[str, PeerLoad]
    """The same for each rank, by its agent's name, that has any."""
    quarantines: int
    succeeded: int
    failed: int
    cancelled: int
    refused: int
    """Loads whose request could not be right, or that came while the runtime drains."""
    bytes: int
    renewals: int
    """How often a lease was renewed, for loads under way and by `keep_leases`."""
    verified: int = 0
    """Loads whose bytes were compared with their producers' and were equal at once."""
    repaired: int = 0
    """Loads whose bytes differed, and were equal when they had been read once more."""
    mismatch: int = 0
    """Loads that have failed because their bytes differed twice."""
    unverified: int = 0
    """Loads that were to be verified and could not be."""
