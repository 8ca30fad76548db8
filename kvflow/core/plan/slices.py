"""Slices of reads. Loads take turns by slices, so the size of a slice bounds how long a small load waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import Chunks, Descriptors, Piece, plan_read

# Number of descriptors: planning a slice alone costs some 15 us; many more descriptors do not fit the CPU's cache.
_PLANNED_AT_ONCE = 1 << 13
# The same for a slice with chunks that may be joined; the joined ones take far fewer.
_PLANNED_TO_JOIN = 4 * _PLANNED_AT_ONCE
_MANY = 1 << 10  # chunks from which sorting by small keys is faster


def plan_slices(
    reads: Iterable[tuple[BlockMap, Chunks]],
    *,
    bytes_max: int,
    descriptors_max: int,
    last: Piece | None = None,
) -> Iterator[Descriptors]:
    """Yield slices of at most `bytes_max` bytes and `descriptors_max` descriptors that together read all of `reads`.

    `reads`: pairs of a peer's block map and the chunks to read by that map. Slices are planned as the caller iterates.
    `last`: a further read, for example of a seal, which comes last in the first slice and does not count towards the
    bounds. Chunks are sorted by remote block id: reading remote memory in order is a few per cent faster than writing
    local memory in order (measured over shared memory).
    """
    for block_map, some in reads:
        groups = block_map.region_maps(some.tokens)
        if len(some) > 1:
            within = some.remote_chunks
            keys = some.remote_ids if within is None else some.remote_ids * (1 << 32) + within
            short = len(some) > _MANY and keys.max() < 1 << 16  # numpy sorts 16-bit keys by radix, ten times as fast
            order = keys.astype(np.uint16).argsort(kind="stable") if short else keys.argsort()  # keys are distinct
            some = some.select(order)  # by address in the peer's memory
        chunk_bytes, pieces, joins = 0, 0, False
        for pairs in groups:
            chunk_bytes, pieces = chunk_bytes + pairs.chunk_size_bytes, pieces + pairs.pieces
            joins = joins or len(pairs.local_offsets) == 1
        most = _PLANNED_TO_JOIN if joins else descriptors_max
        step = max(min(bytes_max // chunk_bytes, most // pieces), 1)
        start, stop = 0, step  # the first slice is planned alone, so that it can be posted soon
        while start < len(some):
            plan = plan_read(
                groups, some if start == 0 and stop >= len(some) else some.select(slice(start, stop)), last
            )
            start, stop = stop, stop + max(_PLANNED_AT_ONCE // (step * pieces), 1) * step
            if last is None:
                yield from cut_slices(plan, bytes_max=bytes_max, descriptors_max=descriptors_max)
            elif len(plan) <= descriptors_max + 1 and plan.size_bytes <= bytes_max + last.size_bytes:
                yield plan
            else:
                count = len(plan) - 1
                rest = plan.cut(0, count, plan.size_bytes - last.size_bytes)
                slices = cut_slices(rest, bytes_max=bytes_max, descriptors_max=descriptors_max)
                yield next(slices).join(plan.cut(count, count + 1, last.size_bytes))
                yield from slices
            last = None


def cut_slices(descriptors: Descriptors, *, bytes_max: int, descriptors_max: int) -> Iterator[Descriptors]:
    """Split `descriptors`, in order, into slices of at most `bytes_max` bytes and `descriptors_max` descriptors.

    A single read of more than `bytes_max` bytes is split, too.
    """
    if len(descriptors) <= descriptors_max and descriptors.size_bytes <= bytes_max:
        if len(descriptors):
            yield descriptors
        return
    pieces = _split_large(descriptors, bytes_max)
    count, sizes = len(pieces), pieces.sizes
    size = int(sizes[0])
    if size == int(sizes.min()) == int(sizes.max()):  # the usual case needs no search for each slice
        step = max(min(bytes_max // size, descriptors_max), 1)
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield pieces.cut(start, stop, (stop - start) * size)
        return
    ends = sizes.cumsum()
    start, done_bytes = 0, 0
    while start < count:
        stop = int(ends.searchsorted(np.uint64(done_bytes + bytes_max), side="right"))
        stop = min(max(stop, start + 1), start + descriptors_max)
        end_bytes = int(ends[stop - 1])
        yield pieces.cut(start, stop, end_bytes - done_bytes)
        start, done_bytes = stop, end_bytes


def _split_large(descriptors: Descriptors, bytes_max: int) -> Descriptors:
    """Return `descriptors` with each read of more than `bytes_max` bytes split into reads of at most that size."""
    limit = np.uint64(bytes_max)
    if not (descriptors.sizes > limit).any():
        return descriptors
    counts = -(-descriptors.sizes.astype(np.int64) // bytes_max)
    index = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = index.astype(np.uint64) * limit
    table = np.repeat(descriptors.table, counts, axis=1)
    table[:, :, 0] += offsets
    table[:, :, 1] = np.minimum(table[:, :, 1] - offsets, limit)
    return replace(descriptors, table=table)
