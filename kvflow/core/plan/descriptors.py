"""From the block ids of a load to its descriptors: arrays of remote addresses, local addresses and sizes.

`match_chunks` pairs chunks of tokens in remote blocks with chunks in local blocks, for any two block sizes and a partly
filled last block. `plan_read` makes descriptors of these chunks in each region pair of the peer's `block_map`, and
joins reads that are contiguous on both sides. Their array operations would take longer for two blocks than the rest of
the planning. So `match_few` and `read_few` plan the common small load in plain Python; a property test checks that both
ways give equal descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import ValidationError, convert

from kvflow.checks import counted, whole_numbers
from kvflow.core.cache.regions import Device, UInt64Array
from kvflow.core.plan.block_map import BlockMap, Int64Array, RegionMap
from kvflow.core.plan.topology import WHOLE, Shard
from kvflow.errors import RequestError

BlockIds: TypeAlias = Int64Array
GivenBlockIds: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Sequence[int]]
"""Block ids of a request: one list, or a list for each group of layers, in the groups' order or by name."""

_MANY = 1 << 10  # number of block ids from which array operations are faster
FEW_BLOCKS = 1 << 5
"""Maximum number of blocks of a load that is planned in plain Python, which is then faster than array operations."""


@dataclass(slots=True)
class Descriptors:
    """Reads to post: for each i, `sizes[i]` bytes from address `remote[i]` on the peer to local address `local[i]`.

    Treat as immutable. The class is not frozen, because each slice creates a `Descriptors`, and a frozen dataclass
    takes three times as long to create.
    """

    table: UInt64Array
    """Array of shape (2, n, 3) for n reads: first the local, then the remote (address, size, device index) of each
    read. NIXL takes this array without a copy."""
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
        """Return descriptors from three lists with one value per read: local address, remote address, size in bytes."""
        length = np.asarray(sizes, dtype=np.uint64)
        table = np.empty((2, len(length), 3), dtype=np.uint64)
        table[0, :, 0], table[1, :, 0], table[:, :, 1] = local, remote, length
        table[0, :, 2], table[1, :, 2] = local_device.number, remote_device.number
        return cls(table=table, size_bytes=int(length.sum()), local_device=local_device, remote_device=remote_device)

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def local(self) -> UInt64Array:
        return self.table[0, :, 0]

    @property
    def remote(self) -> UInt64Array:
        return self.table[1, :, 0]

    @property
    def sizes(self) -> UInt64Array:
        return self.table[0, :, 1]

    def join(self, other: Descriptors) -> Descriptors:
        return replace(
            self,
            table=np.concatenate((self.table, other.table), axis=1),
            size_bytes=self.size_bytes + other.size_bytes,
        )

    def cut(self, start: int, stop: int, size_bytes: int) -> Descriptors:
        """Return the reads with indices from `start` to before `stop`. `size_bytes`: the sum of their sizes."""
        return Descriptors(self.table[:, start:stop], size_bytes, self.local_device, self.remote_device)


class Piece(NamedTuple):
    """One contiguous read: `size_bytes` bytes from address `remote` on the peer to the local address `local`."""

    local: int
    remote: int
    size_bytes: int


def check_block_ids(block_ids: Sequence[int], *, num_blocks: int, what: str) -> BlockIds:
    """Return `block_ids` as an array. RequestError unless they are different integers from 0 to below `num_blocks`.

    `what` begins the message, which names a wrong id.
    """
    if type(block_ids) in (list, tuple) and len(block_ids) > num_blocks:  # before any id is looked at
        cache_has = f"the cache has {counted(num_blocks, 'block')}"
        raise RequestError(f"{what}: {counted(len(block_ids), 'block id')}, but {cache_has}")
    if type(block_ids) in (list, tuple) and len(block_ids) >= _MANY:
        return _check_many_ids(block_ids, num_blocks, what)
    if type(block_ids) in (list, tuple) and set(map(type, block_ids)) <= {int}:
        if not block_ids:
            return np.empty(0, dtype=np.int64)
        # Built-in functions: for few ids and with cold caches they are faster than array operations.
        if min(block_ids) >= 0 and max(block_ids) < num_blocks and len(set(block_ids)) == len(block_ids):
            return np.array(block_ids, dtype=np.int64)
    return _check_id_array(block_ids, num_blocks, what)


