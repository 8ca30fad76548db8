"""The HTTP application for clients: OpenAI's endpoints, /health and /metrics.

The front turns text into tokens and back; `attempts` gets the answer. A stream starts with its first token, so a
failure before that is an ordinary HTTP error. A later failure is an `error` event, which the openai client raises as an
APIError.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from disaggregated.messages import AnswerRequest, Failure, FailureKind, Step
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from paged_engine.tokenizer import ChatTokenizer
from paged_engine.weights import MODEL_NAME
from starlette import exceptions

from openai_server.answer_text import AnswerText
from openai_server.attempts import Attempt, AttemptError, answer, await_before, renamed
from openai_server.failures import STATUS
from openai_server.http_io import BodyLimit, ClientGoneError, LiveStream, run_until_disconnect
from openai_server.metrics import FrontMetrics, add_metrics
from openai_server.parameters import CACHE_TOKENS, ChatRequest, CompletionRequest, GenerationRequest
from openai_server.replies import MODEL, Replies, Reply, error, json_reply, usage_of

logger = logging.getLogger(__name__)


def refusal(message: str, *, param: str | None, http: int = 400, code: str | None = None) -> HTTPException:
    """Return the exception for an invalid request. `param` names the parameter at fault."""
    return HTTPException(http, error(message, "invalid_request_error", param=param, code=code))


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Answers the requests of clients."""

    attempt: Attempt
    tokenizer: ChatTokenizer
    metrics: FrontMetrics
    deadline_s: float
    """Maximum time of an answer; a request may ask for less."""
    health: Callable[[], Reply]
    """Returns the reply for /health. Its `status` is "down" if no request can be answered."""

    async def answer(self, http: Request, request: GenerationRequest) -> Response:
        """Return the whole answer, or a stream if the request asks for one.

        Raises AttemptError, HTTPException and ClientGoneError.
        """
        began_s = time.monotonic()
        replies = Replies(chat=isinstance(request, ChatRequest))
        asked = await run_until_disconnect(http, self._answer_request(replies.id, request))
        steps = answer(asked, self.attempt, lambda kind: self.metrics.retries.labels(kind).inc())
        if not request.stream:
            text = await run_until_disconnect(http, self._text(steps, AnswerText(self.tokenizer, request.stop)))
            self.metrics.requests.labels("ok").inc()
            assert text.finish_reason is not None, "an answer that is not whole is an error"
            usage = usage_of(len(asked.prompt), text.token_count)
            return json_reply(replies.whole(text.text, text.finish_reason, usage))
        first = await run_until_disconnect(http, _first(steps))
        self.metrics.first_token.observe(time.monotonic() - began_s)
        events = self._events(first, steps, replies, request, len(asked.prompt))
        return LiveStream(events, steps, media_type="text/event-stream")

    async def _text(self, steps: AsyncGenerator[Step, None], text: AnswerText) -> AnswerText:
        """Push the steps of an answer into `text` up to its end or a stop string, and return `text`."""
        async with aclosing(steps):
            async for step in steps:
                text.push(step)
                if text.finish_reason is not None:
                    break
        return text

    async def _answer_request(self, answer_id: str, request: GenerationRequest) -> AnswerRequest:
        """Return the request to the workers. Tokenizing counts towards the deadline, too."""
        deadline_s = min(request.deadline_s or self.deadline_s, self.deadline_s)
        deadline = asyncio.get_running_loop().time() + deadline_s
        if request.model != MODEL_NAME:
            message = f"model {request.model!r} does not exist here; this server has {MODEL_NAME!r}"
            raise refusal(message, param="model", http=404, code="model_not_found")
        assert isinstance(request, ChatRequest | CompletionRequest)
        asked = AnswerRequest(
            request_id=answer_id,
            prompt=await await_before(deadline, asyncio.to_thread(self._encode, request)),
            max_tokens=request.token_limit,
            deadline_s=deadline_s,
            sampling=request.sampling_with_seed(),
        )
        return renamed(asked, answer_id, deadline)

    def _encode(self, request: ChatRequest | CompletionRequest) -> list[int]:
        """Return the prompt's tokens. Runs in a thread, because it may take long. Raises HTTPException."""
        prompt: str | list[int]
        if isinstance(request, ChatRequest):
            param, prompt = "messages", self.tokenizer.render([message.for_template() for message in request.messages])
        else:
            param, prompt = "prompt", request.prompt
        if isinstance(prompt, str):
            # Refuse a text that cannot fit before tokenizing it, which could take minutes of a core.
            _require_length(param, -(-len(prompt) // self.tokenizer.longest_token))
            prompt = self.tokenizer.encode_text(prompt)
        elif bad := [token for token in prompt if not 0 <= token < self.tokenizer.token_count]:
            raise refusal(f"prompt: {bad[0]} is not a token of {MODEL_NAME}", param="prompt")
        _require_length(param, len(prompt))
        if not prompt:
            raise refusal("prompt: needs at least one token", param="prompt")
        return prompt

    async def _events(
        self,
        first: Step,
        rest: AsyncGenerator[Step, None],
        replies: Replies,
        request: GenerationRequest,
        prompt_count: int,
    ) -> AsyncIterator[str]:
        """Yield the events of a stream. A token that ends inside a character or a possible stop string yields none."""
        outcome, text = "client_gone", AnswerText(self.tokenizer, request.stop)
        try:
            if replies.chat:
                yield _event(replies.piece("", first=True))
            step = first
            while True:
                piece = text.push(step)
                if piece or text.finish_reason is not None:
                    yield _event(replies.piece(piece, text.finish_reason))
                if text.finish_reason is not None:
                    break
                step = await anext(rest)
            await rest.aclose()  # steps after a stop string are not needed
            if request.include_usage:
                yield _event(replies.usage(usage_of(prompt_count, text.token_count)))
            yield "data: [DONE]\n\n"
            outcome = "ok"
        except AttemptError as failed:
            outcome = failed.failure.kind
            logger.info("stream %s failed: %s", replies.id, failed)
            yield _event(_reply_of(failed.failure, None))
        finally:
            self.metrics.requests.labels(outcome).inc()


async def _first(steps: AsyncGenerator[Step, None]) -> Step:
    return await anext(steps)


def _require_length(param: str, at_least: int) -> None:
    if at_least > CACHE_TOKENS:
        message = f"This model's maximum context length is {CACHE_TOKENS} tokens. However, your {param} "
        raise refusal(f"{message}resulted in at least {at_least}.", param=param, code="context_length_exceeded")


def front_app(front: Front) -> FastAPI:
    """Return the FastAPI application of a front."""
    app = FastAPI(title="kvflow: OpenAI-compatible example server")
    app.add_middleware(BodyLimit)
    add_metrics(app, front.metrics.registry)
    _add_error_handlers(app, front.metrics)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await front.answer(request, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await front.answer(request, body)

    @app.get("/v1/models")
    async def models() -> Reply:
        return {"object": "list", "data": [MODEL]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Reply:
        if name != MODEL_NAME:
            raise refusal(f"model {name!r} does not exist here", param="model", http=404, code="model_not_found")
        return MODEL

    @app.get("/health", response_model=None)
    async def health() -> Response:
        reply = front.health()
        return json_reply(reply, 503 if reply["status"] == "down" else 200)

    return app


def _add_error_handlers(app: FastAPI, metrics: FrontMetrics) -> None:
    """Make the application answer every error in OpenAI's format, and count it."""

    def refused(outcome: str, reply: Reply, status: int) -> Response:
        metrics.requests.labels(outcome).inc()
        return json_reply(reply, status)

    @app.exception_handler(AttemptError)
    async def failed(request: Request, raised: AttemptError) -> Response:
        failure = raised.failure
        logger.info("%s failed: %s: %s", request.url.path, failure.kind, raised)
        prompt = "messages" if request.url.path.endswith("/chat/completions") else "prompt"
        return refused(failure.kind, _reply_of(failure, prompt), STATUS[failure.kind].http)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, raised: RequestValidationError) -> Response:
        first = raised.errors()[0]
        # If the body is not JSON, the location is a byte offset and not a parameter.
        param = None if first["type"] == "json_invalid" else ".".join(map(str, first["loc"][1:])) or None
        unknown = first["type"] == "extra_forbidden"
        why = "this server does not support it" if unknown else first["msg"].removeprefix("Value error, ")
        message = f"{param}: {why}" if param else why
        return refused(FailureKind.INVALID, error(message, "invalid_request_error", param=param), 400)

    @app.exception_handler(exceptions.HTTPException)
    async def invalid(_: Request, raised: exceptions.HTTPException) -> Response:
        detail: Any = raised.detail  # that of `refusal` is a whole reply
        reply = detail if isinstance(detail, dict) else error(detail, "invalid_request_error")
        return refused(FailureKind.INVALID, reply, raised.status_code)

    @app.exception_handler(ClientGoneError)
    async def client_gone(_: Request, __: ClientGoneError) -> Response:
        metrics.requests.labels("client_gone").inc()
        return Response(status_code=499)  # the client does not see it


def _reply_of(failure: Failure, prompt: str | None) -> Reply:
    """Return the error for a failure. `prompt` names the parameter with the prompt, if the prompt may be at fault."""
    message = STATUS[failure.kind].message or failure.message
    if failure.kind is FailureKind.INVALID:
        return error(message, "invalid_request_error", param=prompt, code="context_length_exceeded")
    return error(message, "server_error", code=failure.kind)


def _event(reply: Any) -> str:
    return f"data: {json.dumps(reply)}\n\n"
