"""Small things that several test modules need."""

from __future__ import annotations

import torch

from kvflow import CacheLayout


def small_cache(
    *, num_blocks: int = 8, layers: int = 2, block_size: int = 4, device: str = "cpu", fill: float = 0.0
) -> tuple[dict[str, torch.Tensor], CacheLayout]:
    """A cache of a few kilobytes, K and V stacked first, HND."""
    shape = (2, num_blocks, 2, block_size, 8)
    kv_caches = {f"layers.{index}": torch.full(shape, fill, device=device) for index in range(layers)}
    return kv_caches, CacheLayout.infer(kv_caches, order="HND", block_size=block_size)
