"""Pytest fixtures with runtimes. Enable them by `pytest_plugins = ["kvflow.testing.fixtures"]` in a conftest.py.

They need pytest-asyncio (`kvflow[testing]`). A fixture closes the runtimes that it has opened, and makes the test fail
if a closed runtime has left a task, thread, peer, registered memory or read behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvflow.extras import install_command

try:
    import pytest_asyncio
except ModuleNotFoundError as missing:
    needed = f"kvflow.testing.fixtures needs {missing.name}: {install_command('testing')}"
    raise ModuleNotFoundError(needed, name=missing.name) from missing

from kvflow.testing.cluster import InprocCluster
from kvflow.testing.pair import InprocPair, NixlPair, inproc_pair, nixl_pair


@pytest_asyncio.fixture
async def kvflow_pair() -> AsyncIterator[InprocPair]:
    """Pytest fixture: a producer and a consumer over the in-process transport and the real side channel."""
    async with inproc_pair() as pair:
        yield pair


@pytest.fixture
def kvflow_cluster() -> InprocCluster:
    """Pytest fixture: an `InprocCluster` for any number of engines in this process, in real or virtual time."""
    return InprocCluster()


@pytest_asyncio.fixture
async def kvflow_nixl_pair() -> AsyncIterator[NixlPair]:
    """Pytest fixture: a producer and a consumer over real NIXL."""
    async with nixl_pair() as pair:
        yield pair
