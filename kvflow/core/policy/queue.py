"""Queues: permits for bounded amounts, such as bytes in flight (`FairQueue`), and turns of a server (`ShortestFirst`).

A fair queue bounds the sum of all granted permits, in all and per peer. Its rules:

- All or nothing: a permit gets its whole amount in one step, and holds nothing while it waits.
- A smaller priority number goes first, equal numbers in the order of the requests. Waiting does not raise a priority,
  so permits with smaller numbers can starve a permit.
- A permit that does not fit its peer's limit is overtaken by permits of other peers, but not by later permits of its
  own peer.
- If the first permit does not fit the global limit, no permit overtakes it, so that large reads do not starve.
- A permit that is larger than a limit is granted when no other permit counts towards that limit.
- With `ahead_s`, a peer's limit of the first quantity grows to what the peer delivers in that time. So a link of any
  speed stays busy.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import add, itemgetter, sub
from typing import Generic, NamedTuple, TypeAlias, TypeVar

Amount: TypeAlias = tuple[int, ...]
"""One number for each bounded quantity, such as (bytes, slices). Permits, limits and sums have this form."""

ItemT = TypeVar("ItemT")

_FADE = 1 / 64  # share that a peer's known speed loses per slower permit: the permit may have waited for something else
_FAST_PEERS_MAX = 1024
_SIZE = itemgetter(0)


class PermitState(enum.StrEnum):
    WAITING = "waiting"
    UNDER_WAY = "under_way"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Permit:
    """A permit for an amount. It first waits, is then granted (UNDER_WAY), and has ended once it is given back."""

    peer: str
    amount: Amount
    priority: int
    state: PermitState = PermitState.WAITING
    on_grant: Callable[[], None] | None = None
    """Function to call when the permit is granted after a wait. It must not request or end permits."""
    delivered_before: int = 0
    """Value of the peer's `_Budget.delivered` when the permit was granted."""


class _HeapEntry(NamedTuple):
    """A waiting permit in its peer's heap, ordered by `priority`, then by `order`, the number of its request."""

    priority: int
    order: int
    permit: Permit


@dataclass(slots=True, eq=False)
class _Budget:
    """The limits, the granted amounts and the waiting permits of one peer, or of all peers together."""

    limits: Amount
    used: Amount
    permits: int = 0
    waiting: list[_HeapEntry] = field(default_factory=list)
    delivered: int = 0
    """How much the peer has delivered since this budget was made, in the unit of an `Amount`'s first number, such as
    bytes. A peer's budget exists only while the peer has permits."""


def _fits(more: Amount, *budgets: _Budget) -> bool:
    """Return True if each budget has room for the amount `more`.

    A budget without granted permits has room for any amount.
    """
    for budget in budgets:
        if budget.permits:
            for taken, wanted, most in zip(budget.used, more, budget.limits, strict=True):
                if taken + wanted > most:
                    return False
    return True


