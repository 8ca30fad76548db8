"""What the example server does before it computes anything: bodies and prompts of any size, and many at once."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from disaggregated.messages import Failure, FailureKind, Step
from fastapi import FastAPI
from openai_server.answer_text import held_chars
from openai_server.attempts import AttemptError, Prompt, Stream
from openai_server.bodies import BODY_BYTES_MAX, BodyLimits, BodyRefusedError
from openai_server.failures import RETRY_AFTER_S
from openai_server.front import TOKENIZING_AT_ONCE_MAX, Front, RouterHealth, front_app
from openai_server.limits import CACHE_TOKENS
from openai_server.metrics import RouterMetrics
from paged_engine.tokenizer import ChatTokenizer
from paged_engine.weights import MODEL_NAME
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message
from tests_support import until

LONGEST = 8


@dataclass
class Router:
    """Answers with one token."""

    asked: list[Prompt] = field(default_factory=list)

    async def whole(self, prompt: Prompt, read: Callable[[AsyncIterator[Step]], Awaitable[Any]]) -> Any:
        self.asked.append(prompt)

        async def steps() -> AsyncIterator[Step]:
            yield Step(token=5, finish_reason="length")

        return await read(steps())

    async def stream(self, prompt: Prompt) -> Stream:
        raise AssertionError("nobody streams here")


class SlowTokenizer:
    """One that takes until it is told to go on."""

    longest_token = LONGEST
    token_count = 100

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.busy = 0
        self.go_on = threading.Event()

    def encode_text(self, text: str) -> list[int]:
        self.asked.append(text)
        self.busy += 1
        self.go_on.wait(60)
        self.busy -= 1
        return [5] * len(text)

    def encode_messages(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode_text("".join(message["content"] for message in messages))

    def decode(self, token_ids: list[int]) -> str:
        return "x" * len(token_ids)


@pytest.fixture
def tokenizer() -> Iterator[SlowTokenizer]:
    made = SlowTokenizer()
    yield made
    made.go_on.set()


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def app(router: Router, tokenizer: SlowTokenizer) -> FastAPI:
    healthy: Any = RouterHealth(status="ok", workers=[])
    front = Front(
        router=router,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        metrics=RouterMetrics(),
        deadline_s=60.0,
        health=lambda: healthy,
    )
    return front_app(front)


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://front") as client:
        yield client


async def asked(app: FastAPI, path: str, body: object) -> httpx2.Response:
    async with client_of(app) as client:
        return await client.post(path, json=body)


def completion(prompt: object, **more: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1} | more


def chat(*contents: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 1}


# --- bodies


async def pieces(size: int, piece: bytes = b" " * 65536) -> AsyncIterator[bytes]:
    for _ in range(0, size, len(piece)):
        yield piece


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("told", [True, False], ids=["with a length", "in chunks"])
async def test_a_body_that_is_too_large_is_refused_in_openais_shape(
    app: FastAPI, router: Router, path: str, told: bool
) -> None:
    size = BODY_BYTES_MAX + 65536
    async with client_of(app) as client:
        response = await client.post(path, content=b" " * size if told else pieces(size))
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert str(BODY_BYTES_MAX) in error["message"]
    assert not router.asked


async def test_a_compressed_body_is_refused_as_such(app: FastAPI) -> None:
    async with client_of(app) as client:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        response = await client.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert response.status_code == 415
    assert "gzip" in response.json()["error"]["message"]


class Client:
    """The client's end of an ASGI application: what it sends is asked for piece by piece."""

    def __init__(self, *messages: Message, headers: dict[str, str] | None = None) -> None:
        self.scope = {
            **{"type": "http", "method": "POST", "path": "/", "headers": []},
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        }
        self.waiting = list(messages)
        self.answered: list[Message] = []

    async def receive(self) -> Message:
        if not self.waiting:
            await asyncio.Event().wait()
        return self.waiting.pop(0)

    async def send(self, message: Message) -> None:
        self.answered.append(message)

    @property
    def status(self) -> int:
        return int(self.answered[0]["status"])

    @property
    def answered_headers(self) -> dict[bytes, bytes]:
        return dict(self.answered[0]["headers"])


class Limited:
    """An application that keeps its requests until it may answer."""

    def __init__(self, **limits: Any) -> None:
        self.bodies: list[bytes] = []
        self.go_on = asyncio.Event()
        self.limits = BodyLimits(self._answer, refusal=self._refusal, **limits)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        await self.go_on.wait()
        await PlainTextResponse("fine")(scope, receive, send)

    @staticmethod
    def _refusal(error: BodyRefusedError) -> Response:
        return PlainTextResponse(str(error), status_code=error.http)

    async def ask(self, client: Client) -> Client:
        await self.limits(client.scope, client.receive, client.send)
        return client


