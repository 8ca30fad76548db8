"""Files: moves of bytes between memory and files, on the store's I/O thread, by a `Mover` that fits the transport.

Every operation on files is a job for this one thread, in order: opening, moving, syncing, removing. So a file is closed
after its last move, and each job sees the results of the jobs before it.

A posted move cannot be cancelled. When it has stopped, its `on_end` is called on the loop, once. A move that has failed
and may still run is *lost*: its `on_loss` is called at once. When no other move is under way, the mover stops the
lost moves (`Mover.stop_lost_moves`). Moves posted meanwhile begin after that.
"""

from __future__ import annotations

import ctypes
import enum
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from kvflow.checks import counted
from kvflow.core.cache.regions import Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import RuntimeBroken, TransportBroken
from kvflow.transport.base import TransportError
from kvflow.transport.owner_thread import OwnerThread, pause_s

T = TypeVar("T")

_IDLE_S = 3600.0  # between jobs the thread has no work


class Direction(enum.StrEnum):
    SAVE = "save"
    """From memory to a file."""
    RESTORE = "restore"
    """From a file to memory."""


class LostMoves(enum.Enum):
    """State of the lost moves after `Mover.stop_lost_moves`."""

    STOPPED = enum.auto()
    """All lost moves have stopped."""
    NOT_YET = enum.auto()
    """A lost move is still running; call `stop_lost_moves` again."""
    NEVER = enum.auto()
    """Lost moves are known to have stopped only once the I/O thread has ended."""


class MoveFailed(TransportError):
    """A move, or the reading of a header, has failed: the file cannot be read or written."""


class MoveLost(MoveFailed):
    """A move has failed and may not have stopped: its bytes may still land."""


class Mover(Protocol):
    """Moves bytes between memory and files. Made and used on the store's I/O thread only."""

    def register_file(self, fd: int, size_bytes: int) -> None:
        """Register the open file `fd`, which moves may touch from then on. Raises TransportError."""

    def deregister_file(self, fd: int) -> None:
        """Forget the file `fd`, which no further move touches and which is about to be closed. Never raises."""

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        """Start a move between memory (local) and a file (remote), and return its handle.

        On the remote side the addresses are offsets in the file, and the device is the file descriptor. Raises MoveLost
        if some of the move may run, another TransportError if none of it does.
        """

    def has_ended(self, handle: object) -> bool:
        """Return whether the move with `handle`, from `begin`, has ended.

        MoveFailed or MoveLost if it has failed.
        """

    def stop_lost_moves(self) -> LostMoves:
        """Stop the lost moves, and return whether they have stopped. Called only while no other move is under way."""

    def close(self) -> None:
        """Release everything. Called only while no move is under way."""


@dataclass(slots=True, eq=False)
class _Move:
    descriptors: Descriptors
    direction: Direction
    on_end: Callable[[TransportError | RuntimeBroken | None], None]
    on_loss: Callable[[TransportError], None]
    error: TransportError | RuntimeBroken | None = None
    handle: object = None


