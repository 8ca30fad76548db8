"""The example server's front: bodies and prompts of any size, refused requests, and the form of answers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Hashable
from typing import Any

import httpx2
import pytest
from disaggregated.messages import AnswerRequest, Failure, FailureKind, Step
from fastapi import FastAPI
from openai_server.attempts import AttemptError
from openai_server.front import Front, front_app
from openai_server.http_io import BODY_BYTES_MAX
from openai_server.metrics import FrontMetrics
from openai_server.parameters import CACHE_TOKENS
from paged_engine.weights import MODEL_NAME

LONGEST = 8
WHOLE = {"model": MODEL_NAME, "prompt": "ab"}
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "ab"}]}


class Letters:
    """A tokenizer with a token for each character."""

    longest_token = LONGEST
    token_count = 1000

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode_text(self, text: str) -> list[int]:
        self.asked.append(text)
        return [ord(letter) for letter in text]

    def render(self, messages: list[dict[str, str]]) -> str:
        return "".join(message["content"] for message in messages)

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


class Server:
    """The application over a router that answers with the prompt's own tokens, or fails after some tokens."""

    def __init__(self) -> None:
        self.tokenizer = Letters()
        self.prompts: list[AnswerRequest] = []
        self.fails_after: int | None = None
        self.kind = FailureKind.WORKER_LOST
        tokenizer: Any = self.tokenizer
        front = Front(
            attempt=self.attempt,
            tokenizer=tokenizer,
            metrics=FrontMetrics(),
            deadline_s=60.0,
            health=lambda: {"status": "ok"},
        )
        self.app: FastAPI = front_app(front)

    async def attempt(self, request: AnswerRequest, avoid: set[Hashable]) -> AsyncGenerator[Step, None]:
        self.prompts.append(request)
        *tokens, last = request.prompt
        for index, token in enumerate(tokens):
            if index == self.fails_after:
                break
            yield Step(token=token)
        if self.fails_after is not None:
            raise AttemptError(Failure(kind=self.kind, message="decode-7 was lost"))
        yield Step(token=last, finish_reason="length")

    async def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        content = body if isinstance(body, bytes | AsyncIterator) else json.dumps(body).encode()
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app), base_url="http://server") as client:
            return await client.post(f"/v1/{path}", content=content, **options)


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


async def test_answers_look_as_openais() -> None:
    server = Server()
    whole = (await server.post("completions", WHOLE)).json()
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [{"index": 0, "logprobs": None, "text": "ab", "finish_reason": "length"}]
    assert whole["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    chat = (await server.post("chat/completions", CHAT)).json()
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
    asked = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    lines = (await server.post("chat/completions", asked)).text.split("\n\n")
    *pieces, usage = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert lines[-2:] == ["data: [DONE]", ""]
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None, None, "length"]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 4)


async def test_a_stream_ends_at_a_stop_string_or_with_an_error_event() -> None:
    server = Server()
    asked = {"model": MODEL_NAME, "prompt": "abcdef", "stream": True}
    text = (await server.post("completions", asked | {"stop": "cd"})).text
    assert [json.loads(line[6:])["choices"][0]["text"] for line in text.split("\n\n")[:-2]] == ["a", "b", ""]
    server.fails_after = 2
    *_, last, _ = (await server.post("completions", asked)).text.split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], "decode-7" in error["message"]) == (FailureKind.WORKER_LOST, False)


@pytest.mark.parametrize(
    ("kind", "status"), [(FailureKind.WORKER_LOST, 502), (FailureKind.BUSY, 503), (FailureKind.DEADLINE, 504)]
)
async def test_a_failure_before_the_first_token_is_an_http_error(kind: FailureKind, status: int) -> None:
    server = Server()
    server.fails_after, server.kind = 0, kind
    answer = await server.post("completions", WHOLE | {"stream": True})
    assert (answer.status_code, error_of(answer)["code"]) == (status, kind)
    assert answer.headers.get("Retry-After") == ("2" if status == 503 else None)


async def test_a_body_that_is_too_large_is_refused() -> None:
    server, sent = Server(), 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 8 * BODY_BYTES_MAX:
            sent += BODY_BYTES_MAX // 8
            yield b" " * (BODY_BYTES_MAX // 8)

    answer = await server.post("completions", pieces())
    assert (answer.status_code, error_of(answer)["type"]) == (413, "invalid_request_error")
    assert server.tokenizer.asked == server.prompts == []


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_json_is_taken_whatever_it_is_called(kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    assert (await Server().post("completions", WHOLE, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("completions", b"{", None, "JSON"),
        ("completions", WHOLE | {"n": 2}, "n", "n: Input should be 1"),
        ("completions", WHOLE | {"\ud800": 2}, None, "unicode string"),
        ("completions", WHOLE | {"prompt": ""}, "prompt", "at least one token"),
        ("completions", WHOLE | {"prompt": [1, 10**9]}, "prompt", "1000000000 is not a token"),
        ("completions", WHOLE | {"prompt": "\ud800"}, "prompt", "surrogates not allowed"),
        ("chat/completions", CHAT | {"messages": []}, "messages", "at least 1 item"),
        ("completions", WHOLE | {"prompt": "x" * (CACHE_TOKENS + 1)}, "prompt", "maximum context length is 4096"),
        ("completions", WHOLE | {"prompt": [5] * (CACHE_TOKENS + 1)}, "prompt", "maximum context length is 4096"),
    ],
)
async def test_what_cannot_be_right_is_refused(path: str, body: Any, param: str | None, message: str) -> None:
    server = Server()
    answer = await server.post(path, body)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]
    assert server.prompts == []


async def test_what_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    server = Server()
    text = "x" * (LONGEST * CACHE_TOKENS + 1)
    for path, body in (
        ("completions", WHOLE | {"prompt": text}),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = await server.post(path, body)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")
    assert server.tokenizer.asked == []


async def test_other_models_and_pages_are_not_found() -> None:
    server = Server()
    answer = await server.post("completions", WHOLE | {"model": "gpt-7"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
    assert error_of(await server.post("embeddings", {}))["message"] == "Not Found"
