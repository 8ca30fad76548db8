"""SGLang's pools as caches of kvflow: the KV pool, and each component of state (windows, recurrent state, indexes).

SGLang hands over addresses: a list of buffers, each of so many equal items, of which index i is the i-th. A request
names items of a pool on either side, in the same order. So each pool is a cache of its own, an item is a block, and the
meaning of a request's items is SGLang's affair. In a KV pool that is divided by heads an item is a page (tokens, heads,
bytes of a head), which kvflow cuts for another tensor parallelism. Anything else moves item by item.
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
    """One pool, as `KVArgs` describes it. `layers` numbers the buffers: a number is the same one on both sides."""

    name: str
    pointers: Sequence[int]
    sizes: Sequence[int]
    item_sizes: Sequence[int]
    layers: Sequence[int]
    format: str
    """Format of its bytes; both sides have the same."""
    tokens: int = 1
    """Tokens of an item that is cut by heads; 1 of an item that moves whole."""
    heads: int = 0
    """Heads of one rank; 0 where items are not cut by heads, and each rank has all of them."""
    cut: bool = False
    """True if another tensor parallelism can be served: items are cut by heads, or are latents that all ranks have."""
    alike: bool = False
    """True if items that are not cut are the same on all ranks, so that any rank's will do. Else each rank has a share
    of its own, which goes to no other tensor parallelism."""
    host: bool = False
    """True if it is in host memory, wherever the others are."""

    @property
    def shared_out(self) -> bool:
        """True if a rank has a share that goes to no other tensor parallelism."""
        return not (self.cut or self.alike)

    @property
    def row_bytes(self) -> int:
        return sum(self.item_sizes)

    def read_row(self, row: int) -> bytes:
        """Return a row of host memory: that item of all buffers, one behind the other."""
        places = zip(self.pointers, self.item_sizes, strict=True)
        return b"".join(ctypes.string_at(pointer + row * size, size) for pointer, size in places)

    def write_row(self, row: int, data: bytes) -> None:
        """Fill a row of host memory. ConfigError if the two servers have other buffers."""
        if len(data) != self.row_bytes:
            raise ConfigError(f"metadata of a request: ours {counted(self.row_bytes, 'byte')}, theirs {len(data)}")
        start = 0
        for pointer, size in zip(self.pointers, self.item_sizes, strict=True):
            ctypes.memmove(pointer + row * size, data[start : start + size], size)
            start += size

    def group(self, device: str) -> CacheGroup:
        """The pool as kvflow registers it: a layer for each buffer, a layout for each size of items.

        An index is one of all buffers, so those that all have are its items.
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
    """The KV pool; `heads` of a rank, 0 of latents, whose pages may be of no whole number of bytes a token."""
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
    """The components of state, in SGLang's order. Windows of a pool that has heads are cut as its pages are.

    A layer that has no items is in SGLang's lists all the same, as items of no bytes.
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
    """The items of a component that a request brings; None if it has none.

    For items that go with each page SGLang names all pages of the prompt, also those that the decode server had: they
    may be in use, and go with KV of its own. For a DSA tail it names the request's item, then which part of it is live:
    the item moves whole.
    """
    if indices is None:
        return None
    items: list[int] = np.asarray(indices).tolist()  # also of a list of arrays, as for recurrent state
    return items[prefix_pages:] if kind in _WITH_EACH_PAGE else items[:1] if kind == "dsa_tail" else items


def aux_buffers(args: Any) -> Buffers:
    """Return SGLang's metadata buffers, of which each request has a row.

    It goes as a lease's payload or, if it is too much for one, as the item of a pool.
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
    """A number for each buffer: its layer and which part of it, K or V.

    Without ids SGLang has all K, then all V. The last `drafts` buffers are a draft model's, which are numbered apart,
    since the other server may have none.
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