class StoreThread:
    """Runs file jobs and moves of bytes on the store's I/O thread, for callers on the event loop."""

    def __init__(self, name: str, make_mover: Callable[[Sequence[Span]], Mover]) -> None:
        """`make_mover` returns the mover; called on the I/O thread, with the spans of memory that moves may touch."""
        self._name = name
        self._make_mover = make_mover
        self._mover: Mover | None = None
        self._keepalive: object = None
        self._thread: OwnerThread | None = None
        self._posted_moves: deque[_Move] = deque()
        """Moves that have not begun. They begin at once, unless a lost move may still run."""
        self._begun_moves: list[_Move] = []
        self._lost_moves: list[_Move] = []
        self._last_active_s = 0.0
        self._under_way: set[_Move] = set()
        self._last_job: Callable[[], None] | None = None
        self._closing = False
        self.cause: BaseException | None = None
        """Exception by which a bug ended the thread, else None. After a bug nothing is known about moves under way."""

    @property
    def moves_under_way(self) -> int:
        return len(self._under_way)

    @property
    def mover(self) -> Mover:
        """The mover, once `open` has made it on the thread."""
        assert self._mover is not None, "it is open"
        return self._mover

    async def open(self, spans: Sequence[Span], keepalive: object) -> None:
        """Start the I/O thread and make the mover. `aclose` or `abandon` must follow, also if this fails.

        Args:
            spans: memory that moves may touch.
            keepalive: owner of that memory; referenced until no move can touch it.

        Raises:
            ConfigError: the mover does not start as configured, or cannot move these spans.
        """
        self._keepalive = keepalive
        self._thread = OwnerThread(self._name, self._step, self._on_death)
        self._mover = await self._thread.call(lambda: self._make_mover(spans))

    async def call(self, job: Callable[[], T]) -> T:
        """Run `job` on the I/O thread and return its result. Cancelling stops the waiting, not the job."""
        return await self._require_thread().call(job)

    def submit(self, job: Callable[[], None], then: Callable[[], None]) -> None:
        """Run `job` on the I/O thread, then `then` on the event loop. `job` must not raise.

        Raises TransportBroken if the thread has ended.
        """
        thread = self._require_thread()

        def run() -> None:
            job()
            thread.run_on_loop(then)

        thread.submit(run)

    def post(
        self,
        descriptors: Descriptors,
        direction: Direction,
        on_end: Callable[[TransportError | RuntimeBroken | None], None],
        on_loss: Callable[[TransportError], None],
    ) -> None:
        """Start a move. Raises TransportBroken if the thread has ended.

        Args:
            descriptors: the bytes to move, between memory (local) and a file (remote).
            direction: from memory to the file, or from the file to memory.
            on_end: called on the loop, once, when the move has stopped: with its error, or None if it succeeded. Called
                with RuntimeBroken if it will never be known when the move stops.
            on_loss: called on the loop before `on_end`, if the move has failed and may not have stopped.
        """
        move = _Move(descriptors, direction, on_end, on_loss)
        self._require_thread().submit(partial(self._posted_moves.append, move))
        self._under_way.add(move)

    async def aclose(self, last_job: Callable[[], None]) -> None:
        """Wait until no move is under way, then run `last_job` on the I/O thread, close the mover and end the thread.

        Closing twice is fine.
        """
        self._closing = True
        if self._thread is None:
            return
        if self._thread.alive:
            self._thread.submit(partial(setattr, self, "_last_job", last_job))
        await self._thread.ended()

    def end_all_moves(self, problem: str) -> None:
        """Call `on_end` of every move that is under way, because the I/O thread has ended, or hangs.

        Args:
            problem: reason why it will never be known when the moves have stopped; "" if the thread has ended in good
                order, which means that lost moves have stopped, too.
        """
        for move in list(self._under_way):
            if problem:
                move.error = RuntimeBroken(problem)
            self._end_move(move)

    def abandon(self, last_job: Callable[[], None], wait_s: float) -> None:
        """End the I/O thread although the event loop no longer runs. Wait for its end for at most `wait_s`."""
        self._closing = True
        if self._thread is not None:
            self._thread.abandon(partial(setattr, self, "_last_job", last_job), wait_s)

    def _require_thread(self) -> OwnerThread:
        if self._thread is None or self._closing:
            raise TransportBroken("the store's thread has ended")
        return self._thread

    # --- on the thread

    def _step(self) -> float | None:
        while self._posted_moves and not self._lost_moves:
            move = self._posted_moves.popleft()
            if not self._advance(move):
                self._begun_moves.append(move)
        self._begun_moves = [move for move in self._begun_moves if not self._advance(move)]
        if self._lost_moves and not self._begun_moves:
            self._stop_lost_moves()
        if self._begun_moves or self._lost_moves or self._posted_moves:
            return pause_s(time.monotonic() - self._last_active_s)
        if self._last_job is None and (self._thread is None or not self._thread.loop_closed):
            return _IDLE_S
        if self._last_job is not None:
            self._last_job()
        if self._mover is not None:
            self._mover.close()
        self._keepalive = None
        return None

    def _advance(self, move: _Move) -> bool:
        """Begin `move`, or check it if it has begun. Return True if it has stopped or is lost."""
        try:
            if move.handle is None:
                self._last_active_s = time.monotonic()
                move.handle = self.mover.begin(move.descriptors, move.direction)
                return False
            if not self.mover.has_ended(move.handle):
                return False
        except TransportError as error:
            move.error = error
        self._last_active_s = time.monotonic()
        if isinstance(move.error, MoveLost):
            self._lost_moves.append(move)
            self._call_on_loop(partial(move.on_loss, move.error))
        else:
            self._call_on_loop(partial(self._end_move, move))
        return True

    def _stop_lost_moves(self) -> None:
        """Have the mover stop the lost moves, and report those that have stopped. Called while no other move runs."""
        settled = self.mover.stop_lost_moves()
        if settled is LostMoves.STOPPED:
            for move in self._lost_moves:
                self._call_on_loop(partial(self._end_move, move))
        if settled is not LostMoves.NOT_YET:
            self._lost_moves = []

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        assert self._thread is not None, "it runs"
        self._thread.run_on_loop(callback)

    # --- on the loop

    def _end_move(self, move: _Move) -> None:
        if move in self._under_way:
            self._under_way.discard(move)
            move.on_end(move.error)

    def _on_death(self, cause: BaseException) -> None:
        """Callback when a bug has ended the I/O thread: end all moves with RuntimeBroken."""
        self._closing = True
        self.cause = cause
        self.end_all_moves(f"the store's thread has died: {cause}")


class PlainMover:
    """Moves bytes by system calls, for the in-process transport."""

    def register_file(self, fd: int, size_bytes: int) -> None:
        pass

    def deregister_file(self, fd: int) -> None:
        pass

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        ours, theirs = descriptors.table
        rows = zip(ours[:, 0].tolist(), ours[:, 1].tolist(), theirs[:, 0].tolist(), theirs[:, 2].tolist(), strict=True)
        try:
            for address, size, offset, fd in rows:
                _move_all(fd, (ctypes.c_char * size).from_address(address), offset, direction)
        except OSError as error:
            raise MoveFailed(f"moving {counted(descriptors.size_bytes, 'byte')}: {error}") from error
        return descriptors

    def has_ended(self, handle: object) -> bool:
        return True

    def stop_lost_moves(self) -> LostMoves:
        return LostMoves.STOPPED

    def close(self) -> None:
        pass


def _move_all(fd: int, memory: ctypes.Array[ctypes.c_char], offset: int, direction: Direction) -> None:
    """Move all bytes of `memory` to or from the file at `offset`, in as many system calls as it takes.

    Raises OSError if the file ends early.
    """
    view, done = memoryview(memory).cast("B"), 0
    while done < len(view):
        rest = view[done:]
        save = direction is Direction.SAVE
        count = os.pwrite(fd, rest, offset + done) if save else os.preadv(fd, [rest], offset + done)
        if count == 0:
            raise OSError(f"the file ends at {offset + done}")
        done += count
