"""The service on the cluster as tests see it: its replicas, its load, and when it is whole."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray_server.cluster import APP, HEAD, LocalCluster, deploy, service_config, wait_until

from tests.support.server_load import Load, Question, Tally, run_client

WHOLE_S = 240.0  # bounds of waits on a busy machine; what it took is printed
CALL_S = 60.0
LOAD = Load(clients=6, requests=3, tokens=12)

Changes = Mapping[str, Mapping[str, Any]]


def at(*ips: str) -> dict[str, Any]:
    """Options of a deployment: one replica on the node at each address."""
    (ip,) = ips
    return {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.2, "resources": {f"node:{ip}": 0.01}}}


def fixed(count: int, **options: Any) -> dict[str, Any]:
    """Options of a deployment: `count` replicas, each on a node of its own, gone within 20 s of a stop."""
    return {
        "num_replicas": count,
        "autoscaling_config": None,
        "graceful_shutdown_timeout_s": 20,
        "health_check_period_s": 1,
        **options,
    }


@dataclass(slots=True, eq=False)
class Fleet:
    """The service, deployed as a test wants it."""

    cluster: LocalCluster
    checkpoint: str
    right: Mapping[Question, str]
    deployed: dict[str, Any] = field(default_factory=dict)

    def have(self, prefill: Mapping[str, Any], decode: Mapping[str, Any], **arguments: Any) -> None:
        """The service with these options, running; nothing is done if it is as it was left."""
        config = self.config(prefill, decode, **arguments)
        if config != self.deployed or not self.whole():
            deploy(config)
            self.deployed = config
        wait_until(self.whole, "all replicas run and are idle", WHOLE_S)

    def config(self, prefill: Mapping[str, Any], decode: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
        changes = {"Prefill": prefill, "Decode": decode, "Ingress": at(HEAD)}
        config = service_config(changes, checkpoint=self.checkpoint, deadline_s=120.0, **arguments)
        config["applications"][0]["import_path"] = "tests.ray.application:build"
        return config

    def ask(self, deployment: str, method: str, *arguments: Any) -> list[Any]:
        """Return the answer of each replica, without replicas that stop meanwhile."""
        handle = serve.get_deployment_handle(deployment, APP)
        try:
            answers = handle.broadcast(method, *arguments).results(timeout_s=CALL_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def call(self, deployment: str, method: str, *arguments: Any) -> Any:
        """Return the answer of one replica."""
        handle = serve.get_deployment_handle(deployment, APP)
        return getattr(handle, method).remote(*arguments).result(timeout_s=CALL_S)

    def shows(self, name: str, *labels: str) -> bool:
        """Whether a metric of that name, with all of these labels, is at the port of some node."""
        for node in ray.nodes():
            if node["Alive"]:
                url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
                with urllib.request.urlopen(url, timeout=CALL_S) as answer:
                    lines = answer.read().decode().splitlines()
                if any(line.startswith(f"ray_{name}") and all(one in line for one in labels) for line in lines):
                    return True
        return False

    def pids(self, deployment: str) -> dict[int, str]:
        """The processes of a deployment's replicas, and their nodes' addresses."""
        return {entry["pid"]: entry["node_ip"] for entry in self.ask(deployment, "metadata")}

    def count(self, deployment: str) -> int:
        """How many replicas run, as Serve sees it."""
        states = serve.status().applications[APP].deployments[deployment].replica_states
        return sum(count for state, count in states.items() if str(state) == "RUNNING")

    def whole(self) -> bool:
        """As many replicas as there should be, none starting or going, and no block of theirs in use."""
        app = serve.status().applications.get(APP)
        if app is None or app.status.name != "RUNNING":
            return False
        for name, deployment in app.deployments.items():
            if deployment.status.name != "HEALTHY" or {str(state) for state in deployment.replica_states} != {
                "RUNNING"
            }:
                return False
            if name != "Ingress":
                stats = self.ask(name, "record_routing_stats")
                running = sum(deployment.replica_states.values())
                if len(stats) != running or any(one["blocks_used"] or one["state"] != "open" for one in stats):
                    return False
        return True

    @contextmanager
    def under_load(self, load: Load = LOAD) -> Iterator[Tally]:
        """Clients ask while the block runs; leaving it waits until all have their answers. Nothing may be wrong."""
        tally = Tally()

        async def all_clients() -> None:
            async with asyncio.TaskGroup() as clients:
                for index in range(load.clients):
                    clients.create_task(run_client(self.cluster.url, load, index, self.right, tally))

        asking = threading.Thread(target=lambda: asyncio.run(all_clients()), name="load")
        asking.start()
        try:
            yield tally
        finally:
            asking.join()
        assert tally.wrong == []
        assert tally.unclear == [], "an error that is none of the table"
        assert tally.ended == load.clients * load.requests

    def begun(self, tally: Tally) -> None:
        """Wait until some requests have ended, so that others are under way."""
        wait_until(lambda: tally.ended >= LOAD.clients, "the load has begun", 120.0)
