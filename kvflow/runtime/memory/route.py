"""Routes: where the bytes of a load go. Straight, through scratch memory, or through host buffers.

Most loads are read straight into the cache. What cannot be is cut into spans of the prompt, whole blocks of both sides,
and each span is a copy group (`flight.CopyGroup`): it takes the buffers it needs, reads from every rank, and copies
when all reads have landed. While one group is copied others are read.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import repeat
from weakref import WeakKeyDictionary

import numpy as np

from kvflow.config import Config
from kvflow.core.cache.groups import LayerSet
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, Piece, plan_slices
from kvflow.core.plan.whole_blocks import WholeBlocks, prefer_scratch
from kvflow.core.policy.history import History
from kvflow.runtime.consumer.flight import NOTHING_YET, CopyFailed, CopyGroup, Read, SourceRead
from kvflow.runtime.memory.copy_thread import CopyThread, run_all
from kvflow.runtime.memory.host_buffers import CopyDirection, HostBuffers
from kvflow.runtime.memory.lanes import (
    Frontier,
    Grouping,
    GroupSpan,
    Growth,
    Lane,
    Part,
    PromptSpan,
    by_group,
    by_source,
)
from kvflow.runtime.memory.scratch import Permutation, Scratch, ScratchBuffer


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
        self._growing_loads = 0
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
        self,
        sources: Sequence[SourceRead],
        tables: Sequence[BlockIds],
        num_tokens: int,
        tell: Callable[[int, int], None] | None = None,
        history: History | None = None,
    ) -> AsyncGenerator[CopyGroup, None]:
        """Everything to read for a load into these blocks of each group, in groups that take buffers when asked for.

        `num_tokens` is how many the leases have. What of them is still to come is read in the order in which it comes:
        `NOTHING_YET` stands where the next group has to wait for it, and `tell` is given how many tokens have landed,
        and of how many.
        """
        parts = []
        straight, grows = not self._staging, False
        for source in sources:
            grows = grows or source.freshness.grows
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
                    parts.append(Part(source, block_map, chunks, permutation))
        if grows:
            return self._growing(sources, parts, tables, num_tokens, tell, history, straight=straight)
        return self._straight(sources) if straight else self._grouped(parts, tables)

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

    def _slices(self, source: SourceRead, reads: Iterable[tuple[BlockMap, Chunks]]) -> Iterator[Read]:
        """Reads of one rank, straight to where their bytes belong."""
        carries_seal = source.origin.connection.carries_seals and not (source.freshness.asked or source.freshness.grows)
        head: Piece | None = source.seal if carries_seal else None
        for descriptors in plan_slices(
            reads,
            bytes_max=self._config.limits.slice_bytes_max,
            descriptors_max=self._config.limits.slice_descriptors_max,
            head=head,
        ):
            yield Read(source, descriptors, head is not None)
            head = None

    async def _straight(self, sources: Sequence[SourceRead]) -> AsyncGenerator[CopyGroup, None]:
        """One read of each rank after the other, so that all of them are busy."""
        waiting: deque[Iterator[Read]] = deque()
        for source in sources:
            waiting.append(self._slices(source, source.chunks))
        while waiting:
            reads = waiting.popleft()
            read = next(reads, None)
            if read is not None:
                waiting.append(reads)
                yield CopyGroup((read,))

    async def _grouped(self, parts: Sequence[Part], tables: Sequence[BlockIds]) -> AsyncGenerator[CopyGroup, None]:
        """All groups of layers side by side, in spans of whole blocks of both sides, in prompt order."""
        lanes = [self._lane(some, at, tables[at]) for at, some in by_group(parts)]
        for one in heapq.merge(*(lane.rest() for lane in lanes), key=GroupSpan.stop_token):
            yield await self._group(one)

    async def _growing(
        self,
        sources: Sequence[SourceRead],
        parts: Sequence[Part],
        tables: Sequence[BlockIds],
        num_tokens: int,
        tell: Callable[[int, int], None] | None,
        history: History | None,
        *,
        straight: bool,
    ) -> AsyncGenerator[CopyGroup, None]:
        """The same of leases that grow: what is there and worth a read, from each rank by itself where that may be.

        If all is there before any of it was read, and that goes `straight`, it is read as if they did not grow. The
        first such read is planned ahead, while the seals are looked at.
        """
        untouched = straight and all(source.known_tokens is None for source in sources)
        lanes = []
        for at, of_group in by_group(parts):
            for some in [of_group] if self._staging else by_source(of_group):
                lanes.append(self._lane(some, at, tables[at]))
        self._growing_loads += 1
        growth = Growth(num_tokens, self._config.limits.slice_bytes_max, self._growing_loads)
        frontier = None if tell is None else Frontier(lanes, tell, history)
        async with aclosing(self._straight(sources)) as whole:
            first = await anext(whole) if untouched else NOTHING_YET
            while lanes:
                if frontier is not None:
                    frontier.look()
                if untouched and all(source.there(num_tokens) >= num_tokens for source in sources):
                    yield first
                    async for group in whole:
                        yield group
                    return
                due = growth.due(lanes)
                untouched = untouched and not due
                for one in heapq.merge(*(lane.take(num_tokens) for lane in due), key=GroupSpan.stop_token):
                    group = await self._group(one)
                    yield group if frontier is None else group._replace(on_land=partial(frontier.note_landed, one))
                if not due:
                    yield NOTHING_YET
                lanes = [lane for lane in lanes if not lane.done]

    def _lane(self, parts: Sequence[Part], at: int, local_ids: BlockIds) -> Lane:
        """What is read into group `at`, cut by whole remote blocks unless these have no room."""
        staging = self._staging[at] if self._staging else None
        grouping = Grouping(parts, staging)
        if not grouping.fits(self._scratch.slot_bytes):
            parts = [part._replace(permutation=None) for part in parts]
            grouping = Grouping(parts, staging)
        units = grouping.units(self._config.limits.slice_bytes_max, self._scratch.slot_bytes)
        return Lane(parts, staging, grouping, local_ids, units)

    async def _group(self, one: GroupSpan) -> CopyGroup:
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
                    reads += self._slices(part.source, zip(repeat(part.block_map), chunks))
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
