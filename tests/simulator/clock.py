"""The clock of a simulated machine: the loop's time with an offset and another rate. It stands still when paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SkewedClock:
    """A clock that shows `offset_s` at the loop's time 0, and advances `rate` seconds for each second of the loop.

    Between `stop` and `go_on` the clock stands still.
    """

    def __init__(self, offset_s: float, rate: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._offset_s, self._rate = offset_s, rate
        self._stands_at_s: float | None = None

    def now_s(self) -> float:
        return self._offset_s + self._loop.time() * self._rate if self._stands_at_s is None else self._stands_at_s

    def stop(self) -> None:
        self._stands_at_s = self.now_s()

    def go_on(self) -> None:
        if self._stands_at_s is not None:
            self._offset_s, self._stands_at_s = self._stands_at_s - self._loop.time() * self._rate, None

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s / self._rate, callback)
