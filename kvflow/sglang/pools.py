"""SGLang's pools as kvflow caches: the KV pool, and each component of state (windows, recurrent state, indexes).

SGLang describes a pool as a list of buffers, each an array of items of equal size. A request names the indexes of its
items on each side, in the same order. So each pool is a kvflow cache, and an item is a block. In a KV pool that is
divided by heads, an item is a page (tokens, heads, bytes of a head), of which a rank with another tensor-parallel size
reads some heads. Other items are transferred whole.
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

_ITEM_PER_PAGE = ("block_scale", "minimax_dense_kv", "qsa_compressed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """One of SGLang's memory pools, as its `KVArgs` describe it: buffers, each an array of items of equal size.

    Each buffer has a value in `pointers` (its address), in `sizes` (its bytes), in `item_sizes` (the bytes of an item)
    and in `layers`: a number that equals the number of the matching buffer on the other server.
    """

    name: str
    pointers: Sequence[int]
    sizes: Sequence[int]
    item_sizes: Sequence[int]
    layers: Sequence[int]
    format: str
    """Text for the dtype and layout of the pool, the same on prefill and decode servers."""
    tokens: int = 1
    """Number of tokens in a page of the pool; 1 if the pool does not consist of pages of tokens."""
    heads: int = 0
    """Number of KV heads that one rank has in a page; 0 if other ranks cannot read single heads."""
    cut: bool = False
    """True if the prefill and the decode server may have different tensor-parallel sizes. They may if a rank can read
    single heads of a page, or if pages hold latents, which all ranks have."""
    replicated: bool = False
    """True if all ranks have the same contents, which are read whole from any rank. If both `cut` and `replicated` are
    False, only a server with the same tensor-parallel size can read the pool."""
    host: bool = False
    """True if the pool is in host memory, whatever the other pools are in."""

    @property
    def rank_private(self) -> bool:
        """True if ranks have different contents, which only a server with the same tensor-parallel size can read."""
        return not (self.cut or self.replicated)

    @property
    def row_bytes(self) -> int:
        return sum(self.item_sizes)

    def read_row(self, row: int) -> bytes:
        """Return the bytes at index `row` of each buffer, concatenated in the order of the buffers.

        Only for a pool in host memory.
        """
        places = zip(self.pointers, self.item_sizes, strict=True)
        return b"".join(ctypes.string_at(pointer + row * size, size) for pointer, size in places)

    def write_row(self, row: int, data: bytes) -> None:
        """Write `data`, which another rank's `read_row` has returned, at index `row` of each buffer.

        Only for a pool in host memory. ConfigError if the size of `data` is not `row_bytes`.
        """
        if len(data) != self.row_bytes:
            raise ConfigError(f"metadata of a request: ours {counted(self.row_bytes, 'byte')}, theirs {len(data)}")
        start = 0
        for pointer, size in zip(self.pointers, self.item_sizes, strict=True):
            ctypes.memmove(pointer + row * size, data[start : start + size], size)
            start += size

    def group(self, device: str) -> CacheGroup:
        """Return the pool as a CacheGroup that kvflow can register; `device` is the device of the pool's memory.

        Each buffer is a layer, and each item of a buffer is a block. If buffers differ in length, the shortest sets the
        number of blocks.
        """
        items = min((size // item for size, item in zip(self.sizes, self.item_sizes, strict=True)), default=0)
        layers = {}
        indexes_by_size: dict[int, list[int]] = {}
        for at, (pointer, item) in enumerate(zip(self.pointers, self.item_sizes, strict=True)):
            layers[f"{self.name}.{at}"] = bytes_at(pointer, items * item, device).view(items, *self._shape(item))
            indexes_by_size.setdefault(item, []).append(at)
        layouts = []
        for places in indexes_by_size.values():
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
                f"pool {self.name!r}: an item of {counted(item, 'byte')} is not a multiple of "
                f"{counted(self.tokens, 'token')} of {counted(self.heads, 'head')}"
            )
        return (self.tokens, self.heads, item // parts) if self.heads else (self.tokens, item // parts)


def kv_buffers(args: Any, *, heads: int) -> Buffers:
    """Return SGLang's KV pool, which `args` describe. `heads` is the number of KV heads of one rank, 0 for latents.

    For latents, `Buffers.tokens` is 1 if the bytes of a page cannot be divided evenly among the page's tokens.
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


def state_buffers(args: Any, *, heads: int, dtypes: str = "") -> list[Buffers]:
    """Return a pool for each component of state in `args` (windows, recurrent state, indexes), in SGLang's order.

    `heads` is the number of KV heads of one rank, 0 for latents. `dtypes` names those of recurrent state. Sliding
    windows are divided by heads if SGLang's layout allows that. Layers without state, which SGLang lists with items of
    0 bytes, are left out.
    """
    pools = []
    for at, kind in enumerate(args.state_types):
        held = [number for number, size in enumerate(args.state_item_lens[at]) if size]
        sizes = [args.state_item_lens[at][number] for number in held]
        cut = kind.value == "swa" and heads > 0 and args.swa_kv_cache_layout == "nhd"
        cut = cut and not any(size % (args.page_size * heads) for size in sizes)
        pools.append(
            Buffers(
                name=f"{kind.value}.{at}",
                pointers=[args.state_data_ptrs[at][number] for number in held],
                sizes=[args.state_data_lens[at][number] for number in held],
                item_sizes=sizes,
                layers=held,
                tokens=args.page_size if cut else 1,
                heads=heads if cut else 0,
                cut=cut,
                replicated=heads == 0 and kind.value != "mamba",
                format=f"{args.kv_cache_dtype_str}.{kind.value}" + dtypes * (kind.value == "mamba"),
            )
        )
    return pools


def transferred_items(kind: str, indices: Any, prefix_pages: int) -> list[int] | None:
    """Return the indexes of those items of a state component that are transferred for a request.

    `kind` is SGLang's name for the component. `indices` are SGLang's indexes of the request's items in the component;
    if they are None, return None. If the component has an item for each page, the first `prefix_pages` are left out,
    since the decode server has them and may use them. For the component "dsa_tail", only the first of `indices` is the
    index of an item; the others say which part of that item is used. The item is transferred whole.
    """
    if indices is None:
        return None
    items: list[int] = np.asarray(indices).tolist()  # for recurrent state SGLang passes a list of arrays
    return items[prefix_pages:] if kind in _ITEM_PER_PAGE else items[:1] if kind == "dsa_tail" else items


def aux_buffers(args: Any) -> Buffers:
    """Return SGLang's metadata buffers as a pool in host memory, with one row for each request.

    Readers get a row as the payload of a lease (`Lease.complete`). If rows are too large for that, readers load them
    from this pool.
    """
    return Buffers(
        name="aux",
        pointers=args.aux_data_ptrs,
        sizes=args.aux_data_lens,
        item_sizes=args.aux_item_lens,
        layers=range(len(args.aux_data_ptrs)),
        format="aux",
        replicated=True,
        host=True,
    )


def _numbers(layer_ids: Sequence[int], count: int, drafts: int, *, parts: int) -> list[int]:
    """Return a number for each of `count` buffers, by which the two servers match their buffers.

    A buffer's number is made from its layer and its index among the buffers of that layer. `parts` is the number of
    buffers of a layer: 2 for K and V, else 1. `layer_ids` has the layer of each buffer; if it is empty, the buffers are
    K of all layers, then V of all layers. The last `drafts` buffers belong to a draft model and have a separate range
    of numbers, since the other server may have no draft model.
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
