"""Checks that local blocks are for just the tokens of an offer: where they begin is said, and not counted."""

from __future__ import annotations

from collections.abc import Sequence

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import RequestError


def check_room(
    groups: Sequence[GroupFacts], tables: Sequence[BlockIds], cached_tokens: int, tokens: int, what: str, which: str
) -> None:
    """RequestError if local blocks, which begin at token `cached_tokens`, go beyond the blocks that `tokens` fill."""
    for group, ids in zip(groups, tables, strict=True):
        size = group.block_size
        first, filled = cached_tokens // size if group.whole else 0, -(-tokens // size)
        if len(ids) and first + len(ids) > filled:
            places = f"for tokens {first * size} to {(first + len(ids)) * size} (cached_tokens {cached_tokens})"
            given = f"{counted(len(ids), 'local block')}{_of(groups, group)} of {counted(size, 'token')}"
            raise RequestError(f"{what}: {given}, {places}, but {which} fill {filled}")


def check_place(
    groups: Sequence[GroupFacts],
    tables: Sequence[BlockIds],
    cached_tokens: int,
    tokens: int,
    *,
    told: int | None,
    what: str,
    whose: str,
    kind: type[RequestError] = RequestError,
) -> None:
    """Raise an error with both numbers unless the local blocks are for just the offered tokens from `cached_tokens` on.

    The blocks of a group that holds a prompt from its first token on begin with the block of token `cached_tokens`, and
    have to end with that of the last offered token. A window's blocks, and a state, belong to the last offered token.
    So that token has to be known from elsewhere than the offer: from the blocks of other groups, where these are not
    larger, or by `told`, the tokens of the prompt as the caller has said them.

    Args:
        groups: the local groups.
        tables: the local blocks of each.
        cached_tokens: tokens of the prompt in front of the local blocks.
        tokens: offered tokens.
        told: tokens that the caller expects; None if it has not said so.
        what: beginning of the message.
        whose: the producer, as the message names it.
        kind: the error where blocks and offer end at different tokens.

    Raises:
        RequestError: or `kind`, a subclass of it.
    """
    if not any(map(len, tables)):
        return
    whole = [group.block_size for group in groups if group.whole]
    begun = [group.block_size for group, ids in zip(groups, tables, strict=True) if group.whole and len(ids)]
    if begun and all(cached_tokens % size for size in begun):
        sizes = " or ".join(map(str, dict.fromkeys(begun)))
        raise RequestError(f"{what}: cached_tokens is {cached_tokens}, no multiple of a block's size, {sizes}")
    offer = f"the {counted(tokens, 'token')} that {whose} offers"
    for group, ids in zip(groups, tables, strict=True):
        size, count = group.block_size, len(ids)
        first, end = cached_tokens // size, -(-tokens // size)
        given = f"{what}: {counted(count, 'local block')}{_of(groups, group)} of {counted(size, 'token')}"
        if group.whole and count and first + count != end:
            places = f"for tokens {first * size} to {(first + count) * size} (cached_tokens {cached_tokens})"
            raise kind(f"{given}, {places}, but {offer} fill {end}")
        if group.whole and not count and not tokens <= cached_tokens <= end * size:
            cached = counted(cached_tokens, "token")
            raise kind(f"{given}, with {cached} cached, but {offer} fill {counted(end, 'block')}")
        if group.kind is GroupKind.STATE and count > 1:
            raise RequestError(f"{given}, but {offer} have 1")
        if group.whole or group.kind is GroupKind.STATE or not count:
            continue
        if count > end:
            raise RequestError(f"{given}, but {offer} have {end}")
        known = not all(size % other for other in whole) or (told is not None and -(-told // size) == end)
        if not known:
            said = "num_tokens is not given" if told is None else f"the caller expects {told}"
            raise kind(f"{given} end where the prompt does, but {said}, and {whose} offers {counted(tokens, 'token')}")


def _of(groups: Sequence[GroupFacts], group: GroupFacts) -> str:
    return f" of group {group.name!r}" if len(groups) > 1 else ""
