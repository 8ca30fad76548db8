"""Forked children: they have the memory and the files of their parent, but neither its threads nor its loop.

A call of ZeroMQ or NIXL about what the parent has opened may never return in a child, and a file that is taken off the
loop there is taken off the parent's, too. So whatever has such things is told in the child, before anything else runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol


class Inherited(Protocol):
    """An object that a forked child inherits and must not use: it has threads, sockets or a loop of the parent."""

    def forked(self) -> None:
        """Called in a child, on its one thread: from now on every method returns at once, or raises UsageError."""


_LIVE: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(one: Inherited) -> None:
    """Have an object told if this process is forked, in the child, for as long as the object lives."""
    _LIVE.add(one)


def silence(socket: Any) -> None:
    """Have an asyncio socket of ZeroMQ hear nothing more in this process."""
    socket._handle_events = lambda *_: None


def _tell_all() -> None:
    for one in list(_LIVE):
        one.forked()


os.register_at_fork(after_in_child=_tell_all)
