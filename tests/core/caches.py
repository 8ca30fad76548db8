"""Random KV caches of real torch tensors, and where their blocks lie according to torch alone.

A `Recipe` says how a cache looks to its user (style, order, sizes) and how it lies in memory (which axes are outermost,
what is padded, which layers share a storage). `Cache.block` reaches a block by torch indexing, so tests can compare
what `kvflow.core.cache.layout` computes with what torch does. `Cache.slot` reaches K or V of one head of one token,
whatever the style: so two caches that hold the same model in different ways can be compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from hypothesis import strategies as st

from kvflow.core.cache.layout import CacheLayout, KVStyle

LayerTensors: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.float32)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_PAIR_STYLES = (KVStyle.KV_FIRST, KVStyle.BLOCKS_FIRST, KVStyle.APART)
_KV_STYLES = (*_PAIR_STYLES, KVStyle.FUSED)
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
    """How to build a cache. `outer` and `hnd_in_memory` are about memory, `order` is about the tensors' shape.

    `dim` is the last axis, that is K and V of a head together for FUSED.
    """

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
    layer_indices: tuple[int, ...] = ()
    """Which layers of the model these are, in the order of the dict; none means the first ones."""

    @property
    def indices(self) -> tuple[int, ...]:
        return self.layer_indices or tuple(range(self.layers))


class Cache:
    """Tensors made from a recipe, with all their memory at hand."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.storages: list[torch.Tensor] = []
        names = [f"layers.{index}.attn" for index in recipe.indices]
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

    @property
    def kv_count(self) -> int:
        """2 for K and V, however they are held, 1 for a latent."""
        return 1 if self.recipe.style is KVStyle.MLA else 2

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

    def slot(self, layer: int, kv: int, block: int, token: int, head: int) -> torch.Tensor:
        """The elements of K (0) or V (1), or of the latent, of one head of one token of a block."""
        recipe = self.recipe
        if recipe.style is not KVStyle.FUSED:
            view = self.block(layer, kv, block)
            if recipe.style is KVStyle.MLA:
                return view[token]
            return view[token, head] if recipe.order == "NHD" else view[head, token]
        view = self.block(layer, 0, block)
        both = view[token, head] if recipe.order == "NHD" else view[head, token]
        half = recipe.dim // 2
        return both[half:] if kv else both[:half]

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

    def restore(self, snapshot: list[bytes]) -> None:
        for storage, before in zip(self.storages, snapshot, strict=True):
            ctypes.memmove(storage.data_ptr(), before, len(before))

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
def recipes(draw: st.DrawFn, *, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Recipe:
    """A random recipe."""
    style = draw(st.sampled_from(list(KVStyle)))
    return Recipe(
        style=style,
        order=draw(st.sampled_from(["NHD", "HND"])),
        layers=draw(st.integers(1, 3)),
        blocks=draw(st.sampled_from([1, 2, 3, 6])),
        tokens=draw(st.integers(1, 4)),
        heads=1 if style is KVStyle.MLA else draw(st.integers(1, 3)),
        dim=draw(st.integers(1, 4)) * (2 if style is KVStyle.FUSED else 1),
        dtype=draw(st.sampled_from(dtypes)),
        outer=draw(st.sampled_from(_OUTER_ORDERS)),
        hnd_in_memory=draw(st.booleans()),
        shared=draw(st.booleans()),
        block_padding=draw(st.sampled_from([0, 0, 0, 1, 5])),
        spare_blocks=draw(st.sampled_from([0, 0, 1, 3])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Two ranks that hold the same model in different ways, and the heads that one reads from the other."""

    local: Recipe
    remote: Recipe
    local_start: int
    remote_start: int
    heads: int


def whole_sides(local: Recipe, remote: Recipe) -> Sides:
    """All heads of both."""
    return Sides(local=local, remote=remote, local_start=0, remote_start=0, heads=local.heads)


@st.composite
def sides(draw: st.DrawFn) -> Sides:
    """Any style, order, memory order, block sizes (one divides the other), heads, layers and place in memory."""
    latent = draw(st.sampled_from([False, False, False, True]))
    heads = 1 if latent else draw(st.integers(1, 3))
    size = draw(st.integers(1, 3))  # elements of K, or of V, or of the latent
    dtype = draw(st.sampled_from((torch.uint8, torch.float16)))
    alike = draw(st.booleans())  # all heads, the same style and place in memory: the case that fuses and joins most
    small, factor = draw(st.integers(1, 4)), 1 if alike else draw(st.sampled_from([1, 1, 2, 3]))
    tokens = draw(st.permutations([small, small * factor]))
    common = draw(st.integers(1, 2))  # layers
    first: Recipe | None = None

    def side(block_size: int, others: tuple[int, ...]) -> tuple[Recipe, int]:
        styles = _KV_STYLES if first is None or not alike else (first.style,)
        style = KVStyle.MLA if latent else draw(st.sampled_from(styles))
        held = heads if latent or alike else heads + draw(st.sampled_from([0, 0, 1, 2]))
        indices = (*range(10, 10 + common), *others[: draw(st.integers(0, 1))])
        recipe = Recipe(
            style=style,
            order=draw(st.sampled_from(["NHD", "HND"])),
            layers=len(indices),
            blocks=draw(st.integers(1, 6)),
            tokens=block_size,
            heads=held,
            dim=2 * size if style is KVStyle.FUSED else size,
            dtype=dtype,
            outer=draw(st.sampled_from(_OUTER_ORDERS)),
            hnd_in_memory=draw(st.booleans()),
            shared=draw(st.booleans()),
            block_padding=draw(st.sampled_from([0, 0, 0, 1, 5])),
            spare_blocks=draw(st.sampled_from([0, 0, 1])),
            layer_indices=tuple(draw(st.permutations(indices))),
        )
        if first is not None and alike:
            same = {name: getattr(first, name) for name in ("outer", "shared", "block_padding", "hnd_in_memory")}
            recipe = replace(recipe, **same)
        return recipe, draw(st.integers(0, held - heads))

    first, local_start = side(tokens[0], (3,))
    remote, remote_start = side(tokens[1], (77,))
    return Sides(local=first, remote=remote, local_start=local_start, remote_start=remote_start, heads=heads)
