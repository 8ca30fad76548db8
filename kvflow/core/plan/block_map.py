"""The map from a peer's regions to the local regions, made once per peer: pairs of regions, and the pieces to read.

Both sides describe a block by strides (`BlockShape`). So NHD and HND, head slices, K and V together or apart, and
layers that are split differently are all one question: which runs of bytes are contiguous on both sides? The answer is
a few `RegionMap`s. Time and memory grow with the number of regions and pieces, never with the number of blocks.
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
from kvflow.core.plan.topology import WHOLE, HeadSource, Shard

Int64Array: TypeAlias = npt.NDArray[np.int64]

_TAILS_MAX = 64  # region maps that a block map keeps: one for each number of tokens in a partly filled chunk
_ROWS_KEPT_MAX = 1 << 7


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionMap:
    """Pairs of a local and a remote region, and the pieces of a chunk to read in each pair. Sizes and offsets in bytes.

    A chunk is as many tokens as a block has on the side with the smaller blocks; a piece is one contiguous read. All
    local regions have one block stride (`local_stride`), and all remote regions have one (`remote_stride`).

    In block b of region pair r, piece p of chunk s is read from
    `remote_bases[r] + b * remote_stride + s * remote_step + remote_offsets[p]`, and lands at the address computed in
    the same way from the local values. Every piece has `piece_size` bytes.
    """

    local_bases: Int64Array
    remote_bases: Int64Array
    local_stride: int
    remote_stride: int
    local_step: int
    """Bytes from one chunk of a local block to the next chunk."""
    remote_step: int
    local_offsets: Int64Array
    remote_offsets: Int64Array
    piece_size: int
    local_device: Device
    remote_device: Device
    tokens: int = 0
    """Number of tokens to read from the start of each chunk: all its tokens, or fewer if the chunk is partly filled."""
    full_chunks: bool = False
    """True if `tokens` are all tokens of a chunk; False for a partly filled last chunk."""
    pieces: int = field(init=False)
    """Number of pieces of one chunk, over all region pairs. A piece takes one descriptor, unless pieces are joined."""
    chunk_size_bytes: int = field(init=False)
    first_rows: Int64Array | None = field(init=False)
    """Cached result of `rows()`, which takes longer to make than to use; None if large or if chunks are not full."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", len(self.local_bases) * len(self.local_offsets))
        object.__setattr__(self, "chunk_size_bytes", self.pieces * self.piece_size)
        kept = self.full_chunks and self.pieces <= _ROWS_KEPT_MAX
        object.__setattr__(self, "first_rows", self.rows() if kept else None)

    def __len__(self) -> int:
        return len(self.local_bases)

    def rows(self) -> Int64Array:
        """Return (address, size, device index) of each piece of chunk 0 of block 0, as in `Descriptors.table`.

        Axes of the array: side (local, remote), region pair, chunk (one entry), piece in the pair, the three numbers.
        """
        rows = np.empty((2, len(self.local_bases), 1, len(self.local_offsets), 3), dtype=np.int64)
        rows[0, :, 0, :, 0] = self.local_bases[:, None] + self.local_offsets
        rows[1, :, 0, :, 0] = self.remote_bases[:, None] + self.remote_offsets
        rows[..., 1] = self.piece_size
        rows[0, ..., 2], rows[1, ..., 2] = self.local_device.number, self.remote_device.number
        return rows


