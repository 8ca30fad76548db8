"""Offsets of blocks in a stored file: by layer set (layers of equal shape), then region, then block, without gaps.

`plan_read` plans the copies, with the file as the remote side: addresses are offsets in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvflow.core.cache.regions import Device, Regions
from kvflow.core.plan.block_map import RegionMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Descriptors, plan_read
from kvflow.core.plan.slices import cut_slices

FILE_DEVICE = "file"
"""Device kind of files in descriptors. The device number is the file descriptor."""
_DESCRIPTORS_AT_ONCE = 1 << 13  # maximum number, so that planning is done in steps


class BlockSpan(NamedTuple):
    """Consecutive blocks of a group, to copy or digest together.

    `group`: index of the group. `first`: position of the first block among the group's blocks in the file. `ids`: block
    ids.
    """

    group: int
    first: int
    ids: BlockIds


def data_bytes(layer_sets: Sequence[tuple[int, Regions]], counts: Sequence[int]) -> int:
    """Return how many bytes the blocks of a stored file take, without the header.

    `layer_sets`: for each layer set the index of its group, and its regions. `counts`: number of blocks of each group.
    """
    return sum(len(regions) * regions.block_size_bytes * counts[group] for group, regions in layer_sets)


def plan_file(
    layer_sets: Sequence[tuple[int, Regions]],
    counts: Sequence[int],
    span: BlockSpan,
    *,
    fd: int,
    start: int,
    bytes_max: int,
    descriptors_max: int,
) -> Iterator[Descriptors]:
    """Yield descriptors, slice by slice, that copy the blocks of `span` between memory and the open file `fd`.

    `layer_sets`: for each layer set the index of its group, and its regions. `counts`: number of blocks of each group
    in the file. `start`: offset in bytes of the file's first block. `bytes_max`, `descriptors_max`: maximum size of a
    slice.
    """
    group, place, ids = span
    order = np.arange(place, place + len(ids), dtype=np.int64)
    for of_group, regions in layer_sets:
        count, block_bytes = counts[of_group], regions.block_size_bytes
        if of_group != group:
            start += len(regions) * count * block_bytes
            continue
        chunks = Chunks(ids, None, order, None, regions.block.tokens)
        most = max(min(_DESCRIPTORS_AT_ONCE // len(ids), bytes_max // (len(ids) * block_bytes)), 1)
        for first, last in _equal_stride_runs(regions, most):
            places = start + np.arange(last - first, dtype=np.int64) * count * block_bytes
            pairs = RegionMap(
                local_bases=regions.bases[first:last].astype(np.int64),
                remote_bases=places,
                local_stride=int(regions.strides[first]),
                remote_stride=block_bytes,
                local_step=0,
                remote_step=0,
                local_offsets=np.zeros(1, dtype=np.int64),
                remote_offsets=np.zeros(1, dtype=np.int64),
                piece_size=block_bytes,
                local_device=regions.device,
                remote_device=Device(FILE_DEVICE, fd),
            )
            yield from cut_slices(plan_read([pairs], chunks), bytes_max=bytes_max, descriptors_max=descriptors_max)
            start += (last - first) * count * block_bytes


def _equal_stride_runs(regions: Regions, most: int) -> Iterator[tuple[int, int]]:
    """Yield half-open index ranges (start, stop) of at most `most` consecutive regions with equal strides."""
    first = 0
    for at in range(1, len(regions) + 1):
        if at == len(regions) or at - first == most or regions.strides[at] != regions.strides[first]:
            yield first, at
            first = at
