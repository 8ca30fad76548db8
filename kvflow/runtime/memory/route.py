"""Routes: where the bytes of a load go. Straight, through scratch memory, or through host buffers.

Most loads are read straight into the cache. What cannot be is cut into spans of the prompt, whole blocks of both sides,
and each span is a copy group (`flight.CopyGroup`): it takes the buffers it needs, reads from every rank, and copies
when all reads have landed. While one group is copied others are read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvflow.config import Config
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Regions
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Piece, plan_slices
from kvflow.core.plan.whole_blocks import WholeBlocks, prefer_scratch
from kvflow.runtime.consumer.flight import CopyFailed, CopyGroup, Read, SourceRead
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.host_buffers import CopyDirection, HostBuffers
from kvflow.runtime.memory.scratch import Permutation, Scratch, ScratchBuffer


class _Part(NamedTuple):
    """What a load reads from one rank, and how to get at it through scratch memory; None reads it straight."""

    source: SourceRead
    permutation: Permutation | None


class Route:
    """Turns loads into batches for one cache, which is the engine's or, with host staging, the host buffers."""

    def __init__(
        self,
        config: Config,
        kv_caches: KVCaches,
        layout: CacheLayout,
        scratch: Scratch,
        staging: HostBuffers | None,
        copier: CopyThread,
    ) -> None:
        self._config = config
        self._kv_caches = kv_caches
        self._layout = layout
        self._scratch = scratch
        self._staging = staging
        self._copier = copier
        self._permutations: WeakKeyDictionary[BlockMap, Permutation | None] = WeakKeyDictionary()

    @property
    def buffers_used(self) -> int:
        """Host blocks and scratch buffers that are in use now."""
        return self._scratch.used + (self._staging.pool.used if self._staging else 0)

    def _permutation(self, source: SourceRead) -> Permutation | None:
        """How blocks of a peer are permuted, if they ever may be; made once per peer."""
        block_map = source.block_map
        if block_map not in self._permutations:
            self._permutations[block_map] = self._make_permutation(block_map, source.origin.connection.regions)
        return self._permutations[block_map]

    def _make_permutation(self, block_map: BlockMap, remote: Regions) -> Permutation | None:
        if block_map.opaque or self._config.scratch == "never":
            return None
        if len(block_map.groups[block_map.chunk_tokens][0].local_offsets) == 1 and self._config.scratch == "auto":
            return None  # every block is one piece already
        caches, layout = self._kv_caches, self._layout
        if self._staging is not None:
            caches, layout = self._staging.caches, self._staging.layout
        whole = WholeBlocks(remote, block_map.heads, [theirs for _, theirs in block_map.places])
        return Permutation(caches, layout, block_map, whole, remote.parts)

    def groups(self, sources: Sequence[SourceRead], local_ids: BlockIds) -> AsyncGenerator[CopyGroup, None]:
        """Everything to read for a load into `local_ids`, in groups that take buffers when they are asked for."""
        parts = []
        straight = self._staging is None
        for source in sources:
            permutation = self._permutation(source)
            if permutation is not None and not self._scratch_pays(source, permutation):
                permutation = None
            parts.append(_Part(source, permutation))
            straight = straight and permutation is None and not source.origin.connection.staged
        if straight:
            return self._straight(sources)
        grouping = Grouping(parts, self._staging)
        if not grouping.fits(self._scratch.slot_bytes):
            parts = [_Part(source, None) for source in sources]
            grouping = Grouping(parts, self._staging)
        return self._grouped(parts, grouping, local_ids)

    def _scratch_pays(self, source: SourceRead, permutation: Permutation) -> bool:
        """Whether it is better to read a rank's blocks through scratch memory."""
        if self._config.scratch == "always":
            return True
        block_map, whole = source.block_map, permutation.whole_blocks
        chunks = sum(map(len, source.chunks))
        remote_blocks = -(-chunks * block_map.chunk_tokens // whole.rows.tokens)
        batches = -(-remote_blocks * whole.block_bytes // self._scratch.slot_bytes)
        return prefer_scratch(block_map, whole, chunks=chunks, blocks=remote_blocks, batches=batches)

    def _slices(self, source: SourceRead, chunks: Sequence[Chunks], not_staged_max: int) -> Iterator[Read]:
        """Reads of one rank, straight to where their bytes belong."""
        carries_seal = source.origin.connection.carries_seals and not source.freshness.asked
        head: Piece | None = source.seal if carries_seal else None
        for descriptors in plan_slices(
            source.block_map,
            chunks,
            bytes_max=self._config.limits.slice_bytes_max,
            descriptors_max=self._config.limits.slice_descriptors_max,
            head=head,
        ):
            yield Read(source, descriptors, not_staged_max, head is not None)
            head = None

    async def _straight(self, sources: Sequence[SourceRead]) -> AsyncGenerator[CopyGroup, None]:
        """One read of each rank after the other, so that all of them are busy."""
        waiting: deque[Iterator[Read]] = deque()
        for source in sources:
            waiting.append(self._slices(source, source.chunks, 0))
        while waiting:
            reads = waiting.popleft()
            read = next(reads, None)
            if read is not None:
                waiting.append(reads)
                yield CopyGroup((read,))

    async def _grouped(
        self, parts: Sequence[_Part], grouping: Grouping, local_ids: BlockIds
    ) -> AsyncGenerator[CopyGroup, None]:
        """Groups of whole blocks of both sides."""
        units = grouping.units(self._config.limits.slice_bytes_max, self._scratch.slot_bytes)
        for span in grouping.spans(local_ids, units):
            yield await self._group(parts, span)

    async def _group(self, parts: Sequence[_Part], span: PromptSpan) -> CopyGroup:
        """Take the buffers of one group and say what to do with it. Gives them back if it is cancelled meanwhile."""
        jobs: list[Callable[[], None]] = []
        releases: list[Callable[[], None]] = []
        try:
            host_ids = await self._take_host_blocks(span, releases)
            slot: ScratchBuffer | None = None
            reads: list[Read] = []
            offset = 0
            for part in parts:
                chunks = [_moved(some, span.local_ids, host_ids) for some in span.chunks_of(part.source)]
                not_staged_max = span.not_staged_max(part.source)
                if part.permutation is None:
                    reads += self._slices(part.source, chunks, not_staged_max)
                    continue
                if slot is None:
                    slot = await self._scratch.take()
                    releases.append(partial(self._scratch.give_back, slot))
                for some in filter(len, chunks):
                    plan = part.permutation.plan(some, slot, offset)
                    reads.append(Read(part.source, plan.descriptors, not_staged_max))
                    jobs.append(plan.permute)
                    offset += plan.size_bytes
        except BaseException:
            _run_all(releases)
            raise
        if host_ids is not None:
            assert self._staging is not None
            jobs.append(partial(self._staging.copy, CopyDirection.TO_DEVICE, span.local_ids, host_ids))
        return CopyGroup(reads, partial(_run_all, jobs) if jobs else None, partial(_run_all, releases))

    async def _take_host_blocks(self, span: PromptSpan, releases: list[Callable[[], None]]) -> BlockIds | None:
        """Host blocks for a group; a block that is not filled to its end is fetched first, so that its rest stays."""
        if self._staging is None:
            return None
        host_ids = await self._staging.pool.take(len(span.local_ids))
        releases.append(partial(self._staging.pool.give_back, host_ids))
        if span.partly_filled:
            fetch = partial(self._staging.copy, CopyDirection.TO_HOST, span.local_ids[-1:], host_ids[-1:])
            fetching = asyncio.ensure_future(self._copier.run(fetch))
            try:
                await asyncio.shield(fetching)
            except asyncio.CancelledError:
                _give_back_after(fetching, releases.pop())
                raise
            except Exception as error:
                raise CopyFailed(str(error)) from error
        return host_ids


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A stretch of the prompt: whole blocks of both sides, the last one possibly partly filled."""

    local_ids: BlockIds
    start_token: int
    stop_token: int
    offered_tokens: int

    @property
    def partly_filled(self) -> bool:
        return self.stop_token > self.offered_tokens

    def chunks_of(self, source: SourceRead) -> Iterator[Chunks]:
        size = source.block_map.chunk_tokens
        for some in source.chunks:
            yield some.between(self.start_token // size, -(-self.stop_token // size))

    def not_staged_max(self, source: SourceRead) -> int:
        """How many of the lease's blocks a staged rank need not have staged yet."""
        size = source.block_map.remote.block.tokens
        offered = -(-self.offered_tokens // size)
        return max(offered - -(-self.stop_token // size), 0)


class Grouping:
    """How a load is cut into groups: by units of the larger block where whole remote blocks are read, else by ours."""

    def __init__(self, parts: Sequence[_Part], staging: HostBuffers | None) -> None:
        self._local_tokens = parts[0].source.block_map.local.block.tokens
        remote_tokens = parts[0].source.block_map.remote.block.tokens
        whole = any(part.permutation for part in parts)
        self._unit = max(self._local_tokens, remote_tokens) if whole else self._local_tokens
        self._host_blocks = None if staging is None else staging.pool.size
        self._last = max(
            (some.first + len(some) - 1) * part.source.block_map.chunk_tokens + some.tokens
            for part in parts
            for some in part.source.chunks
        )
        self._unit_bytes = sum(part.source.block_map.token_size_bytes for part in parts) * self._unit
        self.scratch_bytes = sum(
            part.permutation.whole_blocks.block_bytes * (self._unit // remote_tokens)
            for part in parts
            if part.permutation is not None
        )
        """Scratch memory that a unit takes."""

    @property
    def local_blocks(self) -> int:
        """Blocks of ours in a unit."""
        return self._unit // self._local_tokens

    def fits(self, slot_bytes: int) -> bool:
        """Whether the smallest group has room: scratch memory, where a tail takes a second unit, and host blocks."""
        host_blocks_do = self._host_blocks is None or self.local_blocks <= self._host_blocks
        return 2 * self.scratch_bytes <= slot_bytes and host_blocks_do

    def units(self, group_bytes: int, slot_bytes: int) -> int:
        """How many units make a group: not too large for one turn, the scratch buffer, and half the host buffers."""
        units = group_bytes // self._unit_bytes
        if self.scratch_bytes:
            units = min(units, slot_bytes // self.scratch_bytes - 1)
        if self._host_blocks is not None:
            units = min(units, self._host_blocks // (2 * self.local_blocks))
        return max(units, 1)

    def spans(self, local_ids: BlockIds, units: int) -> Iterator[PromptSpan]:
        """Spans in prompt order; `local_ids` end with the block of the last token."""
        blocks = -(-self._last // self._local_tokens)
        first_block = blocks - len(local_ids)
        step = units * self._unit
        start = first_block * self._local_tokens // step * step
        while start < self._last:
            stop = min(start + step, blocks * self._local_tokens)
            begin = max(start // self._local_tokens - first_block, 0)
            end = stop // self._local_tokens - first_block
            yield PromptSpan(local_ids[begin:end], start, stop, self._last)
            start += step


def _moved(chunks: Chunks, local_ids: BlockIds, host_ids: BlockIds | None) -> Chunks:
    """With the host blocks that stand for local ones."""
    if host_ids is None or not len(chunks):
        return chunks
    order = np.argsort(local_ids)
    place = order[np.searchsorted(local_ids, chunks.local_ids, sorter=order)]
    return chunks.to(host_ids[place])


def _give_back_after(copying: asyncio.Future[None], give_back: Callable[[], None]) -> None:
    """Nothing may use a buffer before the copy into it has ended, though nobody waits for it any more."""

    def end(done: asyncio.Future[None]) -> None:
        done.exception()  # seen: nobody is left whom it concerns
        give_back()

    copying.add_done_callback(end)


def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()
