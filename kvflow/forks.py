"""Forked child processes: they inherit memory and file descriptors, but neither threads nor the event loop.

In a child, a call of ZeroMQ or NIXL on an object of the parent may never return, and a file descriptor that is removed
from the inherited event loop is removed from the parent's loop, too. So objects with threads, sockets or a loop call
`register`. In a child the method `forked` of each registered object is called before any other code runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class ForkAware(Protocol):
    """An object that a forked child must not use, because it has threads, sockets or an event loop of the parent."""

    def forked(self) -> None:
        """Make this object unusable: its methods return immediately or raise UsageError.

        This is called in the child, on the child's only thread.
        """


_REGISTERED: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register(owner: ForkAware) -> None:
    """Have `owner.forked()` called in each child that is forked while `owner` exists. Only a weak reference is kept."""
    _REGISTERED.add(owner)


class _NoEvents:
    """Replacement for the plain ZeroMQ socket inside an asyncio socket: no message has arrived, no timeout is set."""

    rcvtimeo = sndtimeo = -1

    def get(self, _: int) -> int:
        return 0


def ignore_events(socket: Any) -> None:
    """Make `socket`, an asyncio socket of pyzmq, ignore all events in this process; its receives and sends never end.

    Without this function a forked child might not end: the event loop in the child still makes the calls of the socket
    that were due at the fork, such as the next receive of a task, and pyzmq 27 does not return from them.
    """
    socket._shadow_sock = _NoEvents()
    socket._handle_events = lambda *_: None
    socket._add_send_event = lambda *_, **__: socket._Future()


def _call_all() -> None:
    for owner in list(_REGISTERED):
        owner.forked()


os.register_at_fork(after_in_child=_call_all)
