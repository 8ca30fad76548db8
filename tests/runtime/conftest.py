"""Shell tests run on asyncio and on uvloop, with blocking calls detected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop
from blockbuster import blockbuster_ctx
from pairs import EnginePair, open_pair


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """A blocking call by kvflow's own code on the loop raises (invariant I6)."""
    with blockbuster_ctx("kvflow") as detector:
        for function in detector.functions.values():  # what tests draw on the loop, Hypothesis looks for in their files
            function.can_block_in("hypothesis/internal/conjecture/providers.py", "_get_local_constants")
        # Joining a thread that has said its last word takes microseconds.
        detector.functions["threading.Lock.acquire"].can_block_in("kvflow/transport/thread.py", "ended")
        for name in ("os.stat", "os.listdir"):  # of /proc, which is no disk
            detector.functions[name].can_block_in("kvflow/runtime/open_files.py", "left")
        yield


@pytest.fixture
async def pair() -> AsyncIterator[EnginePair]:
    """A registered pair; after the test all blocks are free again (invariant I5)."""
    async with open_pair() as pair:
        yield pair
