"""The memory that the store copies to and from files: the KV cache or, if the KV cache is on a device, host buffers.

A save or restore is cut into spans of consecutive blocks. Each span waits for free host blocks, and gives them back
when no copy can touch them. So a save or restore of any size works with host buffers of any size.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kvflow.core.cache.groups import named_layers
from kvflow.core.cache.regions import HOST, device_of
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import ConfigError
from kvflow.runtime.load.flight import CopyGroup, Read
from kvflow.runtime.memory import CopyDirection
from kvflow.runtime.part import PartHost
from kvflow.storage.entry import fingerprint_of
from kvflow.storage.placing import BlockSpan, plan_file
from kvflow.storage.store_thread import Direction
from kvflow.storage.store_transfer import StoreTransfer, file_source
from kvflow.verify import digests
from kvflow.verify.cache_digests import DigestedCache, DigestSpec


class StoredCache:
    """A registered KV cache, as the store uses it: plans copies of blocks to and from files, and computes digests."""

    def __init__(self, host: PartHost) -> None:
        """Find the memory of the cache that can be copied to files. Raise ConfigError if its blocks cannot be saved."""
        local, memory = host.context.local, host.memory
        where = device_of(named_layers(memory.own_layers))
        through = where != HOST  # a cache on the host needs no host buffers, even if peers read through them
        if through and not memory.staging:
            raise ConfigError(
                f"storage: blocks are saved from host memory, the cache is on {where.kind!r}: set staging='always'"
            )
        saved, device = (memory.served_layers, memory.target_device) if through else (memory.own_layers, memory.device)
        self._digested_cache = DigestedCache(saved, host.resources.copy_thread, device)
        memory.views.update((self, self._digested_cache))
        if problem := self._digested_cache.problem:
            raise ConfigError(f"storage: blocks cannot be saved without digests: {problem}")
        self._copy_thread = host.resources.copy_thread
        self._limits = host.context.config.limits
        self._staging = memory.staging if through else ()
        self.groups = local.groups
        self.tensors = named_layers(saved)
        """The memory that is copied to and from files: pairs of a layer's name and its tensors."""
        saved_regions = [(layers.group, layers.regions) for layers in saved]
        self.layer_sets = [(group, regions.distinct) for group, regions in saved_regions]
        """For each layer set the index of its group, and its regions. A region of several layers is listed once."""
        self._digested_layers = [regions.distinct_layers for _, regions in saved_regions]
        """For each layer set the indices of the layers to digest. Of layers with the same memory only the first is
        listed.
        """
        shapes = [(group, len(regions), regions.planes, tuple(regions.block)) for group, regions in saved_regions]
        shared = [regions.first_at_address for _, regions in saved_regions if len(regions.distinct) < len(regions)]
        facts = [local.compatibility, local.cache_shares, local.groups, shapes, *shared]
        self._cache_fingerprint = fingerprint_of(facts)
        self._weights = host.context.weights

    @property
    def fingerprint(self) -> bytes:
        """Hash of the facts that describe the model and layout of the cache, and the weights, if they have a version.

        So entries of other weights are not found. A transfer takes it once, at its beginning.
        """
        version = self._weights.version
        return fingerprint_of((self._cache_fingerprint, version)) if version else self._cache_fingerprint

    async def moves(self, transfer: StoreTransfer, fd: int, start: int) -> AsyncGenerator[CopyGroup, None]:
        """Yield all copies of a transfer to or from its file, as `CopyGroup`s, which `transfer.flight` starts.

        With host buffers each `CopyGroup` copies one span of consecutive blocks, and host blocks for the span are taken
        just before the `CopyGroup` is yielded. `fd`: file descriptor. `start`: offset in bytes of the file's first
        block.
        """
        file, copy_to_host = file_source(), transfer.direction is Direction.SAVE
        counts = [len(ids) for ids in transfer.tables]
        for span in self._spans(transfer.tables):
            memory_ids, release = await self._take_host_blocks(span, copy_to_host=copy_to_host)
            slices = plan_file(
                self.layer_sets,
                counts,
                span._replace(ids=memory_ids),
                fd=fd,
                start=start,
                bytes_max=self._limits.slice_bytes_max,
                descriptors_max=self._limits.slice_descriptors_max,
            )
            reads = (Read(file, descriptors) for descriptors in slices)
            if release is None:
                for read in reads:
                    yield CopyGroup([read])
            else:
                copy = partial(self._staging[span.group].copy, CopyDirection.TO_DEVICE, span.ids, memory_ids)
                yield CopyGroup([*reads], None if copy_to_host else copy, release)

    async def digests(self, tables: Sequence[BlockIds]) -> bytes:
        """Return the digests of the blocks in `tables` (block ids by group): 8 bytes, little-endian, for each layer.

        The digests are in the order of layer sets and layers; layer sets without blocks are left out. All bytes of the
        blocks count, even after the prompt's end. Raise CopyFailed if a copy from the device failed. If cancelled, stop
        waiting; the computation under way goes on.
        """
        sums = [[0] * len(layers) for layers in self._digested_layers]
        for span in self._spans(tables):
            size = self.groups[span.group].block_size
            memory_ids, release = await self._take_host_blocks(span, copy_to_host=True)
            try:
                tokens = range(span.first * size, (span.first + len(memory_ids)) * size)
                places = [at for at, (group, _) in enumerate(self.layer_sets) if group == span.group]
                heads = [range(regions.block.heads) for _, regions in self.layer_sets]
                asked = [
                    DigestSpec(at, self._digested_layers[at], heads[at], 0, memory_ids, size, tokens) for at in places
                ]
                found = iter(await self._digested_cache.digests(asked))
            finally:
                if release is not None:
                    release()
            for at in places:
                sums[at] = [digests.add_digests(before, next(found)) for before in sums[at]]
        used = [numbers for (group, _), numbers in zip(self.layer_sets, sums, strict=True) if len(tables[group])]
        return np.array([number for numbers in used for number in numbers], dtype="<u8").tobytes()

    def _spans(self, tables: Sequence[BlockIds]) -> Iterator[BlockSpan]:
        """Yield spans of consecutive blocks that are copied or digested together, for all blocks in `tables`.

        A span is a whole group or, with host buffers, at most as many blocks as fit in the buffers and in one slice.
        """
        for group, ids in enumerate(tables):
            step = len(ids)
            if self._staging:
                buffers = self._staging[group]
                step = max(min(self._limits.slice_bytes_max // buffers.block_size_bytes, buffers.pool.size), 1)
            for first in range(0, len(ids), step or 1):
                yield BlockSpan(group, first, ids[first : first + step])

    async def _take_host_blocks(
        self, span: BlockSpan, *, copy_to_host: bool
    ) -> tuple[BlockIds, Callable[[], None] | None]:
        """Wait for free host blocks for a span.

        Return the host blocks' ids, and a function that gives these blocks back. If `copy_to_host`, first copy the
        blocks from the device to the host blocks; raise CopyFailed if that fails. For a KV cache on the host, return
        the block ids of the span, and None.
        """
        if not self._staging:
            return span.ids, None
        buffers = self._staging[span.group]
        host_ids = await buffers.pool.take(len(span.ids))
        give_back = partial(buffers.pool.give_back, host_ids)
        if copy_to_host:
            copy = partial(buffers.copy, CopyDirection.TO_HOST, span.ids, host_ids)
            await self._copy_thread.run_into_buffers(copy, give_back)
        return host_ids, give_back
