"""Pairings: every region with its own, as few pieces as both memories allow, and nothing that grows with blocks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.layout import BlockShape, CacheLayout, KVStyle
from kvflow.core.cache.regions import Device, Regions, map_regions, map_spans
from kvflow.core.plan.block_map import BlockMap, HeadSlice, RegionMap
from kvflow.core.plan.descriptors import plan_read
from tests.budgets import examples
from tests.core.caches import Cache, Recipe, Sides, sides
from tests.core.plans import (
    BLOCKS_TOGETHER,
    CPU,
    RECIPE,
    bytes_of,
    lump,
    pair,
    pair_sides,
    pair_whole,
    regions_of,
    rows,
    whole_blocks,
)
from tests.tests_support import each


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
            parts=("latent",),
            num_blocks=4,
            device=CPU,
        )

    return regions(), regions()


@examples(100, 500)
@given(
    both=tables(), local_ids=st.permutations(range(4)), remote_ids=st.permutations(range(4)), count=st.integers(0, 4)
)
def test_any_two_tables_are_paired_region_by_region(
    both: tuple[Regions, Regions], local_ids: list[int], remote_ids: list[int], count: int
) -> None:
    here, there = both
    wanted = [
        (
            int(here.bases[region] + here.strides[region] * mine),
            int(there.bases[region] + there.strides[region] * theirs),
        )
        for region in range(len(here))
        for mine, theirs in zip(local_ids[:count], remote_ids[:count], strict=True)
    ]
    plan = plan_read(pair_whole(here, there).groups[1], whole_blocks(local_ids[:count], remote_ids[:count], 1))
    expected = bytes_of([(mine, theirs, here.block_size_bytes) for mine, theirs in wanted])
    assert sorted(bytes_of(rows(plan))) == sorted(expected)


# --- layers and parts


def test_layers_are_paired_by_their_place_in_the_model() -> None:
    local, remote = (
        Cache(replace(RECIPE, layers=len(indices), layer_indices=indices)) for indices in ((7, 3, 4), (4, 9, 7, 8))
    )
    case = Sides(local=local.recipe, remote=remote.recipe, local_start=0, remote_start=0, heads=2)
    block_map = pair_sides(case, local, remote)
    assert block_map.places == ((0, 2), (2, 0))
    copies = rows(plan_read(block_map.groups[4], whole_blocks([5], [1], 4)))
    assert sorted(copies) == sorted(
        (local.block(ours, part, 5).data_ptr(), remote.block(theirs, part, 1).data_ptr(), 4 * 2 * 8)
        for ours, theirs in ((0, 2), (2, 0))
        for part in (0, 1)
    )


def test_the_bytes_of_a_token_are_those_of_the_common_layers_and_heads() -> None:
    fused = replace(RECIPE, style=KVStyle.FUSED, dim=16, heads=3)
    for local, remote in ((fused, fused), (fused, RECIPE), (RECIPE, fused), (RECIPE, RECIPE)):
        case = Sides(
            local=replace(local, layer_indices=(0, 1, 2)),
            remote=replace(remote, layer_indices=(2, 1, 5)),
            local_start=1,
            remote_start=0,
            heads=1,
        )
        block_map = pair_sides(case, Cache(case.local), Cache(case.remote))
        assert block_map.token_size_bytes == 2 * 2 * 8
        assert sum(pairs.chunk_size_bytes for pairs in block_map.groups[3]) == 3 * 2 * 2 * 8


@examples(40, 200)
@given(case=sides(), data=st.data())
def test_a_block_map_knows_its_size(case: Sides, data: st.DataObject) -> None:
    local, remote = Cache(case.local), Cache(case.remote)
    block_map = pair_sides(case, local, remote)
    assert block_map.chunk_tokens == min(case.local.tokens, case.remote.tokens)
    common = set(case.local.indices) & set(case.remote.indices)
    assert {case.local.indices[ours] for ours, _ in block_map.places} == common
    assert all(case.local.indices[ours] == case.remote.indices[theirs] for ours, theirs in block_map.places)
    half = local.infer().kv_head_size * case.local.dtype.itemsize
    assert block_map.token_size_bytes == len(common) * local.kv_count * case.heads * half
    tokens = data.draw(st.integers(1, block_map.chunk_tokens))
    groups = block_map.groups[tokens]
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
        (replace(RECIPE, shared=True), replace(RECIPE, shared=True), 6),  # they touch, in memory but not in blocks
    ],
)
def test_neighbours_in_both_caches_are_fused(local: Recipe, remote: Recipe, expected: int) -> None:
    for ours, theirs in ((local, remote), (remote, local)):
        case = Sides(local=ours, remote=theirs, local_start=0, remote_start=0, heads=2)
        block_map = pair_sides(case, Cache(ours), Cache(theirs))
        assert pair_count(block_map.groups[4]) == expected


def test_a_tail_is_not_fused() -> None:
    """Behind the first tokens of K the rest of K comes, and then V."""
    block_map = pair(Cache(BLOCKS_TOGETHER), Cache(BLOCKS_TOGETHER))
    assert [pair_count(block_map.groups[tokens]) for tokens in (1, 3, 4)] == [6, 6, 1]


def test_a_head_slice_is_not_fused_beyond_itself() -> None:
    """Behind the last heads of K, V's first ones come."""
    hnd = replace(BLOCKS_TOGETHER, hnd_in_memory=True)
    for heads, expected in ((HeadSlice(1, 1, 1), 6), (HeadSlice(0, 0, 2), 1)):
        here, there = regions_of(Cache(hnd)), regions_of(Cache(hnd))
        block_map = BlockMap(here, there, heads=heads, local_layers=(0, 1, 2), remote_layers=(0, 1, 2))
        assert pair_count(block_map.groups[4]) == expected


