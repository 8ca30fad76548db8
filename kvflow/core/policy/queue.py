"""Who goes next, where many want the same: shares of a budget (`Turns`), and one server (`ShortestFirst`). Pure.

A budget bounds what may be under way at once, in all and per peer. Its rules:

- All or nothing: a turn gets its whole amount at once and has none of it while it waits.
- A smaller priority number goes first, equal ones in the order in which they asked. Nothing ages: a turn waits for as
  long as turns of a smaller number keep the budget full.
- A turn that has no room with its peer is passed by those of other peers, by none of its own peer.
- A turn that has no room in all is passed by nobody behind it, however little they want: it will get its room.
- A turn that wants more than there is goes when nothing else is under way.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeAlias, TypeVar

Amount: TypeAlias = tuple[int, ...]
"""What a turn takes of each thing that is bounded, in the order of the limits."""

ItemT = TypeVar("ItemT")


class PermitState(enum.StrEnum):
    WAITING = "waiting"
    UNDER_WAY = "under_way"
    OVER = "over"


class Permit:
    """One share of a budget, from asking for it to giving it back; compared by identity."""

    __slots__ = ("amount", "peer", "priority", "state")

    def __init__(self, peer: str, amount: Amount, priority: int) -> None:
        self.peer = peer
        self.amount = amount
        self.priority = priority
        self.state = PermitState.WAITING


class _Place(NamedTuple):
    """Where a turn stands in its peer's queue; compared from left to right, and orders are unique."""

    priority: int
    order: int
    turn: Permit


class _Room:
    """What is under way within some limits."""

    __slots__ = ("_limits", "turns", "used")

    def __init__(self, limits: Amount) -> None:
        self._limits = limits
        self.used = [0] * len(limits)
        self.turns = 0

    def fits(self, amount: Amount) -> bool:
        if not self.turns:
            return True
        return all(used + more <= most for used, more, most in zip(self.used, amount, self._limits, strict=True))

    def add(self, amount: Amount) -> None:
        self.turns += 1
        for index, more in enumerate(amount):
            self.used[index] += more

    def remove(self, amount: Amount) -> None:
        self.turns -= 1
        for index, less in enumerate(amount):
            self.used[index] -= less


class _PeerQueue:
    """A peer's turns: those that wait, in order, and what is under way."""

    __slots__ = ("room", "waiting")

    def __init__(self, limits: Amount) -> None:
        self.room = _Room(limits)
        self.waiting: list[_Place] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.room.turns


class Turns:
    """A budget and who waits for shares of it; see the module for the rules. A peer that has no turn costs nothing."""

    def __init__(self, limits: Amount, peer_limits: Amount) -> None:
        assert len(limits) == len(peer_limits), f"{limits} and {peer_limits} bound different things"
        self._peer_limits = peer_limits
        self._room = _Room(limits)
        self._peers: dict[str, _PeerQueue] = {}
        self._asked = 0
        self.waiting = 0

    @property
    def used(self) -> Amount:
        """What is under way."""
        return tuple(self._room.used)

    def peers(self) -> Iterator[tuple[str, Amount, int]]:
        """Each peer that has turns: what is under way, and how many wait."""
        for peer, queue in self._peers.items():
            yield peer, tuple(queue.room.used), len(queue.waiting)

    def ask(self, peer: str, amount: Amount, priority: int) -> Permit:
        """A new turn. It is under way at once if it may go, else it waits."""
        turn = Permit(peer, amount, priority)
        queue = self._peers.get(peer)
        if queue is None:
            queue = self._peers[peer] = _PeerQueue(self._peer_limits)
        if not self.waiting and queue.room.fits(amount) and self._room.fits(amount):
            self._begin(turn, queue)
            return turn
        self._asked += 1
        heapq.heappush(queue.waiting, _Place(priority, self._asked, turn))
        self.waiting += 1
        self._grant()
        return turn

    def end(self, turn: Permit) -> list[Permit]:
        """Give a turn back, or its place if it still waits; which others are under way now because of it."""
        assert turn.state is not PermitState.OVER, "a turn is given back once"
        queue = self._peers[turn.peer]
        if turn.state is PermitState.WAITING:
            queue.waiting = [place for place in queue.waiting if place.turn is not turn]
            heapq.heapify(queue.waiting)
            self.waiting -= 1
        else:
            self._room.remove(turn.amount)
            queue.room.remove(turn.amount)
        turn.state = PermitState.OVER
        if queue.idle:
            del self._peers[turn.peer]
        return self._grant()

    def _grant(self) -> list[Permit]:
        """Let go whoever may."""
        granted = []
        while self.waiting and (turn := self._next()) is not None:
            queue = self._peers[turn.peer]
            heapq.heappop(queue.waiting)
            self.waiting -= 1
            self._begin(turn, queue)
            granted.append(turn)
        return granted

    def _begin(self, turn: Permit, queue: _PeerQueue) -> None:
        self._room.add(turn.amount)
        queue.room.add(turn.amount)
        turn.state = PermitState.UNDER_WAY

    def _next(self) -> Permit | None:
        """Who goes next, if anybody may go now."""
        heads = (queue.waiting[0] for queue in self._peers.values() if queue.waiting)
        able = [head for head in heads if self._peers[head.turn.peer].room.fits(head.turn.amount)]
        if not able:
            return None
        turn = min(able).turn
        return turn if self._room.fits(turn.amount) else None


class ShortestFirst(Generic[ItemT]):
    """Things that wait for one server, which cannot stop what it has begun: the smallest goes first.

    The oldest is passed only until those that passed it add up to its own size, then it goes: so large things get half
    of the server at least, and a small one waits for the one that is being served and, when small ones take half of the
    server already, for one more.
    """

    def __init__(self, start_size: int) -> None:
        """`start_size`: what starting a thing costs, as a size."""
        self._start_size = start_size
        self._waiting: list[tuple[int, ItemT]] = []  # in the order in which they came
        self._passed = 0  # how much has passed the oldest

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: ItemT, size: int) -> None:
        self._waiting.append((size + self._start_size, item))

    def pop(self) -> ItemT:
        """Take the next one out; there has to be one."""
        sizes = [size for size, _ in self._waiting]
        index = 0 if self._passed >= sizes[0] else sizes.index(min(sizes))
        self._passed = self._passed + sizes[index] if index else 0
        return self._waiting.pop(index)[1]
