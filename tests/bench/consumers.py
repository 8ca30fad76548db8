"""Consumer ranks, several on one memory. Loading and comparing are separate steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape, allocate_memory
from kvflow.bench.engine import open_runtime
from kvflow.bench.loads import PlannedLoad, Ticket


class LoadResult(NamedTuple):
    """One load. `size_bytes` and `descriptors` count everything read, which may be more than the request."""

    seconds: float
    size_bytes: int
    descriptors: int
    checked_bytes: int = 0


@contextlib.asynccontextmanager
async def open_consumers(ranks: Sequence[tuple[kvflow.Config, CacheShape]]) -> AsyncIterator[Consumers]:
    memory = allocate_memory(max(shape.size_bytes for _, shape in ranks))
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for config, shape in ranks:
            cache = BenchCache(shape, memory)
            found.append((await stack.enter_async_context(open_runtime(config, cache)), cache))
        yield Consumers(found)


class Consumers:
    """All ranks of the consumer, by number: a runtime for each cut, on the same memory. One rank loads at a time.

    Most cases use the same rank, a single runtime that reads from all producers.
    """

    def __init__(self, ranks: Sequence[tuple[kvflow.Runtime, BenchCache]]) -> None:
        self._ranks = ranks

    async def poison(self, rank: int, load: PlannedLoad, layers: Sequence[int]) -> None:
        self._ranks[rank][1].poison(load.local_ids, layers)

    async def load(
        self, rank: int, load: PlannedLoad, tickets: Sequence[Ticket], *, verify: bool | None = None
    ) -> LoadResult:
        """Load by one ticket from every producer rank."""
        merged = kvflow.merge_tickets([kvflow.Ticket.from_params(ticket) for ticket in tickets]).to_params()
        request = kvflow.LoadRequest(load.request_id, ticket=merged, block_ids=load.local_ids, verify=verify)
        start = time.perf_counter()
        report = await self._ranks[rank][0].load_blocks(request)
        return LoadResult(time.perf_counter() - start, report.bytes, report.descriptors)

    async def check(self, rank: int, load: PlannedLoad, remote_block_size: int, layers: Sequence[int]) -> int:
        """Compare the loaded blocks. Return the number of bytes compared."""
        cache = self._ranks[rank][1]
        return cache.check(load.local_ids, load.remote_ids, remote_block_size=remote_block_size, layers=layers)
