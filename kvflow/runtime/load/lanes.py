"""Lanes: a load that needs buffers, or whose lease grows, is cut into spans of the prompt.

A lane is read in prompt order. A span ends with the tokens that are there when it is taken.
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
    """Share of a load that is read of one set of a rank's layers."""

    source: Source
    block_map: BlockMap
    chunks: Sequence[Chunks]
    scratch_bytes: int = 0
    """Scratch memory that one of the rank's blocks takes; 0 if they are read straight."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptSpan:
    """A stretch of one lane: whole blocks of both sides, of which the first and the last may be written in part."""

    lane: Lane
    local_ids: BlockIds
    start_token: int
    stop_token: int

    @property
    def partly_written(self) -> list[int]:
        """Positions among `local_ids` of blocks that keep some of what they hold."""
        read_tokens = self.lane.tokens
        ends = {0: self.start_token < read_tokens.start, -1: self.stop_token > read_tokens.stop}
        return sorted({at % len(self.local_ids) for at, partly in ends.items() if partly})

    def chunks_of(self, part: SourcePart) -> Iterator[Chunks]:
        size = part.block_map.chunk_tokens
        for some in part.chunks:
            yield some.between(self.start_token // size, -(-self.stop_token // size))


STOP_TOKEN = attrgetter("stop_token")
"""Key by which spans of several lanes are merged in prompt order."""


class Lane:
    """One group of layers, of one rank or of several, read in prompt order, span after span.

    It is cut into units: the larger of both sides' blocks where whole remote blocks are read, else our blocks.
    """

    def __init__(
        self,
        parts: Sequence[SourcePart],
        staging: HostBlocks | None,
        local_ids: BlockIds,
        span_bytes_max: int,
        slot_bytes: int = 0,
    ) -> None:
        """Cut a lane.

        Args:
            parts: shares that are read of it from each rank.
            staging: the group's host blocks, if it has some.
            local_ids: local blocks, which end with the block of the last token.
            span_bytes_max: bytes of a span: not too many for one turn of the loop.
            slot_bytes: room of a scratch buffer. If the smallest span, where a tail takes a second unit, has no room
                in it or in host blocks, no remote block is read whole.
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
        if host_blocks is not None:  # half of them: another span is copied meanwhile
            units = min(units, host_blocks // (2 * (unit // size)))
        self._step = max(units, 1) * unit
        """Tokens of a span, at most."""
        self.tokens = range(
            min(some.first * part.block_map.chunk_tokens for part in parts for some in part.chunks),
            max(
                (some.first + len(some) - 1) * part.block_map.chunk_tokens + some.tokens
                for part in parts
                for some in part.chunks
            ),
        )
        """Tokens that are read in all."""
        self._end = -(-self.tokens.stop // size) * size
        """The token behind the last block that is written."""
        self._at = self.landed_upto = self.tokens.start // size * size
        """The first token that was not taken; and the first one that is not in our blocks yet."""
        self._landed: dict[int, int] = {}
        """Spans that have landed beyond that token: first token and the one behind the last."""

    @property
    def done(self) -> bool:
        """True once all spans were taken."""
        return self._at >= self._end

    @property
    def straight(self) -> bool:
        """True if all of it is read straight."""
        return self.staging is None and not any(part.scratch_bytes for part in self.parts)

    @property
    def sources(self) -> list[Source]:
        return [part.source for part in self.parts]

    def size_bytes(self, tokens: int) -> int:
        """Bytes to read for so many tokens."""
        return tokens * self._unit_bytes // self._unit

    def readable_bytes(self, there: int) -> int:
        """Bytes that may be read where so many tokens are there, and were not taken."""
        return self.size_bytes(max(self._upto(there) - self._at, 0))

    def take(self, there: int) -> Iterator[PromptSpan]:
        """Take what may be read where so many tokens are there: it counts as taken at once."""
        return self._take(max(self._upto(there), self._at))

    def rest(self) -> Iterator[PromptSpan]:
        """Spans that were not taken."""
        return self._take(self._end)

    def note_landed(self, span: PromptSpan) -> None:
        """Note that all of a span is in our blocks."""
        self._landed[span.start_token] = span.stop_token
        while self.landed_upto in self._landed:
            self.landed_upto = self._landed.pop(self.landed_upto)

    def _upto(self, there: int) -> int:
        """End of the readable tokens when so many are there: whole units, and all once all are there."""
        return self._end if there >= self.tokens.stop else there // self._unit * self._unit

    def _take(self, stop: int) -> Iterator[PromptSpan]:
        start, self._at = self._at, stop
        return self._spans(start, stop)

    def _spans(self, start: int, stop: int) -> Iterator[PromptSpan]:
        """Spans in prompt order, from one cut to another."""
        size, step, first_block = self._local_tokens, self._step, self._end // self._local_tokens - len(self._local_ids)
        while start < stop:
            until = min((start // step + 1) * step, stop)
            ids = self._local_ids[start // size - first_block : until // size - first_block]
            yield PromptSpan(self, ids, start, until)
            start = until


def _unit_of(parts: Sequence[SourcePart], local_tokens: int) -> tuple[int, int]:
    """Return the tokens of a unit, and the scratch memory that it takes."""
    permuted = [(part.scratch_bytes, part.block_map.remote.block.tokens) for part in parts if part.scratch_bytes]
    unit = math.lcm(local_tokens, *(tokens for _, tokens in permuted))
    return unit, sum(size_bytes * (unit // tokens) for size_bytes, tokens in permuted)


class Spans(Protocol):
    """Cuts loads into spans, and plans the reads of each: straight, or through buffers."""

    def lanes(self, sources: Sequence[Source], tables: Sequence[BlockIds]) -> list[Lane]:
        """Return a lane for each rank's part of each group of layers; one for all ranks whose bytes meet in a buffer.

        Args:
            sources: ranks that are read from.
            tables: local blocks by group.
        """
        ...

    async def group(self, one: PromptSpan) -> CopyGroup:
        """Take the buffers of one span, once they are free, and plan its reads and its copy.

        Args:
            one: a span that was taken of its lane.
        """
        ...


def by_group(parts: Sequence[SourcePart]) -> list[tuple[int, list[SourcePart]]]:
    """Parts by the group of layers that they fill: its number and its parts."""
    found: dict[int, list[SourcePart]] = {}
    for part in parts:
        found.setdefault(part.block_map.local_group, []).append(part)
    return sorted(found.items())


def by_source(parts: Sequence[SourcePart]) -> Iterable[list[SourcePart]]:
    """Parts by the rank that they are read from."""
    found: dict[Source, list[SourcePart]] = {}
    for part in parts:
        found.setdefault(part.source, []).append(part)
    return found.values()
