"""What FastAPI's own ways do not give: answers that end with their client, and messages read without a detour.

A client that hangs up ends the work that was done for it. Between router and workers every hop is on the way from
prefill to decode, so their endpoints are plain routes that read their own body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from disaggregated.messages import Message
from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

MessageT = TypeVar("MessageT", bound=Message)
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client has hung up: nobody is there to be answered."""


class Closable(Protocol):
    async def aclose(self) -> None: ...


class LiveStream(StreamingResponse):
    """A stream that closes its source when it ends, be it that the client has gone, even before the first byte."""

    def __init__(self, lines: AsyncIterator[str | bytes], source: Closable, *, media_type: str) -> None:
        super().__init__(lines, media_type=media_type, headers={"Cache-Control": "no-cache"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def read_message(request: Request, kind: type[MessageT]) -> MessageT:
    """The message in a request's body; what is none is answered with 422."""
    try:
        return kind.read(await request.body())
    except msgspec.DecodeError as error:
        raise HTTPException(422, str(error)) from None


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. When the client hangs up the work is cancelled, and ClientGoneError raised once it ended."""
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
