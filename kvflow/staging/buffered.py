"""Loads through buffers: scratch memory, or host blocks that stand for blocks of a device.

A load is cut into spans of the prompt, each of whole local blocks and whole blocks of the peer. Each span becomes a
copy group (`flight.CopyGroup`): buffers are taken, the span's tokens are read from every rank, and then a copy fills
the local blocks. While one group is copied, others are read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from kvflow.core.cache.layout import CacheLayout
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks
from kvflow.growing.spans import PromptSpan, SourcePart, SpanQueue, all_spans, parts_by_group, parts_by_source
from kvflow.logs import logger_of
from kvflow.runtime.copy_thread import run_all
from kvflow.runtime.load.flight import CopyGroup, Flight, Read, SealPieceOf
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.plan import Plan
from kvflow.runtime.load.reads import may_use_scratch, reads_of_chunks
from kvflow.runtime.memory import CopyDirection, HostBlocks
from kvflow.runtime.optional import Staging
from kvflow.runtime.part import PartHost
from kvflow.runtime.peers.peer import Source
from kvflow.staging.copies import Tensor
from kvflow.staging.host_buffers import host_buffers
from kvflow.staging.scratch import Permutation, Scratch
from kvflow.staging.staged_lease import StagedLease
from kvflow.staging.whole_blocks import WholeBlocks, prefer_scratch
from kvflow.transport.base import TransportError

__all__ = ["BufferedLoads", "begin", "host_buffers"]

logger = logger_of(__name__)


def begin(host: PartHost) -> Staging:
    """Return the object that fills blocks of the registered cache of `host` through buffers."""
    return BufferedLoads(host)


class BufferedLoads:
    """Fills blocks of one registered cache through buffers. Also plans the spans of growing leases (`SpanPlanner`)."""

    def __init__(self, host: PartHost) -> None:
        config, memory = host.context.config, host.memory
        limits = config.limits
        self._config = config
        self._rank = host.context.rank
        self._read_directly = host.steps.read_directly
        self._memory = memory
        memory.views.add(self)
        self._served_layers = memory.served_layers
        self._staging = memory.staging
        self._copy_thread = host.resources.copy_thread
        self._scratch = Scratch(
            host.transport,
            memory.target_device,
            self._copy_thread,
            limits.scratch_slot_bytes_max,
            limits.scratch_slots_max,
        )
        memory.pools.append(self._scratch.pool)
        self._permutations: WeakKeyDictionary[BlockMap, Permutation] = WeakKeyDictionary()
        groups, bytes_max = host.context.local.groups, limits.slice_bytes_max
        self.lease_copies = partial(StagedLease, groups, memory.staging, bytes_max, self._copy_thread)

    async def prepare(self) -> None:
        """Allocate all scratch buffers. If that fails, later loads read small pieces of blocks one by one instead.

        With Config.scratch "always", raise TransportError on failure.
        """
        try:
            await self._scratch.prepare()
        except TransportError as error:
            if self._config.scratch == "always":
                raise
            self._memory.scratch = "never"
            who = self._config.engine_id, self._rank
            logger.warning("engine %r (%s): reads small pieces one by one: %s", *who, error)

    def read_buffered(self, load: Load, flight: Flight, plan: Plan) -> Awaitable[bool]:
        """Read a whole load, with all blocks computed, through buffers where these are needed.

        Return an awaitable of True if the leases covered the whole read, else False.
        """
        parts = self._parts(plan.sources)
        if self._staging or any(part.scratch_bytes for part in parts):
            return flight.read_groups(self._copy_groups(parts, load.tables, flight.seal_piece))
        return self._read_directly(load, flight, plan)

    def _parts(self, sources: Sequence[Source]) -> list[SourcePart]:
        """Return one `SourcePart` for each rank and each layer set (layers of equal shape) to read from that rank."""
        return [
            SourcePart(source, block_map, chunks, self._scratch_bytes(source, block_map, chunks))
            for source in sources
            for block_map, chunks in source.chunks.items()
        ]

    def _scratch_bytes(self, source: Source, block_map: BlockMap, chunks: Sequence[Chunks]) -> int:
        """Return how many bytes of scratch memory a remote block takes; 0 if reading without scratch is faster."""
        if not may_use_scratch(self._memory, block_map):
            return 0
        whole, count = self._permutation(block_map).whole_blocks, sum(map(len, chunks))
        if self._config.scratch == "always":
            return whole.block_bytes
        remote_blocks = -(-count * block_map.chunk_tokens // whole.tokens)
        batches = -(-remote_blocks * whole.block_bytes // self._scratch.slot_bytes)
        near = source.lease.host in (self._config.advertise_host, self._config.listen_host)
        pays = prefer_scratch(block_map, whole, chunks=count, blocks=remote_blocks, batches=batches, near=near)
        return whole.block_bytes if pays else 0

    def _permutation(self, block_map: BlockMap) -> Permutation:
        """Return the `Permutation` that copies a peer's blocks from scratch memory.

        The first call with a `block_map` makes the `Permutation`; later calls return the same one.
        """
        if block_map not in self._permutations:
            whole = WholeBlocks(
                block_map.remote_whole, block_map.heads, [theirs for _, theirs in block_map.layer_pairs]
            )
            _, caches, layout = self._served_layers[block_map.local_set]
            assert isinstance(layout, CacheLayout), "state is opaque"
            made = self._permutations[block_map] = Permutation(caches, layout, block_map, whole, self._scratch.device)
            self._memory.views.add(made)
        return self._permutations[block_map]

    async def _copy_groups(
        self, parts: Sequence[SourcePart], tables: Sequence[BlockIds], seal_piece_of: SealPieceOf
    ) -> AsyncGenerator[CopyGroup, None]:
        """Yield a `CopyGroup`, the reads and the copy of one span, for each span of a load, in prompt order.

        A span is a run of consecutive local blocks. Before a `CopyGroup` is yielded, wait for the buffers of its span.
        """
        queues = [self._span_queue(some, at, tables[at]) for at, some in parts_by_group(parts)]
        for one in all_spans(queues):
            yield await self.copy_group(one, seal_piece_of)

    def span_queues(self, sources: Sequence[Source], tables: Sequence[BlockIds]) -> list[SpanQueue]:
        """Return the queues of spans (runs of consecutive local blocks) to read from `sources`.

        `tables`: the local block ids to read into, by index of the local group of layers. With host staging there is
        one queue for each group of layers, else one queue for each pair of a group of layers and a rank.
        """
        queues = []
        for at, of_group in parts_by_group(self._parts(sources)):
            for some in [of_group] if self._staging else parts_by_source(of_group):
                queues.append(self._span_queue(some, at, tables[at]))
        return queues

    def _span_queue(self, parts: Sequence[SourcePart], at: int, local_ids: BlockIds) -> SpanQueue:
        """Return the queue of the spans that fill the blocks `local_ids` of the local group of layers at index `at`."""
        staging = self._staging[at] if self._staging else None
        return SpanQueue(parts, staging, local_ids, self._config.limits.slice_bytes_max, self._scratch.slot_bytes)

    async def copy_group(self, span: PromptSpan, seal_piece_of: SealPieceOf | None = None) -> CopyGroup:
        """Wait for the buffers that `span` needs, and take them. Return the `CopyGroup` of `span`: reads, then a copy.

        If cancelled, give back the buffers. `seal_piece_of`: function that returns where to read a rank's seal. If
        the function is given, the first read from each rank straight into the cache also fetches the rank's seal.
        """
        parts, staging = span.queue.parts, span.queue.staging
        jobs: list[Callable[[], None]] = []
        releases: list[Callable[[], None]] = []
        try:
            host_ids = await self._take_host_blocks(span, staging, releases)
            slot: Tensor | None = None
            reads: list[Read] = []
            offset = 0
            for part in parts:
                chunks = [_into_host_blocks(some, span.local_ids, host_ids) for some in span.chunks_of(part)]
                if not part.scratch_bytes:
                    reads += reads_of_chunks(self._config.limits, part.source, {part.block_map: chunks}, seal_piece_of)
                    continue
                if slot is None:
                    numbers, slot = await self._scratch.take()
                    releases.append(partial(self._scratch.pool.give_back, numbers))
                for some in filter(len, chunks):
                    descriptors, permute = self._permutation(part.block_map).plan(some, slot, offset)
                    reads.append(Read(part.source, descriptors))
                    jobs.append(permute)
                    offset += descriptors.size_bytes
        except BaseException:
            run_all(releases)
            raise
        if host_ids is not None:
            assert staging is not None
            jobs.append(partial(staging.copy, CopyDirection.TO_DEVICE, span.local_ids, host_ids))
        return CopyGroup(reads, partial(run_all, jobs) if jobs else None, partial(run_all, releases))

    async def _take_host_blocks(
        self, span: PromptSpan, staging: HostBlocks | None, releases: list[Callable[[], None]]
    ) -> BlockIds | None:
        """Wait for a host block for each local block of `span`.

        Return the host blocks' ids, or None without host staging. Append to `releases` a callback that gives the host
        blocks back. A block that the load writes only in part is first copied from the device to its host block, so
        that its other tokens are kept.
        """
        if staging is None:
            return None
        host_ids = await staging.pool.take(len(span.local_ids))
        give_back = partial(staging.pool.give_back, host_ids)
        if kept := span.partly_written:
            fetch = partial(staging.copy, CopyDirection.TO_HOST, span.local_ids[kept], host_ids[kept])
            await self._copy_thread.run_into_buffers(fetch, give_back)
        releases.append(give_back)
        return host_ids


def _into_host_blocks(chunks: Chunks, local_ids: BlockIds, host_ids: BlockIds | None) -> Chunks:
    """Return `chunks` with each local block `local_ids[i]` replaced by the host block `host_ids[i]`.

    If `host_ids` is None, return `chunks` unchanged.
    """
    if host_ids is None or not len(chunks):
        return chunks
    order = np.argsort(local_ids)
    place = order[np.searchsorted(local_ids, chunks.local_ids, sorter=order)]
    return chunks.with_local_ids(host_ids[place])
