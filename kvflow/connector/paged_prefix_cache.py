"""The prefix cache that a worker shares with its peers: which blocks of one rank hold which prompts, by prefix key.

With each step the scheduler's half reports new and reused blocks (`connector.cached_prompts`). Before a step writes
into reused blocks, the worker removes them from this cache, which returns the prefixes that peers may be reading there.
The cache has the engine's block ids. Only a pinned prefix has the ids of the blocks that the rank has registered.

Steps arrive on the engine's thread, and peers' questions on the thread of the runtime's loop. Neither waits for the
other longer than a lookup takes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvflow.checks import counted
from kvflow.connector.paged_groups import PagedGroup
from kvflow.connector.step import NO_BLOCK, BlockTables, CachedBlocks
from kvflow.core.plan.descriptors import given_block_ids
from kvflow.core.policy.events import DeviceEvent, has_happened
from kvflow.prefix.prefix_cache import PinnedPrefix

__all__ = ["PagedPrefixCache"]


class _Entry(NamedTuple):
    """Blocks that hold the last tokens of a prefix. `parent` is the key of the prefix that is one block shorter."""

    parent: bytes
    blocks: tuple[list[int], ...]
    """For each group, the ids of all blocks that hold the entry's tokens: an engine may compute a prefix twice."""


@dataclass(slots=True)
class _ReportedBlocks:
    """Blocks of one report, which enter the cache once they are computed.

    The device event `event` happens when the blocks are computed; None if they are already.
    """

    event: DeviceEvent | None
    cached_blocks: Sequence[CachedBlocks]
    reused: set[int] = field(default_factory=set)
    """Ids of blocks that the engine has reused since the report, and that must not enter the cache."""


