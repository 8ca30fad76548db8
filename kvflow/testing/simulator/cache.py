"""The cache of one rank, in which every value says which prompt, token, part, head and place it belongs to.

So whatever lies in a block can be judged: the right bytes of the right prompt, or those of an earlier owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvflow.core.cache.layout import CacheLayout
from kvflow.testing.simulator.settings import MODEL_KV_HEADS, Shape

HEAD_SIZE = 4
TOKENS_MAX = 64
_PARTS = 2
_PATTERN: npt.NDArray[np.int32] = np.arange(_PARTS * TOKENS_MAX * MODEL_KV_HEADS * HEAD_SIZE, dtype=np.int32).reshape(
    _PARTS, TOKENS_MAX, MODEL_KV_HEADS, HEAD_SIZE
)
_NUMBER_SHIFT = 12
assert _PATTERN.size <= 1 << _NUMBER_SHIFT

Ints = npt.NDArray[np.int32]


class RankCache:
    """One layer, K and V stacked first, 32-bit values; kvflow sees them as floats."""

    def __init__(self, shape: Shape, tp_rank: int) -> None:
        heads = MODEL_KV_HEADS // shape.tp_size
        self.block_size = shape.block_size
        self._heads = slice(tp_rank * heads, (tp_rank + 1) * heads)
        self._swap = shape.order == "HND"
        inner = (heads, shape.block_size) if self._swap else (shape.block_size, heads)
        self._values: Ints = np.zeros((_PARTS, shape.num_blocks, *inner, HEAD_SIZE), dtype=np.int32)
        tensor = torch.from_numpy(self._values.view(np.float32))
        self.tensors = {"layers.0": tensor}
        self.layout = CacheLayout.infer(self.tensors, order=shape.order, block_size=shape.block_size)
        self._address = int(self._values.ctypes.data)
        self._part_bytes = self._values.nbytes // _PARTS
        self._block_bytes = self._part_bytes // shape.num_blocks

    def write(self, number: int, block_ids: Sequence[int]) -> None:
        """The start of prompt `number`, as an engine that has computed it."""
        if block_ids:
            self._values[:, list(block_ids)] = self._wanted(number, len(block_ids))

    def poison(self, number: int, block_ids: Sequence[int]) -> None:
        """What the next owner of freed blocks writes there."""
        self._values[:, list(block_ids)] = -1 - number

    def poison_all(self, number: int) -> None:
        self._values.fill(-1 - number)

    def wrong_token(self, number: int, start: int, stop: int, block_ids: Sequence[int]) -> str | None:
        """What is wrong with tokens `start` to `stop` of a prompt, whose last blocks these are; None if nothing is."""
        size = self.block_size
        first = -(-stop // size) * size - len(block_ids) * size
        found = self._tokens(block_ids)[:, start - first : stop - first]
        wanted = _PATTERN[:, start:stop, self._heads] + (number << _NUMBER_SHIFT)
        if np.array_equal(found, wanted):
            return None
        part, token, head, place = (int(axis[0]) for axis in np.nonzero(found != wanted))
        value = int(found[part, token, head, place])
        whose = f"prompt {value >> _NUMBER_SHIFT}" if value >= 0 else f"a later owner ({-1 - value})"
        block = block_ids[(start - first + token) // size]
        return f"token {start + token} (block {block}, part {part}, head {head}) is of {whose}, not of prompt {number}"

    def blocks_of(self, address: int, size_bytes: int) -> range:
        """Which blocks a piece of memory touches; none if it lies elsewhere."""
        offset = address - self._address
        if not 0 <= offset < self._part_bytes * _PARTS:
            return range(0)
        offset %= self._part_bytes
        return range(offset // self._block_bytes, (offset + size_bytes - 1) // self._block_bytes + 1)

    def _tokens(self, block_ids: Sequence[int]) -> Ints:
        """A copy of blocks in prompt order, as (part, token, head, value)."""
        blocks = self._values[:, list(block_ids)]
        if self._swap:
            blocks = blocks.swapaxes(2, 3)
        return blocks.reshape(_PARTS, -1, blocks.shape[3], HEAD_SIZE)

    def _wanted(self, number: int, blocks: int) -> Ints:
        tokens = _PATTERN[:, : blocks * self.block_size, self._heads] + np.int32(number << _NUMBER_SHIFT)
        shaped: Ints = tokens.reshape(_PARTS, blocks, self.block_size, -1, HEAD_SIZE)
        return shaped.swapaxes(2, 3) if self._swap else shaped
