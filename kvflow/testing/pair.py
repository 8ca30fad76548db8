"""A producer and a consumer for tests, in one process, over the in-process transport or over real NIXL."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch

from kvflow.config import Config
from kvflow.core.cache.layout import CacheLayout
from kvflow.runtime.load.requests import LoadRequest
from kvflow.runtime.part import Part
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.runtime.records import Observer
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.world import World, make_transport
from kvflow.testing.accounting import assert_closed
from kvflow.testing.caches import PatternCache
from kvflow.testing.comparing import assert_loaded
from kvflow.transport.base import Transport
from kvflow.transport.inproc import InprocNetwork, InprocTransport

TransportT = TypeVar("TransportT", bound=Transport)


class CacheSize(NamedTuple):
    """Size and axis order of a KV cache for tests. Each layer is one tensor with K and V on the first axis."""

    layers: int = 2
    num_blocks: int = 16
    block_size: int = 4
    order: str = "HND"
    kv_heads: int = 2
    head_size: int = 8

    def make(self, engine_id: str) -> tuple[dict[str, torch.Tensor], PatternCache]:
        """Create the tensors of a KV cache, and fill them with the pattern of an engine.

        Args:
            engine_id: Name of the engine; the pattern depends on it.

        Returns:
            The tensors by layer name, in torch's default dtype, and a `PatternCache` over them. Each tensor has shape
            (2, num_blocks, kv_heads, block_size, head_size) for order HND, and (2, num_blocks, block_size, kv_heads,
            head_size) for order NHD.
        """
        inner = (self.block_size, self.kv_heads) if self.order == "NHD" else (self.kv_heads, self.block_size)
        shape = (2, self.num_blocks, *inner, self.head_size)
        kv_caches = {f"layers.{index}": torch.empty(shape) for index in range(self.layers)}
        layout = CacheLayout.infer(kv_caches, order=self.order, block_size=self.block_size, style="kv_first")
        cache = PatternCache(engine_id, kv_caches, layout)
        cache.fill()
        return kv_caches, cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine(Generic[TransportT]):
    """One engine of a test: a runtime with its transport and its registered KV cache."""

    runtime: Runtime
    transports: Sequence[TransportT]
    """Transports of the runtime, one for each registration of a KV cache. The last one is in use."""
    kv_caches: dict[str, torch.Tensor]
    layout: CacheLayout
    cache: PatternCache
    """View of the registered tensors, to check their content slot by slot; at first filled with the engine's pattern.
    """

    @property
    def transport(self) -> TransportT:
        return self.transports[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Generic[TransportT]):
    """A producer engine and a consumer engine of a test. Each KV cache is filled with the pattern of its engine."""

    producer: Engine[TransportT]
    consumer: Engine[TransportT]

    def offer(
        self, block_ids: Sequence[int], request_id: str = "req", *, ttl_s: float | None = None, reader_count: int = 1
    ) -> Lease:
        """Offer full blocks of the producer by `Runtime.serve_blocks`.

        Args:
            block_ids: Ids of the producer's blocks, in prompt order.
            request_id: Id of the request.
            ttl_s: Seconds until the lease expires; None: Config.lease_ttl_s.
            reader_count: Number of engines that will read the blocks.

        Returns:
            The lease of the offer.

        Raises:
            RequestError: A block id or another argument is invalid.
            RuntimeUnavailable: The producer's runtime drains, is closed, or has no KV cache.
        """
        request = ServeRequest(
            request_id,
            block_ids=block_ids,
            num_tokens=len(block_ids) * self.producer.layout.block_size,
            ttl_s=ttl_s,
            reader_count=reader_count,
        )
        return self.producer.runtime.serve_blocks(request)

    @staticmethod
    def wanted(
        lease: Lease, block_ids: Sequence[int], *, deadline_s: float | None = None, cached_tokens: int = 0
    ) -> LoadRequest:
        """Return a request with which the consumer loads the blocks of `lease`.

        Args:
            lease: Lease of the producer.
            block_ids: Ids of the consumer's blocks to fill, in prompt order.
            deadline_s: Seconds that the load may take; None: Config.load_deadline_s.
            cached_tokens: Number of leading tokens that are not loaded.

        Returns:
            The request, with the ticket as a dict of JSON types, as a router carries it.
        """
        return LoadRequest(
            lease.request_id,
            ticket=lease.ticket.to_params(),
            block_ids=block_ids,
            deadline_s=deadline_s,
            cached_tokens=cached_tokens,
        )

    def assert_loaded(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        """Assert that loaded blocks equal the offered blocks, and that no other block of the consumer was written to.

        Args:
            local_ids: Ids of the consumer's loaded blocks, in prompt order.
            remote_ids: Ids of the producer's offered blocks, in prompt order; all are full.

        Raises:
            AssertionError: An element is wrong.
        """
        assert_loaded(self.consumer.cache, local_ids, self.producer.cache, remote_ids)


def block_by_block(config: Config) -> Config:
    """Return a config with which a consumer reads each block of a growing lease once the block is computed.

    Normally a load posts a read once 128 KiB, or a slice, are computed. A test's KV cache is smaller, so it would be
    read at the end, with one `Progress`. Blocks that are computed together may share a read.

    Args:
        config: Config of the consumer.

    Returns:
        A copy of `config` with 1 as `Limits.slice_bytes_max`.
    """
    return replace(config, limits=replace(config.limits, slice_bytes_max=1))


_QUICK, _WORLD, _SIZE = Config(engine_id="any", drain_timeout_s=1.0), World(), CacheSize()

TestEngine: TypeAlias = Engine[InprocTransport]
"""An `Engine` over the in-process transport, on which a test can script faults."""
InprocPair: TypeAlias = Pair[InprocTransport]
"""A `Pair` over the in-process transport, on which a test can script faults. `inproc_pair` yields it."""
NixlPair: TypeAlias = Pair[Transport]
"""A `Pair` over real NIXL. `nixl_pair` yields it."""


@contextlib.asynccontextmanager
async def inproc_pair(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    layers: int = 2,
    config: Config = _QUICK,
    observers: Sequence[Observer] = (),
    producer_world: World = _WORLD,
    consumer_world: World = _WORLD,
    producer_parts: Sequence[Part] = (),
    consumer_parts: Sequence[Part] = (),
) -> AsyncIterator[InprocPair]:
    """Open a producer and a consumer over the in-process transport, each with a registered KV cache.

        async with inproc_pair() as pair:
            lease = pair.offer([1, 2])
            await pair.consumer.runtime.load_blocks(pair.wanted(lease, [5, 6]))
            pair.assert_loaded([5, 6], [1, 2])

    Args:
        num_blocks: Number of blocks in each KV cache.
        block_size: Number of tokens in a block.
        layers: Number of layers in each KV cache.
        config: Limits and timeouts of both runtimes; engine id, address and transport are replaced.
        observers: Observers of both runtimes.
        producer_world: `World` of the producer's runtime, for example with a `ManualClock`. Its transport is replaced.
        consumer_world: `World` of the consumer's runtime. Its transport is replaced.
        producer_parts: Optional features of the producer's runtime, as for `Runtime(config, parts=...)`.
        consumer_parts: Optional features of the consumer's runtime.

    Returns:
        An async context manager that yields the pair, and closes both runtimes at the end.

    Raises:
        AssertionError: The `async with` block succeeded, but a closed runtime left something behind (`assert_closed`).
    """
    base, network = replace(config, transport="inproc"), InprocNetwork()
    size = CacheSize(layers, num_blocks, block_size)

    def make(_: Config, agent_name: str) -> InprocTransport:
        return InprocTransport(agent_name, network)

    common: dict[str, Any] = {"observers": observers, "size": size}
    async with (
        open_engine("producer", base, make, world=producer_world, parts=producer_parts, **common) as producer,
        open_engine("consumer", base, make, world=consumer_world, parts=consumer_parts, **common) as consumer,
    ):
        yield Pair(producer=producer, consumer=consumer)


@contextlib.asynccontextmanager
async def nixl_pair(
    *,
    config: Config = _QUICK,
    size: CacheSize = _SIZE,
    producer_parts: Sequence[Part] = (),
    consumer_parts: Sequence[Part] = (),
) -> AsyncIterator[NixlPair]:
    """Open a producer and a consumer over real NIXL, each with a registered KV cache.

    Args:
        config: Limits and timeouts of both runtimes; engine id, address and transport are replaced.
        size: Size of each KV cache.
        producer_parts: Optional features of the producer's runtime, as for `Runtime(config, parts=...)`.
        consumer_parts: Optional features of the consumer's runtime.

    Returns:
        An async context manager that yields the pair, and closes both runtimes at the end.

    Raises:
        ConfigError: NIXL is not installed.
        AssertionError: The `async with` block succeeded, but a closed runtime left something behind (`assert_closed`).
    """
    base = replace(config, transport="nixl")
    async with (
        open_engine("producer", base, make_transport, size=size, parts=producer_parts) as producer,
        open_engine("consumer", base, make_transport, size=size, parts=consumer_parts) as consumer,
    ):
        yield Pair(producer=producer, consumer=consumer)


@contextlib.asynccontextmanager
async def open_engine(
    engine_id: str,
    base: Config,
    make: Callable[[Config, str], TransportT],
    *,
    world: World = _WORLD,
    observers: Sequence[Observer] = (),
    size: CacheSize = _SIZE,
    parts: Sequence[Part] = (),
) -> AsyncIterator[Engine[TransportT]]:
    """Open a runtime, and register a KV cache filled with the engine's pattern. Yield both as an `Engine`.

    `make(config, name)` creates the runtime's transport. At the end of the `async with` block, close the runtime. If
    the block succeeded, assert that the closed runtime left nothing behind (`assert_closed`).
    """
    config = replace(base, engine_id=engine_id, listen="tcp://127.0.0.1:0")
    kv_caches, cache = size.make(engine_id)
    made: list[TransportT] = []

    def make_and_keep(config: Config, agent_name: str) -> TransportT:
        made.append(make(config, agent_name))
        return made[-1]

    strict = replace(world, transport=make_and_keep, logs_observer_errors=False)
    async with Runtime(config, observers=observers, world=strict, parts=parts) as runtime:
        await runtime.register_kv_caches(kv_caches, cache.layout)
        yield Engine(runtime=runtime, transports=made, kv_caches=kv_caches, layout=cache.layout, cache=cache)
    assert_closed(runtime.statistics())