def test_layers_are_fused_whatever_the_order_of_their_names() -> None:
    def cache() -> tuple[dict[str, torch.Tensor], Regions]:
        whole = torch.zeros(5, 3, 2, 4, 2, 8)
        tensors = {name: whole[:, index] for name, index in (("c", 2), ("a", 0), ("b", 1))}
        return tensors, map_regions(CacheLayout.infer(tensors, order="NHD", block_size=4), tensors)

    (keep_here, here), (keep_there, there) = cache(), cache()
    assert len(map_spans(keep_here)) == len(map_spans(keep_there)) == 1
    assert pair_count(pair_whole(here, there).groups[4]) == 1


def test_layers_in_another_order_of_memory_are_not_fused() -> None:
    """Layer 0 behind layer 1 in one cache: neighbours, but the wrong way round."""
    whole = torch.zeros(2, 5, 2, 4, 2, 8)
    there = {"a": whole[0].transpose(0, 1), "b": whole[1].transpose(0, 1)}
    rows_of_blocks = torch.zeros(5, 2, 2, 4, 2, 8)
    here = {"a": rows_of_blocks[:, 1].transpose(0, 1), "b": rows_of_blocks[:, 0].transpose(0, 1)}
    layout = Cache(RECIPE).infer()
    layout = replace(layout, layer_names=("a", "b"), layer_indices=(0, 1), num_blocks=5, dtype="float32", itemsize=4)
    groups = pair_whole(map_regions(layout, here), map_regions(layout, there)).groups[4]
    assert [pairs.piece_size for pairs in groups for _ in range(len(pairs))] == [2 * 4 * 2 * 8 * 4] * 2


def test_regions_of_different_strides_are_in_different_groups() -> None:
    """One layer has room behind its blocks, the other none."""
    tight, loose = torch.zeros(5, 4, 2, 8), torch.zeros(5, 5, 2, 8)[:, :4]
    caches = {"l0": (tight, loose), "l1": (torch.zeros(5, 4, 2, 8), torch.zeros(5, 4, 2, 8))}
    regions = map_regions(CacheLayout.infer(caches, order="NHD", block_size=4), caches)
    groups = pair_whole(regions, regions).groups[4]
    assert sorted((pairs.local_stride, len(pairs)) for pairs in groups) == [(256, 3), (320, 1)]


