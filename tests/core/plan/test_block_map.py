"""Pairings: every region with its own, as few pieces as both memories allow, and nothing that grows with blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.layout import BlockShape, CacheLayout, KVStyle
from kvflow.core.cache.regions import Regions, map_regions, map_spans
from kvflow.core.plan.block_map import BlockMap, RegionMap
from kvflow.core.plan.descriptors import plan_read
from tests.core.caches import Cache, Recipe, Sides, sides, whole_sides
from tests.core.plans import (
    BLOCKS_TOGETHER,
    CPU,
    RECIPE,
    bytes_of,
    heads_at,
    large_regions,
    lump,
    pair,
    pair_sides,
    pair_whole,
    regions_of,
    rows,
    traced_bytes,
    whole_blocks,
)
from tests.support.budgets import examples
from tests.support.tests_support import each


@st.composite
def tables(draw: st.DrawFn) -> tuple[Regions, Regions]:
    """Regions that no torch tensor need have: neighbours in one block only, different strides, any order."""
    size, count = 4, draw(st.integers(1, 5))

    def regions() -> Regions:
        bases = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count, unique=True))
        strides = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=count, max_size=count))
        return Regions(
            bases=np.array(bases, dtype=np.uint64) * np.uint64(size),
            strides=np.array(strides, dtype=np.uint64) * np.uint64(size),
            block=lump(size),
            planes=("latent",),
            num_blocks=4,
            device=CPU,
        )

    return regions(), regions()


@examples(100, 350)
@given(
    both=tables(), local_ids=st.permutations(range(4)), remote_ids=st.permutations(range(4)), count=st.integers(0, 4)
)
def test_any_two_tables_are_paired_region_by_region(
    both: tuple[Regions, Regions], local_ids: list[int], remote_ids: list[int], count: int
) -> None:
    (here, there), ids = both, (local_ids[:count], remote_ids[:count])
    wanted = [
        (*(int(side.bases[region] + side.strides[region] * block) for side, block in zip(both, pair, strict=True)), 4)
        for region in range(len(here))
        for pair in zip(*ids, strict=True)
    ]
    plan = plan_read(pair_whole(here, there).region_maps(1), whole_blocks(*ids, 1))
    assert sorted(bytes_of(rows(plan))) == sorted(bytes_of(wanted))


# --- layers and parts


@examples(40, 200)
@given(case=sides(), data=st.data())
def test_a_block_map_knows_its_size(case: Sides, data: st.DataObject) -> None:
    local, remote = Cache(case.local), Cache(case.remote)
    block_map = pair_sides(case, local, remote)
    assert block_map.chunk_tokens == min(case.local.tokens, case.remote.tokens)
    common = [index for index in case.local.indices if index in case.remote.indices]
    assert [case.local.indices[ours] for ours, _ in block_map.layer_pairs] == common
    assert all(case.local.indices[ours] == case.remote.indices[theirs] for ours, theirs in block_map.layer_pairs)
    half = local.infer().kv_head_size * case.local.dtype.itemsize
    assert block_map.token_size_bytes == len(common) * local.kv_count * case.heads * half
    tokens = data.draw(st.integers(1, block_map.chunk_tokens))
    groups = block_map.region_maps(tokens)
    assert sum(pairs.chunk_size_bytes for pairs in groups) == tokens * block_map.token_size_bytes
    plan = plan_read(groups, whole_blocks([0], [0], tokens))
    assert len(plan) == sum(pairs.pieces for pairs in groups)
    for pairs in groups:
        assert pairs.chunk_size_bytes == pairs.pieces * pairs.piece_size
        assert pairs.pieces == len(pairs) * len(pairs.local_offsets) == len(pairs) * len(pairs.remote_offsets)


# --- fusing regions


def pair_count(groups: Sequence[RegionMap]) -> int:
    return sum(len(pairs) for pairs in groups)


@each(
    ("local", "remote", "expected"),
    [
        (RECIPE, RECIPE, 6),
        (replace(RECIPE, style=KVStyle.BLOCKS_FIRST, outer=("layer", "block", "kv")), RECIPE, 6),
        (replace(RECIPE, outer=("layer", "block", "kv")), replace(RECIPE, outer=("layer", "block", "kv")), 3),
        (BLOCKS_TOGETHER, BLOCKS_TOGETHER, 1),
        (BLOCKS_TOGETHER, replace(BLOCKS_TOGETHER, style=KVStyle.APART), 1),
        (BLOCKS_TOGETHER, replace(BLOCKS_TOGETHER, outer=("block", "kv", "layer")), 6),
        (BLOCKS_TOGETHER, RECIPE, 6),
        (BLOCKS_TOGETHER, replace(RECIPE, outer=("layer", "block", "kv")), 3),
        (BLOCKS_TOGETHER, replace(BLOCKS_TOGETHER, block_padding=1), 6),
        (BLOCKS_TOGETHER, replace(BLOCKS_TOGETHER, tokens=8), 6),  # K ends earlier in a chunk than in a block
        (BLOCKS_TOGETHER, replace(BLOCKS_TOGETHER, layers=2), 1),
        (BLOCKS_TOGETHER, replace(BLOCKS_TOGETHER, layer_indices=(2, 1, 0)), 3),  # neighbours, the wrong way round
        (replace(RECIPE, shared=True), replace(RECIPE, shared=True), 6),  # they touch, in memory but not in blocks
    ],
)
def test_neighbours_in_both_caches_are_fused(local: Recipe, remote: Recipe, expected: int) -> None:
    for ours, theirs in ((local, remote), (remote, local)):
        assert pair_count(pair_sides(whole_sides(ours, theirs), Cache(ours), Cache(theirs)).region_maps(4)) == expected


def test_a_tail_is_not_fused() -> None:
    """Behind the first tokens of K the rest of K comes, and then V."""
    block_map = pair(Cache(BLOCKS_TOGETHER), Cache(BLOCKS_TOGETHER))
    assert [pair_count(block_map.region_maps(tokens)) for tokens in (1, 3, 4)] == [6, 6, 1]


def test_a_head_slice_is_not_fused_beyond_itself() -> None:
    """Behind the last heads of K, V's first ones come."""
    hnd = replace(BLOCKS_TOGETHER, hnd_in_memory=True)
    for heads, expected in ((heads_at(1, 1, 1), 6), (heads_at(0, 0, 2), 1)):
        here, there = regions_of(Cache(hnd)), regions_of(Cache(hnd))
        layers = (0, 1, 2)
        block_map = BlockMap(here, there, heads=heads, local_layers=layers, remote_layers=layers)
        assert pair_count(block_map.region_maps(4)) == expected


