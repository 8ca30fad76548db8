"""Bounds on how often a peer may ask: one token bucket per peer, as many as a bound allows.

A bucket holds the requests of one second; it fills steadily, and each request takes one. A bucket that nobody has used
for a second is full, so it may be forgotten: where there are more peers than buckets, the one used longest ago goes.
"""

from __future__ import annotations

from kvflow.core.policy.latest import Latest

_ROUNDING = 1e-5  # of a request: who keeps to the rate is not held up because of how floats add up


class RateLimiter:
    """Token buckets by peer; a peer is any name."""

    def __init__(self, *, requests_per_s: int, peers_max: int) -> None:
        self._requests_per_s = requests_per_s
        self._buckets = Latest[str, tuple[float, float]](peers_max)  # tokens, and when they were counted

    def __len__(self) -> int:
        """Number of buckets now."""
        return len(self._buckets)

    def allows(self, peer: str, now_s: float) -> bool:
        """Take a token of the peer's. True if there was one. A clock that goes back fills nothing."""
        full = float(self._requests_per_s)
        tokens, counted_s = self._buckets.get(peer, (full, now_s))
        tokens = min(full, tokens + max(now_s - counted_s, 0.0) * self._requests_per_s)
        allowed = tokens >= 1 - _ROUNDING
        self._buckets[peer] = (tokens - allowed, now_s)
        return allowed
