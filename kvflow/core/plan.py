"""From block ids to descriptors: which bytes to read from where to where, as numpy arrays.

Two steps. `pair_regions` runs once per peer: it matches our regions with theirs and fuses neighbours that lie next
to each other inside a block on both sides, so its cost and memory grow with regions and never with blocks.
`plan_read` runs once per load: it joins consecutive blocks into runs and multiplies runs with region pairs. A block
id is checked before it becomes an address (invariant I8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.layout import Device, Regions, UInt64Array
from kvflow.errors import RequestError

Int64Array: TypeAlias = npt.NDArray[np.int64]
BlockIds: TypeAlias = Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPairs:
    """Local regions and the remote ones they are read from, fused; one entry per pair, all in bytes.

    In `dense` pairs blocks follow each other without a gap on both sides, so consecutive blocks are one read.
    """

    local_bases: Int64Array
    local_strides: Int64Array
    remote_bases: Int64Array
    remote_strides: Int64Array
    sizes: Int64Array
    block_size_bytes: int
    """Bytes of one block in all these pairs."""
    dense: bool
    local_device: Device
    remote_device: Device

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Reads to make: `sizes[i]` bytes from `remote[i]` on the peer to `local[i]` here; `size_bytes` in all.

    `table` has the shape (2, n, 3): for the local and the remote side a row (address, size, device index) per read.
    That is what NIXL takes, so nothing is copied on the way. Each side is one kind of memory.
    """

    table: UInt64Array
    size_bytes: int
    local_device: Device
    remote_device: Device

    @classmethod
    def of(
        cls,
        *,
        local: npt.ArrayLike,
        remote: npt.ArrayLike,
        sizes: npt.ArrayLike,
        local_device: Device,
        remote_device: Device,
    ) -> Descriptors:
        """From columns."""
        length = np.asarray(sizes, dtype=np.uint64)
        table = np.empty((2, len(length), 3), dtype=np.uint64)
        table[0, :, 0], table[1, :, 0], table[:, :, 1] = local, remote, length
        table[0, :, 2], table[1, :, 2] = local_device.number, remote_device.number
        return cls(table=table, size_bytes=int(length.sum()), local_device=local_device, remote_device=remote_device)

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def local(self) -> UInt64Array:
        """Local addresses."""
        return self.table[0, :, 0]

    @property
    def remote(self) -> UInt64Array:
        """Remote addresses."""
        return self.table[1, :, 0]

    @property
    def sizes(self) -> UInt64Array:
        """Lengths in bytes."""
        return self.table[0, :, 1]

    def join(self, other: Descriptors) -> Descriptors:
        return replace(
            self,
            table=np.concatenate((self.table, other.table), axis=1),
            size_bytes=self.size_bytes + other.size_bytes,
        )

    def part(self, start: int, stop: int) -> Descriptors:
        table = self.table[:, start:stop]
        return replace(self, table=table, size_bytes=int(table[0, :, 1].sum()))


class Piece(NamedTuple):
    """One piece to read: addresses and bytes."""

    local: int
    remote: int
    size_bytes: int


def check_block_ids(block_ids: Sequence[int], *, num_blocks: int, what: str) -> BlockIds:
    """Turn block ids into an array; RequestError names the first that is no integer, out of range or repeated."""
    if type(block_ids) in (list, tuple) and set(map(type, block_ids)) <= {int}:
        # The usual case, by built-ins: on a load's critical path, with cold caches, they beat array operations.
        if not block_ids:
            return np.empty(0, dtype=np.int64)
        if min(block_ids) >= 0 and max(block_ids) < num_blocks and len(set(block_ids)) == len(block_ids):
            return np.array(block_ids, dtype=np.int64)
    return _judge_block_ids(block_ids, num_blocks, what)


