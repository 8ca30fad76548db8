"""A producer and a consumer in one process over real NIXL, for what only the real transport shows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import torch

from kvflow.config import Config
from kvflow.core.layout import CacheLayout
from kvflow.runtime.runtime import Runtime
from kvflow.testing.books import assert_closed


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlEngine:
    """One side: its runtime and its cache."""

    runtime: Runtime
    kv_caches: dict[str, torch.Tensor]
    layout: CacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlPair:
    """A producer whose every element is different, and a consumer whose every element is -1."""

    producer: NixlEngine
    consumer: NixlEngine


@contextlib.asynccontextmanager
async def nixl_pair(
    *, num_blocks: int = 16, block_size: int = 16, layers: int = 2, config: Config | None = None
) -> AsyncIterator[NixlPair]:
    """An open, registered pair; raises ConfigError where NIXL is not installed.

    `config` gives limits and timeouts; names and addresses are the pair's own. After a clean exit nothing may be left.
    """
    base = config or Config(engine_id="any", drain_timeout_s=1.0)
    size = (layers, num_blocks, block_size)
    async with _engine(base, "producer", size) as producer, _engine(base, "consumer", size) as consumer:
        for index, tensor in enumerate(producer.kv_caches.values()):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + index * tensor.numel())
        yield NixlPair(producer=producer, consumer=consumer)
    for engine in (producer, consumer):
        assert_closed(engine.runtime.statistics())


@contextlib.asynccontextmanager
async def _engine(base: Config, engine_id: str, size: tuple[int, int, int]) -> AsyncIterator[NixlEngine]:
    layers, num_blocks, block_size = size
    kv_caches = {f"layers.{index}": torch.full((2, num_blocks, 2, block_size, 8), -1.0) for index in range(layers)}
    layout = CacheLayout.infer(kv_caches, order="HND", block_size=block_size)
    config = replace(base, engine_id=engine_id, listen="tcp://127.0.0.1:0", transport="nixl")
    async with Runtime(config) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
        yield NixlEngine(runtime=runtime, kv_caches=kv_caches, layout=layout)
