"""Additions to FastAPI: a limit of request bodies, cancellation when a client disconnects, an orderly shutdown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Result = TypeVar("Result")

BODY_BYTES_MAX = 1 << 20
"""Maximum size of a request body. JSON is parsed on the event loop, so a large body would block other requests."""
CLIENT_KEEP_ALIVE_S, SERVER_KEEP_ALIVE_S = 30.0, 75
"""Seconds after which client and server close an idle connection.

The router closes first: otherwise it could send a request on a connection that a worker is just closing.
"""
SHUTDOWN_TIMEOUT_S = 3


class ClientGoneError(HTTPException):
    """The client has disconnected, so no answer is needed."""

    def __init__(self) -> None:
        super().__init__(499)


class BodyLimit:
    """ASGI middleware that refuses a body above `BODY_BYTES_MAX` with 413, and treats every body as JSON."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_BYTES_MAX:
                raise HTTPException(413, f"the body has at least {size} bytes, and at most {BODY_BYTES_MAX} are taken")
            return message

        if scope["type"] == "http":  # many clients send no content type, or a wrong one
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
        await self._app(scope, limited, send)


class Closable(Protocol):
    async def aclose(self) -> None: ...


class LiveStream(StreamingResponse):
    """A streaming response that closes `source` at its end, even if the client disconnects before the first byte."""

    def __init__(self, lines: AsyncIterator[str | bytes], source: Closable, *, media_type: str) -> None:
        super().__init__(lines, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If the client disconnects, cancel `work`, await its end, raise ClientGoneError."""
    working = asyncio.create_task(work, name=f"{request.method} {request.url.path}")
    leaving = asyncio.create_task(_wait_disconnect(request), name="client")
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait([working])
            if working.cancelled():
                raise ClientGoneError
        return await working
    finally:
        working.cancel()
        leaving.cancel()


async def _wait_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def serve_http(app: FastAPI, host: str, port: int) -> None:
    """Serve `app` until SIGTERM or Ctrl-C. Open streams then get `SHUTDOWN_TIMEOUT_S` to finish."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=SERVER_KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    # uvicorn handles these signals while it serves, and raises them again when it is done. They are ignored then,
    # because this process is ending anyway.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    await uvicorn.Server(config).serve()