def _check_many_ids(block_ids: Sequence[int], num_blocks: int, what: str) -> BlockIds:
    try:
        convert(block_ids, list[int])  # the fastest way to find out whether all are of type int
        ids = np.fromiter(block_ids, np.int64, len(block_ids))
    except (ValidationError, OverflowError):
        return _check_id_array(block_ids, num_blocks, what)
    return _check_id_array(ids, num_blocks, what)


def given_block_ids(tables: Sequence[Sequence[int]]) -> Sequence[int] | Sequence[Sequence[int]]:
    """Return a request's `block_ids`: `tables`, a block table per group, or only `tables[0]` if there is one group."""
    return tables[0] if len(tables) == 1 else tables


def _check_id_array(block_ids: Sequence[int] | BlockIds, num_blocks: int, what: str) -> BlockIds:
    ids = whole_numbers(block_ids, what)
    outside = (ids < 0) | (ids >= num_blocks)
    if outside.any():
        raise RequestError(f"{what}: block id {ids[outside][0]} is not in 0..{num_blocks - 1}")
    seen = np.zeros(num_blocks, dtype=bool)  # with a million ids sorting takes thirty times as long
    seen[ids] = True
    if np.count_nonzero(seen) != len(ids):
        ordered = np.sort(ids)
        raise RequestError(f"{what}: block id {ordered[1:][ordered[1:] == ordered[:-1]][0]} is given twice")
    return ids


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of tokens to read. A chunk is as many tokens as a block has on the side with the smaller blocks.

    Chunk i is read from chunk `remote_chunks[i]` within remote block `remote_ids[i]`, and lands in chunk
    `local_chunks[i]` within local block `local_ids[i]`.
    """

    local_ids: BlockIds
    local_chunks: Int64Array | None
    """Index of each chunk within its local block; None if a local block is a single chunk."""
    remote_ids: BlockIds
    """Remote block of each chunk. In the result of `match_chunks`: the block's position among the offered blocks, from
    0, the same for all ranks of the producer. In the result of `locate`: the block id on one rank."""
    remote_chunks: Int64Array | None
    """Index of each chunk within its remote block; None if a remote block is a single chunk."""
    tokens: int
    """Number of tokens to read from the start of each chunk."""
    first: int = 0
    """Number of the prompt's chunks that precede these chunks, if these are in prompt order (`match_chunks`)."""
    numbers: Int64Array | None = None
    """Number of each chunk in the prompt, from 0; None if the chunks follow each other."""

    @property
    def last(self) -> int:
        """Number of the last of these chunks in the prompt, for chunks in prompt order."""
        return self.first + len(self) - 1 if self.numbers is None else int(self.numbers[-1])

    def __len__(self) -> int:
        return len(self.local_ids)

    def select(self, index: slice | Int64Array) -> Chunks:
        """Return the chunks at the indices `index`."""
        local_chunks, remote_chunks = self.local_chunks, self.remote_chunks
        return Chunks(
            self.local_ids[index],
            None if local_chunks is None else local_chunks[index],
            self.remote_ids[index],
            None if remote_chunks is None else remote_chunks[index],
            self.tokens,
            self.first,
            None if self.numbers is None else self.numbers[index],
        )

    def between(self, start: int, stop: int) -> Chunks:
        """Return the chunks with numbers from `start` to before `stop`. The prompt's first chunk has number 0.

        Numbers outside these chunks are left out. Only for chunks in prompt order.
        """
        if self.numbers is not None:
            return self.select(slice(*self.numbers.searchsorted((start, stop)).tolist()))
        begin, end = (min(max(edge - self.first, 0), len(self)) for edge in (start, stop))
        return replace(self.select(slice(begin, end)), first=self.first + begin)

    def with_local_ids(self, local_ids: BlockIds) -> Chunks:
        """Return these chunks with local block `local_ids[i]` for chunk i."""
        return replace(self, local_ids=local_ids)

    def locate(self, block_ids: BlockIds) -> Chunks:
        """Return these chunks with block ids in place of positions in `remote_ids`.

        `block_ids`: the ids that one rank of the producer has for the offered blocks.
        """
        local_chunks, remote_chunks = self.local_chunks, self.remote_chunks
        remote_ids = block_ids[self.remote_ids]
        return Chunks(self.local_ids, local_chunks, remote_ids, remote_chunks, self.tokens, self.first, self.numbers)


