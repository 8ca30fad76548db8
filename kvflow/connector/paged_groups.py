"""Groups of a paged cache, with two sizes of blocks: those of the engine's tables, and those its ranks have registered.

Ranks may have registered smaller blocks than the engine's, as many of theirs to one of the engine's, one behind the
other. Tables come from the engine and count its blocks; whatever leaves for the workers counts the ranks'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec

from kvflow.checks import counted
from kvflow.connector.step import BlockTables, GivenTables
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.errors import ConfigError, UsageError


class PagedGroup(NamedTuple):
    """A group of layers: its facts as registered, and how many of its blocks are one of the engine's."""

    facts: GroupFacts
    split: int = 1

    def span(self, computed: int, tokens: int) -> range:
        """Give the blocks that hold what `tokens` tokens need of the group, beyond the computed ones.

        Args:
            computed: tokens from the beginning of the prompt that need no block.
            tokens: tokens of the prompt.

        Returns:
            The blocks' places in the group's own table, in blocks as registered.
        """
        size = self.facts.block_size
        first = max(self.facts.first_needed(tokens), computed) // size
        return range(first, max(-(-tokens // size), first))

    def blocks(self, ids: Sequence[int], computed: int, tokens: int) -> tuple[int, ...]:
        """Give the ids of the blocks of `span`.

        Args:
            ids: the engine's table of a request.
            computed: as `span` takes it.
            tokens: as `span` takes it.

        Returns:
            Ids of blocks as registered, fewer if the table is shorter; of a state its slot, if there is anything to
            move.
        """
        span, split = self.span(computed, tokens), self.split
        if self.facts.kind is GroupKind.STATE:
            return tuple(ids[-1:]) if len(span) else ()
        if split == 1:
            return tuple(ids[span.start : span.stop])
        return tuple(ids[at // split] * split + at % split for at in span if at // split < len(ids))


def registered(facts: GroupFacts, block_size: int) -> PagedGroup:
    """An engine's group with the block size that its ranks have registered. ConfigError if that does not divide it."""
    split, rest = divmod(facts.block_size, max(block_size, 1))
    if rest or not split:
        what = f"group {facts.name!r}: blocks of {counted(facts.block_size, 'token')}"
        raise ConfigError(f"{what}, the ranks have registered blocks of {block_size}: they do not divide them")
    return PagedGroup(msgspec.structs.replace(facts, block_size=block_size), split)


class PagedGroups:
    """All groups of an engine's cache; until `register` its ranks' blocks are taken to be like its own."""

    def __init__(self, facts: Sequence[GroupFacts]) -> None:
        self._facts = tuple(facts)
        self._groups = tuple(map(PagedGroup, self._facts))

    @property
    def all_stays(self) -> bool:
        """True if a prompt's blocks stay what they are while its request goes on: no group has windows or state."""
        return all(group.facts.whole for group in self._groups)

    @property
    def no_blocks(self) -> BlockTables:
        """An empty table for each group."""
        return ((),) * len(self._groups)

    def register(self, sizes: Sequence[int]) -> None:
        """Take the block sizes that the ranks have registered. ConfigError if they cannot be of these groups."""
        if len(sizes) != len(self._facts):
            raise ConfigError(f"groups: {len(self._facts)} here, the ranks have registered {len(sizes)}")
        self._groups = tuple(map(registered, self._facts, sizes))

    def prompt(self, block_ids: GivenTables, tokens: int, *, complete: bool = True) -> BlockTables:
        """Blocks of a request that hold its prompt of `tokens` tokens, or those of them that it has already.

        A state's slot is the last token's, so it is among them only if the prompt is `complete`. UsageError if there
        are not as many tables as groups.
        """
        return tuple(
            group.blocks(ids, 0, tokens) if complete or group.facts.kind is not GroupKind.STATE else ()
            for group, ids in zip(self._groups, self._tables(block_ids), strict=True)
        )

    def missing(self, block_ids: GivenTables, tokens: int, external: int, what: str) -> BlockTables:
        """Blocks of a request for the last `external` of `tokens` tokens.

        UsageError that begins with `what` if those do not fill them, or there are not as many tables as groups.
        """
        computed, tables = tokens - external, self._tables(block_ids)
        found = tuple(group.blocks(ids, computed, tokens) for group, ids in zip(self._groups, tables, strict=True))
        for group, ids, blocks in zip(self._groups, tables, found, strict=True):
            size, needed = group.facts.block_size * group.split, group.span(computed, tokens)
            if computed < 0 or (group.facts.whole and computed % size) or len(blocks) != len(needed):
                raise UsageError(
                    f"{what}: {external} of {counted(tokens, 'offered token')} are to go into "
                    f"{counted(len(ids), 'block')} of {counted(size, 'token')}"
                )
        return found

    def _tables(self, block_ids: GivenTables) -> tuple[Sequence[int], ...]:
        """A table for each group. UsageError if there are more or fewer."""
        count = len(self._groups)
        nested = len(block_ids) > 0 and not isinstance(block_ids[0], int)
        tables = tuple(block_ids) if nested or count > 1 else (block_ids,)
        if len(tables) != count or (count > 1 and not nested):
            raise UsageError(f"block_ids: expected a table for each of {counted(count, 'group')}, got {len(tables)}")
        return cast("tuple[Sequence[int], ...]", tables)
