"""One cluster for all tests: a head and two nodes on addresses of their own, and the answers of one engine alone."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from openai_server.workload import ALL_QUESTIONS, answers_alone
from ray_server.cluster import local_cluster

from tests.ray.fleet import LOAD, Fleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    checkpoint = os.environ.get("KVFLOW_RAY_MODEL", "")
    assert Path(checkpoint, "model.json").is_file(), "run these tests with `python3 dev.py ray --test`"
    right = asyncio.run(answers_alone(Path(checkpoint), ALL_QUESTIONS, LOAD.tokens))
    with local_cluster(3, port=free_port()) as cluster:
        yield Fleet(cluster, checkpoint, right)


def free_port() -> int:
    """A port that the system gives nobody by itself: the proxy takes it a minute later, when others have theirs."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no port is free between {first // 2} and {first}")
