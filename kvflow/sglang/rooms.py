"""Rooms of a prefill server: pairs the requests of decode servers with the requests of the prefill server.

A room is the number (`bootstrap_room`) under which a router sends a request to both servers. All samples of a prompt
have the same room, and a router that tries again may use a room that is in use. So a room has two queues: its n-th
request from decode servers is answered by its n-th request at the prefill server. A request that was given up stays in
its queue, so that all ranks make the same pairs.

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
"""Maximum number of decode servers' requests that wait for the prefill server's request in the same room. Beyond that,
the oldest is declined."""
REFUSALS_MAX = 1 << 12
"""Maximum number of requests that the prefill server has refused and for which no decode server has sent a message yet.
Beyond that, the oldest is forgotten."""
LEFTOVER_S = 30.0
"""Seconds after which an unpaired request that was given up or refused may be forgotten. It is forgotten when the next
request in the same room arrives at the prefill server."""
_ENDED_NAMES_MAX = 1 << 14


class Room(int):
    """A room number as the key of one request in tables.

    Each object equals only itself, so requests with the same room number have different keys.
    """

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


def room_problem(room: int) -> str:
    """Return an error text if `room` is not a valid room number, else "".

    A room number has at most 63 bits. It is not 0, which in SGLang's metadata means that nothing was written yet.
    """
    return "" if 0 < int(room) <= ROOM_MAX else f"bootstrap_room: expected 1 to 2**63 - 1, got {int(room)}"


class RoomMessage(msgspec.Struct, frozen=True):
    """A decode rank's message to a prefill rank: the sender waits for a request's lease, or gives up the request."""

    room: Annotated[int, Meta(ge=1, le=ROOM_MAX)]
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Name for the request's lease at the prefill rank: a secret of the two servers."""
    reader: Annotated[str, Meta(max_length=256)]
    """Name of the sending decode rank."""
    readers: Annotated[int, Meta(ge=1, le=1 << 10)]
    """Number of decode ranks that send this prefill rank a message about the request."""
    decode_prefix_len: Annotated[int, Meta(ge=0)] = 0
    """Number of tokens at the beginning of the prompt that the decode server already has."""
    is_dummy: bool = False
    """True if the decode rank reads the pools with `Buffers.cut` False from another prefill rank."""
    prompt: Annotated[str, Meta(max_length=64)] = ""
    """Digest of the prompt's token ids, salted with `name`; "" if the decode rank does not know the ids."""
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    given_up: str = ""
    """Why the decode server has given up the request; "" if it has not."""

    def frames(self) -> list[bytes]:
        return [MESSAGE_FRAME, msgspec.json.encode(self)]


decode_room_message = msgspec.json.Decoder(RoomMessage).decode


@dataclass(slots=True, eq=False)
class RoomRequest:
    """One request of a decode server, with the decode ranks' messages about the request so far."""

    room: int
    name: str
    since_s: float
    messages: dict[str, RoomMessage] = field(default_factory=dict)
    given_up: str = ""
    """Why the decode server has given up the request; "" if it has not."""

    @property
    def first_message(self) -> RoomMessage | None:
        """The first message about the request that arrived; None if none has."""
        return next(iter(self.messages.values()), None)

    @property
    def complete(self) -> bool:
        """True if the messages of all decode ranks have arrived."""
        first = self.first_message
        return first is not None and len(self.messages) == first.readers

    def add_message(self, message: RoomMessage) -> None:
        """Add a decode rank's message, or record that the decode server has given up the request."""
        if message.given_up:
            self.given_up = self.given_up or printable(message.given_up, REASON_CHARS_MAX)
        elif not self.complete:
            self.messages[message.reader] = message


@dataclass(slots=True, eq=False)
class Answer:
    """The prefill server's side of one request.

    `request` is the decode server's side of the same request; None until a decode rank's message about it arrives.
    """

    room: int
    since_s: float
    request: RoomRequest | None = None
    refused: str = ""
    """Why the prefill server will not compute the request; "" if it will."""


