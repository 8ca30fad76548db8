"""A prefix cache for tests, which records the blocks of prompts and counts pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvflow.prefix.keys import prefix_keys
from kvflow.prefix.prefix_cache import PinnedPrefix

__all__ = ["FakePrefixCache"]


class FakePrefixCache:
    """A `PrefixCache` of one group of layers, which a test fills by `put` and empties by `evict`.

    Args:
        block_tokens: number of tokens in a block of the cache.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks_of: dict[bytes, tuple[int, ...]] = {}
        """Block ids of each prefix, by the key of the whole prefix."""
        self.pins: Counter[int] = Counter()
        """Number of pins of each block id."""
        self.asked = 0
        """Number of calls of `match` so far."""

    def put(self, tokens: Sequence[int], block_ids: Sequence[int], *, salt: bytes = b"") -> None:
        """Add the full blocks of a prompt to the cache.

        Args:
            tokens: token ids of the prompt, from the first one on.
            block_ids: ids of the blocks that hold these tokens, in prompt order.
            salt: salt of the keys, as for `prefix_keys`.
        """
        keys = prefix_keys(tokens, self._block_tokens, salt=salt)
        for at, (key, _) in enumerate(zip(keys, block_ids, strict=True)):
            self._blocks_of[key] = tuple(block_ids[: at + 1])

    def evict(self, block_ids: Sequence[int]) -> None:
        """Remove all prefixes that use one of these blocks, as an engine does before it reuses the blocks.

        Args:
            block_ids: ids of the blocks to reuse.

        Raises:
            AssertionError: a block is pinned. Nothing was removed.
        """
        gone = set(block_ids)
        pinned = sorted(block_id for block_id in gone if self.pins[block_id])
        assert not pinned, f"blocks {pinned} are pinned for readers"
        self._blocks_of = {key: ids for key, ids in self._blocks_of.items() if not gone & set(ids)}

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | None:
        """Find the longest beginning of a prefix that is in the cache, and pin its blocks.

        Args:
            keys: keys of the prefix, one for each `key_tokens` tokens.
            key_tokens: number of tokens between two keys, a multiple of `block_tokens`; else nothing is found.

        Returns:
            The pinned prefix; None if not even the first key is in the cache.
        """
        self.asked += 1
        matched: tuple[int, ...] = ()
        for key in keys if key_tokens % self._block_tokens == 0 else ():
            if key not in self._blocks_of:
                break
            matched = self._blocks_of[key]
        self.pins.update(matched)
        return PinnedPrefix(matched, len(matched) * self._block_tokens) if matched else None

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Remove the pin that a call of `match` has put on a prefix.

        Args:
            pinned: the object that `match` has returned.
        """
        ids = [block_id for block_id in pinned.block_ids if isinstance(block_id, int)]
        self.pins.subtract(ids)
        assert all(self.pins[block_id] >= 0 for block_id in ids), f"blocks {ids} were unpinned more often than pinned"
