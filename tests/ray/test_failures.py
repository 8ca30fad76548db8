"""Replicas and nodes that are killed while clients ask: no wrong text, no strange error, whole again soon."""

from __future__ import annotations

import pytest
from ray_server.cluster import HEAD, kill_process, wait_until

from tests.ray.fleet import WHOLE_S, Fleet, fixed


@pytest.fixture(autouse=True)
def two_of_each(fleet: Fleet) -> None:
    fleet.have(fixed(2), fixed(2))


@pytest.mark.parametrize("deployment", ["Decode", "Prefill"])
def test_a_replica_is_killed_under_load(fleet: Fleet, deployment: str) -> None:
    with fleet.under_load() as tally:
        fleet.begun(tally)
        killed = next(iter(fleet.pids(deployment)))
        kill_process(killed)
        took_s = wait_until(lambda: len(set(fleet.pids(deployment)) - {killed}) == 2, "it is replaced", WHOLE_S)
    print(f"{deployment}: {tally.right} right, {dict(tally.failed)}, replaced after {took_s:.1f} s")
    if deployment == "Prefill":
        assert tally.failed == {}, "nobody has seen a token, so another one computes the prompt"
    wait_until(fleet.whole, "whole again, all blocks free", WHOLE_S)


def test_a_node_is_lost_under_load(fleet: Fleet) -> None:
    """With all its replicas; others are started where there is room."""
    places = [ip for name in ("Prefill", "Decode") for ip in fleet.pids(name).values() if ip != HEAD]
    lost = max(places, key=places.count)
    with fleet.under_load() as tally:
        fleet.begun(tally)
        fleet.cluster.kill(lost)
    print(f"node: {tally.right} right, {dict(tally.failed)}")
    try:
        took_s = wait_until(fleet.whole, "whole again, all blocks free", WHOLE_S)
        print(f"whole {took_s:.1f} s after the last answer")
        places = [ip for name in ("Prefill", "Decode") for ip in fleet.pids(name).values()]
        assert len(places) == 4
        assert lost not in places
    finally:
        fleet.cluster.add(lost)
