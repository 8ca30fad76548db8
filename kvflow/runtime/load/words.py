"""Words of host memory that seals are fetched to. A load is admitted when each rank that it reads from has one."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Sequence

from kvflow.core.cache.regions import Span
from kvflow.core.protocol.proof import SealTable
from kvflow.runtime.peers.peer import Source


class Words:
    """As many words as ranks may be read from at once, and the loads that wait for some.

    A smaller priority goes first, equal ones in the order in which they came; nothing overtakes who is first.
    """

    def __init__(self, count: int) -> None:
        self.table = SealTable(count)
        """What has been fetched."""
        self.address = self.table.address(0)
        """Of the first word."""
        self._free = list(range(count - 1, -1, -1))
        self._queue: list[tuple[int, int, Sequence[Source], asyncio.Future[None]]] = []
        """A heap."""
        self._numbers = itertools.count()

    @property
    def span(self) -> Span:
        return self.table.span

    @property
    def waiting(self) -> int:
        """How many loads wait."""
        return sum(not turn.done() for *_, turn in self._queue)

    @property
    def used(self) -> int:
        return self.table.count - len(self._free)

    def take(self, sources: Sequence[Source]) -> bool:
        """Whether each of them has a word now: there are enough, and nobody waits."""
        if self._queue or len(self._free) < len(sources):
            return False
        for source in sources:
            source.word = self._free.pop()
        return True

    async def wait(self, sources: Sequence[Source], priority: int) -> None:
        """Return once each of them has a word. Cancelling gives them, or the place in the queue, back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._numbers), sources, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # it may have been the first
            else:
                self.give_back(sources)
            raise

    def give_back(self, sources: Sequence[Source]) -> None:
        """They need theirs no more: wipe them, and admit who waits."""
        for source in sources:
            self.table.words[source.word] = 0
            self._free.append(source.word)
        if self._queue:
            self._admit()

    def _admit(self) -> None:
        while self._queue:
            *_, sources, turn = self._queue[0]
            if not turn.done():
                if len(self._free) < len(sources):
                    return
                for source in sources:
                    source.word = self._free.pop()
                turn.set_result(None)
            heapq.heappop(self._queue)
