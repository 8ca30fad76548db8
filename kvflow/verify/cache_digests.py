"""Digests of the blocks of a cache, computed on the copy thread. `verify.digests` defines a digest.

Runs of bytes are hashed in place: on the CPU by numpy, at some 5 to 10 GB/s on one core with the GIL released; on CUDA
by torch. Other devices may lack the kernels, so their blocks are first copied to the host. The factors are applied to
many layers together, because one numpy call takes the time of hashing 64 KiB. The copy thread computes in pieces, with
copies for other requests in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.groups import LayerSet
from kvflow.core.cache.layout import PLAIN, BlockShape, has_separate_heads
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.cache.tensors import tensors_of
from kvflow.core.plan.block_map import split_fused
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import LayoutError
from kvflow.runtime.copy_thread import CopyThread
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.verify import digests
from kvflow.verify.digests import UInt64Array

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"
View: TypeAlias = Any
"""View of the bytes of a region: a torch tensor or a numpy array."""

_HOST_DEVICE = CacheDevice(Device("cpu", 0))
_JOB_BYTES = 4 << 20  # the bytes gathered from one part of a layer stay in the processor's cache
_JOB_BYTES_ON_DEVICE = 64 << 20
_PIECE_BYTES = 32 << 20  # a copy of another request waits for at most this
_DIRECT_BYTES_MIN = 1 << 18  # blocks of this size are hashed in place, smaller blocks are gathered first


class Undigestible(Exception):
    """Raised if digests cannot be computed.

    Neither numpy nor torch can read the memory, or the digest of single heads is requested of blocks that can only be
    digested whole, because their format is opaque.
    """


class DigestSpec(NamedTuple):
    """The layers, heads, blocks and tokens to digest, all of one layer set (layers of equal shape)."""

    layer_set: int
    layers: Sequence[int]
    """Indexes of the layers within the layer set."""
    heads: range
    model_head: int
    """Index of the first of `heads` among all heads of the model."""
    block_ids: BlockIds
    """Ids of blocks in prompt order. The last block holds the last of `tokens`."""
    block_size: int
    tokens: range
    """Prompt positions of the tokens to digest."""


class DigestedCache:
    """Computes digests of blocks in one memory: the engine's cache, or the host blocks that peers read."""

    def __init__(self, sets: Sequence[LayerSet], copy_thread: CopyThread, device: CacheDevice = _HOST_DEVICE) -> None:
        """`sets`: the layers in the memory, as sets of layers of equal shape.

        `device`: the device that these layers are on.
        """
        self._sets = sets
        self._copy_thread = copy_thread
        self._device = device

    @cached_property
    def problem(self) -> str:
        """Reason why digests of this memory cannot be computed; empty if there is none."""
        try:
            return "" if self._digested else "there are no layers"
        except (Undigestible, LayoutError) as error:  # staged layers may have no addresses
            return str(error)

    @cached_property
    def _digested(self) -> list[_DigestedSet]:
        return [_DigestedSet(one, self._device) for one in self._sets]

    async def digests(self, asked: Sequence[DigestSpec]) -> list[int]:
        """Return a flat list with one digest for each layer of each spec in `asked`, in that order.

        Raise Undigestible, or any error of the computation. Cancelling stops the waiting; the copy thread finishes the
        piece of at most `_PIECE_BYTES` that it has begun.
        """
        if self.problem:
            raise Undigestible(self.problem)
        sums = [0] * sum(len(one.layers) for one in asked)
        pieces = self._pieces(asked, sums)

        def next_piece() -> bool:
            with self._device.copying():
                return next(pieces, False)

        while await self._copy_thread.run(next_piece):
            pass
        return sums

    def _pieces(self, asked: Sequence[DigestSpec], sums: list[int]) -> Iterator[bool]:
        """Add the digests of `asked`, step by step, to `sums`, which has one number for each layer of each spec.

        Yield True each time `_PIECE_BYTES` bytes have been read, so that other work can run.
        """
        first = piece_bytes = 0
        for one in asked:
            for layer, found, size_bytes in self._digested[one.layer_set].digests(one):
                for at, number in enumerate(found.tolist(), first + layer):
                    sums[at] = digests.add_digests(sums[at], number)
                piece_bytes += size_bytes
                if piece_bytes >= _PIECE_BYTES:
                    yield True
                    piece_bytes = 0
            first += len(one.layers)


