"""`NetworkConditions`: delays of a simulated network, and how often reads and messages are slow, lost or garbled."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConditions:
    """Delays and fault rates of a simulated network. Probabilities are from 0 to 1, times in virtual seconds."""

    latency_s: float = 1e-4
    """Mean time that a message takes between two hosts."""
    read_s: float = 2e-4
    """Mean time that a read takes, unless it is slow."""
    slow_share: float = 0.0
    """Probability that a read is slow: it takes a random time between 0 and `slow_s`."""
    slow_s: float = 0.0
    """Maximum time that a slow read takes."""
    torn_share: float = 0.0
    """Probability that a read is torn: its bytes land in portions, at different times and in any order."""
    failed_share: float = 0.0
    """Probability that a read fails, perhaps after some of its bytes have landed."""
    lost_share: float = 0.0
    """Probability that a notification never arrives."""
    repeated_share: float = 0.0
    """Probability that a notification is sent twice."""
    late_share: float = 0.0
    """Probability that a notification takes up to `late_s` longer, so newer notifications may arrive first."""
    late_s: float = 0.0
    """Maximum additional delay of a late notification."""
    unanswered_share: float = 0.0
    """Probability that a question on the side channel is lost; the same for an answer."""
    garbled_share: float = 0.0
    """Probability that an answer on the side channel cannot be decoded, or does not fit the question."""
    poll_s: float = 0.0
    """Maximum time until an engine's poller sees the end of a read or an arrived notification."""


CALM = NetworkConditions()


def draw_conditions(rng: random.Random) -> NetworkConditions:
    """Return `NetworkConditions` with random delays and fault rates.

    In 30 % of all draws the only fault that can occur is torn reads.
    """

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
