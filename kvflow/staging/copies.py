"""Copies between caches and buffers: the bytes that torch moves, where NIXL moves the others.

A cache is seen as *parts*: K and V, or the latent, of one layer, each a view with the axes block, token, head and dim,
whatever the style and the order. On parts rest the two copies that kvflow makes itself: whole blocks between caches of
one layout (`copy_blocks`: device to host and back), and heads of some tokens out of a scratch buffer in the order of
a peer's memory into blocks in ours (`scatter_tokens`). Both write exactly the elements that they name.

All copies work on bytes, so that every dtype is copied alike, also those that torch cannot index. Memory of the CPU is
copied by numpy: it copies run by run in one thread, at 10 GB/s for runs of 256 bytes and more for longer ones, with
the GIL released. Torch's indexing goes by elements; on bytes it is 6 times slower, and on 16-byte elements it needs two
threads to keep up. Elsewhere torch copies, in the largest elements that fit.

Everything here is synchronous: it runs on a copy thread, and the bytes are there when it returns. A device has a stream
for copies (`device.CacheDevice`), ids go there once per copy, and it is waited for once. The caller has made sure that
the bytes were computed and that the block ids are of blocks that exist; a breach is our bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.layout import CacheLayout, KVStyle
from kvflow.core.cache.state import StateLayout
from kvflow.core.cache.tensors import memory_of
from kvflow.transport.device.cache_device import CacheDevice

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"
LayerTensors: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
CacheTensors: TypeAlias = "Mapping[str, LayerTensors]"
Ids: TypeAlias = npt.NDArray[np.int64]
View: TypeAlias = Any
"""A tensor or, of the CPU's memory, an array of numpy: what is made of one once need not be made for every copy."""
Copy: TypeAlias = Callable[[View, View], None]
"""Copies from one view to another."""
Way: TypeAlias = "Callable[[Ids, Ids], Copy]"
"""Copier between places that two lists of ids say; made for these once, used for every region."""


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
    """The cache's style; None for state, whose tensors have the block axis first."""
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
    """View memory as bytes; the last axis, whose elements lie together, grows by the size of an element."""
    size = tensor.element_size()
    *outer, last = tensor.shape
    return _alias(tensor, (*outer, last * size), (*(stride * size for stride in tensor.stride()[:-1]), 1))


# --- whole blocks


def allocate_host_caches(
    kv_caches: CacheTensors, layout: CacheLayout | StateLayout, num_blocks: int, device: CacheDevice
) -> dict[str, LayerTensors]:
    """Zeroed host tensors like those of a cache, for `num_blocks` blocks: same style, axes and memory order.

    Blocks are dense, whatever lies between them in the cache, and each tensor has its own memory, of the kind that
    `device` copies fast. What is one tensor in the cache is one here.
    """
    made: dict[tuple[object, ...], Tensor] = {}

    def like(tensor: Tensor) -> Tensor:
        which = memory_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride()
        if which not in made:
            made[which] = _host_tensor(tensor, _style_of(layout), num_blocks, device)
        return made[which]

    return {
        name: tuple(map(like, layer)) if isinstance(layer, tuple | list) else like(layer)
        for name, layer in kv_caches.items()
    }


def _host_tensor(tensor: Tensor, style: KVStyle | None, num_blocks: int, device: CacheDevice) -> Tensor:
    block_axis = 1 if style is KVStyle.KV_FIRST else 0
    outer_count = 2 if style in (KVStyle.KV_FIRST, KVStyle.BLOCKS_FIRST) else 1
    shape = list(tensor.shape)
    shape[block_axis] = num_blocks
    # Outermost in memory first. A single block's stride means nothing, so a block's own axes are sorted apart.
    axes = sorted(range(len(shape)), key=lambda axis: (axis >= outer_count, -tensor.stride()[axis], axis))
    memory = device.host_memory(math.prod(shape) * tensor.element_size())
    dense = memory.view(tensor.dtype).view([shape[axis] for axis in axes])
    return dense.permute([axes.index(axis) for axis in range(len(shape))])


def block_rows(
    kv_caches: CacheTensors, layout: CacheLayout | StateLayout, *, as_bytes: bool = True
) -> tuple[Tensor, ...]:
    """The blocks of each region of a cache, as rows: in memory a block is dense. To be made once.

    Rows are bytes; without `as_bytes` they are views in the tensors' own dtype, for which nobody needs an address.
    Regions that are the same memory are one.
    """
    rows: dict[tuple[object, int], Tensor] = {}
    for layer in kv_caches.values():
        for at, row in enumerate(_layer_rows(layer, layout, as_bytes)):
            tensor = layer[at] if isinstance(layer, tuple | list) else layer
            rows.setdefault((memory_of(tensor), at), row)
    return tuple(rows.values())


