"""Lanes: a load that needs buffers, or has a growing lease, is cut into spans of the prompt.

A lane is read in prompt order. A span goes as far as the tokens that can be read when it is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks
from kvflow.runtime.load.flight import CopyGroup
from kvflow.runtime.memory import HostBlocks
from kvflow.runtime.peers.peer import Source


class SourcePart(NamedTuple):
    """The part of a load that is read from one set of a rank's layers."""

    source: Source
    block_map: BlockMap
    chunks: Sequence[Chunks]
    scratch_bytes: int = 0
    """Scratch memory that one of the rank's blocks takes; 0 if its blocks are read without scratch memory."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptSpan:
    """A stretch of one lane. It has whole blocks on both sides; the first and the last may be written only in part."""

    lane: Lane
    local_ids: BlockIds
    start_token: int
    stop_token: int

    @property
    def partly_written(self) -> list[int]:
        """Positions in `local_ids` of blocks that are written only in part, and keep the rest of their content."""
        read_tokens = self.lane.tokens
        ends = {0: self.start_token < read_tokens.start, -1: self.stop_token > read_tokens.stop}
        return sorted({at % len(self.local_ids) for at, partly in ends.items() if partly})

    def chunks_of(self, part: SourcePart) -> Iterator[Chunks]:
        """Yield the chunks of `part` that lie in the span."""
        size = part.block_map.chunk_tokens
        for some in part.chunks:
            yield some.between(self.start_token // size, -(-self.stop_token // size))


STOP_TOKEN = attrgetter("stop_token")
"""Key by which spans of several lanes are merged in prompt order."""


class Lane:
    """One group of layers, from one or several ranks, that is read in prompt order, span after span.

    A lane is cut into units. Where remote blocks are read whole, a unit is the larger of a local and a remote block;
    elsewhere it is a local block.
    """

    def __init__(
        self,
        parts: Sequence[SourcePart],
        staging: HostBlocks | None,
        local_ids: BlockIds,
        span_bytes_max: int,
        slot_bytes: int = 0,
    ) -> None:
        """Make a lane, of which nothing is taken yet.

        Args:
            parts: the parts of the lane that are read from each rank.
            staging: the group's host blocks; None without host staging.
            local_ids: local blocks; the last one holds the last token.
            span_bytes_max: most bytes of a span, so that one turn of the loop stays short.
            slot_bytes: size of a scratch buffer. The smallest span is a unit, and a second one for a tail. If that does
                not fit in a scratch buffer or in the host blocks, no remote block is read whole.
        """
        host_blocks = None if staging is None else staging.pool.size
        size = self._local_tokens = parts[0].block_map.local.block.tokens
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
        """Most tokens of a span."""
        self.tokens = range(
            min(some.first * part.block_map.chunk_tokens for part in parts for some in part.chunks),
            max(
                (some.first + len(some) - 1) * part.block_map.chunk_tokens + some.tokens
                for part in parts
                for some in part.chunks
            ),
        )
        """All tokens that are read."""
        self._end = -(-self.tokens.stop // size) * size
        """The token after the last local block that is written."""
        self._at = self.landed_upto = self.tokens.start // size * size
        """`_at`: first token that is not taken yet. `landed_upto`: first token that is not in the local blocks yet."""
        self._landed: dict[int, int] = {}
        """Spans that have landed beyond `landed_upto`: the first token of each, and the token after its last."""

    @property
    def done(self) -> bool:
        """True when all spans are taken."""
        return self._at >= self._end

    @property
    def straight(self) -> bool:
        """True if the whole lane is read straight into the cache."""
        return self.staging is None and not any(part.scratch_bytes for part in self.parts)

    @property
    def sources(self) -> list[Source]:
        return [part.source for part in self.parts]

    def size_bytes(self, tokens: int) -> int:
        """Return the bytes to read for a number of tokens."""
        return tokens * self._unit_bytes // self._unit

    def readable_bytes(self, there: int) -> int:
        """Return the bytes that may be read now and are not taken, if the first `there` tokens can be read."""
        return self.size_bytes(max(self._upto(there) - self._at, 0))

    def take(self, there: int) -> Iterator[PromptSpan]:
        """Take all spans that may be read now, if the first `there` tokens can be read. They count as taken at once."""
        return self._take(max(self._upto(there), self._at))

    def rest(self) -> Iterator[PromptSpan]:
        """Take all spans that are left."""
        return self._take(self._end)

    def note_landed(self, span: PromptSpan) -> None:
        """Note that the whole of `span` is in the local blocks."""
        self._landed[span.start_token] = span.stop_token
        while self.landed_upto in self._landed:
            self.landed_upto = self._landed.pop(self.landed_upto)

    def _upto(self, there: int) -> int:
        """Return how far to read if the first `there` tokens can be read: whole units, or all at the end."""
        return self._end if there >= self.tokens.stop else there // self._unit * self._unit

    def _take(self, stop: int) -> Iterator[PromptSpan]:
        start, self._at = self._at, stop
        return self._spans(start, stop)

    def _spans(self, start: int, stop: int) -> Iterator[PromptSpan]:
        """Yield the spans from token `start` to token `stop`, in prompt order."""
        size, step, first_block = self._local_tokens, self._step, self._end // self._local_tokens - len(self._local_ids)
        while start < stop:
            until = min((start // step + 1) * step, stop)
            ids = self._local_ids[start // size - first_block : until // size - first_block]
            yield PromptSpan(self, ids, start, until)
            start = until


def _unit_of(parts: Sequence[SourcePart], local_tokens: int) -> tuple[int, int]:
    """Return the tokens of a unit, and the scratch memory that a unit takes."""
    permuted = [(part.scratch_bytes, part.block_map.remote.block.tokens) for part in parts if part.scratch_bytes]
    unit = math.lcm(local_tokens, *(tokens for _, tokens in permuted))
    return unit, sum(size_bytes * (unit // tokens) for size_bytes, tokens in permuted)


class Spans(Protocol):
    """Cuts loads into lanes, and plans the reads of each span: straight into the cache, or through buffers."""

    def lanes(self, sources: Sequence[Source], tables: Sequence[BlockIds]) -> list[Lane]:
        """Return a lane for each group of layers and rank; one lane for several ranks if their bytes meet in a buffer.

        Args:
            sources: the ranks to read from.
            tables: the local blocks of each group.
        """
        ...

    async def group(self, one: PromptSpan) -> CopyGroup:
        """Take the buffers of one span when they are free, and plan its reads and its copy.

        Args:
            one: a span that was taken from its lane.
        """
        ...


def by_group(parts: Sequence[SourcePart]) -> list[tuple[int, list[SourcePart]]]:
    """Sort parts by the local group of layers that they fill. Return each group's index with its parts."""
    found: dict[int, list[SourcePart]] = {}
    for part in parts:
        found.setdefault(part.block_map.local_group, []).append(part)
    return sorted(found.items())


def by_source(parts: Sequence[SourcePart]) -> Iterable[list[SourcePart]]:
    """Sort parts by the rank that they are read from."""
    found: dict[Source, list[SourcePart]] = {}
    for part in parts:
        found.setdefault(part.source, []).append(part)
    return found.values()
