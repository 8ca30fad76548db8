"""Copies between caches and buffers, by torch and numpy. All other bytes are moved by NIXL.

A cache is seen as *parts*: K and V, or the latent, of one layer. A part is a view with the axes block, token, head and
dim, whatever the style and the order of the cache. `copy_blocks` copies whole blocks between caches of one layout: from
a device to the host, and back. `scatter_tokens` copies heads of some tokens from a scratch buffer, in a peer's memory
order, into local blocks. Both write exactly the elements that they name.

All copies work on bytes, since torch cannot index every dtype. CPU memory is copied by numpy, run by run in one thread,
with the GIL released, at 10 GB/s for runs of 256 bytes and more for longer ones. Torch indexes element by element: 6
times slower on bytes. On other devices torch copies, in the largest elements that fit.

All functions run on a copy thread, and return when the copy is complete. The caller has made sure that the bytes were
computed and that the block ids exist.
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
"""View of the memory of a cache or buffer: a tensor or, for CPU memory, a numpy array. A view is made once per cache.
"""
Copy: TypeAlias = Callable[[View, View], None]
"""Function `copy(source, target)` that copies blocks or chunks of one region from view `source` to view `target`. The
ids of the blocks or chunks were fixed when the function was made.
"""
CopyMaker: TypeAlias = "Callable[[Ids, Ids], Copy]"
"""Function that takes two arrays of ids, and returns a `Copy` for all regions. For `copy_blocks` the two arrays are the
source block ids and the target block ids. For `scatter_tokens` they are the target block ids and, for each of these,
the index of the target chunk in the block.
"""


# --- parts


def canonical_parts(layer: LayerTensors, layout: CacheLayout, *, split_fused: bool = True) -> tuple[Tensor, ...]:
    """Return K and V of a layer, or its latent, as views (block, token, head, dim). A latent has one head.

    K and V of a fused cache are the halves of its last axis. Without `split_fused`, K and V stay together in one view.
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
    """Return a layer's tensors, one for each region (K, V or the latent), with the block axis first."""
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
    """Return the style of a cache (where K and V lie); None for recurrent state, which has the block axis first."""
    return layout.style if isinstance(layout, CacheLayout) else None


