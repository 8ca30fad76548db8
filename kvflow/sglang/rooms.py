"""Rooms of a prefill server: pairs the requests of decode servers with the requests of the prefill server.

A room is the number under which a router sends a request to both servers. All samples of a prompt have the same room,
and a router that tries again may use a room that is in use. So a room has two queues: the room's n-th request from
decode servers is answered by the room's n-th request at the prefill server. A request that either server gives up keeps
its place in the queue, so that all ranks make the same pairs.

The module has no I/O and no clock: callers hold a lock and pass the time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvflow.checks import printable
from kvflow.core.policy.bounded_map import BoundedMap

OneT = TypeVar("OneT", "RoomRequest", "Answer")

MESSAGE_FRAME = b"KVFLOW"
"""First frame of each message from a decode rank to a prefill rank."""

ROOM_MAX = (1 << 63) - 1
REASON_CHARS_MAX = 400
REQUESTS_MAX = 1 << 14
"""Maximum number of requests from decode servers that wait for an answer; beyond it the oldest is declined."""
REFUSALS_MAX = 1 << 12
"""Maximum number of refused requests that are kept until a decode server asks; beyond it the oldest is forgotten."""
LEFTOVER_S = 30.0
"""Seconds after which a request that was given up or refused is not paired with a new request of its room."""
_ENDED_NAMES_MAX = 1 << 14


class Room(int):
    """A room as the key for the state of one request.

    It equals only itself, so requests of the same room share no state.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


def room_problem(room: int) -> str:
    """Return why `room` is invalid; "" if it is valid.

    A room has at most 63 bits, and in SGLang's metadata 0 means that nothing was written yet.
    """
    return "" if 0 < int(room) <= ROOM_MAX else f"bootstrap_room: expected 1 to 2**63 - 1, got {int(room)}"


class RoomMessage(msgspec.Struct, frozen=True):
    """A decode rank's message to a prefill rank about a request: that it waits for the offer, or has given up."""

    room: Annotated[int, Meta(ge=1, le=ROOM_MAX)]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Request id under which the prefill rank has to offer the prompt: a secret between the two servers."""
    reader: Annotated[str, Meta(max_length=256)]
    """Name of the decode rank that sends the message."""
    readers: Annotated[int, Meta(ge=1, le=1 << 10)]
    """Number of decode ranks that send this prefill rank a message about the request."""
    decode_prefix_len: Annotated[int, Meta(ge=0)] = 0
    """Number of prompt tokens that the decode server already has."""
    is_dummy: bool = False
    """True if the decode rank reads whole-item pools from another prefill rank (`Buffers.cut` is False)."""
    prompt: Annotated[str, Meta(max_length=64)] = ""
    """Digest of the prompt's tokens, salted with `name`; "" if the prompt is unknown."""
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    given_up: str = ""
    """Why the decode server has given the request up; "" if it has not."""

    def frames(self) -> list[bytes]:
        """Return the message encoded as the frames of a ZMQ message."""
        return [MESSAGE_FRAME, msgspec.json.encode(self)]


@dataclass(slots=True, eq=False)
class RoomRequest:
    """One request of a decode server, as far as the messages of its ranks describe it."""

    room: int
    name: str
    since_s: float
    messages: dict[str, RoomMessage] = field(default_factory=dict)
    """The message of each decode rank, by the rank's name."""
    given_up: str = ""
    """Why the decode server has given the request up; "" if it has not."""

    @property
    def first_message(self) -> RoomMessage | None:
        """Message of the decode rank that sent one first; None before any message."""
        return next(iter(self.messages.values()), None)

    @property
    def complete(self) -> bool:
        """True once all decode ranks of the request have sent a message."""
        first = self.first_message
        return first is not None and len(self.messages) == first.readers

    def add_message(self, message: RoomMessage) -> None:
        """Add the message `message` of one decode rank."""
        if message.given_up:
            self.given_up = self.given_up or printable(message.given_up, REASON_CHARS_MAX)
        elif not self.complete:
            self.messages[message.reader] = message


@dataclass(slots=True, eq=False)
class Answer:
    """One request of the prefill server, and the decode server's request that it answers (`request`), if it has
    come."""

    room: int
    since_s: float
    request: RoomRequest | None = None
    refused: str = ""
    """Why the prefill server will not compute the request; "" if it will."""


