"""The store's I/O thread, which copies bytes between memory and files and does all other work with files.

A *move* copies bytes between memory and one file. A `Mover` carries out moves, by NIXL's POSIX backend or by system
calls, depending on the transport. This one thread does all work with files in order, so a file is closed after its last
move, and each job sees the results of the jobs before it.

A posted move cannot be cancelled. When it has stopped, its `on_end` is called on the event loop, once. A move that has
failed and may still run is *lost*: its `on_loss` is called immediately. When no other move is under way, the mover
stops the lost moves (`Mover.stop_lost_moves`). Only after that do moves begin that were posted meanwhile.
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
    """Copy bytes from memory to a file."""
    RESTORE = "restore"
    """Copy bytes from a file to memory."""


class LostMoves(enum.Enum):
    """Result of `Mover.stop_lost_moves`: whether the lost moves, which have failed but may still run, have stopped."""

    STOPPED = enum.auto()
    NOT_YET = enum.auto()
    """A lost move is still running; call `stop_lost_moves` again."""
    NEVER = enum.auto()
    """`stop_lost_moves` can never tell whether the lost moves have stopped; only the end of the I/O thread tells it."""


class MoveFailed(TransportError):
    """Error: copying bytes to or from a file, or reading a file's header, failed."""


class MoveLost(MoveFailed):
    """Error: a copy of bytes to or from a file failed, but its bytes may still land."""


class Mover(Protocol):
    """Copies bytes between memory and files (a move: one copy). Created and used only on the store's I/O thread."""

    def register_file(self, fd: int, size_bytes: int) -> None:
        """Register the open file `fd` of `size_bytes` bytes, so that moves can use it.

        On failure raise TransportError.
        """

    def deregister_file(self, fd: int) -> None:
        """Forget the file `fd`, which no later move uses, before it is closed. Raise nothing."""

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        """Start a move between memory (the local side) and a file (the remote side), and return a handle of the move.

        On the remote side addresses are offsets in the file, and the device number is the file descriptor. If the move
        failed but may run in part, raise MoveLost; if no part of it runs, raise another TransportError.
        """

    def has_ended(self, handle: object) -> bool:
        """Return whether a move has ended with success. `handle`: the result of `begin`.

        If the move failed, raise MoveFailed or, if it may still run, MoveLost.
        """

    def stop_lost_moves(self) -> LostMoves:
        """Stop the lost moves, which failed with MoveLost, and return their state. No other move may be under way."""

    def close(self) -> None:
        """Release the registered memory, files and handles. Call this only while no move is under way."""


@dataclass(slots=True, eq=False)
class _Move:
    descriptors: Descriptors
    direction: Direction
    on_end: Callable[[TransportError | RuntimeBroken | None], None]
    on_loss: Callable[[TransportError], None]
    error: TransportError | RuntimeBroken | None = None
    handle: object = None


