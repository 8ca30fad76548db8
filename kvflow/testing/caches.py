"""Caches whose every element says where it belongs.

A slot is the place of one token in a block. The pattern of an element is a hash of its engine, layer of the model, K or
V, block, slot, head of the model and element, cut to the dtype's size and finite in every float format. So it is the
same in every layout, order and cut of a model, and bytes that are missing, stale or in a wrong place show. All of it
goes by torch indexing over the tensors' shapes and works on bits: what nan is to a dtype does not matter.
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
    """Cache of one rank, slot by slot whatever its layout.

    Args:
        engine_id: Whose it is: part of the pattern, and how messages name it.
        kv_caches: The tensors that were registered.
        layout: Their layout.
        first_head: The model's number of the rank's first KV head. Layers go by `layout.layer_indices`.
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
        """A part of a layer, slot by slot, whatever the layout.

        Args:
            layer: Which of the registered tensors, from 0.
            part: K (0) or V (1); 0 for the latent.

        Returns:
            A view of integers of the dtype's size: (block, slot, head, element).
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
        """Write the pattern into blocks.

        Args:
            block_ids: Which; None for all.
        """
        for layer, part in self._regions():
            ids = self._ids(block_ids)
            self.slots(layer, part)[ids] = self._pattern(layer, part, ids)

    def assert_untouched(self, block_ids: Sequence[int] | None = None, *, first_slot: int = 0) -> None:
        """Assert that blocks hold what `fill` wrote.

        Args:
            block_ids: Which; None for all.
            first_slot: Slots of each block before this one may hold anything.

        Raises:
            AssertionError: They do not; it names the first place.
        """
        ids = self._ids(block_ids)
        for layer, part in self._regions():
            found = self.slots(layer, part)[ids]
            wrong = (found != self._pattern(layer, part, ids))[:, first_slot:].nonzero().tolist()
            if wrong:
                block, slot, head, _ = wrong[0]
                place = self.name_of(layer, part, int(ids[block]), first_slot + slot, head)
                raise AssertionError(f"{place} was written to, and {counted(len(wrong) - 1, 'element')} more")

    def digests(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Digest of each slot, which changes with any one element of it.

        Args:
            block_ids: Whose slots.

        Returns:
            Int64, (layer, part, block, slot), blocks in the order given.
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
        """A place, as messages name it.

        Args:
            layer: Which of the registered tensors, from 0.
            part: K (0) or V (1); 0 for the latent.
            block: The block's id.
            slot: In the block, from 0.
            head: From the rank's first, which is 0; None names no head.

        Returns:
            The place in words, layer by name and head by the model's number.
        """
        of_head = "" if head is None else f" head {self.heads[head]}"
        name = self.layout.layer_names[layer]
        return f"engine {self.engine_id!r}, layer {name!r}, {self.parts[part]}, block {block}, slot {slot}{of_head}"

    def find(self, elements: torch.Tensor) -> str | None:
        """Find the elements of one head of one slot.

        Args:
            elements: As they lie in `slots`: (element,).

        Returns:
            The name of the first place that holds them; None if no place does.
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
        """The pattern of the blocks `ids`: (block, slot, head, element)."""
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
    """State per request of one rank, slot by slot, as `watch_offers` needs it of a group.

    Args:
        engine_id: Whose it is, as messages name it.
        kv_caches: The tensors that were registered, by layer.
        layout: Their layout.
    """

    def __init__(self, engine_id: str, kv_caches: KVCaches, layout: StateLayout) -> None:
        self.engine_id = engine_id
        self.layout = layout
        self._layers = [cast("tuple[torch.Tensor, ...]", tensors_of(*layer)) for layer in kv_caches.items()]

    def digests(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Digest of each slot, which changes with any one byte of it.

        Args:
            block_ids: The slots, of one request's state each.

        Returns:
            Int64, (layer, tensor, slot, 1), slots in the order given.
        """
        rows = []
        for tensor in (tensor for tensors in self._layers for tensor in tensors):
            ids = torch.tensor([int(block) for block in block_ids], dtype=torch.int64, device=tensor.device)
            held = tensor[ids].reshape(len(ids), -1).view(torch.uint8).to(torch.int64)
            weights = 2 * torch.arange(held.shape[1], device=tensor.device) * _PRIMES[0] + 1
            rows.append((held * weights).sum(1).cpu())
        return torch.stack(rows).view(len(self._layers), -1, len(block_ids), 1)

    def name_of(self, layer: int, part: int, block: int, slot: int) -> str:
        """A place, as messages name it.

        Args:
            layer: Which of the registered layers, from 0.
            part: Which of the layer's tensors of state, from 0.
            block: The block's id.
            slot: 0, since a block of state is one slot.

        Returns:
            The place in words, layer and tensor by name.
        """
        name, tensor = self.layout.layer_names[layer], self.layout.tensors[part].name
        return f"engine {self.engine_id!r}, layer {name!r}, {tensor}, block {block}, slot {slot}"
