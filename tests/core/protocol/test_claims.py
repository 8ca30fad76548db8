"""Claims of peers about their caches: what can be true passes, and what cannot is refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.cache.layout import BlockShape
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.claims import (
    all_regions_from_wire,
    check_cache_shares,
    check_sets,
    regions_from_wire,
    regions_to_wire,
)
from kvflow.errors import LayoutError
from tests.core.claimed import BLOCK, HOLDING, REGIONS, sent
from tests.support.budgets import examples
from tests.support.tests_support import each

# --- regions and seals


def shape_of(tokens: int, heads: int, run: int, order: str) -> BlockShape:
    token_stride, head_stride = (heads * run, run) if order == "NHD" else (run, tokens * run)
    return BlockShape(tokens, heads, run, token_stride, head_stride)


shapes = st.builds(
    shape_of, st.integers(1, 1 << 8), st.integers(1, 1 << 6), st.integers(1, 1 << 6), st.sampled_from(["NHD", "HND"])
)


@examples(25, 50)
@given(
    data=st.data(),
    blocks=st.integers(1, 1 << 20),
    block=shapes,
    parts=st.sampled_from([("K", "V"), ("KV",), ("latent",)]),
    device=st.integers(0, 7),
)
def test_region_tables_survive_the_wire(
    data: st.DataObject, blocks: int, block: BlockShape, parts: tuple[str, ...], device: int
) -> None:
    count = data.draw(st.integers(1, 10)) * len(parts)
    bases = data.draw(st.lists(st.integers(1, 1 << 62), min_size=count, max_size=count))
    strides = data.draw(st.lists(st.integers(block.size_bytes, 1 << 40), min_size=count, max_size=count))
    regions = Regions(
        bases=np.array(bases, dtype=np.uint64),
        strides=np.array(strides, dtype=np.uint64),
        block=block,
        planes=parts,
        num_blocks=blocks,
        device=Device("cuda", device),
    )
    table = msgspec.msgpack.decode(codec.encode(regions_to_wire(regions)), type=messages.RegionTable)
    back = regions_from_wire(table)
    assert (back.bases.tolist(), back.strides.tolist()) == (bases, strides)
    assert back.bases.dtype == back.strides.dtype == np.dtype(np.uint64)
    assert (back.block, back.planes, back.num_blocks, back.device) == (block, parts, blocks, regions.device)


@each(
    "changes",
    [
        {"bases": [], "strides": []},
        {"strides": [64]},
        {"bases": [1] * ((1 << 16) + 1), "strides": [64] * ((1 << 16) + 1)},
        {"num_blocks": 0},
        *({"block": BLOCK._replace(**{axis: value})} for axis in BLOCK._fields for value in (0, -8, 1 << 31, 1 << 70)),
        {"block": BlockShape(tokens=4, heads=2, run=8, token_stride=8, head_stride=16)},  # tokens of 2 heads overlap
        {"block": BlockShape(tokens=4, heads=2, run=8, token_stride=8, head_stride=64)},  # a gap
        {"block": BlockShape(tokens=-4, heads=-2, run=8, token_stride=-16, head_stride=8)},
        {"parts": ()},
        {"parts": ("K",)},
        {"parts": ("K", "V", "K", "V")},
        {"parts": ("x" * 100_000,)},
        {"bases": [4096] * 3, "strides": [64] * 3},  # K and V, and a K
        {"bases": [4096, 0]},
        {"strides": [64, 63]},
        {"block": shape_of(5, 2, 8, "NHD")},
        {"bases": [4096, (1 << 64) - 64]},
        {"num_blocks": (1 << 64) - 1, "strides": [(1 << 64) - 1] * 2},
        {"strides": [64, 1 << 63]},
        {"device": Device("cpu", -1)},
        {"device": Device("cpu", 1 << 16)},
    ],
)
def test_a_region_table_that_cannot_be_true_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(codec.WireError, match=f"region table|{'|'.join(changes)}|out of range") as caught:
        regions_from_wire(sent(replace(REGIONS, **changes)))
    assert len(str(caught.value)) < 300


NUMBERS = st.integers(-1, 2**64 - 1) | st.integers(1, 64)


@examples(60, 300)
@given(
    bases=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    strides=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    block=st.builds(BlockShape, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
    | st.builds(shape_of, NUMBERS, NUMBERS, NUMBERS, st.sampled_from(["NHD", "HND"])),
    blocks=st.integers(-1, 2**64 - 1) | st.integers(1, 64),
)
@example(bases=[1], strides=[2**64 - 2], block=BlockShape(1, 1, 1, 1, 1), blocks=1)
@example(bases=[2], strides=[2**64 - 2], block=BlockShape(1, 1, 1, 1, 1), blocks=1)
@example(bases=[1], strides=[2**63 - 2], block=BlockShape(1, 1, 1, 1, 1), blocks=1)
def test_no_byte_of_an_accepted_table_wraps_around(
    bases: list[int], strides: list[int], block: BlockShape, blocks: int
) -> None:
    table = replace(REGIONS, bases=bases, strides=strides, block=block, parts=("latent",), num_blocks=blocks)
    try:
        regions = regions_from_wire(sent(table))
    except codec.WireError:
        return
    assert 0 < len(regions) == len(regions.strides)
    for base, stride in zip(regions.bases.tolist(), regions.strides.tolist(), strict=True):
        assert 0 < regions.block_size_bytes <= stride
        assert 0 < base < base + (regions.num_blocks - 1) * stride + regions.block_size_bytes <= 2**63
    last_slot = (block.tokens - 1) * block.token_stride + (block.heads - 1) * block.head_stride
    assert 0 < last_slot + block.run == regions.block_size_bytes


# --- holdings


def check_set(regions: messages.RegionTable = REGIONS, **changes: Any) -> None:
    """Of a rank that has this set of layers only."""
    share = replace(HOLDING, **changes)
    kind = GroupKind.SHARDED if share.sharded else GroupKind.FULL
    group = GroupFacts(name="kv", block_size=max(share.block_size, 1), kind=kind)
    check_sets((sent(share),), (regions_from_wire(regions),), (group,))


def test_a_cache_share_that_goes_with_its_regions_passes() -> None:
    check_set()
    check_set(model_kv_heads=0)
    check_set(tp_rank=1023, tp_size=1024, pp_rank=1023, pp_size=1024)
    check_set(LATENT, layers=(3, 1), kv_heads=1, latent=True, block_size=8)
    check_set(LATENT, **SHARDED)


LATENT = replace(REGIONS, parts=("latent",), block=shape_of(8, 1, 8, "NHD"))
SHARDED = {"layers": (3, 1), "kv_heads": 1, "latent": True, "block_size": 16, "sharded": True}


@each(
    ("changes", "problem"),
    [
        ({"block_size": 8}, "block_size 8, .* blocks of shape"),
        ({"block_size": 17}, "sharded tokens, latent is True, block_size 17, tp_size 2"),
        ({"tp_size": 3}, "sharded tokens, latent is True, block_size 16, tp_size 3"),
        ({"latent": False}, "sharded tokens, latent is False"),
        ({"sharded": False}, "block_size 16, .* blocks of shape"),  # what a version knows that does not know of shards
    ],
)
def test_sharded_tokens_are_as_many_as_the_ranks_hold(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(codec.WireError, match=problem):
        check_set(LATENT, **{**SHARDED, **changes})


@each(("kind", "sharded"), [(GroupKind.FULL, True), (GroupKind.SHARDED, False)])
def test_a_group_is_sharded_as_its_layers_are(kind: GroupKind, sharded: bool) -> None:
    share = replace(HOLDING, **{**SHARDED, "sharded": sharded, "block_size": 16 if sharded else 8})
    group = GroupFacts(name="kv", block_size=share.block_size, kind=kind)
    with pytest.raises(codec.WireError, match=f"sharded is {sharded}, the group's kind {kind}"):
        check_sets((share,), (regions_from_wire(LATENT),), (group,))
    with pytest.raises(codec.WireError, match="some with sharded tokens"):
        check_cache_shares([replace(share, sharded=one, layers=(layer,)) for layer, one in enumerate((True, False))])


WRONG: dict[str, tuple[Any, ...]] = {
    "tp_size": (0, 1025, (1 << 64) - 1),
    "tp_rank": (2, 1 << 63),
    "pp_rank": (-1, 3),
    "pp_size": (1025,),
    "layers": ((), (7, 8), (7, 7), (-1,), (1 << 15,), tuple(range(100_000))),
    "kv_heads": (4, 0),
    "model_kv_heads": (-1,),
    "block_size": (8,),
    "latent": (True,),
}


@each(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_cache_share_that_cannot_be_true_is_refused(name: str, value: Any) -> None:
    with pytest.raises(codec.WireError, match=f"^cache share: |{name}") as caught:
        check_set(**{name: value})
    assert len(str(caught.value)) < 300


FACTS, OTHER = (GroupFacts(name=name, block_size=4) for name in ("kv", "b"))
SECOND = replace(HOLDING, layers=(8,))
TWO = (HOLDING, SECOND)


@each(
    ("shares", "tables", "groups", "problem"),
    [
        ((), (), (FACTS,), "cache shares: 0 with"),
        ((HOLDING,) * 65, (REGIONS,) * 65, (FACTS,), "cache shares: 65 with"),
        ((HOLDING, HOLDING), (REGIONS,) * 2, (FACTS,), "a layer is in two shares"),
        ((HOLDING, replace(SECOND, tp_rank=0)), (REGIONS,) * 2, (FACTS,), "of several ranks"),
        ((HOLDING,), (REGIONS,) * 2, (FACTS,), "1, but 2 region tables"),
        ((HOLDING,), (REGIONS,), (), "groups: 0, expected 1 to 64"),
        ((HOLDING,), (REGIONS,), (FACTS, FACTS), "groups: 2, expected 1 to 64 of different names"),
        ((HOLDING,), (REGIONS,), (FACTS, OTHER), "of 1 group, but there are 2"),
        (TWO, (REGIONS, replace(REGIONS, num_blocks=3)), (FACTS,), "group 0 has 4 and other blocks"),
        (TWO, (REGIONS, replace(REGIONS, device=Device("cuda", 0))), (FACTS,), "on several devices"),
        ((replace(HOLDING, part="conv.x"),), (REGIONS,), (FACTS,), "blocks of shape|part"),
        ((replace(HOLDING, part="a b"),), (REGIONS,), (FACTS,), "part 'a b'"),
    ],
)
def test_sets_of_layers_that_cannot_be_true_are_refused(shares: Any, tables: Any, groups: Any, problem: str) -> None:
    with pytest.raises(codec.WireError, match=problem) as caught:
        check_sets(shares, tuple(map(regions_from_wire, tables)), groups)
    assert len(str(caught.value)) < 300


@each(
    ("changes", "problem"),
    [
        ({"name": "a\x1bb"}, r"group 'a\\x1bb'"),
        ({"window": 3}, "group 'kv': impossible together: kind full, window 3, block_size 4"),
        ({"kind": "state"}, "kind state"),
        ({"kind": "chunked", "window": (1 << 31) + 1}, "kind chunked, window 2147483649"),
        ({"block_size": 0}, "block_size 0"),
    ],
)
def test_a_group_that_cannot_be_is_refused_wherever_it_comes_from(changes: dict[str, Any], problem: str) -> None:
    facts = msgspec.to_builtins(FACTS) | changes
    with pytest.raises(codec.WireError, match=problem):
        codec._decode(msgspec.msgpack.encode(facts), msgspec.msgpack.Decoder(GroupFacts))
    with pytest.raises(LayoutError, match=problem):
        GroupFacts(**{**facts, "kind": GroupKind(facts.get("kind", "full"))})


def test_more_regions_than_can_be_looked_at_are_refused_unread() -> None:
    many = replace(REGIONS, bases=[4096] * 40_000, strides=[64] * 40_000)
    with pytest.raises(codec.WireError, match="region tables: 2 with 80000 regions"):
        all_regions_from_wire((many, many))
    with pytest.raises(codec.WireError, match="region tables: 65 with 130 regions"):
        all_regions_from_wire((REGIONS,) * 65)
    with pytest.raises(codec.WireError, match="cache shares: 3 with 90000 layers"):
        check_cache_shares((replace(HOLDING, layers=tuple(range(30_000))),) * 3)


def test_a_latent_has_one_head() -> None:
    """A plan reads one: with more, the rest of a block would be left out."""
    latent = replace(REGIONS, parts=("latent",))
    with pytest.raises(codec.WireError, match=r"^cache share: .*latent.* 2 heads"):
        check_set(latent, layers=(7, 8), latent=True)
    with pytest.raises(codec.WireError, match=r"^cache share: .*latent is False"):
        check_set(latent, layers=(7, 8))


@each(
    ("address", "count", "hold_s", "problem"),
    [
        *((address, count, 0.02, "") for address, count in ((1, 1), (4096, 1 << 24), ((1 << 62) + 1, 16384))),
        *((address, 1, 0.02, "address|out of range") for address in (0, -1, (1 << 64) - 16, 1 << 64)),
        *((4096, count, 0.02, f"`\\$.count`, got {count}") for count in (0, -1, (1 << 24) + 1)),
        # a reader would trust a seal that it fetched long before its last byte landed
        *((4096, 16, hold_s, f"`\\$.hold_s`, got {hold_s}") for hold_s in (0.0, -1.0, float("nan"), float("inf"), 1e6)),
    ],
)
def test_a_seal_table_that_cannot_be_true_is_refused(address: int, count: int, hold_s: float, problem: str) -> None:
    with pytest.raises(codec.WireError, match=problem) if problem else contextlib.nullcontext():
        sent(messages.SealLocation(address=address, count=count, hold_s=hold_s))
