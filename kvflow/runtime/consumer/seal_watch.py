"""One look for all who wait: the seals of leases that grow, fetched while somebody waits for them.

There is one watch for each rank that is read from, as long as seals of it are watched. It posts one read of all of
them, about every `LOOK_EVERY_S`, and tells those whose word has changed. Nobody on the producer answers, and many loads
that wait cost little more than one. A watch has no task: it has a timer, or waits for a permit, or its read is under
way.

A look takes a permit as every read does, by the most urgent of those that wait. Its words are its own until it has
ended: a load that has left meanwhile does not get what was fetched for it, and nobody else gets its word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.policy.queue import FairQueue, Permit, PermitState
from kvflow.core.protocol.freshness import HOST, SEAL_SIZE_BYTES, SealTable
from kvflow.errors import RuntimeBroken
from kvflow.transport.base import AgentName, ReadEnded, TransportError

LOOK_EVERY_S = 0.005
_LOOK_MOST_S = 0.01  # where nothing has changed for a second
_QUIET_SHARE = 0.01  # of the time for which nothing has changed: so much later than it could be a change is seen

Told: TypeAlias = "Callable[[ReadEnded | RuntimeBroken], None]"
"""Told how a read has ended; RuntimeBroken if that will never be known."""


ErrorT = TypeVar("ErrorT", bound=TransportError | RuntimeBroken)

OnEnd: TypeAlias = "Callable[[RuntimeBroken | None], None]"
"""Told, who has left, when the look that is under way has stopped; RuntimeBroken if that will never be known."""


class Timer(Protocol):
    """See `clock.Timer`."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """What looks need of `clock.Clock`."""

    def now_s(self) -> float: ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer: ...


class Posting(Protocol):
    """What posts reads; see `flight.Poller`."""

    def post(self, agent: AgentName, descriptors: Descriptors, told: Told) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class WatchedSeal:
    """One seal that somebody watches, from `SealWatches.add` to `remove`."""

    agent: AgentName
    """Whose it is."""
    address: int
    """Where it is there."""
    lease_id: str
    priority: int
    on_change: Callable[[int | None, float], None]
    """Told how many tokens are missing, None if the word is not the lease's; and when the look was posted."""
    on_look: Callable[[], None]
    """Told of each look that has found the word as it was."""
    on_failure: Callable[[TransportError | RuntimeBroken], None]
    """Told that a look has failed, or could not be posted."""
    on_loss: Callable[[RuntimeBroken], None]
    """Told that it will never be known when a look has stopped."""
    word: bytes = b""
    """As it was seen last."""
    looked_s: float = -math.inf
    """When the last look was posted that has found `word`."""


class _Plan(NamedTuple):
    """How the same seals are looked at again and again, and the words of ours that they are fetched to."""

    seals: Sequence[WatchedSeal]
    words: Sequence[int]
    descriptors: Descriptors


@dataclass(slots=True, eq=False)
class _Look:
    """A read of seals that is under way."""

    plan: _Plan
    permit: Permit
    posted_s: float
    on_end: list[OnEnd]


class SealWatches:
    """The watches of one registration, by rank."""

    def __init__(self, posting: Posting, queue: FairQueue, words: SealTable, clock: Clock) -> None:
        """`words` has one for each rank that is read from at once."""
        self.posting = posting
        self.queue = queue
        self.words = words
        self.clock = clock
        self._watches: dict[AgentName, _Watch] = {}

    def __len__(self) -> int:
        """How many ranks are watched."""
        return len(self._watches)

    def add(self, seal: WatchedSeal) -> None:
        """Watch a seal: the first look at it is soon."""
        watch = self._watches.get(seal.agent)
        if watch is None:
            watch = self._watches[seal.agent] = _Watch(self)
        watch.add(seal)

    def remove(self, seal: WatchedSeal, on_end: OnEnd) -> bool:
        """Watch a seal no more. True if a look is under way that fetches it: `on_end` is called once."""
        watch = self._watches[seal.agent]
        if watch.remove(seal):
            del self._watches[seal.agent]
        return watch.note_end(seal, on_end)

    def nudge(self, lease_id: str) -> None:
        """Something has happened to a lease: look at once, if its seal is watched."""
        for watch in self._watches.values():
            if watch.has(lease_id):
                watch.look_now()


