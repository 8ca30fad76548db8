"""A KV cache in a device's memory, whose blocks are each full of one small number.

That is enough to tell blocks of before from blocks of now, and a block that is torn from both; `PatternCache` tells
apart every word, in host memory. LBHNC has a tensor of its own for each layer, so a block is a piece per layer; in
BLHNC a block is one dense piece over all layers, which NIXL reads with one descriptor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvflow

if TYPE_CHECKING:
    import torch

ITEMSIZE = 2
VALUES = 1000
"""Whole numbers below this are exact in fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """How large a pool is and how its blocks lie. A piece has K and V of one block in one layer: 64 KiB by default."""

    layers: int
    blocks: int
    kv_heads: int = 8
    block_size: int = 16
    head_size: int = 128
    order: str = "HND"
    across_layers: bool = False
    """BLHNC in place of LBHNC."""

    @property
    def piece_bytes(self) -> int:
        """What one descriptor reads of a block, at most."""
        return self.layer_block_bytes * (self.layers if self.across_layers else 1)

    @property
    def layer_block_bytes(self) -> int:
        return 2 * self.kv_heads * self.block_size * self.head_size * ITEMSIZE

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes

    def blocks_for(self, size_bytes: int) -> int:
        """How many blocks hold so many bytes; one at least."""
        return max(1, size_bytes // self.block_bytes)


class Pool:
    """The tensors of a cache on a device."""

    def __init__(self, shape: PoolShape, device: str, value: float) -> None:
        self.shape = shape
        self.tensors = make_tensors(shape, device, value)

    def layout(self) -> kvflow.CacheLayout:
        return kvflow.CacheLayout.infer(
            self.tensors,
            order=self.shape.order,
            block_size=self.shape.block_size,
            style=kvflow.KVStyle.BLOCKS_FIRST,
        )

    def filling(self, block_ids: Sequence[int], value: float) -> Callable[[], None]:
        """Work for a device: give blocks a value. Ids are uploaded now, so that the work itself waits for nothing."""
        index = self._index(block_ids)

        def fill() -> None:
            for tensor in self.tensors.values():
                tensor.index_fill_(0, index, value)

        return fill

    def count_other(self, block_ids: Sequence[int], value: float) -> int:
        """How many of the blocks hold anything but the value. Waits for the device."""
        index = self._index(block_ids)
        right = None
        for tensor in self.tensors.values():
            here = (tensor[index] == value).flatten(1).all(dim=1)
            right = here if right is None else right & here
        return len(block_ids) - (0 if right is None else int(right.sum()))

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.tensor(list(block_ids), dtype=torch.int64).to(next(iter(self.tensors.values())).device)


def make_tensors(shape: PoolShape, device: str, value: float) -> dict[str, torch.Tensor]:
    """One tensor (block, K or V, ...) for each layer, all in one memory if blocks go across layers."""
    import torch

    heads_and_tokens = (shape.kv_heads, shape.block_size)
    inner = (2, *(heads_and_tokens if shape.order == "HND" else heads_and_tokens[::-1]), shape.head_size)

    def full(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, value, dtype=torch.float16, device=device)

    if shape.across_layers:
        whole = full(shape.blocks, shape.layers, *inner)
        return {f"layers.{index}": whole[:, index] for index in range(shape.layers)}
    return {f"layers.{index}": full(shape.blocks, *inner) for index in range(shape.layers)}


def scattered_ids(seed: int, blocks: int, count: int) -> list[int]:
    """`count` different blocks in an order as in a pool after a day."""
    step = next(step for step in range(blocks * 5 // 8 | 1, 2 * blocks + 3) if math.gcd(step, blocks) == 1)
    return [(seed * 7 + index * step) % blocks for index in range(count)]
