"""Keys of prefixes: what another language must make of the same tokens, and what makes two keys differ."""

from __future__ import annotations

import hashlib
import re
import struct
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.protocol.prompts import marked_by_keys
from kvflow.errors import RequestError
from kvflow.prefix import prefix_keys
from kvflow.prefix.keys import SALT_BYTES_MAX
from tests.support.tests_support import each

PAGE = Path(__file__).parents[2] / "docs" / "prefix.md"
TOKENS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=70)


def by_the_formula(tokens: list[int], end: int, salt: bytes) -> bytes:
    data = b"kvflow-prefix-1\0" + struct.pack("<I", len(salt)) + salt + struct.pack(f"<{end}q", *tokens[:end])
    return hashlib.blake2b(data, digest_size=32).digest()


def test_the_docs_have_a_vector_for_other_languages() -> None:
    rows = re.findall(r"^\| ([-\d, ]+) \| (none|`\w+`) \| `(\w{64})` \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 4
    for numbers, said, key in rows:
        tokens, salt = [int(number) for number in numbers.split(",")], b"" if said == "none" else said[1:-1].encode()
        assert prefix_keys(tokens, len(tokens), salt=salt)[0].hex() == key
        assert by_the_formula(tokens, len(tokens), salt).hex() == key


@given(TOKENS, st.integers(1, 20), st.binary(max_size=40))
def test_each_full_block_has_the_key_of_all_tokens_before_its_end(tokens: list[int], block: int, salt: bytes) -> None:
    ends = range(block, len(tokens) + 1, block)
    assert prefix_keys(tokens, block, salt=salt) == [by_the_formula(tokens, end, salt) for end in ends]


@given(TOKENS, st.integers(1, 8), st.integers(1, 8))
def test_blocks_of_other_sizes_agree_at_common_boundaries(tokens: list[int], block: int, times: int) -> None:
    keys = prefix_keys(tokens, block)
    assert prefix_keys(tokens, block * times) == keys[times - 1 :: times]


def test_salts_marks_and_tokens_make_other_keys() -> None:
    tokens = list(range(32))
    found = [prefix_keys(tokens, 16, salt=salt) for salt in (b"", b"a", b"a\0")]
    found += [prefix_keys(marked_by_keys(tokens, {3: [("mm", "a picture")]}), 16), prefix_keys([7, *tokens[1:]], 16)]
    assert len({key for keys in found for key in keys}) == 10
    after_the_first = prefix_keys(marked_by_keys(tokens, {20: [("mm", "a picture")]}), 16)
    assert [after_the_first[at] == found[0][at] for at in (0, 1)] == [True, False]


@pytest.mark.parametrize("make", [list, tuple, np.array, lambda tokens: array("q", tokens), range])
def test_tokens_may_be_in_any_flat_sequence(make: type) -> None:
    given = range(33) if make is range else make(list(range(33)))
    assert prefix_keys(given, 16) == prefix_keys(list(range(33)), 16)


WRONG: dict[str, tuple[Any, ...]] = {
    "tokens": ("12", [1.5], [True], [1 << 63], [[1]], None, [None], b"12"),
    "block_tokens": (0, 1.0, None),
    "salt": ("tenant", None, bytes(SALT_BYTES_MAX + 1)),
}


@each(("said", "wrong"), [(said, wrong) for said, values in WRONG.items() for wrong in values])
def test_nonsense_is_refused_by_name(said: str, wrong: Any) -> None:
    given: dict[str, Any] = {"tokens": [1], "block_tokens": 1, "salt": b"", said: wrong}
    with pytest.raises(RequestError, match=f"^{said}: expected"):
        prefix_keys(given["tokens"], given["block_tokens"], salt=given["salt"])


def test_a_block_larger_than_the_prompt_and_than_any_memory_has_no_key() -> None:
    assert prefix_keys([1, 2], (1 << 63) - 1) == []
    assert prefix_keys([], 1) == []
