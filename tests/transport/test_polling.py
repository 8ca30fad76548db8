"""How often the agents' thread looks for readers' notifications."""

from __future__ import annotations

import time

import pytest

from kvflow import Config, Limits
from kvflow.transport.nixl.agents import NixlAgents, notification_interval_s


@pytest.mark.parametrize(
    ("quiet_s", "interval_s"), [(0.0, 0.005), (0.1, 0.005), (0.4, 0.02), (1.0, 0.05), (3600.0, 0.05)]
)
def test_the_interval_grows_with_the_time_since_the_last_sign_of_a_reader(quiet_s: float, interval_s: float) -> None:
    assert notification_interval_s(0.005, quiet_s) == pytest.approx(interval_s)


@pytest.mark.nixl
def test_a_quiet_agent_looks_soon_once_a_lease_can_be_read() -> None:
    """Otherwise a lease of an engine that computes for seconds ends, and frees its blocks, ten intervals late."""
    shortest_s = 100.0
    config = Config(engine_id="e", limits=Limits(notification_poll_interval_s=shortest_s))
    agents = NixlAgents(config, "polling", lambda event: None, lambda: False)
    try:
        long_ago_s = time.monotonic() - 1e6
        agents.expected_s = agents._last_notification_s = long_ago_s
        agents._active_s = time.monotonic()
        assert agents.step() < shortest_s, "it sends what its own read is followed by"
        assert agents._next_notifications_s > time.monotonic() + 2 * shortest_s, "which brings no notification"
        agents._active_s = long_ago_s
        assert agents.step() > 2 * shortest_s
        agents.expected_s = time.monotonic()
        agents._next_notifications_s = 0.0  # it wakes
        assert shortest_s / 2 < agents.step() < 1.01 * shortest_s
    finally:
        agents.close()
