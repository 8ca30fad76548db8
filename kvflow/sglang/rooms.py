"""Rooms of a prefill server: pairs the requests of decode servers with the requests of the prefill server.

Routers choose the rooms. All samples of a prompt have the same room, and a router that tries again may use a room that
is in use. So a room has two queues: the room's n-th request from decode servers is answered by the room's n-th request
at the prefill server. A request that either server gives up keeps its place, so that all ranks make the same pairs.

The module has no I/O and no clock: callers hold a lock and pass the time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvflow.checks import printable
from kvflow.core.policy.latest import Latest

OneT = TypeVar("OneT", "RoomRequest", "Answer")

WANTED = b"KVFLOW"
"""First frame of a message from a decode rank."""

ROOM_MAX = (1 << 63) - 1
REASON_CHARS_MAX = 400
ASKED_MAX = 1 << 14
"""Most requests of decode servers that may wait for an answer; beyond it the oldest is declined."""
REFUSALS_MAX = 1 << 12
"""Most refused requests that are kept until a decode server asks; beyond it the oldest is forgotten."""
LEFTOVER_S = 30.0
"""Seconds after which a given-up or refused request is not paired with a new request of its room."""
_OVER_MAX = 1 << 14


class Room(int):
    """A room as the key of one request's state. It equals only itself, so requests of the same room share no state."""

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


def room_problem(room: int) -> str:
    """Return why `room` is invalid; "" if it is valid.

    In SGLang's metadata 0 means that nothing was written yet, and a room has at most 63 bits.
    """
    return "" if 0 < int(room) <= ROOM_MAX else f"bootstrap_room: expected 1 to 2**63 - 1, got {int(room)}"


class Wanted(msgspec.Struct, frozen=True):
    """A decode rank's message to a prefill rank about a request: what is wanted, or that the request was given up."""

    room: Annotated[int, Meta(ge=1, le=ROOM_MAX)]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Request id of the offers: a secret between the two servers."""
    reader: Annotated[str, Meta(max_length=256)]
    """Name of the reading rank."""
    readers: Annotated[int, Meta(ge=1, le=1 << 10)]
    """Number of decode ranks that send this prefill rank a message about the request."""
    decode_prefix_len: Annotated[int, Meta(ge=0)] = 0
    """Prompt tokens that the decode server already has."""
    is_dummy: bool = False
    """True if the decode rank reads uncut pools from another prefill rank."""
    prompt: Annotated[str, Meta(max_length=64)] = ""
    """Digest of the prompt's tokens, salted with `name`; "" if the prompt is unknown."""
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    given_up: str = ""
    """Why the request was given up; "" if it was not."""

    def frames(self) -> list[bytes]:
        """Return the message as frames to send."""
        return [WANTED, msgspec.json.encode(self)]


@dataclass(slots=True, eq=False)
class RoomRequest:
    """One request of a decode server, as the messages of its ranks describe it so far."""

    room: int
    name: str
    since_s: float
    readers: dict[str, Wanted] = field(default_factory=dict)
    """The message of each reading rank."""
    given_up: str = ""
    """Why the decode server has given the request up; "" if it has not."""

    @property
    def first(self) -> Wanted | None:
        """Message of the first reading rank; None before any."""
        return next(iter(self.readers.values()), None)

    @property
    def complete(self) -> bool:
        """True once all reading ranks have sent a message."""
        first = self.first
        return first is not None and len(self.readers) == first.readers

    def note(self, wanted: Wanted) -> None:
        """Add the message of one rank."""
        if wanted.given_up:
            self.given_up = self.given_up or printable(wanted.given_up, REASON_CHARS_MAX)
        elif not self.complete:
            self.readers[wanted.reader] = wanted


@dataclass(slots=True, eq=False)
class Answer:
    """One request of the prefill server, and the decode server's request that it answers, once there is one."""

    room: int
    since_s: float
    asked: RoomRequest | None = None
    refused: str = ""
    """Why the request will not be computed; "" if it will."""