def test_layers_are_fused_whatever_the_order_of_their_names() -> None:
    def cache() -> tuple[dict[str, torch.Tensor], Regions]:
        whole = torch.zeros(5, 3, 2, 4, 2, 8)
        tensors = {name: whole[:, index] for name, index in (("l2", 2), ("l0", 0), ("l1", 1))}
        return tensors, map_regions(CacheLayout.infer(tensors, order="NHD", block_size=4), tensors)

    (keep_here, here), (keep_there, there) = cache(), cache()
    assert len(map_spans(keep_here.items())) == len(map_spans(keep_there.items())) == 1
    assert pair_count(pair_whole(here, there).region_maps(4)) == 1


def test_k_and_v_of_a_head_together_keep_the_stride_of_their_layer() -> None:
    """Where only one side holds them together its regions become two each."""
    both = {"l0": torch.zeros(5, 4, 2, 8), "l1": torch.zeros(5, 5, 2, 8)[:, :4]}
    apart = {name: (torch.zeros(5, 4, 2, 4), torch.zeros(5, 4, 2, 4)) for name in both}
    there, here = (
        map_regions(CacheLayout.infer(caches, order="NHD", block_size=4), caches) for caches in (both, apart)
    )
    copies = rows(plan_read(pair_whole(here, there).region_maps(4), whole_blocks([4], [3], 4)))
    assert sorted(copies) == sorted(
        (apart[name][kv][4, token, head].data_ptr(), both[name][3, token, head, 4 * kv :].data_ptr(), 4 * 4)
        for name in both
        for kv in (0, 1)
        for token in range(4)
        for head in range(2)
    )


# --- pieces of a chunk

PLAIN = Recipe(style=KVStyle.KV_FIRST, order="NHD", layers=1, blocks=3, tokens=16, heads=4, dim=8)
HND = replace(PLAIN, hnd_in_memory=True)
FUSED = replace(PLAIN, style=KVStyle.FUSED, dim=16)
LATENT = replace(PLAIN, style=KVStyle.MLA, heads=1)
ALL, HALF = (0, 0, 4), (0, 2, 2)


