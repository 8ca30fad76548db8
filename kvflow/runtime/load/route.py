"""Routes: the way of a load's bytes into the cache: straight, through scratch memory, or through host buffers.

Most loads are read straight into the cache. Other loads are cut into spans of the prompt, whole blocks of both sides.
Each span is a copy group (`reads.CopyGroup`): it takes the buffers it needs, reads from every rank, and copies when
all reads have landed. While one group is copied others are read.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from kvflow.config import Config
from kvflow.core.cache.groups import LayerSet
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Piece, alike
from kvflow.core.plan.slices import plan_slices
from kvflow.runtime.copy_thread import CopyThread, run_all
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.load.plan import Plan
from kvflow.runtime.load.reads import CopyFailed, CopyGroup, Read
from kvflow.runtime.memory import CopyDirection, HostBlocks
from kvflow.runtime.peers.peer import Connection, Source
from kvflow.runtime.pool import give_back_after
from kvflow.staging.lanes import Grouping, GroupSpan, Lane, PromptSpan, SourcePart, by_group, by_source
from kvflow.staging.scratch import Permutation, Scratch, ScratchBuffer
from kvflow.staging.whole_blocks import WholeBlocks, prefer_scratch

HeadOf: TypeAlias = Callable[[Source], Piece]
"""Address of a rank's seal, and our word for it: `Flight.head`."""


