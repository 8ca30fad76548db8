"""Groups of layers: their layers, the tokens of a prompt that they need, and their memory."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.groups import (
    CacheGroup,
    GroupFacts,
    GroupKind,
    check_sets_disjoint,
    facts_of_engine,
    groups_of,
    layer_sets,
)
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Regions, map_regions
from kvflow.errors import LayoutError
from tests.support.tests_support import each

BLOCKS, SIZE, HEADS, DIM = 6, 4, 2, 8


def layers(*numbers: int, heads: int = HEADS, blocks: int = BLOCKS) -> dict[str, torch.Tensor]:
    return {f"layers.{number}": torch.zeros(2, blocks, SIZE, heads, DIM) for number in numbers}


def layout_of(caches: dict[str, torch.Tensor]) -> CacheLayout:
    return CacheLayout.infer(caches, order="NHD", block_size=SIZE)


def group(name: str, *numbers: int, blocks: int = BLOCKS, **facts: Any) -> CacheGroup:
    caches = layers(*numbers, blocks=blocks)
    return CacheGroup(name, caches, layout_of(caches), **facts)


# --- one group


def test_a_dict_is_one_group_of_full_attention() -> None:
    caches = layers(0, 1)
    (only,) = groups_of(caches, layout_of(caches))
    assert only.facts == GroupFacts(name="kv", block_size=SIZE)
    assert (only.num_blocks, only.block_size_bytes) == (BLOCKS, 2 * 2 * SIZE * HEADS * DIM * 4)


def test_a_window_makes_a_group_slide_unless_it_is_chunked() -> None:
    assert group("a", 0, window=8).facts == GroupFacts(name="a", block_size=SIZE, kind=GroupKind.SLIDING, window=8)
    assert group("a", 0, window=8, kind="chunked").facts.kind is GroupKind.CHUNKED


def test_a_block_of_a_sharded_group_stands_for_the_tokens_of_all_ranks() -> None:
    latents = {"layers.0": torch.zeros(BLOCKS, SIZE, DIM)}
    sharded = CacheGroup("a", latents, layout_of(latents), kind="sharded")
    facts = GroupFacts(name="a", block_size=4 * SIZE, kind=GroupKind.SHARDED)
    assert facts_of_engine(sharded, tp_size=4) == facts
    assert (facts.whole, facts.blocks_needed(4 * SIZE + 1)) == (True, 2)
    assert facts_of_engine(group("a", 0), tp_size=4) == group("a", 0).facts
    for problem, make in {
        "expected latents": lambda: group("a", 0, kind="sharded"),
        "got split 2": lambda: CacheGroup("a", latents, layout_of(latents), kind="sharded", split=2),
        "in all groups or in none: 'a' is sharded, 'b' is full": lambda: groups_of([sharded, group("b", 1)], None),
    }.items():
        with pytest.raises(LayoutError, match=problem):
            make()


def test_layers_that_look_different_are_sets_of_one_group() -> None:
    many, few = layers(0, 2), layers(1, heads=1)
    mixed = CacheGroup("mixed", {**many, **few}, [layout_of(many), layout_of(few)])
    found = layer_sets([group("other", 3), mixed], tp_size=1)
    assert [(one.group, list(one.caches)) for one in found] == [
        (0, ["layers.3"]),
        (1, ["layers.0", "layers.2"]),
        (1, ["layers.1"]),
    ]
    assert mixed.block_size_bytes == 2 * SIZE * DIM * 4 * (2 * HEADS + 1)


def needed(facts: GroupFacts, tokens: int) -> set[int]:
    """The slow way: what a query attends to, for the token that comes next and for the last one once more."""
    found: set[int] = set()
    for query in (tokens, tokens - 1):
        for key in range(tokens):
            match facts.kind:
                case GroupKind.FULL:
                    seen = True
                case GroupKind.SLIDING:
                    seen = query - key < facts.window
                case GroupKind.CHUNKED:
                    seen = query // facts.window == key // facts.window
            if seen:
                found.add(key)
    return found


@given(
    kind=st.sampled_from([GroupKind.SLIDING, GroupKind.CHUNKED]), window=st.integers(1, 12), tokens=st.integers(1, 40)
)
def test_what_is_needed_is_what_the_next_token_and_the_last_one_attend_to(
    kind: GroupKind, window: int, tokens: int
) -> None:
    facts = GroupFacts(name="a", block_size=SIZE, kind=kind, window=window)
    assert facts.first_needed(tokens) == min(needed(facts, tokens))
    assert GroupFacts(name="a", block_size=SIZE).first_needed(tokens) == 0


# --- what does not go together

FEWER, LAYOUT = layers(1, blocks=7), layout_of(layers(0))
POOLED = [group("a", 0, pool="p"), group("b", 1, blocks=7, pool="p")]


@each(
    ("make", "problem"),
    [
        (lambda: group("", 0), "name"),
        (lambda: group("a", 0, window=0), "window"),
        (lambda: group("a", 0, window=1 << 40), "window: expected `int` <= 2147483648, got"),
        (lambda: group("a", 0, kind="sliding"), "kind is 'sliding', window is None"),
        (lambda: group("a", 0, kind="full", window=3), "kind is 'full', window is 3"),
        (lambda: group("a", 0, kind="latent"), "kind: expected 'full', .*, 'state' or 'sharded', got 'latent'"),
        (lambda: CacheGroup("a", layers(0, 1), LAYOUT), "not one layout for 'layers.1'"),
        (lambda: CacheGroup("a", layers(0), [LAYOUT] * 2), "not one layout for 'layers.0'"),
        (lambda: CacheGroup("a", layers(0) | FEWER, [LAYOUT, layout_of(FEWER)]), "num_blocks is 6 and 7"),
        (lambda: groups_of([], None), "expected 1 to 64 CacheGroups"),
        (lambda: groups_of([group("a", 0), group("a", 1)], None), "group 'a' is there twice"),
        (lambda: groups_of([group("a", 0), group("b", 0)], None), "layer 0 is there twice; give each layout its"),
        (lambda: groups_of(POOLED, None), "group 'b': it has 7 blocks, group 'a' of the same pool 'p' has 6"),
        (lambda: groups_of([group("a", 0)], LAYOUT), "groups have layouts of their own"),
        (lambda: groups_of(layers(0), None), "layout: a cache that is given as a dict"),
    ],
)
def test_what_cannot_be_is_named(make: Any, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        make()


# --- memory


def pooled(
    name: str, pool: str, tensor: torch.Tensor, *, split: int = 1, size: int = SIZE
) -> tuple[CacheGroup, Regions]:
    caches = {"layers.0": tensor}
    layout = CacheLayout.infer(caches, order="NHD", block_size=size)
    return CacheGroup(name, caches, layout, pool=pool, split=split), map_regions(layout, caches)


def test_groups_of_one_pool_may_lie_over_the_same_memory() -> None:
    tensor = torch.zeros(2, BLOCKS, SIZE, HEADS, DIM)

    def check(*sets: tuple[str, str]) -> None:
        check_sets_disjoint([pooled(name, pool, tensor) for name, pool in sets])

    check(("a", "all"), ("b", "all"))
    with pytest.raises(LayoutError, match=r"group 'a' and group 'b' overlap: .*pools are 'one' and 'two'"):
        check(("a", "one"), ("b", "two"))
    with pytest.raises(LayoutError, match="group 'a' and group 'a' overlap"):
        check(("a", "all"), ("a", "all"))


def test_a_group_may_split_the_blocks_of_its_pool() -> None:
    """Over the same memory, `split` blocks of the group are one block of the pool."""
    tensor = torch.zeros(BLOCKS, 2 * SIZE, HEADS, DIM)
    whole, halves = pooled("a", "all", tensor, size=2 * SIZE), tensor.view(2 * BLOCKS, SIZE, HEADS, DIM)
    check_sets_disjoint([whole, pooled("b", "all", halves, split=2)])
    for split in (1, 4):
        with pytest.raises(LayoutError, match=r"overlap: .*block strides are \d+ and \d+ bytes"):
            check_sets_disjoint([whole, pooled("b", "all", halves, split=split)])


def test_layers_of_a_group_may_share_a_block_row_each_its_own_bytes() -> None:
    """Each layer has exactly its own bytes, although blocks are rows of one size."""
    rows = torch.zeros(BLOCKS, 2 * SIZE * HEADS * DIM + SIZE * 1 * DIM)
    large = rows[:, : 2 * SIZE * HEADS * DIM].view(BLOCKS, 2, SIZE, HEADS, DIM)
    small = rows[:, 2 * SIZE * HEADS * DIM :].view(BLOCKS, SIZE, 1, DIM)
    shared = rows[:, SIZE * HEADS * DIM : SIZE * HEADS * DIM + SIZE * DIM].view(BLOCKS, SIZE, 1, DIM)
    for inner, fits in ((small, True), (shared, False)):
        pairs = [pooled("a", "a", one) for one in (large, inner)]
        for order in itertools.permutations(pairs):
            with nullcontext() if fits else pytest.raises(LayoutError, match="overlap"):
                check_sets_disjoint(order)


def test_facts_survive_the_wire() -> None:
    facts = group("a", 0, window=8).facts
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(facts), type=GroupFacts) == facts
