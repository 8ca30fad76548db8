"""Cores of the host: a thread that has much to do while others of kvflow's have, too, has one to itself.

Linux likes to wake a thread on the core of whoever woke it, and where it does not see that cores share a cache, as in
many virtual machines, it does so although others are idle. Threads of Python wake each other for its lock. So copies
and the reads beside them, or two threads that compute digests, took turns on one core for as long as both had something
to do.

One thread of the process has a core to itself at a time; whoever takes one gives that of another back.
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
"""Guards what follows."""
_threads: WeakSet[threading.Thread] = WeakSet()
"""The enlisted ones."""
_taken: _Taken | None = None


class _Taken:
    """A core that a thread has to itself."""

    def __init__(self, thread: int, cores: set[int]) -> None:
        self.thread = thread
        self._cores = cores
        self._core = {_libc().sched_getcpu()}
        self._before: dict[int, set[int]] = {}
        _bind(thread, self._core)

    def keep_off(self, thread: int, cores: set[int]) -> None:
        """Keep another thread off it, that may run on `cores` else."""
        self._before[thread] = cores
        _bind(thread, cores - self._core)

    def give_back(self) -> None:
        """All run where they might before."""
        for thread, cores in self._before.items():
            _bind(thread, cores)
        _bind(self.thread, self._cores)

    def enlist(self, thread: int) -> None:
        """A thread has started: on the cores of who started it, which may be the one that has this core."""
        self.keep_off(thread, self._cores)


def enlist() -> None:
    """The thread that calls keeps off a core that another one has to itself."""
    with _lock:
        _threads.add(threading.current_thread())
        if _taken is not None:
            _taken.enlist(threading.get_native_id())


def take_core() -> bool:
    """Whether the thread that calls has its core to itself now and had not before.

    It stays there, and the enlisted threads of the process are kept off it, until `give_core_back`, or until another
    thread takes a core. Not if there is one core only.
    """
    global _taken
    with _lock:
        me = threading.get_native_id()
        if _taken is not None:
            if _taken.thread == me:
                return False
            _taken.give_back()
            _taken = None
        cores = _allowed(me)
        if len(cores) < 2:
            return False
        _taken = _Taken(me, cores)
        for thread in _threads:
            if thread.native_id not in (None, me) and (its := _allowed(thread.native_id)):
                _taken.keep_off(thread.native_id, its)
    return True


def give_core_back() -> None:
    """The thread that calls needs no core to itself any more, if it still has one."""
    global _taken
    with _lock:
        if _taken is not None and _taken.thread == threading.get_native_id():
            _taken.give_back()
            _taken = None


@contextmanager
def own_core() -> Iterator[None]:
    """Until the end of the block the thread has its core to itself, as `take_core` says."""
    took = take_core()
    try:
        yield
    finally:
        if took:
            give_core_back()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.PyDLL(None)  # it keeps Python's lock: the call is shorter than getting that back


def _allowed(thread: int) -> set[int]:
    try:
        return os.sched_getaffinity(thread)
    except OSError:  # it has ended
        return set()


def _bind(thread: int, cores: set[int]) -> None:
    if cores:
        with suppress(OSError):  # it has ended, a sandbox does not allow it, or the core was taken from us
            os.sched_setaffinity(thread, cores)
