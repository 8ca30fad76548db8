"""What FastAPI leaves to its users: a limit of bodies, work that ends with its client, a server that ends in order."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Result = TypeVar("Result")

BODY_BYTES_MAX = 1 << 20
"""JSON is parsed on the event loop, so its size decides how long the loop serves nobody else."""
CLIENT_KEEP_ALIVE_S, SERVER_KEEP_ALIVE_S = 30.0, 75
"""The router's pool drops idle connections before its workers do: a request would meet one that has just ended."""
SHUTDOWN_TIMEOUT_S = 3


class ClientGoneError(Exception):
    """The client has hung up: there is nobody to answer."""


class BodyLimit:
    """ASGI middleware: a body of more than `BODY_BYTES_MAX` is refused with 413, and any body counts as JSON."""

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

        if scope["type"] == "http":  # many clients name no type, or another one
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
        await self._app(scope, limited, send)


class Closable(Protocol):
    async def aclose(self) -> None: ...


class LiveStream(StreamingResponse):
    """A stream that closes its source when it ends, also when the client has gone before the first byte."""

    def __init__(self, lines: AsyncIterator[str | bytes], source: Closable, *, media_type: str) -> None:
        super().__init__(lines, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If the client hangs up, cancel the work and raise ClientGoneError once it ended."""
    working = asyncio.create_task(work, name=f"{request.method} {request.url.path}")
    leaving = asyncio.create_task(_hung_up(request), name="client")
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


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def serve_http(app: FastAPI, listening: socket.socket) -> None:
    """Answer until SIGTERM or Ctrl-C; streams get a moment to finish."""
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=SERVER_KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    # uvicorn takes these while it serves, and raises them once more when it is done: by then we are leaving anyway.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    await uvicorn.Server(config).serve([listening])