def _byte_view(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return a view of a tensor's memory as bytes, from its first element on. `shape` and `strides` count bytes.

    `Tensor.view` cannot be used, since it wants a stride of 1 even for an axis with one entry.
    """
    import torch

    offset = tensor.storage_offset() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, tuple(shape), tuple(strides))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` as bytes. The last axis, which must be dense, has the bytes of the elements."""
    size = tensor.element_size()
    *outer, last = tensor.shape
    return _byte_view(tensor, (*outer, last * size), (*(stride * size for stride in tensor.stride()[:-1]), 1))


# --- whole blocks


def allocate_host_caches(
    kv_caches: CacheTensors, layout: CacheLayout | StateLayout, num_blocks: int, device: CacheDevice
) -> dict[str, LayerTensors]:
    """Return zeroed host tensors like those of a cache, for `num_blocks` blocks: same style, axes and memory order.

    Blocks are dense, even if the cache has gaps. Each tensor has its own memory, of the kind that `device` copies fast.
    Layers that share a tensor in the cache share a host tensor.
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
    # Axes from outermost to innermost in memory. The stride of a single block means nothing, so outer axes come first.
    axes = sorted(range(len(shape)), key=lambda axis: (axis >= outer_count, -tensor.stride()[axis], axis))
    memory = device.host_memory(math.prod(shape) * tensor.element_size())
    dense = memory.view(tensor.dtype).view([shape[axis] for axis in axes])
    return dense.permute([axes.index(axis) for axis in range(len(shape))])


def block_rows(
    kv_caches: CacheTensors, layout: CacheLayout | StateLayout, *, as_bytes: bool = True
) -> tuple[Tensor, ...]:
    """Return each region (K, V or latent of a layer) as a matrix with one row per block, without copying.

    Rows are bytes or, without `as_bytes`, elements, for devices without memory addresses. Regions that share their
    memory are returned once. Call this once per cache, not per copy.
    """
    rows: dict[tuple[object, int], Tensor] = {}
    for layer in kv_caches.values():
        for at, row in enumerate(_layer_rows(layer, layout, as_bytes)):
            tensor = layer[at] if isinstance(layer, tuple | list) else layer
            rows.setdefault((memory_of(tensor), at), row)
    return tuple(rows.values())


def _layer_rows(layer: LayerTensors, layout: CacheLayout | StateLayout, as_bytes: bool) -> Iterator[Tensor]:
    """Yield each region (K, V or the latent) of one layer as a matrix with one row per block."""
    for part in _part_tensors(layer, layout):
        count, each = part[0].numel(), part.element_size()
        stride = part.stride(0) if len(part) > 1 else count
        if as_bytes:
            yield _byte_view(part, (len(part), count * each), (stride * each, 1))
        else:
            yield part.as_strided((len(part), count), (stride, 1))


def copy_blocks(
    sources: Sequence[Tensor], targets: Sequence[Tensor], source_ids: Ids, target_ids: Ids, make_copy: CopyMaker
) -> None:
    """Copy block `source_ids[i]` of every region to block `target_ids[i]`. No id occurs twice in an array.

    `sources` and `targets` are `block_rows` of caches with the same layout, except for the number of blocks.
    `make_copy` is `copy_on_host` or, inside `CacheDevice.copying`, the result of `to_host` or `to_device`.
    """
    assert len(source_ids) == len(target_ids), f"source ids: {len(source_ids)}, target ids: {len(target_ids)}"
    if not len(source_ids):
        return
    copy = make_copy(source_ids, target_ids)
    for source, target in zip(sources, targets, strict=True):
        assert source.shape[1] == target.shape[1], f"elements of a block: {source.shape[1]}, {target.shape[1]}"
        _check_ids(source_ids, len(source))
        _check_ids(target_ids, len(target))
        copy(source, target)


def copy_on_host(source_ids: Ids, target_ids: Ids) -> Copy:
    """Return a function that copies block `source_ids[i]` to block `target_ids[i]` of a region in CPU memory."""
    runs = list(_runs(source_ids, target_ids))

    def copy(source: Tensor, target: Tensor) -> None:
        rows, places = source.numpy(), target.numpy()
        for start, place, count in runs:
            places[place : place + count] = rows[start : start + count]

    return copy


def to_host(device: CacheDevice) -> CopyMaker:
    """Return the argument `make_copy` of `copy_blocks` for copies from `device` to host memory."""
    return copy_on_host if device.on_host else partial(_pieces_or_kernels, device, gather=True)


def to_device(device: CacheDevice) -> CopyMaker:
    """Return the argument `make_copy` of `copy_blocks` for copies from host memory to `device`."""
    return copy_on_host if device.on_host else partial(_pieces_or_kernels, device, gather=False)


def _pieces_or_kernels(device: CacheDevice, source_ids: Ids, target_ids: Ids, *, gather: bool) -> Copy:
    """Return a function that copies a region's blocks between `device` and host, in the way that is faster.

    Large blocks are copied in one call, small blocks by kernels of the device. `gather`: True from device to host,
    False from host to device.
    """
    in_one_call = cache(lambda: _in_one_call(device, source_ids, target_ids))
    by_kernels = cache(lambda: _by_kernels(device, source_ids, target_ids, gather=gather))

    def copy(source: Tensor, target: Tensor) -> None:
        least = device.piece_bytes_min
        large = least is not None and source.shape[1] * source.element_size() >= least
        (in_one_call() if large else by_kernels())(source, target)

    return copy


def _by_kernels(device: CacheDevice, source_ids: Ids, target_ids: Ids, *, gather: bool) -> Copy:
    """Return a function that gathers blocks on the device and copies them to the host. Without `gather`: the reverse.

    On the device the blocks pass through dense bounce memory, because only dense copies over the bus are fast.
    """
    import torch

    host_ids = target_ids if gather else source_ids
    index = device.upload(source_ids if gather else target_ids)
    if index is None:
        return _run_by_run(source_ids, target_ids)

    def copy(source: Tensor, target: Tensor) -> None:
        device_rows, host_rows = (source, target) if gather else (target, source)
        done = 0
        while done < len(host_ids):
            gather_buffer = device.gather_buffer(
                len(host_ids) - done, device_rows.shape[1] * device_rows.element_size()
            )
            ids, some = host_ids[done : done + len(gather_buffer)], index[done : done + len(gather_buffer)]
            blocks, dense = device.view_elements(device_rows, gather_buffer)
            rows = gather_buffer.view(host_rows.dtype)
            if gather:
                torch.index_select(blocks, 0, some, out=dense)
            for start, place, count in _runs(np.arange(len(ids)), ids, dense=_is_dense(host_rows)):
                on_host, bounced = host_rows[place : place + count], rows[start : start + count]
                (on_host if gather else bounced).copy_(bounced if gather else on_host, non_blocking=True)
            if not gather:
                blocks[some] = dense
            done += len(gather_buffer)

    return copy


def _in_one_call(device: CacheDevice, source_ids: Ids, target_ids: Ids) -> Copy:
    """Return a function that copies a region's blocks in one call. Adjacent blocks are copied as one piece."""
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
    """Return a function that copies a region between device and host without kernels, a run of blocks at a time."""

    def copy(source: Tensor, target: Tensor) -> None:
        for start, place, count in _runs(source_ids, target_ids, dense=_is_dense(source, target)):
            target[place : place + count].copy_(source[start : start + count], non_blocking=True)

    return copy


def _is_dense(*regions: Tensor) -> bool:
    """Return whether each region has no gaps between its blocks."""
    return all(rows.stride(0) == rows.shape[1] for rows in regions)


def _runs(first_ids: Ids, second_ids: Ids, *, dense: bool = True) -> Iterator[tuple[int, int, int]]:
    """Cut two arrays of ids into runs in which both ids increase by one. Yield (first id, second id, length) of each.

    Without `dense`, for blocks with gaps between them, each position is a run of its own.
    """
    follows = (np.diff(first_ids) == 1) & (np.diff(second_ids) == 1) & dense
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    counts = np.diff(starts, append=len(first_ids))
    yield from zip(first_ids[starts].tolist(), second_ids[starts].tolist(), counts.tolist(), strict=True)


# --- tokens


def chunk_targets(
    parts: Sequence[Tensor], *, chunk_tokens: int, head_start: int, head_count: int, as_bytes: bool = True
) -> tuple[Tensor, ...]:
    """Return for each of `parts` (K, V or latent) a byte view with the axes block, chunk in block, token, head, byte.

    A chunk is `chunk_tokens` tokens; a block holds whole chunks. The views have only the `head_count` heads from
    `head_start` on. Without `as_bytes` the last axis has elements of the cache's dtype. Make the views once per cache,
    not per copy.
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
    """Return a view of a scratch buffer with the axes row, chunk, token, head and byte.

    Row k holds `chunks` chunks of the k-th region, without gaps. A chunk is what was read of one remote block in one
    region: `tokens` tokens of `heads` heads; a caller that needs fewer slices the view. `run_bytes`: size of one
    head of one token. `memory_order`: the peer's, "NHD" or "HND".
    """
    inner = (tokens, heads) if memory_order == "NHD" else (heads, tokens)
    size_bytes = rows * chunks * tokens * heads * run_bytes
    view = scratch[:size_bytes].view(rows, chunks, *inner, run_bytes)
    return view if memory_order == "NHD" else view.transpose(2, 3)


def scatter_tokens(
    targets: Sequence[View], sources: Sequence[View] | View, block_ids: Ids, chunk_indices: Ids, make_copy: CopyMaker
) -> None:
    """Write chunks of tokens into local blocks: the chunks of `sources[k]` into the blocks of `targets[k]`, for each k.

    Chunk i goes to chunk `chunk_indices[i]` of block `block_ids[i]`; no two chunks have the same target. The two arrays
    have the same shape; with several axes, i is one index for each axis. Sources have these axes, followed by the axes
    token, head and byte. Targets come from `chunk_targets`; sources are on the device of the targets. A source with
    fewer tokens than a chunk fills the chunk's first tokens.
    `make_copy` is `scatter_on_host` or, inside `CacheDevice.copying`, the result of `scatter_on_device`.
    """
    _check_ids(block_ids, targets[0].shape[0])
    _check_ids(chunk_indices, targets[0].shape[1])
    copy = make_copy(block_ids, chunk_indices)
    for target, source in zip(targets, sources, strict=True):
        tokens, place = source.shape[-3], target.shape
        assert place == targets[0].shape, f"targets of {targets[0].shape} and {place}"
        assert tokens <= place[2], f"tokens: {tokens}, of a chunk: {place[2]}"
        assert source.shape == (*block_ids.shape, tokens, *place[3:]), f"{source.shape} into {place}"
        copy(source, target if tokens == place[2] else target[:, :, :tokens])


def scatter_on_host(block_ids: Ids, chunk_indices: Ids) -> Copy:
    """Return a `Copy` for CPU memory: it writes chunk i to chunk `chunk_indices[i]` of block `block_ids[i]`."""

    def copy(source: View, target: View) -> None:
        places, values = np.asarray(target), np.asarray(source)
        if values.strides[-2] > values.strides[-3]:  # in the memory order of the source: as fast or 10 % faster
            places, values = places.swapaxes(2, 3), values.swapaxes(-3, -2)
        places[block_ids, chunk_indices] = values

    return copy


def scatter_on_device(device: CacheDevice) -> CopyMaker:
    """Return the argument `make_copy` of `scatter_tokens` for chunks in the memory of `device`."""

    def make_copy(block_ids: Ids, chunk_indices: Ids) -> Copy:
        blocks, chunks = device.upload(block_ids), device.upload(chunk_indices)

        def copy(source: Tensor, target: Tensor) -> None:
            target, source = device.view_elements(target, source)
            target[blocks, chunks] = source

        def one_by_one(source: Tensor, target: Tensor) -> None:
            for place in np.ndindex(block_ids.shape):
                target[block_ids[place], chunk_indices[place]].copy_(source[place], non_blocking=True)

        return one_by_one if blocks is None or chunks is None else copy

    return make_copy


# --- checks


def _check_ids(ids: Ids, count: int) -> None:
    """Assert that all ids are below `count`, and not negative."""
    assert not ids.size or (ids.min() >= 0 and ids.max() < count), f"ids {ids.min()}..{ids.max()} of {count}"
