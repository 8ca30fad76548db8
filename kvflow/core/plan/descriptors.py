"""Once per load: from block ids to descriptors, which bytes to read from where to where, as numpy arrays.

`match_chunks` finds out which chunk of tokens of their blocks belongs where in ours, whatever the two block sizes are
and however far the last block is filled. `plan_slices` multiplies the chunks with the region pairs that `block_map`
found for the peer, slice by slice, and joins what is contiguous on both sides. A block id is checked before it becomes
an address (invariant I8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow import checks
from kvflow.checks import whole_numbers
from kvflow.core.cache.regions import Device, UInt64Array
from kvflow.core.plan.block_map import BlockMap, Int64Array, RegionMap
from kvflow.errors import RequestError

BlockIds: TypeAlias = Int64Array
GivenBlockIds: TypeAlias = "Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]"
"""Block ids of a request: a list, or one for each group of layers, in order or by the groups' names."""

_PLANNED_AT_ONCE = 1 << 13  # descriptors; a slice alone costs some 15 us, and many more are out of the cache


_MANY = 1 << 10  # block ids, from which on array operations are faster
_FEW = 1 << 5  # chunks, up to which they are slower


@dataclass(slots=True)
class Descriptors:
    """Reads to make: `sizes[i]` bytes from `remote[i]` on the peer to `local[i]` here; `size_bytes` in all.

    `table` has the shape (2, n, 3): for the local and the remote side a row (address, size, device index) per read.
    That is what NIXL takes, so nothing is copied on the way. Each side is one kind of memory. Nobody changes one; it
    is not frozen because making a frozen one takes three times as long, and each slice is one.
    """

    table: UInt64Array
    size_bytes: int
    local_device: Device
    remote_device: Device

    @classmethod
    def of(
        cls,
        *,
        local: npt.ArrayLike,
        remote: npt.ArrayLike,
        sizes: npt.ArrayLike,
        local_device: Device,
        remote_device: Device,
    ) -> Descriptors:
        """From columns."""
        length = np.asarray(sizes, dtype=np.uint64)
        table = np.empty((2, len(length), 3), dtype=np.uint64)
        table[0, :, 0], table[1, :, 0], table[:, :, 1] = local, remote, length
        table[0, :, 2], table[1, :, 2] = local_device.number, remote_device.number
        return cls(table=table, size_bytes=int(length.sum()), local_device=local_device, remote_device=remote_device)

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def local(self) -> UInt64Array:
        """Local addresses."""
        return self.table[0, :, 0]

    @property
    def remote(self) -> UInt64Array:
        """Remote addresses."""
        return self.table[1, :, 0]

    @property
    def sizes(self) -> UInt64Array:
        """Lengths in bytes."""
        return self.table[0, :, 1]

    def join(self, other: Descriptors) -> Descriptors:
        return replace(
            self,
            table=np.concatenate((self.table, other.table), axis=1),
            size_bytes=self.size_bytes + other.size_bytes,
        )

    def part(self, start: int, stop: int, size_bytes: int) -> Descriptors:
        """Those from `start` to `stop`, which are so many bytes."""
        return Descriptors(self.table[:, start:stop], size_bytes, self.local_device, self.remote_device)


class Piece(NamedTuple):
    """One piece to read: addresses and bytes."""

    local: int
    remote: int
    size_bytes: int


def check_block_ids(block_ids: Sequence[int], *, num_blocks: int, what: str) -> BlockIds:
    """Turn block ids into an array; RequestError names the first that is no integer, out of range or repeated."""
    if type(block_ids) in (list, tuple) and len(block_ids) > num_blocks:  # before each is looked at
        raise RequestError(f"{what}: {len(block_ids)} block ids, but there are {num_blocks} blocks")
    if type(block_ids) in (list, tuple) and set(map(type, block_ids)) <= {int}:
        if not block_ids:
            return np.empty(0, dtype=np.int64)
        if len(block_ids) >= _MANY:
            return _many_ids(block_ids, num_blocks, what)
        # By built-ins: on a load's critical path, with cold caches, they beat array operations.
        if min(block_ids) >= 0 and max(block_ids) < num_blocks and len(set(block_ids)) == len(block_ids):
            return np.array(block_ids, dtype=np.int64)
    return _judge_block_ids(block_ids, num_blocks, what)


