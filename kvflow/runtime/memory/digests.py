"""Digests of the blocks of a cache: what `core.protocol.digests` defines, computed where the bytes lie.

On the CPU numpy computes, in one thread and with the GIL released, at some 5 to 10 GB/s; elsewhere torch does, on the
device. It runs on the copy thread, in pieces, so that copies for other requests take turns with it.

Views of a cache are made when its first digest is asked for: who never asks pays nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.backends import heads_are_apart
from kvflow.core.cache.groups import LayerSet
from kvflow.core.cache.layout import PLAIN, BlockShape
from kvflow.core.cache.regions import Regions
from kvflow.core.cache.tensors import tensors_of
from kvflow.core.plan.block_map import split_fused
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.protocol import digests

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"

_STEP_BYTES = 4 << 20  # of one part of a layer: what is gathered stays in the processor's cache
_STEP_BYTES_ON_DEVICE = 64 << 20
_PIECE_BYTES = 32 << 20  # what a copy of another request waits for
_SHARED_BYTES_MIN = 4 << 20  # is worth a thread
_DIRECT_BYTES_MIN = 1 << 18  # of one block: it is digested where it is, smaller ones are gathered first


Run: TypeAlias = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a job on the copy thread and waits for it: `CopyThread.run`."""


class Undigestible(Exception):
    """Memory that neither numpy nor torch can read here, or heads that cannot be told apart."""