class Route:
    """Turns loads into batches for one cache, which is the engine's or, with host staging, the host buffers."""

    def __init__(
        self,
        config: Config,
        sets: Sequence[LayerSet],
        scratch: Scratch,
        staging: Sequence[HostBlocks],
        copier: CopyThread,
    ) -> None:
        """`sets`: layers that reads fill: the cache's or, with `staging`, those of the host blocks of each group."""
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
        """Permutation of a peer's blocks, if they ever may be permuted; made once per peer and set of layers."""
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

    def read(self, flight: Flight, load: Load, work: Work, plan: Plan) -> Awaitable[bool]:
        """Read all of a load whose blocks are there; see `Reader`."""
        for source in plan.sources:
            if not source.connection.straight and not self._goes_straight(source.connection):
                parts = self.parts(plan.sources)
                if self.needs_buffers(parts):
                    return flight.fly_groups(self.grouped(parts, work.tables, flight.head))
                break
        return flight.fly(self.straight(plan.sources, flight.head))

    def _goes_straight(self, connection: Connection) -> bool:
        """True if all that may be read from a rank goes straight into the cache: found once for each connection."""
        if connection.straight is None:
            through_scratch = (self._permutation(one) is not None for one in connection.block_maps)
            connection.straight = not self._staging and not any(through_scratch)
            if connection.straight and len(connection.block_maps) == 1 and connection.told_groups == ():
                connection.alike = alike(connection.block_maps[0])
        return connection.straight

    def parts(self, sources: Sequence[Source]) -> list[SourcePart]:
        """Parts that are read of each set of each rank's layers, and whether through scratch memory."""
        parts = []
        for source in sources:
            for block_map in source.connection.block_maps:
                chunks = [some for its_map, some in source.chunks if its_map is block_map]
                permutation = self._permutation(block_map)
                if permutation is not None and not self._scratch_pays(source, block_map, chunks, permutation):
                    permutation = None
                if chunks:
                    parts.append(SourcePart(source, block_map, chunks, permutation))
        return parts

    def needs_buffers(self, parts: Sequence[SourcePart]) -> bool:
        """True if some of it cannot be read straight into the cache."""
        return bool(self._staging) or any(part.permutation is not None for part in parts)

    def _scratch_pays(
        self, source: Source, block_map: BlockMap, chunks: Sequence[Chunks], permutation: Permutation
    ) -> bool:
        """True if it is better to read a rank's blocks through scratch memory."""
        if self._config.scratch == "always":
            return True
        whole, count = permutation.whole_blocks, sum(map(len, chunks))
        remote_blocks = -(-count * block_map.chunk_tokens // whole.rows.tokens)
        batches = -(-remote_blocks * whole.block_bytes // self._scratch.slot_bytes)
        near = source.lease.host in (self._config.advertise_host, self._config.listen_host)
        return prefer_scratch(block_map, whole, chunks=count, blocks=remote_blocks, batches=batches, near=near)

    def straight(self, sources: Sequence[Source], head_of: HeadOf | None) -> Iterator[Read]:
        """Reads straight into the cache, of one rank after the other, so that all of them are busy."""
        if len(sources) == 1:
            yield from self._slices(sources[0], sources[0].chunks, head_of)
            return
        waiting = deque(self._slices(source, source.chunks, head_of) for source in sources)
        while waiting:
            reads = waiting.popleft()
            read = next(reads, None)
            if read is not None:
                waiting.append(reads)
                yield read

    def _slices(
        self, source: Source, reads: Iterable[tuple[BlockMap, Chunks]], head_of: HeadOf | None = None
    ) -> Iterator[Read]:
        """Reads of one rank; the first one fetches its seal, too, if there is a `head_of` and nobody has seen it."""
        head = None
        if head_of is not None and source.connection.carries_seals and not source.proof.asked:
            head = head_of(source)
        for descriptors in plan_slices(
            reads,
            bytes_max=self._config.limits.slice_bytes_max,
            descriptors_max=self._config.limits.slice_descriptors_max,
            head=head,
        ):
            yield Read(source, descriptors, head is not None)
            head = None

    async def grouped(
        self, parts: Sequence[SourcePart], tables: Sequence[BlockIds], head_of: HeadOf
    ) -> AsyncGenerator[CopyGroup, None]:
        """Copy groups of all groups of layers, in prompt order. Each takes its buffers when it is asked for."""
        lanes = [self.lane(some, at, tables[at]) for at, some in by_group(parts)]
        for one in heapq.merge(*(lane.rest() for lane in lanes), key=GroupSpan.stop_token):
            yield await self.group(one, head_of)

    def lanes(self, parts: Sequence[SourcePart], tables: Sequence[BlockIds]) -> list[Lane]:
        """Each rank's part of each group of layers in a lane of its own, unless their bytes meet in a buffer."""
        lanes = []
        for at, of_group in by_group(parts):
            for some in [of_group] if self._staging else by_source(of_group):
                lanes.append(self.lane(some, at, tables[at]))
        return lanes

    def lane(self, parts: Sequence[SourcePart], at: int, local_ids: BlockIds) -> Lane:
        """The lane of group `at`, cut by whole remote blocks unless these have no room."""
        staging = self._staging[at] if self._staging else None
        grouping = Grouping(parts, staging)
        if not grouping.fits(self._scratch.slot_bytes):
            parts = [part._replace(permutation=None) for part in parts]
            grouping = Grouping(parts, staging)
        units = grouping.units(self._config.limits.slice_bytes_max, self._scratch.slot_bytes)
        return Lane(parts, staging, grouping, local_ids, units)

    async def group(self, one: GroupSpan, head_of: HeadOf | None = None) -> CopyGroup:
        """Take the buffers of one group and say what to do with it. Gives them back if it is cancelled meanwhile."""
        parts, span, staging = one.lane.parts, one.span, one.lane.staging
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
                    reads += self._slices(part.source, zip(repeat(part.block_map), chunks), head_of)
                    continue
                if slot is None:
                    slot = await self._scratch.take()
                    releases.append(partial(self._scratch.give_back, slot))
                for some in filter(len, chunks):
                    plan = part.permutation.plan(some, slot, offset)
                    reads.append(Read(part.source, plan.descriptors))
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
        self, span: PromptSpan, staging: HostBlocks | None, releases: list[Callable[[], None]]
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
                give_back_after(fetching, releases.pop())
                raise
            except Exception as error:
                raise CopyFailed(str(error)) from error
        return host_ids


def _moved(chunks: Chunks, local_ids: BlockIds, host_ids: BlockIds | None) -> Chunks:
    """Chunks with the host blocks that stand for local ones."""
    if host_ids is None or not len(chunks):
        return chunks
    order = np.argsort(local_ids)
    place = order[np.searchsorted(local_ids, chunks.local_ids, sorter=order)]
    return chunks.to(host_ids[place])
