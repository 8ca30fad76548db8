"""An engine's prefix cache as kvflow uses it: the protocol `PrefixCache`, and the statistics of a shared cache."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvflow.core.plan.descriptors import GivenBlockIds


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Blocks that hold the first `num_tokens` tokens of a prompt, and that their engine has pinned for a reader.

    `block_ids` are as in a `ServeRequest`: in prompt order; for a cache of several groups, one list for each group. For
    a group with a sliding window, give at least the blocks of the window at the end of the prefix. For a group of
    recurrent state, give the slot with the state after `num_tokens` tokens.
    """

    block_ids: GivenBlockIds
    num_tokens: int


@runtime_checkable
class PrefixCache(Protocol):
    """Protocol of an engine's prefix cache. Both methods are called on the runtime's loop, and must not block it."""

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | Awaitable[PinnedPrefix | None] | None:
        """Find the longest beginning of a prefix that is in the cache now, and pin its blocks.

        Args:
            keys: keys made by `prefix_keys`: key i covers the first (i + 1) * `key_tokens` tokens.
            key_tokens: tokens between two keys. The reader chooses it, so it may differ from the block size of this
                cache.

        Returns:
            The pinned prefix, or None if not even the first key is in the cache. Its number of tokens is a multiple of
                `key_tokens`, and its blocks keep these tokens until `unpin`. If the cache lives in another thread or
                process, this may be an awaitable. If the awaitable takes more than a second, the reader gets an empty
                answer; the awaitable is not cancelled, and the prefix that it returns is unpinned.
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
    """Number of blocks in the leased prefixes; a block in several prefixes counts once."""
    found: int
    """Number of questions from peers that this rank answered with an offer of a prefix."""
    missed: int
    """Number of questions for a prefix that the cache does not have."""
    busy: int
    """Number of questions answered with no prefix because the maximum number of blocks was pinned, too many questions
    or leases were open, or the cache took too long."""
    failed: int
    """Number of questions for which `PrefixCache.match` has raised, or has returned an invalid prefix."""
    reclaimed: int
    """Number of leases that the engine has ended by `SharedPrefixes.reclaim` or `SharedPrefixes.end`."""
