"""The KV cache of a rank without a model. Each 4-byte word of a producer encodes the word's position in the model.

The position is head, layer, K or V, token and element. A word is the same in every sharding of the model, so a load can
be checked between any two shardings, and a missing, stale or misplaced byte is found. Token t of block b has number b *
block_size + t. All pages are touched at the start; otherwise a transfer would pay for the first touch of a page.

The memory is advised to use huge pages. With small pages the speed of a reader over shm depends on how the producer's
pages happen to lie: with raw NIXL 16 MB took 3.4 ms from mostly contiguous pages, 4.1 ms from scattered pages, and 2.1
ms from huge pages. Huge pages make all processes alike, and give the shortest loads, which show best what kvflow adds.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from kvflow.bench.loads import PlannedLoad, SettingsError

if TYPE_CHECKING:
    import torch

ITEMSIZE = 2
PLANES = 2
"""Number of planes of a layer: K and V."""
_WORD_BYTES = 4
_WORDS_MAX = 1 << 32
_POISON_BYTE = 0xFF
_POISON = 0xFFFFFFFF
_CHECK_BLOCKS = 64
_HUGE_PAGE_BYTES = 2 << 20

Words = npt.NDArray[np.uint32]
Memory = npt.NDArray[np.uint8]


class WrongBytes(RuntimeError):
    """Error: a load succeeded, but its blocks do not hold the bytes of the producer's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Shape of a bench cache, which has `layers` fp16 tensors.

    The axes of a tensor are: K or V; block; head, then token, or the reverse (`order`); element.

    A rank of a sharded model holds `kv_heads` heads, from head `first_head` of the model on.
    """

    layers: int
    blocks: int
    kv_heads: int = 8
    block_size: int = 16
    head_size: int = 128
    order: Literal["HND", "NHD"] = "HND"
    """Order of heads and tokens inside a block."""
    first_head: int = 0

    @property
    def region_block_size_bytes(self) -> int:
        """Size in bytes of K (or V) of one block in one layer, which one descriptor covers."""
        return self.kv_heads * self.block_size * self.head_size * ITEMSIZE

    @property
    def block_descriptors(self) -> int:
        return PLANES * self.layers

    @property
    def block_size_bytes(self) -> int:
        return self.region_block_size_bytes * self.block_descriptors

    @property
    def size_bytes(self) -> int:
        return self.block_size_bytes * self.blocks

    @property
    def head_words(self) -> int:
        return self.head_size * ITEMSIZE // _WORD_BYTES

    @property
    def layer_size_bytes(self) -> int:
        return self.size_bytes // self.layers

    @property
    def pool_tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def axes(self) -> tuple[int, ...]:
        """Sizes of the axes of one layer's tensor, in memory order."""
        heads_and_tokens = (self.kv_heads, self.block_size)
        inner = heads_and_tokens if self.order == "HND" else heads_and_tokens[::-1]
        return (PLANES, self.blocks, *inner, self.head_size)

    def checked(self, option: str) -> CacheShape:
        """Return this shape, or raise SettingsError if a cache of this shape has too many words to number in 32 bits.

        The error names `option`, the command-line option that leads to the shape.
        """
        words = (self.first_head + self.kv_heads) * PLANES * self.layers * self.pool_tokens * self.head_words
        if words >= _WORDS_MAX:
            raise SettingsError(f"{option}: {self.size_bytes >> 20} MB is too large for the test pattern of 32 bits")
        return self


