"""Copies between caches and buffers: the bytes that torch moves, where NIXL moves the others.

A cache is seen as *parts*: K and V, or the latent, of one layer, each a view with the axes block, token, head and dim,
whatever the style and the order. On parts rest the two copies that kvflow makes itself: whole blocks between caches of
one layout (`copy_blocks`: device to host and back), and heads of some tokens out of a scratch buffer in the order of
a peer's memory into blocks in ours (`scatter_tokens`). Both write exactly the elements that they name.

All copies work on bytes, so that every dtype is copied alike, also those that torch cannot index. Memory of the CPU is
copied by numpy: it copies run by run in one thread, at 10 GB/s for runs of 256 bytes and more for longer ones, with
the GIL released. Torch's indexing goes by elements; on bytes it is 6 times slower, and on 16-byte elements it needs two
threads to keep up. Elsewhere torch copies, in the largest elements that fit.

Everything here is synchronous: it runs on a copy thread, and what it has copied is there when it returns. On a device
it copies on the current stream; who calls has made sure that what is copied was computed. Block ids are of blocks that
exist; who calls has checked them, and a breach is our bug.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.layout import CacheLayout, KVStyle
from kvflow.core.cache.state import StateLayout

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"
LayerTensors: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
CacheTensors: TypeAlias = "Mapping[str, LayerTensors]"
Ids: TypeAlias = npt.NDArray[np.int64]


# --- parts


def canonical_parts(layer: LayerTensors, layout: CacheLayout, *, split_fused: bool = True) -> tuple[Tensor, ...]:
    """Views (block, token, head, dim) of K and V of a layer, or of its latent, whose head axis has one entry.

    K and V of a fused cache are the halves of its last axis, or stay together without `split_fused`.
    """
    parts = _part_tensors(layer, layout)
    if layout.style is KVStyle.MLA:
        return tuple(part.unsqueeze(2) for part in parts)
    if layout.order == "HND":
        parts = tuple(part.transpose(1, 2) for part in parts)
    if layout.style is KVStyle.FUSED and split_fused:
        half = layout.head_size // 2
        return parts[0][..., :half], parts[0][..., half:]
    return parts


def _part_tensors(layer: LayerTensors, layout: CacheLayout | StateLayout) -> tuple[Tensor, ...]:
    """The tensors of a layer's regions, their axes after the block's as they are."""
    if isinstance(layer, tuple | list):
        return tuple(layer)
    match _style_of(layout):
        case KVStyle.KV_FIRST:
            return layer[0], layer[1]
        case KVStyle.BLOCKS_FIRST:
            return layer[:, 0], layer[:, 1]
        case _:
            return (layer,)


def _style_of(layout: CacheLayout | StateLayout) -> KVStyle | None:
    """None for state: blocks come first in each of its tensors."""
    return layout.style if isinstance(layout, CacheLayout) else None


def _alias(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Bytes of the tensor's memory from its first element on; sizes and strides in bytes.

    Not by `Tensor.view`, which wants a stride of 1 even where an axis has one entry only.
    """
    import torch

    offset = tensor.storage_offset() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, tuple(shape), tuple(strides))


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes; the last axis, whose elements lie together, grows by the size of an element."""
    size = tensor.element_size()
    *outer, last = tensor.shape
    return _alias(tensor, (*outer, last * size), (*(stride * size for stride in tensor.stride()[:-1]), 1))


# --- whole blocks


def allocate_host_caches(
    kv_caches: CacheTensors, layout: CacheLayout | StateLayout, num_blocks: int, *, pin: bool
) -> dict[str, LayerTensors]:
    """Zeroed host tensors like those of a cache, for `num_blocks` blocks: same style, axes and memory order.

    Blocks are dense, whatever lies between them in the cache, and each tensor has its own memory. `pin` asks for
    page-locked memory, which needs a device; torch may round it up.
    """

    def like(tensor: Tensor) -> Tensor:
        return _host_tensor(tensor, _style_of(layout), num_blocks, pin)

    return {
        name: tuple(map(like, layer)) if isinstance(layer, tuple | list) else like(layer)
        for name, layer in kv_caches.items()
    }


def _host_tensor(tensor: Tensor, style: KVStyle | None, num_blocks: int, pin: bool) -> Tensor:
    import torch

    block_axis = 1 if style is KVStyle.KV_FIRST else 0
    outer_count = 2 if style in (KVStyle.KV_FIRST, KVStyle.BLOCKS_FIRST) else 1
    shape = list(tensor.shape)
    shape[block_axis] = num_blocks
    # Outermost in memory first. A single block's stride means nothing, so a block's own axes are sorted apart.
    axes = sorted(range(len(shape)), key=lambda axis: (axis >= outer_count, -tensor.stride()[axis], axis))
    size_bytes = math.prod(shape) * tensor.element_size()
    memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pin)
    memory.zero_()  # gives every page its memory now
    dense = memory.view(tensor.dtype).view([shape[axis] for axis in axes])
    return dense.permute([axes.index(axis) for axis in range(len(shape))])


def copy_blocks(
    source_caches: CacheTensors,
    target_caches: CacheTensors,
    layout: CacheLayout | StateLayout,
    source_ids: Ids,
    target_ids: Ids,
) -> None:
    """Copy block `source_ids[i]` of every layer to block `target_ids[i]`, ids all different on either side.

    Both caches have this layout apart from `num_blocks` and may be on different devices.
    """
    assert len(source_ids) == len(target_ids), f"{len(source_ids)} source ids, {len(target_ids)} target ids"
    assert tuple(source_caches) == tuple(target_caches), "caches have different layers"
    if not len(source_ids):
        return
    used: set[torch.device] = set()
    for name in source_caches:
        sources = _block_rows(source_caches[name], layout)
        targets = _block_rows(target_caches[name], layout)
        for source, target in zip(sources, targets, strict=True):
            _copy_rows(source, target, source_ids, target_ids)
            used |= {source.device, target.device}
    _synchronize(used)


def _block_rows(layer: LayerTensors, layout: CacheLayout | StateLayout) -> Iterator[Tensor]:
    """The blocks of each region of a layer, as rows of bytes: in memory a block is dense."""
    for part in _part_tensors(layer, layout):
        size = part[0].numel() * part.element_size()
        stride = part.stride(0) * part.element_size() if len(part) > 1 else size
        yield _alias(part, (len(part), size), (stride, 1))


def _copy_rows(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
    assert source.shape[1] == target.shape[1], f"blocks of {source.shape[1]} and {target.shape[1]} bytes"
    _check(source_ids, len(source))
    _check(target_ids, len(target))
    on_host = source.device.type == "cpu", target.device.type == "cpu"
    if all(on_host):
        rows, places = source.numpy(), target.numpy()
        for start, place, count in _runs(source_ids, target_ids):
            places[place : place + count] = rows[start : start + count]
    elif on_host[0]:
        _copy_to_device(source, target, source_ids, target_ids)
    elif on_host[1]:
        _copy_to_host(source, target, source_ids, target_ids)
    else:
        source, target = _in_large_elements(source, target)
        gathered = source[_index(source_ids, source)].to(target.device)
        target[_index(target_ids, target)] = gathered


def _copy_to_host(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
    """Gather on the device at once, then copy to the host run by run: over the bus only dense copies are fast."""
    (large,) = _in_large_elements(source)
    gathered = _as_bytes(large[_index(source_ids, source)])
    for start, place, count in _dense_runs(np.arange(len(target_ids)), target_ids, target):
        target[place : place + count].copy_(gathered[start : start + count], non_blocking=True)


def _copy_to_device(source: Tensor, target: Tensor, source_ids: Ids, target_ids: Ids) -> None:
    import torch

    gathered = torch.empty((len(source_ids), source.shape[1]), dtype=torch.uint8, device=target.device)
    for start, place, count in _dense_runs(source_ids, np.arange(len(source_ids)), source):
        gathered[place : place + count].copy_(source[start : start + count], non_blocking=True)
    large, places = _in_large_elements(gathered, target)
    places[_index(target_ids, target)] = large


def _runs(first_ids: Ids, second_ids: Ids) -> Iterator[tuple[int, int, int]]:
    """(first id, second id, count) of each stretch in which both go up by one."""
    follows = (np.diff(first_ids) == 1) & (np.diff(second_ids) == 1)
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    counts = np.diff(starts, append=len(first_ids))
    yield from zip(first_ids[starts].tolist(), second_ids[starts].tolist(), counts.tolist(), strict=True)


def _dense_runs(first_ids: Ids, second_ids: Ids, rows: Tensor) -> Iterator[tuple[int, int, int]]:
    """The runs, cut where `rows`, the side whose ids have gaps, is not dense from one row to the next."""
    for first, second, count in _runs(first_ids, second_ids):
        if rows.stride(0) == rows.shape[1]:
            yield first, second, count
        else:
            yield from ((first + step, second + step, 1) for step in range(count))


# --- tokens


def chunk_targets(
    parts: Sequence[Tensor], *, chunk_tokens: int, head_start: int, head_count: int
) -> tuple[Tensor, ...]:
    """Where chunks go in parts of a cache: byte views (block, chunk of the block, token, head, byte).

    A chunk is `chunk_tokens` tokens; a block holds one or more, and no part of one. To be made once, not per copy.
    """
    targets = []
    for part in parts:
        tokens, heads = part.shape[1:3]
        assert tokens % chunk_tokens == 0, f"blocks of {tokens} tokens, chunks of {chunk_tokens}"
        assert 0 <= head_start <= head_start + head_count <= heads, f"heads {head_start}+{head_count} of {heads}"
        heads_view = _as_bytes(part)[:, :, head_start : head_start + head_count]
        targets.append(heads_view.view(len(part), tokens // chunk_tokens, chunk_tokens, head_count, -1))
    return tuple(targets)


def chunk_sources(
    scratch: Tensor, *, rows: int, chunks: int, tokens: int, heads: int, run_bytes: int, memory_order: str
) -> Tensor:
    """A scratch buffer of bytes as (row, chunk, token, head, byte): dense chunks in a peer's memory order.

    `tokens` and `heads` are those that were read, of which a caller may slice some; `run_bytes` is one head of one
    token. A longer buffer has bytes to spare.
    """
    inner = (tokens, heads) if memory_order == "NHD" else (heads, tokens)
    size_bytes = rows * chunks * tokens * heads * run_bytes
    view = scratch[:size_bytes].view(rows, chunks, *inner, run_bytes)
    return view if memory_order == "NHD" else view.transpose(2, 3)


def scatter_tokens(
    targets: Sequence[Tensor], sources: Sequence[Tensor] | Tensor, block_ids: Ids, chunk_indices: Ids
) -> None:
    """Write chunk i of each source to chunk `chunk_indices[i]` of block `block_ids[i]` of the target at its place.

    Targets come from `chunk_targets`; sources are (..., token, head, byte), on the same device, with as many axes in
    front as the ids have. Sources with fewer tokens than a chunk fill its first ones. Places are all different.
    """
    _check(block_ids, targets[0].shape[0])
    _check(chunk_indices, targets[0].shape[1])
    for target, source in zip(targets, sources, strict=True):
        tokens, place = source.shape[-3], target.shape
        assert place == targets[0].shape, f"targets of {targets[0].shape} and {place}"
        assert tokens <= place[2], f"{tokens} tokens into chunks of {place[2]}"
        assert source.shape == (*block_ids.shape, tokens, *place[3:]), f"{source.shape} into {place}"
        _put(target if tokens == place[2] else target[:, :, :tokens], source, block_ids, chunk_indices)
    _synchronize({target.device for target in targets})


def _put(target: Tensor, source: Tensor, block_ids: Ids, chunk_indices: Ids) -> None:
    if target.device.type != "cpu":
        _put_on_device(target, source, block_ids, chunk_indices)
        return
    places, values = target.numpy(), source.numpy()
    if places.strides[3] > places.strides[2]:  # in the order of the memory written: up to twice as fast
        places, values = places.swapaxes(2, 3), values.swapaxes(-3, -2)
    places[block_ids, chunk_indices] = values


def _put_on_device(target: Tensor, source: Tensor, block_ids: Ids, chunk_indices: Ids) -> None:
    target, source = _in_large_elements(target, source)
    target[_index(block_ids, target), _index(chunk_indices, target)] = source


# --- devices


def _check(ids: Ids, count: int) -> None:
    assert not ids.size or (ids.min() >= 0 and ids.max() < count), f"ids {ids.min()}..{ids.max()} of {count}"


def _index(ids: Ids, tensor: Tensor) -> Tensor:
    import torch

    return torch.tensor(ids, device=tensor.device)


def _in_large_elements(*views: Tensor) -> tuple[Tensor, ...]:
    """Byte views as views of the largest elements in which all of them can be addressed."""
    import torch

    unit = 16
    for view in views:
        unit = math.gcd(unit, view.data_ptr(), view.storage_offset(), view.shape[-1], *view.stride()[:-1])
    dtypes = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tuple(view.view(dtypes[unit]) for view in views)


def _synchronize(devices: set[torch.device]) -> None:
    """Wait until what was enqueued on these devices is done."""
    import torch

    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
