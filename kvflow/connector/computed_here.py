"""Requests that come with a ticket and are computed here all the same: counted by reason, and told once a minute.

Each of them is answered well, so nobody notices that a prefill engine computes for nothing.
"""

from __future__ import annotations

import time
from collections import Counter

from kvflow.checks import counted
from kvflow.logs import logger_of

logger = logger_of(__name__)

_EVERY_S = 60.0


class ComputedHere(Counter[str]):
    """Counts of one engine's scheduler by reason, since the last line."""

    _told_s = -_EVERY_S

    def tell(self) -> None:
        """Log the counts and begin anew, at most once a minute."""
        now_s = time.monotonic()
        if self and now_s - self._told_s >= _EVERY_S:
            listed = "; ".join(f"{count} because {reason}" for reason, count in self.most_common())
            logger.info("computed here: %s that came with a ticket: %s", counted(self.total(), "request"), listed)
            self._told_s = now_s
            self.clear()