class Rooms:
    """All requests of a prefill server and of its decode servers that have not ended, paired or not."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        """Seconds that a decode server's request may wait for an answer."""
        self.requests: dict[int, deque[RoomRequest]] = {}
        """Queues of decode servers' requests that have no answer yet, by room."""
        self.answers: dict[int, deque[Answer]] = {}
        """Queues of the prefill server's requests that no decode server has asked for yet, by room."""
        self._waiting_by_name: OrderedDict[str, RoomRequest] = OrderedDict()
        """The requests in `requests` by `RoomMessage.name`, the oldest first."""
        self._paired_by_name: dict[str, RoomRequest] = {}
        """Decode servers' requests that have an answer, by `RoomMessage.name`."""
        self._refusals: OrderedDict[int, Answer] = OrderedDict()
        """The refused requests in `answers`, by `id()`, the oldest first."""
        self._ended_names: BoundedMap[str, None] = BoundedMap(_ENDED_NAMES_MAX)
        """`RoomMessage.name` of each of the latest ended requests: later messages about them change nothing."""

    def handle(self, message: RoomMessage, now_s: float) -> tuple[RoomRequest, str] | None:
        """Handle a decode rank's message: add it to its request, or add a new request and pair it with an answer.

        Returns:
            The request and a reason, if the prefill server had refused it before: the caller has to decline it now.
            Else None.
        """
        if message.name in self._ended_names:
            return None
        request = self._paired_by_name.get(message.name) or self._waiting_by_name.get(message.name)
        if request is not None:
            request.add_message(message)
            if request.given_up and request.name in self._waiting_by_name:
                request.since_s = now_s
                self._waiting_by_name.move_to_end(request.name)
            return None
        request = RoomRequest(message.room, message.name, now_s)
        request.add_message(message)
        answers = self.answers.get(message.room)
        if answers is None:
            self.requests.setdefault(message.room, deque()).append(request)
            self._waiting_by_name[message.name] = request
            return None
        answer = _pop_first(self.answers, message.room)
        if not answer.refused:
            self._pair(request, answer)
            return None
        del self._refusals[id(answer)]
        self._ended_names[request.name] = None
        return request, answer.refused

    def add_answer(self, room: int, now_s: float) -> Answer:
        """Add a request of the prefill server to `room`, and return it.

        The request answers the decode servers' first request in the room that has no answer yet, now or when that
        comes.
        """
        self._forget_leftovers(room, now_s)
        answer = Answer(room, now_s)
        if room in self.requests:
            request = _pop_first(self.requests, room)
            del self._waiting_by_name[request.name]
            self._pair(request, answer)
        else:
            self.answers.setdefault(room, deque()).append(answer)
        return answer

    def refuse(self, answer: Answer, reason: str, now_s: float) -> RoomRequest | None:
        """Mark a request of the prefill server as one that will not be computed, because of `reason`.

        Returns:
            The decode server's request, which the caller has to decline now; None if it has not come yet, or if
            `answer` was refused before.
        """
        if answer.refused:
            return None
        answer.refused = printable(reason, REASON_CHARS_MAX) or "it gives no reason"
        if answer.request is not None:
            return answer.request
        answer.since_s = now_s
        self._refusals[id(answer)] = answer
        if len(self._refusals) > REFUSALS_MAX:
            self._remove_refused(next(iter(self._refusals.values())))
        return None

    def close(self, answer: Answer, now_s: float) -> None:
        """Forget a request of the prefill server that has ended.

        If no decode server has asked for it yet, it is kept for a while as refused.
        """
        if answer.request is None:
            self.refuse(answer, "the prefill server has ended the request", now_s)
        elif self._paired_by_name.pop(answer.request.name, None) is not None:
            self._ended_names[answer.request.name] = None

    def pop_expired(self, now_s: float) -> list[RoomRequest]:
        """Forget the oldest requests of decode servers without an answer: those beyond the limits of time or number.

        The limits are `patience_s` and `REQUESTS_MAX`.

        Returns:
            The forgotten requests that decode servers still wait for: the caller has to decline them.
        """
        gone = []
        while self._waiting_by_name:
            request = next(iter(self._waiting_by_name.values()))
            if len(self._waiting_by_name) <= REQUESTS_MAX and now_s - request.since_s <= self._patience_s:
                break
            _remove_one(self.requests, request)
            del self._waiting_by_name[request.name]
            self._ended_names[request.name] = None
            if not request.given_up:
                gone.append(request)
        return gone

    def _pair(self, request: RoomRequest, answer: Answer) -> None:
        answer.request = request
        self._paired_by_name[request.name] = request

    def _forget_leftovers(self, room: int, now_s: float) -> None:
        """Forget the requests of `room` that were given up or refused more than `LEFTOVER_S` ago."""
        for answer in [one for one in self.answers.get(room, ()) if one.refused and now_s - one.since_s > LEFTOVER_S]:
            self._remove_refused(answer)
        for request in [
            one for one in self.requests.get(room, ()) if one.given_up and now_s - one.since_s > LEFTOVER_S
        ]:
            _remove_one(self.requests, request)
            del self._waiting_by_name[request.name]
            self._ended_names[request.name] = None

    def _remove_refused(self, refused: Answer) -> None:
        _remove_one(self.answers, refused)
        del self._refusals[id(refused)]


def _pop_first(queues: dict[int, deque[OneT]], room: int) -> OneT:
    """Remove and return the first request in the queue of `room`. If the queue is then empty, remove it."""
    queue = queues[room]
    first = queue.popleft()
    if not queue:
        del queues[room]
    return first


def _remove_one(queues: dict[int, deque[OneT]], one: OneT) -> None:
    """Remove the request `one` from the queue of its room. If the queue is then empty, remove it."""
    queue = queues[one.room]
    queue.remove(one)
    if not queue:
        del queues[one.room]
