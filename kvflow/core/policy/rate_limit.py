"""A rate limit for the requests of each peer, by token buckets for a bounded number of peers.

A full bucket has tokens for the requests of one second. A bucket that was unused for a second is full, so dropping it
loses nothing. With more than `peers_max` peers the least recently used bucket is dropped.
"""

from __future__ import annotations

from kvflow.core.policy.bounded_map import BoundedMap

_ROUNDING = 1e-5  # of a token: a peer that keeps to the rate is not refused for a rounding error


class RateLimiter:
    """A token bucket for each peer. The caller chooses the names of peers."""

    def __init__(self, *, requests_per_s: int, peers_max: int) -> None:
        self._requests_per_s = requests_per_s
        self._buckets = BoundedMap[str, tuple[float, float]](peers_max)  # (tokens, time at which they were counted)

    def __len__(self) -> int:
        return len(self._buckets)

    def allows(self, peer: str, now_s: float) -> bool:
        """Take a token from the bucket of `peer`. Return False if the bucket is empty: the request must be refused."""
        return self.take(peer, now_s) is not None

    def take(self, peer: str, now_s: float) -> float | None:
        """Take a token from the bucket of `peer`. Return how many are missing in it then; None if it is empty."""
        full = float(self._requests_per_s)
        tokens, counted_s = self._buckets.get(peer, (full, now_s))
        tokens = min(full, tokens + max(now_s - counted_s, 0.0) * self._requests_per_s)
        allowed = tokens >= 1 - _ROUNDING
        self._buckets[peer] = (tokens - allowed, now_s)
        return full - tokens + 1 if allowed else None
