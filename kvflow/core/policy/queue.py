"""Queues: permits of something bounded (`FairQueue`), and turns of one server (`ShortestFirst`).

A fair queue bounds what may be under way at once, in all and per peer. Its rules:

- All or nothing: a permit gets its whole amount at once and has none of it while it waits.
- A smaller priority number goes first, equal ones in the order in which they asked. Nothing ages: a permit waits for as
  long as permits of a smaller number keep the queue full.
- A permit that does not fit its peer's limit is overtaken by those of other peers, by none of its own peer.
- If the head does not fit the global limit nothing overtakes it, so large reads are not starved.
- A permit that wants more than there is goes when nothing else is under way.
- With `ahead_s` a peer's first limit grows to what it delivers in that time, so that a link of any speed is kept busy.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import add, itemgetter, sub
from typing import Generic, NamedTuple, TypeAlias, TypeVar

Amount: TypeAlias = tuple[int, ...]
"""Amount that a permit takes of each bounded thing, in the order of the limits."""

ItemT = TypeVar("ItemT")

_FADE = 1 / 64  # of a peer's speed, with each permit that shows less: it may have waited for something else
_FAST_PEERS_MAX = 1024
_SIZE = itemgetter(0)


class PermitState(enum.StrEnum):
    WAITING = "waiting"
    UNDER_WAY = "under_way"
    OVER = "over"


@dataclass(slots=True, eq=False)
class Permit:
    """Share of a bounded thing, from the request for it until it is given back."""

    peer: str
    amount: Amount
    priority: int
    state: PermitState = PermitState.WAITING
    on_grant: Callable[[], None] | None = None
    """Called when the permit is under way after a wait; must not ask for or end anything itself."""
    delivered_before: int = 0
    """Amount that the peer had delivered when the permit went under way."""


class _Place(NamedTuple):
    """The place of a permit in its peer's queue; compared from left to right, and orders are unique."""

    priority: int
    order: int
    permit: Permit


@dataclass(slots=True, eq=False)
class _Room:
    """Permits of one peer: those under way within its limits, and those that wait, in order."""

    limits: Amount
    used: Amount
    permits: int = 0
    waiting: list[_Place] = field(default_factory=list)
    delivered: int = 0
    """Amount of the first bounded thing that was delivered since the peer has had permits."""


def _fits(more: Amount, *rooms: _Room) -> bool:
    """True if there is room for this amount. A permit that wants more than the limit goes alone."""
    for room in rooms:
        if room.permits:
            for taken, wanted, most in zip(room.used, more, room.limits, strict=True):
                if taken + wanted > most:
                    return False
    return True


