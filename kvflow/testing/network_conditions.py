"""`NetworkConditions`: how often reads and messages of a simulated network are slow, late, lost or garbled."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConditions:
    """Delays and fault rates of a simulated network. Shares are probabilities, 0 to 1; times are virtual seconds."""

    latency_s: float = 1e-4
    """Mean time of a message from one host to another."""
    read_s: float = 2e-4
    """Mean time of a read."""
    slow_share: float = 0.0
    """Share of slow reads: each takes a random time between 0 and `slow_s`, whatever `read_s` is."""
    slow_s: float = 0.0
    """Upper bound of the time of a slow read."""
    torn_share: float = 0.0
    """Share of reads that are torn: their bytes land in portions, at different times and in any order."""
    failed_share: float = 0.0
    """Share of reads that fail, perhaps after some of their bytes have landed."""
    lost_share: float = 0.0
    """Share of notifications that never arrive."""
    repeated_share: float = 0.0
    """Share of notifications that are sent twice."""
    late_share: float = 0.0
    """Share of notifications that arrive up to `late_s` later, and so may be overtaken by newer ones."""
    late_s: float = 0.0
    """Upper bound of the additional delay of a late notification."""
    unanswered_share: float = 0.0
    """Probability that a question on the side channel is lost, and separately that its answer is lost."""
    garbled_share: float = 0.0
    """Share of answers that cannot be decoded, or are of another kind than the question asks for."""
    poll_s: float = 0.0
    """Upper bound of the time until an engine's poller sees that a read has ended or a notification has arrived."""


CALM = NetworkConditions()


def draw_conditions(rng: random.Random) -> NetworkConditions:
    """Return a `NetworkConditions` with random rates. In 30 % of the draws the only possible fault is torn reads."""

    def share(*choices: float) -> float:
        return rng.choice((0.0, *choices))

    latency_s = rng.choice((2e-5, 1e-4, 1e-3))
    if rng.random() < 0.3:
        return NetworkConditions(latency_s=latency_s, torn_share=share(0.5))
    return NetworkConditions(
        latency_s=latency_s,
        read_s=rng.choice((5e-5, 5e-4, 5e-3)),
        slow_share=share(0.02, 0.2),
        slow_s=rng.choice((0.01, 0.1, 1.0)),
        torn_share=share(0.3, 1.0),
        failed_share=share(0.01, 0.1),
        lost_share=share(0.05, 0.5),
        repeated_share=share(0.1, 0.5),
        late_share=share(0.2),
        late_s=rng.choice((0.01, 0.3)),
        unanswered_share=share(0.05, 0.3),
        garbled_share=share(0.02, 0.2),
        poll_s=rng.choice((0.0, 0.0, 1e-3, 2e-2)),
    )