class PagedPrefixCache:
    """Finds prompts' prefixes in an engine's paged cache, for peers to read. Implements `PrefixCache`.

    The engine may reuse blocks of a pinned prefix: then the prefix's leases end. A block has `block_tokens` tokens.
    """

    def __init__(self, groups: Sequence[PagedGroup], block_tokens: int) -> None:
        self._groups = tuple(groups)
        self._block_tokens = block_tokens
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._content_of: dict[int, tuple[bytes, int]] = {}
        """For each block in the cache, by block id: its prefix key, and the index of its group."""
        self._reported: deque[_ReportedBlocks] = deque()
        self._pinned: dict[int, tuple[PinnedPrefix, frozenset[int]]] = {}
        """Prefixes that peers may be reading, and the ids of the engine's blocks that hold each, by `id(pinned)`."""
        self._unread_waiters: dict[int, asyncio.Future[None]] = {}
        """For each pinned prefix that `wait_unread` waits for, by `id(pinned)`: a future that `unpin` completes."""

    def __repr__(self) -> str:
        return f"<PagedPrefixCache {counted(len(self._entries), 'key')}, {len(self._pinned)} being read>"

    # --- the engine's thread

    def add(self, cached_blocks: Sequence[CachedBlocks], ready: DeviceEvent | None) -> None:
        """Add the blocks that a submitted step fills, once the device event `ready` has happened (None: now)."""
        with self._lock:
            self._reported.append(_ReportedBlocks(ready, cached_blocks))
            self._add_computed()

    def remove_reused(self, reused: Iterable[int]) -> list[PinnedPrefix]:
        """Remove the blocks with the ids `reused`, and return the prefixes that peers may be reading from these blocks.

        The caller must end these prefixes' leases before the engine writes to the blocks.
        """
        gone = frozenset(reused)
        with self._lock:
            for block in gone:
                self._remove_block(block)
            for report in self._reported:
                report.reused |= gone
            return [pinned for pinned, blocks in self._pinned.values() if not blocks.isdisjoint(gone)]

    # --- the runtime's loop

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | None:
        """Return the longest prefix of a prompt that is in the cache, in whole blocks, or None.

        Peers may read the prefix until `unpin` is called. `keys[i]` is the key of the prompt's first
        (i + 1) * `key_tokens` tokens.
        """
        with self._lock:
            self._add_computed()
            full = len(keys)
            while full:
                tokens, full = full * key_tokens, full - 1
                if tokens % self._block_tokens or keys[full] not in self._entries:
                    continue
                tables, broken = self._find_tables(keys[full], tokens)
                if tables is not None:
                    return self._pin(tables, tokens)
                full = min(full, broken // key_tokens)
            return None

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Unpin a prefix that `match` has returned and that no peer reads. Wake callers of `wait_unread`."""
        with self._lock:
            self._pinned.pop(id(pinned), None)
        waiting = self._unread_waiters.pop(id(pinned), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def wait_unread(self, pinned: PinnedPrefix) -> None:
        """Wait until no copy of the blocks of `pinned` to host buffers goes on. Without such a copy, return at once.

        Call this after the leases of `pinned` have ended: then no other read of the blocks can succeed.
        """
        if id(pinned) in self._pinned:
            await self._unread_waiters.setdefault(id(pinned), asyncio.get_running_loop().create_future())

    # --- with the lock

    def _find_tables(self, key: bytes, tokens: int) -> tuple[list[list[int]] | None, int]:
        """Find the blocks of a prompt's first `tokens` tokens; `key` is the key of this prefix.

        Return (tables, `tokens`), with a block table for each group. The tables have the engine's block ids, and
        `NO_BLOCK` where a group needs no block. If a block is missing, return (None, n): prefixes of the prompt that
        are in the cache have at most n tokens.
        """
        size, end, entries = self._block_tokens, tokens // self._block_tokens, self._entries
        firsts = [group.facts.first_needed(tokens) // size for group in self._groups]
        tables = [[NO_BLOCK] * end for _ in firsts]
        places = [*enumerate(zip(tables, firsts, strict=True))]
        for at in range(end - 1, min(firsts) - 1, -1):
            entry = entries.get(key)
            if entry is None:
                return None, at * size
            key, blocks = entry
            for nth, (table, first) in places:
                if at >= first:
                    if not blocks[nth]:
                        return None, at * size
                    table[at] = blocks[nth][0]
        return (None, 0) if min(firsts) == 0 and key else (tables, tokens)  # None if keys are in a wrong order

    def _pin(self, tables: BlockTables | list[list[int]], tokens: int) -> PinnedPrefix:
        ids = tuple(group.blocks(table, 0, tokens) for group, table in zip(self._groups, tables, strict=True))
        pinned = PinnedPrefix(block_ids=given_block_ids(ids), num_tokens=tokens)
        self._pinned[id(pinned)] = pinned, frozenset(block for table in tables for block in table) - {NO_BLOCK}
        return pinned

    def _add_computed(self) -> None:
        """Add the reported blocks that are computed by now to the cache."""
        while self._reported:
            first = self._reported[0]
            if first.event is not None and not has_happened(first.event, "prefix cache"):
                return
            self._reported.popleft()
            for cached_blocks in first.cached_blocks:
                self._add_blocks(cached_blocks, first.reused)

    def _add_blocks(self, cached_blocks: CachedBlocks, reused: set[int]) -> None:
        parent, entries, content_of = cached_blocks.parent, self._entries, self._content_of
        for key, blocks in zip(cached_blocks.keys, zip(*cached_blocks.block_tables, strict=True), strict=True):
            for nth, block in enumerate(blocks):
                held = content_of.get(block)
                if block == NO_BLOCK or block in reused or held == (key, nth):
                    continue
                if held is not None:
                    self._remove_block(block)
                entry = entries.get(key)
                if entry is None:
                    entry = entries[key] = _Entry(parent, tuple([] for _ in blocks))
                entry.blocks[nth].append(block)
                content_of[block] = key, nth
            parent = key

    def _remove_block(self, block: int) -> None:
        key, nth = self._content_of.pop(block, (b"", 0))
        entry = self._entries.get(key)
        if entry is not None:
            entry.blocks[nth].remove(block)
            if not any(entry.blocks):
                del self._entries[key]