def _layer_rows(layer: LayerTensors, layout: CacheLayout | StateLayout, as_bytes: bool) -> Iterator[Tensor]:
    for part in _part_tensors(layer, layout):
        count, each = part[0].numel(), part.element_size()
        stride = part.stride(0) if len(part) > 1 else count
        if as_bytes:
            yield _alias(part, (len(part), count * each), (stride * each, 1))
        else:
            yield part.as_strided((len(part), count), (stride, 1))


def copy_blocks(
    sources: Sequence[Tensor], targets: Sequence[Tensor], source_ids: Ids, target_ids: Ids, way: Way
) -> None:
    """Copy block `source_ids[i]` of every region to block `target_ids[i]`, ids all different on either side.

    `sources` and `targets` are `block_rows` of caches of one layout, apart from the number of blocks. `way` is
    `on_host`, or inside `copying` `to_host` or `to_device`, which on the CPU are that, too.
    """
    assert len(source_ids) == len(target_ids), f"source ids: {len(source_ids)}, target ids: {len(target_ids)}"
    if not len(source_ids):
        return
    copy = way(source_ids, target_ids)
    for source, target in zip(sources, targets, strict=True):
        assert source.shape[1] == target.shape[1], f"elements of a block: {source.shape[1]}, {target.shape[1]}"
        _check(source_ids, len(source))
        _check(target_ids, len(target))
        copy(source, target)


def on_host(source_ids: Ids, target_ids: Ids) -> Copy:
    """Copies of blocks from memory of the CPU to other memory of the CPU."""
    runs = list(_runs(source_ids, target_ids))

    def copy(source: Tensor, target: Tensor) -> None:
        rows, places = source.numpy(), target.numpy()
        for start, place, count in runs:
            places[place : place + count] = rows[start : start + count]

    return copy


def to_host(device: CacheDevice) -> Way:
    """Copies of blocks from the device to memory of the host."""
    return on_host if device.on_host else partial(_pieces_or_kernels, device, gather=True)


def to_device(device: CacheDevice) -> Way:
    """Copies of blocks from memory of the host to the device."""
    return on_host if device.on_host else partial(_pieces_or_kernels, device, gather=False)


def _pieces_or_kernels(device: CacheDevice, source_ids: Ids, target_ids: Ids, *, gather: bool) -> Copy:
    """Copy large pieces as they are, in one call for each region, and small ones by kernels that gather or spread."""
    in_pieces = cache(lambda: _in_one_call(device, source_ids, target_ids))
    by_kernels = cache(lambda: _by_kernels(device, source_ids, target_ids, gather=gather))

    def copy(source: Tensor, target: Tensor) -> None:
        least = device.piece_bytes_min
        large = least is not None and source.shape[1] * source.element_size() >= least
        (in_pieces() if large else by_kernels())(source, target)

    return copy


def _by_kernels(device: CacheDevice, source_ids: Ids, target_ids: Ids, *, gather: bool) -> Copy:
    """Gather blocks on the device and copy them to the host run by run, or copy them there and spread them.

    Over the bus only dense copies are fast.
    """
    import torch

    host_ids = target_ids if gather else source_ids
    index = device.upload(source_ids if gather else target_ids)
    if index is None:
        return _run_by_run(source_ids, target_ids)

    def copy(source: Tensor, target: Tensor) -> None:
        there, here = (source, target) if gather else (target, source)
        done = 0
        while done < len(host_ids):
            bounce = device.bounce(len(host_ids) - done, there.shape[1] * there.element_size())
            ids, some = host_ids[done : done + len(bounce)], index[done : done + len(bounce)]
            blocks, dense = device.elements(there, bounce)
            rows = bounce.view(here.dtype)
            if gather:
                torch.index_select(blocks, 0, some, out=dense)
            for start, place, count in _runs(np.arange(len(ids)), ids, dense=_is_dense(here)):
                ours, theirs = here[place : place + count], rows[start : start + count]
                (ours if gather else theirs).copy_(theirs if gather else ours, non_blocking=True)
            if not gather:
                blocks[some] = dense
            done += len(bounce)

    return copy


def _in_one_call(device: CacheDevice, source_ids: Ids, target_ids: Ids) -> Copy:
    """Copies of all blocks of a region in one call; blocks that lie together on both sides are one piece."""
    pieces_of = cache(lambda dense: np.array(list(_runs(source_ids, target_ids, dense=dense)), dtype=np.uint64))

    def copy(source: Tensor, target: Tensor) -> None:
        pieces, each = pieces_of(_is_dense(source, target)), source.element_size()
        sources, targets = (
            rows.data_ptr() + pieces[:, side] * np.uint64(rows.stride(0) * each)
            for side, rows in enumerate((source, target))
        )
        device.copy_pieces(targets, sources, pieces[:, 2] * np.uint64(source.shape[1] * each))

    return copy


