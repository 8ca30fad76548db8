"""Blocks of a cache that is staged, on their way to a file and back: through the host buffers that peers read, too.

A span of blocks takes host blocks, as a load's does: it waits its turn for them, and gives them back when nothing can
touch them any more. So a save or restore of any size needs no more memory than there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from kvflow.core.cache.groups import GroupFacts
from kvflow.core.cache.regions import Regions
from kvflow.core.plan.descriptors import BlockIds, Descriptors
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.load.reads import CopyFailed, CopyGroup, Read
from kvflow.runtime.memory import CopyDirection, RankMemory
from kvflow.runtime.pool import give_back_after
from kvflow.storage.files import Direction
from kvflow.storage.moves import opened_file
from kvflow.verify import digests
from kvflow.verify.cache_digests import DigestedCache, Digesting, HeadSpan, TokenBlocks


class _Span(NamedTuple):
    """Blocks in a row of one group of a save or restore: from the one at `first` on."""

    group: int
    first: int
    ids: BlockIds


PlanSpan = Callable[[Sequence[BlockIds], Sequence[int]], Iterator[Descriptors]]
"""Plans the moves of host blocks by group, from those places on among the blocks of their group."""


class StagedBlocks:
    """The host buffers of a cache, as the store uses them."""

    def __init__(
        self,
        sets: Sequence[tuple[int, Regions]],
        layers: Sequence[Sequence[int]],
        groups: Sequence[GroupFacts],
        memory: RankMemory,
        digested: DigestedCache,
        copy_thread: CopyThread,
        span_bytes_max: int,
    ) -> None:
        """`sets` and `layers`: as those of a `StoredCache`, in host buffers."""
        self._sets = sets
        self._layers = layers
        self._groups = groups
        self._staging = memory.staging
        self._digested = digested
        self._copy_thread = copy_thread
        self._span_bytes_max = span_bytes_max

    async def moves(
        self, direction: Direction, tables: Sequence[BlockIds], plan: PlanSpan
    ) -> AsyncGenerator[CopyGroup, None]:
        """Moves of all blocks, span by span. Each takes its host blocks when it is asked for."""
        file = opened_file()
        for span in self._spans(tables):
            buffers = self._staging[span.group]
            if direction is Direction.SAVE:
                host_ids, copy = await self._fetched(span), None
            else:
                host_ids = await buffers.pool.take(len(span.ids))
                copy = partial(buffers.copy, CopyDirection.TO_DEVICE, span.ids, host_ids)
            empty = host_ids[:0]
            here = [host_ids if at == span.group else empty for at in range(len(self._groups))]
            firsts = [span.first if at == span.group else 0 for at in range(len(self._groups))]
            reads = [Read(file, descriptors) for descriptors in plan(here, firsts)]
            yield CopyGroup(reads, copy, partial(buffers.pool.give_back, host_ids))

    async def digests(self, tables: Sequence[BlockIds]) -> list[int]:
        """Return digests of each layer of each set, of what the device holds now. Cancelling stops the waiting only."""
        sums = [[0] * len(layers) for layers in self._layers]
        async for span, host_ids in self._all_fetched(tables):
            size = self._groups[span.group].block_size
            blocks = TokenBlocks(host_ids, size, span.first * size, (span.first + len(host_ids)) * size)
            places = [at for at, (group, _) in enumerate(self._sets) if group == span.group]
            asked = [
                Digesting(at, self._layers[at], HeadSpan(0, self._sets[at][1].block.heads, 0), blocks) for at in places
            ]
            found = iter(await self._digested.digests(asked))
            for at in places:
                sums[at] = [digests.added(before, next(found)) for before in sums[at]]
        used = [at for at, (group, _) in enumerate(self._sets) if len(tables[group])]
        return [number for at in used for number in sums[at]]

    def _spans(self, tables: Sequence[BlockIds]) -> Iterator[_Span]:
        for group, (ids, buffers) in enumerate(zip(tables, self._staging, strict=True)):
            step = max(min(self._span_bytes_max // buffers.block_size_bytes, buffers.pool.size), 1)
            for first in range(0, len(ids), step):
                yield _Span(group, first, ids[first : first + step])

    async def _all_fetched(self, tables: Sequence[BlockIds]) -> AsyncIterator[tuple[_Span, BlockIds]]:
        """All spans in host blocks, which are given back when the next one is asked for."""
        for span in self._spans(tables):
            host_ids = await self._fetched(span)
            try:
                yield span, host_ids
            finally:
                self._staging[span.group].pool.give_back(host_ids)

    async def _fetched(self, span: _Span) -> BlockIds:
        """Copy a span to host blocks, which are the caller's. Raises CopyFailed."""
        buffers = self._staging[span.group]
        host_ids = await buffers.pool.take(len(span.ids))
        give_back = partial(buffers.pool.give_back, host_ids)
        copy = partial(buffers.copy, CopyDirection.TO_HOST, span.ids, host_ids)
        copying = asyncio.ensure_future(self._copy_thread.run(copy))
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            give_back_after(copying, give_back)
            raise
        except Exception as error:
            give_back()
            raise CopyFailed(str(error)) from error
        return host_ids
