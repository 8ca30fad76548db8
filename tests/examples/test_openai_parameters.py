"""The parameters of the example server's clients: every parameter of OpenAI has its place, every refusal names one."""

from __future__ import annotations

import inspect
from typing import Any

import openai
import pytest
from openai_server.parameters import ChatRequest, CompletionRequest, GenerationRequest
from paged_engine import GREEDY, Sampling
from pydantic import ValidationError

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a"}
NEEDED: dict[type[GenerationRequest], dict[str, Any]] = {ChatRequest: CHAT, CompletionRequest: COMPLETION}
OF_THE_CLIENT_ITSELF = {"extra_headers", "extra_query", "extra_body", "timeout"}
TEXT = {"type": "text", "text": "a"}


def chat(**parameters: Any) -> ChatRequest:
    return ChatRequest(**(CHAT | parameters))


def completion(**parameters: Any) -> CompletionRequest:
    return CompletionRequest(**(COMPLETION | parameters))


def said(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("kind", NEEDED)
def test_every_parameter_of_the_openai_client_has_its_place_and_null_asks_for_nothing(
    kind: type[GenerationRequest],
) -> None:
    with openai.OpenAI(api_key="none", base_url="http://127.0.0.1:1") as client:
        create = client.chat.completions.create if kind is ChatRequest else client.completions.create
        known = set(inspect.signature(create).parameters) - OF_THE_CLIENT_ITSELF
    assert known <= {*kind.model_fields}
    needed = NEEDED[kind]
    nothing = dict.fromkeys(known - set(needed))
    assert kind(**(needed | nothing)).token_limit == kind(**needed).token_limit


NOT_SUPPORTED: list[tuple[type[GenerationRequest], str, object, object]] = [
    (ChatRequest, "n", 1, 2),
    (ChatRequest, "n", None, 0),
    (ChatRequest, "presence_penalty", 0, 0.1),
    (ChatRequest, "frequency_penalty", 0.0, -1),
    (ChatRequest, "logit_bias", {}, {"5": 1}),
    (ChatRequest, "tools", [], [{"type": "function"}]),
    (ChatRequest, "functions", [], [{"name": "f"}]),
    (ChatRequest, "tool_choice", "auto", "required"),
    (ChatRequest, "function_call", "none", {"name": "f"}),
    (ChatRequest, "response_format", {"type": "text"}, {"type": "json_schema", "json_schema": {}}),
    (ChatRequest, "modalities", ["text"], ["text", "audio"]),
    (ChatRequest, "logprobs", False, True),
    (ChatRequest, "top_logprobs", 0, 3),
    (ChatRequest, "store", False, True),
    (ChatRequest, "reasoning_effort", "none", "high"),
    (ChatRequest, "verbosity", "medium", "low"),
    (ChatRequest, "audio", None, {"voice": "x", "format": "wav"}),
    (ChatRequest, "web_search_options", None, {}),
    (CompletionRequest, "best_of", 1, 3),
    (CompletionRequest, "echo", False, True),
    (CompletionRequest, "logprobs", None, 0),
    (CompletionRequest, "suffix", "", "end"),
]
REFUSED: list[tuple[type[GenerationRequest], str, object, str]] = [
    *((kind, parameter, harmful, "") for kind, parameter, _, harmful in NOT_SUPPORTED),
    (ChatRequest, "stop", list("abcde"), "at most 4 items"),
    (ChatRequest, "stop", "", "at least 1 character"),
    (ChatRequest, "stop", ["a", ""], "at least 1 character"),
    (ChatRequest, "stop", "x" * 1001, "at most 1000 characters"),
    (ChatRequest, "stop", 5, "tuple"),
    (ChatRequest, "stop", ["a", 5], "a valid string"),
    (ChatRequest, "temperature", -0.1, "greater than or equal to 0"),
    (ChatRequest, "temperature", 2.1, "less than or equal to 2"),
    (ChatRequest, "temperature", float("nan"), "finite"),
    (ChatRequest, "temperature", "hot", "number"),
    (ChatRequest, "top_p", 1.1, "less than or equal to 1"),
    (ChatRequest, "top_p", float("inf"), "finite"),
    (ChatRequest, "seed", 2**63, "less than or equal to"),
    (ChatRequest, "seed", 0.5, "integer"),
    (ChatRequest, "max_tokens", 0, "greater than or equal to 1"),
    (ChatRequest, "deadline_s", -1, "greater than 0"),
    (ChatRequest, "top_k", 5, "not permitted"),
    (CompletionRequest, "prompt", ["a", "b"], "one prompt a request, got 2"),
    (CompletionRequest, "prompt", [[1], [2], [3]], "one prompt a request, got 3"),
    (CompletionRequest, "prompt", [1, "a"], "a text, or a list of tokens"),
    (CompletionRequest, "prompt", 5, "a text, or a list of tokens"),
    (CompletionRequest, "prompt", None, "a text, or a list of tokens"),
    (CompletionRequest, "prompt", "\ud800", "surrogates not allowed"),
    (ChatRequest, "messages.0.content", [{"type": "image_url", "image_url": {"url": "x"}}], "should be 'text'"),
    (ChatRequest, "messages.0.content", [{"type": "text"}], "Field required"),
    (ChatRequest, "messages.0.content", [5], "a valid dictionary"),
    (ChatRequest, "messages.0.content", None, "a valid list"),
]


@pytest.mark.parametrize(("kind", "parameter", "wrong", "why"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_cannot_be_had_is_refused_by_name(
    kind: type[GenerationRequest], parameter: str, wrong: object, why: str
) -> None:
    changed = {"messages": said(wrong)} if parameter.startswith("messages") else {parameter: wrong}
    with pytest.raises(ValidationError) as caught:
        kind(**(NEEDED[kind] | changed))
    error = caught.value.errors()[0]
    assert ".".join(map(str, error["loc"])).startswith(parameter)
    assert why in error["msg"]


def test_what_asks_for_nothing_or_has_nothing_to_do_with_the_answer_is_taken() -> None:
    for kind, parameter, harmless, _ in NOT_SUPPORTED:
        kind(**(NEEDED[kind] | {parameter: harmless}))
    chat(
        user="u",
        metadata={"a": "b"},
        parallel_tool_calls=False,
        prediction={"type": "content", "content": "x"},
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="flex",
        stream_options={"include_usage": None, "include_obfuscation": False},
    )


@pytest.mark.parametrize("parameters", [{}, {"temperature": 0}, {"temperature": None, "top_p": 0.1, "seed": 4}])
def test_without_a_temperature_it_is_greedy(parameters: dict[str, Any]) -> None:
    assert chat(**parameters).sampling_with_seed() == GREEDY


def test_with_one_it_is_what_is_asked_for_and_a_seed_that_nobody_gives_is_another_one_each_time() -> None:
    asked = chat(temperature=0.7, top_p=0.0, seed=-3).sampling_with_seed()
    assert asked == Sampling(temperature=0.7, top_p=0.0, seed=-3)
    request = chat(temperature=2)
    assert request.sampling_with_seed().top_p == 1.0
    assert request.sampling_with_seed().seed != request.sampling_with_seed().seed


def test_one_thing_in_several_forms() -> None:
    for stop, stops in ((None, ()), ("a", ("a",)), ([], ()), (["a", "\n"], ("a", "\n")), (list("abcd"), tuple("abcd"))):
        assert chat(stop=stop).stop == completion(stop=stop).stop == stops
    with pytest.raises(ValidationError, match="contradict each other"):
        chat(max_tokens=1, max_completion_tokens=2)
    for prompt, one in (("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([], [])):
        assert completion(prompt=prompt).prompt == one
    for content in ("aa", [TEXT, TEXT]):
        (message,) = chat(messages=said(content)).messages
        assert message.for_template() == {"role": "user", "content": "aa"}
