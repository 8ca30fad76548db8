"""The whole KV cache of an imaginary model, and engines that hold it in parts: what hand-overs are judged by.

`Reference` is one array of random bytes: what every layer, head and token of a prompt should be. An `Engine` says how
the model is cut into ranks and how each rank's cache looks. A `RankCache` is one rank's memory; it is written and
compared through torch indexing only, so nothing here knows what kvflow's planner thinks. Memory that nobody should
touch holds a sentinel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvflow import CacheLayout
from kvflow.core.cache.layout import KVStyle
from tests.core.caches import Cache, Recipe

PRODUCER_FILL, CONSUMER_FILL = 0x5A, 0xC3
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A latent cache (MLA) has one head, which every tensor-parallel rank holds."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.uint8
    latent: bool = False

    @property
    def parts(self) -> int:
        """K and V, or the latent."""
        return 1 if self.latent else 2

    @property
    def head_bytes(self) -> int:
        """Of one token in one layer, all parts."""
        return self.parts * self.head_size * self.dtype.itemsize


class Reference:
    """The true cache of one prompt, as integers of the dtype's size: (layer, part, token, head, element)."""

    def __init__(self, model: Model, num_tokens: int, seed: int = 0) -> None:
        shape = (model.layers, model.parts, num_tokens, model.kv_heads, model.head_size)
        size = torch.Size(shape).numel() * model.dtype.itemsize
        noise = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        self.values = noise.view(_INTEGERS[model.dtype.itemsize]).view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a rank's cache looks to its user (style, order) and lies in memory (the rest); see `core.caches.Recipe`."""

    style: KVStyle = KVStyle.KV_FIRST
    order: str = "NHD"
    hnd_in_memory: bool = False
    outer: tuple[str, ...] = ("layer", "kv", "block")
    shared: bool = False
    block_padding: int = 0
    spare_blocks: int = 0
    layers_reversed: bool = False
    layers_named: bool = True
    """Whether the layers' names tell their numbers; else the user gives them."""


class Place(NamedTuple):
    """A rank's place in its engine."""

    pp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A model, cut. Rank number i, stage by stage, has look number i modulo their count."""

    model: Model
    tp_size: int = 1
    stages: tuple[tuple[int, ...], ...]
    """The layers of each pipeline stage."""
    block_size: int
    num_blocks: int
    looks: tuple[Look, ...] = (Look(),)
    tells_heads: bool = True
    """Whether Config.num_kv_heads is given."""
    dp_rank: int = 0
    """Which replica the request is on."""

    @property
    def places(self) -> list[Place]:
        return [Place(pp, tp) for pp in range(len(self.stages)) for tp in range(self.tp_size)]

    def layers(self, place: Place) -> tuple[int, ...]:
        return self.stages[place.pp]

    def heads(self, place: Place) -> range:
        """The heads of a rank: a share of them, or one that it holds like its neighbours."""
        count = max(self.model.kv_heads // self.tp_size, 1)
        first = place.tp * self.model.kv_heads // self.tp_size
        return range(first, first + count)

    def token_bytes(self, place: Place) -> int:
        """Of one token on one rank."""
        return len(self.layers(place)) * len(self.heads(place)) * self.model.head_bytes

    def recipe(self, place: Place) -> Recipe:
        look = self.looks[self.places.index(place) % len(self.looks)]
        layers = self.layers(place)
        return Recipe(
            style=KVStyle.MLA if self.model.latent else look.style,
            order=look.order,
            layers=len(layers),
            blocks=self.num_blocks,
            tokens=self.block_size,
            heads=len(self.heads(place)),
            dim=self.model.head_size * (2 if look.style is KVStyle.FUSED and not self.model.latent else 1),
            dtype=self.model.dtype,
            outer=look.outer,
            hnd_in_memory=look.hnd_in_memory,
            shared=look.shared,
            block_padding=look.block_padding,
            spare_blocks=look.spare_blocks,
            layer_indices=layers[::-1] if look.layers_reversed else layers,
        )


class RankCache:
    """One rank's memory, all of it `fill` at first."""

    def __init__(self, engine: Engine, place: Place, fill: int) -> None:
        self.engine, self.place = engine, place
        self._cache = Cache(engine.recipe(place))
        for storage in self._cache.storages:
            storage.fill_(fill)
        look = engine.looks[engine.places.index(place) % len(engine.looks)]
        names = [name if look.layers_named else f"attn_{at}" for at, name in enumerate(self._cache.tensors)]
        self.tensors = dict(zip(names, self._cache.tensors.values(), strict=True))
        self.layout = CacheLayout.infer(
            self.tensors,
            order=look.order,
            block_size=engine.block_size,
            style=self._cache.recipe.style,
            layer_indices=None if look.layers_named else self._cache.recipe.indices,
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers, in the order of the tensors."""
        return self._cache.recipe.indices

    def slots(self, layer: int, part: int) -> torch.Tensor:
        """A part of the cache's layer number `layer` as integers: (block, token, head, element), a view."""
        recipe = self._cache.recipe
        tensors = list(self.tensors.values())[layer]
        whole = tensors[part] if isinstance(tensors, tuple) else tensors
        match recipe.style:
            case KVStyle.KV_FIRST:
                whole = whole[part]
            case KVStyle.BLOCKS_FIRST:
                whole = whole[:, part]
            case KVStyle.FUSED:
                half = recipe.dim // 2
                whole = whole[..., part * half : (part + 1) * half]
            case KVStyle.MLA:
                whole = whole.unsqueeze(2)
        if recipe.order == "HND" and recipe.style is not KVStyle.MLA:
            whole = whole.transpose(1, 2)
        return whole.view(_INTEGERS[recipe.dtype.itemsize])

    def write(self, reference: Reference, tokens: range, block_ids: Sequence[int]) -> None:
        """Put this rank's share of `tokens` of the prompt into `block_ids`, from the first block's first token on."""
        position = torch.arange(len(tokens))
        blocks = torch.tensor(block_ids, dtype=torch.int64)[position // self.engine.block_size]
        inside = position % self.engine.block_size
        heads = self.engine.heads(self.place)
        for at, layer in enumerate(self.layers):
            for part in range(self.engine.model.parts):
                share = reference.values[layer, part, tokens.start : tokens.stop, heads.start : heads.stop]
                self.slots(at, part)[blocks, inside] = share

    def snapshot(self) -> list[bytes]:
        """All bytes, those that no block has included."""
        return self._cache.snapshot()

    def difference(self, right: RankCache) -> str:
        """Where this cache is not as it should be; "" if every byte is right."""
        if self.snapshot() == right.snapshot():
            return ""
        for at, layer in enumerate(self.layers):
            for part in range(self.engine.model.parts):
                wrong = (self.slots(at, part) != right.slots(at, part)).nonzero().tolist()
                if wrong:
                    block, token, head, element = wrong[0]
                    return (
                        f"{self.place}: layer {layer} part {part} block {block} token {token} head {head} element "
                        f"{element} is the first of {len(wrong)} that differ"
                    )
        return f"{self.place}: bytes outside of all blocks differ"
