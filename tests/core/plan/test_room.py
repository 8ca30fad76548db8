"""Where a load's blocks lie in the prompt: as told, or an error with both numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.plan.room import check_blocks_match, check_not_beyond
from kvflow.errors import PromptMismatch, RequestError
from tests.support.budgets import examples


def full(size: int = 16) -> GroupFacts:
    return GroupFacts(name=f"full{size}", block_size=size)


def window(size: int = 16) -> GroupFacts:
    return GroupFacts(name="local", block_size=size, kind=GroupKind.SLIDING, window=64)


STATE = GroupFacts(name="state", block_size=1, kind=GroupKind.STATE)


def check(
    groups: Sequence[GroupFacts], counts: Sequence[int], cached: int, tokens: int, told: int | None = None
) -> None:
    tables = [np.arange(count, dtype=np.int64) for count in counts]
    check_blocks_match(
        groups, tables, cached, tokens, expected_tokens=told, what="load", producer="'p'", kind=PromptMismatch
    )


FITS: list[tuple[Sequence[GroupFacts], Sequence[int], int, int, int | None]] = [
    ([full()], [3], 0, 41, None),
    ([full()], [2], 16, 41, None),
    ([full()], [1], 16, 32, None),
    ([full()], [0], 0, 41, None),  # a full hit, wherever that ends
    ([full()], [0], 999, 41, None),
    ([full(), window()], [3, 2], 0, 41, None),
    ([full(), window(32)], [3, 2], 0, 41, None),  # a block of 32 tokens ends where one of 16 does, or later
    ([full(), window(8)], [3, 3], 0, 41, 41),
    ([full(), window(8)], [3, 3], 0, 41, 45),  # it ends in the same block
    ([window()], [3], 0, 41, 41),
    ([full(), window()], [0, 2], 41, 41, None),  # all that is cached of one group
    ([full(), window()], [0, 2], 48, 41, None),
    ([full(), STATE], [2, 1], 16, 41, None),
    ([STATE], [1], 0, 41, None),
    ([full(16), full(64)], [1, 1], 48, 64, None),  # of the larger block the end is cached, and read again
]


@pytest.mark.parametrize(("groups", "counts", "cached", "tokens", "told"), FITS)
def test_blocks_that_are_for_just_what_is_offered(
    groups: Sequence[GroupFacts], counts: Sequence[int], cached: int, tokens: int, told: int | None
) -> None:
    check(groups, counts, cached, tokens, told)


FITS_NOT: list[tuple[Sequence[GroupFacts], Sequence[int], int, int, int | None, str]] = [
    # The offer of full blocks only: two of them, of 41 tokens.
    ([full()], [2], 16, 32, None, r"2 local blocks of 16 tokens, for tokens 16 to 48 .* the 32 tokens .* fill 2"),
    ([full()], [2], 0, 41, None, r"2 local blocks of 16 tokens, for tokens 0 to 32 \(cached_tokens 0\).* 41 .* fill 3"),
    ([full()], [4], 0, 41, None, "4 local blocks .* 41 tokens .* fill 3"),
    ([full()], [1], 48, 41, None, "for tokens 48 to 64 .* the 41 tokens"),
    ([full()], [1], 20, 32, None, "cached_tokens is 20, not a multiple of a block's size, 16"),
    ([full(16), full(64)], [1, 1], 50, 64, None, "cached_tokens is 50, not a multiple of a block's size, 16 or 64"),
    ([full(), window()], [0, 2], 32, 41, None, "0 local blocks of group 'full16' .* 32 tokens cached, .* 41 tokens"),
    ([full(), window()], [0, 2], 64, 41, None, "with 64 tokens cached, .* 41 tokens"),
    ([full(), window(8)], [3, 3], 0, 41, None, "end where the prompt does, but num_tokens is not given, .* 41 tokens"),
    ([full(), window(8)], [3, 3], 0, 41, 39, "the caller expects 39, and 'p' offers 41 tokens"),
    ([window()], [3], 0, 41, None, "num_tokens is not given"),
    (
        [full(), window()],
        [3, 4],
        0,
        41,
        41,
        "4 local blocks of group 'local' of 16 tokens, but the 41 tokens .* have 3",
    ),
    ([full(), STATE], [3, 2], 0, 41, 41, "2 local blocks of group 'state' of 1 token, but .* have 1"),
    ([full()], [1], 0, 0, None, "1 local block of 16 tokens, .* but the 0 tokens .* fill 0"),
    ([full(), STATE], [0, 1], 0, 0, None, "1 local block of group 'state' .* but the 0 tokens .* have 0"),
]


@pytest.mark.parametrize(("groups", "counts", "cached", "tokens", "told", "message"), FITS_NOT)
def test_blocks_that_are_for_other_tokens(
    groups: Sequence[GroupFacts], counts: Sequence[int], cached: int, tokens: int, told: int | None, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check(groups, counts, cached, tokens, told)


@examples(100, 400)
@given(size=st.integers(1, 64), begin=st.integers(0, 20), count=st.integers(1, 20), tokens=st.integers(1, 2000))
def test_one_group_fits_where_its_blocks_hold_the_last_token_and_no_more(
    size: int, begin: int, count: int, tokens: int
) -> None:
    fits = begin * size < tokens and (begin + count - 1) * size < tokens <= (begin + count) * size
    if fits:
        check([full(size)], [count], begin * size, tokens)
    else:
        with pytest.raises(PromptMismatch):
            check([full(size)], [count], begin * size, tokens)


def test_the_room_for_a_prompt_whose_offer_is_not_known() -> None:
    """Fewer blocks may be right: the engine that offers may give full blocks only."""
    tables = [np.arange(2, dtype=np.int64)]
    for cached in (0, 16):
        check_not_beyond([full()], tables, cached, 41, "load", "the prompt")
    with pytest.raises(RequestError, match=r"2 local blocks of 16 tokens, for tokens 32 to 64 .* fill 3"):
        check_not_beyond([full()], tables, 32, 41, "load", "the prompt")
