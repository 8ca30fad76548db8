"""Digests of the blocks of a cache (`verify.digests` defines them), computed on the copy thread.

Runs of bytes are hashed where they lie: on the CPU by numpy, with the GIL released while it reads them, at some 5 to
10 GB/s on one core; on CUDA by torch. Other devices may lack the kernels, so their blocks are copied to the host first.
The rest is arithmetic of numpy, for many layers at once, because one of its calls costs as much as 64 KiB of it. The
copy thread computes in pieces, so that copies for other requests take turns with it.

Views of a cache are made when its first digest is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.groups import LayerSet
from kvflow.core.cache.layout import PLAIN, BlockShape, heads_are_apart
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
"""A tensor, or an array of numpy."""

_HOST_DEVICE = CacheDevice(Device("cpu", 0))
_JOB_BYTES = 4 << 20  # what is gathered of a part of a layer stays in the processor's cache
_JOB_BYTES_ON_DEVICE = 64 << 20
_PIECE_BYTES = 32 << 20  # what a copy of another request waits for
_DIRECT_BYTES_MIN = 1 << 18  # of one block: it is hashed where it is, smaller ones are gathered first


class Undigestible(Exception):
    """Memory that neither numpy nor torch can read here, or heads that cannot be told apart."""


class Digesting(NamedTuple):
    """Blocks, tokens and heads to digest of some layers of one set."""

    layer_set: int
    layers: Sequence[int]
    """Positions of the layers in the set."""
    heads: range
    """Heads of the set's blocks."""
    model_head: int
    """Head of the model that the first of them is."""
    block_ids: BlockIds
    """Blocks of `block_size` tokens of a prompt; the last one holds the last of `tokens`."""
    block_size: int
    tokens: range
    """Places of the tokens in the prompt."""


class DigestedCache:
    """The bytes of a cache, for digests. `sets` are those that peers see or, with host staging, those of the engine."""

    def __init__(self, sets: Sequence[LayerSet], copy_thread: CopyThread, device: CacheDevice = _HOST_DEVICE) -> None:
        """`device`: the device that they are on."""
        self._sets = sets
        self._copy_thread = copy_thread
        self._device = device

    @cached_property
    def problem(self) -> str:
        """The reason why it has no digests; "" if it has."""
        try:
            return "" if self._digested else "there are no layers"
        except (Undigestible, LayoutError) as error:  # layers that are staged need no addresses
            return str(error)

    @cached_property
    def _digested(self) -> list[_DigestedSet]:
        return [_DigestedSet(one, self._device) for one in self._sets]

    async def digests(self, asked: Sequence[Digesting]) -> list[int]:
        """Digests of each layer of each item, in order. Raises Undigestible, or what computing has raised.

        Cancelling stops the waiting, and what is not computed yet is not begun.
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

    def _pieces(self, asked: Sequence[Digesting], sums: list[int]) -> Iterator[bool]:
        """Add up the digests of each layer in `sums`. Yields True after each piece but the last."""
        first = piece_bytes = 0
        for one in asked:
            for layer, found, size_bytes in self._digested[one.layer_set].digests(one):
                for at, number in enumerate(found.tolist(), first + layer):
                    sums[at] = digests.added(sums[at], number)
                piece_bytes += size_bytes
                if piece_bytes >= _PIECE_BYTES:
                    yield True
                    piece_bytes = 0
            first += len(one.layers)


class _DigestedSet:
    """A set of layers as bytes: for each region a view (block, token, head, byte).

    Tokens and heads are in the order of the memory, which is up to twice as fast.
    """

    def __init__(self, one: LayerSet, device: CacheDevice) -> None:
        kv_format = one.layout.kv_format
        regions = split_fused(one.regions) if kv_format == PLAIN else one.regions
        shape = _run_shape(regions.block, kv_format)
        self._parts = len(regions.parts)
        self._heads = regions.block.heads
        self._heads_apart = shape.heads == self._heads
        self._whole_blocks = shape.tokens == 1 and regions.block.tokens > 1
        self._heads_first = shape.head_stride > shape.token_stride
        self._head_bytes = shape.tokens * shape.run
        self._words = digests.word_weights(-(-shape.run // digests.WORD_BYTES))
        views = [view.transpose(1, 2) if self._heads_first else view for view in _views(one, regions, shape)]
        on_host = _is_host(views[0].device)
        self._by_torch = not on_host and device.as_bytes
        self._fetched_from = None if on_host or device.as_bytes else device
        self._views: list[View] = list(map(_on_host, views)) if on_host else views

    def digests(self, asked: Digesting) -> Iterator[tuple[int, UInt64Array, int]]:
        """Summands of the layers' digests, which jobs of a bounded size compute.

        Yields the position among the asked layers of the first of some layers, what to add to each of their digests,
        and the bytes that were read.
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

    def _steps(self, asked: Digesting, step: int) -> Iterator[tuple[BlockIds, UInt64Array]]:
        """Block ids, at most `step`, and the weights of their tokens: 0 for tokens that are not asked for."""
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
        """Return the hashes of runs: (region, block, token, head), in the order of the memory."""
        views, where = [self._views[at] for at in regions], ids
        if self._fetched_from is not None:
            views, where = _fetched(views, ids, self._fetched_from), np.arange(len(ids))
        views = [view[:, heads] if self._heads_first else view[:, :, heads] for view in views]
        if self._by_torch:
            return _hashed_by_torch(views, where, self._words)
        hashes = np.empty((len(views), len(ids), *views[0].shape[1:3]), dtype=np.uint64)
        for view, found in zip(views, hashes, strict=True):
            _hash(view, where, self._words, found)
        return hashes


