"""The HTTP application that clients talk to: OpenAI's endpoints, /health and /metrics.

It turns text into tokens and back; how answers are written down is the dialect's affair, how they come about the
router's. A stream starts with its first token, so whatever fails before that is an ordinary HTTP error; what fails
later is an `error` event, which the openai client raises as an APIError.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Literal

from disaggregated.messages import Failure, FailureKind, Step
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from paged_engine.tokenizer import ChatTokenizer
from paged_engine.weights import MODEL_NAME
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from openai_server.answer_text import AnswerText
from openai_server.attempts import Answers, AttemptError, Prompt, Stream, before
from openai_server.bodies import BodyLimits, BodyRefusedError
from openai_server.dialects import Chat, Completions, Dialect
from openai_server.failures import CODES, RETRY_AFTER_S, STATUS
from openai_server.http_server import serve_http
from openai_server.limits import CACHE_TOKENS, tokens_at_least, too_long
from openai_server.metrics import RouterMetrics, add_metrics
from openai_server.parameters import ChatRequest, CompletionRequest, GenerationRequest
from openai_server.responses import ClientGoneError, LiveStream, unless_gone
from openai_server.rotation import Rotation, Worker
from openai_server.router import Router, open_client
from openai_server.shapes import ErrorBody, ErrorReply, Model, ModelList, Usage
from openai_server.starts import listen_at

logger = logging.getLogger(__name__)

TOKENIZING_AT_ONCE_MAX = 2
"""Prompts that are tokenized at the same time; others wait, within their deadlines."""
ENDPOINTS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics", "/docs")


class RefusedError(Exception):
    """A request that cannot be right."""

    def __init__(self, message: str, *, param: str | None, http: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.http = http
        self.body = ErrorBody(message=message, type="invalid_request_error", param=param, code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Answers the clients' requests."""

    router: Answers
    tokenizer: ChatTokenizer
    metrics: RouterMetrics
    deadline_s: float
    """How long any answer may take; a request may ask for less."""
    health: Callable[[], RouterHealth]
    """Which workers there are, for /health."""
    tokenizing: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, TOKENIZING_AT_ONCE_MAX, thread_name_prefix="tokenizer")
    )

    async def answer(self, http: Request, request: GenerationRequest) -> Response:
        """The whole answer, or a stream of it. Raises AttemptError, RefusedError and ClientGoneError."""
        began_s = time.monotonic()
        dialect: Dialect = Chat() if isinstance(request, ChatRequest) else Completions()
        prompt = await unless_gone(http, self._prompt(dialect.id, request))
        if request.stream:
            stream = await unless_gone(http, self.router.stream(prompt))
            self.metrics.first_token.observe(time.monotonic() - began_s)
            events = self._events(stream, dialect, request)
            return LiveStream(events, stream, media_type="text/event-stream")
        text = await unless_gone(http, self.router.whole(prompt, partial(self._read, request.stop)))
        assert text.finish_reason is not None, "an answer that is not whole is an error"
        self.metrics.request_ended("ok")
        usage = Usage.of(len(prompt.token_ids), text.token_count)
        return _json(dialect.whole(text.text, text.finish_reason, usage))

    async def _read(self, stops: Sequence[str], steps: AsyncIterator[Step]) -> AnswerText:
        """An answer, up to its end or a stop string."""
        text = AnswerText(self.tokenizer, stops)
        async for step in steps:
            text.push(step)
            if text.finish_reason is not None:
                break
        return text

    async def _prompt(self, answer_id: str, request: GenerationRequest) -> Prompt:
        deadline = asyncio.get_running_loop().time() + min(request.deadline_s or self.deadline_s, self.deadline_s)
        if request.model != MODEL_NAME:
            message = f"model {request.model!r} does not exist here; this server has {MODEL_NAME!r}"
            raise RefusedError(message, param="model", http=404, code="model_not_found")
        self._check_length(request)
        encoding = asyncio.get_running_loop().run_in_executor(self.tokenizing, self._encode, request)
        token_ids = await before(deadline, encoding)
        if len(token_ids) > CACHE_TOKENS:
            raise _too_long(request, f"{len(token_ids)} tokens in the prompt")
        return Prompt(
            id=answer_id,
            token_ids=token_ids,
            max_tokens=request.token_limit,
            deadline=deadline,
            sampling=request.drawn_sampling(),
        )

    def _check_length(self, request: GenerationRequest) -> None:
        """Refuse what cannot fit, however few tokens its text comes to. Raises RefusedError."""
        match request:
            case ChatRequest(messages=messages):
                chars = sum(len(message.content) for message in messages)
            case CompletionRequest(prompt=str(text)):
                chars = len(text)
            case CompletionRequest(prompt=token_ids):
                if len(token_ids) > CACHE_TOKENS:
                    raise _too_long(request, f"{len(token_ids)} tokens in the prompt")
                return
        least = tokens_at_least(chars, self.tokenizer.longest_token)
        if least > CACHE_TOKENS:
            raise _too_long(request, f"at least {least} tokens: {chars} characters in the prompt")

    def _encode(self, request: GenerationRequest) -> list[int]:
        match request:
            case ChatRequest(messages=messages):
                return self.tokenizer.encode_messages([message.for_template() for message in messages])
            case CompletionRequest(prompt=str(text)):
                token_ids = self.tokenizer.encode_text(text)
            case CompletionRequest(prompt=token_ids):
                bad = [token_id for token_id in token_ids if not 0 <= token_id < self.tokenizer.token_count]
                if bad:
                    raise RefusedError(f"prompt: {bad[0]} is no token of {MODEL_NAME}", param="prompt")
        if not token_ids:
            raise RefusedError("prompt: needs at least one token", param="prompt")
        return token_ids

    async def _events(self, stream: Stream, dialect: Dialect, request: GenerationRequest) -> AsyncIterator[str]:
        outcome = "client_gone"
        try:
            async for answer in self._answers(stream, dialect, request):
                yield _event(answer.model_dump_json())
            yield _event("[DONE]")
            outcome = "ok"
        except AttemptError as error:
            outcome = error.failure.kind
            logger.info("stream %s failed: %s", dialect.id, error)
            yield _event(_error_of(error.failure).model_dump_json())
        finally:
            self.metrics.request_ended(outcome)

    async def _answers(self, stream: Stream, dialect: Dialect, request: GenerationRequest) -> AsyncIterator[BaseModel]:
        """The pieces of an answer. A token that ends in the middle of a character, or of what may become a stop string,
        gives no piece of its own.
        """
        for answer in dialect.opening():
            yield answer
        text = AnswerText(self.tokenizer, request.stop)
        async with aclosing(stream.steps()) as steps:
            async for step in steps:
                piece = text.push(step)
                if piece or text.finish_reason is not None:
                    yield dialect.piece(piece, text.finish_reason)
                if text.finish_reason is not None:
                    break
        await stream.aclose()  # after a stop string there may be more, which nobody wants
        if request.include_usage:
            yield dialect.usage(Usage.of(len(stream.prompt.token_ids), text.token_count))


