"""Plans are executed on real buffers and compared with slow loads that only loop over torch tensors."""

from __future__ import annotations

import itertools
import re
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.core.cache.layout import BlockShape, KVStyle
from kvflow.core.cache.regions import Device, Regions, map_spans
from kvflow.core.plan.block_map import BlockMap, HeadSlice
from kvflow.core.plan.descriptors import (
    BlockIds,
    Chunks,
    Descriptors,
    Piece,
    check_block_ids,
    cut_slices,
    match_chunks,
    plan_read,
    plan_slices,
)
from kvflow.core.protocol import messages
from kvflow.errors import RequestError
from tests.budgets import examples
from tests.core.caches import Cache, Recipe, Sides
from tests.core.plans import (
    BLOCKS_TOGETHER,
    CPU,
    RECIPE,
    Case,
    Load,
    array,
    bytes_of,
    cases,
    execute,
    inside_one,
    loads,
    located_chunks,
    lump,
    pair,
    pair_sides,
    pair_whole,
    regions_of,
    rows,
    rows_of_all,
    slow_load,
    slow_plan,
    whole_blocks,
)
from tests.tests_support import each

BLOCK_BYTES = 4 * 2 * 8


# --- chunks


Slot = tuple[int, int, int, int]  # our block, token in it, position of their block, token in it


def slots_of(chunks: Sequence[Chunks], ours: int, theirs: int) -> list[Slot]:
    """Where every token of chunks comes from and goes to."""
    size = min(ours, theirs)
    found = []
    for some in chunks:
        assert 1 <= some.tokens <= size
        local_parts, remote_parts = (
            [0] * len(some) if parts is None else parts.tolist() for parts in (some.local_parts, some.remote_parts)
        )
        columns = (some.local_ids.tolist(), local_parts, some.remote_ids.tolist(), remote_parts)
        for local, local_part, remote, remote_part in zip(*columns, strict=True):
            for token in range(some.tokens):
                found.append((local, local_part * size + token, remote, remote_part * size + token))
    return found


block_sizes = st.tuples(st.integers(1, 6), st.sampled_from([1, 1, 2, 3, 4]), st.booleans()).map(
    lambda drawn: (drawn[0], drawn[0] * drawn[1])[:: 1 if drawn[2] else -1]
)


