"""The common load planned in one go: the same descriptors as by the general steps, wherever both apply."""

from __future__ import annotations

from dataclasses import replace
from itertools import repeat

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from kvflow.core.cache.layout import KVStyle
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import FEW_BLOCKS, Piece, match_few, read_few, small_load_map
from kvflow.core.plan.slices import plan_slices
from kvflow.core.plan.topology import Shard
from tests.core.caches import Cache, whole_sides
from tests.core.plans import (
    BLOCKS_TOGETHER,
    RECIPE,
    Load,
    array,
    draw_ids,
    loads,
    pair,
    pair_sides,
    pair_whole,
    regions_of,
)
from tests.support.budgets import examples

BLOCKS = 12
PLACES = (
    RECIPE,
    BLOCKS_TOGETHER,
    replace(RECIPE, block_padding=3),
    replace(RECIPE, style=KVStyle.FUSED, layers=1),
    replace(RECIPE, order="HND"),
    replace(RECIPE, layers=2, layer_indices=(1, 0)),
)
LASTS = (None, Piece(local=5, remote=7, size_bytes=16))


def both_plans(load: Load, block_map: BlockMap, last: Piece | None) -> bool:
    """Whether the short way applies; then it has to plan what the general one plans."""
    pairs = small_load_map(block_map)
    if pairs is None or not load.local_ids:
        return False
    tokens = block_map.local.block.tokens
    blocks = match_few(array(load.local_ids), load.remote_ids, tokens, load.first_block * tokens, load.tokens)
    if blocks is None:
        return False
    found = read_few(pairs, blocks, last)
    limits = {"bytes_max": found.size_bytes + 1, "descriptors_max": len(found) + 1}
    (expected,) = plan_slices(zip(repeat(block_map), load.chunks), **limits, last=last)
    np.testing.assert_array_equal(found.table, expected.table)
    assert (found.size_bytes, found.local_device, found.remote_device) == (
        expected.size_bytes,
        expected.local_device,
        expected.remote_device,
    )
    return True


@st.composite
def common(draw: st.DrawFn) -> Load:
    """Whole blocks of equal sizes, in any order or in runs, of caches that may lie in memory in other ways."""
    local, remote = draw(st.sampled_from(PLACES)), draw(st.sampled_from(PLACES))
    if local.style is not remote.style or local.layers != remote.layers:
        remote = local
    offered = draw(st.integers(1, BLOCKS))
    count = draw(st.integers(1, offered))
    ids = [draw_ids(draw, some, BLOCKS) for some in (count, offered)]
    if draw(st.booleans()):
        ids = [sorted(some) for some in ids]
    return Load(whole_sides(local, remote), offered * local.tokens, *ids)


@examples(90, 700)
@given(load=common() | loads(), last=st.sampled_from(LASTS))
def test_the_short_way_plans_what_the_general_one_plans(load: Load, last: Piece | None) -> None:
    """Any caches, tails and further reads: where it does not apply it gives None, where it does it is equal."""
    block_map = pair_sides(load.sides, Cache(load.sides.local), Cache(load.sides.remote))
    event(f"applies: {both_plans(load, block_map, last)}")


def test_it_applies_where_it_is_meant_for() -> None:
    for place in PLACES[:3]:
        cache = Cache(place)
        ids = list(range(min(FEW_BLOCKS, place.blocks)))
        load = Load(whole_sides(place, place), len(ids) * place.tokens, ids, ids[::-1])
        assert both_plans(load, pair(cache, cache), LASTS[1])


def test_what_it_does_not_say() -> None:
    """A tail, more or fewer blocks than tokens, blocks of two sizes, and shards are for the general steps."""
    assert match_few(array([1]), [4, 5], 4, 4, 7) is None
    assert match_few(array([1, 2, 3]), [4, 5], 4, 0, 8) is None
    assert match_few(array([1]), [4, 5], 4, 0, 8) is None
    assert match_few(array([1]), [4, 5], 4, 2, 8) is None
    assert match_few(array([1]), [4, 5], 4, 4, 8) == [(5, 1)]
    small, large = (regions_of(Cache(replace(RECIPE, tokens=size))) for size in (2, 4))
    assert small_load_map(pair_whole(small, large)) is None
    for side in ("local_shard", "remote_shard"):
        assert small_load_map(pair_whole(small, small, **{side: Shard(0, 2)})) is None
    assert small_load_map(pair_whole(small, small)) is not None