class Rooms:
    """The requests of all rooms that have not ended."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        """Seconds that a request of a decode server may wait for its answer."""
        self.asked: dict[int, deque[RoomRequest]] = {}
        """Requests of decode servers without an answer, by room."""
        self.answers: dict[int, deque[Answer]] = {}
        """Requests of the prefill server that no decode server has asked for, by room."""
        self._names: OrderedDict[str, RoomRequest] = OrderedDict()
        """The requests in `asked` by name, the oldest first."""
        self._answered: dict[str, RoomRequest] = {}
        """Requests of decode servers that have an answer, by name."""
        self._refusals: OrderedDict[int, Answer] = OrderedDict()
        """Refused requests in `answers`, by their identity, the oldest first."""
        self._over: Latest[str, None] = Latest(_OVER_MAX)
        """Names of ended requests: later messages about them change nothing."""

    def hear(self, wanted: Wanted, now_s: float) -> tuple[RoomRequest, str] | None:
        """Handle a message of a decode rank.

        Returns:
            If the request's answer was refused before: the request, and the reason to decline it with. Else None.
        """
        if wanted.name in self._over:
            return None
        asked = self._answered.get(wanted.name) or self._names.get(wanted.name)
        if asked is not None:
            asked.note(wanted)
            if asked.given_up and asked.name in self._names:
                asked.since_s = now_s
                self._names.move_to_end(asked.name)
            return None
        asked = RoomRequest(wanted.room, wanted.name, now_s)
        asked.note(wanted)
        answers = self.answers.get(wanted.room)
        if answers is None:
            self.asked.setdefault(wanted.room, deque()).append(asked)
            self._names[wanted.name] = asked
            return None
        answer = _popped(self.answers, wanted.room)
        if not answer.refused:
            self._pair(asked, answer)
            return None
        del self._refusals[id(answer)]
        self._over[asked.name] = None
        return asked, answer.refused

    def answer(self, room: int, now_s: float) -> Answer:
        """Add a request of the prefill server, and return it. It answers the room's first unanswered request."""
        self._forget_leftovers(room, now_s)
        answer = Answer(room, now_s)
        if room in self.asked:
            asked = _popped(self.asked, room)
            del self._names[asked.name]
            self._pair(asked, answer)
        else:
            self.answers.setdefault(room, deque()).append(answer)
        return answer

    def refuse(self, answer: Answer, reason: str, now_s: float) -> RoomRequest | None:
        """Mark a request of the prefill server as one that will not be computed.

        Returns:
            The decode server's request to decline now; None if there is none yet, or if `answer` was refused before.
        """
        if answer.refused:
            return None
        answer.refused = printable(reason, REASON_CHARS_MAX) or "it gives no reason"
        if answer.asked is not None:
            return answer.asked
        answer.since_s = now_s
        self._refusals[id(answer)] = answer
        if len(self._refusals) > REFUSALS_MAX:
            self._drop(next(iter(self._refusals.values())))
        return None

    def close(self, answer: Answer, now_s: float) -> RoomRequest | None:
        """Forget a request of the prefill server. If no decode server has asked for it, keep it for a while as refused.

        Returns:
            As `refuse`.
        """
        asked = answer.asked
        if asked is None:
            return self.refuse(answer, "the prefill server has ended the request", now_s)
        if self._answered.pop(asked.name, None) is not None:
            self._over[asked.name] = None
        return None

    def expired(self, now_s: float) -> list[RoomRequest]:
        """Forget requests of decode servers that have waited longer than `patience_s`, or exceed `ASKED_MAX`.

        Returns:
            The forgotten requests that were not given up: decline them.
        """
        gone = []
        while self._names:
            asked = next(iter(self._names.values()))
            if len(self._names) <= ASKED_MAX and now_s - asked.since_s <= self._patience_s:
                break
            _removed(self.asked, asked)
            del self._names[asked.name]
            self._over[asked.name] = None
            if not asked.given_up:
                gone.append(asked)
        return gone

    def _pair(self, asked: RoomRequest, answer: Answer) -> None:
        answer.asked = asked
        self._answered[asked.name] = asked

    def _forget_leftovers(self, room: int, now_s: float) -> None:
        """Forget the room's requests that were given up or refused more than `LEFTOVER_S` ago."""
        for answer in [one for one in self.answers.get(room, ()) if one.refused and now_s - one.since_s > LEFTOVER_S]:
            self._drop(answer)
        for asked in [one for one in self.asked.get(room, ()) if one.given_up and now_s - one.since_s > LEFTOVER_S]:
            _removed(self.asked, asked)
            del self._names[asked.name]
            self._over[asked.name] = None

    def _drop(self, refused: Answer) -> None:
        _removed(self.answers, refused)
        del self._refusals[id(refused)]


def _popped(queues: dict[int, deque[OneT]], room: int) -> OneT:
    """Remove and return the first request of `room`. If the room is then empty, remove the room."""
    queue = queues[room]
    first = queue.popleft()
    if not queue:
        del queues[room]
    return first


def _removed(queues: dict[int, deque[OneT]], one: OneT) -> None:
    """Remove the request `one` from its room. If the room is then empty, remove the room."""
    queue = queues[one.room]
    queue.remove(one)
    if not queue:
        del queues[one.room]
