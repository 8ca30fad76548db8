"""What the example server's clients may ask for: every parameter of OpenAI's has its place, every refusal names one."""

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
OF_THE_CLIENT_ITSELF = {"extra_headers", "extra_query", "extra_body", "timeout"}


def chat(**parameters: Any) -> ChatRequest:
    return ChatRequest(**(CHAT | parameters))


def completion(**parameters: Any) -> CompletionRequest:
    return CompletionRequest(**(COMPLETION | parameters))


def refused(kind: type[GenerationRequest], parameters: dict[str, Any]) -> tuple[str, str]:
    """The parameter that a refusal names, and why."""
    with pytest.raises(ValidationError) as caught:
        kind(**parameters)
    (error,) = caught.value.errors()
    return ".".join(map(str, error["loc"])), error["msg"]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_every_parameter_of_the_openai_client_has_its_place(kind: type[GenerationRequest]) -> None:
    with openai.OpenAI(api_key="none", base_url="http://127.0.0.1:1") as client:
        create = client.chat.completions.create if kind is ChatRequest else client.completions.create
        known = set(inspect.signature(create).parameters) - OF_THE_CLIENT_ITSELF
    assert known - set(kind.model_fields) == set()


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_null_asks_for_nothing(kind: type[GenerationRequest]) -> None:
    needed = CHAT if kind is ChatRequest else COMPLETION
    nothing = dict.fromkeys(set(kind.model_fields) - set(needed))
    assert kind(**(needed | nothing)).token_limit == kind(**needed).token_limit


@pytest.mark.parametrize(
    ("parameter", "harmless", "harmful"),
    [
        ("n", 1, 2),
        ("n", None, 0),
        ("presence_penalty", 0, 0.1),
        ("frequency_penalty", 0.0, -1),
        ("logit_bias", {}, {"5": 1}),
        ("tools", [], [{"type": "function"}]),
        ("functions", [], [{"name": "f"}]),
        ("tool_choice", "auto", "required"),
        ("function_call", "none", {"name": "f"}),
        ("response_format", {"type": "text"}, {"type": "json_schema", "json_schema": {}}),
        ("modalities", ["text"], ["text", "audio"]),
        ("logprobs", False, True),
        ("top_logprobs", 0, 3),
        ("store", False, True),
        ("reasoning_effort", "none", "high"),
        ("verbosity", "medium", "low"),
        ("audio", None, {"voice": "x", "format": "wav"}),
        ("web_search_options", None, {}),
    ],
)
def test_what_asks_for_nothing_is_taken_and_what_cannot_be_had_is_refused_by_name(
    parameter: str, harmless: object, harmful: object
) -> None:
    chat(**{parameter: harmless})
    name, why = refused(ChatRequest, CHAT | {parameter: harmful})
    assert name == parameter
    assert "this server does not support it; it takes null" in why


@pytest.mark.parametrize(
    ("parameter", "harmless", "harmful"),
    [("best_of", 1, 3), ("echo", False, True), ("logprobs", None, 0), ("suffix", "", "end")],
)
def test_so_it_is_with_completions(parameter: str, harmless: object, harmful: object) -> None:
    completion(**{parameter: harmless})
    assert refused(CompletionRequest, COMPLETION | {parameter: harmful})[0] == parameter


def test_what_has_nothing_to_do_with_the_answer_is_taken() -> None:
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


@pytest.mark.parametrize(
    ("stop", "stops"),
    [(None, ()), ("a", ("a",)), ([], ()), (["a", "\n"], ("a", "\n")), (list("abcd"), tuple("abcd"))],
)
def test_stop_is_a_string_or_some(stop: object, stops: tuple[str, ...]) -> None:
    assert chat(stop=stop).stop == completion(stop=stop).stop == stops


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (list("abcde"), "at most 4 strings, got 5"),
        ("", "strings of 1 to 1000 characters"),
        (["a", ""], "strings of 1 to 1000 characters"),
        ("x" * 1001, "strings of 1 to 1000 characters"),
        (5, "a string or a list of strings"),
        (["a", 5], "a string or a list of strings"),
    ],
    ids=str,
)
def test_other_stops_are_refused(stop: object, why: str) -> None:
    name, said = refused(ChatRequest, CHAT | {"stop": stop})
    assert name == "stop"
    assert why in said


class TestSampling:
    @pytest.mark.parametrize("parameters", [{}, {"temperature": 0}, {"temperature": None, "top_p": 0.1, "seed": 4}])
    def test_without_a_temperature_it_is_greedy(self, parameters: dict[str, Any]) -> None:
        assert chat(**parameters).drawn_sampling() == GREEDY

    def test_with_one_it_is_what_is_asked_for(self) -> None:
        asked = chat(temperature=0.7, top_p=0.0, seed=-3).drawn_sampling()
        assert asked == Sampling(temperature=0.7, top_p=0.0, seed=-3)
        assert chat(temperature=2).drawn_sampling().top_p == 1.0

    def test_a_seed_that_nobody_gives_is_another_one_each_time(self) -> None:
        request = chat(temperature=1)
        assert request.drawn_sampling().seed != request.drawn_sampling().seed

    @pytest.mark.parametrize(
        ("parameter", "value"),
        [
            ("temperature", -0.1),
            ("temperature", 2.1),
            ("temperature", float("nan")),
            ("temperature", "hot"),
            ("top_p", 1.1),
            ("top_p", float("inf")),
            ("seed", 2**63),
            ("seed", 0.5),
        ],
    )
    def test_what_is_out_of_range_is_refused_by_name(self, parameter: str, value: object) -> None:
        assert refused(ChatRequest, CHAT | {parameter: value})[0] == parameter


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "one"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([], [])]
    )
    def test_one_prompt_in_any_form(self, prompt: object, one: object) -> None:
        assert completion(prompt=prompt).prompt == one

    @pytest.mark.parametrize(
        ("prompt", "why"),
        [
            (["a", "b"], "one prompt a request, got 2"),
            ([[1], [2], [3]], "one prompt a request, got 3"),
            ([1, "a"], "a text, or a list of tokens"),
            (5, "a text, or a list of tokens"),
            (None, "a text, or a list of tokens"),
        ],
        ids=str,
    )
    def test_others_are_refused(self, prompt: object, why: str) -> None:
        name, said = refused(CompletionRequest, COMPLETION | {"prompt": prompt})
        assert name == "prompt"
        assert why in said

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ([{"type": "image_url", "image_url": {"url": "x"}}], "reads text only, got a part of type 'image_url'"),
            ([{"type": "text"}], "parts of type 'text', each with a 'text'"),
            ([5], "parts of type 'text'"),
            (None, "a text, or a list of parts"),
        ],
        ids=str,
    )
    def test_a_message_is_text(self, content: object, why: str) -> None:
        name, said = refused(ChatRequest, CHAT | {"messages": [{"role": "user", "content": content}]})
        assert name == "messages.0.content"
        assert why in said
