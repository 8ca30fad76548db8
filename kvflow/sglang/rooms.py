"""Rooms of a prefill server: which of its requests answers which request of a decode server.

Rooms come from routers. All samples of one prompt have one room, and a router that tries again may use a room that is
in use. So a room is two queues: the n-th request that decode servers make of it is answered by the n-th request that
the prefill server gets. A request that either server gives up keeps its place, so that all ranks pair alike.

No I/O and no clock: callers hold a lock, and say what time it is.
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
"""First frame of a decode rank's message."""

ROOM_MAX = (1 << 63) - 1
REASON_CHARS_MAX = 400
ASKED_MAX = 1 << 14
"""Requests of decode servers that wait for an answer; the oldest makes room for one more."""
REFUSALS_MAX = 1 << 12
"""Refused requests that no decode server has asked for yet."""
LEFTOVER_S = 30.0
"""Time after which a request that was given up does not end another one of its room."""
_OVER_MAX = 1 << 14


class Room(int):
    """A room as the key of one request's state: it equals only itself, so requests of one room share no state."""

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


def room_problem(room: int) -> str:
    """Return why no request can have this room; "" if one can.

    SGLang's metadata has 0 where nothing was written yet, and no room of 64 bits.
    """
    return "" if 0 < int(room) <= ROOM_MAX else f"bootstrap_room: expected 1 to 2**63 - 1, got {int(room)}"


class Wanted(msgspec.Struct, frozen=True):
    """Message of a decode rank to a prefill rank about one request: what it wants, or that it has given it up."""

    room: Annotated[int, Meta(ge=1, le=ROOM_MAX)]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Request id of the offers; a secret of the two servers."""
    reader: Annotated[str, Meta(max_length=256)]
    """Name of the reading rank."""
    readers: Annotated[int, Meta(ge=1, le=1 << 10)]
    """Number of ranks from which this prefill rank hears about the request."""
    decode_prefix_len: Annotated[int, Meta(ge=0)] = 0
    is_dummy: bool = False
    """True if the rank reads from another rank what is not cut."""
    prompt: Annotated[str, Meta(max_length=64)] = ""
    """Digest of the prompt's tokens, salted with the name; "" if it is not known."""
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    given_up: str = ""
    """Why the decode rank does not want the request any longer; "" if it does."""

    def frames(self) -> list[bytes]:
        """Return the frames that a decode rank sends."""
        return [WANTED, msgspec.json.encode(self)]


@dataclass(slots=True, eq=False)
class RoomRequest:
    """One request of a decode server, as its ranks have told of it so far."""

    room: int
    name: str
    since_s: float
    readers: dict[str, Wanted] = field(default_factory=dict)
    given_up: str = ""
    """Why the decode server has given it up."""

    @property
    def first(self) -> Wanted | None:
        """What the first rank wants; None before one has said so."""
        return next(iter(self.readers.values()), None)

    @property
    def complete(self) -> bool:
        """True once all ranks have said what they want."""
        first = self.first
        return first is not None and len(self.readers) == first.readers

    def note(self, wanted: Wanted) -> None:
        """Note what one rank says."""
        if wanted.given_up:
            self.given_up = self.given_up or printable(wanted.given_up, REASON_CHARS_MAX)
        elif not self.complete:
            self.readers[wanted.reader] = wanted


@dataclass(slots=True, eq=False)
class Answer:
    """One request of the prefill server, and the request of a decode server that it answers, once there is one."""

    room: int
    since_s: float
    asked: RoomRequest | None = None
    refused: str = ""
    """Why it will not be computed."""


class Rooms:
    """Requests of all rooms that are not over yet."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        """Seconds that a request of a decode server waits for its answer."""
        self.asked: dict[int, deque[RoomRequest]] = {}
        """Requests of decode servers without an answer, by room."""
        self.answers: dict[int, deque[Answer]] = {}
        """Requests of the prefill server that nobody has asked for, by room."""
        self._names: OrderedDict[str, RoomRequest] = OrderedDict()
        """Requests without an answer, the oldest first."""
        self._answered: dict[str, RoomRequest] = {}
        self._refusals: OrderedDict[int, Answer] = OrderedDict()
        """Refused requests that nobody has asked for, by their identity, the oldest first."""
        self._over: Latest[str, None] = Latest(_OVER_MAX)
        """Names whose requests are over: what is still said about them changes nothing."""

    def hear(self, wanted: Wanted, now_s: float) -> tuple[RoomRequest, str] | None:
        """Note a message of a decode rank.

        Returns:
            The request and why, if it is to be declined now since its answer was refused before; else None.
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
        """Add a request of the prefill server: it answers the first request of the room that has no answer."""
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
            The request to decline now; None if nobody has asked yet, or it was refused before.
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
        """Forget a request of the prefill server. What nobody has asked for stays as refused for a while.

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
        """Forget requests that have waited too long, or are too many.

        Returns:
            The requests of decode servers to decline.
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
        """Forget what was given up so long ago that a new request of the room is no part of it."""
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
    """Remove and return the first of a room; a room without requests is forgotten."""
    queue = queues[room]
    first = queue.popleft()
    if not queue:
        del queues[room]
    return first


def _removed(queues: dict[int, deque[OneT]], one: OneT) -> None:
    """Remove one request of a room, wherever it stands."""
    queue = queues[one.room]
    queue.remove(one)
    if not queue:
        del queues[one.room]
