"""Plans are executed on real buffers and compared with slow loads that only loop over torch tensors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvflow.checks import counted
from kvflow.core.cache.layout import BlockShape, KVStyle
from kvflow.core.cache.regions import Device, Regions, map_spans
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import (
    BlockIds,
    Chunks,
    Descriptors,
    Piece,
    check_block_ids,
    match_chunks,
    plan_read,
)
from kvflow.core.plan.slices import cut_slices, plan_slices
from kvflow.core.plan.topology import Shard, sources_of
from kvflow.core.protocol import codec
from kvflow.core.protocol.claims import regions_from_wire
from kvflow.errors import RequestError
from tests.core.caches import Cache, Recipe, Sides, whole_sides
from tests.core.claimed import REGIONS
from tests.core.plans import (
    BLOCKS_TOGETHER,
    CPU,
    RECIPE,
    SHARE,
    Load,
    array,
    bytes_of,
    execute,
    inside_one,
    large_regions,
    loads,
    located_chunks,
    lump,
    pair_sides,
    pair_whole,
    rows,
    rows_of_all,
    slow_load,
    traced_bytes,
    whole_blocks,
)
from tests.support.budgets import examples
from tests.support.tests_support import each

# --- chunks


Slot = tuple[int, int, int, int]  # our block, token in it, position of their block, token in it


def slots_of(chunks: Sequence[Chunks], ours: int, theirs: int) -> list[Slot]:
    """Where every token of chunks comes from and goes to."""
    size = min(ours, theirs)
    found = []
    for some in chunks:
        assert 1 <= some.tokens <= size
        parts = (np.zeros_like(some.local_ids) if of is None else of for of in (some.local_chunks, some.remote_chunks))
        local, remote = (np.add.outer(part * size, np.arange(some.tokens)).ravel() for part in parts)
        ours_at, theirs_at = (np.repeat(ids, some.tokens) for ids in (some.local_ids, some.remote_ids))
        found += zip(*(column.tolist() for column in (ours_at, local, theirs_at, remote)), strict=True)
    return found


block_sizes = st.tuples(st.integers(1, 6), st.sampled_from([1, 1, 2, 3, 4]), st.booleans()).map(
    lambda drawn: (drawn[0], drawn[0] * drawn[1])[:: 1 if drawn[2] else -1]
)


@examples(100, 350)
@given(sizes=block_sizes, offered=st.integers(0, 8), num_tokens=st.integers(0, 200), data=st.data())
def test_every_token_goes_where_the_prompt_has_it(
    sizes: tuple[int, int], offered: int, num_tokens: int, data: st.DataObject
) -> None:
    ours, theirs = sizes
    tokens = min(num_tokens, offered * theirs)
    most = -(-tokens // ours)
    count = data.draw(st.integers(0, most))
    ids = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count, unique=True))
    of_prompt = {"local_block_size": ours, "remote_block_size": theirs, "num_tokens": num_tokens}
    chunks = match_chunks(array(ids), offered, **of_prompt)
    first_block = most - count
    assert slots_of(chunks, ours, theirs) == [
        (ids[token // ours - first_block], token % ours, token // theirs, token % theirs)
        for token in range(first_block * ours, tokens)
    ]
    assert len(chunks) <= 2
    assert all(len(some) for some in chunks)
    assert [some.tokens for some in chunks[:-1]] == [min(ours, theirs)] * (len(chunks) - 1)  # the last may be partial
    if ours == theirs:  # the usual case carries no parts
        assert all(some.local_chunks is None and some.remote_chunks is None for some in chunks)
    at = first_block * ours // min(ours, theirs)
    for some in chunks:  # numbered as chunks of the prompt
        assert some.first == at
        at += len(some)
    too_many = most + data.draw(st.integers(1, 3))
    with pytest.raises(RequestError) as caught:
        match_chunks(np.arange(too_many, dtype=np.int64), offered, **of_prompt)
    given = f"{counted(too_many, 'local block')} of {counted(ours, 'token')}"
    offer = f"{counted(tokens, 'token')} in {counted(offered, 'block')} of {theirs}"
    assert str(caught.value) == f"load: {given}, but the offer has only {offer}"


@examples(100, 700)
@given(
    sizes=block_sizes,
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    offered=st.integers(0, 5),
    num_tokens=st.integers(0, 100),
    data=st.data(),
)
def test_every_sharded_token_comes_from_the_rank_that_holds_it(
    sizes: tuple[int, int], ranks: tuple[int, int], offered: int, num_tokens: int, data: st.DataObject
) -> None:
    """To each local rank: block b of n ranks is on rank b mod n, at place b // n of the block table.

    Here a block is what a rank holds. The ranks to read from are those of the topology, which all have equally many
    readers. Any numbers of ranks will do.
    """
    ours, theirs = sizes
    tokens = min(num_tokens, offered * theirs * ranks[1])
    most = -(-tokens // (ours * ranks[0]))
    count = data.draw(st.integers(0, most))
    ids = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count, unique=True))
    start, stop = (data.draw(st.integers(0, 30)) for _ in range(2))
    of_prompt = {"local_block_size": ours, "remote_block_size": theirs, "num_tokens": num_tokens}
    readers = [0] * ranks[1]
    latents = msgspec.structs.replace(SHARE, latent=True, sharded=True)
    for rank in range(ranks[0]):
        mine = msgspec.structs.replace(latents, tp_rank=rank, tp_size=ranks[0], block_size=ours * ranks[0])
        sources = {
            one.tp_rank: one.reporters
            for one in sources_of(
                mine, msgspec.structs.replace(latents, tp_size=ranks[1], block_size=theirs * ranks[1])
            )
        }
        for other in range(ranks[1]):
            shards = {"local_shard": mine.shard, "remote_shard": Shard(other, ranks[1])}
            chunks = match_chunks(array(ids), offered, **of_prompt, **shards)
            expected = []
            for token in range((most - count) * ours * ranks[0], tokens):
                (our_block, our_slot), (their_block, their_slot) = divmod(token, ours), divmod(token, theirs)
                if (our_block % ranks[0], their_block % ranks[1]) == (rank, other):
                    place = our_block // ranks[0] - (most - count)
                    expected.append((ids[place], our_slot, their_block // ranks[1], their_slot))
            assert slots_of(chunks, ours, theirs) == expected
            assert all(len(some) for some in chunks)
            assert not expected or other in sources
            size = min(sizes)
            between = slots_of([some.between(start, stop) for some in chunks], ours, theirs)
            assert between == [
                slot for slot in expected if start <= ((slot[2] * ranks[1] + other) * theirs + slot[3]) // size < stop
            ]
        for other in sources:
            readers[other] += 1
    assert readers == [sources[min(sources)]] * ranks[1], "each reader reports as one of as many"


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
            remote_part = 0 if some.remote_chunks is None else int(some.remote_chunks[0])
            assert some.first == int(some.remote_ids[0]) * (theirs // size) + remote_part


def test_the_tokens_of_a_prompt_may_be_more_than_memory_has() -> None:
    """A ticket may claim any number of tokens; memory grows only with our own blocks."""
    full, tail = match_chunks(
        array([5, 9]), 1 << 21, local_block_size=16, remote_block_size=1 << 42, num_tokens=(1 << 62) + 7
    )
    assert (full.local_ids.tolist(), tail.local_ids.tolist(), tail.tokens) == ([5], [9], 7)


# --- any part of a prompt between caches that hold the same model in different ways


WHOLE = (1 << 40, 1 << 20)


def slices_of(
    block_map: BlockMap, chunks: Sequence[Chunks], limits: tuple[int, int] = WHOLE, last: Piece | None = None
) -> Iterator[Descriptors]:
    """With limits of bytes and of descriptors."""
    pairs = zip(repeat(block_map), chunks)
    return plan_slices(pairs, bytes_max=limits[0], descriptors_max=limits[1], last=last)


def planned(
    load: Load, caches: tuple[Cache, Cache] | None = None, limits: tuple[int, int] = WHOLE
) -> list[Descriptors]:
    """Slices of a load between these caches, or two of that kind."""
    local, remote = caches or (Cache(load.sides.local), Cache(load.sides.remote))
    return list(slices_of(pair_sides(load.sides, local, remote), load.chunks, limits))


OURS = Recipe(style=KVStyle.FUSED, order="NHD", layers=2, blocks=4, tokens=2, heads=3, dim=4)
THEIRS = Recipe(style=KVStyle.APART, order="HND", layers=3, blocks=3, tokens=6, heads=2, dim=2, hnd_in_memory=True)
TAIL = Load(Sides(local=OURS, remote=THEIRS, local_start=2, remote_start=0, heads=1), 13, [3, 0], [2, 0, 1])
# Layers lie side by side in a row of blocks, but with one row their spans touch and do not overlap.
ONE_ROW = replace(BLOCKS_TOGETHER, blocks=1)


@examples(140, 400)
@given(
    load=loads(), seed=st.integers(0, 2**31), limits=st.just(WHOLE) | st.tuples(st.integers(1, 300), st.integers(1, 12))
)
@example(load=TAIL, seed=0, limits=WHOLE)
@example(load=Load(whole_sides(ONE_ROW, ONE_ROW), 4, [0], [0]), seed=0, limits=WHOLE)
@example(load=Load(whole_sides(*[replace(ONE_ROW, spare_blocks=5)] * 2), 4, [0], [0]), seed=0, limits=WHOLE)
def test_every_wanted_token_arrives_once_and_no_other_byte_changes(
    load: Load, seed: int, limits: tuple[int, int]
) -> None:
    """The proof of it all: styles, orders, block sizes, layers, heads, tails, slices; torch, token by token."""
    local, remote = Cache(load.sides.local), Cache(load.sides.remote)
    local.fill(seed)
    remote.fill(seed + 1)
    remote_before, local_before = remote.snapshot(), local.snapshot()
    slow_load(load, local, remote)
    expected = local.snapshot()
    local.restore(local_before)
    slices = planned(load, (local, remote), limits)
    assert all(1 <= piece.size_bytes <= limits[0] and 1 <= len(piece) <= limits[1] for piece in slices)
    assert limits != WHOLE or len(slices) == len(load.chunks)
    copies = rows_of_all(slices)
    execute(copies)
    assert local.snapshot() == expected
    assert remote.snapshot() == remote_before

    pairs = list(bytes_of(copies))  # by addresses: random bytes may be equal by chance
    assert len({mine for mine, _ in pairs}) == len({theirs for _, theirs in pairs}) == len(pairs)
    tokens = len(load.loaded) if load.local_ids else 0
    assert len(pairs) == tokens * pair_sides(load.sides, local, remote).token_size_bytes

    # What fusing and joining promise: memory that is registered separately is never read at once.
    local_spans, remote_spans = map_spans(local.tensors.items()), map_spans(remote.tensors.items())
    for mine, theirs, size in copies:
        assert inside_one(local_spans, mine, size)
        assert inside_one(remote_spans, theirs, size)


# --- consecutive chunks


def descriptor_count(local: Recipe, remote: Recipe, local_ids: list[int], remote_ids: list[int]) -> int:
    """Of a load of full blocks."""
    load = Load(whole_sides(local, remote), len(remote_ids) * remote.tokens, local_ids, remote_ids)
    return sum(map(len, planned(load)))


RUN = list(range(2, 9))
SMALL = replace(RECIPE, tokens=2)  # two blocks of it are one of RECIPE
PADDED = replace(RECIPE, block_padding=3)


@each(
    ("local", "remote", "local_ids", "remote_ids", "expected"),
    [
        (RECIPE, RECIPE, RUN, [block + 3 for block in RUN], 6),
        (BLOCKS_TOGETHER, BLOCKS_TOGETHER, RUN, RUN, 1),
        (PADDED, PADDED, RUN, RUN, 6 * 7),
        (RECIPE, PADDED, RUN, RUN, 6 * 7),
        (PADDED, RECIPE, RUN, RUN, 6 * 7),
        # parts of blocks
        (RECIPE, SMALL, [5, 6, 7], [2, 3, 4, 5, 6, 7], 6),
        (SMALL, RECIPE, [2, 3, 4, 5, 6, 7], [5, 6, 7], 6),
        (RECIPE, SMALL, [7, 6], [4, 5, 2, 3], 6),  # in the order of the remote blocks it goes on
        (RECIPE, SMALL, [6, 7], [4, 5, 2, 3], 6 * 2),
        (RECIPE, SMALL, [5, 6], [0, 2, 3, 5], 6 * 3),  # across the border of two of our blocks
        (SMALL, RECIPE, [1, 0, 3, 2], [5, 6], 6 * 4),
        (PADDED, SMALL, [5, 6], [2, 3, 4, 5], 6 * 2),
        (RECIPE, replace(SMALL, block_padding=3), [5, 6], [2, 3, 4, 5], 6 * 4),
        (RECIPE, SMALL, [6], [2, 3, 4, 5], 6),  # the first block is cached
    ],
)
def test_what_is_consecutive_on_both_sides_becomes_one_descriptor(
    local: Recipe, remote: Recipe, local_ids: list[int], remote_ids: list[int], expected: int
) -> None:
    assert descriptor_count(local, remote, local_ids, remote_ids) == expected


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


# --- addresses


def test_addresses_above_2_to_the_53_stay_exact() -> None:
    """Device memory may lie where a float no longer knows every integer."""
    base, stride, size = (1 << 61) + 1, (1 << 45) + 1, (1 << 45) - 1
    here = Regions(
        bases=np.array([base, base + (1 << 60)], dtype=np.uint64),
        strides=np.array([stride, stride], dtype=np.uint64),
        block=lump(size),
        planes=("latent",),
        num_blocks=1000,
        device=CPU,
    )
    there = replace(here, bases=here.bases + np.uint64(1 << 50), device=Device("cuda", 3))
    groups = pair_whole(replace(here, device=Device("cuda", 1)), there).region_maps(1)
    plan = plan_read(groups, whole_blocks([999, 3], [7, 998], 1))
    assert (plan.local_device, plan.remote_device) == (Device("cuda", 1), there.device)
    sealed = plan_read(groups, whole_blocks([999, 3], [7, 998], 1), Piece(5, 7, 16))
    assert sealed.table[:, :, 2].tolist() == [[1] * len(sealed), [3] * len(sealed)]
    for column in (plan.local, plan.remote, plan.sizes):
        assert column.dtype == np.uint64
    assert sorted(rows(plan)) == [
        (region + mine * stride, region + (1 << 50) + theirs * stride, size)
        for region in (base, base + (1 << 60))
        for mine, theirs in ((3, 998), (999, 7))
    ]


@each(
    ("stride", "base", "parts"),
    itertools.product(
        [4096, 1 << 50, 1 << 62, (1 << 63) - 4096, 1 << 63],
        [(1 << 62) + 1, (1 << 63) - 8192, (1 << 63) - 1, 1 << 63, (1 << 64) - 8193],
        [("latent",), ("KV",)],
    ),
)
def test_a_peers_table_is_refused_or_planned_exactly(stride: int, base: int, parts: tuple[str, ...]) -> None:
    """Addresses of a peer that pass the check must not trip the planner, nor wrap around in it."""
    claim = {"bases": [base], "strides": [stride], "block": lump(4096), "parts": parts, "num_blocks": 2}
    try:
        there = regions_from_wire(msgspec.structs.replace(REGIONS, **claim))
    except codec.WireError:
        return
    # K and V of a head together there may be apart here.
    ours, size = (("latent",), 4096) if parts == ("latent",) else (("K", "V"), 2048)
    bases = [4096 + 8192 * part for part in range(len(ours))]
    here = Regions(
        bases=np.array(bases, dtype=np.uint64),
        strides=np.array([size] * len(ours), dtype=np.uint64),
        block=lump(size),
        planes=ours,
        num_blocks=2,
        device=CPU,
    )
    plan = plan_read(pair_whole(here, there).region_maps(1), whole_blocks([0, 1], [1, 0], 1))
    assert sorted(rows(plan)) == [
        (at + size * block, base + stride * (1 - block) + size * part, size)
        for part, at in enumerate(bases)
        for block in (0, 1)
    ]


# --- slices


@st.composite
def plans(draw: st.DrawFn) -> Descriptors:
    sizes = [draw(st.integers(1, 60))] * draw(st.integers(0, 25))
    if draw(st.booleans()):  # not all of one size
        sizes = draw(st.lists(st.integers(1, 60), max_size=25))
    starts = np.cumsum([0, *sizes])[:-1]
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    return Descriptors.of(
        local=np.array(starts, dtype=np.uint64) + np.uint64((1 << 63) + 1),
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


def test_chunks_are_read_in_the_order_of_the_peers_memory() -> None:
    latent = replace(RECIPE, style=KVStyle.MLA, layers=1, heads=1)
    big = replace(latent, tokens=8)
    cases = (latent, latent, [9, 2, 7, 4]), (latent, big, [6, 2]), (big, latent, [8, 1, 3, 6])
    for local, remote, remote_ids in cases:
        tokens = len(remote_ids) * remote.tokens
        load = Load(whole_sides(local, remote), tokens, [9, 1, 5, 3][: tokens // local.tokens], remote_ids)
        starts = [int(piece.remote[0]) for piece in planned(load, limits=(4 * 8, 1))]
        assert len(starts) == tokens // 4
        assert starts == sorted(starts)


def nhd_heads() -> BlockMap:
    """A slice of heads in NHD is a piece for each token."""
    here, there = (
        Recipe(style=KVStyle.KV_FIRST, order="NHD", layers=8, blocks=64, tokens=64, heads=heads, dim=2)
        for heads in (1, 8)
    )
    case = Sides(local=here, remote=there, local_start=0, remote_start=3, heads=1)
    return pair_sides(case, Cache(here), Cache(there))


@each(
    ("block_map", "blocks", "tokens", "limits", "peak_bytes_max"),
    [
        # one region's part of the plan is 3 times as large as the ids
        (pair_whole(large_regions(1 << 20), large_regions(1 << 20)), 1 << 19, 1, (960 << 14, 8192), 8 * 8 << 19),
        # the ids in another order are half of it; all rows would be 12 times the ids
        (pair_whole(*[large_regions(1 << 16, layers=1)] * 2), 1 << 15, 1, (1 << 20, 1 << 20), 6 * 8 << 15),
        # small chunks that could be joined, and are not: rows of all would be 12 times the ids
        (pair_whole(*[large_regions(1 << 20, layers=1, block=lump(16))] * 2), 1 << 19, 1, (1 << 30, 8192), 6 * 8 << 19),
        # pieces of small chunks: 1024 rows of 48 bytes; all of them would be 32 times as large
        (nhd_heads(), 32, 64, (1 << 30, 1024), 8 * 48 * 1024),
    ],
)
def test_a_slice_is_planned_when_it_is_asked_for(
    block_map: BlockMap, blocks: int, tokens: int, limits: tuple[int, int], peak_bytes_max: int
) -> None:
    """The first bytes leave before the last ones are planned, and no load plans all of its gigabytes at once."""
    scattered = np.arange(0, 2 * blocks, 2, dtype=np.int64)
    chunks = [whole_blocks(scattered, scattered, tokens)]
    slices, first = slices_of(block_map, chunks, limits), []
    _, peak_bytes = traced_bytes(lambda: first.append(next(slices)))
    assert first[0].size_bytes == limits[0] or len(first[0]) == limits[1]
    assert peak_bytes < peak_bytes_max


@examples(25, 100)
@given(count=st.integers(1, 9), num_tokens=st.integers(1, 36), limits=st.tuples(st.integers(1, 400), st.integers(1, 6)))
def test_a_further_read_is_the_last_of_the_first_slice_and_changes_nothing_else(
    count: int, num_tokens: int, limits: tuple[int, int]
) -> None:
    block = BlockShape(tokens=4, heads=1, run=8, token_stride=8, head_stride=32)
    regions = large_regions(16, layers=1, block=block)
    tokens = max(num_tokens - num_tokens % 4 if count % 2 else num_tokens, 1)
    blocks = list(range(-(-tokens // 4)))
    chunks = located_chunks(blocks[-count:], [block + 3 for block in blocks], 4, 4, tokens)
    last = Piece(local=5, remote=7, size_bytes=16)
    plain, sealed = (list(slices_of(pair_whole(regions, regions), chunks, limits, which)) for which in (None, last))
    first = sealed[0]
    assert (int(first.local[-1]), int(first.remote[-1]), int(first.sizes[-1])) == last
    sealed[0] = first.cut(0, len(first) - 1, first.size_bytes - last.size_bytes)
    assert [piece.size_bytes for piece in sealed] == [piece.size_bytes for piece in plain]
    for with_last, without in zip(sealed, plain, strict=True):
        np.testing.assert_array_equal(with_last.table, without.table)


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
        ([0, 1, 9, -3], "9"),
        (np.array([0, 8]), "8"),
        (np.array([5, 1, 5]), "5"),
        ([2**64 + 1, 1], str(2**64 + 1)),
        ([1, True], "True"),
        ([[1], [2, 3]], "[[1], [2, 3]]"),
        ([1, "2"], "2"),
        ([0.5] * 1_000_000, "1000000 block ids"),
        (np.full(1_000_000, 0.5), "0.5"),
    ],
)
def test_bad_block_ids_are_named_in_short(block_ids: Any, named: str) -> None:
    """`checks` decides whether a value is a whole number."""
    with pytest.raises(RequestError, match=rf"^req-1: block_ids: .{{,150}}{re.escape(named)}.{{,50}}$"):
        check(block_ids)


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-2, 10), max_size=8))
def test_only_ids_of_the_cache_pass(block_ids: list[int]) -> None:
    good = all(0 <= block < NUM_BLOCKS for block in block_ids) and len(set(block_ids)) == len(block_ids)
    if good:
        assert check(block_ids).tolist() == block_ids
    else:
        with pytest.raises(RequestError):
            check(block_ids)