def _many_ids(block_ids: Sequence[int], num_blocks: int, what: str) -> BlockIds:
    try:
        ids = np.array(block_ids, dtype=np.int64)
    except OverflowError:
        return _judge_block_ids(block_ids, num_blocks, what)
    if ids.min() >= 0 and ids.max() < num_blocks:
        seen = np.zeros(num_blocks, dtype=bool)
        seen[ids] = True
        if np.count_nonzero(seen) == len(ids):
            return ids
    return _judge_block_ids(ids, num_blocks, what)


def count_block_ids(given: object, most: int, what: str = "block_ids") -> int:
    """How many block ids a request has. RequestError if that cannot be told, or there are more than `most`."""
    if isinstance(given, Mapping):
        tables = list(checks.mapping(given, what).values())
    else:
        listed = given if isinstance(given, tuple | list) else ()
        tables = list(listed) if listed and isinstance(listed[0], tuple | list | np.ndarray) else [given]
    count = 0
    for ids in tables:
        count += checks.count(ids, what, most=most - count)
    return count


def counted_block_ids(given: object, what: str, *, most: int) -> object:
    """Block ids as they were given, if there are no more than `most`."""
    count_block_ids(given, most, what)
    return given


def given_block_ids(tables: Sequence[Sequence[int]]) -> Sequence[int] | Sequence[Sequence[int]]:
    """Block ids by group as requests take them: those of one group are a plain list."""
    return tables[0] if len(tables) == 1 else tables


def _judge_block_ids(block_ids: Sequence[int] | BlockIds, num_blocks: int, what: str) -> BlockIds:
    ids = whole_numbers(block_ids, what)
    outside = (ids < 0) | (ids >= num_blocks)
    if outside.any():
        raise RequestError(f"{what}: block id {ids[outside][0]} is not in 0..{num_blocks - 1}")
    ordered = np.sort(ids)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise RequestError(f"{what}: block id {repeated[0]} is given twice")
    return ids


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunk i goes from part `remote_parts[i]` of block `remote_ids[i]` to part `local_parts[i]` of `local_ids[i]`.

    A part counts chunks inside a block; None stands for parts that are all 0, as with equal block sizes. As
    `match_chunks` makes them, `remote_ids` are positions among the offered blocks, the same for all ranks of an
    engine; `locate` puts one rank's blocks in.
    """

    local_ids: BlockIds
    local_parts: Int64Array | None
    remote_ids: BlockIds
    remote_parts: Int64Array | None
    tokens: int
    """How many tokens of each chunk to read."""
    first: int = 0
    """Which chunk of the prompt chunk 0 is, as `match_chunks` makes them: in prompt order."""

    def __len__(self) -> int:
        return len(self.local_ids)

    def select(self, index: slice | Int64Array) -> Chunks:
        """Some of the chunks."""
        ours, theirs = self.local_parts, self.remote_parts
        return Chunks(
            self.local_ids[index],
            None if ours is None else ours[index],
            self.remote_ids[index],
            None if theirs is None else theirs[index],
            self.tokens,
            self.first,
        )

    def between(self, start: int, stop: int) -> Chunks:
        """Those that are chunks `start` to `stop` of the prompt; only for chunks in prompt order."""
        begin, end = (min(max(edge - self.first, 0), len(self)) for edge in (start, stop))
        return replace(self.select(slice(begin, end)), first=self.first + begin)

    def to(self, local_ids: BlockIds) -> Chunks:
        """With other blocks of ours."""
        return replace(self, local_ids=local_ids)

    def locate(self, block_ids: BlockIds) -> Chunks:
        """With the ids of a rank's blocks in place of positions."""
        ours, theirs = self.local_parts, self.remote_parts
        return Chunks(self.local_ids, ours, block_ids[self.remote_ids], theirs, self.tokens, self.first)


