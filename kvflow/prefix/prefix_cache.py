"""The protocol that an engine's prefix cache implements, and the statistics of a shared prefix cache."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvflow.core.plan.descriptors import GivenBlockIds


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Blocks that hold the first `num_tokens` tokens of a prompt, pinned by the engine so that a reader can read them.

    `block_ids` has the form of `ServeRequest.block_ids`: block ids in prompt order, or one list for each of several
    groups. For a group with a sliding window, give at least the blocks of the window at the end of the prefix. For a
    group of recurrent state, give the slot with the state after `num_tokens` tokens.
    """

    block_ids: GivenBlockIds
    num_tokens: int


@runtime_checkable
class PrefixCache(Protocol):
    """Protocol that an engine's prefix cache implements. Both methods run on the event loop, and must not block it."""

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | Awaitable[PinnedPrefix | None] | None:
        """Find the longest beginning of a prefix that is in the cache, and pin its blocks.

        Args:
            keys: keys made by `prefix_keys`: key i covers the first (i + 1) * `key_tokens` tokens.
            key_tokens: number of tokens between two keys, chosen by the reader; may differ from this cache's block
                size.

        Returns:
            The pinned prefix, or None if not even the first key is in the cache. The prefix's number of tokens must be
                a multiple of `key_tokens`, and the blocks must not change until `unpin`. A cache in another thread or
                process may return an awaitable of the prefix or None. If the awaitable takes more than a second, the
                reader gets an empty answer; the awaitable is not cancelled, and the prefix that it returns later is
                unpinned.
        """
        ...

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Remove the pin of a prefix. kvflow calls this once for each prefix that `match` has returned.

        Args:
            pinned: the object that `match` has returned.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStatistics:
    """State of a shared prefix cache, and counts of questions (a peer's `SeekRequest`) by outcome."""

    prefixes: int
    pinned_blocks: int
    """Number of blocks in leased prefixes; a block in several prefixes counts once."""
    found: int
    """Number of questions answered with an offer of a prefix."""
    missed: int
    """Number of questions for a prefix that the cache does not have, or from readers with other weights."""
    busy: int
    """Number of questions answered without a prefix because the maximum number of blocks was pinned, too many questions
    or leases were open, or the cache took too long.
    """
    failed: int
    """Number of questions for which `PrefixCache.match` raised an error, or returned a prefix that cannot be leased."""
    reclaimed: int
    """Number of leases that the engine ended early, by `SharedPrefixes.reclaim` or `SharedPrefixes.end`."""
