"""Forked child processes: they inherit memory and file descriptors, but neither threads nor the event loop.

In a child, a call of ZeroMQ or NIXL on an object of the parent may never return, and a file descriptor that is removed
from the inherited loop is removed from the parent's loop, too. So objects with threads, sockets or a loop register
here. In a child their `forked` is called before any other code runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class ForkAware(Protocol):
    """An object that a forked child must not use, because it has threads, sockets or a loop of the parent."""

    def forked(self) -> None:
        """Make this object unusable. Called in the child, on its only thread.

        Afterwards every method of the object returns at once or raises UsageError.
        """


_REGISTERED: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register(one: ForkAware) -> None:
    """Arrange that `one.forked()` is called in each forked child while `one` exists. Keep only a weak reference."""
    _REGISTERED.add(one)


class _NoEvents:
    """Stands in for a socket's own view of itself: nothing has arrived, and there is no timeout."""

    rcvtimeo = sndtimeo = -1

    def get(self, _: int) -> int:
        return 0


def ignore_events(socket: Any) -> None:
    """Make an asyncio socket of ZeroMQ ignore all events in this process, and wait forever in receives and sends.

    A call of the socket that is due at the fork, such as the next receive of a task, runs in the child. libzmq answers
    every call there with EINTR, and pyzmq repeats such a call forever.
    """
    socket._shadow_sock = _NoEvents()
    socket._handle_events = lambda *_: None
    socket._add_send_event = lambda *_, **__: socket._Future()


def _call_all() -> None:
    for one in list(_REGISTERED):
        one.forked()


os.register_at_fork(after_in_child=_call_all)
