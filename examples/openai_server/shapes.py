"""OpenAI's HTTP shapes, as far as this server honours them.

A parameter that would change the answer and is not supported is refused, not ignored: the engine is greedy, gives one
answer, and knows no tools.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from openai_server.messages import FinishReason

DEFAULT_CHAT_TOKENS = 128
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI has it


def _zero(temperature: float | None) -> float | None:
    if temperature:
        raise ValueError("this server's engine is greedy, so only 0 is possible")
    return temperature


Temperature: TypeAlias = Annotated[float | None, AfterValidator(_zero)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Temperature = None
    n: Literal[1] | None = None
    deadline_s: float | None = Field(default=None, gt=0)
    """Not OpenAI's: how long the whole answer may take; `extra_body={"deadline_s": 5}` in the openai client."""

    # These change nothing for a greedy engine.
    top_p: float | None = None
    seed: int | None = None
    user: str | None = None

    @property
    def token_limit(self) -> int:
        """How long the answer may be at most."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[int]

    @property
    def token_limit(self) -> int:
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def for_template(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens contradict each other")
        return self

    @property
    def token_limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens or DEFAULT_CHAT_TOKENS


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_count: int, answer_count: int) -> Usage:
        return cls(prompt_tokens=prompt_count, completion_tokens=answer_count, total_tokens=prompt_count + answer_count)


class Answer(BaseModel):
    """What all answers and their pieces have."""

    id: str
    object: str
    model: str
    created: int = Field(default_factory=lambda: int(time.time()))
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    finish_reason: FinishReason | None
    logprobs: None = None


class Completion(Answer):
    """A whole completion, or a piece of one: they look the same."""

    object: str = "text_completion"
    choices: list[CompletionChoice]


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int = 0
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: None = None


class ChatCompletion(Answer):
    object: str = "chat.completion"
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int = 0
    delta: ChatDelta
    finish_reason: FinishReason | None


class ChatCompletionChunk(Answer):
    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "kvflow example"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """Every error, also the one that ends a stream."""

    error: ErrorBody
