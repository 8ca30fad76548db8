"""Checks that the local blocks of a load match the tokens of an offer.

The request says at which token the local blocks begin (`cached_tokens`); this is never derived from the number of
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import RequestError


def check_not_beyond(
    groups: Sequence[GroupFacts], tables: Sequence[BlockIds], cached_tokens: int, tokens: int, what: str, which: str
) -> None:
    """Raise RequestError if a request has local blocks beyond the prompt's first `tokens` tokens.

    `tables`: the local blocks of each group; those for full attention begin at token `cached_tokens`. `what` begins the
    message. `which` is a phrase for the message, such as "the 5 tokens of its prompt".
    """
    for group, ids in zip(groups, tables, strict=True):
        size = group.block_size
        first_block, filled = cached_tokens // size if group.whole else 0, -(-tokens // size)
        if len(ids) and first_block + len(ids) > filled:
            places = (
                f"for tokens {first_block * size} to {(first_block + len(ids)) * size} (cached_tokens {cached_tokens})"
            )
            blocks = f"{counted(len(ids), 'local block')}{_of(groups, group)} of {counted(size, 'token')}"
            raise RequestError(f"{what}: {blocks}, {places}, but {which} fill {filled}")


def check_blocks_match(
    groups: Sequence[GroupFacts],
    tables: Sequence[BlockIds],
    cached_tokens: int,
    tokens: int,
    *,
    expected_tokens: int | None,
    what: str,
    producer: str,
    kind: type[RequestError] = RequestError,
) -> None:
    """Raise RequestError unless the local blocks of a load hold exactly the offered tokens from `cached_tokens` on.

    In a group that holds a prompt from its first token on, the blocks begin with the block of token `cached_tokens` and
    must end with the block of the last offered token. In another group, such as a sliding window, the blocks always end
    with the last offered token, so the number of blocks does not show which token the caller expects to be the last.
    The check of that group passes only if some group of the first sort has a block size that divides the group's own,
    or if `expected_tokens` ends in the same block as the offer.

    `tables`: the local blocks of each group. `tokens`: number of offered tokens. `expected_tokens`: number that the
    caller expects; None if not given. `what` begins the message, which names the `producer`. `kind`: class of the error
    if blocks and offer end at different tokens.
    """
    if not any(map(len, tables)):
        return
    whole = [group.block_size for group in groups if group.whole]
    begun = [group.block_size for group, ids in zip(groups, tables, strict=True) if group.whole and len(ids)]
    if begun and all(cached_tokens % size for size in begun):
        sizes = " or ".join(map(str, dict.fromkeys(begun)))
        raise RequestError(f"{what}: cached_tokens is {cached_tokens}, not a multiple of a block's size, {sizes}")
    offer = f"the {counted(tokens, 'token')} that {producer} offers"
    for group, ids in zip(groups, tables, strict=True):
        size, count = group.block_size, len(ids)
        first_block, end = cached_tokens // size, -(-tokens // size)
        blocks = f"{what}: {counted(count, 'local block')}{_of(groups, group)} of {counted(size, 'token')}"
        # Without this check the last blocks of a longer offer would be read in silence.
        if group.whole and count and first_block + count != end:
            places = (
                f"for tokens {first_block * size} to {(first_block + count) * size} (cached_tokens {cached_tokens})"
            )
            raise kind(f"{blocks}, {places}, but {offer} fill {end}")
        if group.whole and not count and not tokens <= cached_tokens <= end * size:
            cached = counted(cached_tokens, "token")
            raise kind(f"{blocks}, with {cached} cached, but {offer} fill {counted(end, 'block')}")
        if group.kind is GroupKind.STATE and count > min(tokens, 1):
            raise RequestError(f"{blocks}, but {offer} have {min(tokens, 1)}")
        if group.whole or group.kind is GroupKind.STATE or not count:
            continue
        if count > end:
            raise RequestError(f"{blocks}, but {offer} have {end}")
        # An offer of other tokens has as many blocks of a window, so only another group or the caller can tell.
        known = not all(size % other for other in whole) or (
            expected_tokens is not None and -(-expected_tokens // size) == end
        )
        if not known:
            said = "num_tokens is not given" if expected_tokens is None else f"the caller expects {expected_tokens}"
            raise kind(
                f"{blocks} end where the prompt does, but {said}, and {producer} offers {counted(tokens, 'token')}"
            )


def _of(groups: Sequence[GroupFacts], group: GroupFacts) -> str:
    return f" of group {group.name!r}" if len(groups) > 1 else ""
