"""One machine's time, as the runtime reads it."""

from __future__ import annotations

import asyncio
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