class WorkerView(BaseModel):
    """A worker as the router sees it."""

    name: str
    role: str
    url: str
    up: bool


class RouterHealth(BaseModel):
    """ "ok": all workers are up; "degraded": some; "down": not one of each kind, so requests fail."""

    status: Literal["ok", "degraded", "down"]
    pid: int = Field(default_factory=os.getpid)
    workers: list[WorkerView]


def front_app(front: Front) -> FastAPI:
    """The application."""
    app = FastAPI(title="kvflow: OpenAI-compatible example server")
    add_metrics(app, front.metrics.registry)
    _add_error_handlers(app, front.metrics)
    app.add_middleware(BodyLimits, refusal=partial(_body_refused, front.metrics))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await front.answer(request, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await front.answer(request, body)

    @app.get("/")
    async def root() -> dict[str, str | Sequence[str]]:
        return {"server": app.title, "model": MODEL_NAME, "endpoints": ENDPOINTS}

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[Model(id=MODEL_NAME)])

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Model:
        if name != MODEL_NAME:
            raise RefusedError(f"model {name!r} does not exist here", param="model", http=404, code="model_not_found")
        return Model(id=MODEL_NAME)

    @app.get("/health")
    async def health(response: Response) -> RouterHealth:
        view = front.health()
        response.status_code = 503 if view.status == "down" else 200
        return view

    return app


def health_of(router: Router) -> RouterHealth:
    rotations = (router.prefill, router.decode)
    workers = [
        WorkerView(name=worker.name, role=rotation.role, url=worker.url, up=worker.up)
        for rotation in rotations
        for worker in rotation.workers
    ]
    if not all(rotation.up for rotation in rotations):
        return RouterHealth(status="down", workers=workers)
    return RouterHealth(status="ok" if all(worker.up for worker in workers) else "degraded", workers=workers)