class BenchCache:
    """The KV cache of a rank, for benches. Each layer is an array of 4-byte words.

    The array's axes are [K or V, block, head, token, word], whatever the memory order `shape.order` is.
    """

    def __init__(self, shape: CacheShape, memory: Memory | None = None, device: str | None = None) -> None:
        """Create an unfilled cache in `memory`, or in new memory.

        Caches that never load at the same time may share memory. With a `device`, the method `tensors` returns copies
        on that device; `poison` also updates the copies, and `check` first copies from the device.
        """
        self.shape = shape
        self._device = device
        self._on_device: list[torch.Tensor] = []
        memory = allocate_memory(shape.size_bytes) if memory is None else memory
        words = memory[: shape.size_bytes].view(np.uint32)
        self._memory = words.reshape(shape.layers, *shape.axes[:-1], shape.head_words)
        self.layers = self._memory if shape.order == "HND" else self._memory.swapaxes(3, 4)

    @property
    def bases(self) -> tuple[int, ...]:
        """Start address of each layer's array."""
        return tuple(layer.ctypes.data for layer in self._memory)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the cache as an engine registers it: by layer name, one fp16 tensor with axes in memory order."""
        import torch  # imported here, since the bench's parent and the processes on raw NIXL do not need it

        layers = [torch.from_numpy(layer.view(np.float16)) for layer in self._memory]
        if self._device is not None:
            self._on_device = layers = [torch.empty_like(layer, device=self._device).copy_(layer) for layer in layers]
        return {f"layers.{index}": layer for index, layer in enumerate(layers)}

    def fill(self) -> None:
        """Write the test pattern of a producer into all blocks."""
        self.write(range(self.shape.blocks))

    def write(self, block_ids: Sequence[int]) -> None:
        """Write the test pattern of a producer into the blocks `block_ids`."""
        tokens = self._token_numbers(self.shape.block_size)[list(block_ids)]
        for index, layer in enumerate(self.layers):
            layer[:, list(block_ids)] = self._expected_words(index, tokens)

    def poison(self, block_ids: Sequence[int], layers: Iterable[int] | None = None) -> None:
        """Overwrite the blocks `block_ids`, in the given layers or in all, with a value that no producer has."""
        for index in self._layer_indices(layers):
            self.layers[index][:, list(block_ids)] = _POISON
        for layer, tensor in zip(self._memory, self._on_device, strict=False):
            tensor.copy_(tensor.new_tensor(layer.view(np.float16)))

    def check(
        self,
        block_ids: Sequence[int],
        remote_ids: Sequence[int],
        *,
        remote_block_size: int | None = None,
        layers: Iterable[int] | None = None,
    ) -> int:
        """Compare every byte of local blocks with the producer's test pattern. Return the number of bytes compared.

        The local blocks `block_ids` must hold the tokens of the producer's blocks `remote_ids`, in order.
        `remote_block_size`: the producer's block size, if different. Raise WrongBytes at the first difference.
        """
        for layer, tensor in zip(self._memory, self._on_device, strict=False):
            layer.view(np.float16)[:] = tensor.cpu().numpy()
        pool = self._token_numbers(remote_block_size or self.shape.block_size)
        tokens = pool[list(remote_ids)].reshape(-1, self.shape.block_size)
        pieces = [slice(start, start + _CHECK_BLOCKS) for start in range(0, len(block_ids), _CHECK_BLOCKS)]
        return sum(
            self._check_layer(index, block_ids[piece], tokens[piece])
            for index in self._layer_indices(layers)
            for piece in pieces
        )

    def poison_loads(self, loads: Iterable[PlannedLoad]) -> None:
        """Overwrite, with a value that no producer has, all blocks that `loads` will fill."""
        self.poison([block for load in loads for block in load.local_ids])

    def check_loads(self, loads: Sequence[PlannedLoad]) -> int:
        """Compare with the producer's test pattern every byte that `loads` have filled. Return the number of bytes."""
        local_ids = [block for load in loads for block in load.local_ids]
        return self.check(local_ids, [block for load in loads for block in load.remote_ids])

    def _check_layer(self, layer: int, block_ids: Sequence[int], tokens: Words) -> int:
        words = self.layers[layer][:, list(block_ids)]
        wrong = np.argwhere(words != self._expected_words(layer, tokens))
        if len(wrong):
            plane, block, head, token, _ = wrong[0]
            raise WrongBytes(
                f"layer {layer} {'KV'[plane]}: block {block_ids[block]}, head {self.shape.first_head + head}, token "
                f"{token} is not token {tokens[block, token]} of the producer; words that differ: {len(wrong)}"
            )
        return int(words.nbytes)

    def _token_numbers(self, block_size: int) -> Words:
        """Return the numbers of all tokens of a pool with blocks of `block_size` tokens, as an array [block, token]."""
        return np.arange(self.shape.pool_tokens, dtype=np.uint32).reshape(-1, block_size)

    def _expected_words(self, layer: int, tokens: Words) -> Words:
        """Return the words that layer `layer` of a producer has for `tokens`, an array [block, token] of token numbers.

        The result has the axes [K or V, block, head, token, word].
        """
        shape = self.shape
        heads = np.arange(shape.first_head, shape.first_head + shape.kv_heads, dtype=np.uint32)
        planes = np.arange(layer * PLANES, (layer + 1) * PLANES, dtype=np.uint32)
        rows = planes[:, None] + heads * np.uint32(shape.block_descriptors)
        places: Words = rows[:, None, :, None] * np.uint32(shape.pool_tokens) + tokens[:, None, :]
        words: Words = np.arange(shape.head_words, dtype=np.uint32)
        return places[..., None] * np.uint32(shape.head_words) + words

    def _layer_indices(self, layers: Iterable[int] | None) -> Iterable[int]:
        return range(self.shape.layers) if layers is None else layers


def allocate_memory(size_bytes: int) -> Memory:
    """Return new private memory, filled with 0xFF, aligned to a huge page, and in huge pages if the kernel has any."""
    rounded = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, rounded + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    space: Memory = np.frombuffer(memory, dtype=np.uint8)
    start = -space.ctypes.data % _HUGE_PAGE_BYTES
    aligned = space[start : start + size_bytes]
    aligned[:] = _POISON_BYTE
    return aligned
