"""Tests on the stand-in accelerator, which is built by the first of them; they skip where it cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop
from blockbuster import blockbuster_ctx

from tests.accelerator.standin import NotBuilt, StandIn, load


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def built() -> StandIn:
    try:
        return load()
    except NotBuilt as error:
        pytest.skip(f"needs the stand-in accelerator: {error}")


@pytest.fixture
def standin(built: StandIn) -> Iterator[StandIn]:
    built.reset()
    yield built
    built.reset()


@pytest.fixture
def no_blocking_calls(standin: StandIn) -> Iterator[None]:
    """A blocking call by kvflow's own code on the loop raises (invariant I6)."""
    with blockbuster_ctx("kvflow") as detector:
        detector.functions["threading.Lock.acquire"].can_block_in("kvflow/transport/thread.py", "ended")
        yield
