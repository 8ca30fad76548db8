"""A KV cache in a device's memory, whose blocks are each full of one small number.

That is enough to tell blocks of before from blocks of now, and a block that is torn from both. LBHNC has a tensor for
each layer, so a block is a piece per layer; in BLHNC a block is one dense piece, one descriptor, over all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import kvflow

VALUES = 1000
"""Whole numbers below this are exact in fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """How large a pool is and how its blocks lie. K and V of one block in one layer have 64 KiB by default."""

    layers: int
    blocks: int
    kv_heads: int = 8
    block_size: int = 16
    head_size: int = 128
    order: str = "HND"
    across_layers: bool = False
    """BLHNC in place of LBHNC."""

    @property
    def layer_block_bytes(self) -> int:
        return 4 * self.kv_heads * self.block_size * self.head_size

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes

    @property
    def piece_bytes(self) -> int:
        """What one descriptor reads of a block, at most."""
        return self.block_bytes if self.across_layers else self.layer_block_bytes

    def blocks_for(self, size_bytes: int) -> int:
        """How many blocks hold so many bytes; one at least."""
        return max(1, size_bytes // self.block_bytes)


class Pool:
    """The tensors of a cache: (block, K or V, ...) for each layer, all in one memory if blocks go across layers."""

    def __init__(self, shape: PoolShape, device: str, value: float) -> None:
        self.shape, self._device = shape, device
        heads_and_tokens = (shape.kv_heads, shape.block_size)
        inner = (2, *(heads_and_tokens if shape.order == "HND" else heads_and_tokens[::-1]), shape.head_size)
        if shape.across_layers:
            whole = torch.full((shape.blocks, shape.layers, *inner), value, dtype=torch.float16, device=device)
            layers = [whole[:, layer] for layer in range(shape.layers)]
        else:
            sizes = (shape.blocks, *inner)
            layers = [torch.full(sizes, value, dtype=torch.float16, device=device) for _ in range(shape.layers)]
        self.tensors = {f"layers.{index}": layer for index, layer in enumerate(layers)}

    def layout(self) -> kvflow.CacheLayout:
        order, block_size = self.shape.order, self.shape.block_size
        return kvflow.CacheLayout.infer(
            self.tensors, order=order, block_size=block_size, style=kvflow.KVStyle.BLOCKS_FIRST
        )

    def filling(self, block_ids: Sequence[int], value: float) -> Callable[[], None]:
        """Work for a device: give blocks a value. Ids are uploaded now, so that the work itself waits for nothing."""
        index = torch.tensor(list(block_ids)).to(self._device)

        def fill() -> None:
            for tensor in self.tensors.values():
                tensor.index_fill_(0, index, value)

        return fill

    def count_other(self, block_ids: Sequence[int], value: float) -> int:
        """How many of the blocks hold anything but the value. Waits for the device."""
        index = torch.tensor(list(block_ids)).to(self._device)
        right = torch.ones(len(block_ids), dtype=torch.bool, device=self._device)
        for tensor in self.tensors.values():
            right &= (tensor[index] == value).flatten(1).all(dim=1)
        return int((~right).sum())


def scattered_ids(seed: int, blocks: int, count: int) -> list[int]:
    """`count` different blocks in an order as in a pool after a day."""
    step = next(step for step in range(blocks * 5 // 8 | 1, 2 * blocks + 3) if math.gcd(step, blocks) == 1)
    return [(seed * 7 + index * step) % blocks for index in range(count)]
