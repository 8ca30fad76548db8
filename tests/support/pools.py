"""A KV cache in a device's memory, for tests that fill each block with one small number, or with a pattern.

One number per block distinguishes old content from new, and shows torn blocks. A pattern shows every misplaced byte. In
layout LBHNC each layer is a tensor, so a block is one piece per layer. In BLHNC a block is one dense piece over all
layers, which one descriptor covers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import kvflow

VALUES = 1000
"""Upper bound of the numbers in blocks. Integers below this are exact in fp16."""
_PRIME = 65_521  # the largest prime below 2**16, so that neighbours on any axis of a pattern differ


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """Size and layout of a pool. By default K and V of one block in one layer together have 64 KiB."""

    layers: int
    blocks: int
    kv_heads: int = 8
    block_size: int = 16
    head_size: int = 128
    order: str = "HND"
    across_layers: bool = False
    """True for layout BLHNC, False for LBHNC."""
    kv_first: bool = False
    """True if all blocks of K come before all blocks of V; False if a block has both."""
    drafts: int = 0
    """Number of layers at the end that belong to a draft model."""

    @property
    def layer_block_bytes(self) -> int:
        return 4 * self.kv_heads * self.block_size * self.head_size

    @property
    def block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes

    @property
    def piece_bytes(self) -> int:
        """Maximum bytes of a block that one descriptor covers."""
        return self.block_bytes if self.across_layers else self.layer_block_bytes

    def blocks_for(self, size_bytes: int) -> int:
        """Return the number of blocks in `size_bytes`, rounded down; at least 1."""
        return max(1, size_bytes // self.block_bytes)


class Pool:
    """The tensors of a cache. With `across_layers` they are views of one tensor."""

    def __init__(self, shape: PoolShape, device: str, value: float) -> None:
        self.shape, self._device = shape, device
        sizes = (shape.kv_heads, shape.block_size)
        inner = (*(sizes if shape.order == "HND" else sizes[::-1]), shape.head_size)
        if shape.across_layers:
            whole = torch.full((shape.blocks, shape.layers, 2, *inner), value, dtype=torch.float16, device=device)
            layers = [whole[:, layer] for layer in range(shape.layers)]
        else:
            outer = (2, shape.blocks) if shape.kv_first else (shape.blocks, 2)
            layers = [
                torch.full((*outer, *inner), value, dtype=torch.float16, device=device) for _ in range(shape.layers)
            ]
        own = shape.layers - shape.drafts
        names = [f"layers.{index}" if index < own else f"draft.{index - own}" for index in range(shape.layers)]
        self.tensors = dict(zip(names, layers, strict=True))
        self._by_block = [layer.transpose(0, 1) if shape.kv_first else layer for layer in layers]

    def layout(self) -> kvflow.CacheLayout:
        order, block_size = self.shape.order, self.shape.block_size
        style = kvflow.KVStyle.KV_FIRST if self.shape.kv_first else kvflow.KVStyle.BLOCKS_FIRST
        return kvflow.CacheLayout.infer(self.tensors, order=order, block_size=block_size, style=style)

    def filling(self, block_ids: Sequence[int], value: float) -> Callable[[], None]:
        """Return work for the device that fills blocks with a value.

        The block ids are uploaded now, so that the work itself does not wait for the upload.
        """
        index = self._index(block_ids)

        def fill() -> None:
            for tensor in self._by_block:
                tensor.index_fill_(0, index, value)

        return fill

    def count_other(self, block_ids: Sequence[int], value: float) -> int:
        """Return the number of blocks with any element other than `value`. Waits for the device."""
        index = self._index(block_ids)
        right = torch.ones(len(block_ids), dtype=torch.bool, device=self._device)
        for tensor in self._by_block:
            right &= (tensor[index] == value).flatten(1).all(dim=1)
        return int((~right).sum())

    def value_of(self, block: int) -> float | None:
        """Return the value of all elements of a block, or None if they differ."""
        value = float(self._by_block[0][block].flatten()[0])
        return None if self.count_other([block], value) else value

    def layer_values(self, block: int) -> dict[str, list[float]]:
        """Return the different values in a block, sorted, by layer name."""
        values = (sorted({*layer[block].flatten().tolist()}) for layer in self._by_block)
        return dict(zip(self.tensors, values, strict=True))

    def write_pattern(self, block_ids: Sequence[int], first_head: int) -> None:
        """Write the pattern of tokens 0, 1, ... into blocks, in the order of `block_ids`, and wait for the device."""
        for layer, tensor in enumerate(self._by_block):
            tensor.view(torch.int16)[self._index(block_ids)] = self._pattern(layer, len(block_ids), first_head)
        if next(iter(self.tensors.values())).device.type == "cuda":
            torch.cuda.synchronize()

    def count_wrong(self, block_ids: Sequence[int], first_head: int) -> int:
        """Return the number of elements in blocks that differ from what `write_pattern` would write."""
        wrong = 0
        for layer, tensor in enumerate(self._by_block):
            found = tensor.view(torch.int16)[self._index(block_ids)]
            wrong += int((found != self._pattern(layer, len(block_ids), first_head)).sum())
        return wrong

    def _pattern(self, layer: int, blocks: int, first_head: int) -> torch.Tensor:
        """Return the pattern of a layer's blocks. It depends on layer, part, head, token and element.

        Heads are counted over the model, so the pattern is the same in every sharding.
        """
        shape = self.shape
        words = torch.arange(2).view(1, 2, 1, 1, 1) + 2 * layer
        words = words * 31 + torch.arange(first_head, first_head + shape.kv_heads).view(1, 1, -1, 1, 1)
        tokens = torch.arange(blocks * shape.block_size).view(blocks, 1, 1, shape.block_size, 1)
        words = (words * 4099 + tokens) * 257 + torch.arange(shape.head_size)
        found = (words % _PRIME - (1 << 15)).to(torch.int16).to(self._device)
        return found if shape.order == "HND" else found.transpose(2, 3)

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(block_ids)).to(self._device)


def scattered_ids(seed: int, blocks: int, count: int) -> list[int]:
    """Return `count` different block ids, scattered as in a pool after a day of use."""
    step = next(step for step in range(blocks * 5 // 8 | 1, 2 * blocks + 3) if math.gcd(step, blocks) == 1)
    return [(seed * 7 + index * step) % blocks for index in range(count)]
