"""One cluster for all tests: a head and two nodes on addresses of their own, and the answers of one engine alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_server.cluster import local_cluster

from tests.ray.fleet import LOAD, Fleet
from tests.support.ports import free_port
from tests.support.server_load import ALL_QUESTIONS, answers_alone


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    checkpoint = os.environ.get("KVFLOW_RAY_MODEL", "")
    assert Path(checkpoint, "model.json").is_file(), "run these tests with `python3 dev.py ray --test`"
    right = asyncio.run(answers_alone(Path(checkpoint), ALL_QUESTIONS, LOAD.tokens))
    with local_cluster(3, port=free_port()) as cluster:
        yield Fleet(cluster, checkpoint, right)
