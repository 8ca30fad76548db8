"""A rank's cache: every 4-byte word of a producer's says which layer, part, head, token and element it is.

The word is the same in every cut of the model, so a load can be checked however the two sides are cut. Tokens are
counted over a producer's pool: token t of block b is number b * block_size + t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvflow.cli.bench.cache import Words, WrongBytes, allocate
from kvflow.cli.topology_bench.cuts import HEAD_SIZE, ITEMSIZE, MODEL_KV_HEADS, PARTS, Cut, Order
from kvflow.cli.topology_bench.settings import TopologySettings

POISON = 0xFFFFFFFF
_WORD_BYTES = 4
_HEAD_WORDS = HEAD_SIZE * ITEMSIZE // _WORD_BYTES

Tokens = npt.NDArray[np.uint32]


def allocate_layers(settings: TopologySettings, cuts: Sequence[Cut]) -> tuple[Words, ...]:
    """Memory for a cache in which each of these ranks has room, poisoned; the ranks share it."""
    size_bytes = max(settings.cache_bytes(cut) for cut in cuts)
    words: Words = allocate(size_bytes).view(np.uint32)
    words[:] = POISON
    return tuple(words.reshape(settings.layers, -1))


class RankCache:
    """What one rank sees in its memory: per layer an array (K and V, block, head, token, word), whatever lies where."""

    def __init__(self, settings: TopologySettings, cut: Cut, memory: Sequence[Words]) -> None:
        self._settings = settings
        self.cut = cut
        blocks, size, heads = settings.pool_tokens // cut.block_size, cut.block_size, cut.kv_heads
        inner = (heads, size) if cut.order is Order.HND else (size, heads)
        self._shape = (PARTS, blocks, *inner, _HEAD_WORDS)
        count = int(np.prod(self._shape))
        self._memory = [layer[:count].reshape(self._shape) for layer in memory]
        self.layers = [layer if cut.order is Order.HND else layer.swapaxes(2, 3) for layer in self._memory]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The cache as an engine holds it: one fp16 tensor per layer, its axes in the order of memory."""
        return {f"layers.{index}": torch.from_numpy(layer.view(np.float16)) for index, layer in enumerate(self._memory)}

    def fill(self) -> None:
        """Write what a producer holds."""
        tokens = np.arange(self._settings.pool_tokens, dtype=np.uint32).reshape(-1, self.cut.block_size)
        for index, layer in enumerate(self.layers):
            layer[:] = self._expected(index, tokens)

    def poison(self, block_ids: Sequence[int], layers: Sequence[int]) -> None:
        """Overwrite blocks with what no producer holds."""
        for index in layers:
            self.layers[index][:, list(block_ids)] = POISON

    def check(
        self, block_ids: Sequence[int], remote_ids: Sequence[int], remote_block_size: int, layers: Sequence[int]
    ) -> int:
        """Compare every byte of these blocks in `layers` with what producers have in `remote_ids`; how many bytes."""
        tokens = self._tokens(remote_ids, remote_block_size)
        checked_bytes = 0
        for index in layers:
            found = self.layers[index][:, list(block_ids)]
            wrong = np.argwhere(found != self._expected(index, tokens))
            if len(wrong):
                self._refuse(index, block_ids, wrong)
            checked_bytes += found.nbytes
        return checked_bytes

    def _tokens(self, remote_ids: Sequence[int], remote_block_size: int) -> Tokens:
        """Which tokens of the producer's pool fill each of our blocks."""
        pool = np.arange(self._settings.pool_tokens, dtype=np.uint32).reshape(-1, remote_block_size)
        tokens: Tokens = pool[list(remote_ids)].reshape(-1, self.cut.block_size)
        return tokens

    def _expected(self, layer: int, tokens: Tokens) -> npt.NDArray[Any]:
        """The words of blocks that hold these tokens, as (K and V, block, head, token, word)."""
        parts = np.arange(layer * PARTS, (layer + 1) * PARTS, dtype=np.uint32)
        heads = parts[:, None] * np.uint32(MODEL_KV_HEADS) + np.array(self.cut.heads, dtype=np.uint32)
        rows = (heads * np.uint32(self._settings.pool_tokens))[:, None, :, None] + tokens[:, None, :]
        words: npt.NDArray[Any] = rows[..., None] * np.uint32(_HEAD_WORDS) + np.arange(_HEAD_WORDS, dtype=np.uint32)
        return words

    def _refuse(self, layer: int, block_ids: Sequence[int], wrong: npt.NDArray[np.intp]) -> None:
        part, block, head, token, _ = wrong[0]
        raise WrongBytes(
            f"{self.cut}: layer {layer} {'KV'[part]}: block {block_ids[block]}, head {self.cut.heads[head]}, "
            f"token {token} is not what the producer has; {len(wrong)} words of the layer are wrong"
        )
