"""A producer and a consumer in one process, on the in-process transport, with caches whose bytes can be checked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvflow.config import Config
from kvflow.core.layout import CacheLayout
from kvflow.runtime.loading import LoadRequest
from kvflow.runtime.records import Observer
from kvflow.runtime.runtime import Runtime, RuntimeStatistics
from kvflow.runtime.serving import Lease, ServeRequest
from kvflow.runtime.world import World
from kvflow.transport.inproc import InprocNetwork, InprocTransport

_UNTOUCHED = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TestEngine:
    """One side: its runtime, the transport under it, and its cache."""

    __test__ = False

    runtime: Runtime
    transport: InprocTransport
    kv_caches: dict[str, torch.Tensor]
    layout: CacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class InprocPair:
    """A producer whose every element is different, and a consumer whose every element is -1."""

    producer: TestEngine
    consumer: TestEngine

    def offer(
        self, block_ids: Sequence[int], request_id: str = "req", *, ttl_s: float | None = None, reader_count: int = 1
    ) -> Lease:
        """Serve full blocks."""
        request = ServeRequest(
            request_id,
            block_ids=block_ids,
            num_tokens=len(block_ids) * self.producer.layout.block_size,
            ttl_s=ttl_s,
            reader_count=reader_count,
        )
        return self.producer.runtime.serve_blocks(request)

    @staticmethod
    def wanted(lease: Lease, block_ids: Sequence[int], *, deadline_s: float | None = None) -> LoadRequest:
        """The request that loads a lease's blocks into `block_ids`, its ticket as a router would hand it over."""
        return LoadRequest(
            lease.request_id, ticket=lease.ticket.to_params(), block_ids=block_ids, deadline_s=deadline_s
        )

    def assert_loaded(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        """The consumer's `local_ids` equal the producer's `remote_ids`; all its other blocks are untouched."""
        others = [block for block in range(self.consumer.layout.num_blocks) if block not in set(local_ids)]
        for name, ours in self.consumer.kv_caches.items():
            theirs = self.producer.kv_caches[name]
            assert torch.equal(ours[:, list(local_ids)], theirs[:, list(remote_ids)]), f"{name}: blocks differ"
            assert (ours[:, others] == _UNTOUCHED).all(), f"{name}: a block was written that was not asked for"


@contextlib.asynccontextmanager
async def inproc_pair(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    layers: int = 2,
    config: Config | None = None,
    observers: Sequence[Observer] = (),
    producer_world: World = World(),  # noqa: B008 - frozen
    consumer_world: World = World(),  # noqa: B008 - frozen
) -> AsyncIterator[InprocPair]:
    """An open, registered pair. `config` gives limits and timeouts; names, addresses and transports are the pair's own.

    Another world may have another clock, such as a `ManualClock`.

    On a clean exit everything must be quiet and everything closed, or AssertionError says what is not.
    """
    base = config or Config(engine_id="any", drain_timeout_s=1.0)
    network = InprocNetwork()
    async with (
        _engine(base, "producer", network, producer_world, observers, (layers, num_blocks, block_size)) as producer,
        _engine(base, "consumer", network, consumer_world, observers, (layers, num_blocks, block_size)) as consumer,
    ):
        _number_elements(producer.kv_caches)
        yield InprocPair(producer=producer, consumer=consumer)
    for engine in (producer, consumer):
        assert_closed(engine.runtime.statistics())


@contextlib.asynccontextmanager
async def _engine(
    base: Config,
    engine_id: str,
    network: InprocNetwork,
    world: World,
    observers: Sequence[Observer],
    size: tuple[int, int, int],
) -> AsyncIterator[TestEngine]:
    config = replace(base, engine_id=engine_id, listen="tcp://127.0.0.1:0", transport="inproc")
    layers, num_blocks, block_size = size
    shape = (2, num_blocks, 2, block_size, 8)
    kv_caches = {f"layers.{index}": torch.full(shape, _UNTOUCHED) for index in range(layers)}
    layout = CacheLayout.infer(kv_caches, order="HND", block_size=block_size)
    made: list[InprocTransport] = []

    def make(_: Config, agent_name: str) -> InprocTransport:
        made.append(InprocTransport(agent_name, network))
        return made[0]

    async with Runtime(config, observers=observers, world=replace(world, transport=make)) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
        yield TestEngine(runtime=runtime, transport=made[0], kv_caches=kv_caches, layout=layout)


def _number_elements(kv_caches: dict[str, torch.Tensor]) -> None:
    for index, tensor in enumerate(kv_caches.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + index * tensor.numel())


def assert_quiet(statistics: RuntimeStatistics) -> None:
    """Nothing is under way: all blocks free, no load, lease, quarantine or read (invariant I5)."""
    assert statistics.buffers_used == 0, f"buffers in use: {statistics.buffers_used}"
    blocks, serving, loading = statistics.blocks, statistics.serving, statistics.loading
    if blocks is not None:
        assert blocks.free == blocks.total, f"blocks in use: {blocks}"
    if serving is not None:
        assert serving.open_leases == 0, f"open leases: {serving}"
    if loading is not None:
        assert (loading.open_loads, loading.quarantines) == (0, 0), f"open loads: {loading}"
    assert statistics.transport.open_reads == 0, f"open reads: {statistics.transport}"


def assert_closed(statistics: RuntimeStatistics) -> None:
    """A closed runtime has left nothing behind: no task, thread, peer, registration or read."""
    assert_quiet(statistics)
    transport = statistics.transport
    left = (statistics.tasks, transport.open_peers, transport.open_spans, transport.open_threads, len(statistics.peers))
    assert left == (0, 0, 0, 0, 0), f"left behind (tasks, peers, spans, threads, peer objects): {left}"