class _Watch:
    """The seals of one rank that are watched."""

    def __init__(self, shared: SealWatches) -> None:
        self._shared = shared
        self._seals: dict[WatchedSeal, None] = {}
        self._timer: Timer | None = None
        self._waiting: Permit | None = None
        self._look: _Look | None = None
        self._plan: _Plan | None = None
        """Of the last look, as long as the same seals are watched."""
        self._in_use: _Plan | None = None
        """Of a look that is under way, or that is being told of."""
        self._again = False
        """Whether the next look is due as soon as this one has ended."""
        self._changed_s = shared.clock.now_s()

    def has(self, lease_id: str) -> bool:
        return any(seal.lease_id == lease_id for seal in self._seals)

    def add(self, seal: WatchedSeal) -> None:
        self._seals[seal] = None
        self._drop_plan()
        self._changed_s = self._shared.clock.now_s()
        self.look_now()

    def remove(self, seal: WatchedSeal) -> bool:
        """Whether nobody is left."""
        self._seals.pop(seal, None)
        self._drop_plan()
        if self._seals:
            return False
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._shared.queue.end(waiting)
        return True

    def note_end(self, seal: WatchedSeal, on_end: OnEnd) -> bool:
        """Whether a look at a seal is under way, which tells `on_end`."""
        if self._look is None or seal not in self._look.plan.seals:
            return False
        self._look.on_end.append(on_end)
        return True

    def look_now(self) -> None:
        """Look at once; after the look that is under way, which may have been too early."""
        if self._look is not None:
            self._again = True
        elif self._waiting is None:
            if self._timer is not None:
                self._timer.cancel()
            self._ask()

    def _ask(self) -> None:
        """Ask for a permit, and look when it is granted."""
        self._timer, count = None, len(self._seals)
        agent = next(iter(self._seals)).agent
        priority = min(seal.priority for seal in self._seals)
        permit = self._shared.queue.ask((count * SEAL_SIZE_BYTES, count, 1), agent, priority)
        if permit.state is PermitState.UNDER_WAY:
            self._post(permit)
            return
        self._waiting = permit
        permit.on_grant = lambda: self._set_timer(0.0)  # whoever grants it is in the middle of something

    def _set_timer(self, delay_s: float) -> None:
        self._timer = self._shared.clock.call_later(delay_s, self._due)

    def _due(self) -> None:
        """The timer: a permit was granted, or the next look is due."""
        permit, self._waiting, self._timer = self._waiting, None, None
        if permit is None:
            self._ask()
        else:
            self._post(permit)

    def _post(self, permit: Permit) -> None:
        """Look at as many seals as the permit is for; who came since is looked at next."""
        shared = self._shared
        if self._plan is None:
            self._plan = _planned(shared.words, list(self._seals)[: permit.amount[1]])
        plan = self._in_use = self._plan
        self._again = len(plan.seals) < len(self._seals)
        look = self._look = _Look(plan, permit, shared.clock.now_s(), [])
        try:
            shared.posting.post(plan.seals[0].agent, plan.descriptors, partial(self._ended, look))
        except RuntimeBroken as error:
            self._look = self._in_use = None
            shared.queue.end(permit)
            self._tell(look, lambda seal, own: seal.on_failure(own), error)

    def _ended(self, look: _Look, event: ReadEnded | RuntimeBroken) -> None:
        """A look has stopped, or it will never be known whether it has: then its words stay taken."""
        self._look = None
        self._shared.queue.end(look.permit)
        if isinstance(event, RuntimeBroken):
            self._tell(look, lambda seal, own: seal.on_loss(own), event)
        elif event.error is not None:
            self._tell(look, lambda seal, own: seal.on_failure(own), event.error)
        else:
            self._tell_changes(look)
        if self._look is None:
            self._in_use = None
        if isinstance(event, RuntimeBroken):
            self._plan = None
        elif look.plan is not self._plan and look.plan is not self._in_use:
            self._give_back(look.plan)
        for tell in look.on_end:
            tell(event if isinstance(event, RuntimeBroken) else None)
        if self._seals:
            self._go_on(look)

    def _tell(self, look: _Look, tell: Callable[[WatchedSeal, ErrorT], None], error: ErrorT) -> None:
        for seal in look.plan.seals:
            if seal in self._seals:
                own = copy(error)  # of each load
                own.__cause__ = error.__cause__
                tell(seal, own)

    def _tell_changes(self, look: _Look) -> None:
        """Tell whose word is another one than before; a telling may end the watching."""
        table, changed = self._shared.words, False
        found = table.words[look.plan.words].tobytes()
        for at, seal in enumerate(look.plan.seals):
            word = found[at * SEAL_SIZE_BYTES : (at + 1) * SEAL_SIZE_BYTES]
            seal.looked_s = look.posted_s
            if seal not in self._seals:
                continue
            if word == seal.word:
                seal.on_look()
                continue
            changed, seal.word = True, word
            seal.on_change(table.tokens_missing(look.plan.words[at], seal.lease_id), look.posted_s)
        if changed:
            self._changed_s = look.posted_s

    def _drop_plan(self) -> None:
        """Other seals are watched now. The words of a look that is under way stay taken until it has ended."""
        plan, self._plan = self._plan, None
        if plan is not None and plan is not self._in_use:
            self._give_back(plan)

    def _give_back(self, plan: _Plan) -> None:
        for word in reversed(plan.words):
            self._shared.words.give_back(word)

    def _go_on(self, last: _Look) -> None:
        """Look again: at once if that was asked for, else some time after the last look."""
        if self._again:
            self._ask()
            return
        now_s = self._shared.clock.now_s()
        every_s = min(max(LOOK_EVERY_S, (now_s - self._changed_s) * _QUIET_SHARE), _LOOK_MOST_S)
        self._set_timer(max(last.posted_s + every_s - now_s, LOOK_EVERY_S / 2))


def _planned(table: SealTable, watched: Sequence[WatchedSeal]) -> _Plan:
    """How these are looked at, in the order of their addresses: what is contiguous on both sides is read as one."""
    seals = sorted(watched, key=attrgetter("address"))
    words = sorted(_taken(table, len(seals)))
    return _Plan(seals, words, _descriptors(table, words, seals))


def _taken(words: SealTable, count: int) -> Iterator[int]:
    """So many words."""
    for _ in range(count):
        index = words.take()
        assert index is not None, "there are as many words as ranks may be read from"
        yield index


def _descriptors(table: SealTable, words: Sequence[int], seals: Sequence[WatchedSeal]) -> Descriptors:
    """The read that fetches seals, both sides in the order of their addresses: what is contiguous on both is one."""
    remote: npt.NDArray[np.int64] = np.array([seal.address for seal in seals], dtype=np.int64)
    local = np.array([table.address(word) for word in words], dtype=np.int64)
    follows = (np.diff(remote) == SEAL_SIZE_BYTES) & (np.diff(local) == SEAL_SIZE_BYTES)
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    sizes = np.diff(starts, append=len(seals)) * SEAL_SIZE_BYTES
    return Descriptors.of(
        local=local[starts], remote=remote[starts], sizes=sizes, local_device=HOST, remote_device=HOST
    )
