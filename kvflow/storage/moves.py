"""The moves of one save or restore, as its flight posts them: reads of a file, or writes to one.

A move that was lost (`storage.files`) is under way until it is known to have stopped, so the flight holds its blocks
and its permit, while the save or restore fails at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.protocol.proof import SealProof
from kvflow.errors import RuntimeBroken
from kvflow.runtime.load.gear import Told
from kvflow.storage.files import Direction, Files, MoveLost
from kvflow.transport.base import AgentName, PostedRead, ReadEnded, TransportError

if TYPE_CHECKING:
    from kvflow.runtime.peers.peer import Source

STORE = AgentName("store")
"""The store as a peer of the queue of permits."""


class _Folder(NamedTuple):
    agent: AgentName


class _File(NamedTuple):
    """A file as the source of a flight, which claims nothing of it: its connection and its proof."""

    connection: _Folder
    proof: SealProof


def opened_file() -> Source:
    """The source of a flight that reads an open file: it cannot go meanwhile, and digests prove its bytes."""
    proof = SealProof(grows=False, quick_read_max_s=0.0)
    proof.heard(0, 0.0)
    return cast("Source", _File(_Folder(STORE), proof))


class Moves:
    """Posts the moves of one flight, and tells it how each has ended."""

    behind = False

    def __init__(
        self, files: Files, direction: Direction, on_lost: Callable[[], None], on_stopped: Callable[[], None]
    ) -> None:
        """`on_lost`: called when a move has failed of which bytes may still be on their way. `on_stopped`: when the
        last byte has stopped although nobody was to know (`give_up`).
        """
        self.error: TransportError | None = None
        """The first error of a move."""
        self._files = files
        self._direction = direction
        self._on_lost = on_lost
        self._on_stopped = on_stopped
        self._under_way: dict[PostedRead, Told] = {}
        self._lost: set[PostedRead] = set()
        self._given_up: set[PostedRead] = set()
        """Moves whose flight was told that their end will never be known."""

    @property
    def stopped(self) -> bool:
        """True if no byte is on its way."""
        return not self._under_way and not self._given_up

    def post(self, _agent: AgentName, descriptors: Descriptors, told: Told) -> None:
        """Start a move. Raises TransportBroken once the store's thread has ended."""
        move = PostedRead(descriptors.size_bytes)
        self._files.post(descriptors, self._direction, partial(self._ended, move), partial(self._over, move))
        self._under_way[move] = told

    def all_stopped(self) -> None:
        """End lost moves: the store's thread has ended in good order, so they have stopped, too."""
        for move in list(self._lost):
            self._over(move)

    def give_up(self, cause: RuntimeBroken) -> None:
        """Give up all moves: the store could not be closed, so it may never be known when their bytes have stopped."""
        under_way, self._under_way = self._under_way, {}
        self._given_up.update(under_way)
        for told in under_way.values():
            told(cause)

    def _ended(self, move: PostedRead, error: TransportError | None) -> None:
        self.error = self.error or error
        if isinstance(error, MoveLost):
            self._lost.add(move)
            self._on_lost()
        else:
            self._over(move, error)

    def _over(self, move: PostedRead, error: TransportError | None = None) -> None:
        """Note that a move has stopped, perhaps a lost one."""
        if move in self._lost:
            self._lost.discard(move)
            error = self.error
        if move in self._given_up:
            self._given_up.discard(move)
            if self.stopped:
                self._on_stopped()
        else:
            self._under_way.pop(move)(ReadEnded(move, error, 0.0))