class BlockMap:
    """Which pieces of a block are read from one peer, and where they land, for one set of layers.

    `region_maps(tokens)` returns the region maps that read the first `tokens` tokens of each chunk (`RegionMap`).

    Args:
        local: the local regions.
        remote: the peer's regions.
        heads: the KV heads to read from the peer.
        local_layers, remote_layers: index in the model of each layer in `local` and in `remote`, in order.
        opaque: True if the bytes are not plain values at strides of tokens and heads. Then both sides have the same
            block format, and blocks are always read whole.
        local_set: index of the local set of layers.
        local_group, remote_group: index of the group with these layers, on this side and on the peer's.
        local_shard, remote_shard: the tokens of a block that each side holds.
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
        local_shard: Shard = WHOLE,
        remote_shard: Shard = WHOLE,
    ) -> None:
        self.local_set, self.local_group, self.remote_group = local_set, local_group, remote_group
        self.group_pair = (local_group, remote_group)
        self.local_shard, self.remote_shard = local_shard, remote_shard
        self.sharded = local_shard.ranks * remote_shard.ranks > 1
        self.match_key = (local_group, remote_group, remote_shard.rank)
        """Key of the chunks to read in a plan. Equal keys, of different ranks and layers, have equal chunks."""
        self.remote_whole = remote
        """The peer's regions as the peer states them. In the attribute `remote`, fused K and V are split if the local
        regions have K and V apart."""
        positions = {layer: index for index, layer in enumerate(remote_layers)}
        wanted = set(local.distinct_layers)
        self.layer_pairs = tuple(
            (index, positions[layer])
            for index, layer in enumerate(local_layers)
            if layer in positions and index in wanted
        )
        """(position in `local_layers`, position in `remote_layers`) of each layer to read from this peer, in local
        order; () if there is no such layer. If local layers have the same regions, only the first of these layers is
        read."""
        self.opaque = opaque
        self.heads = heads
        self.local, self.remote = _same_planes(local, remote)
        self.chunk_tokens = min(self.local.block.tokens, self.remote.block.tokens)
        self.local_tokens = self.local.block.tokens * local_shard.ranks
        """Number of tokens that a local block id stands for."""
        self._rows = _rows(self.local, self.remote, heads, self.layer_pairs)
        self.region_maps: Callable[[int], tuple[RegionMap, ...]] = lru_cache(_TAILS_MAX)(self._make_region_maps)

    @property
    def token_size_bytes(self) -> int:
        """Bytes to read from this peer for one token, summed over the layers and heads."""
        return int(self._rows.shape[1]) * self.heads.heads * self.local.block.run

    def _make_region_maps(self, tokens: int) -> tuple[RegionMap, ...]:
        if self.opaque and tokens != self.chunk_tokens:  # an opaque block has no known places of tokens
            return self.region_maps(self.chunk_tokens)
        local_block, remote_block = self.local.block, self.remote.block
        local_offsets, remote_offsets, size = _pieces(local_block, remote_block, tokens, self.heads.heads)
        rows = self._rows
        sizes = np.full(rows.shape[1], size, dtype=np.int64)
        if len(local_offsets) == 1:
            rows, sizes = _fuse(rows, size)
        keys = zip(rows[1].tolist(), rows[3].tolist(), sizes.tolist(), strict=True)
        groups = []
        for stride, remote_stride, piece_size in sorted(set(keys)):  # np.unique imports numpy.ma, 80 ms at first
            chosen = (rows[1] == stride) & (rows[3] == remote_stride) & (sizes == piece_size)
            # Tails share the bases if they can: a rank may have a thousand peers, each with tails of many lengths.
            bases = rows[::2] if rows is self._rows and chosen.all() else rows[::2, chosen]
            groups.append(
                RegionMap(
                    local_bases=bases[0],
                    remote_bases=bases[1],
                    local_stride=stride,
                    remote_stride=remote_stride,
                    local_step=self.chunk_tokens * local_block.token_stride,
                    remote_step=self.chunk_tokens * remote_block.token_stride,
                    local_offsets=local_offsets,
                    remote_offsets=remote_offsets,
                    piece_size=piece_size,
                    local_device=self.local.device,
                    remote_device=self.remote.device,
                    tokens=tokens,
                    full_chunks=tokens == self.chunk_tokens,
                )
            )
        return tuple(groups)


def _same_planes(local: Regions, remote: Regions) -> tuple[Regions, Regions]:
    """Return `local` and `remote` with equal `Regions.planes`: if only one has K and V fused, its regions are split."""
    if local.planes == remote.planes:
        return local, remote
    return split_fused(local), split_fused(remote)


def split_fused(regions: Regions) -> Regions:
    """Split each region of fused K and V into a region with the K half and a region with the V half of every head.

    Return `regions` unchanged if K and V are not fused.
    """
    if regions.planes != ("KV",):
        return regions
    half = regions.block.run // 2
    return replace(
        regions,
        bases=np.stack((regions.bases, regions.bases + np.uint64(half)), axis=1).ravel(),
        strides=np.repeat(regions.strides, 2),
        block=regions.block._replace(run=half),
        planes=("K", "V"),
    )


def regions_of(layers: Sequence[int], planes: int) -> Int64Array:
    """Return the indices, in a `Regions`, of all regions of the layers at positions `layers`.

    Each layer has `planes` consecutive regions, such as K and V.
    """
    indices: Int64Array = (np.array(layers, dtype=np.int64)[:, None] * planes + np.arange(planes)).ravel()
    return indices


def _rows(local: Regions, remote: Regions, heads: HeadSource, places: Sequence[tuple[int, int]]) -> Int64Array:
    """Return an array of 4 rows: local base, local stride, remote base, remote stride. Each column is a region pair.

    `places`: (local position, remote position) of each layer to read. A base is the address of the first head to read.
    Columns are ordered by local address. If layers share a local region, only the first layer has a column for it.
    """
    local_at = regions_of([place for place, _ in places], len(local.planes))
    remote_at = regions_of([place for _, place in places], len(local.planes))
    # Layers may share a tensor: Gemma 3n's last layers, once read for each layer's name, were 1.75 times the bytes.
    first = np.array(local.first_at_address)[local_at] == local_at
    local_at, remote_at = local_at[first], remote_at[first]
    rows = np.array(
        (local.bases[local_at], local.strides[local_at], remote.bases[remote_at], remote.strides[remote_at]),
        dtype=np.int64,
    )
    rows[0] += heads.local_start * local.block.head_stride
    rows[2] += heads.remote_start * remote.block.head_stride
    return np.ascontiguousarray(rows[:, np.argsort(rows[0], kind="stable")])


def _pieces(local: BlockShape, remote: BlockShape, tokens: int, heads: int) -> tuple[Int64Array, Int64Array, int]:
    """Split `tokens` tokens of `heads` heads into pieces that are contiguous in a local and in a remote block.

    `local`, `remote`: shapes of the two blocks. Return the pieces' local offsets, remote offsets, and common size, in
    bytes. A piece is one head of one token or, where these are contiguous in both blocks, all tokens of a head, all
    heads of a token, or everything.
    """
    size = local.run
    axes = [(tokens, local.token_stride, remote.token_stride), (heads, local.head_stride, remote.head_stride)]
    axes = [axis for axis in axes if axis[0] > 1]
    while joined := [axis for axis in axes if axis[1] == axis[2] == size]:
        axes.remove(joined[0])
        size *= joined[0][0]
    local_offsets = remote_offsets = np.zeros(1, dtype=np.int64)
    for count, local_stride, remote_stride in sorted(axes, key=lambda axis: -axis[1]):  # so local offsets ascend
        steps = np.arange(count, dtype=np.int64)
        local_offsets = (local_offsets[:, None] + steps * local_stride).ravel()
        remote_offsets = (remote_offsets[:, None] + steps * remote_stride).ravel()
    return local_offsets, remote_offsets, size


def _fuse(rows: Int64Array, size: int) -> tuple[Int64Array, Int64Array]:
    """Join region pairs that follow each other without a gap in every block, on both sides.

    `rows`: the result of `_rows`. Each region pair must have one piece, of `size` bytes, per block. Return the rows of
    the joined pairs, and the bytes per block of each. The regions of a joined pair are always in one registered span:
    they fit together into one block stride, so they interleave block by block, and `regions.map_spans` makes one span
    of memory that overlaps.
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
    """Return True if region pair `after` begins where pair `row` ends in each block, on both sides.

    Both are (local base, local stride, remote base, remote stride, bytes per block).
    """
    local_base, local_stride, remote_base, remote_stride, length = row
    return (
        after[0] == local_base + length
        and after[2] == remote_base + length
        and (after[1], after[3]) == (local_stride, remote_stride)
        and length + after[4] <= min(local_stride, remote_stride)
    )
