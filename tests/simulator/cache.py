"""The cache of one rank. Each value encodes its prompt, token, layer, part, head and place in the head.

So the contents of a block show whether they are the right bytes of the right prompt, or bytes of an earlier owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvflow.core.cache.groups import CacheGroup, GroupFacts, GroupKind
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.state import Segment, StateLayout, StateTensor
from tests.simulator.settings import LAYERS_MAX, MODEL_KV_HEADS, Model, Shape

HEAD_SIZE = 4
TOKENS_MAX = 64
_PARTS = 2
_PATTERN: npt.NDArray[np.int32] = np.arange(_PARTS * TOKENS_MAX * MODEL_KV_HEADS * HEAD_SIZE, dtype=np.int32).reshape(
    _PARTS, TOKENS_MAX, MODEL_KV_HEADS, HEAD_SIZE
)
_NUMBER_SHIFT = 13
assert _PATTERN.size * LAYERS_MAX <= 1 << _NUMBER_SHIFT
_POOL = "all"

Ints = npt.NDArray[np.int32]
Content: TypeAlias = "int | Ints"
"""The prompt that tokens belong to: one number for all, or a number for each of `TOKENS_MAX` tokens."""
Tables: TypeAlias = Sequence[Sequence[int]]
"""Block ids by group."""


class _Layer:
    """A layer of a group. Its values are 32-bit integers, which kvflow sees as floats."""

    def __init__(self, number: int, facts: GroupFacts, model: Model, shape: Shape, tp_rank: int) -> None:
        share = 1 if model.latent else shape.tp_size
        count = 1 if model.latent else MODEL_KV_HEADS // share
        first = 0 if model.latent else tp_rank * count
        self.number, self.name = number, f"layers.{number}"
        self._shards, self._shard = (shape.tp_size, tp_rank) if facts.kind is GroupKind.SHARDED else (1, 0)
        self._block_tokens = facts.block_size
        self.block_size = tokens = facts.block_size // self._shards
        self._heads = slice(first, first + count)
        blocks = shape.num_blocks
        if facts.kind is GroupKind.STATE:
            self._values: Ints = np.zeros((blocks, count, HEAD_SIZE), dtype=np.int32)
            self._blocks = self._values[None, :, None]
        elif model.latent:
            self._values = np.zeros((blocks, tokens, HEAD_SIZE), dtype=np.int32)
            self._blocks = self._values[None, :, :, None]
        else:
            self._values = np.zeros((_PARTS, blocks, tokens, count, HEAD_SIZE), dtype=np.int32)
            self._blocks = self._values
            if shape.order == "HND":
                self.turn()
        self.tensor = torch.from_numpy(self._values.view(np.float32))
        self._address = int(self._values.ctypes.data)
        self._part_bytes = self._values.nbytes // len(self._blocks)
        self._block_bytes = self._part_bytes // blocks

    def turn(self) -> None:
        """Swap tokens and heads in the layout of blocks. The bytes in memory do not change."""
        if self._values.ndim < 5:
            return
        swap = self._blocks is self._values
        self._values = self._values.reshape(*self._values.shape[:2], *self._values.shape[3:1:-1], HEAD_SIZE)
        self._blocks = self._values.swapaxes(2, 3) if swap else self._values
        self.tensor = torch.from_numpy(self._values.view(np.float32))

    def write(self, content: Content, first: int, block_ids: Sequence[int], upto: int) -> None:
        """Write a prompt's tokens from `first` up to `upto` to `block_ids`."""
        numbers = self._numbers(first, block_ids)
        found = self._blocks[:, list(block_ids)]
        tokens = found.reshape(len(found), len(numbers), *found.shape[3:])
        tokens[:, numbers < upto] = self._wanted(content, numbers[numbers < upto])
        self._blocks[:, list(block_ids)] = tokens.reshape(found.shape)

    def fill(self, number: int, block_ids: Sequence[int] | None) -> None:
        """Overwrite freed blocks as their next owner does. None: overwrite all blocks."""
        self._blocks[:, slice(None) if block_ids is None else list(block_ids)] = -1 - number

    def wrong_token(self, content: Content, start: int, stop: int, first: int, block_ids: Sequence[int]) -> str | None:
        """Return a text about the first wrong value in tokens `start` to `stop` of a prompt; None if all are right.

        `block_ids` are the prompt's blocks from token `first` on.
        """
        blocks, numbers = self._blocks[:, list(block_ids)], self._numbers(first, block_ids)
        checked = (start <= numbers) & (numbers < stop)
        found, numbers = blocks.reshape(len(blocks), -1, *blocks.shape[3:])[:, checked], numbers[checked]
        wanted = self._wanted(content, numbers)
        if np.array_equal(found, wanted):
            return None
        part, at, head, place = (int(axis[0]) for axis in np.nonzero(found != wanted))
        value, token = int(found[part, at, head, place]), int(numbers[at])
        whose = f"prompt {value >> _NUMBER_SHIFT}" if value >= 0 else f"a later owner ({-1 - value})"
        block = block_ids[(token - first) // self._block_tokens]
        where = f"block {block}, {self.name}, part {part}, head {head}"
        number = content if isinstance(content, int) else int(content[token])
        return f"token {token} ({where}) is of {whose}, not of prompt {number}"

    def blocks_of(self, address: int, size_bytes: int) -> range:
        """Return the blocks that a piece of memory touches; none if the memory is not in this layer."""
        offset = address - self._address
        if not 0 <= offset < self._values.nbytes:
            return range(0)
        offset %= self._part_bytes
        return range(offset // self._block_bytes, (offset + size_bytes - 1) // self._block_bytes + 1)

    def _numbers(self, first: int, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the position in the prompt of each token that this rank has in `block_ids`, from token `first` on."""
        tokens = np.arange(first, first + len(block_ids) * self._block_tokens)
        return tokens.reshape(len(block_ids), self._shards, self.block_size)[:, self._shard].ravel()

    def _wanted(self, content: Content, tokens: npt.NDArray[np.int64]) -> Ints:
        numbers = np.int32(content) if isinstance(content, int) else content[tokens, None, None]
        base = (numbers << _NUMBER_SHIFT) + np.int32(self.number * _PATTERN.size)
        found: Ints = _PATTERN[: len(self._blocks), tokens][:, :, self._heads] + base
        return found


class RankCache:
    """All layers of one rank, by group. The groups take their block ids from one pool, as in vLLM."""

    def __init__(self, model: Model, shape: Shape, tp_rank: int, pp_rank: int) -> None:
        self._facts = model.groups(shape)
        self._layers = [
            [_Layer(number, facts, model, shape, tp_rank) for number in model.layers_of(at, shape, pp_rank)]
            for at, facts in enumerate(self._facts)
        ]
        self._order = shape.order

    @property
    def groups(self) -> list[CacheGroup]:
        """The groups to register with kvflow."""
        return [self._group(facts, layers) for facts, layers in zip(self._facts, self._layers, strict=True)]

    def turn(self) -> None:
        """Swap tokens and heads in the layout of all layers. The bytes in memory do not change."""
        self._order = "NHD" if self._order == "HND" else "HND"
        for layer in self._all():
            layer.turn()

    def _group(self, facts: GroupFacts, layers: Sequence[_Layer]) -> CacheGroup:
        tensors = {layer.name: layer.tensor for layer in layers}
        layout: StateLayout | CacheLayout
        if facts.kind is GroupKind.STATE:
            units = tensors[layers[0].name].shape[1]
            segment = Segment(name="h", size=units, units=units, model_units=MODEL_KV_HEADS)
            layout = StateLayout.infer(tensors, [StateTensor(name="s", segments=(segment,))])
        else:
            layout = CacheLayout.infer(tensors, order=self._order, block_size=layers[0].block_size)
        return CacheGroup(facts.name, tensors, layout, window=facts.window or None, kind=facts.kind, pool=_POOL)

    def write(self, content: Content, tokens: int, tables: Tables, upto: int | None = None) -> None:
        """Write a prompt of `tokens` tokens to its blocks, as if computed; with `upto`, only tokens before `upto`."""
        last = 1 << 62 if upto is None or upto == tokens else upto
        for first, layers, block_ids in self._held(tokens, tables):
            for layer in layers:
                layer.write(content, first, block_ids, last)

    def poison(self, number: int, block_ids: Sequence[int] | None) -> None:
        """Overwrite freed blocks as their next owner does. None: overwrite all blocks."""
        for layer in self._all():
            layer.fill(number, block_ids)

    def wrong_token(self, content: Content, tokens: int, tables: Tables, count: int | None = None) -> str | None:
        """Return a text about the first wrong value in a prompt's blocks; None if all values are right.

        `tables` are the last blocks of a prompt of `tokens` tokens. `count`: check only their first `count` tokens.
        """
        held = list(self._held(tokens, tables))
        stop = tokens if count is None else min(tokens, min((first for first, _, _ in held), default=0) + count)
        for first, layers, block_ids in held:
            for layer in layers if first < stop else ():
                if wrong := layer.wrong_token(content, first, stop, first, block_ids):
                    return wrong
        return None

    def blocks_of(self, address: int, size_bytes: int) -> Iterator[int]:
        """Yield the blocks that a piece of memory touches; none if the memory is not in this cache."""
        for layer in self._all():
            yield from layer.blocks_of(address, size_bytes)

    def _held(self, tokens: int, tables: Tables) -> Iterator[tuple[int, Sequence[_Layer], Sequence[int]]]:
        """Yield (first token, layers, block ids) for each group that has blocks in `tables`."""
        for facts, layers, block_ids in zip(self._facts, self._layers, tables, strict=True):
            if block_ids:
                yield first_token(facts, tokens, block_ids), layers, block_ids

    def _all(self) -> Iterable[_Layer]:
        return (layer for layers in self._layers for layer in layers)


def first_token(facts: GroupFacts, tokens: int, block_ids: Sequence[int]) -> int:
    """Return the first token in `block_ids`, the last blocks of a prompt of `tokens` tokens."""
    return (-(-tokens // facts.block_size) - len(block_ids)) * facts.block_size
