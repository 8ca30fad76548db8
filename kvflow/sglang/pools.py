"""SGLang's pools as kvflow caches: the KV pool, and each component of state (windows, recurrent state, indexes).

SGLang describes a pool by addresses: a list of buffers, each an array of items of equal size. A request names the
indexes of its items on each side, in the same order. So each pool is a kvflow cache in which an item is a block, and
kvflow need not know what a request's items mean. In a KV pool that is divided by heads an item is a page (tokens,
heads, bytes of a head), which kvflow cuts for another tensor-parallel size. All other items move whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvflow.checks import counted
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER
from kvflow.errors import ConfigError
from kvflow.transport.device.foreign_memory import bytes_at

_WITH_EACH_PAGE = ("block_scale", "minimax_dense_kv", "qsa_compressed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """One pool, as SGLang's `KVArgs` describes it. `layers` has a number for each buffer, the same on both sides."""

    name: str
    pointers: Sequence[int]
    sizes: Sequence[int]
    item_sizes: Sequence[int]
    layers: Sequence[int]
    format: str
    """Format of the pool's bytes, which must be the same on both sides."""
    tokens: int = 1
    """Tokens of an item that consists of tokens; 1 for any other item."""
    heads: int = 0
    """KV heads of one rank; 0 if items are not cut by heads."""
    cut: bool = False
    """True if the other server may have another tensor-parallel size: items are cut by heads, or are latents."""
    alike: bool = False
    """True if items are not cut and are equal on all ranks, so that any rank can be read. If neither `cut` nor `alike`,
    each rank has its own share, which only an equal tensor-parallel size can read."""
    host: bool = False
    """True if the pool is in host memory, wherever the other pools are."""

    @property
    def shared_out(self) -> bool:
        """True if each rank has its own share, which only an equal tensor-parallel size can read."""
        return not (self.cut or self.alike)

    @property
    def row_bytes(self) -> int:
        return sum(self.item_sizes)

    def read_row(self, row: int) -> bytes:
        """Return item `row` of every buffer, concatenated. The pool must be in host memory."""
        places = zip(self.pointers, self.item_sizes, strict=True)
        return b"".join(ctypes.string_at(pointer + row * size, size) for pointer, size in places)

    def write_row(self, row: int, data: bytes) -> None:
        """Write `data`, as `read_row` returns it, to item `row` of every buffer. ConfigError if the sizes differ."""
        if len(data) != self.row_bytes:
            raise ConfigError(f"metadata of a request: ours {counted(self.row_bytes, 'byte')}, theirs {len(data)}")
        start = 0
        for pointer, size in zip(self.pointers, self.item_sizes, strict=True):
            ctypes.memmove(pointer + row * size, data[start : start + size], size)
            start += size

    def group(self, device: str) -> CacheGroup:
        """Return the pool as kvflow registers it: with a layer for each buffer, and a layout for each item size.

        Buffers may have different numbers of items; the group has the items that every buffer has.
        """
        items = min((size // item for size, item in zip(self.sizes, self.item_sizes, strict=True)), default=0)
        layers = {}
        alike: dict[int, list[int]] = {}
        for at, (pointer, item) in enumerate(zip(self.pointers, self.item_sizes, strict=True)):
            layers[f"{self.name}.{at}"] = bytes_at(pointer, items * item, device).view(items, *self._shape(item))
            alike.setdefault(item, []).append(at)
        layouts = []
        for places in alike.values():
            names = {f"{self.name}.{at}": layers[f"{self.name}.{at}"] for at in places}
            numbers = [self.layers[at] for at in places]
            style = "fused" if self.heads else "mla"
            layouts.append(
                CacheLayout.infer(names, order="NHD", block_size=self.tokens, style=style, layer_indices=numbers)
            )
        return CacheGroup("kv", layers, layouts)

    def _shape(self, item: int) -> tuple[int, ...]:
        parts = self.tokens * max(self.heads, 1)
        if item % parts:
            raise ConfigError(
                f"pool {self.name!r}: an item of {counted(item, 'byte')} is no multiple of "
                f"{counted(self.tokens, 'token')} of {counted(self.heads, 'head')}"
            )
        return (self.tokens, self.heads, item // parts) if self.heads else (self.tokens, item // parts)


def kv_buffers(args: Any, *, heads: int) -> Buffers:
    """Return the KV pool. `heads`: KV heads of one rank, 0 for latents.

    If the bytes of a page of latents are no multiple of its tokens, the page is one item of one token.
    """
    count = len(args.kv_data_ptrs)
    by_token = heads or not any(size % args.page_size for size in args.kv_item_lens)
    return Buffers(
        name="kv",
        pointers=args.kv_data_ptrs,
        sizes=args.kv_data_lens,
        item_sizes=args.kv_item_lens,
        layers=_numbers(args.kv_layer_ids, count, args.num_draft_entries, parts=2 if heads else 1),
        tokens=args.page_size if by_token else 1,
        heads=heads,
        format=f"{args.kv_cache_dtype_str}.{args.kv_layout or 'plain'}",
        cut=True,
    )


def state_buffers(args: Any, *, heads: int) -> list[Buffers]:
    """Return the components of state, in SGLang's order. Windows are cut by heads if the KV pool is.

    SGLang also lists layers that have no state, with items of 0 bytes; these are left out.
    """
    found = []
    for at, kind in enumerate(args.state_types):
        held = [number for number, size in enumerate(args.state_item_lens[at]) if size]
        sizes = [args.state_item_lens[at][number] for number in held]
        cut = kind.value == "swa" and heads > 0 and args.swa_kv_cache_layout == "nhd"
        cut = cut and not any(size % (args.page_size * heads) for size in sizes)
        found.append(
            Buffers(
                name=f"{kind.value}.{at}",
                pointers=[args.state_data_ptrs[at][number] for number in held],
                sizes=[args.state_data_lens[at][number] for number in held],
                item_sizes=sizes,
                layers=held,
                tokens=args.page_size if cut else 1,
                heads=heads if cut else 0,
                cut=cut,
                alike=heads == 0 and kind.value != "mamba",
                format=f"{args.kv_cache_dtype_str}.{kind.value}",
            )
        )
    return found


def items_named(kind: str, indices: Any, prefix_pages: int) -> list[int] | None:
    """Return the items of a state component that a request transfers; None if it has none.

    If a component has an item for each page, SGLang names all pages of the prompt. The first `prefix_pages` were on the
    decode server already; they are left out, since they may be in use and belong to KV that the decode server computed.
    For a DSA tail SGLang names the request's item and the part of it that is live; the item moves whole.
    """
    if indices is None:
        return None
    items: list[int] = np.asarray(indices).tolist()  # for recurrent state SGLang passes a list of arrays
    return items[prefix_pages:] if kind in _WITH_EACH_PAGE else items[:1] if kind == "dsa_tail" else items


def aux_buffers(args: Any) -> Buffers:
    """Return SGLang's metadata buffers, in which each request has a row.

    A row is sent as a lease's payload or, if it is too large for a payload, as an item of a pool.
    """
    return Buffers(
        name="aux",
        pointers=args.aux_data_ptrs,
        sizes=args.aux_data_lens,
        item_sizes=args.aux_item_lens,
        layers=range(len(args.aux_data_ptrs)),
        format="aux",
        alike=True,
        host=True,
    )


def _numbers(layer_ids: Sequence[int], count: int, drafts: int, *, parts: int) -> list[int]:
    """Return a number for each buffer, made from its layer and its part of the layer (K or V).

    Without `layer_ids` SGLang lists all K buffers, then all V buffers. The last `drafts` buffers belong to a draft
    model and have numbers in a range of their own, since the other server may have no draft model.
    """
    if layer_ids:
        seen: dict[int, int] = {}
        numbers = []
        for layer in layer_ids:
            part = seen[layer] = seen.get(layer, -1) + 1
            numbers.append(layer * parts + part)
    else:
        model = max((count - drafts) // parts, 1)
        numbers = [at % model * parts + at // model for at in range(count - drafts)]
        numbers += range(drafts)
    return [number + FIRST_DRAFT_LAYER * (at >= count - drafts) for at, number in enumerate(numbers)]
