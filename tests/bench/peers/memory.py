"""What a load moves, as runs of neighbouring blocks, and a look at which words of a cache have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvflow.bench.cache import BenchCache
from kvflow.bench.loads import PlannedLoad

_POISON = np.uint32(0xFFFFFFFF)
_WORDS_A_SAMPLE = 1024
"""The last of so many words is looked at: one in 4 KiB."""
_WORD_BYTES = 4
_LOOK_S = 0.2
_LOOKS_MIN, _LOOKS_MAX = 5, 50


class Run(NamedTuple):
    """Blocks that are neighbours on both sides, by the first one's id."""

    local: int
    remote: int
    blocks: int


def runs_of(load: PlannedLoad) -> list[Run]:
    """Return the runs of a load, in its order. Scattered blocks are runs of one block."""
    runs: list[Run] = []
    for local, remote in zip(load.local_ids, load.remote_ids, strict=True):
        last = runs[-1] if runs else None
        if last and (local, remote) == (last.local + last.blocks, last.remote + last.blocks):
            runs[-1] = last._replace(blocks=last.blocks + 1)
        else:
            runs.append(Run(local, remote, 1))
    return runs


def run_rows(
    cache: BenchCache, bases: Sequence[int], firsts: Sequence[int], runs: Sequence[Run]
) -> npt.NDArray[np.uint64]:
    """One row (address, length) for K and V of each run, layer by layer, where the runs begin at blocks `firsts`."""
    size, blocks = cache.shape.region_block_size_bytes, cache.shape.blocks
    starts = (np.arange(2)[:, None] * blocks + np.array(firsts)).ravel().astype(np.uint64) * np.uint64(size)
    sizes = np.tile([run.blocks * size for run in runs], 2 * len(bases))
    addresses = (np.array(bases, dtype=np.uint64)[:, None] + starts).ravel()
    return np.stack([addresses, sizes.astype(np.uint64)], axis=1)


def local_rows(cache: BenchCache, runs: Sequence[Run]) -> npt.NDArray[np.uint64]:
    return run_rows(cache, cache.bases, [run.local for run in runs], runs)


def remote_rows(cache: BenchCache, bases: Sequence[int], runs: Sequence[Run]) -> npt.NDArray[np.uint64]:
    """`cache` has the shape of the producer's, whose layers begin at `bases`."""
    return run_rows(cache, bases, [run.remote for run in runs], runs)


class LandedBytes:
    """The bytes that land in a poisoned cache after a moment.

    At that moment one word of each 4 KiB is noted, which takes some milliseconds, then the whole cache is copied. What
    lands during the copy is found by the words, to 4 KiB; what lands after it is found to the word.
    """

    def __init__(self, cache: BenchCache) -> None:
        self._words = cache.layers.reshape(-1)
        self._samples = self._words[_WORDS_A_SAMPLE - 1 :: _WORDS_A_SAMPLE]

    def poison(self) -> None:
        self._words[:] = _POISON

    def sampled(self) -> int:
        """Bytes that have landed until now, by the words that are looked at."""
        return int(np.count_nonzero(self._samples != _POISON)) * _WORDS_A_SAMPLE * _WORD_BYTES

    async def after_now(self) -> int:
        """Return how many bytes have landed since this call, once nothing has landed for a while."""
        noted = self._samples.copy()
        copied = self._words.copy()
        before, quiet = -1, 0
        for _ in range(_LOOKS_MAX):
            await asyncio.sleep(_LOOK_S)
            landed = self.sampled()
            quiet = quiet + 1 if landed == before else 0
            if quiet >= _LOOKS_MIN:
                break
            before = landed
        sampled = int(np.count_nonzero(self._samples != noted)) * _WORDS_A_SAMPLE * _WORD_BYTES
        return max(sampled, int(np.count_nonzero(self._words != copied)) * _WORD_BYTES)
