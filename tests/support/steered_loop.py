"""An event loop whose time a test moves on.

So a deadline passes when the test has come to the moment that it is about, on a host of any speed, and no test waits
for it.
"""

from __future__ import annotations

import asyncio


class SteeredLoop(asyncio.SelectorEventLoop):
    """Its time is the system's, and what a test has added."""

    def __init__(self) -> None:
        self._added_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self._added_s

    def pass_time(self, seconds: float) -> None:
        """What is due within `seconds` is due now. Only for callbacks of the loop itself: it looks again after them."""
        self._added_s += seconds
