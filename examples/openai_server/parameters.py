"""The parameters of requests, with OpenAI's names.

A parameter that would change the answer and is not supported is refused, unless its value has no effect: clients often
send a penalty of 0 or an empty list of tools. A parameter that cannot change the answer is ignored.
"""

from __future__ import annotations

import json
import random
from typing import Annotated, Any, Literal

from paged_engine import GREEDY, Sampling
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

CACHE_TOKENS = 4096
"""Tokens in a worker's cache, and so the maximum length of a prompt with its answer.

The cache takes about 180 MiB: 30 layers, K and V, 3 heads of 64 float32 values for each token.
"""
SEED_MAX = 2**63 - 1
IGNORED = frozenset(
    {"user", "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"}
    | {"prompt_cache_retention", "safety_identifier", "service_tier"}
)
VALUES_WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("n", "best_of"), ("1",)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), ("0", "0.0")),
    **dict.fromkeys(("echo", "logprobs", "store"), ("false",)),
    **dict.fromkeys(("tool_choice", "function_call"), ('"none"', '"auto"')),
    **dict.fromkeys(("tools", "functions"), ("[]",)),
    "logit_bias": ("{}",),
    "suffix": ('""',),
    "modalities": ('["text"]',),
    "response_format": ('{"type": "text"}',),
    "reasoning_effort": ('"none"',),
    "verbosity": ('"medium"',),
    **dict.fromkeys(("audio", "moderation", "web_search_options"), ()),
}
"""Unsupported parameters, each with the values, as JSON, that change no answer. A value of null never changes it."""


def _stops(value: object) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(
        isinstance(stop, str) and 0 < len(stop) <= 1000 for stop in stops
    ):
        raise ValueError("expected a string or a list of strings, of 1 to 1000 characters each")
    if len(stops) > 4:
        raise ValueError(f"expected at most 4 strings, got {len(stops)}")
    return tuple(stops)


def _one_prompt(value: object) -> object:
    """Validate a prompt: a text or its tokens. OpenAI also allows a list of prompts; here it may have one entry."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"this server answers one prompt a request, got {len(value)}")
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and all(type(token) is int for token in value)):
        return value
    raise ValueError("expected a text, or a list of tokens")


def _text_of(content: object) -> object:
    """Return the content of a message as one text, joined from its parts if it has several."""
    if not isinstance(content, list):
        return content
    texts = [text for part in content if isinstance(part, dict) and isinstance(text := part.get("text"), str)]
    if len(texts) < len(content) or any(part.get("type") != "text" for part in content):
        raise ValueError("this server reads text only: expected parts of type 'text', each with a 'text'")
    return "".join(texts)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """The parameters common to both kinds of requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    """Sampling temperature. None means 0, greedy (with OpenAI it means 1)."""
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-SEED_MAX - 1, le=SEED_MAX)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum time of the whole answer. Not OpenAI's: pass `extra_body={"deadline_s": 5}` to the openai client."""

    @model_validator(mode="before")
    @classmethod
    def _drop_parameters_without_effect(cls, given: Any) -> Any:
        """Drop parameters without effect. An unknown parameter that remains is refused by name."""
        if not isinstance(given, dict):
            return given
        try:
            json.dumps(given, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # JSON may hold half of a surrogate pair
            raise ValueError("expected texts that UTF-8 can carry") from None
        return {
            name: value
            for name, value in given.items()
            if name not in IGNORED
            and not (
                name in VALUES_WITHOUT_EFFECT and (value is None or json.dumps(value) in VALUES_WITHOUT_EFFECT[name])
            )
        }

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_with_seed(self) -> Sampling:
        """Return how to choose tokens. If the request has no seed, draw one now, so that all attempts choose alike."""
        if not self.temperature:
            return GREEDY
        return Sampling(
            temperature=self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed,
        )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]

    @property
    def token_limit(self) -> int:
        return self.max_tokens or 16  # OpenAI's default


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]

    def for_template(self) -> dict[str, str]:
        """Return the message in the form that chat templates expect."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=CACHE_TOKENS)
    """The conversation. The limit is enough, because each message takes at least one token."""
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens contradict each other")
        return self

    @property
    def token_limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 128
