"""Checks that the blocks that a load was given are those that an offer fills, as far as its tokens are known."""

from __future__ import annotations

from collections.abc import Sequence

from kvflow.core.cache.groups import GroupFacts
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import PromptMismatch, RequestError


def check_room(groups: Sequence[GroupFacts], tables: Sequence[BlockIds], tokens: int, what: str, which: str) -> None:
    """RequestError if there are more local blocks than so many tokens fill; fewer are what a prefix cache lacks."""
    for group, ids in zip(groups, tables, strict=True):
        if len(ids) > (filled := -(-tokens // group.block_size)):
            given = f"{len(ids)} local blocks{_of(groups, group)} of {group.block_size} tokens"
            raise RequestError(f"{what}: {given}, but {which} fill {filled}")


def check_end(
    groups: Sequence[GroupFacts],
    tables: Sequence[BlockIds],
    prompt_tokens: int,
    offered_tokens: int,
    what: str,
    whose: str,
) -> None:
    """PromptMismatch if an offer ends in another block than the prompt that the local blocks are the end of."""
    for group, ids in zip(groups, tables, strict=True):
        ends = {-(-tokens // group.block_size) for tokens in (prompt_tokens, offered_tokens)}
        if len(ids) and len(ends) > 1:
            given = f"{len(ids)} local blocks{_of(groups, group)} of {group.block_size} tokens"
            raise PromptMismatch(
                f"{what}: {given} end a prompt of {prompt_tokens} tokens, {whose} offers {offered_tokens}"
            )


def _of(groups: Sequence[GroupFacts], group: GroupFacts) -> str:
    return f" of group {group.name!r}" if len(groups) > 1 else ""
