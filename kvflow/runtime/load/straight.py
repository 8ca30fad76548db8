"""Readers: one is chosen for each load, once, from its sources and its request.

Most loads are read straight into the cache. Others go through the buffers of `kvflow.staging`, grow (`kvflow.growing`),
or are compared (`kvflow.verify`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Protocol

from kvflow.config import Config
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import Chunks, alike
from kvflow.core.plan.slices import plan_slices
from kvflow.parts import PARTS
from kvflow.runtime.load.flight import Flight, HeadOf, Read
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.load.plan import Plan
from kvflow.runtime.peers.peer import Connection, Source


class Reader(Protocol):
    """Way of a load's bytes into its blocks: straight, through buffers, as they are computed, or with a comparison."""

    def read(self, flight: Flight, load: Load, work: Work, plan: Plan) -> Awaitable[bool]:
        """Read all blocks of a plan.

        Args:
            flight: what the load has claimed; it posts the reads.
            load: the load, with its request.
            work: state of the load.
            plan: ranks and chunks to read.

        Returns:
            True if the leases have covered the whole read; see `Flight.fly`.
        """
        ...


class Straight:
    """Reads into the memory that loads fill: the engine's cache."""

    def __init__(self, config: Config, *, staged: bool) -> None:
        """`staged`: peers see host blocks, through which all goes."""
        self._config = config
        self._staged = staged
        self.scratch = config.scratch == "always" or (config.scratch == "auto" and "staging" in PARTS)
        """True if small pieces may be read through scratch memory."""

    def read(self, flight: Flight, load: Load, work: Work, plan: Plan) -> Awaitable[bool]:
        """Read all of a load whose blocks are there; see `Reader`."""
        return flight.fly(self.reads(plan.sources, flight.head))

    def takes(self, connection: Connection) -> bool:
        """Return whether all that may be read from a rank goes straight: found once for each connection."""
        if connection.straight is None:
            connection.straight = not self._staged and not any(map(self.in_pieces, connection.block_maps))
            if connection.straight and len(connection.block_maps) == 1 and connection.told_groups == ():
                connection.alike = alike(connection.block_maps[0])
        return connection.straight

    def in_pieces(self, block_map: BlockMap) -> bool:
        """Return whether it may be better to read a peer's blocks whole, through scratch memory, than in pieces."""
        if block_map.opaque or not self.scratch:
            return False
        pieces = len(block_map.groups(block_map.chunk_tokens)[0].local_offsets)
        return pieces > 1 or self._config.scratch == "always"

    def reads(self, sources: Sequence[Source], head_of: HeadOf | None) -> Iterator[Read]:
        """Reads straight into the cache, of one rank after the other, so that all of them are busy."""
        if len(sources) == 1:
            yield from self.slices(sources[0], sources[0].chunks, head_of)
            return
        waiting = deque(self.slices(source, source.chunks, head_of) for source in sources)
        while waiting:
            reads = waiting.popleft()
            read = next(reads, None)
            if read is not None:
                waiting.append(reads)
                yield read

    def slices(
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
