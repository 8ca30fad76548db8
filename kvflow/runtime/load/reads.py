"""Reads as routes plan them and flights carry them out: one by one, or in groups that end with a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from kvflow.core.plan.descriptors import Descriptors, Piece
from kvflow.runtime.peers.peer import Source

HeadOf: TypeAlias = Callable[[Source], Piece]
"""Address of a rank's seal, and our word for it: `Flight.head`."""


class Read(NamedTuple):
    """One read from one rank."""

    source: Source
    descriptors: Descriptors
    carries_seal: bool = False


class CopyGroup(NamedTuple):
    """Reads that belong together, and what happens when all have landed."""

    reads: Sequence[Read]
    copy: Callable[[], None] | None = None
    """Runs on the copy thread once all reads have landed."""
    release: Callable[[], None] | None = None
    """Runs on the loop once nothing can touch the group's buffers any more."""
    on_land: Callable[[float, float], None] | None = None
    """Callback told, once the group is in the cache, that time and the time at which its first read was posted."""
