"""Span queues: the blocks of one group of layers, read span after span, for loads through buffers or of growing leases.

A span is a range of consecutive tokens of the prompt. Spans are taken in prompt order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import NamedTuple, Protocol, runtime_checkable

from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks
from kvflow.limits import Limits
from kvflow.runtime.load.flight import CopyGroup, Read, SealPieceOf
from kvflow.runtime.load.reads import reads_of_chunks
from kvflow.runtime.memory import HostBlocks
from kvflow.runtime.peers.peer import Source


class SourcePart(NamedTuple):
    """The chunks of tokens that one load reads from one layer set of one rank.

    A layer set is the layers of one group that have blocks of the same shape.
    """

    source: Source
    block_map: BlockMap
    chunks: Sequence[Chunks]
    scratch_bytes: int = 0
    """Bytes of scratch memory that one remote block takes; 0 if the blocks are read without scratch memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptSpan:
    """Consecutive local blocks of one group of layers, which a load fills in one step.

    They hold the tokens from position `start_token` to before `stop_token`. A load may fill its first and its last
    block only in part.
    """

    queue: SpanQueue
    local_ids: BlockIds
    start_token: int
    stop_token: int

    @property
    def partly_written(self) -> list[int]:
        """Indexes in `local_ids` of the blocks in which the load writes only some tokens and keeps the others."""
        read_tokens = self.queue.tokens
        ends = {0: self.start_token < read_tokens.start, -1: self.stop_token > read_tokens.stop}
        return sorted({at % len(self.local_ids) for at, partly in ends.items() if partly})

    def chunks_of(self, part: SourcePart) -> Iterator[Chunks]:
        """Yield the chunks of `part`, cut to the tokens of this span."""
        size = part.block_map.chunk_tokens
        for some in part.chunks:
            yield some.between(self.start_token // size, -(-self.stop_token // size))


STOP_TOKEN = attrgetter("stop_token")
"""Sort key of a span: the position after its last token. Merges the spans of several queues in prompt order."""


class SpanQueue:
    """The blocks of one group of layers, which a load reads in prompt order, span after span, from one rank or several.

    A span consists of whole units. A unit is a number of tokens: as many as a local block has or, if remote blocks are
    read whole, into scratch memory, the smallest number that fills whole local and whole remote blocks.
    """

    def __init__(
        self,
        parts: Sequence[SourcePart],
        staging: HostBlocks | None,
        local_ids: BlockIds,
        span_bytes_max: int,
        slot_bytes: int = 0,
    ) -> None:
        """Make a queue from which no span is taken yet.

        `parts`: chunks to read, by rank and layer set. `staging`: host blocks through which the group is read, if any.
        `local_ids`: the local blocks, in prompt order. `span_bytes_max`: maximum bytes of a span, so that one span does
        not occupy the event loop for long. `slot_bytes`: size of a scratch buffer. If a scratch buffer has no room for
        two units, or `staging` has no room for one unit, no remote block is read whole.
        """
        host_blocks = None if staging is None else staging.pool.size
        size = self._local_tokens = parts[0].block_map.local_tokens
        unit, scratch_bytes = _unit_of(parts, size)
        if 2 * scratch_bytes > slot_bytes or (host_blocks is not None and unit // size > host_blocks):
            parts = [part._replace(scratch_bytes=0) for part in parts]
            unit, scratch_bytes = _unit_of(parts, size)
        self.parts = parts
        self.staging = staging
        self._local_ids = local_ids
        self._unit = unit
        self._unit_bytes = sum(part.block_map.token_size_bytes for part in parts) * unit
        units = span_bytes_max // max(self._unit_bytes, scratch_bytes)
        if scratch_bytes:
            units = min(units, slot_bytes // scratch_bytes - 1)
        if host_blocks is not None:  # half: another span is copied meanwhile
            units = min(units, host_blocks // (2 * (unit // size)))
        self._step = max(units, 1) * unit
        """Largest number of tokens in a span."""
        self.tokens = range(
            min(some.first * part.block_map.chunk_tokens for part in parts for some in part.chunks),
            max(some.last * part.block_map.chunk_tokens + some.tokens for part in parts for some in part.chunks),
        )
        """Positions in the prompt of all tokens that the spans read."""
        self._end = -(-self.tokens.stop // size) * size
        """Position in the prompt after the end of the last local block with tokens to read."""
        first = parts[0].chunks[0]
        place = int((local_ids == first.local_ids[0]).argmax())
        self._first_block = first.first * parts[0].block_map.chunk_tokens // size - place
        """Number of the prompt's local blocks that precede `local_ids`."""
        self._next_token = self.landed_upto = self.tokens.start // size * size
        """Positions in the prompt. `_next_token`: start of the next span to take. `landed_upto`: all spans before this
        position have landed."""
        self._landed: dict[int, int] = {}
        """Spans that have landed although an earlier span has not: a dict of `stop_token`, keyed by `start_token`."""

    @property
    def done(self) -> bool:
        return self._next_token >= self._end

    @property
    def reads_directly(self) -> bool:
        """True if all spans are read straight into the cache."""
        return self.staging is None and not any(part.scratch_bytes for part in self.parts)

    @property
    def sources(self) -> list[Source]:
        return [part.source for part in self.parts]

    def size_bytes(self, tokens: int) -> int:
        """Return how many bytes are read for `tokens` tokens, from all ranks of the queue together."""
        return tokens * self._unit_bytes // self._unit

    def readable_bytes(self, readable_tokens: int) -> int:
        """Return the size in bytes of the spans that `take_spans(readable_tokens)` would take."""
        return self.size_bytes(max(self._span_stop(readable_tokens) - self._next_token, 0))

    def take_spans(self, readable_tokens: int) -> Iterator[PromptSpan]:
        """Take and return the next spans, up to the last whole unit within the first `readable_tokens` tokens.

        No span is returned twice.
        """
        return self._take_until(max(self._span_stop(readable_tokens), self._next_token))

    def take_rest(self) -> Iterator[PromptSpan]:
        """Take all spans that are left, and return them."""
        return self._take_until(self._end)

    def note_landed(self, span: PromptSpan) -> None:
        """Record that all tokens of `span` are in the local blocks."""
        self._landed[span.start_token] = span.stop_token
        while self.landed_upto in self._landed:
            self.landed_upto = self._landed.pop(self.landed_upto)

    def _span_stop(self, readable_tokens: int) -> int:
        """Return the end of the spans that may be taken when the first `readable_tokens` tokens are readable.

        That is the end of the last whole unit of readable tokens, or the end of the queue if all tokens of the queue
        are readable.
        """
        return self._end if readable_tokens >= self.tokens.stop else readable_tokens // self._unit * self._unit

    def _take_until(self, stop: int) -> Iterator[PromptSpan]:
        start, self._next_token = self._next_token, stop
        return self._spans(start, stop)

    def _spans(self, start: int, stop: int) -> Iterator[PromptSpan]:
        """Yield the spans from position `start` to before position `stop`, in prompt order."""
        size, step, first_block = self._local_tokens, self._step, self._first_block
        while start < stop:
            until = min((start // step + 1) * step, stop)
            ids = self._local_ids[start // size - first_block : until // size - first_block]
            yield PromptSpan(self, ids, start, until)
            start = until


def _unit_of(parts: Sequence[SourcePart], local_tokens: int) -> tuple[int, int]:
    """Return (tokens, bytes of scratch memory) of a unit, the smallest step of a `SpanQueue` over `parts`.

    `local_tokens`: number of tokens in a local block.
    """
    permuted = [(part.scratch_bytes, part.block_map.remote.block.tokens) for part in parts if part.scratch_bytes]
    unit = math.lcm(local_tokens, *(tokens for _, tokens in permuted))
    return unit, sum(size_bytes * (unit // tokens) for size_bytes, tokens in permuted)


@runtime_checkable
class SpanPlanner(Protocol):
    """Cuts a load into span queues, and plans the reads of each span: straight into the cache, or through buffers."""

    def span_queues(self, sources: Sequence[Source], tables: Sequence[BlockIds]) -> list[SpanQueue]:
        """Return the span queues of a load from `sources`: one for each pair of a local group of layers and a rank.

        Ranks that fill the same buffers share one queue for each group. `tables`: the local blocks of each group.
        """
        ...

    async def copy_group(self, span: PromptSpan, seal_piece_of: SealPieceOf | None = None) -> CopyGroup:
        """Wait for the buffers that `span` needs, take them, and return the reads and the copy of the span.

        With `seal_piece_of`, the first read from a rank also fetches the rank's seal.
        """
        ...


class DirectSpans(SpanPlanner):
    """Plans spans that are read straight into one registered cache, without buffers."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def span_queues(self, sources: Sequence[Source], tables: Sequence[BlockIds]) -> list[SpanQueue]:
        """Return a queue for each pair of a group of layers and a rank (`SpanPlanner.span_queues`)."""
        parts = [SourcePart(source, *item) for source in sources for item in source.chunks.items()]
        return [
            SpanQueue(some, None, tables[at], self._limits.slice_bytes_max)
            for at, of_group in parts_by_group(parts)
            for some in parts_by_source(of_group)
        ]

    async def copy_group(self, span: PromptSpan, seal_piece_of: SealPieceOf | None = None) -> CopyGroup:
        """Return the reads of `span` as a group without buffers and without a copy (`SpanPlanner.copy_group`)."""
        reads: list[Read] = []
        for part in span.queue.parts:
            chunks = {part.block_map: span.chunks_of(part)}
            reads += reads_of_chunks(self._limits, part.source, chunks, None if reads else seal_piece_of)
        return CopyGroup(reads)


def all_spans(queues: Sequence[SpanQueue]) -> Iterator[PromptSpan]:
    """Take and return all spans that are left in `queues`, in prompt order."""
    return merge(*(queue.take_rest() for queue in queues), key=STOP_TOKEN)


def parts_by_group(parts: Sequence[SourcePart]) -> list[tuple[int, list[SourcePart]]]:
    """Group `parts` by the local group of layers that they fill. Return (group index, parts), sorted by index."""
    found: dict[int, list[SourcePart]] = {}
    for part in parts:
        found.setdefault(part.block_map.local_group, []).append(part)
    return sorted(found.items())


def parts_by_source(parts: Sequence[SourcePart]) -> Iterable[list[SourcePart]]:
    """Group `parts` by the rank that they are read from. Return one list of parts for each rank."""
    found: dict[Source, list[SourcePart]] = {}
    for part in parts:
        found.setdefault(part.source, []).append(part)
    return found.values()
