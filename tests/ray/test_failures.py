"""Replicas and nodes that are killed while clients ask: no wrong text, no strange error, whole again soon."""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import pytest
from ray_server.cluster import HEAD, wait_until

from tests.ray.fleet import WHOLE_S, Fleet, fixed
from tests.support.server_load import Load


@pytest.fixture(autouse=True)
def two_of_each(fleet: Fleet) -> None:
    fleet.have(fixed(2), fixed(2))


@pytest.mark.parametrize("deployment", ["Decode", "Prefill"])
def test_a_replica_is_killed_under_load(fleet: Fleet, deployment: str) -> None:
    with fleet.under_load() as tally:
        fleet.begun(tally)
        killed = next(iter(fleet.pids(deployment)))
        os.kill(killed, signal.SIGKILL)
        took_s = wait_until(lambda: len(set(fleet.pids(deployment)) - {killed}) == 2, "it is replaced", WHOLE_S)
    print(f"{deployment}: {tally.right} right, {dict(tally.failed)}, replaced after {took_s:.1f} s")
    if deployment == "Prefill":
        assert tally.failed == {}, "nobody has seen a token, so another one computes the prompt"
    wait_until(fleet.whole, "whole again, all blocks free", WHOLE_S)


def test_a_load_goes_on_with_another_prefill_replica(fleet: Fleet, tmp_path: Path) -> None:
    """The first prefill replica dies. The decode replica keeps its blocks, and the ingress is not involved."""
    halt = tmp_path / "halt"
    halt.touch()
    fleet.ask("Prefill", "halt", str(halt))
    left, retries = sum(fleet.ask("Decode", "sources_left")), retries_of(fleet)
    with fleet.under_load(Load(clients=1, requests=1, tokens=12)) as tally:
        wait_until(lambda: not halt.exists() and open_loads(fleet) == 1, "the load waits for its blocks", WHOLE_S)
        (halted,) = tmp_path.iterdir()
        os.kill(int(halted.name.removeprefix("halt-")), signal.SIGKILL)
    assert (tally.right, dict(tally.failed)) == (1, {})
    assert (sum(fleet.ask("Decode", "sources_left")) - left, retries_of(fleet) - retries) == (1, 0)
    wait_until(fleet.whole, "whole again, all blocks free", WHOLE_S)


def open_loads(fleet: Fleet) -> int:
    return sum(one["open_loads"] for one in fleet.ask("Decode", "record_routing_stats"))


def retries_of(fleet: Fleet) -> float:
    """How often the ingress has tried again."""
    with urllib.request.urlopen(f"{fleet.cluster.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("openai_server_retries_total"))


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
