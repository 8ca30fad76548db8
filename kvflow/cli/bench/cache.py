"""The imaginary KV cache of one process: every 4-byte word of the producer's says where it lies.

The content of a word is its index in the whole cache, so a byte that is missing, stale or in the wrong place shows. All
pages are touched at the start: the first touch of a page inside a transfer would be measured otherwise.

The memory asks for huge pages. With small ones a process keeps, for life, whichever free pages the kernel had left, and
a reader over shm pays for how its producer's lie: 16 MB by (b) took 3.4 ms from a producer whose pages mostly follow
each other, 4.1 ms from one whose pages lie at random, 2.1 ms from huge ones. Equal contenders differed by a quarter.
Huge pages are alike in all processes; as they leave a load the least time, they hide least of what kvflow adds to it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvflow.cli.bench.settings import CacheShape

_WORD_BYTES = 4
_POISON = 0xFFFFFFFF
_CHECK_BLOCKS = 64
_SAMPLE_BLOCKS = 8
_HUGE_PAGE_BYTES = 2 << 20

Words = npt.NDArray[np.uint32]


class WrongBytes(RuntimeError):
    """A load ended well, and its blocks do not hold what the producer has."""


class BenchCache:
    """One array of words per layer, of shape (2, blocks, words of a block)."""

    def __init__(self, shape: CacheShape, *, filled: bool) -> None:
        if shape.size_bytes // _WORD_BYTES >= _POISON:
            raise ValueError(f"cache of {shape.size_bytes} bytes: the pattern has 32 bits and does not reach that far")
        self.shape = shape
        self._block_words = shape.region_block_size_bytes // _WORD_BYTES
        self.layers = tuple(self._make_layer(index, filled) for index in range(shape.layers))

    @property
    def bases(self) -> tuple[int, ...]:
        """Address of each layer."""
        return tuple(layer.ctypes.data for layer in self.layers)

    @property
    def layer_size_bytes(self) -> int:
        return self.layers[0].nbytes

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with what no producer holds."""
        for layer in self.layers:
            layer[:, list(block_ids)] = _POISON

    def check(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> int:
        """Compare every byte of `local_ids` with the producer's `remote_ids`; how many blocks were compared."""
        for start in range(0, len(local_ids), _CHECK_BLOCKS):
            part = slice(start, start + _CHECK_BLOCKS)
            for index in range(len(self.layers)):
                self._check_layer(index, list(local_ids[part]), list(remote_ids[part]))
        return len(local_ids)

    def _check_layer(self, index: int, local_ids: list[int], remote_ids: list[int]) -> None:
        found = self.layers[index][:, local_ids]
        first = (np.arange(2)[:, None] * self.shape.blocks + np.array(remote_ids)) * self._block_words
        expected = (first + index * self.layers[index].size)[:, :, None] + np.arange(self._block_words)
        wrong = np.argwhere((found != expected).any(axis=2))
        if len(wrong):
            part, block = wrong[0]
            raise WrongBytes(
                f"layer {index} {'KV'[part]}: block {local_ids[block]} is not the remote block {remote_ids[block]}"
            )

    def _make_layer(self, index: int, filled: bool) -> Words:
        words = 2 * self.shape.blocks * self._block_words
        layer: Words = allocate(words * _WORD_BYTES).view(np.uint32)
        if filled:
            layer[:] = np.arange(index * words, (index + 1) * words, dtype=np.uint32)
        else:
            layer[:] = _POISON
        return layer.reshape(2, self.shape.blocks, self._block_words)


def allocate(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Private memory in huge pages, as far as the machine gives them, from the start of one on."""
    rounded = -(-size_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, rounded + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages; the report says how much of a cache has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    space: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
    start = -space.ctypes.data % _HUGE_PAGE_BYTES
    return space[start : start + size_bytes]


def huge_page_share(pid: int, shape: CacheShape) -> float:
    """How much of the cache of process `pid` lies in huge pages, 0 to 1; its other memory is taken to have none."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        huge_kib = sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))
    return min(1.0, (huge_kib << 10) / shape.size_bytes)


def sample_indices(count: int, *, check_all: bool) -> list[int]:
    """Which blocks of a load to compare: all of them, or a few spread evenly with the first and the last."""
    if check_all or count <= _SAMPLE_BLOCKS:
        return list(range(count))
    return [round(position * (count - 1) / (_SAMPLE_BLOCKS - 1)) for position in range(_SAMPLE_BLOCKS)]
