"""Small things that several test modules need."""

from __future__ import annotations

import asyncio

import torch

from kvflow import CacheLayout, Runtime, RuntimeState


def small_cache(
    *, num_blocks: int = 8, layers: int = 2, block_size: int = 4, device: str = "cpu", fill: float = 0.0
) -> tuple[dict[str, torch.Tensor], CacheLayout]:
    """A cache of a few kilobytes, K and V stacked first, HND."""
    shape = (2, num_blocks, 2, block_size, 8)
    kv_caches = {f"layers.{index}": torch.full(shape, fill, device=device) for index in range(layers)}
    return kv_caches, CacheLayout.infer(kv_caches, order="HND", block_size=block_size)


async def leases_ended(runtime: Runtime) -> None:
    """Wait until the blocks of ended leases are back; a lease that a test left open fails it."""
    if runtime._cache is not None and runtime.state is not RuntimeState.CLOSED:
        async with asyncio.timeout(1.0):
            await runtime._cache.serving.drained()
