"""Pairing of regions, once per peer: which of ours are read from which of theirs, in which pieces of a block.

Both sides describe a block by strides (`layout.BlockShape`), so NHD and HND, head slices, K and V together or apart
and layers split differently are all one question: which runs of bytes are contiguous on both sides? The answer is a
few `RegionMap`s: bases of region pairs, and offsets of the pieces inside a *chunk*, the tokens of the smaller of both
blocks. Its cost and memory grow with regions and with pieces, never with blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.plan.topology import HeadSource

Int64Array: TypeAlias = npt.NDArray[np.int64]

_TAILS_MAX = 64  # lengths of partly filled chunks that a block map remembers
_ROWS_KEPT_MAX = 1 << 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionMap:
    """Pairs of regions with equal strides on each side, and the pieces of a chunk. Everything in bytes.

    Piece p of chunk part s of block b of pair r is read from `remote_bases[r] + b * remote_stride + s * remote_step +
    remote_offsets[p]`, and likewise on our side. All pieces have `piece_size` bytes.
    """

    local_bases: Int64Array
    remote_bases: Int64Array
    local_stride: int
    remote_stride: int
    local_step: int
    """Step from one chunk of a block to the next."""
    remote_step: int
    local_offsets: Int64Array
    remote_offsets: Int64Array
    piece_size: int
    local_device: Device
    remote_device: Device
    tokens: int = 0
    """Tokens of a chunk."""
    usual: bool = False
    """True if its chunks are whole, and not tails."""
    pieces: int = field(init=False)
    """Descriptors that one chunk takes, unless it is joined with its neighbours."""
    chunk_size_bytes: int = field(init=False)
    first_rows: Int64Array | None = field(init=False)
    """`rows`, kept where they are few and used often: to make them takes longer than to use them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", len(self.local_bases) * len(self.local_offsets))
        object.__setattr__(self, "chunk_size_bytes", self.pieces * self.piece_size)
        kept = self.usual and self.pieces <= _ROWS_KEPT_MAX
        object.__setattr__(self, "first_rows", self.rows() if kept else None)

    def __len__(self) -> int:
        return len(self.local_bases)

    def rows(self) -> Int64Array:
        """The rows of `Descriptors.table` for part 0 of block 0, of the shape (2, regions, 1, pieces, 3)."""
        rows = np.empty((2, len(self.local_bases), 1, len(self.local_offsets), 3), dtype=np.int64)
        rows[0, :, 0, :, 0] = self.local_bases[:, None] + self.local_offsets
        rows[1, :, 0, :, 0] = self.remote_bases[:, None] + self.remote_offsets
        rows[..., 1] = self.piece_size
        rows[0, ..., 2], rows[1, ..., 2] = self.local_device.number, self.remote_device.number
        return rows


class BlockMap:
    """The pieces to read from one peer. `groups(tokens)` are the region maps for the first `tokens` tokens of chunks.

    `local_layers` and `remote_layers` are those of the regions of both sides, in order, `heads` says which heads come
    from that peer. `opaque` blocks mean more than values at strides: they are equal on both sides and always read
    whole. `local_set` is the index of our set of layers; `of_groups` are the groups, ours and theirs, whose block ids
    are taken.
    """

    def __init__(
        self,
        local: Regions,
        remote: Regions,
        *,
        heads: HeadSource,
        local_layers: Sequence[int],
        remote_layers: Sequence[int],
        opaque: bool = False,
        local_set: int = 0,
        local_group: int = 0,
        remote_group: int = 0,
    ) -> None:
        ours, theirs = _same_parts(local, remote)
        self.local_set, self.local_group, self.remote_group = local_set, local_group, remote_group
        self.of_groups = (local_group, remote_group)
        self.remote_whole = remote
        """Regions of the peer as they are, with K and V of a fused cache together."""
        positions = {layer: index for index, layer in enumerate(remote_layers)}
        wanted = set(local.distinct_layers)
        self.places = tuple(
            (index, positions[layer])
            for index, layer in enumerate(local_layers)
            if layer in positions and index in wanted
        )
        """(our position, their position) of each layer to read, in our order. Of layers that share a tensor here it is
        the first, from whichever rank has it; so a rank may have nothing for us."""
        self.opaque = opaque
        self.heads = heads
        self.local, self.remote = ours, theirs
        self.chunk_tokens = min(ours.block.tokens, theirs.block.tokens)
        self._rows = _rows(ours, theirs, heads, self.places)
        self.groups: Callable[[int], tuple[RegionMap, ...]] = lru_cache(_TAILS_MAX)(self._make_groups)

    @property
    def token_size_bytes(self) -> int:
        """Bytes of one token that come from this peer."""
        return int(self._rows.shape[1]) * self.heads.heads * self.local.block.run

    def _make_groups(self, tokens: int) -> tuple[RegionMap, ...]:
        if self.opaque and tokens != self.chunk_tokens:
            return self.groups(self.chunk_tokens)
        ours, theirs = self.local.block, self.remote.block
        local_offsets, remote_offsets, size = _pieces(ours, theirs, tokens, self.heads.heads)
        rows = self._rows
        sizes = np.full(rows.shape[1], size, dtype=np.int64)
        if len(local_offsets) == 1:
            rows, sizes = _fuse(rows, size)
        keys = zip(rows[1].tolist(), rows[3].tolist(), sizes.tolist(), strict=True)
        groups = []
        for stride, their_stride, piece_size in sorted(set(keys)):  # np.unique loads numpy.ma, 80 ms of the first load
            chosen = (rows[1] == stride) & (rows[3] == their_stride) & (sizes == piece_size)
            # Tails share the bases where they can: a rank has a thousand peers, and chunks of many lengths from each.
            bases = rows[::2] if rows is self._rows and chosen.all() else rows[::2, chosen]
            groups.append(
                RegionMap(
                    local_bases=bases[0],
                    remote_bases=bases[1],
                    local_stride=stride,
                    remote_stride=their_stride,
                    local_step=self.chunk_tokens * ours.token_stride,
                    remote_step=self.chunk_tokens * theirs.token_stride,
                    local_offsets=local_offsets,
                    remote_offsets=remote_offsets,
                    piece_size=piece_size,
                    local_device=self.local.device,
                    remote_device=self.remote.device,
                    tokens=tokens,
                    usual=tokens == self.chunk_tokens,
                )
            )
        return tuple(groups)


