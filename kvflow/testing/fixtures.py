"""Pytest fixtures. Enable them with `pytest_plugins = ["kvflow.testing.fixtures"]` in a conftest.py.

They need pytest-asyncio (`kvflow[testing]`). A fixture that opens runtimes closes them, and fails the test if a closed
runtime left anything behind.
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
    """A producer and a consumer over the in-process transport and the real side channel (`inproc_pair`)."""
    async with inproc_pair() as pair:
        yield pair


@pytest.fixture
def kvflow_cluster() -> InprocCluster:
    """A cluster for any number of engines in this process, also in virtual time (`InprocCluster`)."""
    return InprocCluster()


@pytest_asyncio.fixture
async def kvflow_nixl_pair() -> AsyncIterator[NixlPair]:
    """A producer and a consumer over real NIXL (`nixl_pair`)."""
    async with nixl_pair() as pair:
        yield pair
