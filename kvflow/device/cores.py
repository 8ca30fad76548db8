"""Cores of the host: threads that have much to do at the same time are kept on different ones.

Linux likes to wake a thread on the core of whoever woke it, and where it does not see that cores share a cache, as in
many virtual machines, it does so although others are idle. Threads of Python wake each other for its lock, and an event
loop wakes the threads that work for it. So copies and the reads beside them, two threads that compute digests, or a
loop and its reads took turns on one core for as long as both had something to do.

Only kvflow's own threads are moved, those that have enlisted: the event loop's is the host's. One of them at a time may
have a core to itself; whoever takes one gives that of another back.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from weakref import WeakSet

_lock = threading.Lock()
"""Guards what follows, and all places."""
_places: WeakSet[Place] = WeakSet()
_taken: Place | None = None
"""Of the thread that has its core to itself."""
_mine = threading.local()


class Place:
    """Where an enlisted thread runs: anywhere it may, unless it has a core to itself or is kept off one."""

    def __init__(self, cores: set[int]) -> None:
        self.cores = cores
        """Where it may run."""
        self.core = -1
        """Which it has to itself, if it has."""
        self._thread = threading.get_native_id()
        self._kept_off = -1

    def keep_off_here(self) -> None:
        """Keep it off the core that the calling thread, another one, is on now."""
        core = _core()
        if core != self._kept_off:
            self._keep_off(core)

    def let_go(self) -> None:
        """It may be where it likes again."""
        if self._kept_off >= 0:
            self._keep_off(-1)

    def move(self) -> None:
        """Bind the thread as things are now; the lock is held."""
        cores = {self.core}
        if self is not _taken:
            cores = self.cores - {self._kept_off if _taken is None else _taken.core}
        if cores:
            with suppress(OSError):  # it has ended, a sandbox does not allow it, or a core was taken from us
                os.sched_setaffinity(self._thread, cores)

    def _keep_off(self, core: int) -> None:
        with _lock:
            self._kept_off = core
            self.move()


def enlist() -> Place:
    """The thread that calls lets itself be moved. Its place lasts as long as it does."""
    with _lock:
        if not hasattr(_mine, "place"):
            # It starts on the cores of who starts it, which may be the thread that has one to itself.
            _mine.place = Place(os.sched_getaffinity(0) if _taken is None else _taken.cores)
            _places.add(_mine.place)
            _mine.place.move()
        place: Place = _mine.place
        return place


def take_core() -> bool:
    """Whether the thread that calls has its core to itself now and had not before.

    It stays there, and the other enlisted threads of the process are kept off it, until `give_core_back`, or until
    another thread takes a core. Not if there is one core only, and not if the thread has not enlisted: it is a host's.
    """
    place: Place | None = getattr(_mine, "place", None)
    if place is None or place is _taken or len(place.cores) < 2:
        return False
    with _lock:
        place.core = _core()
        _give_to(place)
    return True


def give_core_back() -> None:
    """The thread that calls needs no core to itself any more, if it still has one."""
    place: Place | None = getattr(_mine, "place", None)
    with _lock:
        if place is not None and place is _taken:
            _give_to(None)


def _give_to(place: Place | None) -> None:
    """The lock is held."""
    global _taken
    _taken = place
    for one in list(_places):
        one.move()


@contextmanager
def own_core() -> Iterator[None]:
    """Until the end of the block the thread has its core to itself, as `take_core` says."""
    took = take_core()
    try:
        yield
    finally:
        if took:
            give_core_back()


def _forget() -> None:
    """In a forked process, which has none of the threads: their ids are of its parent's."""
    global _lock, _taken, _mine
    _lock, _taken, _mine = threading.Lock(), None, threading.local()
    _places.clear()


os.register_at_fork(after_in_child=_forget)


def _core() -> int:
    """The one that the calling thread is on."""
    core: int = _libc().sched_getcpu()
    return core


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.PyDLL(None)  # it keeps Python's lock: the call is shorter than getting that back
