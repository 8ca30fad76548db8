"""Counts and logs, by reason, requests that have a ticket but are computed locally.

Their answers are correct, so without the log nobody would notice that a prefill engine computes prompts in vain.
"""

from __future__ import annotations

import time
from collections import Counter

from kvflow.checks import counted
from kvflow.logs import logger_of

logger = logger_of(__name__)

_LOG_PERIOD_S = 60.0


class ComputedHere(Counter[str]):
    """Number of requests with a ticket that were computed locally since the last log line, by reason.

    A reason is a text like "its load failed", which the log line has after "because".
    """

    _logged_s = -_LOG_PERIOD_S

    def log(self) -> None:
        """Log the counts in one line and clear them, at most once a minute. Without counts, do nothing."""
        now_s = time.monotonic()
        if self and now_s - self._logged_s >= _LOG_PERIOD_S:
            listed = "; ".join(f"{count} because {reason}" for reason, count in self.most_common())
            logger.info("computed here: %s that came with a ticket: %s", counted(self.total(), "request"), listed)
            self._logged_s = now_s
            self.clear()