def _run_by_run(source_ids: Ids, target_ids: Ids) -> Copy:
    """Copies between a device and the host without a kernel of the device: a copy for each run of blocks."""

    def copy(source: Tensor, target: Tensor) -> None:
        for start, place, count in _runs(source_ids, target_ids, dense=_is_dense(source, target)):
            target[place : place + count].copy_(source[start : start + count], non_blocking=True)

    return copy


def _is_dense(*regions: Tensor) -> bool:
    """Return whether nothing lies between two blocks of each region."""
    return all(rows.stride(0) == rows.shape[1] for rows in regions)


def _runs(first_ids: Ids, second_ids: Ids, *, dense: bool = True) -> Iterator[tuple[int, int, int]]:
    """(first id, second id, count) of each stretch in which both go up by one; of each id if blocks are not dense."""
    follows = (np.diff(first_ids) == 1) & (np.diff(second_ids) == 1) & dense
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    counts = np.diff(starts, append=len(first_ids))
    yield from zip(first_ids[starts].tolist(), second_ids[starts].tolist(), counts.tolist(), strict=True)


# --- tokens


def chunk_targets(
    parts: Sequence[Tensor], *, chunk_tokens: int, head_start: int, head_count: int, as_bytes: bool = True
) -> tuple[Tensor, ...]:
    """Targets of chunks in parts of a cache: byte views (block, chunk of the block, token, head, byte).

    A chunk is `chunk_tokens` tokens; a block holds one or more, and no part of one. To be made once, not per copy.
    Without `as_bytes` the last axis has elements of the cache's own dtype.
    """
    targets = []
    for part in parts:
        tokens, heads = part.shape[1:3]
        assert tokens % chunk_tokens == 0, f"tokens of a block: {tokens}, of a chunk: {chunk_tokens}"
        assert 0 <= head_start <= head_start + head_count <= heads, f"heads {head_start}+{head_count} of {heads}"
        heads_view = (_as_bytes(part) if as_bytes else part)[:, :, head_start : head_start + head_count]
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
    targets: Sequence[View], sources: Sequence[View] | View, block_ids: Ids, chunk_indices: Ids, way: Way
) -> None:
    """Write chunk i of each source to chunk `chunk_indices[i]` of block `block_ids[i]` of the target at its place.

    Targets come from `chunk_targets`; sources are (..., token, head, byte), on the same device, with as many axes in
    front as the ids have. Sources with fewer tokens than a chunk fill its first ones. Places are all different. `way`
    is `spread_on_host`, or inside `copying` `spread_on_device`.
    """
    _check(block_ids, targets[0].shape[0])
    _check(chunk_indices, targets[0].shape[1])
    copy = way(block_ids, chunk_indices)
    for target, source in zip(targets, sources, strict=True):
        tokens, place = source.shape[-3], target.shape
        assert place == targets[0].shape, f"targets of {targets[0].shape} and {place}"
        assert tokens <= place[2], f"tokens: {tokens}, of a chunk: {place[2]}"
        assert source.shape == (*block_ids.shape, tokens, *place[3:]), f"{source.shape} into {place}"
        copy(source, target if tokens == place[2] else target[:, :, :tokens])


def spread_on_host(block_ids: Ids, chunk_indices: Ids) -> Copy:
    """Writes of chunks to memory of the CPU."""

    def copy(source: View, target: View) -> None:
        places, values = np.asarray(target), np.asarray(source)
        if values.strides[-2] > values.strides[-3]:  # in the order of the memory read: as fast or 10 % faster
            places, values = places.swapaxes(2, 3), values.swapaxes(-3, -2)
        places[block_ids, chunk_indices] = values

    return copy


def spread_on_device(device: CacheDevice) -> Way:
    """Writes of chunks to memory of a device."""

    def way(block_ids: Ids, chunk_indices: Ids) -> Copy:
        blocks, chunks = device.upload(block_ids), device.upload(chunk_indices)

        def copy(source: Tensor, target: Tensor) -> None:
            target, source = device.elements(target, source)
            target[blocks, chunks] = source

        def one_by_one(source: Tensor, target: Tensor) -> None:
            for place in np.ndindex(block_ids.shape):
                target[block_ids[place], chunk_indices[place]].copy_(source[place], non_blocking=True)

        return one_by_one if blocks is None or chunks is None else copy

    return way


# --- all of them


def _check(ids: Ids, count: int) -> None:
    assert not ids.size or (ids.min() >= 0 and ids.max() < count), f"ids {ids.min()}..{ids.max()} of {count}"