@examples(100, 500)
@given(
    sizes=block_sizes,
    offered=st.integers(0, 8),
    num_tokens=st.integers(0, 200),
    data=st.data(),
    extra=st.integers(1, 3),
)
def test_every_token_goes_where_the_prompt_has_it(
    sizes: tuple[int, int], offered: int, num_tokens: int, data: st.DataObject, extra: int
) -> None:
    ours, theirs = sizes
    tokens = min(num_tokens, offered * theirs)
    most = -(-tokens // ours)
    count = data.draw(st.integers(0, most))
    ids = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count, unique=True))
    chunks = match_chunks(array(ids), offered, local_block_size=ours, remote_block_size=theirs, num_tokens=num_tokens)
    first_block = most - count
    assert slots_of(chunks, ours, theirs) == [
        (ids[token // ours - first_block], token % ours, token // theirs, token % theirs)
        for token in range(first_block * ours, tokens)
    ]
    assert len(chunks) <= 2
    assert all(len(some) for some in chunks)
    assert [some.tokens for some in chunks[:-1]] == [min(ours, theirs)] * (len(chunks) - 1)  # the last may be partial
    if ours == theirs:  # the usual case carries no parts
        assert all(some.local_parts is None and some.remote_parts is None for some in chunks)
    at = first_block * ours // min(ours, theirs)
    for some in chunks:  # numbered as chunks of the prompt
        assert some.first == at
        at += len(some)
    with pytest.raises(RequestError):
        match_chunks(
            np.arange(most + extra, dtype=np.int64),
            offered,
            local_block_size=ours,
            remote_block_size=theirs,
            num_tokens=num_tokens,
        )


@examples(60, 300)
@given(sizes=block_sizes, offered=st.integers(1, 6), cached=st.integers(0, 5), data=st.data())
def test_the_chunks_between_two_places_of_the_prompt(
    sizes: tuple[int, int], offered: int, cached: int, data: st.DataObject
) -> None:
    """As when some of the blocks are there to be read and others are not yet."""
    ours, theirs = sizes
    size = min(ours, theirs)
    tokens = data.draw(st.integers(1, offered * theirs))
    ids = list(range(50, 50 + max(-(-tokens // ours) - cached, 0)))
    chunks = match_chunks(array(ids), offered, local_block_size=ours, remote_block_size=theirs, num_tokens=tokens)
    start, stop = (data.draw(st.integers(0, offered * theirs // size + 2)) for _ in range(2))
    found = [some.between(start, stop) for some in chunks]
    assert slots_of(found, ours, theirs) == [
        slot for slot in slots_of(chunks, ours, theirs) if start <= (slot[2] * theirs + slot[3]) // size < stop
    ]
    for some in found:
        if len(some):
            remote_part = 0 if some.remote_parts is None else int(some.remote_parts[0])
            assert some.first == int(some.remote_ids[0]) * (theirs // size) + remote_part


def test_more_local_blocks_than_tokens_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        match_chunks(array([1, 2, 3, 4]), 5, local_block_size=16, remote_block_size=8, num_tokens=1000)
    assert str(caught.value) == "load: 4 local blocks of 16 tokens, but only 40 tokens in 5 blocks of 8 are offered"


@each("num_tokens", [0, 1, 15, 16, 17, 1000])
@each("theirs", [4, 16, 32])
def test_a_full_hit_has_no_chunks(num_tokens: int, theirs: int) -> None:
    """All of the prompt is cached, a partly filled last block too."""
    assert match_chunks(array([]), 3, local_block_size=16, remote_block_size=theirs, num_tokens=num_tokens) == ()


def test_the_tokens_of_a_prompt_may_be_more_than_memory_has() -> None:
    """A ticket may claim anything: what is made of it grows with our own blocks."""
    full, tail = match_chunks(
        array([5, 9]), 1 << 21, local_block_size=16, remote_block_size=1 << 42, num_tokens=(1 << 62) + 7
    )
    assert (full.local_ids.tolist(), tail.local_ids.tolist(), tail.tokens) == ([5], [9], 7)


def test_positions_become_the_blocks_of_a_rank() -> None:
    (some,) = match_chunks(array([7, 8]), 4, local_block_size=4, remote_block_size=2, num_tokens=8)
    here, there = some.locate(array([30, 10, 20, 40])), some.locate(array([3, 1, 2, 4]))
    assert some.remote_ids.tolist() == [0, 1, 2, 3]
    assert (here.remote_ids.tolist(), there.remote_ids.tolist()) == ([30, 10, 20, 40], [3, 1, 2, 4])
    for found in (here, there):
        assert found.local_ids.tolist() == [7, 7, 8, 8]
        assert found.local_parts is not None
        assert (found.local_parts.tolist(), found.remote_parts) == ([0, 1, 0, 1], None)


# --- whole blocks between caches whose blocks are the same bytes


@examples(60, 300)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_every_wanted_byte_arrives_and_no_other_byte_changes(case: Case, seed: int) -> None:
    local, remote = Cache(case.local), Cache(case.remote)
    local.fill(seed)
    remote.fill(seed + 1)
    remote_before, local_before = remote.snapshot(), local.snapshot()
    plan = plan_read(pair(local, remote).groups[case.local.tokens], case.chunks)
    reference = slow_plan(local, remote, case.local_ids, case.remote_ids)
    assert sorted(bytes_of(rows(plan))) == sorted(bytes_of(reference))

    execute(reference)
    expected = local.snapshot()
    local.restore(local_before)
    execute(rows(plan))
    assert local.snapshot() == expected
    assert remote.snapshot() == remote_before


@each("spare_blocks", [0, 5])
def test_the_only_block_of_a_cache_stays_inside_its_layers_span(spare_blocks: int) -> None:
    """Layers lie side by side in a row of blocks, but with one row their spans touch and do not overlap."""
    recipe = replace(BLOCKS_TOGETHER, blocks=1, spare_blocks=spare_blocks)
    cache = Cache(recipe)
    spans = map_spans(cache.tensors)
    assert len(spans) == recipe.layers
    plan = plan_read(pair(cache, Cache(recipe)).groups[4], whole_blocks([0], [0], 4))
    for mine, _, size in rows(plan):
        assert inside_one(spans, mine, size)


@examples(25, 100)
@given(case=cases())
def test_a_plan_is_never_longer_than_the_slow_one_and_writes_no_byte_twice(case: Case) -> None:
    local, remote = Cache(case.local), Cache(case.remote)
    plan = plan_read(pair(local, remote).groups[case.local.tokens], case.chunks)
    assert len(plan) <= len(slow_plan(local, remote, case.local_ids, case.remote_ids))
    assert plan.size_bytes == len(case.local_ids) * local.infer().block_size_bytes
    targets = [mine for mine, _ in bytes_of(rows(plan))]
    assert len(set(targets)) == len(targets) == plan.size_bytes


@examples(25, 100)
@given(case=cases(), tokens=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_opaque_blocks_arrive_whole(case: Case, tokens: int, seed: int) -> None:
    """Also the last one, of which the prompt fills a part."""
    local, remote = Cache(case.local), Cache(case.remote)
    local.fill(seed)
    remote.fill(seed + 1)
    layers = local.infer().layer_indices
    block_map = BlockMap(
        regions_of(local),
        regions_of(remote),
        heads=HeadSlice(0, 0, case.local.heads),
        local_layers=layers,
        remote_layers=layers,
        opaque=True,
    )
    prompt = max(len(case.remote_ids) * case.local.tokens - min(tokens, case.local.tokens) + 1, 0)
    chunks = located_chunks(case.local_ids, case.remote_ids, case.local.tokens, case.local.tokens, prompt)
    plan = rows_of_all(list(plan_slices(block_map, chunks, bytes_max=1 << 40, descriptors_max=1 << 20)))
    reference = slow_plan(local, remote, case.local_ids, case.remote_ids)
    assert sorted(bytes_of(plan)) == sorted(bytes_of(reference))


# --- any part of a prompt between caches that hold the same model in different ways


def planned(
    load: Load, local: Cache, remote: Cache, *, bytes_max: int = 1 << 40, descriptors_max: int = 1 << 20
) -> list[Descriptors]:
    block_map = pair_sides(load.sides, local, remote)
    return list(plan_slices(block_map, load.chunks, bytes_max=bytes_max, descriptors_max=descriptors_max))


def as_load(case: Case) -> Load:
    sides = Sides(local=case.local, remote=case.remote, local_start=0, remote_start=0, heads=case.local.heads)
    return Load(sides, len(case.remote_ids) * case.local.tokens, case.local_ids, case.remote_ids)


any_loads = loads() | cases().map(as_load)  # the latter are less different, so that more is fused and joined


TAIL = Load(
    Sides(
        local=Recipe(style=KVStyle.FUSED, order="NHD", layers=2, blocks=4, tokens=2, heads=3, dim=4),
        remote=Recipe(
            style=KVStyle.APART, order="HND", layers=3, blocks=3, tokens=6, heads=2, dim=2, hnd_in_memory=True
        ),
        local_start=2,
        remote_start=0,
        heads=1,
    ),
    tokens=13,
    local_ids=[3, 0],
    remote_ids=[2, 0, 1],
)


@examples(120, 600)
@given(load=any_loads, seed=st.integers(0, 2**31))
@example(load=TAIL, seed=0)
def test_every_wanted_token_arrives_and_no_other_byte_changes(load: Load, seed: int) -> None:
    """The proof of it all: styles, orders, block sizes, layers, heads and tails against torch, token by token."""
    local, remote = Cache(load.sides.local), Cache(load.sides.remote)
    local.fill(seed)
    remote.fill(seed + 1)
    remote_before, local_before = remote.snapshot(), local.snapshot()
    slow_load(load, local, remote)
    expected = local.snapshot()
    local.restore(local_before)
    execute(rows_of_all(planned(load, local, remote)))
    assert local.snapshot() == expected
    assert remote.snapshot() == remote_before


@examples(60, 300)
@given(load=any_loads)
def test_nothing_is_read_twice_or_left_out(load: Load) -> None:
    """Counted by addresses: random bytes may be equal by chance."""
    local, remote = Cache(load.sides.local), Cache(load.sides.remote)
    block_map = pair_sides(load.sides, local, remote)
    copies = rows_of_all(planned(load, local, remote))
    pairs = list(bytes_of(copies))
    assert len({mine for mine, _ in pairs}) == len({theirs for _, theirs in pairs}) == len(pairs)
    tokens = len(load.loaded) if load.local_ids else 0
    assert len(pairs) == tokens * block_map.token_size_bytes


@examples(60, 300)
@given(load=any_loads)
def test_no_descriptor_leaves_a_registered_span(load: Load) -> None:
    """What fusing and joining promise: memory that is registered separately is never read at once."""
    local, remote = Cache(load.sides.local), Cache(load.sides.remote)
    local_spans, remote_spans = map_spans(local.tensors), map_spans(remote.tensors)
    for mine, theirs, size in rows_of_all(planned(load, local, remote)):
        assert inside_one(local_spans, mine, size)
        assert inside_one(remote_spans, theirs, size)


@examples(60, 300)
@given(load=any_loads, bytes_max=st.integers(1, 300), descriptors_max=st.integers(1, 12))
def test_a_load_in_slices_is_the_whole_load(load: Load, bytes_max: int, descriptors_max: int) -> None:
    local, remote = Cache(load.sides.local), Cache(load.sides.remote)
    slices = planned(load, local, remote, bytes_max=bytes_max, descriptors_max=descriptors_max)
    for piece in slices:
        assert 1 <= len(piece) <= descriptors_max
        assert 1 <= piece.size_bytes <= bytes_max
    assert sorted(bytes_of(rows_of_all(slices))) == sorted(bytes_of(rows_of_all(planned(load, local, remote))))


@examples(25, 100)
@given(load=loads(), slots=st.permutations(range(3)))
def test_ranks_of_another_split_fill_the_same_cache(load: Load, slots: list[int]) -> None:
    """One reader takes its heads from several ranks: the plans together fill all of them, and none twice."""
    recipe = replace(load.sides.local, heads=3) if load.sides.local.style is not KVStyle.MLA else None
    if recipe is None:
        return
    remote_recipe = replace(load.sides.remote, heads=1)
    local = Cache(recipe)
    targets: list[int] = []
    for head in slots:
        remote = Cache(remote_recipe)
        case = Sides(local=recipe, remote=remote_recipe, local_start=head, remote_start=0, heads=1)
        split = Load(case, load.tokens, load.local_ids, load.remote_ids)
        targets += [mine for mine, _ in bytes_of(rows_of_all(planned(split, local, remote)))]
    case = Sides(local=recipe, remote=replace(remote_recipe, heads=3), local_start=0, remote_start=0, heads=3)
    together = Load(case, load.tokens, load.local_ids, load.remote_ids)
    whole = [mine for mine, _ in bytes_of(rows_of_all(planned(together, local, Cache(case.remote))))]
    assert sorted(targets) == sorted(whole)


# --- consecutive chunks


def descriptor_count(local: Recipe, remote: Recipe, local_ids: list[int], remote_ids: list[int]) -> int:
    """Of a load of full blocks."""
    case = Sides(local=local, remote=remote, local_start=0, remote_start=0, heads=local.heads)
    tokens = len(remote_ids) * remote.tokens
    return sum(map(len, planned(Load(case, tokens, local_ids, remote_ids), Cache(local), Cache(remote))))


RUN = list(range(2, 9))


@each(
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


SMALL = replace(RECIPE, tokens=2)  # two blocks of it are one of RECIPE


@each(
    ("local", "remote", "local_ids", "remote_ids", "expected"),
    [
        (RECIPE, SMALL, [5, 6, 7], [2, 3, 4, 5, 6, 7], 6),
        (SMALL, RECIPE, [2, 3, 4, 5, 6, 7], [5, 6, 7], 6),
        (RECIPE, SMALL, [7, 5], [4, 5, 2, 3], 6 * 2),
        (RECIPE, SMALL, [7, 6], [4, 5, 2, 3], 6),  # in the order of the remote blocks it goes on
        (RECIPE, SMALL, [6, 7], [4, 5, 2, 3], 6 * 2),
        (RECIPE, SMALL, [5, 6], [3, 2, 5, 4], 6 * 4),
        (RECIPE, SMALL, [5, 6], [0, 2, 4, 6], 6 * 4),
        (RECIPE, SMALL, [5, 6], [0, 2, 3, 5], 6 * 3),  # across the border of two of our blocks
        (SMALL, RECIPE, [1, 0, 3, 2], [5, 6], 6 * 4),
        (replace(RECIPE, block_padding=3), SMALL, [5, 6], [2, 3, 4, 5], 6 * 2),
        (RECIPE, replace(SMALL, block_padding=3), [5, 6], [2, 3, 4, 5], 6 * 4),
        (RECIPE, SMALL, [6], [2, 3, 4, 5], 6),  # the first block is cached
    ],
)
def test_consecutive_parts_of_blocks_become_one_descriptor(
    local: Recipe, remote: Recipe, local_ids: list[int], remote_ids: list[int], expected: int
) -> None:
    assert descriptor_count(local, remote, local_ids, remote_ids) == expected


def test_pieces_of_a_block_are_not_joined_with_those_of_the_next() -> None:
    """Each head of HND goes on in no other block, though the last head's end is where the next block begins."""
    hnd = replace(RECIPE, hnd_in_memory=True)
    case = Sides(local=hnd, remote=replace(hnd, heads=4), local_start=0, remote_start=2, heads=2)
    assert sum(map(len, planned(Load(case, 12, RUN[:3], RUN[:3]), Cache(hnd), Cache(case.remote)))) == 6 * 3
    case = Sides(local=hnd, remote=RECIPE, local_start=0, remote_start=0, heads=2)
    assert sum(map(len, planned(Load(case, 12, RUN[:3], RUN[:3]), Cache(hnd), Cache(RECIPE)))) == 6 * 3 * 4 * 2


def test_a_tail_costs_one_descriptor_for_each_region() -> None:
    case = Sides(local=RECIPE, remote=RECIPE, local_start=0, remote_start=0, heads=2)
    for tokens, expected in ((12, 6), (11, 6 * 2), (9, 6 * 2), (8, 6), (1, 6)):
        blocks = -(-tokens // 4)
        found = planned(Load(case, tokens, RUN[:blocks], RUN[:blocks]), Cache(RECIPE), Cache(RECIPE))
        assert sum(map(len, found)) == expected


# --- addresses


def test_addresses_above_2_to_the_53_stay_exact() -> None:
    """Device memory may lie where a float no longer knows every integer."""
    base, stride, size = (1 << 61) + 1, (1 << 45) + 1, (1 << 45) - 1
    here = Regions(
        bases=np.array([base, base + (1 << 60)], dtype=np.uint64),
        strides=np.array([stride, stride], dtype=np.uint64),
        block=lump(size),
        parts=("latent",),
        num_blocks=1000,
        device=CPU,
    )
    there = replace(here, bases=here.bases + np.uint64(1 << 50), device=Device("cuda", 3))
    plan = plan_read(pair_whole(here, there).groups[1], whole_blocks([999, 3], [7, 998], 1))
    assert (plan.local_device, plan.remote_device) == (here.device, there.device)
    for column in (plan.local, plan.remote, plan.sizes):
        assert column.dtype == np.uint64
    assert sorted(rows(plan)) == [
        (region + mine * stride, region + (1 << 50) + theirs * stride, size)
        for region in (base, base + (1 << 60))
        for mine, theirs in ((3, 998), (999, 7))
    ]


@each("stride", [4096, 1 << 50, 1 << 62, (1 << 63) - 4096, 1 << 63])
@each("base", [(1 << 62) + 1, (1 << 63) - 8192, (1 << 63) - 1, 1 << 63, (1 << 64) - 8193])
@each("parts", [("latent",), ("KV",)])
def test_a_peers_table_is_refused_or_planned_exactly(base: int, stride: int, parts: tuple[str, ...]) -> None:
    """Whatever addresses a peer claims: what passes the check must not trip the planner, nor wrap around in it."""
    table = messages.RegionTable(
        bases=[base],
        strides=[stride],
        block=lump(4096),
        parts=parts,
        num_blocks=2,
        device_kind="cpu",
        device_index=0,
    )
    try:
        there = messages.regions_from_wire(table)
    except messages.WireError:
        return
    if parts == ("KV",):  # K and V of a head together there, apart here
        here = replace(
            there,
            bases=np.array([4096, 4096 + 8192], dtype=np.uint64),
            strides=np.array([2048, 2048], dtype=np.uint64),
            block=lump(2048),
            parts=("K", "V"),
        )
        expected = [
            (4096, base + stride, 2048),
            (4096 + 2048, base, 2048),
            (4096 + 8192, base + stride + 2048, 2048),
            (4096 + 8192 + 2048, base + 2048, 2048),
        ]
    else:
        here = replace(there, bases=np.array([4096], dtype=np.uint64), strides=np.array([8192], dtype=np.uint64))
        expected = [(4096, base + stride, 4096), (4096 + 8192, base, 4096)]
    plan = plan_read(pair_whole(here, there).groups[1], whole_blocks([0, 1], [1, 0], 1))
    assert sorted(rows(plan)) == expected


def test_devices_are_written_into_every_row() -> None:
    regions = large_regions(4, layers=2)
    there = replace(regions, device=Device("cuda", 3))
    here = replace(regions, device=Device("cuda", 1))
    plan = plan_read(pair_whole(here, there).groups[1], whole_blocks([0, 2], [2, 0], 1), Piece(5, 7, 16))
    assert plan.table[:, :, 2].tolist() == [[1] * len(plan), [3] * len(plan)]


def large_regions(blocks: int, layers: int = 80, size: int = 1 << 14) -> Regions:
    step = size * blocks + 4096
    return Regions(
        bases=np.arange(1, 2 * layers + 1, dtype=np.uint64) * np.uint64(step),
        strides=np.full(2 * layers, size, dtype=np.uint64),
        block=lump(size),
        parts=("K", "V"),
        num_blocks=blocks,
        device=CPU,
    )


def test_a_large_load_is_planned_in_full() -> None:
    groups = pair_whole(large_regions(20_000), large_regions(20_000)).groups[1]
    order = np.random.default_rng(1).permutation(20_000)[:8192].astype(np.int64)
    scattered = plan_read(groups, whole_blocks(order, order[::-1].copy(), 1))
    assert len(scattered) > 160 * 8000
    assert scattered.size_bytes == 160 * 8192 * (1 << 14)
    together = plan_read(groups, whole_blocks(np.arange(8192), np.arange(8192), 1))
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


@examples(60, 300)
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


def test_a_load_without_blocks_has_no_slices() -> None:
    block_map = pair(Cache(RECIPE), Cache(RECIPE))
    for chunks in ([], [whole_blocks([], [], 4)]):
        assert list(plan_slices(block_map, chunks, bytes_max=1, descriptors_max=1)) == []


def test_a_load_that_fits_is_one_slice() -> None:
    block_map = pair(Cache(RECIPE), Cache(RECIPE))
    chunks = whole_blocks([7, 2, 9], [7, 2, 9], 4)
    (only,) = plan_slices(block_map, [chunks], bytes_max=3 * 6 * BLOCK_BYTES, descriptors_max=3 * 6)
    assert sorted(rows(only)) == sorted(rows(plan_read(block_map.groups[4], chunks)))


def test_chunks_are_read_in_the_order_of_the_peers_memory() -> None:
    latent = replace(RECIPE, style=KVStyle.MLA, layers=1, heads=1)
    big = replace(latent, tokens=8)
    for local, remote, remote_ids in (
        (latent, latent, [9, 2, 7, 4]),
        (latent, big, [6, 2]),
        (big, latent, [8, 1, 3, 6]),
    ):
        case = Sides(local=local, remote=remote, local_start=0, remote_start=0, heads=1)
        tokens = len(remote_ids) * remote.tokens
        load = Load(case, tokens, [9, 1, 5, 3][: tokens // local.tokens], remote_ids)
        slices = planned(load, Cache(local), Cache(remote), bytes_max=4 * 8, descriptors_max=1)
        starts = [int(piece.remote[0]) for piece in slices]
        assert len(starts) == tokens // 4
        assert starts == sorted(starts)


def test_a_slice_is_planned_when_it_is_asked_for() -> None:
    """The first bytes leave before the last ones are planned, and no load plans all of its gigabytes at once."""
    block_map = pair_whole(large_regions(1 << 20), large_regions(1 << 20))
    scattered = np.arange(0, 1 << 20, 2, dtype=np.int64)
    chunks = whole_blocks(scattered, scattered, 1)
    tracemalloc.start()
    try:
        first = next(plan_slices(block_map, [chunks], bytes_max=1 << 24, descriptors_max=8192))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < first.size_bytes <= 1 << 24
    assert peak_bytes < 8 * scattered.nbytes  # one region's part of the plan is 3 times as large as the ids


def test_large_chunks_are_not_planned_at_once() -> None:
    """The limit of bytes holds while planning, too, where descriptors would allow for more."""
    block_map = pair_whole(large_regions(1 << 16, layers=1), large_regions(1 << 16, layers=1))
    scattered = np.arange(0, 1 << 16, 2, dtype=np.int64)
    slices = plan_slices(block_map, [whole_blocks(scattered, scattered, 1)], bytes_max=1 << 20, descriptors_max=1 << 20)
    tracemalloc.start()
    try:
        first = next(slices)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert first.size_bytes == 1 << 20
    assert peak_bytes < 6 * scattered.nbytes  # the ids in another order are half of it; all rows would be 12 of it


def test_many_pieces_of_small_chunks_are_not_planned_at_once() -> None:
    """A slice of heads in NHD is a piece for each token: the limit of descriptors holds while planning, too."""
    small, large = (
        Recipe(style=KVStyle.KV_FIRST, order="NHD", layers=8, blocks=64, tokens=64, heads=heads, dim=2)
        for heads in (1, 8)
    )
    case = Sides(local=small, remote=large, local_start=0, remote_start=3, heads=1)
    block_map = pair_sides(case, Cache(small), Cache(large))
    ids = list(range(0, 64, 2))
    chunks = located_chunks(ids, ids, 64, 64, 32 * 64)
    tracemalloc.start()
    try:
        first = next(plan_slices(block_map, chunks, bytes_max=1 << 30, descriptors_max=1024))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(first) == 1024
    assert peak_bytes < 8 * first.table.nbytes  # all of them would be 32 times as large


@each(
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
    empty = plan_read(pair(Cache(RECIPE), Cache(RECIPE)).groups[4], whole_blocks([], [], 4))
    assert (len(empty), empty.size_bytes) == (0, 0)
    assert list(cut_slices(empty, bytes_max=1, descriptors_max=1)) == []


@examples(25, 100)
@given(
    count=st.integers(1, 9),
    num_tokens=st.integers(1, 36),
    bytes_max=st.integers(1, 400),
    descriptors_max=st.integers(1, 6),
)
def test_a_head_is_the_first_of_the_first_slice_and_changes_nothing_else(
    count: int, num_tokens: int, bytes_max: int, descriptors_max: int
) -> None:
    regions = Regions(
        bases=np.array([1000, 9000], dtype=np.uint64),
        strides=np.array([64, 64], dtype=np.uint64),
        block=BlockShape(tokens=4, heads=1, run=8, token_stride=8, head_stride=32),
        parts=("K", "V"),
        num_blocks=16,
        device=CPU,
    )
    tokens = max(num_tokens - num_tokens % 4 if count % 2 else num_tokens, 1)
    blocks = list(range(-(-tokens // 4)))
    chunks = located_chunks(blocks[-count:], [block + 3 for block in blocks], 4, 4, tokens)
    head = Piece(local=5, remote=7, size_bytes=16)
    plain, headed = (
        list(
            plan_slices(
                pair_whole(regions, regions), chunks, bytes_max=bytes_max, descriptors_max=descriptors_max, head=which
            )
        )
        for which in (None, head)
    )
    first = headed[0]
    assert (int(first.local[0]), int(first.remote[0]), int(first.sizes[0])) == head
    rows = [np.concatenate([piece.table for piece in slices], axis=1) for slices in (plain, headed)]
    assert sum(piece.size_bytes for piece in headed) == sum(piece.size_bytes for piece in plain) + 16
    assert rows[1][:, 1:, 1].sum() == rows[0][:, :, 1].sum()
    for piece in headed:
        extra = piece is first
        assert len(piece) <= descriptors_max + extra
        assert piece.size_bytes <= bytes_max + 16 * extra
    np.testing.assert_array_equal(rows[1][:, 1:], rows[0])
    assert [len(piece) for piece in headed] == [len(piece) + (not index) for index, piece in enumerate(plain)]


# --- block ids

NUM_BLOCKS = 8


def check(block_ids: Any) -> BlockIds:
    return check_block_ids(block_ids, num_blocks=NUM_BLOCKS, what="req-1: block_ids")


@each(
    "block_ids",
    [
        [3, 0, 7],
        (3, 0, 7),
        [np.int32(3), 0, np.int64(7)],
        *[np.array([3, 0, 7], dtype=kind) for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64)],
        np.array([7, 0, 3], dtype=np.int64)[::-1],
        torch.tensor([3, 0, 7]),
    ],
)
def test_block_ids_keep_their_values_and_order(block_ids: Any) -> None:
    ids = check(block_ids)
    assert (ids.dtype, ids.tolist()) == (np.dtype(np.int64), [3, 0, 7])


@each("block_ids", [[], (), np.array([], dtype=np.int32), range(0)])
def test_no_blocks_are_fine(block_ids: Any) -> None:
    ids = check(block_ids)
    assert (ids.dtype, ids.shape) == (np.dtype(np.int64), (0,))


def test_checked_ids_do_not_change_with_the_callers_array() -> None:
    """An id is checked once; whoever writes it later must not get past the check."""
    given_ids = np.array([1, 2], dtype=np.int64)
    ids = check(given_ids)
    given_ids[0] = 1 << 40
    assert ids.tolist() == [1, 2]


@each(
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
