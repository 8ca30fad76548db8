"""Views of test caches, to fill a cache with a pattern that is different in each block, slot, layer and head.

A *slot* is the position of one token in a block. The pattern of an element is a hash of its engine, model layer, K or
V, block, slot, model head and index within the head, truncated to the dtype's size and finite in every float format. So
the pattern does not depend on layout, axis order or sharding, and missing, stale or misplaced bytes are found. Elements
are compared as integers, so NaN needs no special care.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from kvflow.checks import counted
from kvflow.core.cache.layout import CacheLayout, KVStyle, axes_of
from kvflow.core.cache.state import StateLayout
from kvflow.core.cache.tensors import KVCaches, tensors_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIMES = (2654435761, 40503, 2246822519, 3266489917, 668265263, 374761393, 3367900313)


class PatternCache:
    """View of one rank's KV cache in any layout, that fills blocks with a pattern and checks them.

    Args:
        engine_id: Name of the engine. The pattern depends on it, and messages contain it.
        kv_caches: The registered tensors.
        layout: Layout of `kv_caches`. `layout.layer_indices` are the layers' indices in the model.
        first_head: Index in the model of this rank's first KV head.
    """

    def __init__(self, engine_id: str, kv_caches: KVCaches, layout: CacheLayout, *, first_head: int = 0) -> None:
        self.engine_id = engine_id
        self.layout = layout
        self.heads = range(first_head, first_head + layout.num_kv_heads)
        self._layers = [cast("tuple[torch.Tensor, ...]", tensors_of(*layer)) for layer in kv_caches.items()]

    @property
    def parts(self) -> Sequence[str]:
        return ("latent",) if self.layout.latent else ("K", "V")

    def slots(self, layer: int, part: int) -> torch.Tensor:
        """Return all slots (one token of a block each) of one layer's K or V, with the same axes for every layout.

        Args:
            layer: Index of the layer among the registered layers.
            part: 0 for K or the MLA latent, 1 for V.

        Returns:
            A view of the cache with shape (block, slot, head, element), as integers of the dtype's size.
        """
        layout, tensors = self.layout, self._layers[layer]
        whole, axes = tensors[part % len(tensors)], axes_of(layout.style, layout.order)
        if "kv" in axes:
            whole = whole.select(axes.index("kv"), part)
        if "head" not in axes:
            whole = whole.unsqueeze(2)
        elif layout.order == "HND":
            whole = whole.transpose(1, 2)
        if layout.style is KVStyle.FUSED:
            whole = whole[..., part * layout.kv_head_size : (part + 1) * layout.kv_head_size]
        return whole.view(_INTEGERS[layout.itemsize])

    def fill(self, block_ids: Sequence[int] | None = None) -> None:
        """Write the pattern into all slots of blocks.

        Args:
            block_ids: Ids of the blocks to fill; None for all blocks.
        """
        for layer, part in self._regions():
            ids = self._ids(block_ids)
            self.slots(layer, part)[ids] = self._pattern(layer, part, ids)

    def assert_untouched(self, block_ids: Sequence[int] | None = None, *, first_slot: int = 0) -> None:
        """Assert that blocks still hold the pattern that `fill` wrote.

        Args:
            block_ids: Ids of the blocks to check; None for all blocks.
            first_slot: Index of the first slot to check in each block.

        Raises:
            AssertionError: An element differs.
        """
        ids = self._ids(block_ids)
        for layer, part in self._regions():
            held = self.slots(layer, part)[ids]
            wrong = (held != self._pattern(layer, part, ids))[:, first_slot:].nonzero().tolist()
            if wrong:
                block, slot, head, _ = wrong[0]
                place = self.name_of(layer, part, int(ids[block]), first_slot + slot, head)
                raise AssertionError(f"{place} was written to, and {counted(len(wrong) - 1, 'element')} more")

    def digests(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return an integer digest of each slot's content. A change of any single element changes the digest.

        Args:
            block_ids: Ids of the blocks to read.

        Returns:
            An int64 tensor of shape (layer, K or V, block, slot), with blocks in the order of `block_ids`.
        """
        layout = self.layout
        weights = 2 * torch.arange(layout.num_kv_heads * layout.kv_head_size) * _PRIMES[0] + 1
        weights = weights.view(layout.num_kv_heads, layout.kv_head_size)
        ids = self._ids(block_ids)
        rows = [
            (self.slots(layer, part)[ids].to(torch.int64) * weights.to(ids.device)).sum((2, 3))
            for layer, part in self._regions()
        ]
        return torch.stack(rows).view(len(self._layers), len(self.parts), len(ids), layout.block_size)

    def name_of(self, layer: int, part: int, block: int, slot: int, head: int | None = None) -> str:
        """Return the name of one slot of a layer, or of one head in this slot, for messages.

        Args:
            layer: Index of the layer among the registered layers.
            part: 0 for K or the MLA latent, 1 for V.
            block: Block id.
            slot: Index of the slot in the block.
            head: Index of the head in this rank; None for the whole slot.

        Returns:
            Text with engine, layer name, K or V, block, slot, and the head's index in the model.
        """
        of_head = "" if head is None else f" head {self.heads[head]}"
        name = self.layout.layer_names[layer]
        return f"engine {self.engine_id!r}, layer {name!r}, {self.parts[part]}, block {block}, slot {slot}{of_head}"

    def find(self, elements: torch.Tensor) -> str | None:
        """Find the first slot and head in the cache with given content.

        Args:
            elements: The content, of shape (element,): one head of one slot, as integers as in the result of `slots`.

        Returns:
            Result of `name_of` for this slot and head; None if no slot has this content.
        """
        for layer, part in self._regions():
            held = (self.slots(layer, part).cpu() == elements.cpu()).all(-1).nonzero().tolist()
            if held:
                return self.name_of(layer, part, *held[0])
        return None

    def _regions(self) -> Iterator[tuple[int, int]]:
        return ((layer, part) for layer in range(len(self._layers)) for part in range(len(self.parts)))

    def _ids(self, block_ids: Sequence[int] | None) -> torch.Tensor:
        chosen = range(self.layout.num_blocks) if block_ids is None else block_ids
        return torch.tensor([int(block) for block in chosen], dtype=torch.int64, device=self._layers[0][0].device)

    def _pattern(self, layer: int, part: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the pattern for one layer's K or V in blocks `ids`: integers of shape (block, slot, head, element)."""
        layout = self.layout
        axes = [ids, *(torch.arange(size) for size in (layout.block_size, layout.num_kv_heads, layout.kv_head_size))]
        axes[2] = axes[2] + self.heads.start
        key = zlib.crc32(self.engine_id.encode()) * _PRIMES[0] + layout.layer_indices[layer] * _PRIMES[1]
        mixed = torch.tensor((key + part * _PRIMES[2]) % (1 << 62), device=ids.device)
        for place, axis in enumerate(axes):
            shape = [1, 1, 1, 1]
            shape[place] = -1
            mixed = mixed + axis.to(ids.device).view(shape) * _PRIMES[3 + place]
        for prime in _PRIMES[:2]:
            mixed = (mixed ^ (mixed >> 29)) * (prime << 16 | 0x5BD1)
        mixed = (mixed ^ (mixed >> 32)) & ~(1 << (8 * layout.itemsize - 2))
        return mixed.unsqueeze(-1).view(_INTEGERS[layout.itemsize])[..., 0]


class StateCache:
    """View of one rank's cache of recurrent state (such as Mamba's), for `watch_offers`. It writes no pattern.

    Each block is one slot, which holds the state of one request.

    Args:
        engine_id: Name of the engine, for messages.
        kv_caches: The registered state tensors, by layer name.
        layout: Layout of `kv_caches`.
    """

    def __init__(self, engine_id: str, kv_caches: KVCaches, layout: StateLayout) -> None:
        self.engine_id = engine_id
        self.layout = layout
        self._layers = [cast("tuple[torch.Tensor, ...]", tensors_of(*layer)) for layer in kv_caches.items()]

    def digests(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return an integer digest of each state tensor in each block. A change of any byte changes the digest.

        Args:
            block_ids: Ids of the blocks to read.

        Returns:
            An int64 tensor of shape (layer, tensor, block, 1), with blocks in the order of `block_ids`.
        """
        rows = []
        for tensor in (tensor for tensors in self._layers for tensor in tensors):
            ids = torch.tensor([int(block) for block in block_ids], dtype=torch.int64, device=tensor.device)
            held = tensor[ids].reshape(len(ids), -1).view(torch.uint8).to(torch.int64)
            weights = 2 * torch.arange(held.shape[1], device=tensor.device) * _PRIMES[0] + 1
            rows.append((held * weights).sum(1).cpu())
        return torch.stack(rows).view(len(self._layers), -1, len(block_ids), 1)

    def name_of(self, layer: int, part: int, block: int, slot: int) -> str:
        """Return the name of one block in one state tensor, for messages.

        Args:
            layer: Index of the layer among the registered layers.
            part: Index of the state tensor in the layer.
            block: Block id.
            slot: 0, the only slot of a block.

        Returns:
            Text with engine, layer name, tensor name, block and slot.
        """
        name, tensor = self.layout.layer_names[layer], self.layout.tensors[part].name
        return f"engine {self.engine_id!r}, layer {name!r}, {tensor}, block {block}, slot {slot}"