class FairQueue:
    """Grants permits for bounded quantities, by the rules in the module docstring."""

    def __init__(self, limits: Amount, peer_limits: Amount | None = None, ahead_s: float = 0.0) -> None:
        """Create an empty queue with `limits` for all peers together and `peer_limits` for each peer (None: `limits`).

        `ahead_s`: the first number of a peer's limits grows to what the peer delivers in this many seconds; 0: no
        growth.
        """
        self._ahead_s = ahead_s
        self._peer_limits = limits if peer_limits is None else peer_limits
        assert len(limits) == len(self._peer_limits), f"{limits} and {peer_limits} bound different things"
        self._nothing = (0,) * len(limits)
        self._total = _Budget(limits, self._nothing)
        self._peers: dict[str, _Budget] = {}
        self._speeds: dict[str, float] = {}
        """Delivery speed of each peer with a raised limit (`ahead_s`), in units of an `Amount`'s first number, such as
        bytes, per second."""
        self._asked = 0
        self.waiting = 0

    @property
    def used(self) -> Amount:
        """Sum of the amounts of all granted permits."""
        return self._total.used

    def peers(self) -> Iterator[tuple[str, Amount, int]]:
        """Yield (peer, sum of the granted amounts, number of waiting permits) for each peer with permits."""
        for peer, budget in self._peers.items():
            yield peer, budget.used, len(budget.waiting)

    def request_permit(self, amount: Amount, peer: str = "", priority: int = 0) -> Permit:
        """Return a new permit: granted if its amount fits and no permit goes before it, else waiting.

        If the new permit becomes the first that waits for its peer, this call may also grant permits that the former
        first permit has blocked.
        """
        permit = Permit(peer, amount, priority)
        budget = self._peers.get(peer)
        if budget is None:
            budget = self._peers[peer] = _Budget(self._peer_limits, self._nothing)
            if peer in self._speeds:
                budget.limits = (int(self._speeds[peer] * self._ahead_s), *self._peer_limits[1:])
        every = self._total
        if not self.waiting and (not every.permits or _fits(amount, budget, every)):
            self._begin(permit)
            return permit
        self._asked += 1
        heapq.heappush(budget.waiting, _HeapEntry(priority, self._asked, permit))
        self.waiting += 1
        if budget.waiting[0].permit is permit:
            self._grant()
        return permit

    def end(self, permit: Permit, took_s: float = 0.0) -> list[Permit]:
        """Give back `permit`, which waits or is granted. Return the permits that are granted in consequence.

        `took_s`: seconds from the grant until the peer had delivered the permit's amount; 0 if the peer did not deliver
        that.
        """
        assert permit.state is not PermitState.ENDED, "a permit is given back once"
        budget = self._peers[permit.peer]
        if took_s > 0 and self._ahead_s > 0:
            budget.delivered += permit.amount[0]
            known = self._speeds.get(permit.peer, 0.0)
            speed = max((budget.delivered - permit.delivered_before) / took_s, known * (1 - _FADE))
            if speed * self._ahead_s > self._peer_limits[0]:
                self._speeds[permit.peer] = speed
                budget.limits = (int(speed * self._ahead_s), *self._peer_limits[1:])
                if len(self._speeds) > _FAST_PEERS_MAX:
                    del self._speeds[next(iter(self._speeds))]
            elif known:
                del self._speeds[permit.peer]
                budget.limits = self._peer_limits
        if permit.state is PermitState.WAITING:
            budget.waiting = [place for place in budget.waiting if place.permit is not permit]
            heapq.heapify(budget.waiting)
            self.waiting -= 1
        else:
            for counted_in in (self._total, budget):
                counted_in.permits -= 1
                counted_in.used = tuple(map(sub, counted_in.used, permit.amount))
        permit.state = PermitState.ENDED
        if not budget.waiting and not budget.permits:
            del self._peers[permit.peer]
        return self._grant() if self.waiting else []

    def _grant(self) -> list[Permit]:
        """Grant every permit that fits, call its `on_grant`, and return the permits."""
        granted = []
        while self.waiting and (permit := self._next()) is not None:
            budget = self._peers[permit.peer]
            heapq.heappop(budget.waiting)
            self.waiting -= 1
            self._begin(permit)
            granted.append(permit)
        for permit in granted:
            if permit.on_grant is not None:
                permit.on_grant()
        return granted

    def _next(self) -> Permit | None:
        """Return the waiting permit to grant next; None if none may be granted."""
        heads = (budget.waiting[0] for budget in self._peers.values() if budget.waiting)
        able = []
        for head in heads:
            budget = self._peers[head.permit.peer]
            if _fits(head.permit.amount, budget):
                able.append(head)
        if not able:
            return None
        permit, every = min(able).permit, self._total
        return permit if _fits(permit.amount, every) else None

    def _begin(self, permit: Permit) -> None:
        budget = self._peers[permit.peer]
        for counted_in in (self._total, budget):
            counted_in.permits += 1
            counted_in.used = tuple(map(add, counted_in.used, permit.amount))
        permit.state, permit.delivered_before = PermitState.UNDER_WAY, budget.delivered


class ShortestFirst(Generic[ItemT]):
    """Queue of jobs for a server that does one job at a time and cannot interrupt it. The smallest job goes first.

    Once the sizes of jobs that have overtaken the oldest job add up to that job's size, the oldest job goes next. So
    large jobs get at least half of the server's time, and a small job waits for the job being served and at most one
    more large job.
    """

    def __init__(self, start_size: int) -> None:
        """Create an empty queue.

        `start_size`: cost of starting any job, as a size that is added to the job's own size.
        """
        self._start_size = start_size
        self._waiting: list[tuple[int, ItemT]] = []  # oldest first
        self._passed = 0  # sum of the sizes that have overtaken the oldest

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: ItemT, size: int) -> None:
        self._waiting.append((size + self._start_size, item))

    @property
    def next(self) -> ItemT:
        """The job to serve next."""
        return self._waiting[self._index()][1]

    def pop(self) -> ItemT:
        """Remove and return the job to serve next. The queue must not be empty."""
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
