"""Converts block ids of an engine's scheduler to block ids of its ranks, which may have registered smaller blocks.

If the ranks' blocks are smaller, each block of the engine consists of several consecutive blocks of the ranks. Block
tables from the engine have the engine's ids; block tables for the workers have the ranks' ids.
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
    """A group of layers with the block size that the ranks have registered.

    A block of the engine consists of `split` consecutive registered blocks.
    """

    facts: GroupFacts
    split: int = 1

    def span(self, computed: int, tokens: int) -> range:
        """Return the indexes of the registered blocks that hold a prompt's tokens after its first `computed` tokens.

        Args:
            computed: number of tokens at the beginning of the prompt to leave out.
            tokens: number of tokens of the prompt. If the group has a window, blocks before the window are left out.

        Returns:
            Indexes in the group's block table, counted in registered blocks.
        """
        size = self.facts.block_size
        first = max(self.facts.first_needed(tokens), computed) // size
        return range(first, max(-(-tokens // size), first))

    def blocks(self, ids: Sequence[int], computed: int, tokens: int) -> tuple[int, ...]:
        """Return the ids of the registered blocks that hold a prompt's tokens after its first `computed` tokens.

        Args:
            ids: the request's block table for this group, with ids of the engine's blocks.
            computed: as in `span`.
            tokens: as in `span`.

        Returns:
            One id for each index in `span(computed, tokens)`; fewer if the table is too short. For a group of recurrent
            state, only the slot with the request's state, or nothing if `span` is empty.
        """
        span, split = self.span(computed, tokens), self.split
        if self.facts.kind is GroupKind.STATE:
            return tuple(ids[-1:]) if len(span) else ()
        if split == 1:
            return tuple(ids[span.start : span.stop])
        return tuple(ids[at // split] * split + at % split for at in span if at // split < len(ids))


def as_registered(facts: GroupFacts, block_size: int) -> PagedGroup:
    """Return the group `facts` of the engine as a PagedGroup; the ranks have registered blocks of `block_size` tokens.

    ConfigError if `block_size` does not divide the block size in `facts`.
    """
    split, rest = divmod(facts.block_size, max(block_size, 1))
    if rest or not split:
        what = f"group {facts.name!r}: blocks of {counted(facts.block_size, 'token')}"
        raise ConfigError(f"{what}, the ranks have registered blocks of {block_size}, which does not divide it")
    return PagedGroup(msgspec.structs.replace(facts, block_size=block_size), split)


class PagedGroups:
    """All groups of layers of an engine's cache, with the engine's block size and the ranks' block size for each group.

    The ranks' block sizes are equal to the engine's until `set_block_sizes` is called.
    """

    def __init__(self, facts: Sequence[GroupFacts]) -> None:
        self._facts = tuple(facts)
        self._groups = tuple(map(PagedGroup, self._facts))

    @property
    def blocks_stay(self) -> bool:
        """True if no group has a window or state: then a prompt's blocks stay unchanged while the answer grows."""
        return all(group.facts.whole for group in self._groups)

    @property
    def empty_tables(self) -> BlockTables:
        return ((),) * len(self._groups)

    def set_block_sizes(self, sizes: Sequence[int]) -> None:
        """Set the ranks' block size for each group.

        ConfigError if `sizes` has another number of groups, or a size does not divide the engine's block size.
        """
        if len(sizes) != len(self._facts):
            raise ConfigError(f"groups: {len(self._facts)} here, the ranks have registered {len(sizes)}")
        self._groups = tuple(map(as_registered, self._facts, sizes))

    def prompt_blocks(self, block_ids: GivenTables, tokens: int, *, complete: bool = True) -> BlockTables:
        """Return, for each group, the ids of the registered blocks that hold the first `tokens` tokens of a request.

        `block_ids` is the engine's block table of the request, which may still lack blocks. A slot of recurrent state
        holds the state after the last token, so it is left out unless the prompt is `complete`. UsageError unless
        `block_ids` has one table for each group.
        """
        return tuple(
            group.blocks(ids, 0, tokens) if complete or group.facts.kind is not GroupKind.STATE else ()
            for group, ids in zip(self._groups, self._tables(block_ids), strict=True)
        )

    def missing_blocks(self, block_ids: GivenTables, tokens: int, external: int, what: str) -> BlockTables:
        """Return, for each group, the ids of the registered blocks into which a request's missing tokens are loaded.

        Of the request's first `tokens` tokens, the last `external` are missing. `block_ids` are the engine's block
        tables. UsageError, with a message that begins with `what`, if the tables do not fit the tokens or the groups.
        """
        computed, tables = tokens - external, self._tables(block_ids)
        missing = tuple(group.blocks(ids, computed, tokens) for group, ids in zip(self._groups, tables, strict=True))
        for group, ids, blocks in zip(self._groups, tables, missing, strict=True):
            size, needed = group.facts.block_size * group.split, group.span(computed, tokens)
            if computed < 0 or (group.facts.whole and computed % size) or len(blocks) != len(needed):
                raise UsageError(
                    f"{what}: {external} of {counted(tokens, 'offered token')} do not fit into "
                    f"{counted(len(ids), 'block')} of {counted(size, 'token')}"
                )
        return missing

    def _tables(self, block_ids: GivenTables) -> tuple[Sequence[int], ...]:
        """Return one table for each group. `block_ids` may be a single table, if there is a single group.

        UsageError if the number of tables differs from the number of groups.
        """
        count = len(self._groups)
        nested = len(block_ids) > 0 and not isinstance(block_ids[0], int)
        tables = tuple(block_ids) if nested or count > 1 else (block_ids,)
        if len(tables) != count or (count > 1 and not nested):
            raise UsageError(f"block_ids: expected a table for each of {counted(count, 'group')}, got {len(tables)}")
        return cast("tuple[Sequence[int], ...]", tables)
