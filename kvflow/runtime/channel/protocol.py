"""The side channel: how the ranks of engines ask each other questions. Protocols only; see `asking`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from kvflow.checks import printable
from kvflow.core.bounds import REASON_CHARS_MAX
from kvflow.core.protocol import codec, messages

QUESTIONS_MAX = 8
"""Over one connection at once: a listener has room for the answers of so many."""

Answered: TypeAlias = "messages.Reply | asyncio.Future[messages.Reply]"
"""A reply, or one to come: it is sent when it is there, and others are answered meanwhile. Who promises one bounds how
many there are, and settles each."""

Answer: TypeAlias = Callable[[codec.Header, messages.Request], Answered]


def refusal(reason: str, *, transient: bool = False) -> messages.Refusal:
    """Refuse a question, and say why."""
    why = printable(reason, REASON_CHARS_MAX - 3)
    return messages.Refusal(reason=why, version=codec.PROTOCOL_VERSION, transient=transient)


AnswerStranger: TypeAlias = Callable[[bytes], "list[bytes] | None"]
"""The frames of an answer to a reader of another make, which asks by one frame; None if it gets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerStatistics:
    """Counts of a listener, in messages; `rejected` counts connections instead."""

    answered: int
    refused: int
    """Requests that were answered with a reason."""
    dropped: int
    """Messages not answered: none of ours, or nobody took the answer."""
    over_rate: int = 0
    """Messages not answered because their sender asks too often."""
    rejected: int = 0
    """Connections that never came to a message: a key that is not in the allowlist, or no peer of ours at all."""
    connections: int = 0
    """Open now."""
    recycled: int = 0
    """Times that all connections were dropped: there were too many, or too few open files were left."""


class Listener(Protocol):
    """A rank's side channel, bound; `port` is the real one."""

    strangers: AnswerStranger | None
    """Callback that answers messages of another make, if there is one."""

    @property
    def port(self) -> int: ...

    @property
    def statistics(self) -> ListenerStatistics: ...

    async def serve(self) -> None:
        """Answer until cancelled."""

    def close(self) -> None:
        """Stop listening at once. Closing twice is fine."""


class SideChannel(Protocol):
    """The channel on which ranks of engines ask each other questions."""

    async def listen(self, answer: Answer, kinds: Any = messages.CoreRequest) -> Listener:
        """Bind this rank's address, and take requests of these `kinds` (`codec.requests_with`).

        Raises ConfigError if that is not possible, or if its keys cannot be used.
        """

    async def ask(
        self, request: messages.Request, *, fingerprint: bytes, timeout_s: float | None = None
    ) -> messages.Reply:
        """Send one request to its target and return the answer, a Refusal included.

        Raises PeerUnreachable if the port is refused or nobody answers within `timeout_s` (without it
        Config.handshake_timeout_s), PeerRefused if one side does not accept the other's key, ProtocolError if what
        answers is no kvflow. Cancelling gives the question up.
        """

    def abandon(self) -> None:
        """Close everything at once, without the loop, which is gone."""

    def close(self) -> None:
        """Ask nothing any more; questions under way may still be answered. Closing twice is fine."""
