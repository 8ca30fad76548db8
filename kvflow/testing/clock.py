"""A clock that stands still until a test moves it: `World(clock=lambda: ManualClock())`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class ManualTimer:
    """See `runtime.world.Timer`."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """See `runtime.world.Clock`. Due timers fire inside `advance`, in order, each at its own time."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self._now_s = now_s
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._counter = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(callback)
        heapq.heappush(self._timers, (self._now_s + delay_s, next(self._counter), timer))
        return timer

    @property
    def waiting(self) -> int:
        """How many timers have neither fired nor been cancelled."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Let time pass; what becomes due meanwhile is called."""
        end_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            self._now_s, _, timer = heapq.heappop(self._timers)
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        self._now_s = end_s