def test_k_and_v_of_a_head_together_keep_the_stride_of_their_layer() -> None:
    """Where only one side holds them together its regions become two each."""
    both = {"l0": torch.zeros(5, 4, 2, 8), "l1": torch.zeros(5, 5, 2, 8)[:, :4]}
    apart = {name: (torch.zeros(5, 4, 2, 4), torch.zeros(5, 4, 2, 4)) for name in both}
    there, here = (
        map_regions(CacheLayout.infer(caches, order="NHD", block_size=4), caches) for caches in (both, apart)
    )
    copies = rows(plan_read(pair_whole(here, there).groups[4], whole_blocks([4], [3], 4)))
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
        # one piece for each of K and V: the same bytes in the same order
        (PLAIN, PLAIN, ALL, 16, 2),
        (HND, HND, ALL, 16, 2),
        (PLAIN, replace(PLAIN, style=KVStyle.BLOCKS_FIRST), ALL, 16, 2),
        (PLAIN, replace(PLAIN, order="HND"), ALL, 16, 2),  # the order of the shape is not that of memory
        # K and V of a block next to each other on both sides
        (replace(PLAIN, outer=("layer", "block", "kv")), replace(PLAIN, outer=("layer", "block", "kv")), ALL, 16, 1),
        # a slice of the heads: one piece in HND, one for each token in NHD
        (replace(HND, heads=2), HND, HALF, 16, 2),
        (HND, replace(HND, heads=2), (1, 0, 2), 16, 2),
        (HND, HND, (1, 2, 1), 16, 2),
        (replace(PLAIN, heads=2), PLAIN, HALF, 16, 2 * 16),
        (PLAIN, replace(PLAIN, heads=2), (1, 0, 2), 16, 2 * 16),
        (PLAIN, PLAIN, HALF, 5, 2 * 5),
        # blocks of different sizes: NHD goes on, HND is cut at each head
        (PLAIN, replace(PLAIN, tokens=8), ALL, 8, 2),
        (replace(PLAIN, tokens=8), PLAIN, ALL, 8, 2),
        (HND, replace(HND, tokens=8), ALL, 8, 2 * 4),
        (replace(HND, tokens=8), HND, ALL, 8, 2 * 4),
        # a chunk that is not full
        (PLAIN, PLAIN, ALL, 5, 2),
        (HND, HND, ALL, 5, 2 * 4),
        (HND, HND, ALL, 1, 2 * 4),
        # the other order of memory: each head of each token
        (PLAIN, HND, ALL, 16, 2 * 16 * 4),
        (HND, PLAIN, ALL, 5, 2 * 5 * 4),
        (replace(PLAIN, heads=1), HND, (0, 3, 1), 16, 2),  # one head is in order anyway
        (replace(PLAIN, heads=1), PLAIN, (0, 3, 1), 16, 2 * 16),
        (replace(PLAIN, heads=1), replace(HND, heads=1), (0, 0, 1), 16, 2),
        (replace(PLAIN, tokens=1), replace(HND, tokens=1), ALL, 1, 2),  # and so is one token
        (replace(PLAIN, tokens=1), HND, ALL, 1, 2 * 4),
        # K and V of a head together
        (FUSED, FUSED, ALL, 16, 1),
        (FUSED, PLAIN, ALL, 16, 2 * 16 * 4),
        (PLAIN, FUSED, ALL, 16, 2 * 16 * 4),
        (FUSED, replace(FUSED, tokens=8), ALL, 8, 1),
        (replace(FUSED, heads=2), FUSED, HALF, 16, 16),
        (replace(FUSED, heads=2, hnd_in_memory=True), replace(FUSED, hnd_in_memory=True), HALF, 16, 1),
        # a block of one slot, fused or with V behind K, is the same bytes
        (
            replace(FUSED, heads=1, tokens=1),
            replace(PLAIN, heads=1, tokens=1, outer=("layer", "block", "kv")),
            (0, 0, 1),
            1,
            1,
        ),
        (LATENT, LATENT, (0, 0, 1), 16, 1),
        (LATENT, replace(LATENT, tokens=4), (0, 0, 1), 4, 1),
        (LATENT, LATENT, (0, 0, 1), 7, 1),
    ],
)
def test_a_chunk_is_as_few_pieces_as_both_memories_allow(
    local: Recipe, remote: Recipe, heads: tuple[int, int, int], tokens: int, expected: int
) -> None:
    local_start, remote_start, count = heads
    case = Sides(local=local, remote=remote, local_start=local_start, remote_start=remote_start, heads=count)
    groups = pair_sides(case, Cache(local), Cache(remote)).groups[tokens]
    assert sum(pairs.pieces for pairs in groups) == expected
    assert sum(pairs.chunk_size_bytes for pairs in groups) == tokens * count * 8 * (1 if local is LATENT else 2)