def _same_parts(local: Regions, remote: Regions) -> tuple[Regions, Regions]:
    """Regions of both sides with the same parts: fused K and V are taken apart where one side has them apart."""
    if local.parts == remote.parts:
        return local, remote
    return split_fused(local), split_fused(remote)


def split_fused(regions: Regions) -> Regions:
    """Split fused regions into K and V, each half of every head."""
    if regions.parts != ("KV",):
        return regions
    half = regions.block.run // 2
    return replace(
        regions,
        bases=np.stack((regions.bases, regions.bases + np.uint64(half)), axis=1).ravel(),
        strides=np.repeat(regions.strides, 2),
        block=regions.block._replace(run=half),
        parts=("K", "V"),
    )


def regions_of(layers: Sequence[int], parts: int) -> Int64Array:
    """The regions of layers, by their positions, part by part."""
    found: Int64Array = (np.array(layers, dtype=np.int64)[:, None] * parts + np.arange(parts)).ravel()
    return found


def _rows(local: Regions, remote: Regions, heads: HeadSource, places: Sequence[tuple[int, int]]) -> Int64Array:
    """(our base, our stride, their base, their stride) of each pair of regions, in the order of our memory.

    Layers may share a part of their tensors, such as K alone: it is read for the first of them.
    """
    ours_at = regions_of([ours for ours, _ in places], len(local.parts))
    theirs_at = regions_of([theirs for _, theirs in places], len(local.parts))
    first = np.array(local.first_of)[ours_at] == ours_at
    ours_at, theirs_at = ours_at[first], theirs_at[first]
    rows = np.array(
        (local.bases[ours_at], local.strides[ours_at], remote.bases[theirs_at], remote.strides[theirs_at]),
        dtype=np.int64,
    )
    rows[0] += heads.local_start * local.block.head_stride
    rows[2] += heads.remote_start * remote.block.head_stride
    return np.ascontiguousarray(rows[:, np.argsort(rows[0], kind="stable")])


def _pieces(ours: BlockShape, theirs: BlockShape, tokens: int, heads: int) -> tuple[Int64Array, Int64Array, int]:
    """Offsets of the pieces of `tokens` tokens of `heads` heads on both sides, and the size of one.

    A piece begins as one head of one token and grows along an axis while that axis goes on where the piece ends, on
    both sides. What is left of the axes is counted out.
    """
    size = ours.run
    axes = [(tokens, ours.token_stride, theirs.token_stride), (heads, ours.head_stride, theirs.head_stride)]
    axes = [axis for axis in axes if axis[0] > 1]
    while joined := [axis for axis in axes if axis[1] == axis[2] == size]:
        axes.remove(joined[0])
        size *= joined[0][0]
    local = remote = np.zeros(1, dtype=np.int64)
    for count, our_stride, their_stride in sorted(axes, key=lambda axis: -axis[1]):
        steps = np.arange(count, dtype=np.int64)
        local = (local[:, None] + steps * our_stride).ravel()
        remote = (remote[:, None] + steps * their_stride).ravel()
    return local, remote, size


def _fuse(rows: Int64Array, size: int) -> tuple[Int64Array, Int64Array]:
    """Join region pairs of one piece that are neighbours in every block of both sides; also each one's size.

    Fusing keeps to one registered span: a fused block is no longer than the stride, so the memory of its regions
    overlaps, and memory that overlaps is registered as one (see `regions.map_spans`).
    """
    fused: list[list[int]] = []
    for pair in rows.T.tolist():
        row = [*pair, size]
        if fused and _continues(fused[-1], row):
            fused[-1][4] += size
        else:
            fused.append(row)
    if len(fused) == rows.shape[1]:
        return rows, np.full(len(fused), size, dtype=np.int64)
    table = np.array(fused, dtype=np.int64).T
    return table[:4], table[4]


def _continues(row: list[int], after: list[int]) -> bool:
    """True if the pair `after` lies right behind `row` in each block of both sides."""
    local_base, local_stride, remote_base, remote_stride, length = row
    return (
        after[0] == local_base + length
        and after[2] == remote_base + length
        and (after[1], after[3]) == (local_stride, remote_stride)
        and length + after[4] <= min(local_stride, remote_stride)
    )