class _DigestedSet:
    """One layer set (layers of equal shape) as bytes: for each region, a view with the axes block, token, head, byte.

    If heads come before tokens in memory, these two axes are swapped: hashing in memory order is up to twice as fast.
    """

    def __init__(self, one: LayerSet, device: CacheDevice) -> None:
        kv_format = one.layout.kv_format
        regions = split_fused(one.regions) if kv_format == PLAIN else one.regions
        shape = _run_shape(regions.block, kv_format)
        self._parts = len(regions.planes)
        self._heads = regions.block.heads
        self._heads_apart = shape.heads == self._heads
        self._whole_blocks = shape.tokens == 1 and regions.block.tokens > 1
        self._heads_first = shape.head_stride > shape.token_stride
        self._head_bytes = shape.tokens * shape.run
        self._words = digests.word_weights(-(-shape.run // digests.WORD_BYTES))
        views = [view.transpose(1, 2) if self._heads_first else view for view in _views(one, regions, shape)]
        on_host = _is_host(views[0].device)
        self._by_torch = not on_host and device.as_bytes
        self._copy_device = None if on_host or device.as_bytes else device
        self._views: list[View] = list(map(_numpy_view, views)) if on_host else views

    def digests(self, asked: DigestSpec) -> Iterator[tuple[int, UInt64Array, int]]:
        """Yield partial sums of the digests of the layers in `asked`, each from a bounded number of bytes.

        Each yielded tuple is (first, numbers, bytes read). The caller adds `numbers[i]` to the digest of layer
        `asked.layers[first + i]`.
        """
        heads = asked.heads
        if not self._heads_apart:
            if heads != range(self._heads):
                raise Undigestible(f"heads {heads.start}+{len(heads)} of blocks that are moved whole")
            heads = range(1)
        of_heads = digests.head_weights(asked.model_head, len(heads))
        of_parts = digests.part_weights(self._parts)
        block_bytes = len(heads) * self._head_bytes
        job_bytes = _JOB_BYTES_ON_DEVICE if self._by_torch else _JOB_BYTES
        regions = [at * self._parts + part for at in asked.layers for part in range(self._parts)]
        for ids, of_tokens in self._steps(asked, max(job_bytes // block_bytes, 1)):
            weights = of_tokens[:, :, None] * of_heads
            weights = (weights.swapaxes(1, 2) if self._heads_first else weights).reshape(-1)
            step_bytes = len(ids) * block_bytes * self._parts
            most = max(job_bytes // step_bytes, 1)
            for layer in range(0, len(asked.layers), most):
                some = regions[layer * self._parts : (layer + most) * self._parts]
                hashes = self._hashes(some, ids, slice(heads.start, heads.stop))
                hashes ^= hashes >> np.uint64(32)
                found = np.einsum("rn,n->r", hashes.reshape(len(some), -1), weights).reshape(-1, self._parts) @ of_parts
                yield layer, found, step_bytes * len(found)

    def _steps(self, asked: DigestSpec, step: int) -> Iterator[tuple[BlockIds, UInt64Array]]:
        """Yield (block ids, weights) for at most `step` blocks of `asked` at a time.

        `weights`: factors by which the digest multiplies hashes. In a plain format there is one factor for each token
        of these blocks, which is 0 for a token that `asked` leaves out. In an opaque format there is one factor for
        each block.
        """
        size, start, stop = asked.block_size, asked.tokens.start, asked.tokens.stop
        first_block = -(-stop // size) - len(asked.block_ids)
        for begin in range(max(start // size - first_block, 0), len(asked.block_ids), step):
            ids = asked.block_ids[begin : begin + step]
            tokens = (first_block + begin + np.arange(len(ids)))[:, None] * size
            if self._whole_blocks:
                yield ids, digests.token_weights(tokens)
                continue
            tokens = tokens + np.arange(size)
            weights = digests.token_weights(tokens)
            weights[(tokens < start) | (tokens >= stop)] = 0
            yield ids, weights

    def _hashes(self, regions: Sequence[int], ids: BlockIds, heads: slice) -> UInt64Array:
        """Return one hash for each run (bytes of one head of one token) in the blocks `ids` of `regions`.

        The axes are region and block, then token and head in the order in which they lie in memory.
        """
        views, where = [self._views[at] for at in regions], ids
        if self._copy_device is not None:
            views, where = _copy_to_host(views, ids, self._copy_device), np.arange(len(ids))
        views = [view[:, heads] if self._heads_first else view[:, :, heads] for view in views]
        if self._by_torch:
            return _hashed_by_torch(views, where, self._words)
        hashes = np.empty((len(views), len(ids), *views[0].shape[1:3]), dtype=np.uint64)
        for view, found in zip(views, hashes, strict=True):
            _hash_into(view, where, self._words, found)
        return hashes


def _run_shape(block: BlockShape, kv_format: str) -> BlockShape:
    """Return the shape of `block` as an array of runs: single heads of single tokens.

    In an opaque format a run is one head of the block, or the whole block.
    """
    if kv_format == PLAIN:
        return block
    if has_separate_heads(kv_format, block):
        run = block.tokens * block.run
        return BlockShape(1, block.heads, run, block.size_bytes, run)
    return BlockShape(1, 1, block.size_bytes, block.size_bytes, block.size_bytes)


def _views(one: LayerSet, regions: Regions, shape: BlockShape) -> Iterator[Tensor]:
    """Yield for each of `regions` a byte view (block, token, head, byte) of the memory of the layer set `one`."""
    import torch

    storages = []
    for tensor in [tensor for name, layer in one.caches.items() for tensor in tensors_of(name, layer)]:
        if not isinstance(tensor, torch.Tensor):
            raise Undigestible(f"{type(tensor).__name__} is no torch tensor")
        storage = tensor.untyped_storage()
        storages.append((storage.data_ptr(), storage.nbytes(), storage, tensor.device))
    sizes = regions.num_blocks, shape.tokens, shape.heads, shape.run
    for address, stride in zip(regions.bases.tolist(), regions.strides.tolist(), strict=True):
        start, _, storage, device = next(one for one in storages if 0 <= address - one[0] < one[1])
        strides = stride, shape.token_stride, shape.head_stride, 1
        yield torch.empty(0, dtype=torch.uint8, device=device).set_(storage, address - start, sizes, strides)


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _numpy_view(view: Tensor) -> npt.NDArray[Any]:
    """Return a numpy view of a region as words of 8 bytes, or as bytes if a run is not a whole number of words."""
    found: npt.NDArray[Any] = view.numpy()
    return found if found.shape[3] % digests.WORD_BYTES else found.view("<u8")


def _hash_into(view: npt.NDArray[Any], ids: BlockIds, words: UInt64Array, found: UInt64Array) -> None:
    """Hash all runs in the blocks `ids` of the region `view` into `found`.

    `words`: factors by which the words of a run are multiplied.
    """
    if view[0].nbytes >= _DIRECT_BYTES_MIN:
        for block, hashes in zip(ids.tolist(), found, strict=True):
            np.einsum("xyw,w->xy", _padded_words(view[block]), words, out=hashes)
    else:
        # Not into a buffer: copies of whole blocks with the same offset within their pages took five times as long.
        np.einsum("bxyw,w->bxy", _padded_words(view[ids]), words, out=found)


def _padded_words(runs: npt.NDArray[Any]) -> UInt64Array:
    """Return `runs` as words of 8 bytes, each run padded with zeros if necessary."""
    if runs.dtype != np.uint8:
        return runs
    rest = -runs.shape[-1] % digests.WORD_BYTES
    return np.pad(runs, [(0, 0)] * (runs.ndim - 1) + [(0, rest)]).view("<u8")


def _hashed_by_torch(views: Sequence[Tensor], ids: BlockIds, words: UInt64Array) -> UInt64Array:
    """Return the hashes of all runs in the blocks `ids` of each region, computed on the current stream of their device.

    `words`: factors by which the words of a run are multiplied.
    """
    import torch

    def upload(numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.view(np.int64).copy()).to(views[0].device)

    index, weights = upload(ids), upload(words)
    rest = -views[0].shape[3] % digests.WORD_BYTES
    hashes = []
    for view in views:
        runs = torch.nn.functional.pad(view[index], (0, rest)) if rest else view[index].contiguous()
        hashes.append((runs.view(torch.int64) * weights).sum(-1))
    found: UInt64Array = torch.stack(hashes).cpu().numpy().view(np.uint64)
    return found


def _copy_to_host(views: Sequence[Tensor], ids: BlockIds, device: CacheDevice) -> list[View]:
    """Copy the blocks `ids` of each region to the host. Return numpy views of the copies, with block numbers from 0.

    Call this inside `CacheDevice.copying`.
    """
    import torch

    from kvflow.staging.copies import copy_blocks, to_host

    shape, strides = views[0].shape[1:], views[0].stride()[1:]
    size = 1 + sum((many - 1) * stride for many, stride in zip(shape, strides, strict=True))
    rows = [view.as_strided((len(view), size), (view.stride(0) if len(view) > 1 else size, 1)) for view in views]
    fetched = [torch.empty(len(ids), size, dtype=torch.uint8) for _ in rows]
    copy_blocks(rows, fetched, ids, np.arange(len(ids)), to_host(device))
    device.wait()
    return [_numpy_view(row.as_strided((len(ids), *shape), (size, *strides))) for row in fetched]