@each(
    ("local", "remote", "heads", "tokens", "expected"),
    [
        # one piece for each of K and V: the same bytes in the same order, whatever the order of the shape
        (PLAIN, replace(PLAIN, order="HND"), ALL, 16, 2),
        (HND, HND, ALL, 16, 2),
        # K and V of a block next to each other on both sides
        (replace(PLAIN, outer=("layer", "block", "kv")), replace(PLAIN, outer=("layer", "block", "kv")), ALL, 16, 1),
        # a slice of the heads: one piece in HND, one for each token in NHD
        (replace(HND, heads=2), HND, HALF, 16, 2),
        (PLAIN, replace(PLAIN, heads=2), (1, 0, 2), 16, 2 * 16),
        (PLAIN, PLAIN, HALF, 5, 2 * 5),
        # blocks of different sizes: NHD goes on, HND is cut at each head, and so is a chunk that is not full
        (PLAIN, replace(PLAIN, tokens=8), ALL, 8, 2),
        (replace(HND, tokens=8), HND, ALL, 8, 2 * 4),
        (PLAIN, PLAIN, ALL, 5, 2),
        (HND, HND, ALL, 1, 2 * 4),
        # the other order of memory: each head of each token, unless there is one head or one token
        (HND, PLAIN, ALL, 5, 2 * 5 * 4),
        (replace(PLAIN, heads=1), HND, (0, 3, 1), 16, 2),
        (replace(PLAIN, tokens=1), replace(HND, tokens=1), ALL, 1, 2),
        # K and V of a head together
        (FUSED, replace(FUSED, tokens=8), ALL, 8, 1),
        (PLAIN, FUSED, ALL, 16, 2 * 16 * 4),
        (replace(FUSED, heads=2), FUSED, HALF, 16, 16),
        (LATENT, replace(LATENT, tokens=4), (0, 0, 1), 4, 1),
        (LATENT, LATENT, (0, 0, 1), 7, 1),
    ],
)
def test_a_chunk_is_as_few_pieces_as_both_memories_allow(
    local: Recipe, remote: Recipe, heads: tuple[int, int, int], tokens: int, expected: int
) -> None:
    local_start, remote_start, count = heads
    case = Sides(local=local, remote=remote, local_start=local_start, remote_start=remote_start, heads=count)
    groups = pair_sides(case, Cache(local), Cache(remote)).region_maps(tokens)
    assert sum(pairs.pieces for pairs in groups) == expected
    assert sum(pairs.chunk_size_bytes for pairs in groups) == tokens * count * 8 * (1 if local is LATENT else 2)


@examples(40, 200)
@given(case=sides(), data=st.data())
def test_no_two_pieces_of_a_chunk_could_be_one(case: Sides, data: st.DataObject) -> None:
    block_map = pair_sides(case, Cache(case.local), Cache(case.remote))
    for pairs in block_map.region_maps(data.draw(st.integers(1, block_map.chunk_tokens))):
        size = pairs.piece_size
        both = set(zip(pairs.local_offsets.tolist(), pairs.remote_offsets.tolist(), strict=True))
        assert len(both) == len(pairs.local_offsets)
        assert not any((mine + size, theirs + size) in both for mine, theirs in both)


# --- opaque blocks


def test_opaque_blocks_are_read_whole_however_far_they_are_filled() -> None:
    """kvflow does not know the meaning of scales or checksums in a block, so it cannot read half of it."""
    for recipe in (PLAIN, HND, FUSED, LATENT, replace(PLAIN, block_padding=3)):
        here, there = Cache(recipe), Cache(recipe)
        heads, ours, theirs = heads_at(0, 0, recipe.heads), regions_of(here), regions_of(there)
        block_map = BlockMap(ours, theirs, heads=heads, local_layers=(0,), remote_layers=(0,), opaque=True)
        (pairs,) = block_map.region_maps(16)
        assert pairs.piece_size == here.infer().block_shape.size_bytes
        for tokens in (1, 7, 16):
            assert block_map.region_maps(tokens) is block_map.region_maps(16)
            copies = rows(plan_read(block_map.region_maps(tokens), whole_blocks([2, 0], [1, 2], tokens)))
            assert sorted(copies) == sorted(
                (here.block(0, part, mine).data_ptr(), there.block(0, part, theirs).data_ptr(), pairs.piece_size)
                for part in range(here.part_count)
                for mine, theirs in ((2, 1), (0, 2))
            )


# --- bounds


def test_a_block_map_takes_no_memory_for_blocks_not_even_for_a_moment() -> None:
    block = BlockShape(tokens=16, heads=8, run=128, token_stride=8 * 128, head_stride=128)

    def peak_bytes(blocks: int) -> int:
        here, there = large_regions(blocks, block=block), large_regions(blocks, block=block)

        def work() -> None:
            block_map = pair_whole(here, there)
            assert block_map.region_maps(16)
            assert block_map.region_maps(5)

        return traced_bytes(work)[1]

    peak_bytes(10)  # what is made once for all
    few, many = peak_bytes(10), peak_bytes(1_000_000)
    assert 0 < many < 1.5 * few < 1 << 20


def test_the_lengths_of_tails_do_not_add_up() -> None:
    """Every prompt may end somewhere else in its last block."""
    block = BlockShape(tokens=512, heads=8, run=128, token_stride=8 * 128, head_stride=128)
    regions = large_regions(10, layers=1, block=block)
    block_map = BlockMap(regions, regions, heads=heads_at(0, 4, 4), local_layers=[0], remote_layers=[0])
    assert len(block_map.region_maps(512)) == 1  # what numpy imports when it is first needed is not counted
    kept_bytes, _ = traced_bytes(
        lambda: [len(block_map.region_maps(tokens)[0].local_offsets) for tokens in range(1, 513)].index(512)
    )
    assert kept_bytes < 1 << 20  # all of them would be 2 MiB
    assert block_map.region_maps(77) is block_map.region_maps(77)
