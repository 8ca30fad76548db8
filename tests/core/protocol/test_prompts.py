"""Digests of prompts: equal for equal tokens of one request, and of nothing else."""

from __future__ import annotations

import copy
import itertools
import pickle
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.protocol.prompts import (
    MarkKeys,
    check_prompt,
    check_same_prompt,
    marked_by_keys,
    marks_of,
    prompt_digest,
    with_marks,
)
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import TOKENS, PromptMismatch, RequestError
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


def marked(tokens: Sequence[int], marks: Mapping[int, bytes]) -> list[int]:
    """Return a prompt with marks of an unknown kind."""
    return marked_by_keys(tokens, {place: [("mark", mark)] for place, mark in marks.items()})


@given(prompt=prompts.filter(len), data=st.data())
def test_marks_tell_prompts_of_the_same_tokens_apart(prompt: list[int], data: st.DataObject) -> None:
    """Only marks within the offered tokens count. A prompt without marks keeps its digest."""
    place, offered = data.draw(st.integers(0, len(prompt) - 1)), data.draw(st.integers(0, len(prompt)))
    one, other = marked(prompt, {place: b"one"}), marked(prompt, {place: b"other"})
    assert marked(prompt, {}) == prompt
    for ours, theirs in itertools.permutations((prompt, one, other), 2):
        refused = pytest.raises(PromptMismatch, match="adapter, picture or salt") if place < offered else nullcontext()
        with refused:
            check_prompt(ticket_of(ours[:offered]), theirs, "request 'r'")
        check_prompt(ticket_of(ours[:offered]), ours, "request 'r'")


def test_a_mark_is_of_its_token_and_the_same_on_all_machines() -> None:
    assert marked([1, 2, 3], {1: b"mark"}) == [1, 7135290801960003958, 3]
    assert marked([1, 7, 3], {1: b"mark"}) != [1, 7135290801960003958, 3]


PICTURE, ADAPTER, SALT, EMBEDDING = (
    ("mm", "red"),
    ("lora", "one", "/one"),
    ("cache_salt", "s"),
    ("prompt_embeds", b"\1"),
)


@each(
    ("theirs", "ours", "parts", "message"),
    [
        ({3: [PICTURE]}, {}, ("pictures",), "are those that .* offers, but without its pictures"),
        ({3: [PICTURE]}, {3: [("mm", "blue")]}, ("pictures",), "but with other pictures"),
        ({3: [PICTURE]}, {4: [PICTURE]}, ("pictures",), "but with other pictures"),
        ({}, {3: [PICTURE]}, ("pictures",), "but with pictures, where it has none"),
        ({0: [ADAPTER]}, {}, ("adapter",), "but without its adapter"),
        ({0: [ADAPTER]}, {0: [("lora", "one", "/two")]}, ("adapter",), "but with another adapter"),
        ({0: [ADAPTER, SALT]}, {0: [ADAPTER]}, ("cache salt",), "but without its cache salt"),
        (
            {0: [SALT], 2: [PICTURE]},
            {0: [("cache_salt", "t")]},
            ("cache salt", "pictures"),
            "another cache salt, and with",
        ),
        ({0: [EMBEDDING]}, {0: [("prompt_embeds", b"\2")]}, ("embeddings",), "but with other embeddings"),
        ({0: [("new", "kind")]}, {}, ("adapter, picture or salt",), "but without its adapter, picture or salt"),
    ],
)
def test_what_differs_beside_the_tokens_is_named(
    theirs: MarkKeys, ours: MarkKeys, parts: tuple[str, ...], message: str
) -> None:
    """An engine must not compute such a request: it may have lost its picture on the way."""
    ticket, prompt = ticket_of(marked_by_keys(PROMPT, theirs)), marked_by_keys(PROMPT, ours)
    with pytest.raises(PromptMismatch, match=message) as caught:
        check_prompt(ticket, prompt, "request 'r'")
    assert caught.value.parts == parts
    for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert again.parts == parts
    twin = msgspec.structs.replace(ticket, prompt_digest=prompt_digest(ticket.request_id, prompt))
    with pytest.raises(PromptMismatch, match=f"of other {parts[0]}") as caught:
        check_same_prompt(ticket, twin, "request 'r'")
    assert caught.value.parts == parts


def test_other_tokens_are_another_prompt_whatever_it_is_marked_with() -> None:
    """Such a request is computed: it is what a router that mixes tickets up makes."""
    with pytest.raises(PromptMismatch) as caught:
        check_prompt(ticket_of(marked_by_keys(PROMPT, {3: [PICTURE]})), [7, *PROMPT], "request 'r'")
    assert caught.value.parts == TOKENS
    assert PromptMismatch("of other lengths").parts == TOKENS


@given(prompt=prompts, places=st.sets(st.integers(0, 25), max_size=5), cut=st.slices(20))
def test_a_slice_of_a_marked_prompt_is_the_slice_that_is_marked(
    prompt: list[int], places: set[int], cut: slice
) -> None:
    """Whole prompts and their parts cross processes, too."""
    whole = marked(prompt, {place: b"%d" % place for place in places})
    kept = [place for place in range(len(prompt))[cut] if place in places]
    at = {nth: b"%d" % place for nth, place in enumerate(range(len(prompt))[cut]) if place in places}
    assert whole[cut] == marked(prompt[cut], at)
    assert [mark.token for mark in sorted(marks_of(whole[cut]), key=lambda one: one.place)] == [
        prompt[one] for one in kept
    ]
    digest = prompt_digest("r", whole)
    assert prompt_digest("r", pickle.loads(pickle.dumps(whole))) == digest
    assert prompt_digest("r", with_marks(tuple(whole), marks_of(whole)) or []) == digest
    assert prompt_digest("r", whole[:7] + whole[7:]) == digest
    assert not places or digest.split(":")[0] == prompt_digest("r", prompt)


def test_nobody_can_guess_a_salt_from_a_ticket_without_the_tokens() -> None:
    one, other = (prompt_digest("r", marked_by_keys(tokens, {0: [SALT]})) for tokens in ([1, 2], [1, 3]))
    assert one.split(":")[1] != other.split(":")[1]


def test_a_digest_has_a_part_for_each_kind_and_fits_a_ticket() -> None:
    everything = {0: [ADAPTER, SALT, PICTURE, EMBEDDING, ("new", "kind")]}
    ticket = ticket_of(marked_by_keys(PROMPT, everything))
    kinds = [part.split("=")[0] for part in ticket.prompt_digest.split(":")[1:]]
    assert kinds == ["cache_salt", "lora", "mark", "mm", "prompt_embeds"]
    assert Ticket.from_params(ticket.to_params()) == ticket
