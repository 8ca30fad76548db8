"""Pytest fixtures, to be switched on by `pytest_plugins = ["kvflow.testing.fixtures"]` in a conftest.py.

They need pytest-asyncio (`kvflow[testing]`). Each closes what it has opened and fails the test if anything is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvflow.extras import install_line

try:
    import pytest_asyncio
except ModuleNotFoundError as missing:
    needed = f"kvflow.testing.fixtures needs {missing.name}: {install_line('testing')}"
    raise ModuleNotFoundError(needed, name=missing.name) from missing

from kvflow.testing.cluster import InprocCluster
from kvflow.testing.pair import InprocPair, NixlPair, inproc_pair, nixl_pair


@pytest_asyncio.fixture
async def kvflow_pair() -> AsyncIterator[InprocPair]:
    """A producer and a consumer on the in-process transport, with the real side channel."""
    async with inproc_pair() as pair:
        yield pair


@pytest.fixture
def kvflow_cluster() -> InprocCluster:
    """A network for any number of engines in this process; works in virtual time, too."""
    return InprocCluster()


@pytest_asyncio.fixture
async def kvflow_nixl_pair() -> AsyncIterator[NixlPair]:
    """A producer and a consumer over real NIXL."""
    async with nixl_pair() as pair:
        yield pair
