"""An engine's cache in the run: the owner of each block, and the value of every byte.

Free blocks hold poison, so a write beside its place and a late read are found. The bytes of a token follow from the
number of its load, its place in the prompt, and the layer: both engines know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvflow import CacheGroup, CacheLayout
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.testing import PatternCache
from tests.support.stock_engines import layout_of

WINDOW = 40
HEADS, HEAD_SIZE = 2, 8
_POISON = 0x2A5A
_LIST = list[list[int]]


@dataclass(slots=True)
class _Group:
    facts: GroupFacts
    pattern: PatternCache
    layers: dict[str, torch.Tensor]
    views: list[torch.Tensor]
    """Of each layer, its K and its V: (block, slot, head, element)."""
    free: list[int]
    taken: set[int]

    def blocks(self, ids: Sequence[int]) -> torch.Tensor:
        """(layer and part, block, slot, head, element)."""
        index = torch.tensor(ids, dtype=torch.int64)
        return torch.stack([view[index] for view in self.views])

    def write(self, ids: Sequence[int], values: torch.Tensor) -> None:
        index = torch.tensor(ids, dtype=torch.int64)
        for view, value in zip(self.views, values, strict=True):
            view[index] = value

    def poison(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the poison of free blocks. It differs from block to block."""
        each = (_POISON ^ torch.tensor(ids, dtype=torch.int64)).to(self.views[0].dtype)
        return each.view(1, -1, 1, 1, 1).expand(len(self.views), -1, -1, -1, -1)

    def content(self, number: int, tokens: np.ndarray) -> torch.Tensor:
        """Return the content of these tokens: (layer and part, token, head, element)."""
        layers = self.pattern.layout.layer_indices
        keys = np.array([layer * 2 + part for layer in layers for part in (0, 1)], dtype=np.uint64)
        slot = self.views[0]
        width = slot.shape[2] * slot.shape[3]
        mixed = (
            np.uint64(number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
            + keys[:, None, None] * np.uint64(0xC2B2AE3D27D4EB4F)
            + tokens.astype(np.uint64)[None, :, None] * np.uint64(0x165667B19E3779F9)
            + np.arange(width, dtype=np.uint64) * np.uint64(0x27D4EB2F165667C5)
        )
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        kept = (mixed >> np.uint64(34)).astype(np.int16 if slot.element_size() == 2 else np.int32)
        return torch.from_numpy(kept).view(len(keys), len(tokens), slot.shape[2], slot.shape[3])


class Cache:
    """The cache of one runtime, of one group of layers or of two."""

    def __init__(
        self,
        name: str,
        num_blocks: int = 0,
        block_size: int = 4,
        order: str = "HND",
        *,
        layers: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """`layers` are those of a stock engine, which has made them itself."""
        self.name = name
        if layers is not None:
            self.groups = [_group("full", name, layers, layout_of(layers), None)]
        else:
            self.groups = [_kv_group("full", name, (0, 1), num_blocks, block_size, order, None)]
        if name == "windowed":
            self.groups.append(_kv_group("local", name, (2, 3), num_blocks, block_size, order, WINDOW))
        for group in self.groups:
            group.write(group.free, group.poison(group.free))
        self.errors: list[str] = []

    @property
    def sizes(self) -> list[int]:
        return [group.facts.block_size for group in self.groups]

    @property
    def registered(self) -> tuple[object, CacheLayout | None]:
        """Return the arguments of `register_kv_caches`."""
        if len(self.groups) == 1:
            return self.groups[0].layers, self.groups[0].pattern.layout
        made = [
            CacheGroup(one.facts.name, one.layers, one.pattern.layout, window=one.facts.window or None)
            for one in self.groups
        ]
        return made, None

    def given(self, tables: _LIST) -> list[int] | _LIST:
        """Block ids as requests have them."""
        return tables[0] if len(self.groups) == 1 else tables

    def take(self, tokens: int, cached: float = 0.0) -> _LIST:
        """Blocks for the end of a prompt, without its cached ones. They have held poison until now."""
        tables = []
        for group in self.groups:
            missing = -(-tokens // group.facts.block_size)
            missing -= int(missing * cached)
            count = min(missing, group.facts.blocks_needed(tokens))
            assert count <= len(group.free), f"{self.name}: {count} blocks are wanted, free are {len(group.free)}"
            ids = [group.free.pop() for _ in range(count)]
            group.taken.update(ids)
            tables.append(ids)
        self.check_free(tables, "was written to before it was given out")
        return tables

    def give_back(self, tables: _LIST) -> None:
        for group, ids in zip(self.groups, tables, strict=True):
            group.write(ids, group.poison(ids))
            group.taken.difference_update(ids)
            group.free += ids

    def check_free(self, tables: _LIST, what: str) -> None:
        """These blocks hold poison."""
        for group, ids in zip(self.groups, tables, strict=True):
            if ids and not bool((group.blocks(ids) == group.poison(ids)).all()):
                self.errors.append(f"{self.name}: one of blocks {ids[:8]} of group {group.facts.name!r} {what}")
                group.write(ids, group.poison(ids))

    def check_all_free(self) -> None:
        """All blocks are free, and hold poison."""
        for group in self.groups:
            if group.taken:
                self.errors.append(f"{self.name}: blocks {sorted(group.taken)[:8]} were never given back")
        self.check_free([sorted(group.free) for group in self.groups], "was written to while nobody had it")

    def check_around(self, tables: _LIST) -> None:
        """Check that the free neighbours of these blocks hold poison."""
        around = []
        for group, ids in zip(self.groups, tables, strict=True):
            beside = {block + step for block in ids for step in (-1, 1)} - group.taken
            around.append([block for block in beside if 0 <= block < group.pattern.layout.num_blocks])
        self.check_free(around, "was written to beside a load")

    def fill(self, tables: _LIST, number: int, num_tokens: int, span: range) -> None:
        """Write the tokens `span` of a prompt of `num_tokens` tokens. `tables` are the prompt's last blocks."""
        for group, ids in zip(self.groups, tables, strict=True):
            tokens, blocks, slots = _where(group, ids, num_tokens, span)
            values = group.content(number, tokens)
            for view, value in zip(group.views, values, strict=True):
                view[blocks, slots] = value

    def difference(
        self, tables: _LIST, number: int, num_tokens: int, span: range | None = None, *, whole: bool = False
    ) -> str:
        """Return an empty text if the blocks hold a prompt, or the tokens `span` of it; else the first difference.

        Behind its end they hold poison, unless they were moved as a `whole`.
        """
        span = range(num_tokens) if span is None else span
        for group, ids in zip(self.groups, tables, strict=True):
            tokens, blocks, slots = _where(group, ids, num_tokens, span)
            if not len(tokens):
                continue
            found = torch.stack([view[blocks, slots] for view in group.views])
            wrong = (found != group.content(number, tokens)).nonzero()
            if len(wrong):
                place, at = int(wrong[0][0]), int(wrong[0][1])
                where = f"token {int(tokens[at])} of {num_tokens} in block {int(blocks[at])}, layer and part {place}"
                return f"{self.name}: group {group.facts.name!r}: {len(wrong)} elements are wrong, first {where}"
            if not whole and span.stop == num_tokens and num_tokens % group.facts.block_size:
                behind = group.blocks(ids[-1:])[:, :, num_tokens % group.facts.block_size :]
                if not bool((behind == group.poison(ids[-1:])).all()):
                    return f"{self.name}: block {ids[-1]} was written to behind the prompt's end"
        return ""


def _where(
    group: _Group, ids: Sequence[int], num_tokens: int, span: range
) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Return the tokens of `span` that the blocks hold, with their blocks and slots."""
    size = group.facts.block_size
    first = -(-num_tokens // size) - len(ids)
    tokens = np.arange(max(span.start, first * size), min(span.stop, num_tokens))
    blocks = np.array(ids, dtype=np.int64)[tokens // size - first] if len(tokens) else tokens
    return tokens, torch.from_numpy(blocks), torch.from_numpy(tokens % size)


def _kv_group(
    name: str, cache: str, layers: Sequence[int], num_blocks: int, block_size: int, order: str, window: int | None
) -> _Group:
    inner = (HEADS, block_size) if order == "HND" else (block_size, HEADS)
    shape = (2, num_blocks, *inner, HEAD_SIZE)
    tensors = {f"layers.{layer}": torch.zeros(shape, dtype=torch.float16) for layer in layers}
    return _group(name, cache, tensors, CacheLayout.infer(tensors, order=order, block_size=block_size), window)


def _group(name: str, cache: str, layers: dict[str, torch.Tensor], layout: CacheLayout, window: int | None) -> _Group:
    kind = GroupKind.FULL if window is None else GroupKind.SLIDING
    facts = GroupFacts(name=name, block_size=layout.block_size, kind=kind, window=window or 0)
    pattern = PatternCache(cache, layers, layout)
    views = [pattern.slots(layer, part) for layer in range(len(layers)) for part in range(len(pattern.parts))]
    return _Group(facts, pattern, layers, views, list(range(layout.num_blocks))[::-1], set())
