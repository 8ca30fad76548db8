"""Scratch memory: buffers into which whole blocks of a peer are read, and from which they are copied into the cache.

`staging.whole_blocks` plans the reads. This module has the buffers, which are registered when the first load needs
them, and the copy, which maps tokens and heads of a block in scratch memory to chunks of local blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from kvflow.checks import counted
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Span
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Descriptors
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.memory import Pool
from kvflow.staging.copies import (
    CacheTensors,
    View,
    canonical_parts,
    chunk_sources,
    chunk_targets,
    scatter_on_device,
    scatter_on_host,
    scatter_tokens,
)
from kvflow.staging.whole_blocks import WholeBlocks
from kvflow.transport.base import MemoryUse, Transport, TransportError
from kvflow.transport.device.cache_device import CacheDevice

if TYPE_CHECKING:
    import torch


class Scratch:
    """A few scratch buffers of equal size on the cache's device.

    A buffer is allocated, and registered with the transport, when it is first taken, or earlier by `prepare`.
    """

    def __init__(
        self, transport: Transport, device: CacheDevice, copy_thread: CopyThread, slot_bytes: int, slots: int
    ) -> None:
        self.slot_bytes = slot_bytes
        self.device = device
        self._transport = transport
        self._copy_thread = copy_thread
        self.pool = Pool(slots)
        self._buffers: dict[int, torch.Tensor] = {}

    async def prepare(self) -> None:
        """Allocate and register all buffers. Raise TransportError if that fails."""
        for number in range(self.pool.size):
            self._buffers[number] = await self._make_buffer()

    async def take(self) -> tuple[BlockIds, torch.Tensor]:
        """Wait for a free buffer, and take it. Return (array with the buffer's number, buffer).

        After use, give the array back to `pool`. Raise TransportError if the buffer cannot be allocated or registered.
        """
        numbers = await self.pool.take(1)
        number = int(numbers[0])
        try:
            if number not in self._buffers:
                self._buffers[number] = await self._make_buffer()
        except BaseException:
            self.pool.give_back(numbers)
            raise
        return numbers, self._buffers[number]

    async def _make_buffer(self) -> torch.Tensor:
        """Allocate a buffer and register its memory with the transport. Return the buffer, a tensor of bytes."""
        allocate = partial(self.device.allocate, self.slot_bytes)
        try:
            made = allocate() if self.device.on_host else await self._copy_thread.run(allocate)
        except RuntimeError as error:
            raise TransportError(
                f"no {counted(self.slot_bytes, 'byte')} of scratch memory on {self.device.name}: {error}"
            ) from error
        span = Span(address=made.data_ptr(), size_bytes=self.slot_bytes)
        await self._transport.register([span], self.device.where, made, MemoryUse.READ_INTO)
        return made


class Permutation:
    """Copies blocks of one peer from scratch memory to their places in the local cache.

    One object is made for each pair of a peer and a layer set, because making the views of all regions takes long.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        layout: CacheLayout,
        block_map: BlockMap,
        whole_blocks: WholeBlocks,
        device: CacheDevice,
    ) -> None:
        self.whole_blocks = whole_blocks
        self._heads = block_map.heads.heads
        self._chunk_tokens = block_map.chunk_tokens
        self._device = device
        self._make_copy = scatter_on_host if device.on_host else scatter_on_device(device)
        remote_planes = block_map.remote_whole.planes
        together = layout.parts == tuple(remote_planes)
        self._halve = not together and tuple(remote_planes) == ("KV",)
        layers = list(cast(CacheTensors, kv_caches).values())
        parts = [
            part
            for ours, _ in block_map.layer_pairs
            for part in canonical_parts(layers[ours], layout, split_fused=not together)
        ]
        targets = chunk_targets(
            parts,
            chunk_tokens=self._chunk_tokens,
            head_start=block_map.heads.local_start,
            head_count=self._heads,
            as_bytes=device.on_host or device.as_bytes,
        )
        self._targets: Sequence[View] = [target.numpy() for target in targets] if device.on_host else targets

    def plan(self, chunks: Chunks, buffer: torch.Tensor, offset: int) -> tuple[Descriptors, Callable[[], None]]:
        """Plan to read the remote blocks of `chunks`, which are in prompt order, into `buffer`, from byte `offset` on.

        Return the descriptors of the read, and a function to call after the read, which copies the chunks from `buffer`
        to the cache.
        """
        starts = np.flatnonzero(np.concatenate(([True], np.diff(chunks.remote_ids) != 0)))
        size_bytes = len(starts) * self.whole_blocks.block_bytes
        memory = buffer[offset : offset + size_bytes]
        descriptors = self.whole_blocks.plan(chunks.remote_ids[starts], memory.data_ptr(), self._device.where)
        return descriptors, partial(self._permute, chunks, starts, memory)

    def _permute(self, chunks: Chunks, starts: BlockIds, memory: torch.Tensor) -> None:
        """Copy `chunks` from `memory`, which has whole remote blocks, to their local blocks, on the copy thread.

        `starts`: for each block in `memory`, the index of its first chunk in `chunks`.
        """
        whole = self.whole_blocks
        sources = chunk_sources(
            memory,
            rows=len(whole),
            chunks=len(starts),
            tokens=whole.tokens,
            heads=whole.heads,
            run_bytes=whole.run_bytes,
            memory_order=whole.memory_order,
        )[:, :, :, whole.first_head : whole.first_head + self._heads]
        per_block = whole.tokens // self._chunk_tokens
        sources = sources.view(*sources.shape[:2], per_block, self._chunk_tokens, *sources.shape[3:])
        views: View = sources.numpy() if self._device.on_host else sources
        local_chunks = np.zeros_like(chunks.local_ids) if chunks.local_chunks is None else chunks.local_chunks
        with self._device.copying():
            for blocks, inside, picked in self._stretches(chunks, starts):
                some = views[:, blocks, inside, : chunks.tokens]
                place = some.shape[1:3]
                ids, parts = chunks.local_ids[picked].reshape(place), local_chunks[picked].reshape(place)
                scatter_tokens(self._targets, self._split(some), ids, parts, self._make_copy)

    def _stretches(self, chunks: Chunks, starts: BlockIds) -> Iterator[tuple[slice, slice, slice]]:
        """Cut the blocks in scratch memory into stretches: runs of blocks in which the same chunk positions are needed.

        Yield three slices for each stretch: of the blocks, of the chunks within each block, and of `chunks`. Only the
        first and the last block may be needed in part, so there are few stretches.
        """
        counts = np.diff(starts, append=len(chunks))
        first_parts = np.zeros_like(starts) if chunks.remote_chunks is None else chunks.remote_chunks[starts]
        changes = np.flatnonzero((np.diff(counts) != 0) | (np.diff(first_parts) != 0)) + 1
        edges = [0, *changes.tolist(), len(starts)]
        for begin, end in itertools.pairwise(edges):
            count, part, first = int(counts[begin]), int(first_parts[begin]), int(starts[begin])
            yield slice(begin, end), slice(part, part + count), slice(first, first + count * (end - begin))

    def _split(self, sources: View) -> Sequence[View]:
        """Return one source view for each target view. `sources` has one view for each region of the peer.

        If the peer stores K and V in one region and this cache does not, split each view of `sources` into two views:
        one of K, the first half of each head, and one of V, the second half.
        """
        found = list(sources)
        if self._halve:
            half = self.whole_blocks.run_bytes // 2
            found = [part for row in sources for part in (row[..., :half], row[..., half:])]
        if self._device.on_host:
            return found
        return [source.view(target.dtype) for source, target in zip(found, self._targets, strict=True)]
