"""Prefill replicas that load computed prefixes from each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from disaggregated.messages import AnswerRequest, Step
from paged_engine.tokenizer import ChatTokenizer
from ray import serve
from ray_server.application import build
from ray_server.cluster import APP, wait_until

from tests.ray.fleet import WHOLE_S, Fleet, fixed
from tests.support.server_load import BEGINNINGS, Question, tokens_alone

TOKENS = 12
BLOCK_TOKENS = 16
SHARED = " ".join(BEGINNINGS * 3)  # a system prompt, so to speak


def test_a_prefix_that_another_replica_has_computed_is_loaded(fleet: Fleet) -> None:
    """The second replica computes the rest of the prompt; the text is that of one engine alone."""
    fleet.have(fixed(2), fixed(1), share_prefixes=True)
    wait_until(lambda: [one["others"] for one in counts(fleet).values()] == [1, 1], "they know each other", WHOLE_S)
    tokenizer, checkpoint = ChatTokenizer(Path(fleet.checkpoint)), Path(fleet.checkpoint)
    right = asyncio.run(
        tokens_alone(checkpoint, [Question(text=SHARED + end, chat=False) for end in (" A", " B")], TOKENS)
    )
    prompts = {question: tokenizer.encode_text(question.text) for question in right}
    (one, first), (two, second) = prompts.items()

    assert answer(fleet, first) == right[one]
    before = counts(fleet)
    (home,) = [name for name, now in before.items() if now["computed"]]
    (other,) = before.keys() - {home}
    assert before[home]["computed"] == len(first)

    assert answer(fleet, second, avoid=home) == right[two]
    after = counts(fleet)
    assert after[home]["computed"] == len(first), "it has not computed anything more"
    assert after[home]["found"] == 1, "a prefix was found here"
    shared = next(index for index, (one, two) in enumerate(zip(first, second, strict=True)) if one != two)
    assert after[other]["computed"] == len(second) - shared // BLOCK_TOKENS * BLOCK_TOKENS
    wait_until(
        lambda: fleet.shows("kvflow_prefix_questions", 'outcome="found"', home), "its metric says so, too", WHOLE_S
    )
    assert answer(fleet, first, tokens=1) == right[one][:1], "nothing is loaded for one token"
    wait_until(fleet.whole, "all blocks are free", WHOLE_S)


def test_a_rolling_update_keeps_what_is_computed(fleet: Fleet) -> None:
    """Each replica that leaves hands its prompts on to one that stays, or that has come."""
    fleet.have(fixed(2), fixed(1), share_prefixes=True)
    wait_until(lambda: [one["others"] for one in counts(fleet).values()] == [1, 1], "they know each other", WHOLE_S)
    tokenizer, checkpoint = ChatTokenizer(Path(fleet.checkpoint)), Path(fleet.checkpoint)
    questions = [Question(text=SHARED + end, chat=False) for end in (" C", " D")]
    right = asyncio.run(tokens_alone(checkpoint, questions, TOKENS))
    first, second = (tokenizer.encode_text(question.text) for question in questions)
    old = counts(fleet).keys()

    assert answer(fleet, first) == right[questions[0]]
    fleet.have(fixed(2, ray_actor_options={"num_cpus": 0.4}), fixed(1), share_prefixes=True)
    wait_until(lambda: [one["others"] for one in counts(fleet).values()] == [1, 1], "they know each other", WHOLE_S)
    new = counts(fleet)
    assert not old & new.keys()
    (keeper,) = [name for name, now in new.items() if now["taken"]]
    assert new[keeper]["taken"] == len(first) // BLOCK_TOKENS * BLOCK_TOKENS

    assert answer(fleet, second, avoid=keeper) == right[questions[1]]
    shared = next(index for index, (one, two) in enumerate(zip(first, second, strict=True)) if one != two)
    computed = sum(now["computed"] for now in counts(fleet).values())
    assert computed == len(second) - shared // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_setting_that_cannot_be_right_is_refused() -> None:
    with pytest.raises(ValueError, match="share_prefixes: expected true or false, got 'yes'"):
        build({"checkpoint": "model", "share_prefixes": "yes"})


def answer(fleet: Fleet, prompt: list[int], avoid: str = "", tokens: int = TOKENS) -> list[int]:
    """Return the tokens of an answer without the replica `avoid`."""
    request = AnswerRequest(request_id=f"r{tokens}{avoid}", prompt=prompt, max_tokens=tokens, deadline_s=60)
    handle = serve.get_deployment_handle("Decode", APP).options(stream=True)
    steps: list[Step] = list(handle.generate.remote(request, avoid=(avoid,)))
    return [step.token for step in steps]


def counts(fleet: Fleet) -> dict[str, dict[str, int]]:
    return {one["replica"]: one for one in fleet.ask("Prefill", "counts")}
