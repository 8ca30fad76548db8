"""Helpers for tests of pairing and planning: reading plans, executing them, and slow loads to compare them with."""

from __future__ import annotations

import ctypes
import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from kvflow.core.cache.layout import BlockShape, KVStyle
from kvflow.core.cache.regions import Device, Regions, Span, map_regions
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Descriptors, match_chunks
from kvflow.core.plan.topology import CacheShare, HeadSource, Shard
from tests.core.caches import Cache, Recipe, Sides, sides

CPU = Device("cpu", 0)
RECIPE = Recipe(style=KVStyle.KV_FIRST, order="NHD", layers=3, blocks=12, tokens=4, heads=2, dim=8)
BLOCKS_TOGETHER = replace(RECIPE, shared=True, outer=("block", "layer", "kv"))


SHARE = CacheShare(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    layers=(0, 1),
    kv_heads=1,
    model_kv_heads=0,
    latent=False,
    block_size=16,
)
"""A rank's holding, for tests to change."""


def array(ids: Sequence[int]) -> BlockIds:
    return np.array(ids, dtype=np.int64)


def regions_of(cache: Cache) -> Regions:
    return map_regions(cache.infer(), cache.tensors)


def heads_at(local_start: int, remote_start: int, heads: int) -> HeadSource:
    """The heads to read from one rank: as many `heads` from `remote_start` on there to `local_start` on here."""
    return HeadSource(0, local_start, remote_start, heads, 1)


def pair_whole(local: Regions, remote: Regions, **shards: Shard) -> BlockMap:
    """All heads and all regions, in order: two ranks that hold the same, or shards of it."""
    layers = range(len(local) // len(local.planes))
    heads = heads_at(0, 0, local.block.heads)
    return BlockMap(local, remote, heads=heads, local_layers=layers, remote_layers=layers, **shards)


def pair(local: Cache, remote: Cache) -> BlockMap:
    """Of two caches that hold the same."""
    return pair_whole(regions_of(local), regions_of(remote))


def pair_sides(case: Sides, local: Cache, remote: Cache) -> BlockMap:
    return BlockMap(
        regions_of(local),
        regions_of(remote),
        heads=heads_at(case.local_start, case.remote_start, case.heads),
        local_layers=local.infer().layer_indices,
        remote_layers=remote.infer().layer_indices,
    )


def lump(size: int) -> BlockShape:
    """Return a block of a format that has no parts."""
    return BlockShape(tokens=1, heads=1, run=size, token_stride=size, head_stride=size)


def large_regions(blocks: int, *, layers: int = 80, block: BlockShape | None = None) -> Regions:
    """K and V of many blocks, at addresses where no memory is."""
    block = block or lump(1 << 14)
    return Regions(
        bases=np.arange(1, 2 * layers + 1, dtype=np.uint64) * np.uint64(block.size_bytes * blocks + 4096),
        strides=np.full(2 * layers, block.size_bytes, dtype=np.uint64),
        block=block,
        planes=("K", "V"),
        num_blocks=blocks,
        device=CPU,
    )


def traced_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """The memory that is still in use after some work, and the most that was during it."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def whole_blocks(local_ids: Sequence[int] | BlockIds, remote_ids: Sequence[int] | BlockIds, tokens: int) -> Chunks:
    """One chunk for each pair of blocks."""
    return Chunks(np.asarray(local_ids, dtype=np.int64), None, np.asarray(remote_ids, dtype=np.int64), None, tokens, 0)


def located_chunks(
    local_ids: Sequence[int], remote_ids: Sequence[int], ours: int, theirs: int, tokens: int
) -> list[Chunks]:
    """Return the chunks that fill our blocks of `ours` tokens from theirs of `theirs` tokens, by block ids."""
    found = match_chunks(
        array(local_ids), len(remote_ids), local_block_size=ours, remote_block_size=theirs, num_tokens=tokens
    )
    return [some.locate(array(remote_ids)) for some in found]


# --- reading and executing plans

Copy = tuple[int, int, int]  # local address, remote address, size


def rows(descriptors: Descriptors) -> list[Copy]:
    assert descriptors.size_bytes == sum(descriptors.sizes.tolist())
    assert len(descriptors) == len(descriptors.local) == len(descriptors.remote)
    columns = (descriptors.local, descriptors.remote, descriptors.sizes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def rows_of_all(plans: Sequence[Descriptors]) -> list[Copy]:
    return [copy for plan in plans for copy in rows(plan)]


def bytes_of(copies: Sequence[Copy]) -> Iterator[tuple[int, int]]:
    """(local address, remote address) of every byte, in order."""
    for local, remote, size in copies:
        for offset in range(size):
            yield local + offset, remote + offset


def execute(copies: Sequence[Copy]) -> None:
    for local, remote, size in copies:
        ctypes.memmove(local, remote, size)


def inside_one(spans: tuple[Span, ...], address: int, size: int) -> bool:
    return any(span.address <= address and address + size <= span.address + span.size_bytes for span in spans)


def draw_ids(draw: st.DrawFn, count: int, blocks: int) -> list[int]:
    """Scattered blocks, or a run of neighbours."""
    if draw(st.booleans()):
        start = draw(st.integers(0, blocks - count))
        return list(range(start, start + count))
    return draw(st.permutations(range(blocks)))[:count]


# --- loads between caches that hold the same model in different ways


@dataclass(frozen=True)
class Load:
    """A prompt of `tokens` tokens in the remote blocks. Its end is loaded into the local blocks."""

    sides: Sides
    tokens: int
    local_ids: list[int]
    remote_ids: list[int]

    @property
    def first_block(self) -> int:
        """Number of local blocks of the prompt that are cached, before the loaded ones."""
        return -(-self.tokens // self.sides.local.tokens) - len(self.local_ids)

    @property
    def chunks(self) -> list[Chunks]:
        ours, theirs = self.sides.local.tokens, self.sides.remote.tokens
        return located_chunks(self.local_ids, self.remote_ids, ours, theirs, self.tokens)

    @property
    def loaded(self) -> range:
        """The tokens that are loaded."""
        return range(self.first_block * self.sides.local.tokens, self.tokens)


def up_to(most: int) -> st.SearchStrategy[int]:
    """All of it as often as less: else most loads would be of next to nothing."""
    return st.just(most) | st.integers(0, most)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    case = draw(sides())
    offered = draw(up_to(case.remote.blocks))
    tokens = draw(up_to(offered * case.remote.tokens))
    count = draw(up_to(min(case.local.blocks, -(-tokens // case.local.tokens))))
    return Load(case, tokens, draw_ids(draw, count, case.local.blocks), draw_ids(draw, offered, case.remote.blocks))


def slow_load(load: Load, local: Cache, remote: Cache) -> None:
    """The reference: torch copies K and V of each head of each token of each layer, one by one."""
    case = load.sides
    layers = [index for index in case.local.indices if index in case.remote.indices]
    if not load.local_ids:
        return
    for layer, kv, token, head in itertools.product(layers, range(local.kv_count), load.loaded, range(case.heads)):
        ours, theirs = divmod(token, case.local.tokens), divmod(token, case.remote.tokens)
        mine = local.slot(
            case.local.indices.index(layer),
            kv,
            load.local_ids[ours[0] - load.first_block],
            ours[1],
            case.local_start + head,
        )
        mine.copy_(
            remote.slot(
                case.remote.indices.index(layer), kv, load.remote_ids[theirs[0]], theirs[1], case.remote_start + head
            )
        )
