"""Rates: seconds that a token of a load has taken, by the engine that it came from."""

from __future__ import annotations

from kvflow.core.policy.latest import Latest

_ENGINES_MAX = 1 << 10
_NEWEST = 0.3  # weight of the last load


class LoadRates:
    """Rates that loads have had. Of more than a thousand engines those that were read last are remembered."""

    def __init__(self) -> None:
        self._s_per_token = Latest[str, float](_ENGINES_MAX)

    def learn(self, engine_id: str, tokens: int, seconds: float) -> None:
        """Note a load that has brought so many tokens, at least one, in that time."""
        newest = seconds / tokens
        before = self._s_per_token.get(engine_id, newest)
        self._s_per_token[engine_id] = before + _NEWEST * (newest - before)

    def expected_s(self, engine_id: str, tokens: float) -> float | None:
        """Expected seconds of a load of so many tokens; None for an engine that was never read from."""
        s_per_token = self._s_per_token.get(engine_id)
        return None if s_per_token is None else s_per_token * tokens
