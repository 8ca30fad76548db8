"""The one rule for numbers, texts and lists: right values become Python's own, wrong values are named."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from wrong_values import REFUSED, alike

from kvflow import checks
from kvflow.errors import ConfigError, LayoutError, RequestError
from tests.support.tests_support import each

# --- what is shown of a value


@each(
    "value",
    [
        10**5000,
        "x" * 10**6,
        b"x" * 10**6,
        list(range(10**6)),
        {str(index): index for index in range(1000)},
        np.zeros((1000, 1000)),
        torch.zeros(100, 100),
        [[[[[[[[[[1]]]]]]]]]],
        "\ud800" * 100,
        type("X" * 1000, (), {})(),
    ],
)
def test_any_value_can_be_shown_in_a_line(value: object) -> None:
    text = checks.short_repr(value)
    assert 0 < len(text) <= 100
    text.encode()
    assert "\n" not in text


@given(st.text() | st.integers() | st.floats() | st.lists(st.integers()))
def test_short_values_are_shown_as_they_are(value: object) -> None:
    if len(repr(value)) <= 30:
        assert checks.short_repr(value) == repr(value)


# --- each rule


@given(st.integers())
def test_whole_numbers_of_64_bits_pass(value: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        assert checks.whole(value, "x") == value
    else:
        with pytest.raises(RequestError, match=r"^x: expected `int` [<>]= -?922337203685477580[78], got "):
            checks.whole(value, "x")


@each(("value", "bound"), [(np.int64(0), "`int` >= 1"), (10, "`int` <= 9"), (True, "`int`"), (5.0, "`int`")])
def test_the_value_and_its_bound_are_told(value: Any, bound: str) -> None:
    assert checks.whole(np.int64(5), "x", least=1, most=9) == 5
    with pytest.raises(LayoutError, match=f"^x: expected {bound}, got {re.escape(repr(value))}$"):
        checks.whole(value, "x", least=1, most=9, error=LayoutError)


@each("value", [None, 0, 0.0, 1, 1.5])
def test_a_timeout_may_be_none_and_nothing(value: Any) -> None:
    assert checks.checked(value, "x", checks.Timeout | None) == value


@each("value", ["1", True, -1, -0.5, float("nan"), float("inf"), 1e300, []])
def test_a_timeout_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x: "):
        checks.checked(value, "x", checks.Timeout | None, ConfigError)


@each("value", [[3, 1], [], (3, 1), range(3), np.arange(3), np.array([]), torch.tensor([1, 2])])
def test_lists_of_whole_numbers_become_arrays_of_their_own(value: Any) -> None:
    found = checks.whole_numbers(value, "x")
    assert (found.dtype, found.tolist()) == (np.dtype(np.int64), [int(entry) for entry in value])
    assert not (isinstance(value, np.ndarray) and np.shares_memory(found, value))


def test_a_dict_is_copied() -> None:
    given_dict: Any = {"a": 1}
    checked = checks.mapping(MappingProxyType(given_dict), "x")
    given_dict["b"] = 2
    assert checked == {"a": 1}


@each("value", [None, 5, "abc", b"abc", {1: 2}, {1, 2}.__iter__()])
def test_what_is_no_list_has_no_count(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^x: expected a list, got "):
        checks.count(value, "x")


def test_too_long_a_list_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(RequestError, match=r"^x: expected at most 3 entries, got 1000000000000$"):
        checks.count(range(10**12), "x", most=3)


def test_the_lists_of_wrong_values_hold_what_is_wrong_only() -> None:
    """Guards the tests of the border, which use these lists for every field."""
    right: dict[str, Any] = {"int": 1, "float": 1.0, "bool": True, "str": "text", "Sequence[int]": [1]}
    for asked, value in right.items():
        for form in alike(value):
            assert not any(form is wrong for wrong in REFUSED[asked]())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("plain", "plain"),
        ("x" * 20, "x" * 20),
        ("x" * 21, "x" * 20 + "..."),
        ("日本", "日本"),
        ("a\nb", r"a\nb"),
        ("\ud800", r"\ud800"),
        ('it\'s\n"so"', 'it\\\'s\\n"so"'),
        ("\x00" * 1_000_000, r"\x00" * 5 + "..."),
        ("x" * 20 + "\n", "x" * 20 + "..."),
    ],
)
def test_words_of_others_are_one_bounded_line(text: str, shown: str) -> None:
    assert checks.printable(text, 20) == shown
    assert checks.error_text(ValueError(text)) == checks.printable(text, 400)


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [(1, ("block",), "1 block"), (0, ("block",), "0 blocks"), (11, ("process", "processes"), "11 processes")],
)
def test_a_count_has_its_noun_in_the_right_number(count: int, words: tuple[str, ...], said: str) -> None:
    assert checks.counted(count, *words) == said
