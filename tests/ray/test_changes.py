"""Replicas that come and go by order: scale-in with open leases, rolling updates, autoscaling."""

from __future__ import annotations

from typing import Any

import pytest
from ray_server.cluster import deploy, wait_until

from tests.ray.fleet import WHOLE_S, Fleet, fixed
from tests.support.server_load import Load

PATIENT = {"graceful_shutdown_timeout_s": 180}  # so that leases are read, and answers end, in time on any machine


@pytest.fixture(autouse=True)
def two_of_each(fleet: Fleet) -> None:
    fleet.have(fixed(2), fixed(2))


def test_a_leaving_replicas_lease_can_be_read(fleet: Fleet) -> None:
    fleet.have(fixed(2, **PATIENT), fixed(2))
    tickets, there = fleet.ask("Prefill", "hold", "read"), set(fleet.pids("Prefill"))
    assert len(tickets) == len(there) == 2
    deploy_only(fleet, fixed(1, **PATIENT))
    wait_until(lambda: fleet.count("Prefill") == 1, "one leaves", WHOLE_S)
    assert [fleet.call("Decode", "load", ticket) for ticket in tickets] == ["read", "read"]
    wait_until(lambda: len(set(fleet.pids("Prefill"))) == 1 and fleet.whole(), "it has gone", WHOLE_S)


def test_a_leaving_replicas_unread_lease_is_revoked_in_time(fleet: Fleet) -> None:
    tickets = fleet.ask("Prefill", "hold", "unread")
    assert len(tickets) == 2
    deploy_only(fleet, fixed(1))
    left_s = wait_until(lambda: gone(fleet), "one has gone", WHOLE_S)
    results = sorted(fleet.call("Decode", "load", ticket) for ticket in tickets)
    print(f"gone after {left_s:.1f} s: {results}")
    assert results[1] == "read", "the other replica's lease is open"
    assert results[0] in ("LeaseExpired", "PeerUnreachable", "TransferFailed", "PeerNotReady", "PrefillFailed")
    wait_until(fleet.whole, "whole, all blocks free", WHOLE_S)


def gone(fleet: Fleet) -> bool:
    from ray import serve
    from ray_server.cluster import APP

    states = serve.status().applications[APP].deployments["Prefill"].replica_states
    return sum(states.values()) == 1


def deploy_only(fleet: Fleet, prefill: dict[str, Any]) -> None:
    """Tell Serve, and do not wait until all is done."""
    fleet.deployed = fleet.config(prefill, fixed(2))
    deploy(fleet.deployed, wait=False)


def test_a_rolling_update_is_seen_by_nobody(fleet: Fleet) -> None:
    fleet.have(fixed(2, **PATIENT), fixed(2, **PATIENT))
    old = {*fleet.pids("Prefill"), *fleet.pids("Decode")}
    other = {"ray_actor_options": {"num_cpus": 0.4}, **PATIENT}
    with fleet.under_load(Load(clients=6, requests=5, tokens=12)) as tally:
        fleet.begun(tally)
        fleet.deployed = fleet.config(fixed(2, **other), fixed(2, **other))
        deploy(fleet.deployed)
    assert not old & {*fleet.pids("Prefill"), *fleet.pids("Decode")}
    assert (tally.right, dict(tally.failed)) == (30, {})
    wait_until(fleet.whole, "whole, all blocks free", WHOLE_S)


def test_replicas_come_with_load_and_go_without(fleet: Fleet) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "look_back_period_s": 2,
        "metrics_interval_s": 1,
    }
    fleet.have(fixed(1), fixed(1, num_replicas=None, autoscaling_config=scaling, **PATIENT))
    assert fleet.count("Decode") == 1
    with fleet.under_load(Load(clients=6, requests=6, tokens=12)) as tally:
        wait_until(lambda: fleet.count("Decode") == 2, "another one comes", WHOLE_S)
    wait_until(lambda: fleet.count("Decode") == 1 and fleet.whole(), "it goes again", WHOLE_S)
    assert (tally.right, dict(tally.failed)) == (36, {})
