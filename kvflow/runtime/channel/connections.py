"""Connections to listeners. The first question to a listener opens a connection, which is kept for later questions.

Until its first question is answered, the first connection serves that question alone. If the answer carries the
question's number, the connection becomes shared: several questions may wait on it at the same time, and it is kept open
for `KEPT_IDLE_S` after the last answer. If all shared connections to a listener are full, another one is opened, which
is shared at once: the listener is known to number its answers. If a listener does not, every question has its own
connection.

After a question has timed out or was cancelled, its connection gets no new questions (`unanswered`), but questions that
already wait may still be answered. So a connection that died in silence costs one question, as without kept
connections.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvflow import forks
from kvflow.checks import INT64_MAX
from kvflow.core.protocol import codec
from kvflow.limits import Limits
from kvflow.runtime import open_files
from kvflow.runtime.channel.protocol import QUESTIONS_MAX

if TYPE_CHECKING:
    from kvflow.runtime.channel.keyring import KeyPair

ANSWER_BYTES_MAX = 4 << 20
"""Size in bytes of the largest answer with default limits: an offer of `limits.block_ids_max` blocks fits."""
_BLOCK_ID_BYTES = 8
KEPT_IDLE_S = 5.0
"""Seconds for which a connection without waiting questions is kept open."""
KEPT_MAX = 32
"""Maximum number of connections without waiting questions; each has four open files.

If there are more, the least recently used is closed.
"""
_RECEIVED_AT_ONCE = 2 * QUESTIONS_MAX
_MONITORED_EVENTS = (
    zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.DISCONNECTED
)

_MONITORS = itertools.count()
"""Counter for unique endpoint names of monitor sockets, since ZeroMQ frees the name of a closed socket late."""

Arrival: TypeAlias = "list[bytes] | zmq.Event"
"""Element of a question's queue: the frames of the answer, or a ZeroMQ monitor event of the connection.

Every event but CONNECT_RETRIED means that the connection has ended.
"""


@dataclass(frozen=True, slots=True)
class ListenerRoute:
    """How to connect to a peer's listener: its numeric endpoint and, with CURVE, its public key and our key pair."""

    endpoint: str
    server_key: bytes = b""
    own_keys: KeyPair | None = None


@dataclass(slots=True, eq=False)
class OpenQuestion:
    """A question that was sent: its number, and the queue that receives its answer or an event of its connection."""

    number: int
    arrivals: asyncio.Queue[Arrival] = field(default_factory=asyncio.Queue)
    answered: bool = False
    """True once an answer with this question's number was received."""