def match_chunks(
    local_ids: BlockIds,
    offered: int,
    *,
    local_block_size: int,
    remote_block_size: int,
    num_tokens: int,
    needed_from: int = 0,
    whole: bool = True,
    local_shard: Shard = WHOLE,
    remote_shard: Shard = WHOLE,
    what: str = "load",
) -> tuple[Chunks, ...]:
    """Return the chunks that fill the local blocks: a `Chunks` of all full chunks, then one of the last, partial chunk.

    An empty `Chunks` is left out. One block size, in tokens on one rank, must divide the other.

    Args:
        local_ids: the local blocks to fill, which end with the block of the last offered token.
        offered: number of offered blocks.
        num_tokens: tokens from the prompt's start to the end of the offer.
        needed_from: position in the prompt of the first token that has to be read. Tokens before it are read if they
            are offered.
        whole: True if the offered blocks hold the prompt from its first token on; False if they hold only its end, as
            the blocks of a sliding-window group do.
        local_shard, remote_shard: the tokens of a block that the local rank and the producer's rank hold. If tokens are
            sharded, only the chunks that both ranks hold are returned; they have `numbers`.
        what: beginning of an error's message.

    Raises:
        RequestError: there are more local blocks than the tokens fill, or a token that has to be read is not offered.
    """
    if not len(local_ids):
        return ()
    size = min(local_block_size, remote_block_size)
    local_held, remote_held = local_block_size // size, remote_block_size // size
    local_block_size, remote_block_size = local_block_size * local_shard.ranks, remote_block_size * remote_shard.ranks
    # An engine may offer full blocks only. Blocks of a window end with the prompt's last token, however few they are.
    tokens = min(num_tokens, offered * remote_block_size) if whole else num_tokens
    first_block = -(-tokens // local_block_size) - len(local_ids)
    if first_block < 0:
        offer = f"{counted(tokens, 'token')} in {counted(offered, 'block')} of {remote_block_size}"
        blocks = f"{counted(len(local_ids), 'local block')} of {counted(local_block_size, 'token')}"
        raise RequestError(f"{what}: {blocks}, but the offer has only {offer}")
    first_offered = 0 if whole else max(-(-tokens // remote_block_size) - offered, 0)
    start_token = max(first_block * local_block_size, first_offered * remote_block_size)
    needed = max(first_block * local_block_size, needed_from)
    if start_token > needed:
        raise RequestError(f"{what}: tokens from {needed} on are needed, only those from {start_token} on are offered")
    local_ratio, remote_ratio = local_block_size // size, remote_block_size // size
    first, full, tail = start_token // size, tokens // size, tokens % size
    chunks = []
    for start, stop, length in ((first, full, size), (full, full + 1, tail)):
        if stop > start and length:
            chunk = np.arange(start, stop, dtype=np.int64)
            local_at, local_chunks = (chunk, None) if local_ratio == 1 else np.divmod(chunk, local_ratio)
            remote_at, remote_chunks = (chunk, None) if remote_ratio == 1 else np.divmod(chunk, remote_ratio)
            remote_at = remote_at - first_offered if first_offered else remote_at
            chunks.append(
                Chunks(local_ids[local_at - first_block], local_chunks, remote_at, remote_chunks, length, start)
            )
    if local_shard.ranks * remote_shard.ranks > 1:
        chunks = [_on_both_ranks(some, local_held, local_shard, remote_held, remote_shard) for some in chunks]
        chunks = [some for some in chunks if len(some)]
    return tuple(chunks)


def _on_both_ranks(chunks: Chunks, local_held: int, local: Shard, remote_held: int, remote: Shard) -> Chunks:
    """Return those of `chunks`, which follow each other in the prompt, that the shards of both ranks hold.

    `local_held`, `remote_held`: number of chunks of a block that one rank holds. In the result, `local_chunks` and
    `remote_chunks` count only the chunks that the rank holds.
    """
    numbers = np.arange(chunks.first, chunks.first + len(chunks), dtype=np.int64)
    held = (numbers // local_held % local.ranks == local.rank) & (numbers // remote_held % remote.ranks == remote.rank)
    held_chunks, numbers = chunks.select(np.flatnonzero(held)), numbers[held]
    return replace(
        held_chunks,
        local_chunks=None if local_held == 1 else numbers % local_held,
        remote_chunks=None if remote_held == 1 else numbers % remote_held,
        first=int(numbers[0]) if len(numbers) else chunks.first,
        numbers=numbers,
    )


def plan_read(groups: Sequence[RegionMap], chunks: Chunks, last: Piece | None = None) -> Descriptors:
    """Return the descriptors that read `chunks` from one peer.

    `groups`: region maps from `BlockMap.region_maps`. `last`: another read to put after the others, for example of a
    seal.
    """
    plans = (_plan_region_map(pairs, chunks, last if pairs is groups[-1] else None) for pairs in groups)
    return reduce(Descriptors.join, plans)


def _plan_region_map(pairs: RegionMap, chunks: Chunks, last: Piece | None) -> Descriptors:
    """Return descriptors for all pieces (contiguous reads) of all chunks, by region pair, then for `last`, if given.

    Chunks that follow each other on both sides are joined if each is one piece.
    """
    local, remote = chunks.local_ids * pairs.local_stride, chunks.remote_ids * pairs.remote_stride
    if chunks.local_chunks is not None:
        local += chunks.local_chunks * pairs.local_step
    if chunks.remote_chunks is not None:
        remote += chunks.remote_chunks * pairs.remote_step
    count, size = len(local), pairs.piece_size
    first_rows = pairs.rows() if pairs.first_rows is None else pairs.first_rows
    _, regions, _, pieces, _ = first_rows.shape
    size_bytes = count * pairs.chunk_size_bytes
    sizes: Int64Array | int = size
    if pieces == 1 and count > 1:
        local, remote, sizes = _join_pieces(local, remote, size)
        count = len(local)
    rows = regions * count * pieces
    # Signed until the end: numpy adds int64 and uint64 as float64, which rounds large addresses.
    table = np.empty((2, rows if last is None else rows + 1, 3), dtype=np.int64)
    grid = table[:, :rows].reshape(2, regions, count, pieces, 3)  # a view: only an axis is split
    grid[:] = first_rows
    grid[0, ..., 0] += local[:, None]
    grid[1, ..., 0] += remote[:, None]
    if sizes is not size:
        grid[..., 1] = np.asarray(sizes).reshape(-1, 1)
    if last is not None:
        table[0, rows] = last.local, last.size_bytes, pairs.local_device.number
        table[1, rows] = last.remote, last.size_bytes, pairs.remote_device.number
        size_bytes += last.size_bytes
    return Descriptors(
        table=table.view(np.uint64),
        size_bytes=size_bytes,
        local_device=pairs.local_device,
        remote_device=pairs.remote_device,
    )


def _join_pieces(local: Int64Array, remote: Int64Array, size: int) -> tuple[Int64Array, Int64Array, Int64Array | int]:
    """Join contiguous reads of `size` bytes that follow each other on both sides. `local`, `remote`: start of each.

    Return the local starts, the remote starts and the sizes of the joined reads; `size` if nothing was joined.
    """
    follows = (local[1:] - local[:-1] == size) & (remote[1:] - remote[:-1] == size)
    if not follows.any():
        return local, remote, size
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return local[starts], remote[starts], size * np.diff(starts, append=len(local))


# --- the common small load: a few full blocks of equal size on both sides


def small_load_map(block_map: BlockMap) -> RegionMap | None:
    """Return the region map with which `match_few` and `read_few` plan small loads; None if these functions cannot be
    used.

    They can be used if blocks have equally many tokens on both sides, no tokens are sharded, and one region map reads
    each block as one piece.
    """
    if block_map.local.block.tokens != block_map.remote.block.tokens or block_map.sharded:
        return None
    pairs = block_map.region_maps(block_map.chunk_tokens)
    can_plan = len(pairs) == 1 and len(pairs[0].local_offsets) == 1 and pairs[0].first_rows is not None
    return pairs[0] if can_plan else None


def match_few(
    local_ids: BlockIds, offered: Sequence[int], block_tokens: int, cached_tokens: int, num_tokens: int
) -> list[tuple[int, int]] | None:
    """Return a pair (remote block id, local block id) for each block to read, sorted by remote block id.

    `offered`: ids of all offered blocks, from the prompt's first token on. Return None if only `match_chunks` can plan
    the load: the last block is not full, or `local_ids` are not the blocks of the offered tokens from `cached_tokens`
    on.
    """
    tokens = min(num_tokens, len(offered) * block_tokens)
    last = tokens // block_tokens
    first = last - len(local_ids)
    if tokens % block_tokens or first * block_tokens != cached_tokens:
        return None
    return sorted(zip(offered[first:last], local_ids.tolist(), strict=True))


def read_few(pairs: RegionMap | None, blocks: Sequence[tuple[int, int]], last: Piece | None) -> Descriptors:
    """Return descriptors that read `blocks`: (remote block id, local block id) of each block, from `match_few`.

    `pairs`: the region map from `small_load_map`, not None. Each of its region pairs is read. `last`: another read to
    put after the others, for example of a seal. Blocks that are neighbours on both sides become one read.
    """
    assert pairs is not None, "only for blocks that small_load_map accepts"
    assert pairs.first_rows is not None, "so these are kept"
    local_stride, remote_stride, size = pairs.local_stride, pairs.remote_stride, pairs.piece_size
    local_starts, remote_starts, sizes = list[int](), list[int](), list[int]()
    local_end = remote_end = -1
    for remote_id, local_id in blocks:
        local, remote = local_id * local_stride, remote_id * remote_stride
        if local == local_end and remote == remote_end:
            sizes[-1] += size
        else:
            local_starts.append(local)
            remote_starts.append(remote)
            sizes.append(size)
        local_end, remote_end = local + size, remote + size
    regions, runs, size_bytes = len(pairs.local_bases), len(local_starts), len(blocks) * pairs.chunk_size_bytes
    rows = regions * runs
    table = np.empty((2, rows if last is None else rows + 1, 3), dtype=np.int64)
    grid = table[:, :rows].reshape(2, regions, runs, 1, 3)  # a view: only an axis is split
    grid[:] = pairs.first_rows
    grid[0, :, :, 0, 0] += local_starts
    grid[1, :, :, 0, 0] += remote_starts
    if runs < len(blocks):
        grid[:, :, :, 0, 1] = sizes
    if last is not None:
        table[0, rows] = last.local, last.size_bytes, pairs.local_device.number
        table[1, rows] = last.remote, last.size_bytes, pairs.remote_device.number
        size_bytes += last.size_bytes
    return Descriptors(table.view(np.uint64), size_bytes, pairs.local_device, pairs.remote_device)
