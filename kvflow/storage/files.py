"""Files: moves of bytes between memory and files, on a thread of its own, by a mover that the transport chooses.

Everything about files is a job for that one thread, in order: opening, moving, syncing, removing. So a file is closed
after its last move, and each job sees the results of those before it. A posted move cannot be taken back. It ends with
one call on the loop, which tells whether it has failed, and whether it is known to have stopped. A move that may still
run is settled when nothing else is under way; moves that are posted meanwhile wait for that.
"""

from __future__ import annotations

import ctypes
import enum
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvflow.checks import counted
from kvflow.core.cache.regions import Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import TransportBroken
from kvflow.transport.base import TransportError
from kvflow.transport.thread import OwnerThread

T = TypeVar("T")

_IDLE_S = 3600.0  # nothing has to be done between jobs
_SLEEP_MIN_S = 50e-6
_SLEEP_MAX_S = 1e-3
_SLEEP_SHARE = 8


class Direction(enum.StrEnum):
    SAVE = "save"
    """Save: from memory to a file."""
    RESTORE = "restore"
    """Restore: from a file to memory."""


class Settled(enum.Enum):
    """Fate of lost moves."""

    STOPPED = enum.auto()
    NOT_YET = enum.auto()
    NEVER = enum.auto()
    """The end is not known before the thread has ended."""


class MoveFailed(TransportError):
    """Failure of a move that was begun: its file cannot be read, or written."""


class MoveLost(MoveFailed):
    """Failure of a move that may not have stopped: its bytes may still land."""


class Mover(Protocol):
    """Mover of bytes between memory and files; made and used on the thread only."""

    def register(self, spans: Sequence[Span], keepalive: object) -> None:
        """Register memory that moves may touch. Raises TransportError."""

    def opened(self, fd: int, size_bytes: int) -> None:
        """Register an open file that moves may touch. Raises TransportError."""

    def closing(self, fd: int) -> None:
        """Forget a file, which no move will touch any more, before it is closed. Never raises."""

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        """Start a move between memory (local) and a file (remote: its offsets, and its descriptor as the device).

        Raises TransportError if nothing of it runs, MoveLost if some of it may.
        """

    def ended(self, begun: object) -> bool:
        """True once a move has ended. Raises MoveFailed, MoveLost."""

    def settle(self) -> Settled:
        """Stop lost moves, while no other move is under way."""

    def close(self) -> None:
        """End the mover: no move is under way."""


OnEnd = Callable[[TransportError | None], None]
OnStopped = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Move:
    descriptors: Descriptors
    direction: Direction
    on_end: OnEnd
    on_stopped: OnStopped
    begun: object = None


