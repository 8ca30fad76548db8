"""Random KV caches of real torch tensors, and where their blocks lie according to torch alone.

A `Recipe` says how a cache looks to its user (style, order, sizes) and how it lies in memory (which axes are outermost,
what is padded, which layers share a storage). `Cache.block` reaches a block by torch indexing, so tests can compare
what `kvflow.core.layout` computes with what torch does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from hypothesis import strategies as st

from kvflow.core.layout import CacheLayout, KVStyle

LayerTensors: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.float32)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PAIR_STYLES = (KVStyle.KV_FIRST, KVStyle.BLOCKS_FIRST, KVStyle.APART)
_OUTER_ORDERS = (
    ("layer", "kv", "block"),
    ("layer", "block", "kv"),
    ("kv", "layer", "block"),
    ("kv", "block", "layer"),
    ("block", "layer", "kv"),
    ("block", "kv", "layer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to build a cache. `outer` and `hnd_in_memory` are about memory, `order` is about the tensors' shape."""

    style: KVStyle
    order: str
    layers: int
    blocks: int
    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype = torch.uint8
    outer: tuple[str, ...] = ("layer", "kv", "block")
    hnd_in_memory: bool = False
    shared: bool = False
    """Whether all layers are views of one storage."""
    block_padding: int = 0
    """Unused elements behind each block of each part."""
    spare_blocks: int = 0
    """Blocks of the storage that the cache does not show."""


class Cache:
    """Tensors made from a recipe, with all their memory at hand."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.storages: list[torch.Tensor] = []
        names = [f"layers.{index}.attn" for index in range(recipe.layers)]
        if recipe.shared:
            whole = self._allocate(recipe.layers)
            self.tensors = {name: self._present(whole[index]) for index, name in enumerate(names)}
        else:
            self.tensors = {name: self._present(self._allocate(1)[0]) for name in names}

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def part_count(self) -> int:
        return 2 if self.recipe.style in _PAIR_STYLES else 1

    def infer(self) -> CacheLayout:
        recipe = self.recipe
        ambiguous = recipe.blocks == 2 and recipe.style in (KVStyle.KV_FIRST, KVStyle.BLOCKS_FIRST)
        style = recipe.style if ambiguous else None
        return CacheLayout.infer(self.tensors, order=recipe.order, block_size=recipe.tokens, style=style)

    def block(self, layer: int, part: int, block: int) -> torch.Tensor:
        """A block of a part as torch indexing finds it, as integers of the dtype's size."""
        tensors = self.tensors[self.layer_names[layer]]
        match self.recipe.style, tensors:
            case KVStyle.KV_FIRST, torch.Tensor() as tensor:
                view = tensor[part, block]
            case KVStyle.BLOCKS_FIRST, torch.Tensor() as tensor:
                view = tensor[block, part]
            case _, torch.Tensor() as tensor:
                view = tensor[block]
            case _, pair:
                view = pair[part][block]
        return view.view(_BITS[view.element_size()])

    def addresses(self) -> Iterator[tuple[int, int, int, int]]:
        """(layer, part, block, address of its first byte) of everything in the cache, layer by layer."""
        for layer in range(self.recipe.layers):
            for part in range(self.part_count):
                for block in range(self.recipe.blocks):
                    yield layer, part, block, self.block(layer, part, block).data_ptr()

    def fill(self, seed: int) -> None:
        """Random bytes everywhere, padding included."""
        generator = torch.Generator().manual_seed(seed)
        for storage in self.storages:
            storage.random_(0, 256, generator=generator)

    def snapshot(self) -> list[bytes]:
        """All bytes of all storages."""
        return [ctypes.string_at(storage.data_ptr(), storage.numel()) for storage in self.storages]

    def _allocate(self, layers: int) -> torch.Tensor:
        """Memory for some layers, seen as (layer, kv, block, elements of a block)."""
        recipe = self.recipe
        elements = recipe.tokens * recipe.heads * recipe.dim
        size = {"layer": layers, "kv": self.part_count, "block": recipe.blocks + recipe.spare_blocks}
        shape = [size[axis] for axis in recipe.outer] + [elements + recipe.block_padding]
        storage = torch.zeros(torch.Size(shape).numel() * recipe.dtype.itemsize, dtype=torch.uint8)
        self.storages.append(storage)
        whole = storage.view(recipe.dtype).view(shape)[..., :elements]
        return whole.permute(*(recipe.outer.index(axis) for axis in ("layer", "kv", "block")), 3)[:, :, : recipe.blocks]

    def _present(self, layer: torch.Tensor) -> LayerTensors:
        """A layer's (kv, block, elements) as the style and the order want to see it."""
        recipe = self.recipe
        inner = (recipe.heads, recipe.tokens) if recipe.hnd_in_memory else (recipe.tokens, recipe.heads)
        # Not view(): that would change the stride of a single block, which says how far away the next one would be.
        shape, stride = (
            (*layer.shape[:2], *inner, recipe.dim),
            (*layer.stride()[:2], inner[1] * recipe.dim, recipe.dim, 1),
        )
        view = layer.as_strided(shape, stride, layer.storage_offset())
        if recipe.hnd_in_memory != (recipe.order == "HND"):
            view = view.transpose(2, 3)
        match recipe.style:
            case KVStyle.KV_FIRST:
                return view
            case KVStyle.BLOCKS_FIRST:
                return view.transpose(0, 1)
            case KVStyle.APART:
                return view[0], view[1]
            case KVStyle.FUSED:
                return view[0]
            case KVStyle.MLA:
                return view[0].squeeze(1 if recipe.order == "HND" else 2)


@st.composite
def recipes(draw: st.DrawFn, *, like: Recipe | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Recipe:
    """A random recipe; with `like`, one whose blocks mean the same bytes, in another place and style."""
    if like is None:
        style = draw(st.sampled_from(list(KVStyle)))
        heads = 1 if style is KVStyle.MLA else draw(st.integers(1, 3))
        layers, tokens, dim = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
        dtype, hnd_in_memory = draw(st.sampled_from(dtypes)), draw(st.booleans())
    else:
        style = draw(st.sampled_from(_PAIR_STYLES)) if like.style in _PAIR_STYLES else like.style
        layers, tokens, heads, dim = like.layers, like.tokens, like.heads, like.dim
        dtype, hnd_in_memory = like.dtype, like.hnd_in_memory
    if like is not None and draw(st.booleans()):  # the same place in memory: the case that fuses most
        outer, shared, block_padding = like.outer, like.shared, like.block_padding
    else:
        outer = draw(st.sampled_from(_OUTER_ORDERS))
        shared, block_padding = draw(st.booleans()), draw(st.sampled_from([0, 0, 0, 1, 5]))
    return Recipe(
        style=style,
        order=draw(st.sampled_from(["NHD", "HND"])),
        layers=layers,
        blocks=draw(st.sampled_from([1, 2, 3, 6])),
        tokens=tokens,
        heads=heads,
        dim=dim,
        dtype=dtype,
        outer=outer,
        hnd_in_memory=hnd_in_memory,
        shared=shared,
        block_padding=block_padding,
        spare_blocks=draw(st.sampled_from([0, 0, 1, 3])),
    )
