"""Interfaces of the side channel, over which ranks ask each other questions. See `asking` and `listening`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvflow.checks import printable
from kvflow.core.bounds import REASON_CHARS_MAX
from kvflow.core.protocol import codec, messages

QUESTIONS_MAX = 8
"""Maximum number of questions that wait for answers on one connection. A listener can queue all these answers."""

Answered: TypeAlias = "messages.Reply | asyncio.Future[messages.Reply]"
"""A reply to a peer, or a future of the reply. Other requests are answered until the future is done.

A function that returns futures must bound their number and complete each.
"""

Answer: TypeAlias = Callable[[codec.Header, messages.Request], Answered]


def refusal(reason: str, *, transient: bool = False, retry_after_s: float = 0.0) -> messages.Refusal:
    """Return a refusal that says `reason`. `transient`: the peer may ask the same question later."""
    why = printable(reason, REASON_CHARS_MAX - 3)
    return messages.Refusal(
        reason=why, version=codec.PROTOCOL_VERSION, transient=transient, retry_after_s=retry_after_s
    )


AnswerBare: TypeAlias = Callable[[bytes], "list[bytes] | None"]
"""Function that takes the only frame of a bare question: one without kvflow's header, from an engine that runs none.

The function returns the frames of the answer, or None to send no answer.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerStatistics:
    """Counts of a listener. `rejected` and `connections` count connections, `recycled` counts drops of all connections.

    The other fields count messages.
    """

    answered: int
    refused: int
    dropped: int
    """Number of messages without an answer, because they could not be decoded, or because the queue of answers to the
    peer was full."""
    over_rate: int = 0
    """Number of messages that were answered "busy", or not at all, because the peer asked too often."""
    rejected: int = 0
    """Number of connections that failed in their handshake: the client's key is not in the allowlist, or the client is
    no kvflow peer."""
    connections: int = 0
    recycled: int = 0
    """Number of times that all connections were dropped, because there were too many connections, or because this
    process could open too few further files."""


class Listener(Protocol):
    """The end of a rank's side channel that is bound to a port and answers peers."""

    answer_bare: AnswerBare | None
    """Function that answers bare questions. None: these questions are dropped as malformed."""

    @property
    def port(self) -> int: ...

    @property
    def statistics(self) -> ListenerStatistics: ...

    async def serve(self) -> None:
        """Answer requests until cancelled."""

    def close(self) -> None:
        """Stop listening. Closing twice is fine."""


class SideChannel(Protocol):
    """The channel over which a rank asks peers questions and answers questions from peers."""

    async def listen(self, answer: Answer, requests: codec.RequestDecoder = codec.CORE_REQUESTS) -> Listener:
        """Bind this rank's address and return the listener, which calls `answer` with each request.

        `requests`: decoder of the requests that the listener answers (`codec.requests_with`). ConfigError if the
        address cannot be bound, or the CURVE keys cannot be read.
        """

    async def ask(
        self, request: messages.Request, *, fingerprint: bytes, timeout_s: float | None = None
    ) -> messages.Reply:
        """Send `request` to the peer `request.target` and return the answer, which may be a Refusal.

        `fingerprint`: hash of this rank's `Compatibility`, what both engines must have in common. `timeout_s` defaults
        to Config.handshake_timeout_s. PeerUnreachable if the connection is refused or no answer comes within
        `timeout_s`, PeerRefused if one side does not accept the other's CURVE key, ProtocolError if the answer is not a
        kvflow message. If cancelled, stop waiting.
        """

    def abandon(self) -> None:
        """Close all sockets. For use after the event loop has ended."""

    def close(self) -> None:
        """Send no further questions. Questions already sent may still be answered. Closing twice is fine."""
