"""Tests on the stand-in accelerator. The first test builds it; all are skipped where it cannot be built."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from blocking_calls import no_blocking_calls_of_kvflow

from tests.accelerator.standin import NotBuilt, StandIn, load

HERE = Path(__file__).parent


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Count a test's time by its function: the first one also waits for the build, which has a bound of its own."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(120, func_only=True))


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
    with no_blocking_calls_of_kvflow():
        yield
