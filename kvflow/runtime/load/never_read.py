"""Pairs that do not work: engines whose tickets come here, and that no load has ever read from.

A router that sends the request elsewhere hides the error of a load. If all loads of a pair fail, prompts take long, and
nothing else shows. So it is logged once, and counted.
"""

from __future__ import annotations

from collections.abc import Callable

from kvflow.checks import counted
from kvflow.core.policy.latest import Latest
from kvflow.logs import logger_of

logger = logger_of(__name__)

TOLD_AT = 3
"""Failures after which a pair is said not to work. A peer that restarts costs one or two."""
_ENGINES_MAX = 1024


class NeverRead:
    """Failures of engines that no load has ever read from."""

    def __init__(self, delivered: Callable[[str], bool]) -> None:
        """`delivered`: whether a load has ever read well from an engine, as far as is remembered."""
        self._delivered = delivered
        self._failures: Latest[str, int] = Latest(_ENGINES_MAX)

    @property
    def count(self) -> int:
        """Number of engines that have failed `TOLD_AT` times, and were not read from since."""
        return sum(many >= TOLD_AT and not self._delivered(one) for one, many in self._failures.items())

    def failed(self, engine_id: str, why: str) -> None:
        """Count a failed load with a ticket of this engine."""
        if self._delivered(engine_id):
            self._failures.pop(engine_id, None)
            return
        many = self._failures[engine_id] = self._failures.get(engine_id, 0) + 1
        if many == TOLD_AT:
            logger.warning(
                "engine %r: loads with its tickets failed %s, and none has ever read from it; the last: %s; "
                "`kvflow doctor --pair` tells which rule says no",
                engine_id,
                counted(many, "time"),
                why,
            )
