"""Plans are executed on real buffers and compared with a slow planner that only loops over torch tensors."""

from __future__ import annotations

import ctypes
import itertools
import re
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.core import wire
from kvflow.core.layout import CacheLayout, Device, KVStyle, Regions, Span, map_regions, map_spans
from kvflow.core.plan import (
    BlockIds,
    Descriptors,
    Piece,
    RegionPairs,
    check_block_ids,
    cut_slices,
    pair_regions,
    plan_read,
    plan_slices,
)
from kvflow.errors import RequestError
from tests.core.caches import Cache, Recipe, recipes

CPU = Device("cpu", 0)
RECIPE = Recipe(style=KVStyle.KV_FIRST, order="NHD", layers=3, blocks=12, tokens=4, heads=2, dim=8)
BLOCK_BYTES = 4 * 2 * 8


def regions_of(cache: Cache) -> Regions:
    return map_regions(cache.infer(), cache.tensors)


def array(ids: list[int]) -> BlockIds:
    return np.array(ids, dtype=np.int64)


def rows(descriptors: Descriptors) -> list[tuple[int, int, int]]:
    """(local address, remote address, size) of each."""
    assert descriptors.size_bytes == sum(descriptors.sizes.tolist())
    assert len(descriptors) == len(descriptors.local) == len(descriptors.remote)
    columns = (descriptors.local, descriptors.remote, descriptors.sizes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def bytes_of(copies: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """(local address, remote address) of every byte, in order."""
    for local, remote, size in copies:
        for offset in range(size):
            yield local + offset, remote + offset


def slow_plan(local: Cache, remote: Cache, local_ids: list[int], remote_ids: list[int]) -> list[tuple[int, int, int]]:
    """The reference: one copy for each layer, part and block, with addresses that torch gives."""
    return [
        (local.block(layer, part, mine).data_ptr(), remote.block(layer, part, theirs).data_ptr(), size)
        for layer in range(local.recipe.layers)
        for part in range(local.part_count)
        for mine, theirs in zip(local_ids, remote_ids, strict=True)
        for size in [local.block(layer, part, mine).nbytes]
    ]


def execute(copies: list[tuple[int, int, int]]) -> None:
    for local, remote, size in copies:
        ctypes.memmove(local, remote, size)


def inside_one(spans: tuple[Span, ...], address: int, size: int) -> bool:
    return any(span.address <= address and address + size <= span.address + span.size_bytes for span in spans)


@dataclass(frozen=True)
class Case:
    local: Recipe
    remote: Recipe
    local_ids: list[int]
    remote_ids: list[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two caches that mean the same, and scattered blocks, or runs of neighbours, to carry between them."""
    local = draw(recipes(dtypes=(torch.uint8, torch.float16)))
    remote = draw(recipes(like=local))
    count = draw(st.integers(0, min(local.blocks, remote.blocks)))

    def ids(blocks: int) -> list[int]:
        if draw(st.booleans()):
            start = draw(st.integers(0, blocks - count))
            return list(range(start, start + count))
        return draw(st.permutations(range(blocks)))[:count]

    return Case(local, remote, ids(local.blocks), ids(remote.blocks))


@settings(max_examples=300)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_every_wanted_byte_arrives_and_no_other_byte_changes(case: Case, seed: int) -> None:
    local, remote = Cache(case.local), Cache(case.remote)
    local.fill(seed)
    remote.fill(seed + 1)
    remote_before, local_before = remote.snapshot(), local.snapshot()
    plan = plan_read(pair_regions(regions_of(local), regions_of(remote)), array(case.local_ids), array(case.remote_ids))
    reference = slow_plan(local, remote, case.local_ids, case.remote_ids)
    assert sorted(bytes_of(rows(plan))) == sorted(bytes_of(reference))

    execute(reference)
    expected = local.snapshot()
    for storage, before in zip(local.storages, local_before, strict=True):
        ctypes.memmove(storage.data_ptr(), before, len(before))
    execute(rows(plan))
    assert local.snapshot() == expected
    assert remote.snapshot() == remote_before


@settings(max_examples=300)
@given(case=cases())
def test_no_descriptor_leaves_a_registered_span(case: Case) -> None:
    """What `pair_regions` promises: fusing never joins memory that is registered separately."""
    local, remote = Cache(case.local), Cache(case.remote)
    pairs = pair_regions(regions_of(local), regions_of(remote))
    plan = plan_read(pairs, array(case.local_ids), array(case.remote_ids))
    local_spans, remote_spans = map_spans(local.tensors), map_spans(remote.tensors)
    for mine, theirs, size in rows(plan):
        assert inside_one(local_spans, mine, size)
        assert inside_one(remote_spans, theirs, size)


@pytest.mark.parametrize("spare_blocks", [0, 5])
def test_the_only_block_of_a_cache_stays_inside_its_layers_span(spare_blocks: int) -> None:
    """Layers lie side by side in a row of blocks, but with one row their spans touch and do not overlap."""
    recipe = replace(BLOCKS_TOGETHER, blocks=1, spare_blocks=spare_blocks)
    cache = Cache(recipe)
    spans = map_spans(cache.tensors)
    assert len(spans) == recipe.layers
    plan = plan_read(pair_regions(regions_of(cache), regions_of(Cache(recipe))), array([0]), array([0]))
    for mine, _, size in rows(plan):
        assert inside_one(spans, mine, size)


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
            block_size_bytes=size,
            num_blocks=4,
            device=CPU,
        )

    return regions(), regions()


@settings(max_examples=500)
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
    plan = plan_read(pair_regions(here, there), array(local_ids[:count]), array(remote_ids[:count]))
    expected = bytes_of([(mine, theirs, here.block_size_bytes) for mine, theirs in wanted])
    assert sorted(bytes_of(rows(plan))) == sorted(expected)


@settings(max_examples=100)
@given(case=cases())
def test_a_plan_is_never_longer_than_the_slow_one_and_writes_no_byte_twice(case: Case) -> None:
    local, remote = Cache(case.local), Cache(case.remote)
    pairs = pair_regions(regions_of(local), regions_of(remote))
    plan = plan_read(pairs, array(case.local_ids), array(case.remote_ids))
    assert len(plan) <= len(slow_plan(local, remote, case.local_ids, case.remote_ids))
    assert plan.size_bytes == len(case.local_ids) * local.infer().block_size_bytes
    targets = [mine for mine, _ in bytes_of(rows(plan))]
    assert len(set(targets)) == len(targets) == plan.size_bytes


def pairs_of(local: Recipe, remote: Recipe) -> tuple[RegionPairs, ...]:
    return pair_regions(regions_of(Cache(local)), regions_of(Cache(remote)))


def pair_count(groups: Sequence[RegionPairs]) -> int:
    return sum(len(pairs) for pairs in groups)


BLOCKS_TOGETHER = replace(RECIPE, shared=True, outer=("block", "layer", "kv"))


@pytest.mark.parametrize(
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
        (replace(RECIPE, shared=True), replace(RECIPE, shared=True), 6),  # they touch, in memory but not in blocks
    ],
)
def test_neighbours_in_both_caches_are_fused(local: Recipe, remote: Recipe, expected: int) -> None:
    assert pair_count(pairs_of(local, remote)) == expected
    assert pair_count(pairs_of(remote, local)) == expected


def test_layers_are_fused_whatever_the_order_of_their_names() -> None:
    def cache() -> tuple[dict[str, torch.Tensor], Regions]:
        whole = torch.zeros(5, 3, 2, 4, 2, 8)
        tensors = {name: whole[:, index] for name, index in (("c", 2), ("a", 0), ("b", 1))}
        return tensors, map_regions(CacheLayout.infer(tensors, order="NHD", block_size=4), tensors)

    (keep_here, here), (keep_there, there) = cache(), cache()
    assert len(map_spans(keep_here)) == len(map_spans(keep_there)) == 1
    assert pair_count(pair_regions(here, there)) == 1


def test_layers_in_another_order_of_memory_are_not_fused() -> None:
    """Layer 0 behind layer 1 in one cache: neighbours, but the wrong way round."""
    whole = torch.zeros(2, 5, 2, 4, 2, 8)
    there = {"a": whole[0].transpose(0, 1), "b": whole[1].transpose(0, 1)}
    rows_of_blocks = torch.zeros(5, 2, 2, 4, 2, 8)
    here = {"a": rows_of_blocks[:, 1].transpose(0, 1), "b": rows_of_blocks[:, 0].transpose(0, 1)}
    layout = Cache(RECIPE).infer()
    layout = replace(layout, layer_names=("a", "b"), num_blocks=5, dtype="float32", itemsize=4)
    groups = pair_regions(map_regions(layout, here), map_regions(layout, there))
    assert [size for pairs in groups for size in pairs.sizes.tolist()] == [2 * 4 * 2 * 8 * 4] * 2


def descriptor_count(local: Recipe, remote: Recipe, local_ids: list[int], remote_ids: list[int]) -> int:
    groups = pairs_of(local, remote)
    slices = plan_slices(groups, array(local_ids), array(remote_ids), bytes_max=1 << 40, descriptors_max=1 << 20)
    return sum(map(len, slices))


RUN = list(range(2, 9))


@pytest.mark.parametrize(
    ("local", "local_ids", "remote_ids", "expected"),
    [
        (RECIPE, RUN, RUN, 6),
        (RECIPE, RUN, [block + 3 for block in RUN], 6),
        (RECIPE, RUN[::-1], RUN[::-1], 6),  # the order of the request does not matter
        (RECIPE, [4, 2, 3, 8, 9], [5, 3, 4, 0, 1], 6 * 2),
        (RECIPE, RUN, RUN[::-1], 6 * 7),
        (RECIPE, [1, 3, 5], [1, 3, 5], 6 * 3),
        (RECIPE, RUN, [*RUN[:3], *[block + 1 for block in RUN[3:]]], 6 * 2),
        (RECIPE, [0, 1, 3, 4], [0, 1, 2, 3], 6 * 2),
        (RECIPE, [], [], 0),
        (BLOCKS_TOGETHER, RUN, RUN, 1),
        (BLOCKS_TOGETHER, [1, 3, 5], [1, 3, 5], 3),
        (replace(BLOCKS_TOGETHER, style=KVStyle.APART), RUN, RUN, 1),
        (replace(RECIPE, block_padding=3), RUN, RUN, 6 * 7),
    ],
)
def test_consecutive_blocks_become_one_descriptor(
    local: Recipe, local_ids: list[int], remote_ids: list[int], expected: int
) -> None:
    assert descriptor_count(local, local, local_ids, remote_ids) == expected


def test_padding_on_one_side_only_keeps_blocks_apart() -> None:
    padded = replace(RECIPE, block_padding=3)
    assert descriptor_count(RECIPE, padded, RUN, RUN) == 6 * 7
    assert descriptor_count(padded, RECIPE, RUN, RUN) == 6 * 7


@given(ids=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=12))
def test_runs_are_as_long_as_both_sides_allow(ids: list[tuple[int, int]]) -> None:
    """Counted by hand: a run goes on where both ids go on by one, in the order of the remote ids."""
    mine = list(dict.fromkeys(mine for mine, _ in ids))
    theirs = list(dict.fromkeys(theirs for _, theirs in ids))
    pairs = sorted(zip(theirs, mine, strict=False))
    follows = [after == (before[0] + 1, before[1] + 1) for before, after in itertools.pairwise(pairs)]
    runs = len(pairs) - sum(follows)
    latent = replace(RECIPE, style=KVStyle.MLA, layers=1, heads=1)
    found = descriptor_count(latent, latent, [block for _, block in pairs], [block for block, _ in pairs])
    assert found == runs


def test_addresses_above_2_to_the_53_stay_exact() -> None:
    """Device memory may lie where a float no longer knows every integer."""
    base, stride, size = (1 << 61) + 1, (1 << 45) + 1, (1 << 45) - 1
    here = Regions(
        bases=np.array([base, base + (1 << 60)], dtype=np.uint64),
        strides=np.array([stride, stride], dtype=np.uint64),
        block_size_bytes=size,
        num_blocks=1000,
        device=CPU,
    )
    there = replace(here, bases=here.bases + np.uint64(1 << 50), device=Device("cuda", 3))
    plan = plan_read(pair_regions(here, there), array([999, 3]), array([7, 998]))
    assert (plan.local_device, plan.remote_device) == (here.device, there.device)
    for column in (plan.local, plan.remote, plan.sizes):
        assert column.dtype == np.uint64
    assert sorted(rows(plan)) == [
        (region + mine * stride, region + (1 << 50) + theirs * stride, size)
        for region in (base, base + (1 << 60))
        for mine, theirs in ((3, 998), (999, 7))
    ]


@pytest.mark.parametrize("stride", [4096, 1 << 50, 1 << 62, (1 << 63) - 4096, 1 << 63])
@pytest.mark.parametrize("base", [(1 << 62) + 1, (1 << 63) - 8192, (1 << 63) - 1, 1 << 63, (1 << 64) - 8193])
def test_a_peers_table_is_refused_or_planned_exactly(base: int, stride: int) -> None:
    """Whatever addresses a peer claims: what passes the check must not trip the planner, nor wrap around in it."""
    table = wire.RegionTable(
        bases=[base], strides=[stride], block_size_bytes=4096, num_blocks=2, device_kind="cpu", device_index=0
    )
    try:
        there = wire.regions_from_wire(table)
    except wire.WireError:
        return
    here = replace(there, bases=np.array([4096], dtype=np.uint64), strides=np.array([8192], dtype=np.uint64))
    plan = plan_read(pair_regions(here, there), array([0, 1]), array([1, 0]))
    assert sorted(rows(plan)) == [(4096, base + stride, 4096), (4096 + 8192, base, 4096)]


def large_regions(blocks: int, layers: int = 80, size: int = 1 << 14) -> Regions:
    step = size * blocks + 4096
    return Regions(
        bases=np.arange(1, 2 * layers + 1, dtype=np.uint64) * np.uint64(step),
        strides=np.full(2 * layers, size, dtype=np.uint64),
        block_size_bytes=size,
        num_blocks=blocks,
        device=CPU,
    )


def test_the_cost_of_a_peer_does_not_grow_with_its_blocks() -> None:
    def footprint(blocks: int) -> int:
        groups = pair_regions(large_regions(blocks), large_regions(blocks))
        values = [getattr(pairs, field.name) for pairs in groups for field in fields(pairs)]
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    assert 0 < footprint(1_000_000) == footprint(10) < 100 * 160


def test_a_large_load_is_planned_in_full() -> None:
    pairs = pair_regions(large_regions(20_000), large_regions(20_000))
    order = np.random.default_rng(1).permutation(20_000)[:8192].astype(np.int64)
    scattered = plan_read(pairs, order, order[::-1].copy())
    assert len(scattered) > 160 * 8000
    assert scattered.size_bytes == 160 * 8192 * (1 << 14)
    together = plan_read(pairs, np.arange(8192), np.arange(8192))
    assert (len(together), together.size_bytes) == (160, scattered.size_bytes)
    slices = list(cut_slices(together, bytes_max=1 << 24, descriptors_max=8192))
    assert len(slices) == together.size_bytes >> 24


# --- slices


@st.composite
def plans(draw: st.DrawFn) -> Descriptors:
    sizes = draw(st.lists(st.integers(1, 60), max_size=25))
    starts = np.cumsum([0, *sizes])[:-1]
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    return Descriptors.of(
        local=np.array(starts + 1000, dtype=np.uint64),
        remote=np.array(starts + np.cumsum(gaps) + 9000, dtype=np.uint64),
        sizes=np.array(sizes, dtype=np.uint64),
        local_device=CPU,
        remote_device=Device("cuda", 1),
    )


@settings(max_examples=300)
@given(plan=plans(), bytes_max=st.integers(1, 100), descriptors_max=st.integers(1, 12))
def test_slices_carry_every_byte_once_in_order_and_within_limits(
    plan: Descriptors, bytes_max: int, descriptors_max: int
) -> None:
    slices = list(cut_slices(plan, bytes_max=bytes_max, descriptors_max=descriptors_max))
    copies = [copy for piece in slices for copy in rows(piece)]
    assert list(bytes_of(copies)) == list(bytes_of(rows(plan)))
    for piece in slices:
        assert 1 <= len(piece) <= descriptors_max
        assert 1 <= piece.size_bytes <= bytes_max
        assert (piece.local_device, piece.remote_device) == (plan.local_device, plan.remote_device)
    for before, after in itertools.pairwise(slices):  # no slice is smaller than it has to be
        full = before.size_bytes + int(after.sizes[0]) > bytes_max
        assert full or len(before) == descriptors_max


@settings(max_examples=200)
@given(case=cases(), bytes_max=st.integers(1, 300), descriptors_max=st.integers(1, 12))
def test_a_load_in_slices_is_the_whole_load(case: Case, bytes_max: int, descriptors_max: int) -> None:
    local, remote = Cache(case.local), Cache(case.remote)
    groups = pair_regions(regions_of(local), regions_of(remote))
    slices = list(
        plan_slices(
            groups,
            array(case.local_ids),
            array(case.remote_ids),
            bytes_max=bytes_max,
            descriptors_max=descriptors_max,
        )
    )
    for piece in slices:
        assert 1 <= len(piece) <= descriptors_max
        assert 1 <= piece.size_bytes <= bytes_max
    copies = [copy for piece in slices for copy in rows(piece)]
    reference = slow_plan(local, remote, case.local_ids, case.remote_ids)
    assert sorted(bytes_of(copies)) == sorted(bytes_of(reference))


def test_a_load_without_blocks_has_no_slices() -> None:
    groups = pairs_of(RECIPE, RECIPE)
    assert list(plan_slices(groups, array([]), array([]), bytes_max=1, descriptors_max=1)) == []


def test_a_load_that_fits_is_one_slice() -> None:
    groups = pairs_of(RECIPE, RECIPE)
    blocks = array([7, 2, 9])
    (only,) = plan_slices(groups, blocks, blocks, bytes_max=3 * 6 * BLOCK_BYTES, descriptors_max=3 * 6)
    assert sorted(rows(only)) == sorted(rows(plan_read(groups, blocks, blocks)))


def test_a_slice_is_planned_when_it_is_asked_for() -> None:
    """The first bytes leave before the last ones are planned, and no load plans all of its gigabytes at once."""
    groups = pair_regions(large_regions(1 << 20), large_regions(1 << 20))
    scattered = np.arange(0, 1 << 20, 2, dtype=np.int64)
    tracemalloc.start()
    try:
        first = next(plan_slices(groups, scattered, scattered, bytes_max=1 << 24, descriptors_max=8192))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < first.size_bytes <= 1 << 24
    assert peak_bytes < 8 * scattered.nbytes  # one region's part of the plan is 3 times as large as the ids


@pytest.mark.parametrize(
    ("size", "bytes_max", "expected"),
    [
        (100, 100, [[100]]),
        (100, 99, [[99], [1]]),
        (100, 40, [[40], [40], [20]]),
        (100, 1, [[1]] * 100),
        (1 << 40, 1 << 38, [[1 << 38]] * 4),
    ],
)
def test_a_descriptor_above_the_limit_is_cut(size: int, bytes_max: int, expected: list[list[int]]) -> None:
    plan = Descriptors.of(
        local=np.array([(1 << 63) + 1], dtype=np.uint64),
        remote=np.array([7], dtype=np.uint64),
        sizes=np.array([size], dtype=np.uint64),
        local_device=CPU,
        remote_device=CPU,
    )
    slices = list(cut_slices(plan, bytes_max=bytes_max, descriptors_max=8))
    assert [piece.sizes.tolist() for piece in slices] == expected
    assert [int(piece.local[0]) for piece in slices] == [
        (1 << 63) + 1 + sum(map(sum, expected[:index])) for index in range(len(slices))
    ]


def test_an_empty_plan_has_no_slices() -> None:
    empty = plan_read(pairs_of(RECIPE, RECIPE), array([]), array([]))
    assert (len(empty), empty.size_bytes) == (0, 0)
    assert list(cut_slices(empty, bytes_max=1, descriptors_max=1)) == []


# --- block ids

NUM_BLOCKS = 8


def check(block_ids: Any) -> BlockIds:
    return check_block_ids(block_ids, num_blocks=NUM_BLOCKS, what="req-1: block_ids")


@pytest.mark.parametrize(
    "block_ids",
    [
        [3, 0, 7],
        (3, 0, 7),
        [np.int32(3), 0, np.int64(7)],
        *[np.array([3, 0, 7], dtype=kind) for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64)],
        np.array([7, 0, 3], dtype=np.int64)[::-1],
        torch.tensor([3, 0, 7]),
    ],
    ids=lambda block_ids: f"{type(block_ids).__name__} {getattr(block_ids, 'dtype', '')}",
)
def test_block_ids_keep_their_values_and_order(block_ids: Any) -> None:
    ids = check(block_ids)
    assert (ids.dtype, ids.tolist()) == (np.dtype(np.int64), [3, 0, 7])


@pytest.mark.parametrize("block_ids", [[], (), np.array([], dtype=np.int32), range(0)])
def test_no_blocks_are_fine(block_ids: Any) -> None:
    ids = check(block_ids)
    assert (ids.dtype, ids.shape) == (np.dtype(np.int64), (0,))


def test_checked_ids_do_not_change_with_the_callers_array() -> None:
    """An id is checked once; whoever writes it later must not get past the check."""
    given_ids = np.array([1, 2], dtype=np.int64)
    ids = check(given_ids)
    given_ids[0] = 1 << 40
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("block_ids", "named"),
    [
        ([0, -1], "-1"),
        ([0, 8], "8"),
        ([0, 1, 9, -3], "9"),
        ([2**62], str(2**62)),
        ([5, 1, 5], "5"),
        ([2**63], str(2**63)),
        ([-(2**63) - 1], str(-(2**63) - 1)),
        ([2**64 + 1, 1], str(2**64 + 1)),
        ([10**100], "1000"),
        ([1.0], "1.0"),
        ([1, 2.5], "2.5"),
        ([float("nan")], "nan"),
        (np.array([1.0, 2.0]), "1."),
        ([True, False], "True"),
        ([1, True], "True"),
        (np.array([True]), "True"),
        ([[1, 2], [3, 4]], "[[1, 2], [3, 4]]"),
        ([[1], [2, 3]], "[[1], [2, 3]]"),
        ([[]], "[[]]"),
        ([[], []], "[[], []]"),
        (5, "5"),
        (None, "None"),
        ([None], "None"),
        (["1"], "1"),
        ("123", "123"),
        (b"123", "123"),
        ([1, "2"], "2"),
        ([b"\x01"], "x01"),
        ({1, 2}, "{1, 2}"),
        ({}, "{}"),
        ([1j], "1j"),
        (np.array([3], dtype="m8[s]"), "3"),
        ([object()], "object"),
    ],
)
def test_bad_block_ids_are_named(block_ids: Any, named: str) -> None:
    with pytest.raises(RequestError, match=rf"^req-1: block_ids: .*{re.escape(named)}"):
        check(block_ids)


def test_a_message_does_not_repeat_a_million_ids() -> None:
    with pytest.raises(RequestError) as caught:
        check([0.5] * 1_000_000)
    assert len(str(caught.value)) < 200


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-2, 10), max_size=8))
def test_only_ids_of_the_cache_pass(block_ids: list[int]) -> None:
    good = all(0 <= block < NUM_BLOCKS for block in block_ids) and len(set(block_ids)) == len(block_ids)
    if good:
        assert check(block_ids).tolist() == block_ids
    else:
        with pytest.raises(RequestError):
            check(block_ids)


@settings(max_examples=100)
@given(count=st.integers(1, 9), bytes_max=st.integers(1, 400), descriptors_max=st.integers(1, 6))
def test_a_head_is_the_first_of_the_first_slice_and_changes_nothing_else(
    count: int, bytes_max: int, descriptors_max: int
) -> None:
    regions = Regions(
        bases=np.array([1000, 9000], dtype=np.uint64),
        strides=np.array([64, 64], dtype=np.uint64),
        block_size_bytes=32,
        num_blocks=16,
        device=CPU,
    )
    ids = np.arange(count, dtype=np.int64)
    arguments = (pair_regions(regions, regions), ids, ids + 3)
    head = Piece(local=5, remote=7, size_bytes=16)
    plain, headed = (
        list(plan_slices(*arguments, bytes_max=bytes_max, descriptors_max=descriptors_max, head=which))
        for which in (None, head)
    )
    first = headed[0]
    assert (int(first.local[0]), int(first.remote[0]), int(first.sizes[0])) == head
    rows = [np.concatenate([piece.table for piece in slices], axis=1) for slices in (plain, headed)]
    assert sum(piece.size_bytes for piece in headed) == sum(piece.size_bytes for piece in plain) + 16
    assert rows[1][:, 1:, 1].sum() == rows[0][:, :, 1].sum()
    if bytes_max >= 32:
        np.testing.assert_array_equal(rows[1][:, 1:], rows[0])
