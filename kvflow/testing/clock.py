"""Clocks for tests: one that stands still until it is moved, and one that goes by the event loop's own time."""

from __future__ import annotations

import asyncio
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
    """A clock that a test moves; give it to a runtime in its world (`World(clock=lambda: clock)`).

    It moves timers that a runtime takes from its world: leases, holds, renewals. What bounds a wait on the event loop
    (deadlines of loads, timeouts of the side channel) goes by the loop's own time.

    Args:
        now_s: What it shows first, in seconds.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._counter = itertools.count()

    def now_s(self) -> float:
        """The time now.

        Returns:
            Seconds, as the clock was made with and moved by since.
        """
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        """Set a timer, which `advance` fires.

        Args:
            delay_s: Seconds from now; a negative one counts as 0.
            callback: What is called then.

        Returns:
            The timer, to be cancelled.
        """
        timer = ManualTimer(callback)
        heapq.heappush(self._timers, (self._now_s + max(delay_s, 0.0), next(self._counter), timer))
        return timer

    @property
    def pending(self) -> int:
        """Timers that wait for their time."""
        return sum(timer.callback is not None for _, _, timer in self._timers)

    def advance(self, seconds: float) -> None:
        """Move on, and call what is due on the way, each at its time and in order.

        Args:
            seconds: How far.
        """
        end_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= end_s:
            due_s, _, timer = heapq.heappop(self._timers)
            self._now_s = max(self._now_s, due_s)
            if timer.callback is not None:
                timer.callback()
        self._now_s = end_s


class LoopClock:
    """A clock that is the running loop's time, virtual if the loop's is.

    Raises:
        RuntimeError: No event loop runs here.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now_s(self) -> float:
        """The time now.

        Returns:
            The loop's time, in seconds.
        """
        return self._loop.time()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Set a timer on the loop.

        Args:
            delay_s: Seconds from now.
            callback: What is called then.

        Returns:
            The timer, to be cancelled.
        """
        return self._loop.call_later(delay_s, callback)
