"""What clients get: OpenAI's HTTP shapes. What they may ask for is in `parameters`."""

from __future__ import annotations

import time
from typing import Annotated, Literal, TypeAlias

from disaggregated.messages import FinishReason
from pydantic import BaseModel, BeforeValidator, Field


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


def _shown(text: str) -> str:
    """What a client has sent may hold half of a surrogate pair, which no answer can carry."""
    return text.encode("utf-8", "backslashreplace").decode()


Shown: TypeAlias = Annotated[str, BeforeValidator(_shown)]


class ErrorBody(BaseModel):
    message: Shown
    type: str
    param: Shown | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """Every error, also the one that ends a stream."""

    error: ErrorBody
