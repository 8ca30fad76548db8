"""Replies in OpenAI's format: whole answers, pieces of a stream, errors."""

from __future__ import annotations

import time
import uuid
from typing import Any

from disaggregated.messages import FinishReason
from fastapi.responses import JSONResponse
from paged_engine.weights import MODEL_NAME

Reply = dict[str, Any]

MODEL: Reply = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "kvflow example"}
RETRY_AFTER_S = 2
"""Value of Retry-After in a 503: a worker restarts, or a burst of requests passes, within some seconds."""


class Replies:
    """Makes the replies to one request, in the format of its endpoint: chat or completions."""

    def __init__(self, *, chat: bool) -> None:
        self.chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, text: str, reason: FinishReason, usage: Reply) -> Reply:
        """Return the reply with a whole answer."""
        choice: Reply = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._reply("chat.completion", [choice | {"finish_reason": reason}], usage)

    def piece(self, text: str, reason: FinishReason | None = None, *, first: bool = False) -> Reply:
        """Return the reply with the next piece of a stream. The first piece of a chat has the role "assistant"."""
        choice: Reply = {"text": text}
        if self.chat:
            choice = {"delta": ({"role": "assistant"} if first else {}) | {"content": text}}
        return self._reply("chat.completion.chunk", [choice | {"finish_reason": reason}])

    def usage(self, usage: Reply) -> Reply:
        """Return the last reply of a stream, with its usage, for clients that ask for it."""
        return self._reply("chat.completion.chunk", [], usage)

    def _reply(self, kind: str, choices: list[Reply], usage: Reply | None = None) -> Reply:
        return {
            "id": self.id,
            "object": kind if self.chat else "text_completion",
            "created": self._created,
            "model": MODEL_NAME,
            "choices": [{"index": 0, "logprobs": None} | choice for choice in choices],
            "usage": usage,
        }


def usage_of(prompt_count: int, answer_count: int) -> Reply:
    """Return the token counts of a prompt and its answer, in OpenAI's format."""
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": answer_count,
        "total_tokens": prompt_count + answer_count,
    }


def error(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> Reply:
    """Return an error in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_reply(reply: Reply, status: int = 200) -> JSONResponse:
    return JSONResponse(reply, status, headers={"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None)
