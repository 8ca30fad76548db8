"""Lanes: a load that needs buffers, or whose lease grows, is cut into spans of the prompt.

A lane is read in prompt order. A span ends with the tokens that are there when it is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple, Protocol

from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks
from kvflow.runtime.load.reads import CopyGroup
from kvflow.runtime.memory import HostBlocks
from kvflow.runtime.peers.peer import Source


class SourcePart(NamedTuple):
    """Share of a load that is read of one set of a rank's layers."""

    source: Source
    block_map: BlockMap
    chunks: Sequence[Chunks]
    scratch_bytes: int = 0
    """Scratch memory that one of the rank's blocks takes; 0 if they are read straight."""


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

    def chunks_of(self, part: SourcePart) -> Iterator[Chunks]:
        size = part.block_map.chunk_tokens
        for some in part.chunks:
            yield some.between(self.start_token // size, -(-self.stop_token // size))


class GroupSpan(NamedTuple):
    """A span of one lane."""

    lane: Lane
    span: PromptSpan

    def stop_token(self) -> int:
        return self.span.stop_token


class Grouping:
    """Units in which one group of layers of a load is cut: the larger of both sides' blocks where whole remote blocks
    are read, else our blocks.
    """

    def __init__(self, parts: Sequence[SourcePart], staging: HostBlocks | None) -> None:
        self._local_tokens = parts[0].block_map.local.block.tokens
        permuted = [part for part in parts if part.scratch_bytes]
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
            part.scratch_bytes * (self._unit // part.block_map.remote.block.tokens) for part in permuted
        )
        """Scratch memory that a unit takes."""

    @property
    def local_blocks(self) -> int:
        """Blocks of ours in a unit."""
        return self._unit // self._local_tokens

    def fits(self, slot_bytes: int) -> bool:
        """True if the smallest span has room in host blocks and scratch memory, where a tail takes a second unit."""
        host_blocks_do = self._host_blocks is None or self.local_blocks <= self._host_blocks
        return 2 * self.scratch_bytes <= slot_bytes and host_blocks_do

    def units(self, group_bytes: int, slot_bytes: int) -> int:
        """Units of a span: not too many for one turn of the loop, the scratch buffer, and half the host buffers."""
        units = group_bytes // max(self._unit_bytes, self.scratch_bytes)
        if self.scratch_bytes:
            units = min(units, slot_bytes // self.scratch_bytes - 1)
        if self._host_blocks is not None:
            units = min(units, self._host_blocks // (2 * self.local_blocks))
        return max(units, 1)

    @property
    def begin(self) -> int:
        """The first token of the first block that is written."""
        return self._first // self._local_tokens * self._local_tokens

    @property
    def end(self) -> int:
        """The token behind the last block that is written."""
        return -(-self._last // self._local_tokens) * self._local_tokens

    @property
    def tokens(self) -> range:
        """Tokens that are read."""
        return range(self._first, self._last)

    def upto(self, there: int) -> int:
        """End of the readable tokens when so many are there: whole units, and all once all are there."""
        return self.end if there >= self._last else there // self._unit * self._unit

    def size_bytes(self, tokens: int) -> int:
        """Bytes to read for so many tokens."""
        return tokens * self._unit_bytes // self._unit

    def spans(self, local_ids: BlockIds, units: int, start: int, stop: int) -> Iterator[PromptSpan]:
        """Spans in prompt order, from one cut to another; `local_ids` end with the block of the last token."""
        size, step = self._local_tokens, units * self._unit
        first_block = self.end // size - len(local_ids)
        while start < stop:
            until = min((start // step + 1) * step, stop)
            ids = local_ids[start // size - first_block : until // size - first_block]
            yield PromptSpan(ids, start, until, range(self._first, self._last))
            start = until


class Lane:
    """One group of layers, of one rank or of several, read in prompt order, span after span."""

    def __init__(
        self,
        parts: Sequence[SourcePart],
        staging: HostBlocks | None,
        grouping: Grouping,
        local_ids: BlockIds,
        units: int,
    ) -> None:
        """`units`: of a span, at most."""
        self.parts = parts
        """Shares that are read of it from each rank."""
        self.staging = staging
        """The group's host blocks, if it has some."""
        self.landed_upto = grouping.begin
        """The first token that is not in our blocks yet."""
        self._landed: dict[int, int] = {}
        """Spans that have landed beyond that token: first token and the one behind the last."""
        self._grouping = grouping
        self._local_ids = local_ids
        self._units = units
        self._at = grouping.begin

    @property
    def done(self) -> bool:
        """True once all spans were taken."""
        return self._at >= self._grouping.end

    @property
    def straight(self) -> bool:
        """True if all of it is read straight."""
        return self.staging is None and not any(part.scratch_bytes for part in self.parts)

    @property
    def sources(self) -> list[Source]:
        return [part.source for part in self.parts]

    @property
    def tokens(self) -> range:
        """Tokens that are read in all."""
        return self._grouping.tokens

    def size_bytes(self, tokens: int) -> int:
        """Bytes to read for so many tokens."""
        return self._grouping.size_bytes(tokens)

    def readable_bytes(self, there: int) -> int:
        """Bytes that may be read where so many tokens are there, and were not taken."""
        return self._grouping.size_bytes(max(self._grouping.upto(there) - self._at, 0))

    def take(self, there: int) -> Iterator[GroupSpan]:
        """Take what may be read where so many tokens are there: it counts as taken at once."""
        return self._take(max(self._grouping.upto(there), self._at))

    def rest(self) -> Iterator[GroupSpan]:
        """Spans that were not taken."""
        return self._take(self._grouping.end)

    def _take(self, stop: int) -> Iterator[GroupSpan]:
        start, self._at = self._at, stop
        return map(GroupSpan, repeat(self), self._grouping.spans(self._local_ids, self._units, start, stop))

    def note_landed(self, span: PromptSpan) -> None:
        """Note that all of a span is in our blocks."""
        self._landed[span.start_token] = span.stop_token
        while self.landed_upto in self._landed:
            self.landed_upto = self._landed.pop(self.landed_upto)


class Spans(Protocol):
    """Cuts loads into spans, and plans the reads of each: straight, or through buffers."""

    def lanes(self, sources: Sequence[Source], tables: Sequence[BlockIds]) -> list[Lane]:
        """Return a lane for each rank's part of each group of layers; one for all ranks whose bytes meet in a buffer.

        Args:
            sources: ranks that are read from.
            tables: local blocks by group.
        """
        ...

    async def group(self, one: GroupSpan) -> CopyGroup:
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
