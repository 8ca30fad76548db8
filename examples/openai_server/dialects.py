"""The two ways in which OpenAI's API writes down an answer: completions and chat.

Each object writes one answer, whole or in pieces.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Protocol

from disaggregated.messages import FinishReason
from paged_engine.weights import MODEL_NAME

from openai_server.shapes import (
    Answer,
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    Usage,
)


class Dialect(Protocol):
    """Writes down one answer."""

    id: str

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> Answer:
        """The answer in one piece."""

    def opening(self) -> Sequence[Answer]:
        """What a stream starts with, before any text."""

    def piece(self, text: str, reason: FinishReason | None) -> Answer:
        """The next piece of a stream; the last one has a reason."""

    def usage(self, usage: Usage) -> Answer:
        """What a stream ends with, for clients that want it."""


class Completions:
    """/v1/completions: pieces look like whole answers."""

    def __init__(self) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> Answer:
        return self._completion([CompletionChoice(text=text, finish_reason=reason)], usage)

    def opening(self) -> Sequence[Answer]:
        return []

    def piece(self, text: str, reason: FinishReason | None) -> Answer:
        return self._completion([CompletionChoice(text=text, finish_reason=reason)])

    def usage(self, usage: Usage) -> Answer:
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Answer:
        return Completion(id=self.id, model=MODEL_NAME, choices=choices, usage=usage)


class Chat:
    """/v1/chat/completions: pieces are deltas of a message, and the first one says whose it is."""

    def __init__(self) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> Answer:
        choice = ChatChoice(message=AssistantMessage(content=text), finish_reason=reason)
        return ChatCompletion(id=self.id, model=MODEL_NAME, choices=[choice], usage=usage)

    def opening(self) -> Sequence[Answer]:
        return [self._chunk([ChatChunkChoice(delta=ChatDelta(role="assistant", content=""), finish_reason=None)])]

    def piece(self, text: str, reason: FinishReason | None) -> Answer:
        return self._chunk([ChatChunkChoice(delta=ChatDelta(content=text), finish_reason=reason)])

    def usage(self, usage: Usage) -> Answer:
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> Answer:
        return ChatCompletionChunk(id=self.id, model=MODEL_NAME, choices=choices, usage=usage)