class KeptConnection:
    """Connection to one listener: a ZeroMQ DEALER socket, its monitor socket, and the questions that wait on it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        route: ListenerRoute,
        answer_bytes_max: int,
        on_end: Callable[[KeptConnection], None],
    ) -> None:
        """Create the sockets and begin to connect to `route`.

        If the connection ends other than by `close`, `on_end` is called with this object.
        """
        self.route = route
        self.waiting: dict[int, OpenQuestion] = {}
        self.unanswered = False
        """True once a question on this connection ended without an answer. New questions then use other connections."""
        self.closed = False
        self._answer_bytes_max = min(answer_bytes_max, INT64_MAX)
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._sent_count = 0
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        try:
            self._monitor = context.socket(zmq.PAIR)
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise
        try:
            self._set_up(route, self._answer_bytes_max)
        except BaseException:
            self._close_sockets()
            raise
        self._files = [int(socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)]
        for file, callback in zip(self._files, (self._receive_answers, self._receive_events), strict=True):
            self._loop.add_reader(file, callback)
        forks.register(self)
        self._loop.call_soon(self._receive_events)  # the loop may not notice messages that came before

    def ask(self, fingerprint: bytes, body: bytes) -> OpenQuestion:
        """Send a question with the encoded `body`, and return the `OpenQuestion`.

        `fingerprint`: hash of this rank's `Compatibility`. The answer, or the event that ends the connection, arrives
        in the queue `arrivals` of the `OpenQuestion`.
        """
        question = OpenQuestion(next(self._numbers))
        header = codec.encode(codec.our_header(fingerprint, question.number, self._answer_bytes_max))
        with suppress(zmq.Again):  # it has failed, and the monitor is about to say how
            self._socket.send_multipart([header, body], flags=zmq.NOBLOCK)
        self._sent_count += 1
        self.waiting[question.number] = question
        self._receive_answers()  # sending resets the file descriptor that says that messages have come
        return question

    def forked(self) -> None:
        """Called in a forked child: stop using the sockets, but do not close them: the parent process owns them."""
        self.closed = True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self._loop.is_closed():
            for file in self._files:
                self._loop.remove_reader(file)
        self._close_sockets()

    def _set_up(self, route: ListenerRoute, answer_bytes_max: int) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, 0),  # see `listening`
            (zmq.SNDHWM, 0),
            (zmq.MAXMSGSIZE, answer_bytes_max),
            (zmq.IPV6, int("[" in route.endpoint)),
        ):
            self._socket.setsockopt(option, value)
        if route.own_keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, route.server_key)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, route.own_keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, route.own_keys.secret)
        endpoint = f"inproc://failures-{next(_MONITORS)}"
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue would block ZeroMQ's thread, and then `close`
        self._socket.monitor(endpoint, _MONITORED_EVENTS)
        self._monitor.connect(endpoint)
        self._socket.connect(route.endpoint)

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()  # before the other socket closes, else ZeroMQ waits until it receives
        self._socket.close(linger=0)
        self._monitor.close(linger=0)

    def _receive_answers(self) -> None:
        """Receive all messages that ZeroMQ has ready, since ZeroMQ signals them only once.

        After `_RECEIVED_AT_ONCE` messages, go on in a later turn of the event loop.
        """
        for _ in range(_RECEIVED_AT_ONCE):
            frames = None if self.closed else _receive_message(self._socket)
            if frames is None:
                return
            self._on_message(frames)
        self._loop.call_soon(self._receive_answers)

    def _on_message(self, frames: list[bytes]) -> None:
        number = _number_of(frames)
        if number:
            question = self.waiting.get(number)
            if question is not None:  # else the question has ended
                question.answered = True
                question.arrivals.put_nowait(frames)
        elif self._sent_count > 1:
            self._end_with(zmq.Event.DISCONNECTED)  # unknown which question is answered: each is asked again alone
        else:
            self._put_to_all(frames)

    def _receive_events(self) -> None:
        while not self.closed and (frames := _receive_message(self._monitor)) is not None:
            event = zmq.Event(parse_monitor_message(frames)["event"])
            if event == zmq.Event.CONNECT_RETRIED:
                self._put_to_all(event)
            else:
                self._receive_answers()  # an answer and the end of the connection may come together
                self._end_with(event)

    def _end_with(self, event: zmq.Event) -> None:
        self.close()
        self._put_to_all(event)
        self._on_end(self)

    def _put_to_all(self, arrival: Arrival) -> None:
        for question in self.waiting.values():
            question.arrivals.put_nowait(arrival)


def answer_bytes_max(limits: Limits) -> int:
    """Return the size in bytes of the largest answer that a reader accepts and a listener sends under `limits`."""
    return ANSWER_BYTES_MAX + _BLOCK_ID_BYTES * max(limits.block_ids_max - Limits().block_ids_max, 0)


class Connections:
    """All connections over which this rank asks peers questions."""

    def __init__(self, limits: Limits) -> None:
        self._answer_bytes_max = answer_bytes_max(limits)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._open: set[KeptConnection] = set()
        self._shared: dict[ListenerRoute, dict[KeptConnection, None]] = {}
        """Connections that several questions may use at the same time, by listener, in the order they became shared.
        Each of these listeners is known to number its answers."""
        self._idle: OrderedDict[KeptConnection, float] = OrderedDict()
        """Kept connections without waiting questions, with the loop time when the last question ended, oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def find_shared(self, route: ListenerRoute) -> KeptConnection | None:
        """Return a shared connection to the listener of `route` with room for another question, or None."""
        for connection in self._shared.get(route, ()):
            if len(connection.waiting) < QUESTIONS_MAX:
                return connection
        return None

    def open(self, route: ListenerRoute) -> KeptConnection:
        """Open a new connection to `route`.

        OSError if this process can open too few further files, ZMQError if ZeroMQ cannot create the sockets.
        """
        if why := open_files.asking_shortage(first=self._context is None):
            raise OSError(errno.EMFILE, why)
        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        try:
            connection = KeptConnection(self._context, route, self._answer_bytes_max, self._forget)
        except BaseException:
            self._end_context_if_done()
            raise
        self._open.add(connection)
        if (shared := self._shared.get(route)) is not None:  # else hundreds of questions at once open as many
            shared[connection] = None
        return connection

    @contextmanager
    def open_question(self, connection: KeptConnection, fingerprint: bytes, body: bytes) -> Iterator[OpenQuestion]:
        """Context manager: send a question with `body` over `connection`, and yield the `OpenQuestion`.

        At the end of the `with` body the question no longer waits. Then the connection is closed, or kept for later
        questions.
        """
        self._idle.pop(connection, None)
        question = None
        try:
            question = connection.ask(fingerprint, body)
            yield question
        finally:
            if question is not None:
                del connection.waiting[question.number]
            self._after_question(connection, answered=question is not None and question.answered)

    def close(self) -> None:
        """Close idle connections now, and every other connection when the last question on it ends."""
        self._closed = True
        for connection in list(self._idle):
            self._drop(connection)
        self._end_context_if_done()

    def abandon(self) -> None:
        """Close all connections. For use after the event loop has ended."""
        self._closed = True
        for connection in list(self._open):
            connection.close()
            self._forget(connection)

    def _after_question(self, connection: KeptConnection, *, answered: bool) -> None:
        """Decide, after a question on `connection` has ended, whether later questions may use the connection.

        `answered`: the question got an answer with its number. If not, no later question may use the connection. Once
        no question waits on the connection, close it, or keep it for `KEPT_IDLE_S` if later questions may use it.
        """
        route = connection.route
        if not answered:
            connection.unanswered = True
        if connection.unanswered or connection.closed:
            self._unshare(connection)
        elif not self._closed and self.find_shared(route) is None:
            self._shared.setdefault(route, {})[connection] = None
        if connection.waiting:
            return
        if self._closed or connection not in self._shared.get(route, ()):
            self._drop(connection)
            return
        self._idle[connection] = asyncio.get_running_loop().time()
        if len(self._idle) > KEPT_MAX:
            self._drop(next(iter(self._idle)))
        self._set_timer()

    def _drop(self, connection: KeptConnection) -> None:
        connection.close()
        self._forget(connection)

    def _forget(self, connection: KeptConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._unshare(connection)
        self._end_context_if_done()

    def _unshare(self, connection: KeptConnection) -> None:
        shared = self._shared.get(connection.route, {})
        shared.pop(connection, None)
        if not shared:
            self._shared.pop(connection.route, None)

    def _end_context_if_done(self) -> None:
        """If `close` was called and no connection is open, end the ZeroMQ context, and its threads."""
        if not self._closed or self._open:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        context, self._context = self._context, None
        if context is not None:
            context.term()

    def _set_timer(self) -> None:
        if self._timer is None and self._idle:
            since_s = next(iter(self._idle.values()))
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(since_s + KEPT_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connections that have had no waiting question for `KEPT_IDLE_S`. Called by a timer."""
        self._timer = None
        over_s = asyncio.get_running_loop().time() - KEPT_IDLE_S
        for connection, since_s in list(self._idle.items()):
            if since_s > over_s:
                break
            self._drop(connection)
        self._set_timer()


def _receive_message(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Return the frames of the next message from `socket`, or None if ZeroMQ has no message ready."""
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None


def _number_of(frames: Sequence[bytes]) -> int:
    """Return the number of the question that the answer `frames` answers, or 0 if the answer carries no number."""
    try:
        return codec.decode_header(frames[0]).question
    except codec.WireError:
        return 0
