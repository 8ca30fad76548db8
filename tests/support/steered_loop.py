"""An event loop with a clock that a test can move forward.

A test lets a deadline pass at the exact state that it is about, on a host of any speed, and does not wait for it.
"""

from __future__ import annotations

import asyncio


class SteeredLoop(asyncio.SelectorEventLoop):
    """An event loop with the system's time plus the seconds that a test has added."""

    def __init__(self) -> None:
        self._added_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self._added_s

    def pass_time(self, seconds: float) -> None:
        """Move the loop's time forward, so that timers due within `seconds` are due now.

        Call this only from a callback of the loop: the loop looks for due timers after each.
        """
        self._added_s += seconds
