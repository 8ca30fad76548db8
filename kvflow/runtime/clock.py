"""The clock that the runtime reads, and an alarm, which is a timer that can be set again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol


class Timer(Protocol):
    """A scheduled callback, as `Clock.call_later` returns it. `cancel` prevents the call."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """A clock that never goes back. Its values cannot be compared with another machine's."""

    def now_s(self) -> float:
        """Return the seconds since an arbitrary moment in the past."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the event loop after `delay_s` seconds of this clock. Return a timer for the call."""


class SystemClock:
    """The system's clock: CLOCK_BOOTTIME where it exists, which also counts the time while the machine is suspended."""

    now_s = staticmethod(partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)))

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)


class Alarm:
    """A timer that can be set again at any time. It calls `ring` once, at the time of the latest `set`."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._timer: Timer | None = None
        self.due_s = math.inf
        """Clock time at which `ring` will be called; infinity if the alarm is not set."""

    def set(self, due_s: float) -> None:
        """Call `ring` at the clock time `due_s`: soon if that time has passed, never if it is infinity.

        An earlier `set` has no effect any longer.
        """
        if due_s == self.due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.due_s = due_s
        if due_s < math.inf:
            self._timer = self._clock.call_later(max(due_s - self._clock.now_s(), 0.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self.due_s = None, math.inf
        self._ring()
