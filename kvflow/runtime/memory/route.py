"""Routes: where the bytes of a load go. Straight, through scratch memory, or through host buffers.

Most loads are read straight into the cache. What cannot be is cut into spans of the prompt, whole blocks of both sides,
and each span is a copy group (`flight.CopyGroup`): it takes the buffers it needs, reads from every rank, and copies
when all reads have landed. While one group is copied others are read.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvflow.config import Config
from kvflow.core.cache.groups import LayerSet
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Piece, plan_slices
from kvflow.core.plan.whole_blocks import WholeBlocks, prefer_scratch
from kvflow.runtime.consumer.flight import CopyFailed, CopyGroup, Read, SourceRead
from kvflow.runtime.memory.copy_thread import CopyThread, run_all
from kvflow.runtime.memory.host_buffers import CopyDirection, HostBuffers
from kvflow.runtime.memory.scratch import Permutation, Scratch, ScratchBuffer


class _Part(NamedTuple):
    """What a load reads of one set of a rank's layers, and how it gets there through scratch memory; None: straight."""

    source: SourceRead
    block_map: BlockMap
    chunks: Sequence[Chunks]
    permutation: Permutation | None


class Route:
    """Turns loads into batches for one cache, which is the engine's or, with host staging, the host buffers."""

    def __init__(
        self,
        config: Config,
        sets: Sequence[LayerSet],
        scratch: Scratch,
        staging: Sequence[HostBuffers],
        copier: CopyThread,
    ) -> None:
        """`sets` are where loads go: the cache's own or, with `staging`, those of the host blocks of each group."""
        self._config = config
        self._sets = sets
        self._scratch = scratch
        self._staging = staging
        self._copier = copier
        self._permutations: WeakKeyDictionary[BlockMap, Permutation | None] = WeakKeyDictionary()

    @property
    def buffers_used(self) -> int:
        """Host blocks and scratch buffers that are in use now."""
        return self._scratch.used + sum(buffers.pool.used for buffers in self._staging)

    def _permutation(self, block_map: BlockMap) -> Permutation | None:
        """How blocks of a peer are permuted, if they ever may be; made once per peer and set of layers."""
        if block_map not in self._permutations:
            self._permutations[block_map] = self._make_permutation(block_map)
        return self._permutations[block_map]

    def _make_permutation(self, block_map: BlockMap) -> Permutation | None:
        if block_map.opaque or self._config.scratch == "never" or not self._scratch.slot_bytes:
            return None
        if len(block_map.groups[block_map.chunk_tokens][0].local_offsets) == 1 and self._config.scratch == "auto":
            return None  # every block is one piece already
        remote = block_map.remote_whole
        whole = WholeBlocks(remote, block_map.heads, [theirs for _, theirs in block_map.places])
        _, caches, layout = self._sets[block_map.local_set]
        assert isinstance(layout, CacheLayout), "state is opaque"
        return Permutation(caches, layout, block_map, whole, self._scratch.device)

    def groups(
        self, sources: Sequence[SourceRead], tables: Sequence[BlockIds], num_tokens: int
    ) -> AsyncGenerator[CopyGroup, None]:
        """Everything to read for a load into these blocks of each group, in groups that take buffers when asked for.

        `num_tokens` is how many the leases have. What of them is still to come is read in the order in which it comes.
        """
        parts = []
        straight = not self._staging
        for source in sources:
            straight = straight and not source.origin.connection.staged and not source.origin.lease.pending
            for block_map in source.origin.connection.block_maps:
                chunks = []
                for its_map, some in source.chunks:
                    if its_map is block_map:
                        chunks.append(some)
                permutation = self._permutation(block_map)
                if permutation is not None and not self._scratch_pays(source, block_map, chunks, permutation):
                    permutation = None
                straight = straight and permutation is None
                if chunks:
                    parts.append(_Part(source, block_map, chunks, permutation))
        return self._straight(sources) if straight else self._grouped(parts, tables, num_tokens)

    def _scratch_pays(
        self, source: SourceRead, block_map: BlockMap, chunks: Sequence[Chunks], permutation: Permutation
    ) -> bool:
        """Whether it is better to read a rank's blocks through scratch memory."""
        if self._config.scratch == "always":
            return True
        whole, count = permutation.whole_blocks, sum(map(len, chunks))
        remote_blocks = -(-count * block_map.chunk_tokens // whole.rows.tokens)
        batches = -(-remote_blocks * whole.block_bytes // self._scratch.slot_bytes)
        near = source.origin.lease.host in (self._config.advertise_host, self._config.listen_host)
        return prefer_scratch(block_map, whole, chunks=count, blocks=remote_blocks, batches=batches, near=near)

    def _slices(self, source: SourceRead, reads: Iterable[tuple[BlockMap, Chunks]], missing_max: int) -> Iterator[Read]:
        """Reads of one rank, straight to where their bytes belong."""
        carries_seal = source.origin.connection.carries_seals and not source.freshness.asked
        head: Piece | None = source.seal if carries_seal else None
        for descriptors in plan_slices(
            reads,
            bytes_max=self._config.limits.slice_bytes_max,
            descriptors_max=self._config.limits.slice_descriptors_max,
            head=head,
        ):
            yield Read(source, descriptors, missing_max, head is not None)
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
        self, parts: Sequence[_Part], tables: Sequence[BlockIds], num_tokens: int
    ) -> AsyncGenerator[CopyGroup, None]:
        """All groups of layers side by side, in spans of whole blocks of both sides, as their tokens come."""
        spans: list[Iterator[_GroupSpan]] = []
        for at, local_ids in enumerate(tables):
            of_group = [part for part in parts if part.block_map.local_group == at]
            if not of_group:
                continue
            staging = self._staging[at] if self._staging else None
            grouping = Grouping(of_group, staging)
            if not grouping.fits(self._scratch.slot_bytes):
                of_group = [part._replace(permutation=None) for part in of_group]
                grouping = Grouping(of_group, staging)
            units = grouping.units(self._config.limits.slice_bytes_max, self._scratch.slot_bytes)
            spans.append(map(_GroupSpan, repeat(of_group), grouping.spans(local_ids, units), repeat(staging)))
        for one in heapq.merge(*spans, key=_GroupSpan.stop_token):
            yield await self._group(one, max(num_tokens - one.span.stop_token, 0))

    async def _group(self, one: _GroupSpan, missing_max: int) -> CopyGroup:
        """Take the buffers of one group and say what to do with it. Gives them back if it is cancelled meanwhile."""
        parts, span, staging = one
        jobs: list[Callable[[], None]] = []
        releases: list[Callable[[], None]] = []
        try:
            host_ids = await self._take_host_blocks(span, staging, releases)
            slot: ScratchBuffer | None = None
            reads: list[Read] = []
            offset = 0
            for part in parts:
                chunks = [_moved(some, span.local_ids, host_ids) for some in span.chunks_of(part)]
                if part.permutation is None:
                    reads += self._slices(part.source, zip(repeat(part.block_map), chunks), missing_max)
                    continue
                if slot is None:
                    slot = await self._scratch.take()
                    releases.append(partial(self._scratch.give_back, slot))
                for some in filter(len, chunks):
                    plan = part.permutation.plan(some, slot, offset)
                    reads.append(Read(part.source, plan.descriptors, missing_max))
                    jobs.append(plan.permute)
                    offset += plan.size_bytes
        except BaseException:
            run_all(releases)
            raise
        if host_ids is not None:
            assert staging is not None
            jobs.append(partial(staging.copy, CopyDirection.TO_DEVICE, span.local_ids, host_ids))
        return CopyGroup(reads, partial(run_all, jobs) if jobs else None, partial(run_all, releases))

    async def _take_host_blocks(
        self, span: PromptSpan, staging: HostBuffers | None, releases: list[Callable[[], None]]
    ) -> BlockIds | None:
        """Host blocks for a group; a block that is written in part only is fetched first, so that its rest stays."""
        if staging is None:
            return None
        host_ids = await staging.pool.take(len(span.local_ids))
        releases.append(partial(staging.pool.give_back, host_ids))
        if kept := span.partly_written:
            fetch = partial(staging.copy, CopyDirection.TO_HOST, span.local_ids[kept], host_ids[kept])
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
    """A stretch of the prompt: whole blocks of both sides, of which the first and the last may be written in part."""

    local_ids: BlockIds
    start_token: int
    stop_token: int
    read_tokens: range
    """The tokens of the whole load: all of the prompt that is offered, or the end of it."""

    @property
    def partly_written(self) -> list[int]:
        """Positions among `local_ids` of blocks that keep some of what they hold."""
        ends = {0: self.start_token < self.read_tokens.start, -1: self.stop_token > self.read_tokens.stop}
        return sorted({at % len(self.local_ids) for at, partly in ends.items() if partly})

    def chunks_of(self, part: _Part) -> Iterator[Chunks]:
        size = part.block_map.chunk_tokens
        for some in part.chunks:
            yield some.between(self.start_token // size, -(-self.stop_token // size))


class _GroupSpan(NamedTuple):
    """A span of one group of layers: what is read of it from each rank, and the group's host blocks, if it has some."""

    parts: Sequence[_Part]
    span: PromptSpan
    staging: HostBuffers | None

    def stop_token(self) -> int:
        return self.span.stop_token


class Grouping:
    """How a load of one group of layers is cut: by units of the larger block where whole remote blocks are read, else
    by ours.
    """

    def __init__(self, parts: Sequence[_Part], staging: HostBuffers | None) -> None:
        self._local_tokens = parts[0].block_map.local.block.tokens
        permuted = [part for part in parts if part.permutation is not None]
        self._unit = math.lcm(self._local_tokens, *(part.block_map.remote.block.tokens for part in permuted))
        self._host_blocks = None if staging is None else staging.pool.size
        self._first = min(some.first * part.block_map.chunk_tokens for part in parts for some in part.chunks)
        self._last = max(
            (some.first + len(some) - 1) * part.block_map.chunk_tokens + some.tokens
            for part in parts
            for some in part.chunks
        )
        self._unit_bytes = sum(part.block_map.token_size_bytes for part in parts) * self._unit
        self.scratch_bytes = sum(
            part.permutation.whole_blocks.block_bytes * (self._unit // part.block_map.remote.block.tokens)
            for part in permuted
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
        size, step = self._local_tokens, units * self._unit
        first_block = -(-self._last // size) - len(local_ids)
        begin, end = self._first // size * size, -(-self._last // size) * size
        for start in range(begin // step * step, end, step):
            span_start, stop = max(start, begin), min(start + step, end)
            ids = local_ids[span_start // size - first_block : stop // size - first_block]
            yield PromptSpan(ids, span_start, stop, range(self._first, self._last))


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