class StoreThread:
    """The store's I/O thread: copies bytes between memory and files, and runs jobs, for callers on the event loop."""

    def __init__(self, name: str, make_mover: Callable[[Sequence[Span]], Mover]) -> None:
        """`make_mover`: function that creates the `Mover`.

        `make_mover` is called on the I/O thread, with the memory that moves may read and write.
        """
        self._name = name
        self._make_mover = make_mover
        self._mover: Mover | None = None
        self._keepalive: object = None
        self._thread: OwnerThread | None = None
        self._posted_moves: deque[_Move] = deque()
        """Moves that have not begun. They begin at the next step of the thread, unless a lost move may still run."""
        self._begun_moves: list[_Move] = []
        self._lost_moves: list[_Move] = []
        self._last_active_s = 0.0
        self._under_way: set[_Move] = set()
        self._last_job: Callable[[], None] | None = None
        self._closing = False
        self.cause: BaseException | None = None
        """Exception of a bug that has ended the thread, or None. If a bug has ended the thread, moves may still run."""

    @property
    def moves_under_way(self) -> int:
        return len(self._under_way)

    @property
    def mover(self) -> Mover:
        assert self._mover is not None, "it is open"
        return self._mover

    async def open(self, spans: Sequence[Span], keepalive: object) -> None:
        """Start the I/O thread, and create the mover on it. Even after an error, call `aclose` or `abandon` later.

        Args:
            spans: memory that moves may read and write.
            keepalive: owner of that memory, such as tensors, which is referenced until no move can touch the memory.

        Raises:
            ConfigError: the mover cannot be created as configured, or cannot use this memory.
        """
        self._keepalive = keepalive
        self._thread = OwnerThread(self._name, self._step, self._on_death)
        self._mover = await self._thread.call(lambda: self._make_mover(spans))

    async def call(self, job: Callable[[], T]) -> T:
        """Run `job` on the I/O thread, and return its result. If cancelled, stop waiting; the job still runs."""
        return await self._require_thread().call(job)

    def submit(self, job: Callable[[], None], then: Callable[[], None]) -> None:
        """Queue `job`, which must not raise, to run on the I/O thread. After that `then` is called on the event loop.

        Return without waiting. Raise TransportBroken if the thread has ended.
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
        """Have the I/O thread copy bytes between memory and a file. Raise TransportBroken if the thread has ended.

        Args:
            descriptors: the bytes to copy, between memory (local side) and a file (remote side).
            direction: SAVE from memory to the file, RESTORE from the file to memory.
            on_end: called once on the event loop when the move has stopped, with the move's error or None; called with
                RuntimeBroken if it can never be known when the move stops.
            on_loss: called on the event loop before `on_end` if the move has failed but may still run.
        """
        move = _Move(descriptors, direction, on_end, on_loss)
        self._require_thread().submit(partial(self._posted_moves.append, move))
        self._under_way.add(move)

    async def aclose(self, last_job: Callable[[], None]) -> None:
        """Wait until no move is under way, then run `last_job` on the I/O thread, close the mover and end the thread.

        This may be called twice.
        """
        self._closing = True
        if self._thread is None:
            return
        if self._thread.alive:
            self._thread.submit(partial(setattr, self, "_last_job", last_job))
        await self._thread.ended()

    def end_all_moves(self, problem: str) -> None:
        """Call `on_end` of every move that is still under way, because the I/O thread has ended or hangs.

        `problem`: "" if the thread has ended normally; then all moves have stopped, also lost ones. Otherwise `problem`
        is the reason why it can never be known when the moves stop; `on_end` gets it as a RuntimeBroken.
        """
        for move in list(self._under_way):
            if problem:
                move.error = RuntimeBroken(problem)
            self._end_move(move)

    def abandon(self, last_job: Callable[[], None], wait_s: float) -> None:
        """Run `last_job` on the I/O thread, then end the thread. Wait at most `wait_s` until the thread has ended.

        Call this after the event loop has ended.
        """
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
        """Begin `move` or, if it has begun, check whether it has ended. Return True if it has stopped or is lost."""
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
        """Have the `Mover` stop the lost moves. If all have stopped, call the `on_end` of each of these moves.

        No other move may be under way.
        """
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
        """Callback when a bug has ended the I/O thread: pass RuntimeBroken to `on_end` of all moves under way."""
        self._closing = True
        self.cause = cause
        self.end_all_moves(f"the store's thread has died: {cause}")


class PlainMover:
    """Implementation of `Mover` that copies bytes by system calls, for the in-process transport."""

    def register_file(self, fd: int, size_bytes: int) -> None:
        """Do nothing: system calls need only the file descriptor."""

    def deregister_file(self, fd: int) -> None:
        """Do nothing."""

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        memory, file = descriptors.table
        rows = zip(memory[:, 0].tolist(), memory[:, 1].tolist(), file[:, 0].tolist(), file[:, 2].tolist(), strict=True)
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
        """Do nothing, since nothing is held."""


def _move_all(fd: int, memory: ctypes.Array[ctypes.c_char], offset: int, direction: Direction) -> None:
    """SAVE: write all bytes of `memory` to file `fd` at `offset`. RESTORE: fill `memory` from the file at `offset`.

    Make several system calls if needed. Raise OSError if the file ends early.
    """
    view, done = memoryview(memory).cast("B"), 0
    while done < len(view):
        rest = view[done:]
        save = direction is Direction.SAVE
        count = os.pwrite(fd, rest, offset + done) if save else os.preadv(fd, [rest], offset + done)
        if count == 0:
            raise OSError(f"the file ends at {offset + done}")
        done += count
