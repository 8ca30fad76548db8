"""Bodies of requests, read whole and within limits before anything looks at them.

JSON is parsed and checked on the event loop, so its size decides how long the loop serves nobody else. A body that is
too large is never kept: the rest of it is read and dropped for a while, since a client that still writes does not read
the answer, and then the connection ends. What all requests together may hold is bounded, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 1 << 20
"""Three times what the longest prompt may have (`limits`), since JSON may write a character of one byte as six."""
BODIES_BYTES_MAX = 64 << 20
"""Bodies of all requests that are under way."""
DROPPED_BYTES_MAX = 64 << 20
BODY_TIMEOUT_S = 30.0
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")


class BodyRefusedError(Exception):
    """The body is not taken."""

    def __init__(self, http: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.http = http


class _ClientGoneError(Exception):
    """The client went in the middle of its body."""


Refusal = Callable[[BodyRefusedError], Response]
"""Makes an application's answer of it."""


@dataclass(slots=True, eq=False)
class BodyLimits:
    """ASGI middleware: the application gets bodies as one message, or does not see the request."""

    app: ASGIApp
    refusal: Refusal
    bytes_max: int = BODY_BYTES_MAX
    bytes_held_max: int = BODIES_BYTES_MAX
    timeout_s: float = BODY_TIMEOUT_S
    bytes_held: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY:
            await self.app(scope, receive, send)
            return
        body = _Body(dict(scope["headers"]), receive)
        try:
            whole = await self._read(body)
            await self.app(_as_json(scope), _replayed(whole, receive), send)
        except BodyRefusedError as error:
            answer = self.refusal(error)
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
        except _ClientGoneError:
            pass  # nobody is there to be answered
        finally:
            self.bytes_held -= body.bytes_held

    async def _read(self, body: _Body) -> bytes:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._take(body)
        except TimeoutError:
            why = f"the body was not there within {self.timeout_s:g} s"
            raise BodyRefusedError(HTTPStatus.REQUEST_TIMEOUT, why) from None
        except BodyRefusedError:
            self.bytes_held -= body.bytes_held
            body.bytes_held = 0
            await body.drop(self.timeout_s)
            raise

    async def _take(self, body: _Body) -> bytes:
        if body.coding != "identity":
            why = f"content-encoding {body.coding[:40]!r}: bodies are taken as they are, not compressed"
            raise BodyRefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why)
        pieces, size = [], body.told_size
        while size <= self.bytes_max and body.more:
            piece = await body.next()
            pieces.append(piece)
            body.bytes_held += len(piece)
            self.bytes_held += len(piece)
            if self.bytes_held > self.bytes_held_max:
                why = "the server holds too many requests; try again in a few seconds"
                raise BodyRefusedError(HTTPStatus.SERVICE_UNAVAILABLE, why)
            size = max(size, body.bytes_held)
        if size > self.bytes_max:
            why = f"the body has at least {size} bytes, and at most {self.bytes_max} are taken"
            raise BodyRefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        return b"".join(pieces)


class _Body:
    """The body of one request, as it comes."""

    def __init__(self, headers: dict[bytes, bytes], receive: Receive) -> None:
        told = headers.get(b"content-length", b"")
        self.told_size = int(told[:20]) if told.isdigit() else 0
        self.coding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower() or "identity"
        self.more = True
        self.bytes_held = 0
        self._waits = headers.get(b"expect", b"").lower() == b"100-continue"
        self._receive = receive

    async def next(self) -> bytes:
        """The next piece. Raises _ClientGoneError."""
        self._waits = False  # asking for it tells the client to go on
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _ClientGoneError
        self.more = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        return piece

    async def drop(self, timeout_s: float) -> None:
        """Read the rest for nobody; of a client that waits to be told to go on there is none."""
        dropped = 0
        try:
            async with asyncio.timeout(timeout_s):
                while self.more and not self._waits and dropped < DROPPED_BYTES_MAX:
                    dropped += len(await self.next())
        except TimeoutError:
            pass  # the connection ends with the answer


def _as_json(scope: Scope) -> Scope:
    """The request with a body that is taken for JSON, as all have to be: many clients name no type, or another."""
    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Receive the body at once; after it comes what the client does."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
