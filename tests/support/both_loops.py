"""Fixtures for tests of code on an event loop: each test runs on asyncio and on uvloop, and must not block the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop
from blocking_calls import no_blocking_calls_of_kvflow
from pairs import EnginePair, open_pair


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    with no_blocking_calls_of_kvflow():
        yield


@pytest.fixture
async def pair() -> AsyncIterator[EnginePair]:
    """A registered pair of engines. After the test all blocks must be free (invariant I5)."""
    async with open_pair() as pair:
        yield pair
