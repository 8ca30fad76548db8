"""Checks that a load has as many local blocks as the offered tokens fill."""

from __future__ import annotations

from collections.abc import Sequence

from kvflow.core.cache.groups import GroupFacts
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import PromptMismatch, RequestError


def check_room(groups: Sequence[GroupFacts], tables: Sequence[BlockIds], tokens: int, what: str, which: str) -> None:
    """RequestError if there are more local blocks than these tokens fill. Fewer are right: the rest is cached."""
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
    """PromptMismatch unless an offer ends in the same block as the prompt whose last blocks are given."""
    for group, ids in zip(groups, tables, strict=True):
        ends = {-(-tokens // group.block_size) for tokens in (prompt_tokens, offered_tokens)}
        if len(ids) and len(ends) > 1:
            given = f"{len(ids)} local blocks{_of(groups, group)} of {group.block_size} tokens"
            raise PromptMismatch(
                f"{what}: {given} end a prompt of {prompt_tokens} tokens, {whose} offers {offered_tokens}"
            )


def _of(groups: Sequence[GroupFacts], group: GroupFacts) -> str:
    return f" of group {group.name!r}" if len(groups) > 1 else ""