class HeadSpan(NamedTuple):
    """`heads` heads of a set of layers from `start` on, which are the model's heads from `of_model` on."""

    start: int
    heads: int
    of_model: int


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """Where tokens `start` to `stop` of a prompt are: `ids` are blocks of `size` tokens, the last holds the last."""

    ids: BlockIds
    size: int
    start: int
    stop: int

    @property
    def first_block(self) -> int:
        """Which block of the prompt the first of `ids` is."""
        return -(-self.stop // self.size) - len(self.ids)


class Digesting(NamedTuple):
    """What to digest of one set of layers."""

    layer_set: int
    layers: Sequence[int]
    """Their positions in the set."""
    heads: HeadSpan
    blocks: TokenBlocks


class DigestedCache:
    """The bytes of a cache, for digests. `sets` are those that peers see or, with host staging, those of the engine."""

    def __init__(self, sets: Sequence[LayerSet]) -> None:
        self._sets = sets

    @cached_property
    def problem(self) -> str:
        """Why it has no digests; "" if it has."""
        try:
            return "" if self._views else "there are no layers"
        except Undigestible as error:
            return str(error)

    @cached_property
    def _views(self) -> list[_SetViews]:
        return [_SetViews(one) for one in self._sets]

    async def digests(self, run: Run, asked: Sequence[Digesting], *, threads: int = 1) -> list[int]:
        """One for each layer of each item, in order. Raises Undigestible, or what computing has raised.

        `run` is the copy thread's, which is helped by others if `threads` are more than one and there is much to do.
        Cancelling stops the waiting, and what is not computed yet is not begun.
        """
        found: list[int] = []
        for one in asked:
            sums = [0] * len(one.layers)
            for jobs in self._pieces(one):
                await run(partial(_add_up, sums, jobs, threads))
            found += sums
        return found

    def _pieces(self, one: Digesting) -> Iterator[list[_Job]]:
        """All of it, in pieces of a bounded size."""
        piece: list[_Job] = []
        size_bytes = 0
        for job in self._views[one.layer_set].jobs(one.layers, one.heads, one.blocks):
            piece.append(job)
            size_bytes += job.size_bytes
            if size_bytes >= _PIECE_BYTES:
                yield piece
                piece, size_bytes = [], 0
        if piece:
            yield piece


class DigestGear(NamedTuple):
    """What digests of a rank are computed with."""

    own: DigestedCache
    """The engine's cache: what its loads have filled."""
    shown: DigestedCache
    """What peers read: the same or, with host staging, the host buffers."""
    run: Run


class _SetViews:
    """A set of layers as bytes: for each region a view (block, token, head, byte)."""

    def __init__(self, one: LayerSet) -> None:
        kv_format = one.layout.kv_format
        regions = split_fused(one.regions) if kv_format == PLAIN else one.regions
        self._regions = regions
        self._parts = len(regions.parts)
        self._shape = _piece_shape(regions.block, kv_format)
        self._whole_blocks = self._shape.tokens == 1 and regions.block.tokens > 1
        self._heads_apart = self._shape.heads == regions.block.heads
        storages = _Storages(one)
        self._views = [storages.view(regions, at, self._shape) for at in range(len(regions))]

    def jobs(self, layers: Sequence[int], heads: HeadSpan, blocks: TokenBlocks) -> Iterator[_Job]:
        """The digests of layers, part by part and step by step: the sum of a layer's is its digest."""
        if not self._heads_apart:
            if (heads.start, heads.heads) != (0, self._regions.block.heads):
                raise Undigestible(f"heads {heads.start}+{heads.heads} of blocks that are moved whole")
            heads = HeadSpan(0, 1, heads.of_model)
        steps = list(self._steps(blocks, digests.head_weights(heads.of_model, heads.heads)))
        for layer, position in enumerate(layers):
            for part in range(self._parts):
                view = self._views[position * self._parts + part][:, :, heads.start : heads.start + heads.heads]
                for ids, weights in steps:
                    yield _Job(layer, part, view, ids, weights)

    def _steps(self, blocks: TokenBlocks, of_heads: digests.UInt64Array) -> Iterator[tuple[BlockIds, _Weights]]:
        """Block ids, and what weight their tokens have: none where they are not asked for."""
        on_host = self._views[0].device.type == "cpu"
        step = max((_STEP_BYTES if on_host else _STEP_BYTES_ON_DEVICE) // self._shape.size_bytes, 1)
        first = max(blocks.start // blocks.size - blocks.first_block, 0)
        for start in range(first, len(blocks.ids), step):
            ids = blocks.ids[start : start + step]
            tokens = (blocks.first_block + start + np.arange(len(ids)))[:, None] * blocks.size
            if not self._whole_blocks:
                tokens = tokens + np.arange(blocks.size)
            weights = digests.token_weights(tokens)
            if not self._whole_blocks:
                weights[(tokens < blocks.start) | (tokens >= blocks.stop)] = 0
            yield ids, _Weights(weights, of_heads)


def _piece_shape(block: BlockShape, kv_format: str) -> BlockShape:
    """What is a run of a block: one head of one token, or what of an opaque block is never taken apart."""
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
    """Of the runs of some blocks: those of (block, token), and those of heads."""

    tokens: digests.UInt64Array
    heads: digests.UInt64Array


class _Job(NamedTuple):
    """A part of a digest: some blocks of one region."""

    layer: int
    part: int
    view: Tensor
    ids: BlockIds
    weights: _Weights

    @property
    def size_bytes(self) -> int:
        return len(self.ids) * math.prod(self.view.shape[1:])

    def compute(self) -> int:
        on_host = self.view.device.type == "cpu"
        found = (_on_host if on_host else _on_device)(self.view, self.ids, self.weights)
        return digests.of_part(self.part, found)


def _add_up(sums: list[int], jobs: Sequence[_Job], threads: int) -> None:
    """Add what the jobs give to the digests of their layers."""
    shares = [jobs]
    if threads > 1 and sum(job.size_bytes for job in jobs) >= _SHARED_BYTES_MIN:
        shares = [jobs[at::threads] for at in range(threads)]
    helpers = [_Helper(share) for share in shares[1:]]
    try:
        found = _computed(shares[0])
    finally:
        for helper in helpers:
            helper.join()
    for some in (found, *(helper.result() for helper in helpers)):
        for layer, number in some:
            sums[layer] = digests.added(sums[layer], number)


def _computed(jobs: Sequence[_Job]) -> list[tuple[int, int]]:
    return [(job.layer, job.compute()) for job in jobs]


class _Helper(threading.Thread):
    """Computes some jobs beside the copy thread, which waits for it."""

    def __init__(self, jobs: Sequence[_Job]) -> None:
        super().__init__(name="kvflow-digest", daemon=True)
        self._jobs = jobs
        self._found: list[tuple[int, int]] = []
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = _computed(self._jobs)
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error

    def result(self) -> list[tuple[int, int]]:
        """To be asked for after its end."""
        if self._error is not None:
            raise self._error
        return self._found


def _on_host(view: Tensor, ids: BlockIds, weights: _Weights) -> int:
    rows = view.numpy()
    heads_outside = rows.strides[2] > rows.strides[1]
    if heads_outside:
        rows = rows.swapaxes(1, 2)  # in the order of the memory read: up to twice as fast
    words = digests.word_weights(-(-rows.shape[3] // digests.WORD_BYTES))
    if rows[0].size < _DIRECT_BYTES_MIN:
        # Not into a buffer: copies of whole blocks that begin alike in their pages took five times as long.
        found = np.einsum("bijw,w->bij", _words(rows[ids]), words)
    else:
        found = np.stack([np.einsum("ijw,w->ij", _words(rows[at]), words) for at in ids.tolist()])
    found ^= found >> np.uint64(32)
    of_tokens = np.einsum("bht,h->bt" if heads_outside else "bth,h->bt", found, weights.heads)
    return int(np.vdot(of_tokens, weights.tokens))


def _words(view: npt.NDArray[np.uint8]) -> digests.UInt64Array:
    """Runs of bytes as words of 8, little-endian; the last one of each run is padded."""
    rest = view.shape[-1] % digests.WORD_BYTES
    if rest:
        padded = np.zeros((*view.shape[:-1], view.shape[-1] - rest + digests.WORD_BYTES), dtype=np.uint8)
        padded[..., : view.shape[-1]] = view
        view = padded
    dense = view if view.strides[-1] == 1 else np.ascontiguousarray(view)
    return dense.view("<u8")


def _on_device(view: Tensor, ids: BlockIds, weights: _Weights) -> int:
    """The same by torch: on the view's device, and on its current stream."""
    import torch

    def there(numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers.view(np.int64)).to(view.device)

    gathered = view[there(ids)]
    rest = -gathered.shape[-1] % digests.WORD_BYTES
    if rest:
        gathered = torch.nn.functional.pad(gathered, (0, rest))
    lanes = gathered.contiguous().view(torch.int64)
    found = (lanes * there(digests.word_weights(lanes.shape[-1]).copy())).sum(-1)
    found ^= (found >> 32) & 0xFFFFFFFF
    found *= there(weights.heads)
    return int((found.sum(-1) * there(weights.tokens)).sum().item()) & ((1 << 64) - 1)