def _add_error_handlers(app: FastAPI, metrics: RouterMetrics) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(AttemptError)
    async def failed(request: Request, error: AttemptError) -> Response:
        failure = error.failure
        metrics.request_ended(failure.kind)
        logger.info("%s failed: %s: %s", request.url.path, failure.kind, error)
        prompt = "messages" if request.url.path.endswith("/chat/completions") else "prompt"
        return _json(_error_of(failure, prompt), STATUS[failure.kind].http)

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        metrics.request_ended(FailureKind.INVALID)
        return _json(ErrorReply(error=error.body), error.http)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        metrics.request_ended(FailureKind.INVALID)
        first = error.errors()[0]
        # Where the body is no JSON, the place is a number of bytes.
        param = None if first["type"] == "json_invalid" else ".".join(map(str, first["loc"][1:])) or None
        unknown = first["type"] == "extra_forbidden"
        why = "this server does not support it" if unknown else first["msg"].removeprefix("Value error, ")
        message = f"{param}: {why}" if param else why
        return _json(ErrorReply(error=ErrorBody(message=message, type="invalid_request_error", param=param)), 400)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        body = ErrorBody(message=str(error.detail), type="invalid_request_error")
        return _json(ErrorReply(error=body), error.status_code)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, __: ClientGoneError) -> Response:
        metrics.request_ended("client_gone")
        return Response(status_code=499)  # nobody sees it


def _too_long(request: GenerationRequest, requested: str) -> RefusedError:
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    return RefusedError(too_long(requested), param=param, code=CODES[FailureKind.INVALID])


def _body_refused(metrics: RouterMetrics, error: BodyRefusedError) -> Response:
    ours = error.http >= HTTPStatus.INTERNAL_SERVER_ERROR
    metrics.request_ended(FailureKind.BUSY if ours else FailureKind.INVALID)
    kind, code = ("server_error", FailureKind.BUSY) if ours else ("invalid_request_error", None)
    return _json(ErrorReply(error=ErrorBody(message=str(error), type=kind, code=code)), error.http)


def _error_of(failure: Failure, prompt: str = "") -> ErrorReply:
    """`prompt` is what its endpoint calls the prompt: where that is at fault, the error says so."""
    status = STATUS[failure.kind]
    param = prompt or None if failure.kind is FailureKind.INVALID else None
    code = CODES.get(failure.kind, failure.kind)
    return ErrorReply(error=ErrorBody(message=status.says or failure.message, type=status.type, param=param, code=code))


def _json(model: BaseModel, status_code: int = 200) -> JSONResponse:
    unavailable = status_code == HTTPStatus.SERVICE_UNAVAILABLE
    headers = {"Retry-After": str(RETRY_AFTER_S)} if unavailable else None
    return JSONResponse(model.model_dump(), status_code=status_code, headers=headers)


def _event(data: str) -> str:
    return f"data: {data}\n\n"


async def run_router(
    *,
    host: str,
    port: int,
    checkpoint: Path,
    deadline_s: float,
    prefill: Mapping[str, str],
    decode: Mapping[str, str],
    share_prefixes: bool = False,
) -> None:
    """The whole life of the router's process. `prefill` and `decode` are URLs by name."""
    listening = listen_at(host, port)
    metrics = RouterMetrics()
    rotations = {role: _rotation(role, workers) for role, workers in (("prefill", prefill), ("decode", decode))}
    for role, rotation in rotations.items():
        metrics.watch_workers(role, partial(_up_count, rotation))
    async with open_client() as client, asyncio.TaskGroup() as group:
        router = Router(
            prefill=rotations["prefill"],
            decode=rotations["decode"],
            client=client,
            tasks=group,
            metrics=metrics,
            share_prefixes=share_prefixes,
        )
        watching = router.watch()
        front = Front(
            router=router,
            tokenizer=ChatTokenizer(checkpoint),
            metrics=metrics,
            deadline_s=deadline_s,
            health=partial(health_of, router),
        )
        await serve_http(front_app(front), listening)
        for task in watching:
            task.cancel()


def _rotation(role: str, workers: Mapping[str, str]) -> Rotation:
    return Rotation(role, [Worker(name=name, url=url) for name, url in workers.items()])


def _up_count(rotation: Rotation) -> int:
    return len(rotation.up)
