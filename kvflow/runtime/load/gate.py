"""The gate before the first step of a load: a burst of loads begins over many turns of the loop, and never holds it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math

from kvflow.runtime.load.flight import Posts

TURN_S = 1e-3
"""More loads than a few in so short a time wait for their turn."""
_TURN_LOADS = 3
_PAUSE_MAX_S = 5e-3


class Gate:
    """Bound on the loads that start at once: a burst starts over many turns of the loop, and never holds it.

    Starting one takes a tenth of a millisecond, in which nothing else runs. Who comes alone does not notice. While many
    reads wait to be started no more loads begin, so that the loop is idle at times: the thread that starts them gets
    Python's lock from an idle loop, and waits a tenth of a second for it beside one that goes from turn to turn.
    """

    def __init__(self, poller: Posts) -> None:
        self.paused = False
        """True while loads wait until fewer reads do: `resume` once that may be so."""
        self._poller = poller
        self._next_turn: asyncio.Handle | None = None
        self._since_s = -math.inf
        self._left = 0
        """Loads that may still start at once, until `TURN_S` after `_since_s`."""
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        """A heap: by priority, then who had a turn before, then who came first."""
        self._numbers = itertools.count()

    def at_once(self, now_s: float) -> bool:
        """True if a load may start now; else its turn has to `come`."""
        if self._waiting:
            return False
        if now_s - self._since_s >= TURN_S:
            self._since_s, self._left = now_s, _TURN_LOADS
        self._left -= 1
        return self._left >= 0

    async def come(self, priority: int, *, again: bool = False) -> None:
        """Return when it is the load's turn. A smaller `priority` goes first; of equals, who had a turn before."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._next_turn = asyncio.get_running_loop().call_soon(self._next)
        heapq.heappush(self._waiting, (priority, not again, next(self._numbers), turn))
        await turn

    def _next(self) -> None:
        """A turn of the loop: what else is ready runs between this one and the next."""
        for _ in range(min(_TURN_LOADS, len(self._waiting))):
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
        loop, self.paused = asyncio.get_running_loop(), False
        if not self._waiting:
            return
        if self._poller.behind:
            self.paused, self._next_turn = True, loop.call_later(_PAUSE_MAX_S, self._next)
        else:
            self._next_turn = loop.call_soon(self._next)

    def resume(self) -> None:
        """While `paused`: a load is over."""
        if not self._poller.behind and self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn, self.paused = asyncio.get_running_loop().call_soon(self._next), False
