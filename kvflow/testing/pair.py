"""A producer and a consumer in one process, with caches whose bytes can be checked: in-process, or over real NIXL."""

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
from kvflow.testing.books import assert_closed
from kvflow.testing.caches import PatternCache
from kvflow.testing.comparing import assert_loaded
from kvflow.transport.base import Transport
from kvflow.transport.inproc import InprocNetwork, InprocTransport

TransportT = TypeVar("TransportT", bound=Transport)


class CacheSize(NamedTuple):
    """Size of a test's cache, and the order of its axes; K and V come first."""

    layers: int = 2
    num_blocks: int = 16
    block_size: int = 4
    order: str = "HND"
    kv_heads: int = 2
    head_size: int = 8

    def make(self, engine_id: str) -> tuple[dict[str, torch.Tensor], PatternCache]:
        """Make the tensors of a cache, filled with the engine's pattern.

        Args:
            engine_id: Whose pattern.

        Returns:
            Tensors by layer name, of torch's default dtype, and the `PatternCache` over them. Each is (2, num_blocks,
            kv_heads, block_size, head_size) in order HND; in NHD heads and tokens of a block change places.
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
    """A side of the pair: its runtime, the transport under it, and its cache."""

    runtime: Runtime
    transports: Sequence[TransportT]
    """Transports, one for each time that a cache was registered; the last one is in use."""
    kv_caches: dict[str, torch.Tensor]
    layout: CacheLayout
    cache: PatternCache
    """Tensors slot by slot; each element says that it is this engine's, until it is written to."""

    @property
    def transport(self) -> TransportT:
        return self.transports[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Generic[TransportT]):
    """A producer and a consumer, each with a pattern in its cache."""

    producer: Engine[TransportT]
    consumer: Engine[TransportT]

    def offer(
        self, block_ids: Sequence[int], request_id: str = "req", *, ttl_s: float | None = None, reader_count: int = 1
    ) -> Lease:
        """Serve full blocks of the producer.

        Args:
            block_ids: The producer's, in prompt order.
            request_id: Whose prompt.
            ttl_s: As in `ServeRequest`.
            reader_count: As in `ServeRequest`.

        Returns:
            The lease.

        Raises:
            RequestError, RuntimeUnavailable: As `Runtime.serve_blocks`.
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
        """The request that loads what a lease offers.

        Args:
            lease: The producer's.
            block_ids: The consumer's, to fill.
            deadline_s: As in `LoadRequest`.
            cached_tokens: As in `LoadRequest`.

        Returns:
            The request, its ticket as a router would hand it over.
        """
        return LoadRequest(
            lease.request_id,
            ticket=lease.ticket.to_params(),
            block_ids=block_ids,
            deadline_s=deadline_s,
            cached_tokens=cached_tokens,
        )

    def assert_loaded(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        """Assert that loaded blocks equal the offered ones, and that all other blocks of the consumer are untouched.

        Args:
            local_ids: The consumer's.
            remote_ids: The producer's, full ones.

        Raises:
            AssertionError: Some element is wrong; it names the first place.
        """
        assert_loaded(self.consumer.cache, local_ids, self.producer.cache, remote_ids)


def block_by_block(config: Config) -> Config:
    """Have reads of a block each, so that loads of leases that grow do in small caches what they do in large ones.

    A load takes what is computed once it is worth a read, 128 KiB or more, and at most a slice. All of a test's cache
    is less, so nothing would land before the last step, and one `Progress` would be told. Here each block is read as
    it is computed (or several, if they come together), and told of.

    Args:
        config: The consumer's.

    Returns:
        A copy with `Limits.slice_bytes_max` 1.
    """
    return replace(config, limits=replace(config.limits, slice_bytes_max=1))


_QUICK, _WORLD, _SIZE = Config(engine_id="any", drain_timeout_s=1.0), World(), CacheSize()

TestEngine: TypeAlias = Engine[InprocTransport]
"""One side of an `InprocPair`: its runtime, the transport under it, and its cache."""
InprocPair: TypeAlias = Pair[InprocTransport]
"""A `Pair` by `inproc_pair`, whose transports have faults to script."""
NixlPair: TypeAlias = Pair[Transport]
"""A `Pair` by `nixl_pair`."""


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
    """An open, registered pair, over the in-process transport.

    Args:
        num_blocks: Of each cache.
        block_size: Tokens in a block.
        layers: Of each cache.
        config: Limits and timeouts; names, addresses and transports are the pair's own.
        observers: Of both runtimes.
        producer_world: The producer's, such as one with a `ManualClock`; its transport is not used.
        consumer_world: The consumer's, likewise.
        producer_parts: Parts of the producer's runtime.
        consumer_parts: Parts of the consumer's runtime.

    Returns:
        A context manager; its block gets the pair.

    Raises:
        AssertionError: On a clean exit, if something is under way or not closed; it says what.
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
    """A pair as `inproc_pair`, over real NIXL, for what only that shows.

    Args:
        config: Limits and timeouts; names and addresses are the pair's own.
        size: Of each cache.
        producer_parts: Parts of the producer's runtime.
        consumer_parts: Parts of the consumer's runtime.

    Returns:
        A context manager; its block gets the pair.

    Raises:
        ConfigError: NIXL is not installed.
        AssertionError: As for `inproc_pair`.
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
    """An open runtime on a transport of its own, its registered cache full of its pattern; after a clean exit nothing
    may be left.
    """
    config = replace(base, engine_id=engine_id, listen="tcp://127.0.0.1:0")
    kv_caches, cache = size.make(engine_id)
    made: list[TransportT] = []

    def make_and_keep(config: Config, agent_name: str) -> TransportT:
        made.append(make(config, agent_name))
        return made[-1]

    strict = replace(world, transport=make_and_keep, forgives=False)
    async with Runtime(config, observers=observers, world=strict, parts=parts) as runtime:
        await runtime.register_kv_caches(kv_caches, cache.layout)
        yield Engine(runtime=runtime, transports=made, kv_caches=kv_caches, layout=cache.layout, cache=cache)
    assert_closed(runtime.statistics())
