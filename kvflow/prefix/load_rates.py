"""Measured seconds per token of loads, for each engine that this engine has read from."""

from __future__ import annotations

from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol.ticket import Ticket
from kvflow.runtime.load.requests import LoadReport

_ENGINES_MAX = 1 << 10
_NEWEST_WEIGHT = 0.3  # weight of the last load
_QUEUED_S_MAX = 1.0


class LoadRates:
    """Seconds per token of recent loads, by engine id. Only the last 1,024 engines are remembered."""

    def __init__(self) -> None:
        self._s_per_token = BoundedMap[str, float](_ENGINES_MAX)

    def learn(self, ticket: Ticket, report: LoadReport) -> None:
        """Update the seconds per token of the engine that a load has read from.

        `ticket`: the load's first ticket, which names the engine if `report` has no attempts.
        """
        if not report.tokens:
            return
        engine_id, seconds = ticket.engine_id, report.total_s
        if report.attempts:
            engine_id, seconds = report.attempts[-1].engine_id, report.attempts[-1].seconds
        newest = seconds / report.tokens
        before = self._s_per_token.get(engine_id, newest)
        self._s_per_token[engine_id] = before + _NEWEST_WEIGHT * (newest - before)

    def expected_s(self, engine_id: str, tokens: int, queued_tokens: float) -> float | None:
        """Return the seconds that a load of `tokens` tokens should take; None if no load from the engine is known.

        `queued_tokens`: tokens that the engine has leased to other readers. These tokens add at most one second to the
        result.
        """
        s_per_token = self._s_per_token.get(engine_id)
        if s_per_token is None:
            return None
        return s_per_token * tokens + min(s_per_token * queued_tokens, _QUEUED_S_MAX)
