"""The processes of the topology bench: a producer for every cut, and one consumer that sees its memory in several ways.

The rank that most cases have is one runtime, which talks to all of their producers. Those that need another layout,
block size or configuration have runtimes of their own on the same memory; only one of them loads at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import kvflow
from kvflow.bench.cache import CacheShape, PatternCache, allocate
from kvflow.bench.engine import config_of, open_runtime
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.topology.cuts import MODEL_KV_HEADS, Cut


class LoadResult(NamedTuple):
    """One load: `size_bytes` and `descriptors` are what was read, which may be more than what was wanted."""

    seconds: float
    size_bytes: int
    descriptors: int
    phases_s: dict[str, float]
    checked_bytes: int = 0


def config_of_rank(side: str, cut: Cut, shape: CacheShape) -> kvflow.Config:
    return replace(
        config_of(f"{side}-{cut.engine_id}"),
        tp_rank=cut.tp_rank,
        tp_size=cut.tp_size,
        num_kv_heads=MODEL_KV_HEADS,
        scratch="auto" if cut.scratch else "never",
        staging="always" if cut.staged else "never",
        host_buffer_bytes_max=shape.size_bytes,
    )


@contextlib.asynccontextmanager
async def open_consumers(ranks: Sequence[tuple[kvflow.Config, CacheShape]]) -> AsyncIterator[Consumers]:
    memory = allocate(max(shape.size_bytes for _, shape in ranks))
    caches = [PatternCache(shape, memory) for _, shape in ranks]
    async with contextlib.AsyncExitStack() as stack:
        runtimes = [
            await stack.enter_async_context(open_runtime(config, cache))
            for (config, _), cache in zip(ranks, caches, strict=True)
        ]
        yield Consumers(runtimes, caches)


class Consumers:
    """All ranks of the consumer, by number."""

    def __init__(self, runtimes: Sequence[kvflow.Runtime], caches: Sequence[PatternCache]) -> None:
        self._runtimes = runtimes
        self._caches = caches

    async def poison(self, rank: int, load: PlannedLoad, layers: Sequence[int]) -> None:
        self._caches[rank].poison(load.local_ids, layers)

    async def load(self, rank: int, load: PlannedLoad, tickets: Sequence[Ticket]) -> LoadResult:
        """There is one ticket from every producer rank."""
        merged = kvflow.merge_tickets([kvflow.Ticket.from_params(ticket) for ticket in tickets]).to_params()
        request = kvflow.LoadRequest(load.request_id, ticket=merged, block_ids=load.local_ids)
        start = time.perf_counter()
        report = await self._runtimes[rank].load_blocks(request)
        seconds = time.perf_counter() - start
        return LoadResult(seconds, report.bytes, report.descriptors, dict(report.seconds))

    async def check(self, rank: int, load: PlannedLoad, remote_block_size: int, layers: Sequence[int]) -> int:
        """How many bytes were compared."""
        return self._caches[rank].check(
            load.local_ids, load.remote_ids, remote_block_size=remote_block_size, layers=layers
        )
