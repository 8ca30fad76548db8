"""Digests of a load that is read straight into the cache, computed span by span while later spans are read.

The digest of a layer is a sum over tokens, so the digests of the spans of a load add up to the digest of the load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

from kvflow.core.plan.block_map import BlockMap
from kvflow.growing.spans import DirectSpans, PromptSpan, SpanQueue, all_spans
from kvflow.limits import Limits
from kvflow.runtime.load.flight import CopyGroup, Flight, SealPieceOf
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.plan import Plan
from kvflow.runtime.peers.peer import Source
from kvflow.verify.cache_digests import DigestedCache, DigestSpec
from kvflow.verify.digests import add_digests


class LandedDigests:
    """Reads one load straight into the cache, and digests each span of its blocks once that span has landed."""

    def __init__(
        self,
        limits: Limits,
        local_cache: DigestedCache,
        specs: Mapping[Source, Mapping[BlockMap, DigestSpec]],
    ) -> None:
        """Make the object; nothing is read yet.

        Args:
            limits: the limits of one read.
            local_cache: computes digests of the blocks of the registered cache.
            specs: by source and block map, the local layers, heads and blocks that the load fills.
        """
        self._spans = DirectSpans(limits)
        self._local_cache = local_cache
        self._specs = specs
        self._digesting = list[asyncio.Task[None]]()
        self._closed = False
        self._sums = {
            (source, block_map): [0] * len(spec.layers)
            for source, of_source in specs.items()
            for block_map, spec in of_source.items()
        }
        """Sums of the digests of all digested spans, one for each layer of each spec."""

    async def read(self, load: Load, flight: Flight, plan: Plan) -> bool:
        """Read all spans of a load. Return True if the leases covered the whole read (`Flight.read_groups`)."""
        queues = self._spans.span_queues(plan.sources, load.tables)
        return await flight.read_groups(self._copy_groups(queues, flight.seal_piece))

    async def digests(self, source: Source) -> list[int]:
        """Wait until all landed spans are digested. Return the digests of what was read from `source`.

        The list has one digest for each layer of each of the source's specs, in that order. Raises any error of the
        computation.
        """
        await asyncio.gather(*self._digesting)
        return [digest for block_map in self._specs[source] for digest in self._sums[source, block_map]]

    async def aclose(self) -> None:
        """Stop computing digests. Spans that land later are not digested."""
        self._closed = True
        for task in self._digesting:
            task.cancel()
        await asyncio.gather(*self._digesting, return_exceptions=True)

    async def _copy_groups(
        self, queues: Sequence[SpanQueue], seal_piece_of: SealPieceOf
    ) -> AsyncGenerator[CopyGroup, None]:
        """Yield the reads of each span, in prompt order. The span is digested when these reads have landed."""
        for span in all_spans(queues):
            group = await self._spans.copy_group(span, seal_piece_of)
            yield group._replace(on_land=partial(self._span_landed, span))

    def _span_landed(self, span: PromptSpan, _now_s: float, _begun_s: float) -> None:
        if not self._closed:
            self._digesting.append(asyncio.create_task(self._digest(span), name="kvflow-digest-span"))

    async def _digest(self, span: PromptSpan) -> None:
        """Digest the blocks of `span`, and add the results to `_sums`.

        Task `kvflow-digest-span`: one for each span that has landed. It ends when the span is digested, at the latest
        with the load. If it fails, the load is not verified.
        """
        asked, sums = list[DigestSpec](), list[list[int]]()
        for part in span.queue.parts:
            spec = self._specs[part.source][part.block_map]
            start, stop = max(span.start_token, spec.tokens.start), min(span.stop_token, spec.tokens.stop)
            if start < stop:
                asked.append(spec._replace(block_ids=span.local_ids, tokens=range(start, stop)))
                sums.append(self._sums[part.source, part.block_map])
        found = iter(await self._local_cache.digests(asked))
        for of_part in sums:
            of_part[:] = map(add_digests, of_part, found)  # takes as many digests of `found` as the part has layers
