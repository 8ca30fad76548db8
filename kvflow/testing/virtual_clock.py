"""Clocks for tests: a clock that moves only when a test says so, and a clock that shows the event loop's time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class ManualTimer:
    """A timer of `ManualClock`. `callback` is None once the timer is cancelled."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock that moves only when a test calls `advance`.

    Pass it to a runtime in a `World`. It then drives lease expiry, holds and renewals. Load deadlines and side-channel
    timeouts go by the event loop's own time.

        clock = ManualClock()
        async with Runtime(config, world=World(clock=lambda: clock)) as runtime:
            ...
            clock.advance(30.0)

    Args:
        now_s: Initial time, in seconds.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._counter = itertools.count()

    def now_s(self) -> float:
        """Return the present time.

        Returns:
            The initial time plus everything advanced since, in seconds.
        """
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        """Call `callback` when the clock has advanced by `delay_s`.

        Args:
            delay_s: Delay in seconds; a negative delay counts as 0.
            callback: Function to call.

        Returns:
            The timer; `cancel()` stops it.
        """
        timer = ManualTimer(callback)
        heapq.heappush(self._timers, (self._now_s + max(delay_s, 0.0), next(self._counter), timer))
        return timer

    @property
    def pending(self) -> int:
        """Number of timers that have neither fired nor been cancelled."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Move the clock forward. Call the callbacks of timers that become due, in order; each sees its own due time.

        Args:
            seconds: How far to move the clock.
        """
        end_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            due_s, _, timer = heapq.heappop(self._timers)
            self._now_s = max(self._now_s, due_s)
            if timer.callback is not None:
                timer.callback()
        self._now_s = end_s


class LoopClock:
    """A clock that shows the running event loop's time, which is virtual on a `VirtualLoop`.

    Raises:
        RuntimeError: No event loop is running in this thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        """Return the loop's time.

        Returns:
            `loop.time()`, in seconds.
        """
        return self._loop.time()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `callback` after `delay_s` of the loop's time.

        Args:
            delay_s: Delay in seconds.
            callback: Function to call.

        Returns:
            The timer; `cancel()` stops it.
        """
        return self._loop.call_later(delay_s, callback)
