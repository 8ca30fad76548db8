"""The parameters of requests, with OpenAI's names.

A parameter that would change the answer and is not supported is refused, unless its value has no effect: clients often
send a penalty of 0 or an empty list of tools. A parameter that cannot change the answer is ignored.
"""

from __future__ import annotations

import random
from typing import Annotated, Any, Literal

from paged_engine import GREEDY, Sampling
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

CACHE_TOKENS = 4096
"""Tokens in a worker's cache, and so the maximum length of a prompt with its answer.

The cache takes about 180 MiB: 30 layers, K and V, 3 heads of 64 float32 values for each token.
"""
SEED_MAX = 2**63 - 1

# Types of values that change no answer; null never changes one.
One = Literal[1] | None
Zero = Annotated[float, Field(ge=0, le=0)] | None
No = Literal[False] | None
Empty = Annotated[list[Any] | dict[str, Any], Field(max_length=0)] | None


def _utf8(text: str) -> str:
    """Return a text that UTF-8 can carry: JSON may hold half of a surrogate pair. Raises UnicodeEncodeError."""
    return text.encode().decode()


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """The parameters common to both kinds of requests. Any other parameter is refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    """Sampling temperature. None means 0, greedy (with OpenAI it means 1)."""
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-SEED_MAX - 1, le=SEED_MAX)
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...],
        Field(max_length=4),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop or ()),
    ] = ()
    deadline_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Maximum time of the whole answer. Not OpenAI's: pass `extra_body={"deadline_s": 5}` to the openai client."""

    # Not supported, with a value that changes no answer.
    n: One = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: Empty = None
    # Ignored.
    user: Any = None
    metadata: Any = None

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


def _one_prompt(prompt: object) -> object:
    """Validate a prompt: a text or its tokens. OpenAI also allows a list of prompts; here it may have one entry."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ValueError(f"this server answers one prompt a request, got {len(prompt)}")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _utf8(prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    raise ValueError("expected a text, or a list of tokens")


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]
    best_of: One = None
    echo: No = None
    logprobs: None = None
    suffix: Literal[""] | None = None

    @property
    def token_limit(self) -> int:
        return self.max_tokens or 16  # OpenAI's default


class TextPart(BaseModel):
    type: Literal["text"]
    text: Annotated[str, AfterValidator(_utf8)]


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(lambda text: [{"type": "text", "text": text}] if isinstance(text, str) else text),
    ]

    def for_template(self) -> dict[str, str]:
        """Return the message in the form that chat templates expect."""
        text = "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=CACHE_TOKENS)
    """The conversation. The limit is enough, because each message takes at least one token."""
    max_completion_tokens: int | None = Field(default=None, ge=1)

    # Not supported, with a value that changes no answer.
    logprobs: No = None
    store: No = None
    top_logprobs: Zero = None
    tools: Empty = None
    functions: Empty = None
    tool_choice: Literal["none", "auto"] | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    moderation: None = None
    web_search_options: None = None
    # Ignored.
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens contradict each other")
        return self

    @property
    def token_limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 128
