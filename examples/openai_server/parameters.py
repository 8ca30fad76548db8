"""What clients may ask for, parameter by parameter, in OpenAI's words.

Everything that OpenAI's API knows is named here. What would change the answer and is not supported is refused, not
ignored, unless its value asks for nothing: ordinary clients send a penalty of 0 or an empty list of tools. What cannot
change the answer is taken and forgotten.
"""

from __future__ import annotations

import json
import random
from typing import Annotated, Any, Literal, TypeAlias

from paged_engine import GREEDY, Sampling
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from openai_server.limits import CACHE_TOKENS

DEFAULT_CHAT_TOKENS = 128
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI has it
STOPS_MAX = 4
STOP_CHARS_MAX = 1000
TEMPERATURE_MAX = 2.0  # as OpenAI has it
SEED_MAX = 2**63 - 1


def only(*harmless: object) -> BeforeValidator:
    """A parameter that is not supported: null, and these values, ask for nothing."""

    def check(value: object) -> None:
        if value is not None and value not in harmless:
            possible = " or ".join(json.dumps(one) for one in (None, *harmless))
            raise ValueError(f"this server does not support it; it takes {possible}")

    return BeforeValidator(check)


def _stops(value: object) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("expected a string or a list of strings")
    if len(stops) > STOPS_MAX:
        raise ValueError(f"expected at most {STOPS_MAX} strings, got {len(stops)}")
    if not all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise ValueError(f"expected strings of 1 to {STOP_CHARS_MAX} characters")
    return tuple(stops)


def _one_prompt(value: object) -> object:
    """A text or its tokens; OpenAI takes lists of them, too, which may have one entry here."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"this server answers one prompt a request, got {len(value)}")
        value = value[0]
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise ValueError("expected a text, or a list of tokens")


def _utf8(text: str) -> str:
    """JSON may hold half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected a text that UTF-8 can carry") from None
    return text


def _text_of(content: object) -> str:
    """What a message says, its parts put together."""
    if isinstance(content, str):
        return _utf8(content)
    if not isinstance(content, list):
        raise ValueError("expected a text, or a list of parts of type 'text'")
    return _utf8("".join(map(_text_of_part, content)))


def _text_of_part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": kind} if kind != "text":
            raise ValueError(f"this server reads text only, got a part of type {kind!r}")
    raise ValueError("expected parts of type 'text', each with a 'text'")


Anything: TypeAlias = Any
"""A parameter that has nothing to do with the answer."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=TEMPERATURE_MAX, allow_inf_nan=False)
    """None is 0, greedy. (With OpenAI it is 1.)"""
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-SEED_MAX - 1, le=SEED_MAX)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Not OpenAI's: how long the whole answer may take; `extra_body={"deadline_s": 5}` in the openai client."""

    n: Annotated[Any, only(1)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    logit_bias: Annotated[Any, only({})] = None
    user: Anything = None

    @property
    def token_limit(self) -> int:
        """How long the answer may be at most."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def drawn_sampling(self) -> Sampling:
        """How to choose tokens; a seed that the client does not care for is drawn now."""
        if not self.temperature:
            return GREEDY
        return Sampling(
            temperature=self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]
    best_of: Annotated[Any, only(1)] = None
    echo: Annotated[Any, only(False)] = None
    logprobs: Annotated[Any, only()] = None
    suffix: Annotated[Any, only("")] = None

    @property
    def token_limit(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]

    def for_template(self) -> dict[str, str]:
        """As chat templates take it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=CACHE_TOKENS)
    """Each takes a token at least."""
    max_completion_tokens: int | None = Field(default=None, ge=1)

    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    logprobs: Annotated[Any, only(False)] = None
    modalities: Annotated[Any, only(["text"])] = None
    moderation: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    store: Annotated[Any, only(False)] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    tools: Annotated[Any, only([])] = None
    top_logprobs: Annotated[Any, only(0)] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None

    metadata: Anything = None
    parallel_tool_calls: Anything = None  # there are none
    prediction: Anything = None
    prompt_cache_key: Anything = None
    prompt_cache_options: Anything = None
    prompt_cache_retention: Anything = None
    safety_identifier: Anything = None
    service_tier: Anything = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens contradict each other")
        return self

    @property
    def token_limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens or DEFAULT_CHAT_TOKENS
