"""Clocks for tests: one that moves only when a test advances it, and one that shows the event loop's time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class ManualTimer:
    """A timer of `ManualClock`. `callback` becomes None when the timer is cancelled."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock that moves only when a test calls `advance`.

    Pass the clock to a runtime in a `World`. Leases, holds and renewals then follow this clock; load deadlines and
    side-channel timeouts still follow the event loop's time.

        clock = ManualClock()
        async with Runtime(config, world=World(clock=lambda: clock)) as runtime:
            ...
            clock.advance(30.0)

    Args:
        now_s: Time at the beginning, in seconds.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._counter = itertools.count()

    def now_s(self) -> float:
        """Return the clock's time.

        Returns:
            Initial time plus all seconds advanced since.
        """
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        """Call `callback` once `advance` has moved the clock by `delay_s`.

        Args:
            delay_s: Delay in seconds; negative: 0.
            callback: Function to call without arguments.

        Returns:
            The timer. Its `cancel()` prevents the call.
        """
        timer = ManualTimer(callback)
        heapq.heappush(self._timers, (self._now_s + max(delay_s, 0.0), next(self._counter), timer))
        return timer

    @property
    def pending(self) -> int:
        """Number of timers that have neither fired nor been cancelled."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Move the clock forward, and call the callbacks of due timers, in order of their due times.

        While a callback runs, the clock shows the due time of its timer.

        Args:
            seconds: Number of seconds to move the clock.
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
        """Return the event loop's time.

        Returns:
            `loop.time()` of the event loop, in seconds.
        """
        return self._loop.time()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call `callback` once `delay_s` of the event loop's time have passed.

        Args:
            delay_s: Delay in seconds.
            callback: Function to call without arguments.

        Returns:
            The timer. Its `cancel()` prevents the call.
        """
        return self._loop.call_later(delay_s, callback)
