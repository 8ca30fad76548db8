"""A local Ray cluster with an address for each node, and applications deployed on it from a config file.

Nodes have the addresses 127.0.0.2 and up: Ray takes 127.0.0.1 for "any address of this machine" and replaces it by
another. The cluster's processes are children of this process, and are ended with it, each by its pid.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

SERVICE = Path(__file__).with_name("service.yaml")
APP = "kvflow"
HEAD = "127.0.0.2"
POLL_S = 0.2
DEPLOY_TIMEOUT_S = 240.0


class LocalCluster:
    """A running local cluster: a head node and other nodes. Made by `local_cluster`."""

    def __init__(self, cluster: Cluster, nodes: dict[str, Node], port: int) -> None:
        self._cluster = cluster
        self._nodes = nodes
        self.url = f"http://127.0.0.1:{port}"

    def add(self, ip: str, **options: Any) -> None:
        """Add a node at address `ip`. To place replicas on it, request Ray's resource `node:ADDRESS`."""
        self._nodes[ip] = self._cluster.add_node(node_ip_address=ip, **{"num_cpus": 4, **options})

    def kill(self, ip: str) -> None:
        """Kill the raylet of the node at `ip`, and with it all its workers."""
        self._cluster.remove_node(self._nodes.pop(ip), allow_graceful=False)


@contextmanager
def local_cluster(nodes: int = 3, *, port: int = 8000) -> Iterator[LocalCluster]:
    """Start a cluster with Serve and without an application, and end it with the block.

    Args:
        nodes: Number of nodes, including the head, which runs the proxy.
        port: Port of the proxy.
    """
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # short, because Ray puts sockets deep in it
    Path(folder, "ray").mkdir()
    os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    ips = [f"127.0.0.{index}" for index in range(2, 2 + nodes)]
    cluster = Cluster()
    local = LocalCluster(cluster, {}, port)
    try:
        for ip in ips:
            local.add(ip, **({"include_dashboard": False} if ip == HEAD else {}))
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host="127.0.0.1", port=port))
        yield local
    finally:
        _quietly(serve.shutdown)
        _quietly(ray.shutdown)
        _quietly(cluster.shutdown)
        shutil.rmtree(folder, ignore_errors=True)


def _quietly(end: Callable[[], object]) -> None:
    """Call `end`, which ends a part of the cluster, and print its errors: the part may already be dead."""
    try:
        end()
    except Exception as error:  # noqa: BLE001 - the other parts must be ended in any case
        print(f"ending the cluster: {type(error).__name__}: {error}")


def service_config(changes: Mapping[str, Mapping[str, Any]] | None = None, **arguments: Any) -> dict[str, Any]:
    """Return the config in service.yaml with `changes` to the options of deployments, by the deployment's name.

    An option of None is removed. `arguments` are added to the application's.
    """
    config: dict[str, Any] = copy.deepcopy(yaml.safe_load(SERVICE.read_text()))
    config["proxy_location"] = "HeadOnly"
    app = config["applications"][0]
    app["args"] |= arguments
    for index, deployment in enumerate(app["deployments"]):
        changed = deployment | (changes or {}).get(deployment["name"], {})
        app["deployments"][index] = {option: value for option, value in changed.items() if value is not None}
    return config


def deploy(config: Mapping[str, Any], timeout_s: float = DEPLOY_TIMEOUT_S, *, wait: bool = True) -> None:
    """Deploy a config, as `serve deploy` does, and, with `wait`, wait until it runs. Raises TimeoutError."""
    client = _get_global_client()
    assert client is not None, "Serve has been started"
    client.deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
    if wait:
        wait_until(is_running, "the application runs", timeout_s)


def is_running() -> bool:
    """Return True if the application runs with all deployments healthy. Raises RuntimeError if deploying failed."""
    app = serve.status().applications.get(APP)
    if app is None:
        return False
    if app.status.name == "DEPLOY_FAILED":
        raise RuntimeError(f"{APP}: {app.status.name}: {app.message}")
    healthy = all(one.status.name == "HEALTHY" for one in app.deployments.values())
    return app.status.name == "RUNNING" and healthy and len(app.deployments) > 0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Poll until `condition` is true, and return the seconds that took. Raises TimeoutError, which names `what`."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}; Serve says {serve.status()}")
        time.sleep(POLL_S)
    return time.monotonic() - began_s
