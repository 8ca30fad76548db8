"""The paged KV cache: which blocks are free, and where in memory the keys and values of a token are.

A sequence owns a list of blocks, its block table. The token at `position` is in block `table[position // block_size]`,
at offset `position % block_size`. The blocks of a sequence may be anywhere in the cache.

Theory: a block is either free or has exactly one owner, so free + used = all at every moment. `BlockPool` refuses any
call that would break this, and changes nothing then.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NewType

import torch

BlockId = NewType("BlockId", int)


class OutOfBlocksError(RuntimeError):
    """Fewer blocks are free than were requested. No block was allocated."""


def blocks_for(token_count: int, block_size: int) -> int:
    """Return the number of blocks that hold `token_count` tokens; the last block may be partly filled."""
    return -(-token_count // block_size)


class BlockPool:
    """The block ids of one cache: each is free or used, and allocated to one owner at a time."""

    def __init__(self, block_count: int, *, shuffle_seed: int | str | None = None) -> None:
        """Make a pool of free blocks. With `shuffle_seed` it gives out scattered blocks, as after long use."""
        if block_count < 1:
            raise ValueError(f"block_count: a pool needs at least one block, got {block_count}")
        block_ids = [BlockId(index) for index in range(block_count)]
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(block_ids)
        self._free = deque(block_ids)
        self._used: set[BlockId] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[BlockId]:
        """Take that many blocks, all or none."""
        if count > self.free_count:
            raise OutOfBlocksError(f"blocks: {count} wanted, {self.free_count} free")
        block_ids = [self._free.popleft() for _ in range(count)]
        self._used.update(block_ids)
        return block_ids

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Give blocks back, all or none; a block that is not in use is an error."""
        returned = set(block_ids)
        if len(returned) != len(block_ids) or not returned <= self._used:
            raise ValueError(f"blocks {list(block_ids)}: not in use, or given back twice")
        self._used -= returned
        self._free.extend(block_ids)


class PagedKVCache:
    """One tensor per layer, allocated once and never moved, so that other code can register its memory."""

    def __init__(
        self,
        layer_names: Iterable[str],
        *,
        block_count: int,
        kv_head_count: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        # K and V, blocks, then HND inside a block (heads, tokens, values).
        shape = (2, block_count, kv_head_count, block_size, head_dim)
        # `zeros`, not `empty`: every page is touched now, so the first transfer has no page faults.
        self.tensors = {name: torch.zeros(shape, dtype=dtype) for name in layer_names}
        self.block_count = block_count
        self.block_size = block_size

    def pages(self, block_ids: Sequence[BlockId]) -> Pages:
        """Return the view of the cache through the block table of one sequence."""
        return Pages(self, block_ids)


class Pages:
    """The keys and values of one sequence, addressed by position through its block table."""

    def __init__(self, cache: PagedKVCache, block_ids: Sequence[BlockId]) -> None:
        self._tensors = cache.tensors
        self._block_size = cache.block_size
        self._table = torch.tensor(block_ids, dtype=torch.long)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        return len(self._table) * self._block_size

    def write(self, layer_name: str, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store [tokens, heads, head_dim] keys and values from position `start` on."""
        positions = torch.arange(start, start + len(keys))
        blocks = self._table[positions // self._block_size]
        offsets = positions % self._block_size
        tensor = self._tensors[layer_name]
        tensor[0, blocks, :, offsets] = keys
        tensor[1, blocks, :, offsets] = values

    def read(self, layer_name: str, token_count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the first `token_count` tokens, each [heads, tokens, head_dim]."""
        table = self._table[: blocks_for(token_count, self._block_size)]
        both = self._tensors[layer_name][:, table].transpose(1, 2).flatten(2, 3)
        keys, values = both[:, :, :token_count]
        return keys, values
