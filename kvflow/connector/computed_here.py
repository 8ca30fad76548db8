"""Requests that come with a ticket and are computed here all the same: counted by reason, and told once a minute.

Each of them is answered well, so nobody notices that a prefill engine computes for nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvflow.checks import counted
from kvflow.errors import RequestError
from kvflow.logs import logger_of

logger = logger_of(__name__)

_EVERY_S = 60.0


class ComputedHere:
    """Counts of one engine's scheduler. `now_s` reads a clock that never goes back."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._told_s = -_EVERY_S + now_s()
        self._since: Counter[str] = Counter()

    def note(self, reason: str) -> None:
        """Count one request."""
        self._since[reason] += 1

    @contextmanager
    def unless_taken(self, reason: str) -> Iterator[None]:
        """Count a request whose parameters are refused (RequestError) in this block."""
        try:
            yield
        except RequestError:
            self.note(reason)
            raise

    def tell(self) -> None:
        """Write the counts since the last line, at most once a minute."""
        now_s = self._now_s()
        if not self._since or now_s - self._told_s < _EVERY_S:
            return
        count, reasons = self._since.total(), self._since.most_common()
        listed = "; ".join(f"{number} because {reason}" for reason, number in reasons)
        logger.info("computed here: %s that came with a ticket: %s", counted(count, "request"), listed)
        self._told_s = now_s
        self._since.clear()
