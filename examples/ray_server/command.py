"""The command line: a local cluster of three nodes and the service on it, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="ray_server", description="The example server on a local Ray cluster.")
    parser.add_argument("--nodes", type=int, default=3, help="number of nodes, with the head node (default: 3)")
    parser.add_argument("--port", type=int, default=8000, help="port of the HTTP proxy (default: 8000)")
    parser.add_argument("--deadline-s", type=float, default=60.0, help="deadline of a request in seconds (default: 60)")
    shared = "prefill replicas load cached prefixes from each other"
    parser.add_argument("--share-prefixes", action="store_true", help=shared)
    options = parser.parse_args(arguments)
    from ray_server.cluster import deploy, local_cluster, service_config

    ending = threading.Event()
    print(f"starting a cluster of {options.nodes} nodes", flush=True)
    with local_cluster(options.nodes, port=options.port) as cluster:
        for number in (signal.SIGINT, signal.SIGTERM):  # now: connecting to a cluster installs Ray's handlers
            signal.signal(number, lambda *_: ending.set())
        try:
            deploy(service_config(deadline_s=options.deadline_s, share_prefixes=options.share_prefixes))
        except (TimeoutError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        print(f"ready: {cluster.url}/v1", flush=True)
        ending.wait()
        print("ending", flush=True)
    return 0
