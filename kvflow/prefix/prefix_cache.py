"""A prefix cache as its engine shows it to kvflow: `PrefixCache`, and the statistics of one that is shared."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvflow.core.plan.descriptors import GivenBlockIds


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Blocks that hold the first `num_tokens` tokens of a prompt, and that their engine has pinned for a reader.

    `block_ids` are as in a `ServeRequest`: in prompt order; for a cache of several groups a list for each. A group with
    a window gives the last blocks, at least those of the window; one of state the slot that was kept at that token.
    """

    block_ids: GivenBlockIds
    num_tokens: int


@runtime_checkable
class PrefixCache(Protocol):
    """An engine's prefix cache. Both methods are called on the runtime's loop, and must not block it."""

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | Awaitable[PinnedPrefix | None] | None:
        """Find the longest beginning of a prefix that is in the cache now, and pin it.

        Args:
            keys: as `prefix_keys` makes them: number i vouches for the first (i + 1) * `key_tokens` tokens.
            key_tokens: tokens from one key to the next; the reader chooses, so it need not be this cache's block size.

        Returns:
            The prefix, of a multiple of `key_tokens` tokens, whose blocks hold these until `unpin`; None if there is
            none. Or an awaitable of it, for a cache that lives in another thread or process. It may take a second; then
            it is left to end by itself, and what it gives is unpinned.
        """
        ...

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Take a pin off again; called once for each prefix that `match` has given.

        Args:
            pinned: the very object.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStatistics:
    """Prefixes that are leased to readers now, and questions so far by their outcome."""

    prefixes: int
    pinned_blocks: int
    """Blocks of these prefixes, each counted once."""
    found: int
    """Questions that were answered with a prefix."""
    missed: int
    """Questions for prefixes that the cache does not have."""
    busy: int
    """Questions for a prefix that is there, while too many blocks were pinned already, or too many questions waited."""
    failed: int
    """Questions on which the cache has raised, or given a prefix that cannot be right."""
    reclaimed: int
    """Prefixes whose leases were ended because their owner needed the blocks."""
