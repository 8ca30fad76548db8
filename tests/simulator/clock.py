"""The clock of a simulated machine: the loop's time, with an offset and another rate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SkewedClock:
    """A clock that shows `offset_s` at the loop's time 0, and advances `rate` seconds for each second of the loop."""

    def __init__(self, offset_s: float, rate: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._offset_s, self._rate = offset_s, rate

    def now_s(self) -> float:
        return self._offset_s + self._loop.time() * self._rate

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s / self._rate, callback)
