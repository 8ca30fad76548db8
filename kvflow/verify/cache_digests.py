"""Digests of the blocks of a cache (`verify.digests` defines them), computed where the bytes lie.

On the CPU numpy computes, with the GIL released while it reads the bytes, at some 5 to 10 GB/s on one core. On CUDA
torch does, on the device. Other devices may lack the kernels, so their blocks are copied to the host first. The copy
thread computes in pieces, so that copies for other requests take turns with it. A small request is one job there:
blocks are gathered layer by layer, and then the arithmetic is done for all layers at once, because a call of numpy
costs as much as 64 KiB of it.

Views of a cache are made when its first digest is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.backends import heads_are_apart
from kvflow.core.cache.groups import LayerSet
from kvflow.core.cache.layout import PLAIN, BlockShape
from kvflow.core.cache.regions import Device, Regions
from kvflow.core.cache.tensors import tensors_of
from kvflow.core.plan.block_map import split_fused
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import LayoutError
from kvflow.runtime.copy_thread import CopyThread
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.verify import digests

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"
View: TypeAlias = Any
"""A tensor, or an array of numpy."""

_HOST_DEVICE = CacheDevice(Device("cpu", 0))
_STEP_BYTES = 4 << 20  # of one part of a layer: what is gathered stays in the processor's cache
_STEP_BYTES_ON_DEVICE = 64 << 20
_JOB_BYTES = 4 << 20  # of several layers
_PIECE_BYTES = 32 << 20  # what a copy of another request waits for
_DIRECT_BYTES_MIN = 1 << 18  # of one block: it is digested where it is, smaller ones are gathered first


class Undigestible(Exception):
    """Memory that neither numpy nor torch can read here, or heads that cannot be told apart."""


class HeadSpan(NamedTuple):
    """`heads` heads of a set of layers from `start` on, which are the model's heads from `of_model` on."""

    start: int
    heads: int
    of_model: int


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """Tokens `start` to `stop` of a prompt in a cache: `ids` are blocks of `size` tokens, the last holds the last."""

    ids: BlockIds
    size: int
    start: int
    stop: int

    @property
    def first_block(self) -> int:
        """Index within the prompt of the first of `ids`."""
        return -(-self.stop // self.size) - len(self.ids)


class Digesting(NamedTuple):
    """The blocks and tokens to digest of one set of layers."""

    layer_set: int
    layers: Sequence[int]
    """Positions of the layers in the set."""
    heads: HeadSpan
    blocks: TokenBlocks


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
            return "" if self._views else "there are no layers"
        except (Undigestible, LayoutError) as error:  # layers that are staged need no addresses
            return str(error)

    @cached_property
    def _views(self) -> list[_SetOfViews]:
        return [_SetOfViews(one, self._device) for one in self._sets]

    async def digests(self, asked: Sequence[Digesting]) -> list[int]:
        """Digests of each layer of each item, in order. Raises Undigestible, or what computing has raised.

        Cancelling stops the waiting, and what is not computed yet is not begun.
        """
        if self.problem:
            raise Undigestible(self.problem)
        work = _Work(self._jobs(asked), [len(one.layers) for one in asked])
        while not work.done:
            await self._copy_thread.run(partial(self._go_on, work))
        return work.sums

    def _go_on(self, work: _Work) -> None:
        with self._device.copying():
            work.go_on()

    def _jobs(self, asked: Sequence[Digesting]) -> Iterator[tuple[int, _Job]]:
        """Jobs for all items, each with the position of its first layer among those of all."""
        first = 0
        for one in asked:
            for layer, job in self._views[one.layer_set].jobs(one.layers, one.heads, one.blocks):
                yield first + layer, job
            first += len(one.layers)


class _SetOfViews:
    """A set of layers as bytes: for each region a view.

    On a device they are tensors (block, token, head, byte), or rows of bytes that are fetched. On the host they are of
    numpy: tokens and heads in the order of the memory, which is up to twice as fast, and words where runs of bytes are
    made of whole ones.
    """

    def __init__(self, one: LayerSet, device: CacheDevice) -> None:
        kv_format = one.layout.kv_format
        regions = split_fused(one.regions) if kv_format == PLAIN else one.regions
        self._block = regions.block
        self._parts = len(regions.parts)
        self._shape = _piece_shape(regions.block, kv_format)
        self._whole_blocks = self._shape.tokens == 1 and regions.block.tokens > 1
        self._heads_apart = self._shape.heads == regions.block.heads
        storages = _Storages(one)
        views = [storages.view(regions, at, self._shape) for at in range(len(regions))]
        self.on_host = _is_host(views[0].device)
        self._device = None if self.on_host or device.as_bytes else device
        self._by_numpy = self.on_host or self._device is not None
        self._heads_outside = self._by_numpy and self._shape.head_stride > self._shape.token_stride
        self._views: Sequence[View] = views
        if self._device is not None:
            self._views = [_rows_around(view) for view in views]
        elif self.on_host:
            self._views = [_on_host(view, self._heads_outside) for view in views]

    def jobs(self, layers: Sequence[int], heads: HeadSpan, blocks: TokenBlocks) -> Iterator[tuple[int, _Job]]:
        """Jobs whose results add up to the digests of layers: each job with the first of its layers."""
        if not self._heads_apart:
            if (heads.start, heads.heads) != (0, self._block.heads):
                raise Undigestible(f"heads {heads.start}+{heads.heads} of blocks that are moved whole")
            heads = HeadSpan(0, 1, heads.of_model)
        span = slice(heads.start, heads.start + heads.heads)
        where = (slice(None), span) if self._heads_outside else (slice(None), slice(None), span)
        views = [self._views[at * self._parts + part] for at in layers for part in range(self._parts)]
        if self._device is None:
            views = [view[where] for view in views]
        block_bytes = self._shape.tokens * heads.heads * self._shape.run
        step = max((_STEP_BYTES if self._by_numpy else _STEP_BYTES_ON_DEVICE) // block_bytes, 1)
        for ids, weights in self._steps(blocks, step, digests.head_weights(heads.of_model, heads.heads)):
            step_bytes = len(ids) * block_bytes * self._parts
            most = max((_JOB_BYTES if self._by_numpy else _STEP_BYTES_ON_DEVICE) // step_bytes, 1)
            for layer in range(0, len(layers), most):
                some = views[layer * self._parts : (layer + most) * self._parts]
                size_bytes = step_bytes * len(some) // self._parts
                kind = _HostJob if self._by_numpy else _DeviceJob
                job = kind(some, self._parts, ids, weights, size_bytes, self._heads_outside)
                if self._device is not None and isinstance(job, _HostJob):
                    yield layer, _FetchedJob(job, self._shape, where, self._device, size_bytes)
                else:
                    yield layer, job

    def _steps(
        self, blocks: TokenBlocks, step: int, of_heads: digests.UInt64Array
    ) -> Iterator[tuple[BlockIds, _Weights]]:
        """Block ids, and the weights of their tokens: 0 for tokens that are not asked for."""
        words = digests.word_weights(-(-self._shape.run // digests.WORD_BYTES))
        of_parts = digests.part_weights(self._parts)
        first = max(blocks.start // blocks.size - blocks.first_block, 0)
        for start in range(first, len(blocks.ids), step):
            ids = blocks.ids[start : start + step]
            tokens = (blocks.first_block + start + np.arange(len(ids)))[:, None] * blocks.size
            if not self._whole_blocks:
                tokens = tokens + np.arange(blocks.size)
            weights = digests.token_weights(tokens)
            if not self._whole_blocks:
                weights[(tokens < blocks.start) | (tokens >= blocks.stop)] = 0
            yield ids, _Weights(words, weights, of_heads, of_parts)


def _piece_shape(block: BlockShape, kv_format: str) -> BlockShape:
    """Shape of a block in runs: one head of one token, or a part of an opaque block that is never taken apart."""
    if kv_format == PLAIN:
        return block
    if heads_are_apart(kv_format, block):
        run = block.tokens * block.run
        return BlockShape(1, block.heads, run, block.size_bytes, run)
    return BlockShape(1, 1, block.size_bytes, block.size_bytes, block.size_bytes)


class _Storages:
    """The memory of a set's tensors, to make views at addresses of it."""

    def __init__(self, one: LayerSet) -> None:
        import torch

        tensors = [tensor for name, layer in one.caches.items() for tensor in tensors_of(name, layer)]
        self._found: list[tuple[int, int, Any]] = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise Undigestible(f"{type(tensor).__name__} is no torch tensor")
            storage = tensor.untyped_storage()
            self._found.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), tensor))

    def view(self, regions: Regions, at: int, shape: BlockShape) -> Tensor:
        import torch

        address = int(regions.bases[at])
        start, _, tensor = next(one for one in self._found if one[0] <= address < one[1])
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        sizes = regions.num_blocks, shape.tokens, shape.heads, shape.run
        strides = int(regions.strides[at]), shape.token_stride, shape.head_stride, 1
        return empty.set_(tensor.untyped_storage(), address - start, sizes, strides)


class _Weights(NamedTuple):
    """Weights of the words of a run, of (block, token), of heads and of parts of a layer."""

    words: digests.UInt64Array
    tokens: digests.UInt64Array
    heads: digests.UInt64Array
    parts: digests.UInt64Array


class _HostJob(NamedTuple):
    """Some blocks of some layers, by numpy."""

    views: Sequence[View]
    """Part after part of layer after layer."""
    parts: int
    ids: BlockIds
    weights: _Weights
    size_bytes: int
    heads_outside: bool

    def compute(self) -> digests.UInt64Array:
        """The summand of each layer's digest."""
        weights, rows = self.weights, self.views[0]
        found = np.empty((len(self.views), len(self.ids), *rows.shape[1:3]), dtype=np.uint64)
        for view, hashes in zip(self.views, found, strict=True):
            self._hash(view, hashes)
        found ^= found >> np.uint64(32)
        of_tokens = np.einsum("rbht,h->rbt" if self.heads_outside else "rbth,h->rbt", found, weights.heads)
        of_views = of_tokens.reshape(len(self.views), -1) @ weights.tokens.reshape(-1)
        added: digests.UInt64Array = of_views.reshape(-1, self.parts) @ weights.parts
        return added

    def _hash(self, view: npt.NDArray[Any], hashes: digests.UInt64Array) -> None:
        """All runs of some blocks of a part of a layer."""
        ids, words = self.ids, self.weights.words
        if self.size_bytes >= _DIRECT_BYTES_MIN * len(ids) * len(self.views):
            for at, block in enumerate(ids.tolist()):
                np.einsum("ijw,w->ij", _words(view[block]), words, out=hashes[at])
        else:
            # Not into a buffer: copies of whole blocks that begin alike in their pages took five times as long.
            np.einsum("bijw,w->bij", _words(view[ids]), words, out=hashes)


class _DeviceJob(NamedTuple):
    """A job done by torch: on the views' device, and on its current stream."""

    views: Sequence[View]
    parts: int
    ids: BlockIds
    weights: _Weights
    size_bytes: int
    heads_outside: bool

    def compute(self) -> digests.UInt64Array:
        import torch

        device = self.views[0].device

        def there(numbers: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(numbers.view(np.int64).copy()).to(device)

        ids, (words, tokens, heads, parts) = there(self.ids), map(there, self.weights)
        found = torch.stack([(_lanes(view[ids]) * words).sum(-1) for view in self.views])
        found ^= (found >> 32) & 0xFFFFFFFF
        of_views = ((found * heads).sum(-1) * tokens).sum((1, 2))
        added: Tensor = (of_views.reshape(-1, self.parts) * parts).sum(-1)
        return added.cpu().numpy().view(np.uint64)


class _FetchedJob(NamedTuple):
    """A job by numpy, of blocks that are copied to the host first: inside `copying`."""

    job: _HostJob
    """The job; its views are rows of bytes on the device."""
    shape: BlockShape
    where: tuple[slice, ...]
    """The heads of a view that are digested."""
    device: CacheDevice
    size_bytes: int

    def compute(self) -> digests.UInt64Array:
        """The summand of each layer's digest."""
        import torch

        from kvflow.staging.copies import copy_blocks, to_host

        rows, ids = self.job.views, self.job.ids
        there = np.arange(len(ids))
        fetched = [torch.empty(len(ids), row.shape[1], dtype=torch.uint8) for row in rows]
        copy_blocks(rows, fetched, ids, there, to_host(self.device))
        self.device.wait()
        shape = self.shape
        axes = (len(ids), shape.tokens, shape.heads, shape.run)
        views = [row.as_strided(axes, (row.shape[1], shape.token_stride, shape.head_stride, 1)) for row in fetched]
        found = [_on_host(view, self.job.heads_outside)[self.where] for view in views]
        return self.job._replace(views=found, ids=there).compute()


_Job: TypeAlias = _HostJob | _DeviceJob | _FetchedJob


class _Work:
    """Digests that are computed piece by piece."""

    def __init__(self, jobs: Iterator[tuple[int, _Job]], layers: Sequence[int]) -> None:
        self.sums = [0] * sum(layers)
        self.done = False
        self._jobs = jobs

    def go_on(self) -> None:
        """Compute a piece more, of a bounded size."""
        size_bytes = 0
        for first, job in self._jobs:
            for layer, number in enumerate(job.compute().tolist(), first):
                self.sums[layer] = digests.added(self.sums[layer], number)
            size_bytes += job.size_bytes
            if size_bytes >= _PIECE_BYTES:
                return
        self.done = True


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _rows_around(view: Tensor) -> Tensor:
    """View (block, token, head, byte) as rows: all bytes of a block from its first to its last."""
    count, *shape = view.shape
    size = 1 + sum((many - 1) * stride for many, stride in zip(shape, view.stride()[1:], strict=True))
    return view.as_strided((count, size), (view.stride(0) if count > 1 else size, 1))


def _on_host(view: Tensor, heads_outside: bool) -> npt.NDArray[Any]:
    """A region for numpy: (block, token, head, word), or heads before tokens; bytes if runs are not of whole words."""
    rows: npt.NDArray[Any] = view.numpy()
    if heads_outside:
        rows = rows.swapaxes(1, 2)
    return rows if rows.shape[-1] % digests.WORD_BYTES or rows.strides[-1] != 1 else rows.view("<u8")


def _words(rows: npt.NDArray[Any]) -> digests.UInt64Array:
    """Runs of bytes as words of 8, little-endian; the last one of each run is padded."""
    if rows.dtype != np.uint8:
        return rows
    rest = -rows.shape[-1] % digests.WORD_BYTES
    padded = np.zeros((*rows.shape[:-1], rows.shape[-1] + rest), dtype=np.uint8)
    padded[..., : rows.shape[-1]] = rows
    return padded.view("<u8")


def _lanes(rows: Tensor) -> Tensor:
    """Runs of bytes as words of 8 in torch, whose words have signs."""
    import torch

    rest = -rows.shape[-1] % digests.WORD_BYTES
    if rest:
        rows = torch.nn.functional.pad(rows, (0, rest))
    return rows.contiguous().view(torch.int64)
