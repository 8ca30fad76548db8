"""Weather of a simulated network: how often reads, notifications and questions are slow, late, lost or changed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Settings of the network; shares are of the things concerned, times are virtual seconds."""

    latency_s: float = 1e-4
    read_s: float = 2e-4
    """Mean time of a read."""
    slow_share: float = 0.0
    """Reads that take up to `slow_s` instead."""
    slow_s: float = 0.0
    torn_share: float = 0.0
    """Reads whose bytes land in portions, at different times and in any order."""
    failed_share: float = 0.0
    lost_share: float = 0.0
    """Notifications that never arrive."""
    repeated_share: float = 0.0
    late_share: float = 0.0
    """Notifications that arrive up to `late_s` later, after others that were sent after them."""
    late_s: float = 0.0
    unanswered_share: float = 0.0
    """Questions on the side channel that get no answer."""
    garbled_share: float = 0.0
    """Answers that are no message of ours, or not the one that was asked for."""
    poll_s: float = 0.0
    """Longest time until an engine looks what has ended or arrived."""


CALM = Weather()


def draw_weather(rng: random.Random) -> Weather:
    """Draw the weather. A third of the seeds have no bad weather, only trouble."""

    def share(*choices: float) -> float:
        return rng.choice((0.0, *choices))

    latency_s = rng.choice((2e-5, 1e-4, 1e-3))
    if rng.random() < 0.3:
        return Weather(latency_s=latency_s, torn_share=share(0.5))
    return Weather(
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
