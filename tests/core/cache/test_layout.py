"""CacheLayout, map_regions and map_spans against real torch tensors: memory is read at the addresses they give."""

from __future__ import annotations

import ctypes
import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.layout import CacheLayout, KVStyle
from kvflow.core.cache.regions import Device, Regions, device_of, map_regions, map_spans
from kvflow.core.cache.state import Segment, StateLayout, StateTensor
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER
from kvflow.errors import LayoutError
from tests.core.caches import Cache, Recipe, recipes
from tests.support.budgets import examples
from tests.support.tests_support import each

B, N, H, D = 5, 4, 3, 8


def memory_at(regions: Regions, region: int, block: int) -> bytes:
    address = int(regions.bases[region]) + block * int(regions.strides[region])
    return ctypes.string_at(address, regions.block_size_bytes)


def in_memory_order(cache: Cache, layout: CacheLayout, block: torch.Tensor) -> bytes:
    """A block's bytes, its tokens and heads in the order that `layout.memory_order` claims."""
    if block.ndim == 3 and layout.memory_order != cache.recipe.order:
        block = block.transpose(0, 1)
    return block.contiguous().numpy().tobytes()


@examples(60, 300)
@given(recipe=recipes(), seed=st.integers(0, 2**32))
def test_every_block_is_found_where_torch_put_it(recipe: Recipe, seed: int) -> None:
    cache = Cache(recipe)
    cache.fill(seed)
    layout = cache.infer()
    regions, shape = map_regions(layout, cache.tensors), layout.block_shape
    run = recipe.dim * recipe.dtype.itemsize
    assert (layout.layer_names, layout.style) == (cache.layer_names, recipe.style)
    parts = {KVStyle.FUSED: ("KV",), KVStyle.MLA: ("latent",)}.get(recipe.style, ("K", "V"))
    assert (layout.parts, layout.latent) == (parts, recipe.style is KVStyle.MLA)
    assert layout.kv_head_size == (recipe.dim // 2 if recipe.style is KVStyle.FUSED else recipe.dim)
    assert layout.dtype == str(recipe.dtype).removeprefix("torch.")
    assert (layout.num_blocks, layout.num_kv_heads, layout.head_size) == (recipe.blocks, recipe.heads, recipe.dim)
    assert (shape.tokens, shape.heads, shape.run) == (layout.block_size, recipe.heads, run)
    assert layout.block_size == recipe.tokens
    assert shape.size_bytes == recipe.tokens * recipe.heads * run
    assert layout.block_size_bytes == len(regions) * shape.size_bytes
    assert len(regions) == recipe.layers * cache.part_count
    assert (regions.num_blocks, regions.block) == (recipe.blocks, shape)
    for layer, part, block, address in cache.addresses():
        region = layer * cache.part_count + part
        assert int(regions.bases[region]) + block * int(regions.strides[region]) == address
        expected = in_memory_order(cache, layout, cache.block(layer, part, block))
        assert memory_at(regions, region, block) == expected
        if recipe.style is not KVStyle.FUSED:
            for token, head in itertools.product(range(recipe.tokens), range(recipe.heads)):
                found = cache.slot(layer, part, block, token, head).data_ptr()
                assert found == address + token * shape.token_stride + head * shape.head_stride


@examples(30, 150)
@given(recipe=recipes())
def test_spans_hold_the_cache_and_nothing_of_other_allocations(recipe: Recipe) -> None:
    """Registering a byte too few breaks reads; a byte too many may belong to another allocation."""
    cache = Cache(recipe)
    spans = map_spans(cache.tensors.items())
    allocations = [(storage.data_ptr(), storage.data_ptr() + storage.numel()) for storage in cache.storages]
    for span in spans:
        assert any(start <= span.address and span.address + span.size_bytes <= end for start, end in allocations)
    for before, after in itertools.pairwise(spans):
        assert before.address + before.size_bytes <= after.address
    size_bytes = cache.infer().block_shape.size_bytes
    for *_, address in cache.addresses():
        homes = [
            span for span in spans if span.address <= address and address + size_bytes <= span.address + span.size_bytes
        ]
        assert len(homes) == 1


@each("style", [KVStyle.KV_FIRST, "blocks_first"])
def test_a_given_style_settles_an_ambiguous_shape(style: KVStyle | str) -> None:
    caches = {"l0": torch.zeros(2, 2, N, H, D)}
    layout = CacheLayout.infer(caches, order="NHD", block_size=N, style=style)
    assert layout.style == style
    block_bytes = N * H * D * 4
    regions = map_regions(layout, caches)
    distances = (int(regions.bases[1] - regions.bases[0]), int(regions.strides[0]))
    assert distances == ((2 * block_bytes, block_bytes) if style == "kv_first" else (block_bytes, 2 * block_bytes))


WHOLE = torch.zeros(B, 3, 2, N, H, D)


@each(
    ("caches", "expected"),
    [
        ({f"l{index}": WHOLE[:, index] for index in range(3)}, [WHOLE]),  # layers of one storage
        ({f"l{index}": WHOLE[index] for index in range(3)}, list(WHOLE[:3])),  # tensors that only touch stay apart
        ({"all": WHOLE, "some": WHOLE[1:3], "last": WHOLE[4:]}, [WHOLE]),  # one inside another is part of it
        ({"l0": WHOLE, "l1": WHOLE}, [WHOLE]),
    ],
)
def test_spans_are_joined_where_they_overlap(caches: dict[str, torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [(span.address, span.size_bytes) for span in map_spans(caches.items())] == [
        (tensor.data_ptr(), tensor.nbytes) for tensor in expected
    ]


def test_the_device_is_named() -> None:
    assert device_of([("l0", torch.zeros(2, B, N, H, D))]) == Device("cpu", 0)
    assert device_of([("l0", torch.zeros(2, B, N, H, D, device="meta"))]) == Device("meta", 0)


LAYER, KV = torch.zeros(B, N, H, D), torch.zeros(2, B, N, H, D)
ROWS = torch.zeros(4096)


def infer(caches: Any, **changes: Any) -> CacheLayout:
    return CacheLayout.infer(caches, **{"order": "NHD", "block_size": N, **changes})


def infer_and_map(caches: Any, **changes: Any) -> Regions:
    return map_regions(infer(caches, layer_indices=range(len(caches)), **changes), caches)


def two(layer: Any, good: Any = KV) -> dict[str, Any]:
    return {"good": good, "odd.layer": layer}


def strided(block: int) -> torch.Tensor:
    """K and V, each with `block` elements between its blocks."""
    return torch.as_strided(ROWS, (2, B, N, H, D), (1024 if block < N * H * D else block, block, H * D, D, 1))


def half_rows(first: int) -> torch.Tensor:
    """A latent cache in every third row of blocks of one storage, `first` halves of a row from its start."""
    return torch.as_strided(ROWS, (B, N, D), (3 * N * D, D, 1), first * N * D // 2)


HALFWAY = torch.zeros(2, 2 * B, N, H, D)
BLOCK = str(N * H * D)
BAD_CACHES: dict[str, tuple[Any, list[str]]] = {
    # what is wrong: (a layer, or layers; what the message has to contain besides the layer's name)
    "two axes": (torch.zeros(B, D), [f"({B}, {D})"]),
    "another rank in a later layer": (two(torch.zeros(B, N, D)), ["5", f"({B}, {N}, {D})"]),
    "no 2 in front": (torch.zeros(3, B, N, H, D), [f"(3, {B}, {N}, {H}, {D})"]),
    "no blocks": (torch.zeros(2, 0, N, H, D), [f"(2, 0, {N}, {H}, {D})"]),
    "another block size": (torch.zeros(2, B, N + 1, H, D), [str(N), str(N + 1)]),
    "heads where tokens should be": (torch.zeros(2, B, H, N, D), [str(N), str(H)]),
    "another dtype": (two(KV.half()), ["float16", "float32"]),
    "more heads": (two(torch.zeros(2, B, N, H + 4, D)), ["num_kv_heads", str(H + 4), str(H)]),
    "another order in memory": (two(torch.zeros(2, B, H, N, D).transpose(2, 3)), ["memory_order", "HND", "NHD"]),
    "another device": (two(KV.to("meta")), ["meta:0", "cpu:0", "'good'"]),
    "a pair among single tensors": (two((LAYER, LAYER.clone())), ["kv_first"]),
    "three tensors": ((LAYER, LAYER, LAYER), ["pair"]),
    "K and V of different shapes": (
        (LAYER, torch.zeros(B + 1, N, H, D)),
        [f"({B}, {N}, {H}, {D})", f"({B + 1}, {N}, {H}, {D})"],
    ),
    "K and V of different dtypes": ((LAYER, LAYER.half()), ["float32", "float16"]),
    "K and V on different devices": ((LAYER, LAYER.to("meta")), ["cpu:0", "meta:0"]),
    "K and V in different orders of memory": ((LAYER, torch.zeros(B, H, N, D).transpose(1, 2)), ["NHD", "HND"]),
    "ambiguous": (torch.zeros(2, 2, N, H, D), ["(2, 2", "style"]),
    "every second token": (torch.zeros(2, B, N * 2, H, D)[:, :, ::2], [str(2 * H * D), str(H * D)]),
    "half a head": (torch.zeros(2, B, N, H, D * 2)[..., :D], [str(D * 2), str(D)]),
    "one head for all": (torch.zeros(2, B, N, 1, D).expand(2, B, N, H, D), ["stride 0", "1"]),
    "one block for all": (torch.zeros(2, 1, N, H, D).expand(2, B, N, H, D), ["stride 0", BLOCK]),
    "one K for V": (torch.zeros(1, B, N, H, D).expand(2, B, N, H, D), ["stride 0", BLOCK]),
    "blocks that overlap": (strided(48), ["48", BLOCK]),
    # K's block 1 and V's block 0 are the same bytes: a load of one would write the other
    "K in the place of V": (strided(N * H * D), ["V overlaps K"]),
    # block 3 of one layer's K is block 0 of the other's
    "a layer half in the place of another": (
        two(HALFWAY[:, B // 2 : B // 2 + B], good=HALFWAY[:, :B]),
        ["K", "'good'", str(2 * N * H * D * 4)],
    ),
    "V in the place of another layer's K": (two((LAYER.clone(), LAYER), good=(LAYER, LAYER.clone())), ["V", "'good'"]),
    "layers that follow each other too closely": (
        two(half_rows(1), good=half_rows(0)),
        ["'good'", str(N * D * 2), str(3 * N * D * 4)],
    ),
    "one tensor as K and V": ((LAYER, LAYER), ["V overlaps K"]),
    "no tensor": ("tensor", ["str"]),
    "an empty pair": ((), []),
}


@each("what", BAD_CACHES)
def test_a_bad_cache_is_a_layout_error_with_the_layer_and_both_values(what: str) -> None:
    layers, expected = BAD_CACHES[what]
    with pytest.raises(LayoutError) as caught:
        infer_and_map(layers if isinstance(layers, dict) else {"odd.layer": layers})
    message = str(caught.value)
    assert "'odd.layer'" in message
    for text in expected:
        assert re.search(rf"(?<!\d){re.escape(text)}(?!\d)", message), f"no {text!r} in {message!r}"


@each(("changes", "expected"), [({"order": "NDH"}, "NDH"), ({"style": "kv_last"}, "kv_last")])
def test_a_bad_description_is_a_layout_error(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(LayoutError, match=expected):
        infer({"l0": KV}, **changes)
    with pytest.raises(LayoutError, match="at least one layer"):
        infer({})


def test_other_layers_than_described_are_refused() -> None:
    layout = infer({"a0": KV, "b1": KV})
    for names in (("a0",), ("b1", "a0"), ("a0", "b1", "c2"), ("a0", "x1")):
        with pytest.raises(LayoutError, match=f"a0, b1.*{', '.join(names)}"):
            map_regions(layout, dict.fromkeys(names, KV))


PAIR = (LAYER, LAYER.clone())


GOOD_CACHES: dict[str, tuple[list[Any], int]] = {
    # As where a model uses one layer's KV for several: written alike, whatever is loaded.
    "one tensor for all": ([KV, KV], 4),
    "one pair for all": ([PAIR, PAIR, PAIR], 6),
    "latents between each other's blocks": ([half_rows(0), half_rows(2), half_rows(4)], 3),
    "layers between each other's blocks": ([WHOLE[:, index].transpose(0, 1) for index in (2, 0, 1)], 6),
    "a pair in a list": ([list(PAIR)], 2),
}


@each("what", GOOD_CACHES)
def test_layers_may_be_one_tensor_or_lie_between_each_others_blocks(what: str) -> None:
    layers, regions = GOOD_CACHES[what]
    assert len(infer_and_map({f"l{index}": layer for index, layer in enumerate(layers)})) == regions


@each(("name", "value"), [("itemsize", 1), ("num_blocks", B + 1), ("head_size", 2 * D), ("memory_order", "HND")])
def test_a_layout_that_says_something_else_than_the_tensors_is_refused(name: str, value: Any) -> None:
    """A wrong `itemsize` would leave bytes behind without anybody noticing."""
    layout = replace(infer({"l0": KV}), **{name: value})
    with pytest.raises(LayoutError, match=f"'l0': {name} is "):
        map_regions(layout, {"l0": KV})


@each(
    ("plain", "turned"),
    [
        (torch.zeros(B, N, D), torch.zeros(B, D, N).permute(0, 2, 1)),
        (LAYER, torch.zeros(B, H, D, N).permute(0, 3, 1, 2)),
        (KV, torch.zeros(2, B, H, D, N).permute(0, 1, 4, 2, 3)),
        (KV, torch.zeros(2, B, N, D, H).permute(0, 1, 2, 4, 3)),
    ],
)
def test_blocks_whose_bytes_are_in_another_order_do_not_look_alike(plain: torch.Tensor, turned: torch.Tensor) -> None:
    """Head elements that are not innermost: a plan takes them for one run of bytes, so such a block is refused."""
    assert infer({"l0": plain}).memory_order in ("NHD", "HND")
    with pytest.raises(LayoutError, match=r"'l0'.*stride 1\b.*'dim'"):
        infer({"l0": turned})


def test_half_of_an_odd_axis_is_no_k() -> None:
    with pytest.raises(LayoutError, match=r"'odd'.*'dim'.*\b7$"):
        infer({"odd": torch.zeros(B, N, H, 7)})
    assert infer({"latent": torch.zeros(B, N, 7)}).head_size == 7


# --- which layers


@each(
    ("names", "expected"),
    [
        (["model.layers.12.self_attn", "model.layers.3.self_attn"], (12, 3)),
        (["model/layers_7/attn", "8", "x_9"], (7, 8, 9)),
        (["l1", "l0"], (1, 0)),
        (["v2.layers.3", "layer4.attn"], (3, 4)),
        (["attention"], (0,)),  # one layer needs no number
        (["a." + "9" * 50], (0,)),
        (["a.\u0663"], (3,)),  # a digit is a digit
        (["model.layers.3", "draft"], (3, FIRST_DRAFT_LAYER)),
    ],
)
def test_layers_are_those_of_their_names(names: list[str], expected: tuple[int, ...]) -> None:
    assert infer(dict.fromkeys(names, KV)).layer_indices == expected


STATE = StateTensor(name="ssm", segments=(Segment(name="heads", size=2, units=1, model_units=1),))


@each(
    ("names", "told"),
    [
        (["self_attn", "cross_attn"], r"^layer 'self_attn': its name has 0 numbers"),
        (["layers.4.attn", "embedding"], r"^layer 'embedding': its name has 0 numbers"),
        (["layers.4.experts.1", "layers.5.experts.1"], r"^layer 'layers\.4\.experts\.1': its name has 2 numbers"),
        (["layers.0.a", "layers.0.b"], r"^layers 'layers\.0\.a' and 'layers\.0\.b': both have the number 0"),
        (["a.70000", "b.1"], r"^layer 'a\.70000': its name has the number 70000"),
        (["layers.0", "draft.k", "draft.v"], r"^layer 'draft\.k': its name has 0 numbers"),
    ],
)
def test_layers_without_numbers_are_not_matched_by_position(names: list[str], told: str) -> None:
    """The other side may have them in another order: each layer would get another one's bytes."""
    layers = dict.fromkeys(names, KV)
    with pytest.raises(LayoutError, match=rf"{told}: give layer_indices, each layer's index in the model"):
        infer(layers)
    with pytest.raises(LayoutError, match=told):
        StateLayout.infer(dict.fromkeys(names, torch.zeros(4, 2)), [STATE])
    assert infer(layers, layer_indices=range(len(names))).layer_indices == tuple(range(len(names)))


@each("given_indices", [[31, 4], [0, (1 << 15) - 1], np.array([4, 1])])
def test_layers_may_be_given_and_are_pythons_own_numbers(given_indices: Any) -> None:
    """As messages carry them."""
    layout = infer({"layers.0": KV, "layers.1": KV}, layer_indices=given_indices, block_size=np.int64(N))
    assert (layout.layer_indices, {*map(type, layout.layer_indices)}) == (tuple(given_indices), {int})
    assert type(replace(layout, num_blocks=np.int64(3)).num_blocks) is int


@each("given_indices", [[], [1], [1, 2, 3], [1, 1], [-1, 0], [0, 1 << 15]])
def test_layers_that_cannot_be_are_refused(given_indices: list[int]) -> None:
    with pytest.raises(LayoutError, match=r"^layer_indices: expected 2 different"):
        infer({"a": KV, "b": KV}, layer_indices=given_indices)


def test_the_format_of_the_bytes_is_plain_unless_given() -> None:
    assert infer({"l0": KV}).kv_format == "plain"
    assert infer({"l0": KV}, kv_format="fp8_ds_mla").kv_format == "fp8_ds_mla"
