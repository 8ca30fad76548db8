"""A rank of either side with its runtime open, and the configuration that follows from its cut."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import kvflow
from kvflow.cli.topology_bench.cuts import MODEL_KV_HEADS, Cut
from kvflow.cli.topology_bench.pattern import RankCache
from kvflow.cli.topology_bench.settings import TopologySettings

_LEASE_TTL_S = 600.0
_LOAD_DEADLINE_S = 120.0


@contextlib.asynccontextmanager
async def open_rank(settings: TopologySettings, side: str, cache: RankCache) -> AsyncIterator[kvflow.Runtime]:
    """A runtime with the cache registered."""
    cut = cache.cut
    async with kvflow.Runtime(_config(settings, side, cut)) as runtime:
        tensors = cache.tensors()
        layout = kvflow.CacheLayout.infer(
            tensors, order=cut.order, block_size=cut.block_size, style=kvflow.KVStyle.KV_FIRST
        )
        await runtime.register_kv_caches(tensors, layout)
        yield runtime


def _config(settings: TopologySettings, side: str, cut: Cut) -> kvflow.Config:
    return kvflow.Config(
        engine_id=f"{side}-{cut.engine_id}",
        listen="tcp://127.0.0.1:0",
        tp_rank=cut.tp_rank,
        tp_size=cut.tp_size,
        num_kv_heads=MODEL_KV_HEADS,
        lease_ttl_s=_LEASE_TTL_S,
        load_deadline_s=_LOAD_DEADLINE_S,
        scratch="auto" if cut.scratch else "never",
        always_stage=cut.staged,
        host_buffer_bytes_max=settings.cache_bytes(cut),
    )
