"""The reference for hand-overs: a model's dimensions, engines that shard its KV cache, and the memory of each rank.

An `Engine` describes how the model is split into ranks, and the layout of each rank's cache. A `RankCache` is the
memory of one rank. Patterns are written and compared by torch indexing only, independently of kvflow's planner. Memory
that must not be written holds a sentinel, which no element of a pattern equals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvflow import CacheLayout
from kvflow.core.cache.layout import KVStyle
from kvflow.testing import PatternCache, compare_blocks
from tests.core.caches import Cache, Recipe

PRODUCER_FILL, CONSUMER_FILL = 0x5A, 0xC3


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Dimensions of a model's KV cache. A latent cache (MLA) has one head, which every tensor-parallel rank holds."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype = torch.uint8
    latent: bool = False
    kv_format: str = "plain"

    @property
    def parts(self) -> int:
        """Number of parts of a token: 2 for K and V, 1 for the latent."""
        return 1 if self.latent else 2

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token in one layer, all parts included."""
        return self.parts * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Layout of a rank's cache: the axes of its tensors (style, order), and the rest of its memory layout.

    See `tests.core.caches.Recipe`.
    """

    style: KVStyle = KVStyle.KV_FIRST
    order: str = "NHD"
    hnd_in_memory: bool = False
    outer: tuple[str, ...] = ("layer", "kv", "block")
    shared: bool = False
    block_padding: int = 0
    spare_blocks: int = 0
    layers_reversed: bool = False
    layers_named: bool = True
    """True if the layers' names contain their indices; if False, `layer_indices` is passed."""


class Place(NamedTuple):
    """Pipeline and tensor-parallel rank in an engine."""

    pp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A model split into ranks. Ranks count stage by stage, and rank i has look i modulo the number of looks."""

    model: Model
    tp_size: int = 1
    stages: tuple[tuple[int, ...], ...]
    """The layers of each pipeline stage."""
    block_size: int
    """Tokens of a block on one rank."""
    num_blocks: int
    sharded: bool = False
    """True if the tokens of a block are sharded over the tensor-parallel ranks: rank 0 has the first `block_size`."""
    looks: tuple[Look, ...] = (Look(),)
    states_heads: bool = True
    """True if `Config.num_kv_heads` is set."""
    dp_rank: int = 0
    """Data-parallel replica that has the request."""

    @property
    def block_tokens(self) -> int:
        """Number of tokens that a block id stands for."""
        return self.block_size * (self.tp_size if self.sharded else 1)

    def holds(self, place: Place, token: int) -> bool:
        """Return whether a rank holds a token of a prompt, in its layers."""
        return not self.sharded or token // self.block_size % self.tp_size == place.tp

    @property
    def places(self) -> list[Place]:
        return [Place(pp, tp) for pp in range(len(self.stages)) for tp in range(self.tp_size)]

    def layers(self, place: Place) -> tuple[int, ...]:
        return self.stages[place.pp]

    def heads(self, place: Place) -> range:
        """Return the heads of a rank: its share, or, with more ranks than heads, one head that several ranks hold."""
        count = max(self.model.kv_heads // self.tp_size, 1)
        first = place.tp * self.model.kv_heads // self.tp_size
        return range(first, first + count)

    def token_bytes(self, place: Place) -> int:
        """Return the bytes of one token on one rank."""
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
    """The memory of one rank. Every byte is `fill` at first."""

    def __init__(self, engine: Engine, place: Place, fill: int) -> None:
        self.engine, self.place, self._fill = engine, place, fill
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
            kv_format=engine.model.kv_format,
            layer_indices=None if look.layers_named else self._cache.recipe.indices,
        )

        name = f"prefill {place.tp}" if engine.sharded else "prefill"
        self.pattern = PatternCache(name, self.tensors, self.layout, first_head=engine.heads(place).start)
        """The producer's pattern, over this cache. It is the same on all ranks that hold the same head of a token."""

    def snapshot(self) -> list[bytes]:
        """Return all bytes of the memory, including bytes outside every block."""
        return self._cache.snapshot()

    def difference(
        self,
        source: Iterable[RankCache],
        offered: Sequence[int],
        loaded: Sequence[int],
        num_tokens: int,
        first_token: int = 0,
    ) -> str:
        """Check that `loaded` hold the prompt's last blocks and that no other byte was written. Return a fault, or "".

        Tokens before `first_token` lie before the window, and are not compared. Compared elements are overwritten with
        the sentinel.
        """
        source = list(source)
        if any(cache.engine.sharded for cache in (self, *source)):
            return self._difference_of_tokens(source, offered, loaded, num_tokens)
        facts: dict[str, Any] = {"num_tokens": num_tokens, "windowed": first_token > 0}
        for other in source:
            problem = compare_blocks(self.pattern, loaded, other.pattern, offered, **facts)
            if problem is not None:
                return f"{self.place}: {problem}"
        size = self.engine.block_size
        sentinel = torch.full((self.layout.itemsize,), self._fill, dtype=torch.uint8)
        for layer, part in itertools.product(range(len(self.layout.layer_names)), range(self.engine.model.parts)):
            slots = self.pattern.slots(layer, part)
            for index, block in enumerate(loaded, -(-num_tokens // size) - len(loaded)):
                filled = slots[block, max(first_token - index * size, 0) : num_tokens - index * size]
                if (filled == sentinel.view(slots.dtype)).any():
                    return f"{self.place}: layer {layer} part {part} block {block} was not written"
                filled[:] = sentinel.view(slots.dtype)
        return self._foreign_bytes()

    def _difference_of_tokens(
        self, source: Sequence[RankCache], offered: Sequence[int], loaded: Sequence[int], num_tokens: int
    ) -> str:
        """The same, token by token, if the tokens of a latent cache are sharded on either side."""
        sentinel = torch.full((self.layout.itemsize,), self._fill, dtype=torch.uint8)
        first = -(-num_tokens // self.engine.block_tokens) - len(loaded)
        for token in range(first * self.engine.block_tokens, num_tokens if source else 0):
            holders = [other for other in source if other.engine.holds(other.place, token)]
            for at, layer in enumerate(self.layout.layer_indices if self.engine.holds(self.place, token) else ()):
                other = next(one for one in holders if layer in one.layout.layer_indices)
                mine = self._slot(at, token, loaded, first)
                if not mine.equal(other._slot(other.layout.layer_indices.index(layer), token, offered, 0)):
                    return f"{self.place}: layer {layer} token {token} is not that of {other.place}"
                mine[:] = sentinel.view(mine.dtype)
        return self._foreign_bytes()

    def _slot(self, layer: int, token: int, table: Sequence[int], first_block: int) -> torch.Tensor:
        """Return the latent of a token. `layer`: index among the layers here. `table`: blocks from `first_block` on."""
        block = table[token // self.engine.block_tokens - first_block]
        return self.pattern.slots(layer, 0)[block, token % self.engine.block_size]

    def _foreign_bytes(self) -> str:
        right = all((storage == self._fill).all() for storage in self._cache.storages)
        return "" if right else f"{self.place}: bytes were written that do not belong to the prompt"