class Files:
    """The thread and its mover, as the event loop sees them."""

    def __init__(self, name: str, make: Callable[[], Mover]) -> None:
        self._name = name
        self._make = make
        self._mover: Mover | None = None
        self._thread: OwnerThread | None = None
        self._moving: list[_Move] = []
        self._lost: list[_Move] = []
        self._held_back: list[_Move] = []
        """Moves that were posted after one was lost."""
        self._active_s = 0.0
        self._under_way: set[_Move] = set()
        self._last_job: Callable[[], None] | None = None
        self._closing = False
        self.cause: BaseException | None = None
        """The bug that has killed the thread, if one has: nothing is known of its moves then."""

    @property
    def moves_under_way(self) -> int:
        return len(self._under_way)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.alive

    @property
    def mover(self) -> Mover:
        """The mover, made on the thread."""
        assert self._mover is not None, "it is open"
        return self._mover

    async def open(self) -> None:
        """Start the thread and its mover. Raises ConfigError."""
        thread = OwnerThread(self._name, self._crank, self._died)
        try:
            self._mover = await thread.call(self._make)
        except BaseException:
            self._closing = True
            thread.submit(lambda: self._end(_nothing))
            raise
        self._thread = thread

    async def call(self, job: Callable[[], T]) -> T:
        """Run `job` on the thread and return its result. Cancelling stops the waiting, not the job."""
        return await self._alive().call(job)

    def submit(self, job: Callable[[], None], then: Callable[[], None]) -> None:
        """Run `job`, which does not raise, on the thread, and `then` on the loop. TransportBroken if it has ended."""
        thread = self._alive()

        def run() -> None:
            job()
            thread.run_on_loop(then)

        thread.submit(run)

    def post(self, descriptors: Descriptors, direction: Direction, on_end: OnEnd, on_stopped: OnStopped) -> None:
        """Start a move; `on_end` is called on the loop, once, with None or with how it has failed.

        If it was lost, `on_stopped` is called once it is known to have stopped: a little later, or never.
        """
        thread = self._alive()
        move = _Move(descriptors, direction, on_end, on_stopped)
        thread.submit(lambda: self._begin(move))
        self._under_way.add(move)

    async def aclose(self, last_job: Callable[[], None]) -> None:
        """End the mover and the thread once no move is under way, after `last_job`. Closing twice is fine."""
        self._closing = True
        thread = self._thread
        if thread is None:
            return
        if thread.alive:
            thread.submit(lambda: self._end(last_job))
        await thread.ended()

    def abandon(self, last_job: Callable[[], None], wait_s: float) -> None:
        """End it without the loop, which is gone; waits up to `wait_s`."""
        self._closing = True
        thread = self._thread
        if thread is not None:
            thread.abandon(lambda: self._end(last_job), wait_s)

    def _alive(self) -> OwnerThread:
        if self._thread is None or self._closing:
            raise TransportBroken("the store's thread has ended")
        return self._thread

    # --- on the thread

    def _begin(self, move: _Move) -> None:
        if self._lost:
            self._held_back.append(move)
            return
        try:
            move.begun = self.mover.begin(move.descriptors, move.direction)
        except TransportError as error:
            self._tell(move, error)
            return
        self._active_s = time.monotonic()
        self._moving.append(move)

    def _crank(self) -> float | None:
        mover, thread = self._mover, self._thread
        if mover is None:
            return _SLEEP_MAX_S if self._last_job is None else None
        if self._last_job is None and thread is not None and thread.orphaned:
            self._last_job = _nothing
        count = len(self._moving)
        self._moving = [move for move in self._moving if not self._ended(mover, move)]
        if self._lost and not self._moving:
            self._settle(mover)
        now_s = time.monotonic()
        if len(self._moving) != count:
            self._active_s = now_s
        if self._moving or self._lost:
            return min(max((now_s - self._active_s) / _SLEEP_SHARE, _SLEEP_MIN_S), _SLEEP_MAX_S)
        if self._last_job is not None:
            self._last_job()
            mover.close()
            return None
        return _IDLE_S

    def _ended(self, mover: Mover, move: _Move) -> bool:
        error = None
        try:
            if not mover.ended(move.begun):
                return False
        except TransportError as problem:
            error = problem
        self._tell(move, error)
        return True

    def _settle(self, mover: Mover) -> None:
        """Stop lost moves, as nothing else is under way, and begin the moves that wait for that."""
        assert self._thread is not None, "it runs"
        settled = mover.settle()
        if settled is Settled.NOT_YET:
            return
        lost, self._lost = self._lost, []
        if settled is Settled.STOPPED:
            for move in lost:
                self._thread.run_on_loop(move.on_stopped)
        held_back, self._held_back = self._held_back, []
        for move in held_back:
            self._begin(move)

    def _tell(self, move: _Move, error: TransportError | None) -> None:
        assert self._thread is not None, "it runs"
        if isinstance(error, MoveLost):
            self._lost.append(move)
        self._thread.run_on_loop(lambda: self._over(move, error))

    def _end(self, last_job: Callable[[], None]) -> None:
        self._last_job = last_job

    # --- on the loop

    def _over(self, move: _Move, error: TransportError | None) -> None:
        if move in self._under_way:
            self._under_way.discard(move)
            move.on_end(error)

    def _died(self, cause: BaseException) -> None:
        """Fail all moves: the thread has ended by a bug, so nobody may wait for it."""
        self._closing = True
        self.cause = cause
        for move in list(self._under_way):
            error = MoveLost(f"the store's thread has ended: {cause}")
            error.__cause__ = cause
            self._over(move, error)


def _nothing() -> None:
    pass


class PlainMover:
    """Mover by the system's own calls, for the in-process transport."""

    def register(self, spans: Sequence[Span], keepalive: object) -> None:
        self._memory = keepalive

    def opened(self, fd: int, size_bytes: int) -> None:
        pass

    def closing(self, fd: int) -> None:
        pass

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        return descriptors, direction

    def ended(self, begun: object) -> bool:
        assert isinstance(begun, tuple), "made by begin"
        descriptors, direction = begun
        ours, theirs = descriptors.table
        rows = zip(ours[:, 0].tolist(), ours[:, 1].tolist(), theirs[:, 0].tolist(), theirs[:, 2].tolist(), strict=True)
        try:
            for address, size, offset, fd in rows:
                _move_all(fd, (ctypes.c_char * size).from_address(address), offset, direction)
        except OSError as error:
            raise MoveFailed(f"moving {counted(descriptors.size_bytes, 'byte')}: {error}") from error
        return True

    def settle(self) -> Settled:
        return Settled.STOPPED

    def close(self) -> None:
        pass


def _move_all(fd: int, memory: ctypes.Array[ctypes.c_char], offset: int, direction: Direction) -> None:
    """Move all of the memory, however much the system takes at once. OSError if the file ends early."""
    view, done = memoryview(memory).cast("B"), 0
    while done < len(view):
        rest = view[done:]
        save = direction is Direction.SAVE
        count = os.pwrite(fd, rest, offset + done) if save else os.preadv(fd, [rest], offset + done)
        if count == 0:
            raise OSError(f"the file ends at {offset + done}")
        done += count
