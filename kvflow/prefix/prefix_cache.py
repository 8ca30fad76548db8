"""An engine's prefix cache as kvflow uses it: the protocol `PrefixCache`, and the statistics of a shared cache."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvflow.core.plan.descriptors import GivenBlockIds


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Blocks that hold the first `num_tokens` tokens of a prompt, and that their engine has pinned for a reader.

    `block_ids` are as in a `ServeRequest`: in prompt order; for a cache of several groups, one list for each group. A
    group with a window gives its last blocks, at least those of the window. A group of state gives the slot that was
    kept at that token.
    """

    block_ids: GivenBlockIds
    num_tokens: int


@runtime_checkable
class PrefixCache(Protocol):
    """Protocol of an engine's prefix cache. Both methods are called on the runtime's loop, and must not block it."""

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | Awaitable[PinnedPrefix | None] | None:
        """Find the longest beginning of a prefix that is in the cache now, and pin its blocks.

        Args:
            keys: keys made by `prefix_keys`: key i is of the first (i + 1) * `key_tokens` tokens.
            key_tokens: tokens between two keys. The reader chooses it, so it may differ from the block size of this
                cache.

        Returns:
            The pinned prefix, or None if there is none. It has a multiple of `key_tokens` tokens, and its blocks keep
                them until `unpin`. A cache that lives in another thread or process may return an awaitable of this. If
                the awaitable takes more than a second, the reader gets a miss; the awaitable is left to end by itself,
                and its prefix is unpinned.
        """
        ...

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Remove the pin from a prefix. Called once for each prefix that `match` has returned.

        Args:
            pinned: the object that `match` has returned.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStatistics:
    """Prefixes that are leased to readers now, and counts of questions by outcome."""

    prefixes: int
    pinned_blocks: int
    """Blocks of the leased prefixes, each counted once."""
    found: int
    """Questions answered with a prefix."""
    missed: int
    """Questions for a prefix that the cache does not have."""
    busy: int
    """Questions answered with a miss because too much was pinned or waiting, or because the cache took too long."""
    failed: int
    """Questions on which the cache has raised, or has returned an invalid prefix."""
    reclaimed: int
    """Prefixes taken back from their readers because the engine needed the blocks."""