class FairQueue:
    """Bounded things and the permits that wait for shares of them. A peer without permits costs nothing."""

    def __init__(self, limits: Amount, peer_limits: Amount | None = None, ahead_s: float = 0.0) -> None:
        """Create an empty queue. Without `peer_limits` one peer may have everything."""
        self._ahead_s = ahead_s
        self._peer_limits = limits if peer_limits is None else peer_limits
        assert len(limits) == len(self._peer_limits), f"{limits} and {peer_limits} bound different things"
        self._nothing = (0,) * len(limits)
        self._room = _Room(limits, self._nothing)
        self._peers: dict[str, _Room] = {}
        self._speeds: dict[str, float] = {}
        """Rates of peers that deliver more than their limit allows for, per second."""
        self._asked = 0
        self.waiting = 0

    @property
    def used(self) -> Amount:
        """Amount under way of each bounded thing."""
        return self._room.used

    def peers(self) -> Iterator[tuple[str, Amount, int]]:
        """Amounts under way and number of waiting permits, by peer."""
        for peer, room in self._peers.items():
            yield peer, room.used, len(room.waiting)

    def ask(self, amount: Amount, peer: str = "", priority: int = 0) -> Permit:
        """Ask for a permit. It is under way at once if there is room, else it waits.

        A waiting one may let others go that it stood behind: who has come first among its peer's is another one now.
        """
        permit = Permit(peer, amount, priority)
        room = self._peers.get(peer)
        if room is None:
            room = self._peers[peer] = _Room(self._peer_limits, self._nothing)
            if peer in self._speeds:
                room.limits = (int(self._speeds[peer] * self._ahead_s), *self._peer_limits[1:])
        every = self._room
        if not self.waiting and (not every.permits or _fits(amount, room, every)):
            self._begin(permit)
            return permit
        self._asked += 1
        heapq.heappush(room.waiting, _Place(priority, self._asked, permit))
        self.waiting += 1
        if room.waiting[0].permit is permit:
            self._grant()
        return permit

    def end(self, permit: Permit, took_s: float = 0.0) -> list[Permit]:
        """Give a permit back, or its place in the queue. Returns the permits that are under way now because of it.

        `took_s` is how long its peer took to deliver it, since it was under way. 0: it has not.
        """
        assert permit.state is not PermitState.OVER, "a permit is given back once"
        room = self._peers[permit.peer]
        if took_s > 0 and self._ahead_s > 0:
            room.delivered += permit.amount[0]
            known = self._speeds.get(permit.peer, 0.0)
            speed = max((room.delivered - permit.delivered_before) / took_s, known * (1 - _FADE))
            if speed * self._ahead_s > self._peer_limits[0]:
                self._speeds[permit.peer] = speed
                room.limits = (int(speed * self._ahead_s), *self._peer_limits[1:])
                if len(self._speeds) > _FAST_PEERS_MAX:
                    del self._speeds[next(iter(self._speeds))]
            elif known:
                del self._speeds[permit.peer]
                room.limits = self._peer_limits
        if permit.state is PermitState.WAITING:
            room.waiting = [place for place in room.waiting if place.permit is not permit]
            heapq.heapify(room.waiting)
            self.waiting -= 1
        else:
            for one in (self._room, room):
                one.permits -= 1
                one.used = tuple(map(sub, one.used, permit.amount))
        permit.state = PermitState.OVER
        if not room.waiting and not room.permits:
            del self._peers[permit.peer]
        return self._grant() if self.waiting else []

    def _grant(self) -> list[Permit]:
        """Start every permit that there is room for, and tell each."""
        granted = []
        while self.waiting and (permit := self._next()) is not None:
            room = self._peers[permit.peer]
            heapq.heappop(room.waiting)
            self.waiting -= 1
            self._begin(permit)
            granted.append(permit)
        for permit in granted:
            if permit.on_grant is not None:
                permit.on_grant()
        return granted

    def _next(self) -> Permit | None:
        """Next permit that there is room for, if any."""
        heads = (room.waiting[0] for room in self._peers.values() if room.waiting)
        able = []
        for head in heads:
            room = self._peers[head.permit.peer]
            if _fits(head.permit.amount, room):
                able.append(head)
        if not able:
            return None
        permit, every = min(able).permit, self._room
        return permit if _fits(permit.amount, every) else None

    def _begin(self, permit: Permit) -> None:
        """Note a permit as under way."""
        room = self._peers[permit.peer]
        for one in (self._room, room):
            one.permits += 1
            one.used = tuple(map(add, one.used, permit.amount))
        permit.state, permit.delivered_before = PermitState.UNDER_WAY, room.delivered


class ShortestFirst(Generic[ItemT]):
    """Jobs that wait for one server, which cannot interrupt a job: the smallest goes first.

    The oldest is passed only until those that passed it add up to its own size, then it goes: so large things get half
    of the server at least, and a small one waits for the one that is being served and, when small ones take half of the
    server already, for one more.
    """

    def __init__(self, start_size: int) -> None:
        """`start_size` is the cost of starting a job, as a size."""
        self._start_size = start_size
        self._waiting: list[tuple[int, ItemT]] = []  # in the order in which they came
        self._passed = 0  # how much has passed the oldest

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: ItemT, size: int) -> None:
        self._waiting.append((size + self._start_size, item))

    @property
    def next(self) -> ItemT:
        """Job whose turn it is; there has to be one."""
        return self._waiting[self._index()][1]

    def pop(self) -> ItemT:
        """Take out the job whose turn it is; there has to be one."""
        index = self._index()
        size, item = self._waiting.pop(index)
        self._passed = self._passed + size if index else 0
        return item

    def _index(self) -> int:
        oldest = self._waiting[0][0]
        if self._passed >= oldest:
            return 0
        least = min(self._waiting, key=_SIZE)[0]
        return 0 if least == oldest else next(at for at, (size, _) in enumerate(self._waiting) if size == least)