class Rooms:
    """The open requests of a prefill server and of its decode servers, in pairs or waiting to be paired."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        """Seconds for which a decode server's request may wait to be paired."""
        self.requests: dict[int, deque[RoomRequest]] = {}
        """Decode servers' unpaired requests: a queue for each room, by room number."""
        self.answers: dict[int, deque[Answer]] = {}
        """The prefill server's unpaired requests: a queue for each room, by room number."""
        self._waiting_by_name: OrderedDict[str, RoomRequest] = OrderedDict()
        """All requests in `requests`, by `RoomMessage.name`, the oldest first."""
        self._paired_by_name: dict[str, RoomRequest] = {}
        """Decode servers' paired requests, by `RoomMessage.name`."""
        self._refusals: OrderedDict[int, Answer] = OrderedDict()
        """All refused requests in `answers`, by `id(answer)`, the oldest first."""
        self._ended_names: BoundedMap[str, None] = BoundedMap(_ENDED_NAMES_MAX)
        """`RoomMessage.name` of the latest ended requests, so that late messages about them are ignored."""

    def handle(self, message: RoomMessage, now_s: float) -> tuple[RoomRequest, str] | None:
        """Add a decode rank's message to the decode server's request that the message names.

        If the message is the first that names the request, add the request, and pair it with the prefill server's first
        unpaired `Answer` in the room, if there is one. If that `Answer` was refused, return the request and the reason:
        the caller has to decline the request now. Otherwise return None.
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

        The request is paired with the decode servers' first unpaired request in the room, or waits in the room's queue.
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
        """Mark a request of the prefill server as refused for this `reason`: it will not be computed.

        Return the paired request of the decode server, which the caller has to decline now. None if there is none yet,
        or if `answer` was refused before.
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
        """Record that the prefill server's side of a request has ended.

        If `answer` is paired, forget the pair. If it is unpaired, mark it as refused and keep it for a while, so that a
        late message of a decode server gets the refusal.
        """
        if answer.request is None:
            self.refuse(answer, "the prefill server has ended the request", now_s)
        elif self._paired_by_name.pop(answer.request.name, None) is not None:
            self._ended_names[answer.request.name] = None

    def pop_expired(self, now_s: float) -> list[RoomRequest]:
        """Forget decode servers' requests that have waited longer than `patience_s` to be paired, and return them.

        If more than `REQUESTS_MAX` requests wait, forget the oldest, too. The caller has to decline the returned
        requests, which do not include requests that were given up.
        """
        gone = []
        while self._waiting_by_name:
            request = next(iter(self._waiting_by_name.values()))
            if len(self._waiting_by_name) <= REQUESTS_MAX and now_s - request.since_s <= self._patience_s:
                break
            self._end_waiting(request)
            if not request.given_up:
                gone.append(request)
        return gone

    def _pair(self, request: RoomRequest, answer: Answer) -> None:
        answer.request = request
        self._paired_by_name[request.name] = request

    def _forget_leftovers(self, room: int, now_s: float) -> None:
        """Forget unpaired requests in `room` that were given up or refused more than `LEFTOVER_S` ago."""
        for answer in tuple(self.answers.get(room, ())):
            if answer.refused and now_s - answer.since_s > LEFTOVER_S:
                self._remove_refused(answer)
        for request in tuple(self.requests.get(room, ())):
            if request.given_up and now_s - request.since_s > LEFTOVER_S:
                self._end_waiting(request)

    def _end_waiting(self, request: RoomRequest) -> None:
        _remove_one(self.requests, request)
        del self._waiting_by_name[request.name]
        self._ended_names[request.name] = None

    def _remove_refused(self, refused: Answer) -> None:
        _remove_one(self.answers, refused)
        del self._refusals[id(refused)]


def _pop_first(queues: dict[int, deque[OneT]], room: int) -> OneT:
    """Remove and return the first request in the queue of `room`. Remove the queue if it is then empty."""
    queue = queues[room]
    first = queue.popleft()
    if not queue:
        del queues[room]
    return first


def _remove_one(queues: dict[int, deque[OneT]], request: OneT) -> None:
    """Remove `request` from the queue of its room. Remove the queue if it is then empty."""
    queue = queues[request.room]
    queue.remove(request)
    if not queue:
        del queues[request.room]
