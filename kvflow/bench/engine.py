"""A producer and a consumer that run kvflow on uvloop, each in a child process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import kvflow
from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import Child, Environment, RankProcess, open_children
from kvflow.bench.loads import PlannedLoad, Ticket

_LEASE_TTL_S = 600.0
_LOAD_DEADLINE_S = 120.0
_END_LEASES_TIMEOUT_S = 10.0


def config_of(engine_id: str, backend: str = "UCX", *, cuda_ipc: bool = False) -> kvflow.Config:
    return kvflow.Config(
        engine_id=engine_id,
        listen="tcp://127.0.0.1:0",
        nixl_backend=backend,
        cuda_ipc=cuda_ipc,
        lease_ttl_s=_LEASE_TTL_S,
        load_deadline_s=_LOAD_DEADLINE_S,
    )


@contextlib.asynccontextmanager
async def open_runtime(
    config: kvflow.Config, cache: BenchCache, parts: Sequence[kvflow.Part] = ()
) -> AsyncIterator[kvflow.Runtime]:
    """Context manager: open a runtime, register `cache`, and yield the runtime. At the exit the runtime is closed."""
    kv_caches, shape = cache.tensors(), cache.shape
    layout = kvflow.CacheLayout.infer(
        kv_caches, order=shape.order, block_size=shape.block_size, style=kvflow.KVStyle.KV_FIRST
    )
    async with kvflow.Runtime(config, parts=parts) as runtime:
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
        producer.revoke()  # otherwise closing would wait for leases that no consumer reads


class EngineProducer:
    """The rank of a producer, in a child process."""

    def __init__(self, runtime: kvflow.Runtime, block_size: int) -> None:
        self._runtime = runtime
        self._block_size = block_size
        self._leases: list[kvflow.Lease] = []

    async def offer(self, loads: Sequence[PlannedLoad]) -> list[Ticket]:
        """Open a lease for each load, on this producer's blocks `PlannedLoad.remote_ids`. Return the tickets."""
        leases = [self._serve(load) for load in loads]
        self._leases += leases
        return [dict(lease.ticket.to_params()) for lease in leases]

    async def end_leases(self, *, read: bool = True) -> None:
        """Wait until every lease has ended with outcome READ; with `read=False`, revoke all and expect REVOKED.

        Raise RuntimeError if a lease has another outcome: a lost notification would falsify the bench.
        """
        if not read:
            self.revoke()
        expected = kvflow.LeaseOutcome.READ if read else kvflow.LeaseOutcome.REVOKED
        async with asyncio.timeout(_END_LEASES_TIMEOUT_S):
            outcomes = [await lease for lease in self._leases]
        if any(outcome is not expected for outcome in outcomes):
            raise RuntimeError(f"leases of a turn ended as {outcomes}, expected {expected}")
        self._leases = []

    async def mapping(self) -> MappingFacts:
        return mapping_of(self._runtime)

    def revoke(self) -> None:
        for lease in self._leases:
            lease.revoke()

    def _serve(self, load: PlannedLoad) -> kvflow.Lease:
        num_tokens = len(load.remote_ids) * self._block_size
        request = kvflow.ServeRequest(load.request_id, block_ids=load.remote_ids, num_tokens=num_tokens)
        return self._runtime.serve_blocks(request)


class MappingFacts(NamedTuple):
    """Number of peers with device memory that a runtime has mapped (Config.cuda_ipc), and why none is mapped, or ""."""

    peers: int
    problem: str


def mapping_of(runtime: kvflow.Runtime) -> MappingFacts:
    transport = runtime.statistics().transport
    return MappingFacts(transport.mapped_peers, transport.mapping_problem)


class LoadResult(NamedTuple):
    """Time and size of one load.

    `size_bytes` and `descriptors` count everything that was read, including parts of remote blocks that were not
    requested, but not the seals.
    """

    seconds: float
    size_bytes: int
    descriptors: int


@contextlib.asynccontextmanager
async def open_consumer(
    config: kvflow.Config, shape: CacheShape, device: str | None = None
) -> AsyncIterator[EngineConsumer]:
    cache = BenchCache(shape, device=device)
    async with open_runtime(config, cache) as runtime:
        yield EngineConsumer(runtime, cache)


class EngineConsumer:
    """The rank of a consumer, in a child process."""

    def __init__(self, runtime: kvflow.Runtime, cache: BenchCache) -> None:
        self._runtime = runtime
        self._cache = cache

    async def load(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> list[LoadResult]:
        """Run `loads` one after another, each with its ticket, then compare every byte.

        Return the result of each load.
        """
        self._cache.poison_loads(loads)
        results = []
        for load, ticket in zip(loads, tickets, strict=True):
            request = kvflow.LoadRequest(load.request_id, ticket=ticket, block_ids=load.local_ids)
            start = time.perf_counter()
            report = await self._runtime.load_blocks(request)
            results.append(LoadResult(time.perf_counter() - start, report.bytes, report.descriptors))
        self._cache.check_loads(loads)
        return results

    async def mapping(self) -> MappingFacts:
        return mapping_of(self._runtime)


Pair: TypeAlias = tuple[Child, Child]
"""Child processes of a producer and of its consumer."""


def pair_ranks(
    shape: CacheShape, device: str | None = None, backend: str = "UCX", *, cuda_ipc: bool = False
) -> tuple[RankProcess, RankProcess]:
    """Return the descriptions of a producer and a consumer to start in child processes.

    Both caches have the shape `shape`, in host memory or on `device`. `backend`: NIXL's backend. `cuda_ipc`: the
    setting of that name, for both.
    """
    producer, consumer = (config_of(name, backend, cuda_ipc=cuda_ipc) for name in ("producer", "consumer"))
    return (
        RankProcess("producer", partial(open_producer, producer, shape, device)),
        RankProcess("consumer", partial(open_consumer, consumer, shape, device)),
    )


@contextlib.contextmanager
def open_pair(
    shape: CacheShape, environment: Environment, device: str | None = None, *, cuda_ipc: bool = False
) -> Iterator[Pair]:
    """Context manager: start a producer and a consumer in child processes, and close both at the exit."""
    with open_children(pair_ranks(shape, device, cuda_ipc=cuda_ipc), environment) as children:
        yield children["producer"], children["consumer"]


def hand_over(pair: Pair, loads: Sequence[PlannedLoad]) -> list[LoadResult]:
    """Run `loads` one after another, from the producer of `pair` to its consumer. Return the result of each load.

    Every byte is compared, and every lease must end with outcome READ.
    """
    producer, consumer = pair
    tickets = producer.run(EngineProducer.offer, loads)
    results = consumer.run(EngineConsumer.load, loads, tickets)
    producer.run(EngineProducer.end_leases)
    return results
