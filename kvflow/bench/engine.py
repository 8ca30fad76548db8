"""Ranks that run kvflow, on uvloop, as an engine would use it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import kvflow
from kvflow.bench.cache import CacheShape, PatternCache
from kvflow.bench.loads import PeerAddress, PlannedLoad, Ticket

_LEASE_TTL_S = 600.0
_LOAD_DEADLINE_S = 120.0
_SETTLE_TIMEOUT_S = 10.0


def config_of(engine_id: str) -> kvflow.Config:
    return kvflow.Config(
        engine_id=engine_id, listen="tcp://127.0.0.1:0", lease_ttl_s=_LEASE_TTL_S, load_deadline_s=_LOAD_DEADLINE_S
    )


@contextlib.asynccontextmanager
async def open_runtime(config: kvflow.Config, cache: PatternCache) -> AsyncIterator[kvflow.Runtime]:
    """A runtime with the cache registered."""
    kv_caches, shape = cache.tensors(), cache.shape
    layout = kvflow.CacheLayout.infer(
        kv_caches, order=shape.order, block_size=shape.block_size, style=kvflow.KVStyle.KV_FIRST
    )
    async with kvflow.Runtime(config) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
        yield runtime


@contextlib.asynccontextmanager
async def open_producer(config: kvflow.Config, shape: CacheShape) -> AsyncIterator[EngineProducer]:
    cache = PatternCache(shape)
    cache.fill()
    async with open_runtime(config, cache) as runtime:
        producer = EngineProducer(runtime, shape.block_size)
        yield producer
        producer.revoke()  # closing would wait for leases that nobody reads


class EngineProducer:
    """Offers its blocks."""

    def __init__(self, runtime: kvflow.Runtime, block_size: int) -> None:
        self._runtime = runtime
        self._block_size = block_size
        self._leases: list[kvflow.Lease] = []

    async def address(self) -> PeerAddress:
        return PeerAddress()

    async def offer(self, loads: Sequence[PlannedLoad]) -> list[Ticket]:
        """Open a lease for each load."""
        leases = [self._serve(load) for load in loads]
        self._leases += leases
        return [dict(lease.ticket.to_params()) for lease in leases]

    async def settle(self, *, read: bool = True) -> None:
        """Every lease must end as read, or is revoked: a bench whose notifications get lost measures something else."""
        if not read:
            self.revoke()
        expected = kvflow.LeaseOutcome.READ if read else kvflow.LeaseOutcome.REVOKED
        async with asyncio.timeout(_SETTLE_TIMEOUT_S):
            outcomes = [await lease for lease in self._leases]
        if any(outcome is not expected for outcome in outcomes):
            raise RuntimeError(f"leases of a turn ended as {outcomes}, expected {expected}")
        self._leases = []

    def revoke(self) -> None:
        for lease in self._leases:
            lease.revoke()

    def _serve(self, load: PlannedLoad) -> kvflow.Lease:
        num_tokens = len(load.remote_ids) * self._block_size
        request = kvflow.ServeRequest(load.request_id, block_ids=load.remote_ids, num_tokens=num_tokens)
        return self._runtime.serve_blocks(request)
