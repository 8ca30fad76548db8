"""Digests of prompts: equal for equal tokens of one request, and of nothing else."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.protocol.prompts import check_prompt, marked, prompt_digest
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PromptMismatch, RequestError
from tests.support.tests_support import any_ticket, each

PROMPT = list(range(1000, 1041))

prompts = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def ticket_of(prompt: Sequence[int], *, says: bool = True) -> Ticket:
    return any_ticket(num_tokens=len(prompt), prompt_digest=prompt_digest("req-1", prompt) if says else "")


@each("make", [tuple, np.array, np.int32, torch.tensor, lambda ids: array("i", ids)])
def test_it_does_not_matter_what_holds_the_tokens(make: Any) -> None:
    assert prompt_digest("r", make(PROMPT)) == prompt_digest("r", PROMPT)
    check_prompt(ticket_of(PROMPT), make([*PROMPT, 7]), "request 'r'")


def test_the_digest_is_the_same_on_all_machines() -> None:
    assert prompt_digest("r", [1, 2, 3]) == "c59cb2f4d3706ca21a70a2b24df4d5fc"


@given(one=prompts, other=prompts)
def test_other_prompts_have_other_digests(one: list[int], other: list[int]) -> None:
    assert (prompt_digest("r", one) == prompt_digest("r", other)) == (one == other)
    assert prompt_digest("r", one) != prompt_digest("s", one)


@given(prompt=prompts, more=prompts)
def test_what_begins_with_the_offered_tokens_fits(prompt: list[int], more: list[int]) -> None:
    check_prompt(ticket_of(prompt), prompt + more, "request 'r'")


def test_a_ticket_that_does_not_say_fits_everything() -> None:
    check_prompt(ticket_of(PROMPT, says=False), [], "request 'r'")


@each(
    ("prompt", "message"),
    [
        (PROMPT[:-1], "request 'r': its prompt has 40 tokens, the ticket of request 'req-1' offers 41"),
        ([*PROMPT[:-1], 7], "the first 41 tokens of its prompt are not those .* digest [0-9a-f]{32}, the ticket's is"),
        (PROMPT[::-1], "are not those"),
    ],
)
def test_another_prompt_is_refused(prompt: list[int], message: str) -> None:
    with pytest.raises(PromptMismatch, match=message):
        check_prompt(ticket_of(PROMPT), prompt, "request 'r'")


@each("wrong", [[1.5], ["a"], [[1], [2]], [None], [[1], [2, 3]], [1 << 70], "abc", [True]])
def test_what_are_no_token_ids_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"^request 'r': prompt: expected a flat list of whole numbers"):
        prompt_digest("r", wrong)


@given(prompt=prompts.filter(len), data=st.data())
def test_marks_tell_prompts_of_the_same_tokens_apart(prompt: list[int], data: st.DataObject) -> None:
    """As far as they are in what is offered; without any a prompt is what it was."""
    place, offered = data.draw(st.integers(0, len(prompt) - 1)), data.draw(st.integers(0, len(prompt)))
    one, other = marked(prompt, {place: b"one"}), marked(prompt, {place: b"other"})
    assert marked(prompt, {}) == prompt
    for ours, theirs in itertools.permutations((prompt, one, other), 2):
        refused = pytest.raises(PromptMismatch, match="adapter, picture or salt") if place < offered else nullcontext()
        with refused:
            check_prompt(ticket_of(ours[:offered]), theirs, "request 'r'")
        check_prompt(ticket_of(ours[:offered]), ours, "request 'r'")


def test_a_mark_is_of_its_token_and_the_same_on_all_machines() -> None:
    assert marked([1, 2, 3], {1: b"mark"}) == [1, 8227428212062431017, 3]
    assert marked([1, 7, 3], {1: b"mark"}) != [1, 8227428212062431017, 3]
