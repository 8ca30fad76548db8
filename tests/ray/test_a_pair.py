"""One prefill and one decode replica, on two nodes: answers, clients that go, metrics, a runtime that breaks."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
import ray
from paged_engine.weights import MODEL_NAME
from ray_server.cluster import HEAD, wait_until

from tests.ray.fleet import WHOLE_S, Fleet, at, fixed
from tests.support.server_load import Load

PREFILL, DECODE = "127.0.0.3", "127.0.0.4"


@pytest.fixture(autouse=True)
def pair(fleet: Fleet) -> None:
    fleet.have(fixed(1, **at(PREFILL)), fixed(1, **at(DECODE)))


def test_answers_are_those_of_one_engine_alone(fleet: Fleet) -> None:
    """The prompt is computed on one node and the answer on another; whole answers and streams."""
    assert set(fleet.pids("Prefill").values()) == {PREFILL}
    assert set(fleet.pids("Decode").values()) == {DECODE}
    (before,) = fleet.ask("Prefill", "counts")
    with fleet.under_load(Load(clients=4, requests=5, tokens=12)) as tally:
        pass
    assert tally.right == 20
    (after,) = fleet.ask("Prefill", "counts")
    assert after["read"] - before["read"] == 20
    wait_until(fleet.whole, "all blocks are free", WHOLE_S)


def test_a_client_that_hangs_up_frees_blocks_at_both_ends(fleet: Fleet) -> None:
    """Long before its answer would have ended."""
    tokens = 400
    before = steps_of(fleet)
    asked = {"model": MODEL_NAME, "prompt": "1, 2, 3, 4,", "max_tokens": tokens, "stream": True}
    request = urllib.request.Request(
        f"{fleet.cluster.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.readline().startswith(b"data: ")
        (used,) = fleet.ask("Decode", "record_routing_stats")
        assert used["blocks_used"] > 0
    wait_until(fleet.whole, "all blocks are free", WHOLE_S)
    assert steps_of(fleet) - before < tokens - 1, "it went on to its end"


def steps_of(fleet: Fleet) -> int:
    (steps,) = fleet.ask("Decode", "steps")
    return int(steps)


def test_metrics_are_at_the_nodes_own_ports(fleet: Fleet) -> None:
    with fleet.under_load(Load(clients=1, requests=1, tokens=12)):
        pass

    wait_until(lambda: fleet.shows("kvflow_load_seconds_count", '"Decode"'), "loads are counted", WHOLE_S)
    wait_until(lambda: fleet.shows("kvflow_blocks", '"Decode"'), "blocks are shown", WHOLE_S)
    wait_until(lambda: fleet.shows("kvflow_leases", '"Prefill"'), "leases are counted", WHOLE_S)


def test_a_replica_whose_runtime_is_broken_is_replaced(fleet: Fleet) -> None:
    (old,) = fleet.pids("Decode")
    fleet.call("Decode", "break_runtime")
    wait_until(lambda: old not in fleet.pids("Decode") and fleet.whole(), "another replica runs", WHOLE_S)
    with fleet.under_load(Load(clients=1, requests=2, tokens=12)) as tally:
        pass
    assert tally.right == 2


def test_serve_llm_knows_where_the_connectors_workers_listen(fleet: Fleet) -> None:
    """The registry is the cluster's, and telling it twice is fine."""
    from types import SimpleNamespace

    from kvflow.ray import llm

    llm.register()
    llm.register()
    factory = llm._ray_internal("factory", "KVConnectorBackendFactory", ())
    transfer: dict[str, Any] = {"kv_connector": "KVFlowConnector", "kv_connector_extra_config": {"lease_ttl_s": 9.0}}
    config = SimpleNamespace(engine_kwargs={"kv_transfer_config": transfer})
    backend = factory.create_backend("KVFlowConnector", config)
    backend.setup()
    here = ray.util.get_node_ip_address()
    assert here == HEAD
    assert transfer["kv_connector_extra_config"] == {"lease_ttl_s": 9.0, "listen": f"tcp://{here}:0"}