def _run_shape(block: BlockShape, kv_format: str) -> BlockShape:
    """Shape of a block in runs: one head of one token, or a part of an opaque block that is never taken apart."""
    if kv_format == PLAIN:
        return block
    if heads_are_apart(kv_format, block):
        run = block.tokens * block.run
        return BlockShape(1, block.heads, run, block.size_bytes, run)
    return BlockShape(1, 1, block.size_bytes, block.size_bytes, block.size_bytes)


def _views(one: LayerSet, regions: Regions, shape: BlockShape) -> Iterator[Tensor]:
    """A view of bytes (block, token, head, byte) of each region, in the memory of the set's tensors."""
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


def _on_host(view: Tensor) -> npt.NDArray[Any]:
    """View a region by numpy: as words, or as bytes if its runs are not of whole words."""
    found: npt.NDArray[Any] = view.numpy()
    return found if found.shape[3] % digests.WORD_BYTES else found.view("<u8")


def _hash(view: npt.NDArray[Any], ids: BlockIds, words: UInt64Array, found: UInt64Array) -> None:
    """Hash all runs of some blocks of a region."""
    if view[0].nbytes >= _DIRECT_BYTES_MIN:
        for block, hashes in zip(ids.tolist(), found, strict=True):
            np.einsum("xyw,w->xy", _padded(view[block]), words, out=hashes)
    else:
        # Not into a buffer: copies of whole blocks that begin alike in their pages took five times as long.
        np.einsum("bxyw,w->bxy", _padded(view[ids]), words, out=found)


def _padded(runs: npt.NDArray[Any]) -> UInt64Array:
    """Runs as words of 8 bytes; bytes are padded with 0."""
    if runs.dtype != np.uint8:
        return runs
    rest = -runs.shape[-1] % digests.WORD_BYTES
    return np.pad(runs, [(0, 0)] * (runs.ndim - 1) + [(0, rest)]).view("<u8")


def _hashed_by_torch(views: Sequence[Tensor], ids: BlockIds, words: UInt64Array) -> UInt64Array:
    """Hash all runs of some blocks of regions on their device, on its current stream."""
    import torch

    def there(numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.view(np.int64).copy()).to(views[0].device)

    index, weights = there(ids), there(words)
    rest = -views[0].shape[3] % digests.WORD_BYTES
    hashes = []
    for view in views:
        runs = torch.nn.functional.pad(view[index], (0, rest)) if rest else view[index].contiguous()
        hashes.append((runs.view(torch.int64) * weights).sum(-1))
    found: UInt64Array = torch.stack(hashes).cpu().numpy().view(np.uint64)
    return found


def _fetched(views: Sequence[Tensor], ids: BlockIds, device: CacheDevice) -> list[View]:
    """Copy some blocks of regions to the host, all bytes of each block from the first to the last; inside `copying`."""
    import torch

    from kvflow.staging.copies import copy_blocks, to_host

    shape, strides = views[0].shape[1:], views[0].stride()[1:]
    size = 1 + sum((many - 1) * stride for many, stride in zip(shape, strides, strict=True))
    rows = [view.as_strided((len(view), size), (view.stride(0) if len(view) > 1 else size, 1)) for view in views]
    fetched = [torch.empty(len(ids), size, dtype=torch.uint8) for _ in rows]
    copy_blocks(rows, fetched, ids, np.arange(len(ids)), to_host(device))
    device.wait()
    return [_on_host(row.as_strided((len(ids), *shape), (size, *strides))) for row in fetched]
