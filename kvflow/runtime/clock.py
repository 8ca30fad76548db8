"""One machine's time, as the runtime reads it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol


class Timer(Protocol):
    """A callback that is due later."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """One machine's time. It never goes back and means nothing to another machine."""

    def now_s(self) -> float:
        """Seconds since some moment of the past."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the loop after `delay_s` of this clock's seconds."""


class SystemClock:
    """The machine's clock: where it has one that goes on while it is suspended, that one."""

    now_s = staticmethod(partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)))

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)


class Alarm:
    """A timer that is set to other times while it runs. It rings once at the time that it was set to last."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._timer: Timer | None = None
        self.due_s = math.inf
        """Time at which it rings, by the clock; infinity: it is not set."""

    def set(self, due_s: float) -> None:
        """Ring at this time, and at no other; at once if it has passed, never if it is infinity."""
        if due_s == self.due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.due_s = due_s
        if due_s < math.inf:
            self._timer = self._clock.call_later(max(due_s - self._clock.now_s(), 0.0), self._rings)

    def _rings(self) -> None:
        self._timer, self.due_s = None, math.inf
        self._ring()