def _judge_block_ids(block_ids: Sequence[int], num_blocks: int, what: str) -> BlockIds:
    try:
        raw = np.asarray(block_ids)
        ids = raw.astype(np.int64, casting="safe") if raw.size else np.empty(raw.shape, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{what}: expected a list of integers, got {_preview(block_ids)}") from error
    if ids.ndim != 1 or raw.dtype == np.bool_ or bool in map(type, block_ids):
        raise RequestError(f"{what}: expected a flat list of integers, got {_preview(block_ids)}")
    outside = (ids < 0) | (ids >= num_blocks)
    if outside.any():
        raise RequestError(f"{what}: block id {ids[outside][0]} is not in 0..{num_blocks - 1}")
    ordered = np.sort(ids)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise RequestError(f"{what}: block id {repeated[0]} is given twice")
    return ids


def pair_regions(local: Regions, remote: Regions) -> tuple[RegionPairs, ...]:
    """Match region i with region i and fuse pairs that are neighbours in every block of both sides.

    Returns the dense pairs and the others, as far as there are any. Fusing keeps to one registered span: a fused block
    is no longer than the stride, so the extents of its regions overlap, and overlapping extents are registered as one
    (see `layout.map_spans`).
    """
    order = np.argsort(local.bases, kind="stable")
    columns = (local.bases[order], local.strides[order], remote.bases[order], remote.strides[order])
    size = local.block_size_bytes
    rows: list[list[int]] = []
    for pair in zip(*(column.tolist() for column in columns), strict=True):
        row = [*pair, size]
        if rows and _continues(rows[-1], row):
            rows[-1][4] += size
        else:
            rows.append(row)
    groups = []
    for dense in (True, False):
        chosen = [row for row in rows if (row[1] == row[4] == row[3]) is dense]
        if chosen:
            table = np.array(chosen, dtype=np.int64).T
            groups.append(
                RegionPairs(
                    local_bases=table[0].copy(),
                    local_strides=table[1].copy(),
                    remote_bases=table[2].copy(),
                    remote_strides=table[3].copy(),
                    sizes=table[4].copy(),
                    block_size_bytes=int(table[4].sum()),
                    dense=dense,
                    local_device=local.device,
                    remote_device=remote.device,
                )
            )
    return tuple(groups)


def _continues(row: list[int], after: list[int]) -> bool:
    """Whether the pair `after` lies right behind `row` in each block of both sides."""
    local_base, local_stride, remote_base, remote_stride, length = row
    return (
        after[0] == local_base + length
        and after[2] == remote_base + length
        and (after[1], after[3]) == (local_stride, remote_stride)
        and length + after[4] <= min(local_stride, remote_stride)
    )


def plan_read(
    groups: Sequence[RegionPairs], local_ids: BlockIds, remote_ids: BlockIds, head: Piece | None = None
) -> Descriptors:
    """Descriptors that fill block `local_ids[i]` from `remote_ids[i]` in every region pair, `head` in front.

    Consecutive blocks become one descriptor in dense pairs; ids that are sorted on one side make the most of it.
    """
    plan = _cross(groups[0], local_ids, remote_ids, head)
    for pairs in groups[1:]:
        plan = plan.join(_cross(pairs, local_ids, remote_ids, None))
    return plan


def _cross(pairs: RegionPairs, local_ids: BlockIds, remote_ids: BlockIds, head: Piece | None) -> Descriptors:
    """Every region pair times every run of blocks, region by region, behind the row of `head`."""
    size_bytes = pairs.block_size_bytes * len(local_ids)
    sizes = pairs.sizes[:, None]
    if pairs.dense and len(local_ids) > 1:
        follows = (local_ids[1:] - local_ids[:-1] == 1) & (remote_ids[1:] - remote_ids[:-1] == 1)
        if follows.any():
            starts = np.flatnonzero(np.concatenate(([True], ~follows)))
            sizes = sizes * np.diff(starts, append=len(local_ids))
            local_ids, remote_ids = local_ids[starts], remote_ids[starts]
    first = 0 if head is None else 1
    table = np.empty((2, first + len(pairs) * len(local_ids), 3), dtype=np.int64)
    grid = table[:, first:].reshape(2, len(pairs), len(local_ids), 3)  # a view: only an axis is split
    for side, bases, strides, ids in (
        (grid[0], pairs.local_bases, pairs.local_strides, local_ids),
        (grid[1], pairs.remote_bases, pairs.remote_strides, remote_ids),
    ):
        np.multiply(strides[:, None], ids, out=side[..., 0])
        side[..., 0] += bases[:, None]
    grid[..., 1] = sizes
    table[0, :, 2] = pairs.local_device.number
    table[1, :, 2] = pairs.remote_device.number
    if head is not None:
        table[0, 0, :2] = head.local, head.size_bytes
        table[1, 0, :2] = head.remote, head.size_bytes
        size_bytes += head.size_bytes
    return Descriptors(
        table=table.view(np.uint64),
        size_bytes=size_bytes,
        local_device=pairs.local_device,
        remote_device=pairs.remote_device,
    )


def plan_slices(
    groups: Sequence[RegionPairs],
    local_ids: BlockIds,
    remote_ids: BlockIds,
    *,
    bytes_max: int,
    descriptors_max: int,
    head: Piece | None = None,
) -> Iterator[Descriptors]:
    """Plan a read in slices of at most `bytes_max` bytes and `descriptors_max` descriptors, each when asked for.

    `head` is one more piece to read, between the same devices; it comes first in the first slice and does not count.
    Blocks are taken in the order of their remote ids: reading a peer's memory in order is a few per cent faster than
    writing our own in order (shared memory).
    """
    if len(remote_ids) > 1:
        order = remote_ids.argsort(kind="stable")
        local_ids, remote_ids = local_ids[order], remote_ids[order]
    step = max(bytes_max // sum(pairs.block_size_bytes for pairs in groups), 1)
    for start in range(0, len(local_ids), step):
        plan = plan_read(groups, local_ids[start : start + step], remote_ids[start : start + step], head)
        extra = 0 if head is None else head.size_bytes
        yield from cut_slices(plan, bytes_max=bytes_max + extra, descriptors_max=descriptors_max + bool(extra))
        head = None


def cut_slices(descriptors: Descriptors, *, bytes_max: int, descriptors_max: int) -> Iterator[Descriptors]:
    """Cut a plan into slices of at most `bytes_max` bytes and `descriptors_max` descriptors, in order."""
    if len(descriptors) <= descriptors_max and descriptors.size_bytes <= bytes_max:
        if len(descriptors):
            yield descriptors
        return
    pieces = _split_large(descriptors, bytes_max)
    ends = np.cumsum(pieces.sizes)
    start, done_bytes = 0, 0
    while start < len(pieces):
        stop = int(np.searchsorted(ends, np.uint64(done_bytes + bytes_max), side="right"))
        stop = min(max(stop, start + 1), start + descriptors_max)
        yield pieces.part(start, stop)
        done_bytes = int(ends[stop - 1])
        start = stop


def _split_large(descriptors: Descriptors, bytes_max: int) -> Descriptors:
    """Replace each descriptor above `bytes_max` by pieces of at most that size."""
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


def _preview(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
