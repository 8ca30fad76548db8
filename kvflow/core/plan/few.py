"""The common load, planned in one go: a few whole blocks of one rank, alike on both sides, straight into the cache.

`descriptors` plans any load between any two caches, by operations on arrays; for two blocks each of those takes longer
than all of this. Both give equal descriptors wherever this one applies, which a property holds them to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvflow.core.plan.block_map import BlockMap, RegionMap
from kvflow.core.plan.descriptors import BlockIds, Descriptors, Piece

FEW = 32
"""Blocks, up to which operations on arrays are slower."""


def alike(block_map: BlockMap) -> RegionMap | None:
    """The one map of regions where blocks of both sides are of one size, and each is one piece in each region."""
    if block_map.local.block.tokens != block_map.remote.block.tokens:
        return None
    pairs = block_map.groups[block_map.chunk_tokens]
    usual = len(pairs) == 1 and len(pairs[0].local_offsets) == 1 and pairs[0].first_rows is not None
    return pairs[0] if usual else None


def match_few(
    local_ids: BlockIds, offered: Sequence[int], block_tokens: int, num_tokens: int
) -> list[tuple[int, int]] | None:
    """(their block, ours) for the last of the offered blocks that the tokens fill, in the order of their memory.

    None where that is for `descriptors.match_chunks` to say: the last block is not full, or ours are too many.
    """
    tokens = min(num_tokens, len(offered) * block_tokens)
    last = tokens // block_tokens
    first = last - len(local_ids)
    if tokens % block_tokens or first < 0:
        return None
    return sorted(zip(offered[first:last], local_ids.tolist(), strict=True))


def read_few(pairs: RegionMap, blocks: Sequence[tuple[int, int]], head: Piece | None) -> Descriptors:
    """One slice that fills the blocks in every pair of regions, `head` in front; what follows itself is one read."""
    local_stride, remote_stride, size = pairs.local_stride, pairs.remote_stride, pairs.piece_size
    ours, theirs, sizes = list[int](), list[int](), list[int]()
    local_end = remote_end = -1
    for theirs_at, ours_at in blocks:
        local, remote = ours_at * local_stride, theirs_at * remote_stride
        if local == local_end and remote == remote_end:
            sizes[-1] += size
        else:
            ours.append(local)
            theirs.append(remote)
            sizes.append(size)
        local_end, remote_end = local + size, remote + size
    assert pairs.first_rows is not None, "else they are not alike"
    regions, runs, first = len(pairs.local_bases), len(ours), 0 if head is None else 1
    size_bytes = len(blocks) * pairs.chunk_size_bytes
    table = np.empty((2, first + regions * runs, 3), dtype=np.int64)
    grid = table[:, first:].reshape(2, regions, runs, 1, 3)  # a view: only an axis is split
    grid[:] = pairs.first_rows
    grid[0, :, :, 0, 0] += ours
    grid[1, :, :, 0, 0] += theirs
    if runs < len(blocks):
        grid[:, :, :, 0, 1] = sizes
    if head is not None:
        table[0, 0] = head.local, head.size_bytes, pairs.local_device.number
        table[1, 0] = head.remote, head.size_bytes, pairs.remote_device.number
        size_bytes += head.size_bytes
    return Descriptors(table.view(np.uint64), size_bytes, pairs.local_device, pairs.remote_device)