def match_chunks(
    local_ids: BlockIds,
    offered: int,
    *,
    local_block_size: int,
    remote_block_size: int,
    num_tokens: int,
    needed_from: int = 0,
    whole: bool = True,
    what: str = "load",
) -> tuple[Chunks, ...]:
    """Which chunks fill `local_ids`, the last of our blocks that the offered tokens take; the rest are cached already.

    `offered` blocks hold the prompt from its first token on, `num_tokens` says how far; those of a window (not
    `whole`) hold the prompt's end up to there. One block size divides the other. Tokens before `needed_from` are read
    where they are offered. Gives the full chunks and, if the last one is filled partly, that one, as far as there are
    any. Raises RequestError if there are more local blocks than the tokens take, or more are needed than are offered.
    """
    if not len(local_ids):
        return ()
    tokens = min(num_tokens, offered * remote_block_size) if whole else num_tokens
    first_block = -(-tokens // local_block_size) - len(local_ids)
    if first_block < 0:
        offer = f"{tokens} tokens in {offered} blocks of {remote_block_size}"
        raise RequestError(
            f"{what}: {len(local_ids)} local blocks of {local_block_size} tokens, but only {offer} are offered"
        )
    first_offered = 0 if whole else max(-(-tokens // remote_block_size) - offered, 0)
    start_token = max(first_block * local_block_size, first_offered * remote_block_size)
    needed = max(first_block * local_block_size, needed_from)
    if start_token > needed:
        raise RequestError(f"{what}: tokens from {needed} on are needed, only those from {start_token} on are offered")
    size = min(local_block_size, remote_block_size)
    ours, theirs = local_block_size // size, remote_block_size // size
    first, full, tail = start_token // size, tokens // size, tokens % size
    found = []
    for start, stop, length in ((first, full, size), (full, full + 1, tail)):
        if stop > start and length:
            chunk = np.arange(start, stop, dtype=np.int64)
            local_at, local_parts = (chunk, None) if ours == 1 else np.divmod(chunk, ours)
            remote_at, remote_parts = (chunk, None) if theirs == 1 else np.divmod(chunk, theirs)
            remote_at = remote_at - first_offered if first_offered else remote_at
            found.append(Chunks(local_ids[local_at - first_block], local_parts, remote_at, remote_parts, length, start))
    return tuple(found)


def plan_read(groups: Sequence[RegionMap], chunks: Chunks, head: Piece | None = None) -> Descriptors:
    """Descriptors that fill `chunks` in every region pair, `head` in front."""
    plan = _cross(groups[0], chunks, head)
    for pairs in groups[1:]:
        plan = plan.join(_cross(pairs, chunks, None))
    return plan


def _cross(pairs: RegionMap, chunks: Chunks, head: Piece | None) -> Descriptors:
    """Every region pair times every run of chunks times every piece, region by region, behind the row of `head`."""
    local, remote = chunks.local_ids * pairs.local_stride, chunks.remote_ids * pairs.remote_stride
    if chunks.local_parts is not None:
        local += chunks.local_parts * pairs.local_step
    if chunks.remote_parts is not None:
        remote += chunks.remote_parts * pairs.remote_step
    count, size = len(local), pairs.piece_size
    first_rows = pairs.rows() if pairs.first_rows is None else pairs.first_rows
    _, regions, _, pieces, _ = first_rows.shape
    size_bytes = count * pairs.chunk_size_bytes
    sizes: Int64Array | int = size
    if pieces == 1 and count > 1:
        if count <= _FEW:
            local, remote, sizes = _joined_few(local.tolist(), remote.tolist(), size)
        else:
            local, remote, sizes = _joined(local, remote, size)
        count = len(local)
    first = 0 if head is None else 1
    table = np.empty((2, first + regions * count * pieces, 3), dtype=np.int64)
    grid = table[:, first:].reshape(2, regions, count, pieces, 3)  # a view: only an axis is split
    grid[:] = first_rows
    grid[0, ..., 0] += local[:, None]
    grid[1, ..., 0] += remote[:, None]
    if sizes is not size:
        grid[..., 1] = np.asarray(sizes).reshape(-1, 1)
    if head is not None:
        table[0, 0] = head.local, head.size_bytes, pairs.local_device.number
        table[1, 0] = head.remote, head.size_bytes, pairs.remote_device.number
        size_bytes += head.size_bytes
    return Descriptors(
        table=table.view(np.uint64),
        size_bytes=size_bytes,
        local_device=pairs.local_device,
        remote_device=pairs.remote_device,
    )


def _joined(local: Int64Array, remote: Int64Array, size: int) -> tuple[Int64Array, Int64Array, Int64Array | int]:
    """Pieces of `size` bytes with those joined that follow each other on both sides: starts, and the size of each."""
    follows = (local[1:] - local[:-1] == size) & (remote[1:] - remote[:-1] == size)
    if not follows.any():
        return local, remote, size
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return local[starts], remote[starts], size * np.diff(starts, append=len(local))


def _joined_few(local: list[int], remote: list[int], size: int) -> tuple[Int64Array, Int64Array, Int64Array | int]:
    """The same for a few, where each operation on arrays takes longer than all of it."""
    ours, theirs, sizes = [local[0]], [remote[0]], [size]
    for at in range(1, len(local)):
        if local[at] == ours[-1] + sizes[-1] and remote[at] == theirs[-1] + sizes[-1]:
            sizes[-1] += size
        else:
            ours.append(local[at])
            theirs.append(remote[at])
            sizes.append(size)
    return np.array(ours), np.array(theirs), np.array(sizes)


def plan_slices(
    reads: Iterable[tuple[BlockMap, Chunks]],
    *,
    bytes_max: int,
    descriptors_max: int,
    head: Piece | None = None,
) -> Iterator[Descriptors]:
    """Plan reads in slices of at most `bytes_max` bytes and `descriptors_max` descriptors, each when asked for.

    `head` is one more piece to read, between the same devices; it comes first in the first slice and does not count.
    Chunks are taken in the order of their remote ids: reading a peer's memory in order is a few per cent faster than
    writing our own in order (shared memory).
    """
    for block_map, some in reads:
        groups = block_map.groups[some.tokens]
        if len(some) > 1 and not _ascends(some):
            parts = some.remote_parts
            keys = some.remote_ids if parts is None else some.remote_ids * (1 << 32) + parts
            short = len(some) > _MANY and keys.max() < 1 << 16  # numpy sorts these by radix, ten times as fast
            order = keys.astype(np.uint16 if short else np.int64, copy=False).argsort(kind="stable")
            some = some.select(order)  # by its place in the peer's memory
        chunk_bytes, pieces, joins = 0, 0, False
        for pairs in groups:
            chunk_bytes, pieces = chunk_bytes + pairs.chunk_size_bytes, pieces + pairs.pieces
            joins = joins or len(pairs.local_offsets) == 1  # then it may take far fewer descriptors
        step = max(bytes_max // chunk_bytes if joins else min(bytes_max // chunk_bytes, descriptors_max // pieces), 1)
        start, stop = 0, step  # the first slice is planned alone, so that it can be posted soon
        while start < len(some):
            plan = plan_read(
                groups, some if start == 0 and stop >= len(some) else some.select(slice(start, stop)), head
            )
            start, stop = stop, stop + max(_PLANNED_AT_ONCE // (step * pieces), 1) * step
            if head is None:
                yield from cut_slices(plan, bytes_max=bytes_max, descriptors_max=descriptors_max)
            elif len(plan) <= descriptors_max + 1 and plan.size_bytes <= bytes_max + head.size_bytes:
                yield plan
            else:
                rest = plan.part(1, len(plan), plan.size_bytes - head.size_bytes)
                slices = cut_slices(rest, bytes_max=bytes_max, descriptors_max=descriptors_max)
                yield plan.part(0, 1, head.size_bytes).join(next(slices))
                yield from slices
            head = None


def _ascends(chunks: Chunks) -> bool:
    """Whether a few chunks are in the order of the peer's memory already."""
    if len(chunks.remote_ids) > _FEW or chunks.remote_parts is not None:
        return False
    ids: list[int] = chunks.remote_ids.tolist()
    return ids == sorted(ids)


def cut_slices(descriptors: Descriptors, *, bytes_max: int, descriptors_max: int) -> Iterator[Descriptors]:
    """Cut a plan into slices of at most `bytes_max` bytes and `descriptors_max` descriptors, in order."""
    if len(descriptors) <= descriptors_max and descriptors.size_bytes <= bytes_max:
        if len(descriptors):
            yield descriptors
        return
    pieces = _split_large(descriptors, bytes_max)
    count, sizes = len(pieces), pieces.sizes
    size = int(sizes[0])
    if size == int(sizes.min()) == int(sizes.max()):  # the usual case, without a search for each slice
        step = max(min(bytes_max // size, descriptors_max), 1)
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield pieces.part(start, stop, (stop - start) * size)
        return
    ends = sizes.cumsum()
    start, done_bytes = 0, 0
    while start < count:
        stop = int(ends.searchsorted(np.uint64(done_bytes + bytes_max), side="right"))
        stop = min(max(stop, start + 1), start + descriptors_max)
        end_bytes = int(ends[stop - 1])
        yield pieces.part(start, stop, end_bytes - done_bytes)
        start, done_bytes = stop, end_bytes


def _split_large(descriptors: Descriptors, bytes_max: int) -> Descriptors:
    """Replace each descriptor above `bytes_max` by pieces of at most that size."""
    limit = np.uint64(bytes_max)
    if not (descriptors.sizes > limit).any():
        return descriptors
    counts = -(-descriptors.sizes.astype(np.int64) // bytes_max)
    index = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = index.astype(np.uint64) * limit
    table = np.repeat(descriptors.table, counts, axis=1)
    table[:, :, 0] += offsets
    table[:, :, 1] = np.minimum(table[:, :, 1] - offsets, limit)
    return replace(descriptors, table=table)
