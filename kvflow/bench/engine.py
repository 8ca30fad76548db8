"""Ranks that run kvflow on uvloop, as an engine does; and a pair of them, which doctor and selftest use, too."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape, allocate
from kvflow.bench.child import Child, Environment, RankProcess, open_children
from kvflow.bench.loads import AgentAddress, PlannedLoad, Ticket

_LEASE_TTL_S = 600.0
_LOAD_DEADLINE_S = 120.0
_SETTLE_TIMEOUT_S = 10.0


def config_of(engine_id: str, backend: str = "UCX") -> kvflow.Config:
    return kvflow.Config(
        engine_id=engine_id,
        listen="tcp://127.0.0.1:0",
        nixl_backend=backend,
        lease_ttl_s=_LEASE_TTL_S,
        load_deadline_s=_LOAD_DEADLINE_S,
    )


@contextlib.asynccontextmanager
async def open_runtime(config: kvflow.Config, cache: BenchCache) -> AsyncIterator[kvflow.Runtime]:
    """A runtime with the cache registered."""
    kv_caches, shape = cache.tensors(), cache.shape
    layout = kvflow.CacheLayout.infer(
        kv_caches, order=shape.order, block_size=shape.block_size, style=kvflow.KVStyle.KV_FIRST
    )
    async with kvflow.Runtime(config) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
        yield runtime


@contextlib.asynccontextmanager
async def open_producer(
    config: kvflow.Config, shape: CacheShape, device: str | None = None
) -> AsyncIterator[EngineProducer]:
    cache = BenchCache(shape, device=device)
    cache.fill()
    async with open_runtime(config, cache) as runtime:
        producer = EngineProducer(runtime, shape.block_size)
        yield producer
        producer.revoke()  # closing would wait for leases that nobody reads


class EngineProducer:
    """Producer rank, which offers its blocks."""

    def __init__(self, runtime: kvflow.Runtime, block_size: int) -> None:
        self._runtime = runtime
        self._block_size = block_size
        self._leases: list[kvflow.Lease] = []

    async def address(self) -> AgentAddress:
        return AgentAddress()

    async def offer(self, loads: Sequence[PlannedLoad]) -> list[Ticket]:
        """Open a lease for each load."""
        leases = [self._serve(load) for load in loads]
        self._leases += leases
        return [dict(lease.ticket.to_params()) for lease in leases]

    async def settle(self, *, read: bool = True) -> None:
        """Wait until every lease has ended as read, or revoke all. Lost notifications would falsify the bench."""
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


class LoadResult(NamedTuple):
    """One load: `size_bytes` and `descriptors` are what was read, which may be more than what was wanted."""

    seconds: float
    size_bytes: int
    descriptors: int
    checked_bytes: int = 0


@contextlib.asynccontextmanager
async def open_consumers(
    ranks: Sequence[tuple[kvflow.Config, CacheShape]], device: str | None = None
) -> AsyncIterator[Consumers]:
    memory = allocate(max(shape.size_bytes for _, shape in ranks))
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for config, shape in ranks:
            cache = BenchCache(shape, memory, device)
            found.append((await stack.enter_async_context(open_runtime(config, cache)), cache))
        yield Consumers(found)


class Consumers:
    """All ranks of the consumer, by number: a runtime for each cut, on the same memory. One of them loads at a time.

    The rank that most cases have is one runtime, which talks to all of their producers.
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
        """Compare what was loaded. Returns the number of bytes compared."""
        cache = self._ranks[rank][1]
        return cache.check(load.local_ids, load.remote_ids, remote_block_size=remote_block_size, layers=layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPair:
    """A producer and a consumer of one shape, in processes of their own."""

    producer: Child
    consumer: Child
    shape: CacheShape

    def hand_over(
        self, load: PlannedLoad, *, layers: Sequence[int] | None = None, verify: bool | None = None
    ) -> LoadResult:
        """Offer, load, compare every byte of some layers, all if left out, and see that the lease has ended as read."""
        layers = range(self.shape.layers) if layers is None else layers
        self.consumer.run(Consumers.poison, 0, load, layers)
        tickets = self.producer.run(EngineProducer.offer, [load])
        result = self.consumer.run(Consumers.load, 0, load, tickets, verify=verify)
        checked_bytes = self.consumer.run(Consumers.check, 0, load, self.shape.block_size, layers)
        self.producer.run(EngineProducer.settle)
        return result._replace(checked_bytes=checked_bytes)


def pair_ranks(shape: CacheShape, device: str | None = None) -> tuple[RankProcess, RankProcess]:
    """A producer and a consumer of equal caches."""
    consumers = [(config_of("consumer"), shape)]
    return (
        RankProcess("producer", partial(open_producer, config_of("producer"), shape, device)),
        RankProcess("consumer", partial(open_consumers, consumers, device)),
    )


@contextlib.contextmanager
def open_pair(shape: CacheShape, environment: Environment, device: str | None = None) -> Iterator[RankPair]:
    """Run a pair inside the block. Caches are in host memory, or on a device."""
    with open_children(pair_ranks(shape, device), environment) as children:
        yield RankPair(producer=children["producer"], consumer=children["consumer"], shape=shape)