@examples(40, 200)
@given(case=sides(), data=st.data())
def test_no_two_pieces_of_a_chunk_could_be_one(case: Sides, data: st.DataObject) -> None:
    block_map = pair_sides(case, Cache(case.local), Cache(case.remote))
    for pairs in block_map.groups[data.draw(st.integers(1, block_map.chunk_tokens))]:
        size = pairs.piece_size
        both = set(zip(pairs.local_offsets.tolist(), pairs.remote_offsets.tolist(), strict=True))
        assert len(both) == len(pairs.local_offsets)
        assert not any((mine + size, theirs + size) in both for mine, theirs in both)


# --- opaque blocks


def test_opaque_blocks_are_read_whole_however_far_they_are_filled() -> None:
    """What scales or checksums in a block mean for half of its tokens is not ours to know."""
    for recipe in (PLAIN, HND, FUSED, LATENT, replace(PLAIN, block_padding=3)):
        here, there = Cache(recipe), Cache(recipe)
        layers = here.infer().layer_indices
        block_map = BlockMap(
            regions_of(here),
            regions_of(there),
            heads=HeadSlice(0, 0, recipe.heads),
            local_layers=layers,
            remote_layers=layers,
            opaque=True,
        )
        for tokens in (1, 7, 16):
            groups = block_map.groups[tokens]
            assert groups is block_map.groups[16]
            assert [pairs.piece_size for pairs in groups] == [here.infer().region_block_size_bytes]
            copies = rows(plan_read(groups, whole_blocks([2, 0], [1, 2], tokens)))
            assert sorted(copies) == sorted(
                (here.block(0, part, mine).data_ptr(), there.block(0, part, theirs).data_ptr(), pairs.piece_size)
                for pairs in groups
                for part in range(here.part_count)
                for mine, theirs in ((2, 1), (0, 2))
            )


# --- bounds


def large_regions(blocks: int, layers: int = 80, tokens: int = 16, heads: int = 8) -> Regions:
    block = BlockShape(tokens=tokens, heads=heads, run=128, token_stride=heads * 128, head_stride=128)
    step = block.size_bytes * blocks + 4096
    return Regions(
        bases=np.arange(1, 2 * layers + 1, dtype=np.uint64) * np.uint64(step),
        strides=np.full(2 * layers, block.size_bytes, dtype=np.uint64),
        block=block,
        parts=("K", "V"),
        num_blocks=blocks,
        device=CPU,
    )


def test_the_cost_of_a_peer_does_not_grow_with_its_blocks() -> None:
    def footprint(blocks: int) -> int:
        groups = pair_whole(large_regions(blocks), large_regions(blocks)).groups[16]
        values = [getattr(pairs, field.name) for pairs in groups for field in fields(pairs)]
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    assert 0 < footprint(1_000_000) == footprint(10) < 100 * 160


def test_block_map_takes_no_memory_for_blocks_not_even_for_a_moment() -> None:
    def peak_bytes(blocks: int) -> int:
        here, there = large_regions(blocks), large_regions(blocks)
        tracemalloc.start()
        try:
            block_map = pair_whole(here, there)
            block_map.groups[16]
            block_map.groups[5]
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # what is made once for all
    few, many = peak_bytes(10), peak_bytes(1_000_000)
    assert 0 < many < 1.5 * few < 1 << 20


def test_the_lengths_of_tails_do_not_add_up() -> None:
    """Every prompt may end somewhere else in its last block."""
    regions = large_regions(10, layers=1, tokens=2048)
    block_map = BlockMap(regions, regions, heads=HeadSlice(0, 4, 4), local_layers=[0], remote_layers=[0])
    tracemalloc.start()
    try:
        for tokens in range(1, 2049):
            (pairs,) = block_map.groups[tokens]
            assert len(pairs.local_offsets) == tokens
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 4 << 20  # all of them would be 32 MiB
    assert block_map.groups[77] is block_map.groups[77]


def test_devices_are_those_of_the_regions() -> None:
    here = large_regions(10)
    block_map = pair_whole(here, replace(here, device=Device("cuda", 3)))
    assert [(pairs.local_device, pairs.remote_device) for pairs in block_map.groups[16]] == [(CPU, Device("cuda", 3))]
