"""Prefix cache for tests: the blocks that hold tokens of prompts, and their pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvflow.prefix.keys import prefix_keys
from kvflow.prefix.prefix_cache import PinnedPrefix

__all__ = ["FakePrefixCache"]


class FakePrefixCache:
    """A `PrefixCache` of one group of layers, filled and emptied by a test.

    Args:
        block_tokens: Tokens in a block of the cache.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks_of: dict[bytes, tuple[int, ...]] = {}
        """The blocks of a prefix, by the key of its end."""
        self.pins: Counter[int] = Counter()
        """Pins of each block for readers."""
        self.asked = 0
        """Questions so far."""

    def put(self, tokens: Sequence[int], block_ids: Sequence[int], *, salt: bytes = b"") -> None:
        """Add the full blocks of a prompt.

        Args:
            tokens: Of the prompt, from the first one on.
            block_ids: In prompt order.
            salt: As for `prefix_keys`.
        """
        keys = prefix_keys(tokens, self._block_tokens, salt=salt)
        for at, (key, _) in enumerate(zip(keys, block_ids, strict=True)):
            self._blocks_of[key] = tuple(block_ids[: at + 1])

    def evict(self, block_ids: Sequence[int]) -> None:
        """Remove blocks, as before they are used for other tokens.

        Args:
            block_ids: None of them pinned.

        Raises:
            AssertionError: One is pinned.
        """
        gone = set(block_ids)
        pinned = sorted(block_id for block_id in gone if self.pins[block_id])
        assert not pinned, f"blocks {pinned} are pinned for readers"
        self._blocks_of = {key: ids for key, ids in self._blocks_of.items() if not gone & set(ids)}

    def match(self, keys: Sequence[bytes], key_tokens: int) -> PinnedPrefix | None:
        """Find the longest beginning of a prefix: see `PrefixCache.match`.

        Args:
            keys: One for each `key_tokens` tokens.
            key_tokens: A multiple of this cache's block size, or nothing is found.

        Returns:
            The prefix, pinned; None if its first block is not there.
        """
        self.asked += 1
        found: tuple[int, ...] = ()
        for key in keys if key_tokens % self._block_tokens == 0 else ():
            if key not in self._blocks_of:
                break
            found = self._blocks_of[key]
        self.pins.update(found)
        return PinnedPrefix(found, len(found) * self._block_tokens) if found else None

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Take a pin off.

        Args:
            pinned: As `match` has given it.
        """
        ids = [block_id for block_id in pinned.block_ids if isinstance(block_id, int)]
        self.pins.subtract(ids)
        assert all(self.pins[block_id] >= 0 for block_id in ids), f"blocks {ids} were unpinned more often than pinned"
