"""How the bytes of a load get where they belong: straight, through scratch memory, or through host buffers.

Most loads are read straight into the cache. What cannot be is cut into groups of whole blocks of both sides, in prompt
order, and each group is a batch (`transfer.Batch`): it takes the buffers it needs, reads from every rank, and copies
when all reads have landed. While one batch is copied others are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvflow.config import Config
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Regions
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Piece, plan_slices
from kvflow.core.plan.whole_blocks import WholeBlocks, prefer_scratch
from kvflow.runtime.consumer.flight import CopyFailed, CopyGroup, Read, Stream
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.host_buffers import HostBuffers
from kvflow.runtime.memory.scratch import Permutation, Scratch, ScratchBuffer


@dataclass(frozen=True, slots=True)
class SourceRead:
    """What a load reads from one rank: where from, how, and the chunks with that rank's block ids."""

    stream: Stream
    block_map: BlockMap
    permutation: Permutation | None
    """How to get at it through scratch memory; None reads it straight."""
    chunks: tuple[Chunks, ...]


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

    def permutation(self, block_map: BlockMap | None, remote: Regions) -> Permutation | None:
        """How blocks of a peer are permuted, if they ever may be; to be made once per peer."""
        if block_map is None or block_map.opaque or self._config.scratch == "never":
            return None
        if len(block_map.groups(block_map.chunk_tokens)[0].local_offsets) == 1 and self._config.scratch == "auto":
            return None  # every block is one piece already
        caches, layout = self._kv_caches, self._layout
        if self._staging is not None:
            caches, layout = self._staging.caches, self._staging.layout
        whole_blocks = WholeBlocks(remote, block_map.heads, [theirs for _, theirs in block_map.places])
        return Permutation(caches, layout, block_map, whole_blocks, remote.parts)

    def batches(self, parts: Sequence[SourceRead], local_ids: BlockIds) -> AsyncGenerator[CopyGroup, None]:
        """Everything to read for a load into `local_ids`, in batches that take buffers when they are asked for."""
        parts = [part if self._scratch_pays(part) else _straightened(part) for part in parts]
        if self._staging is None and not any(part.permutation or part.stream.staged for part in parts):
            return _straight(_in_turn([self._slices(part, part.chunks, 0) for part in parts]))
        cut = Grouping(parts, self._staging)
        if not cut.fits(self._scratch.slot_bytes):
            parts = [_straightened(part) for part in parts]
            cut = Grouping(parts, self._staging)
        return self._grouped(parts, cut, local_ids)

    def _scratch_pays(self, part: SourceRead) -> bool:
        """Whether it is better to read a rank's blocks through scratch memory."""
        permutation = part.permutation
        if permutation is None:
            return False
        if self._config.scratch == "always":
            return True
        chunks = sum(map(len, part.chunks))
        remote_blocks = -(-chunks * part.block_map.chunk_tokens // permutation.whole_blocks.rows.tokens)
        batches = -(-remote_blocks * permutation.whole_blocks.block_bytes // self._scratch.slot_bytes)
        return prefer_scratch(
            part.block_map, permutation.whole_blocks, chunks=chunks, blocks=remote_blocks, batches=batches
        )

    def _slices(self, part: SourceRead, chunks: Sequence[Chunks], missing_max: int) -> Iterator[Read]:
        """Reads of one rank, straight to where their bytes belong."""
        seal = part.stream.seal
        head: Piece | None = seal.piece if seal.carried and part.stream.fetching is None else None
        for descriptors in plan_slices(
            part.block_map,
            chunks,
            bytes_max=self._config.limits.slice_bytes_max,
            descriptors_max=self._config.limits.slice_descriptors_max,
            head=head,
        ):
            yield Read(part.stream, descriptors, missing_max, head is not None)
            head = None

    async def _grouped(
        self, parts: Sequence[SourceRead], cut: Grouping, local_ids: BlockIds
    ) -> AsyncGenerator[CopyGroup, None]:
        """Batches of whole blocks of both sides."""
        units = cut.units(self._config.limits.slice_bytes_max, self._scratch.slot_bytes)
        for group in cut.groups(local_ids, units):
            yield await self._group(parts, group)

    async def _group(self, parts: Sequence[SourceRead], group: PromptSpan) -> CopyGroup:
        """Take the buffers of one group and say what to do with it. Gives them back if it is cancelled meanwhile."""
        jobs: list[Callable[[], None]] = []
        releases: list[Callable[[], None]] = []
        try:
            host_ids = await self._take_host_blocks(group, releases)
            slot: ScratchBuffer | None = None
            reads: list[Read] = []
            offset = 0
            for part in parts:
                chunks = [_moved(some, group.local_ids, host_ids) for some in group.chunks_of(part)]
                missing_max = group.missing_max(part)
                if part.permutation is None:
                    reads += self._slices(part, chunks, missing_max)
                    continue
                if slot is None:
                    slot = await self._scratch.take()
                    releases.append(partial(self._scratch.give_back, slot))
                for some in filter(len, chunks):
                    plan = part.permutation.plan(some, slot, offset)
                    reads.append(Read(part.stream, plan.descriptors, missing_max))
                    jobs.append(plan.permute)
                    offset += plan.size_bytes
        except BaseException:
            _run_all(releases)
            raise
        if host_ids is not None:
            assert self._staging is not None
            jobs.append(partial(self._staging.to_device, group.local_ids, host_ids))
        return CopyGroup(reads, partial(_run_all, jobs) if jobs else None, partial(_run_all, releases))

    async def _take_host_blocks(self, group: PromptSpan, releases: list[Callable[[], None]]) -> BlockIds | None:
        """Host blocks for a group; a block that is not filled to its end is fetched first, so that its rest stays."""
        if self._staging is None:
            return None
        host_ids = await self._staging.pool.take(len(group.local_ids))
        releases.append(partial(self._staging.pool.give_back, host_ids))
        if group.partly_filled:
            fetching = asyncio.ensure_future(
                self._copier.run(partial(self._staging.to_host, group.local_ids[-1:], host_ids[-1:]))
            )
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

    def chunks_of(self, part: SourceRead) -> Iterator[Chunks]:
        size = part.block_map.chunk_tokens
        for some in part.chunks:
            yield some.between(self.start_token // size, -(-self.stop_token // size))

    def missing_max(self, part: SourceRead) -> int:
        """How many of the lease's blocks may still be missing at a staged rank."""
        size = part.block_map.remote.block.tokens
        offered = -(-self.offered_tokens // size)
        return max(offered - -(-self.stop_token // size), 0)


class Grouping:
    """How a load is cut into groups: by units of the larger block where whole remote blocks are read, else by ours."""

    def __init__(self, parts: Sequence[SourceRead], staging: HostBuffers | None) -> None:
        self._local_tokens = parts[0].block_map.local.block.tokens
        remote_tokens = parts[0].block_map.remote.block.tokens
        self._unit = (
            max(self._local_tokens, remote_tokens) if any(part.permutation for part in parts) else self._local_tokens
        )
        self._host_blocks = None if staging is None else staging.pool.size
        self._last = max(
            (some.first + len(some) - 1) * part.block_map.chunk_tokens + some.tokens
            for part in parts
            for some in part.chunks
        )
        self._unit_bytes = sum(part.block_map.token_size_bytes for part in parts) * self._unit
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

    def groups(self, local_ids: BlockIds, units: int) -> Iterator[PromptSpan]:
        """Groups in prompt order; `local_ids` end with the block of the last token."""
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


def _straightened(part: SourceRead) -> SourceRead:
    """The same, not through scratch memory."""
    return part if part.permutation is None else replace(part, permutation=None)


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


async def _straight(reads: Iterator[Read]) -> AsyncGenerator[CopyGroup, None]:
    for read in reads:
        yield CopyGroup((read,))


def _in_turn(reads: Sequence[Iterator[Read]]) -> Iterator[Read]:
    """One read of each rank after the other, so that all of them are busy."""
    if len(reads) == 1:
        yield from reads[0]
        return
    waiting = list(reads)
    while waiting:
        for some in list(waiting):
            read = next(some, None)
            if read is None:
                waiting.remove(some)
            else:
                yield read
