"""The reads of a load, cut to the limits of one read: straight into the cache, from one rank or several in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import Chunks
from kvflow.core.plan.slices import plan_slices
from kvflow.limits import Limits
from kvflow.runtime.load.flight import Read, SealPieceOf
from kvflow.runtime.memory import RankMemory
from kvflow.runtime.peers.peer import Source


def may_use_scratch(memory: RankMemory, block_map: BlockMap) -> bool:
    """Return whether a peer's blocks may be read into scratch memory first, and then copied into the cache.

    True if a block would otherwise be read in several pieces, or if Config.scratch is "always". False if scratch memory
    is off, or if the bytes of the blocks are not plain values (`BlockMap.opaque`).
    """
    if block_map.opaque or memory.scratch == "never":
        return False
    pieces = len(block_map.region_maps(block_map.chunk_tokens)[0].local_offsets)
    return pieces > 1 or memory.scratch == "always"


def direct_reads(limits: Limits, sources: Sequence[Source], seal_piece_of: SealPieceOf | None) -> Iterator[Read]:
    """Yield the reads of all `sources`, taking one from each rank in turn, so that all ranks are busy.

    With `seal_piece_of`, the first read from each rank also fetches the rank's seal, if one read can fetch both
    (`Connection.carries_seals`) and no fetch of the seal was posted before.
    """
    if len(sources) == 1:
        yield from reads_of_chunks(limits, sources[0], sources[0].chunks, seal_piece_of)
        return
    waiting = deque(reads_of_chunks(limits, source, source.chunks, seal_piece_of) for source in sources)
    while waiting:
        reads = waiting.popleft()
        read = next(reads, None)
        if read is not None:
            waiting.append(reads)
            yield read


def reads_of_chunks(
    limits: Limits,
    source: Source,
    chunks: Mapping[BlockMap, Iterable[Chunks]],
    seal_piece_of: SealPieceOf | None = None,
) -> Iterator[Read]:
    """Yield the reads of `chunks` from the rank `source`.

    Each read has at most Limits.slice_bytes_max bytes and Limits.slice_descriptors_max descriptors. With
    `seal_piece_of`, the first read also fetches the rank's seal, if one read can fetch both
    (`Connection.carries_seals`) and no fetch of the seal was posted before.
    """
    seal = None
    if seal_piece_of is not None and source.connection.carries_seals and not source.proof.fetch_posted:
        seal = seal_piece_of(source)
    reads = ((block_map, some) for block_map, found in chunks.items() for some in found)
    for descriptors in plan_slices(
        reads, bytes_max=limits.slice_bytes_max, descriptors_max=limits.slice_descriptors_max, last=seal
    ):
        yield Read(source, descriptors, seal is not None)
        seal = None