def piece(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_comes_to_the_application_in_one_piece() -> None:
    limited = Limited(bytes_max=10)
    limited.go_on.set()
    client = await limited.ask(Client(piece(b"12345", more=True), piece(b"67890")))
    assert (client.status, limited.bodies) == (200, [b"1234567890"])
    assert limited.limits.bytes_held == 0


@pytest.mark.parametrize(
    ("messages", "headers"),
    [
        ([piece(b"1" * 11)], {}),
        ([piece(b"1" * 6, more=True), piece(b"1" * 6)], {}),
        ([piece(b"1" * 6, more=True), piece(b"1" * 6, more=True), piece(b"1" * 50)], {}),
        ([piece(b"1" * 50)], {"content-length": "50"}),
        ([piece(b"1" * 50)], {"content-length": "9" * 400}),
        ([], {"content-length": "50", "expect": "100-continue"}),  # which sends none before it is told to
    ],
)
async def test_the_rest_of_a_body_that_is_too_large_is_dropped(
    messages: list[Message], headers: dict[str, str]
) -> None:
    """The client reads no answer before it has written all, so it is taken to the end, and kept by nobody."""
    limited = Limited(bytes_max=10)
    client = await limited.ask(Client(*messages, headers=headers))
    assert (client.status, client.answered_headers[b"connection"], client.waiting) == (413, b"close", [])
    assert (limited.bodies, limited.limits.bytes_held) == ([], 0)


async def test_a_body_that_does_not_come_is_waited_for_within_a_bound() -> None:
    limited = Limited(timeout_s=0.01)
    client = await limited.ask(Client(piece(b"1", more=True)))
    assert (client.status, limited.bodies, limited.limits.bytes_held) == (408, [], 0)


async def test_a_client_that_goes_in_the_middle_of_its_body_is_answered_by_nobody() -> None:
    limited = Limited()
    client = await limited.ask(Client(piece(b"1", more=True), {"type": "http.disconnect"}))
    assert (client.answered, limited.bodies, limited.limits.bytes_held) == ([], [], 0)


async def test_the_bodies_of_all_requests_together_are_bounded() -> None:
    limited = Limited(bytes_max=10, bytes_held_max=25)
    async with asyncio.TaskGroup() as group:
        first = [group.create_task(limited.ask(Client(piece(b"1" * 10)))) for _ in range(2)]
        await until(lambda: len(limited.bodies) == 2)
        refused = await limited.ask(Client(piece(b"1" * 10)))
        assert refused.status == 503
        small = group.create_task(limited.ask(Client(piece(b"1" * 5))))
        await until(lambda: len(limited.bodies) == 3)
        limited.go_on.set()
    assert [task.result().status for task in (*first, small)] == [200] * 3
    assert limited.limits.bytes_held == 0


async def test_over_http_a_client_that_writes_forty_megabytes_reads_413_and_health_goes_on(app: FastAPI) -> None:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            answers = await asyncio.gather(
                client.post("/v1/completions", content=b" " * (40 << 20)),
                client.post("/v1/completions", content=pieces(40 << 20)),
                *(client.get("/health") for _ in range(20)),
            )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999\r\n")
        writer.write(b"Expect: 100-continue\r\n\r\n")
        assert b" 413 " in await reader.readline()
        writer.close()
    finally:
        server.should_exit = True
        await serving
    assert [answer.status_code for answer in answers] == [413, 413, *[200] * 20]


@pytest.mark.parametrize("kind", [FailureKind.BUSY, FailureKind.NO_WORKER])
async def test_who_is_to_try_again_is_told_when(
    app: FastAPI, router: Router, tokenizer: SlowTokenizer, monkeypatch: pytest.MonkeyPatch, kind: FailureKind
) -> None:
    async def whole(prompt: Prompt, read: object) -> None:
        raise AttemptError(Failure(kind=kind, message="no"))

    monkeypatch.setattr(router, "whole", whole)
    tokenizer.go_on.set()
    response = await asked(app, "/v1/completions", completion("x"))
    assert (response.status_code, int(response.headers["Retry-After"])) == (503, RETRY_AFTER_S)


# --- prompts


TOO_LONG = "x" * (CACHE_TOKENS * LONGEST + 1)


@pytest.mark.parametrize(
    ("path", "body", "param", "tokens"),
    [
        ("/v1/completions", completion(TOO_LONG), "prompt", f"at least {CACHE_TOKENS + 1} tokens"),
        ("/v1/completions", completion([TOO_LONG]), "prompt", f"at least {CACHE_TOKENS + 1} tokens"),
        ("/v1/completions", completion([5] * (CACHE_TOKENS + 1)), "prompt", f"{CACHE_TOKENS + 1} tokens"),
        ("/v1/completions", completion([[5] * 100_000]), "prompt", "100000 tokens"),
        ("/v1/chat/completions", chat(TOO_LONG), "messages", f"at least {CACHE_TOKENS + 1} tokens"),
        ("/v1/chat/completions", chat(*[TOO_LONG[::2]] * 3), "messages", "tokens"),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    app: FastAPI, tokenizer: SlowTokenizer, router: Router, path: str, body: object, param: str, tokens: str
) -> None:
    response = await asked(app, path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert tokens in error["message"]
    assert str(CACHE_TOKENS) in error["message"]
    assert (tokenizer.asked, router.asked) == ([], [])


async def test_what_turns_out_not_to_fit_asks_no_worker(app: FastAPI, tokenizer: SlowTokenizer, router: Router) -> None:
    tokenizer.go_on.set()
    response = await asked(app, "/v1/completions", completion("x" * (CACHE_TOKENS + 1)))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await asked(app, "/v1/completions", completion("x" * CACHE_TOKENS))).status_code == 200
    assert [len(prompt.token_ids) for prompt in router.asked] == [CACHE_TOKENS]


@pytest.mark.parametrize(
    "body",
    [
        completion(json.loads("[" * 900 + '"x"' + "]" * 900)),
        completion(["x", "x"]),
        completion([]),
        completion([[]]),
        completion(["x", 5]),
        completion([True]),
        completion("\ud800"),
        chat(*["x"] * (CACHE_TOKENS + 1)),
        chat("\ud800"),
        chat("\ud83d", "\ude00"),
        completion("x", model="\ud800"),
        completion("x", **{"\ud800": 1}),
    ],
)
async def test_what_is_no_prompt_is_refused(app: FastAPI, router: Router, tokenizer: SlowTokenizer, body: Any) -> None:
    tokenizer.go_on.set()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client_of(app) as client:
        content = json.dumps(body)  # keeps halves of surrogate pairs
        response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert (response.status_code in (400, 404), response.json()["error"]["type"]) == (True, "invalid_request_error")
    assert not router.asked


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", "application/json"])
async def test_json_is_taken_whatever_it_is_called(app: FastAPI, tokenizer: SlowTokenizer, kind: str | None) -> None:
    """`curl -d` calls it a form, others nothing at all."""
    tokenizer.go_on.set()
    async with client_of(app) as client:
        headers = {} if kind is None else {"Content-Type": kind}
        response = await client.post("/v1/completions", content=json.dumps(completion("x")), headers=headers)
        wrong = await client.post("/v1/completions", content="x=1", headers=headers)
    assert response.status_code == 200
    assert (wrong.status_code, "JSON" in wrong.json()["error"]["message"]) == (400, True)


async def test_json_that_is_nested_too_deep_is_no_error_of_ours(app: FastAPI) -> None:
    async with client_of(app) as client:
        content = b'{"prompt":' + b"[" * 400_000
        response = await client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400


async def test_the_loop_goes_on_while_prompts_are_tokenized_a_few_at_a_time(
    app: FastAPI, tokenizer: SlowTokenizer, router: Router
) -> None:
    async with client_of(app) as client, asyncio.TaskGroup() as group:
        asking = [group.create_task(client.post("/v1/completions", json=completion("xx"))) for _ in range(10)]
        await until(lambda: tokenizer.busy == TOKENIZING_AT_ONCE_MAX)
        assert (await client.get("/health")).status_code == 200
        late = await client.post("/v1/completions", json=completion("yy", deadline_s=0.01))
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert (len(tokenizer.asked), router.asked) == (TOKENIZING_AT_ONCE_MAX, [])
        tokenizer.go_on.set()
    assert [task.result().status_code for task in asking] == [200] * 10


def test_tokenizing_a_text_lets_other_threads_go_on(smollm2_checkpoint: Path) -> None:
    tokenizer, done, seen = ChatTokenizer(smollm2_checkpoint), threading.Event(), 0

    def encode() -> None:
        tokenizer.encode_text("The quick brown fox. " * 20_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):  # which gives Python's lock away each time
        seen += 1
    thread.join()
    assert seen > 20, "they waited until it was over"


def test_no_token_stands_for_more_characters_than_the_longest(smollm2_checkpoint: Path) -> None:
    tokenizer = ChatTokenizer(smollm2_checkpoint)
    for text in ("#" * 5000, "\n" + " " * 5000, "=" * 5000, "<|im_start|>" * 500, "word " * 1000, "\N{FOX FACE}" * 99):
        assert len(tokenizer.encode_text(text)) >= len(text) / tokenizer.longest_token


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [("ab", ["abc"], 2), ("xab", ["bc", "abc"], 2), ("aaaa", ["aab"], 2), ("abc", ["x"], 0), ("ab", ["ab"], 0)],
)
def test_what_may_begin_a_stop_string_is_held(text: str, stops: list[str], held: int) -> None:
    assert held_chars(text, stops) == held
