"""The listening end of the side channel: a ROUTER that answers requests, and what protects it.

It trusts nothing. A message that is too large, has the wrong shape, comes too often or does not decode is counted and,
where it can be answered, refused; it never stops the listener, and between two messages the loop has its turn. Limits
are per peer: the engine whose key it is with CURVE, else the address it comes from.

With CURVE only engines of the allowlist get as far as a message, and a request must be of the engine whose key it came
under. ZeroMQ asks about keys by a protocol of its own (ZAP); that is answered here rather than by pyzmq's
authenticator, whose task nobody supervises.

The queue of messages that have come has no limit, and heartbeats are off: ZeroMQ (4.3.5) stops reading from a
connection whose queue is full, and if the peer then resets it, a ping that was still unread aborts the process. Memory
can be filled by a message without end too, so a flood of bytes is for CURVE, or the network, to keep out.

Readers connect for a question, and keep the connection for a while for the next. ZeroMQ has no limit for connections:
when there are too many, all are dropped, and the port is bound again at once; readers ask again. The same is done when
few open files are left. Where none is left ZeroMQ spins, as long as somebody wants to connect; then the port is bound
again only once there are some.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvflow import forks
from kvflow.checks import counted
from kvflow.config import Config
from kvflow.core.policy.rate_limit import RateLimiter
from kvflow.core.protocol import codec, messages
from kvflow.errors import ConfigError
from kvflow.hosts import ANY, ANY_V6, address_at, is_v6
from kvflow.logs import logger_of
from kvflow.runtime import open_files
from kvflow.runtime.channel.connections import answer_bytes_max
from kvflow.runtime.channel.protocol import QUESTIONS_MAX, Answer, Answered, AnswerStranger, ListenerStatistics, refusal

if TYPE_CHECKING:
    from kvflow.runtime.channel.keyring import Keyring

logger = logger_of(__name__)

# Of one connection. ZeroMQ hears of those that have left when half as many have, and drops an answer before it does: so
# no more than half of them may wait.
REQUEST_BYTES_MAX = 64 << 10
_ANSWERS_WAITING_MAX = 2 * QUESTIONS_MAX
_HEADER_BYTES_MAX = 256
_RATED_PEERS_MAX = 1 << 10
_LOG_LINES_PER_S = 10
_C_INT_MAX = (1 << 31) - 1
_KEY_PROPERTY = "User-Id"  # what `_check_keys` says: the key, in hexadecimal
_ZAP = "inproc://zeromq.zap.01"
_MONITOR = "inproc://kvflow-connections"
_LOOK_S = 1.0  # nobody tells that files are used up
_FEW_CONNECTIONS = 4  # dropping these would give back too little
_REJECTIONS: dict[int, str] = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "its CURVE key is in no file of curve_peers_dir",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it speaks no ZeroMQ, or only one side uses CURVE, or it expects another key",
}
_WATCHED = sum(_REJECTIONS, zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED)


class ZmqListener:
    """See `Listener`."""

    def __init__(
        self,
        config: Config,
        host: str,
        keyring: Keyring | None,
        answer: Answer,
        now_s: Callable[[], float],
        kinds: Any,
    ) -> None:
        self._config = config
        self._host = host
        self._keyring = keyring
        self._answer = answer
        self._kinds = kinds
        self._now_s = now_s
        per_s = config.limits.side_channel_requests_per_s_max
        self._answer_bytes_max = answer_bytes_max(config.limits)
        self._rates = RateLimiter(requests_per_s=per_s, peers_max=_RATED_PEERS_MAX)
        self._log_lines = RateLimiter(requests_per_s=_LOG_LINES_PER_S, peers_max=1)
        self._counts = dict.fromkeys(("answered", "refused", "dropped", "over_rate", "rejected", "recycled"), 0)
        self._connections = 0
        self._dropping = ""
        """Why all connections are being dropped; "" while they are not."""
        self._bound = True
        self._inherited = False
        """True in a forked child."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor = self._context.socket(zmq.PAIR)
        self._zap = self._context.socket(zmq.REP)
        try:
            self._endpoint = self._bind()
        except zmq.ZMQError as error:
            self.close()
            address = address_at(config.listen_host, config.listen_port)
            raise ConfigError(f"listen: cannot bind {address}: {error}") from error
        self.port = int(self._endpoint.rpartition(":")[2])
        forks.watch(self)
        self.strangers: AnswerStranger | None = None

    @property
    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(connections=self._connections, **self._counts)

    def forked(self) -> None:
        """See `forks`: neither receive nor close."""
        self._inherited = True
        for socket in (self._monitor, self._zap, self._socket):
            forks.silence(socket)

    async def serve(self) -> None:
        """Answer requests one after the other; answering never waits, so a slow peer delays nobody.

        A reply that takes long is promised, and sent when it is there.

        Task `kvflow-listener`: from opening to closing the runtime, with a task each for `-requests`,
        `-connections`, `-files` and, with CURVE, `-keys`. If one of them dies the runtime breaks.
        """
        if self._inherited:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve_requests(), name="kvflow-listener-requests")
                group.create_task(self._watch_connections(), name="kvflow-listener-connections")
                group.create_task(self._watch_files(), name="kvflow-listener-files")
                if self._keyring is not None:
                    group.create_task(self._check_keys(self._keyring), name="kvflow-listener-keys")
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from problems

    def close(self) -> None:
        """Close the sockets at once. Closing twice is fine."""
        if self._inherited:
            return
        for socket in (self._monitor, self._zap, self._socket):
            socket.close(linger=0)
        self._context.term()

    def _bind(self) -> str:
        """Set the sockets up; returns the address with the real port."""
        config, socket, host = self._config, self._socket, self._host
        everywhere = host in (ANY, ANY_V6)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, REQUEST_BYTES_MAX),
            (zmq.RCVHWM, 0),
            (zmq.SNDHWM, _ANSWERS_WAITING_MAX),
            (zmq.ROUTER_MANDATORY, 1),  # say so when an answer is dropped
            (zmq.IPV6, int(everywhere or is_v6(host))),
            (zmq.HANDSHAKE_IVL, min(max(int(config.handshake_timeout_s * 1000), 1), _C_INT_MAX)),
        ):
            socket.setsockopt(option, value)
        if self._keyring is not None:
            self._zap.bind(_ZAP)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keyring.own.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"kvflow")
        socket.monitor(_MONITOR, _WATCHED)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would block ZeroMQ's thread, and closing with it
        self._monitor.connect(_MONITOR)
        # ZeroMQ's own wildcard listens to both versions, and to version 4 alone where the host has no other.
        socket.bind(address_at(ANY if everywhere else host, config.listen_port or "*"))
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode().rstrip("\0")

    async def _serve_requests(self) -> None:
        while not self._inherited:
            frames = await self._socket.recv_multipart(copy=False)
            await self._handle(frames)
            await asyncio.sleep(0)  # neither receiving nor sending gives way while more messages are there

    async def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        peer = _property(frames[-1], "Peer-Address" if self._keyring is None else _KEY_PROPERTY)
        if peer is None:
            self._drop("it says not whom it is from")
            return
        if not self._rates.allows(peer, self._now_s()):
            self._counts["over_rate"] += 1
            return
        if len(frames) != 3 or len(frames[1]) > _HEADER_BYTES_MAX:
            self._drop(f"{counted(len(frames), 'frame')}")
            return
        if self.strangers is not None and len(frames[1]) == 0:  # a REQ socket's delimiter; our header is never empty
            self._answer_stranger(self.strangers, frames[0].bytes, frames[2].bytes)
            return
        engine = None
        if self._keyring is not None:
            engine = await self._keyring.engine_of(bytes.fromhex(peer))
        sender, header_frame, body_frame = (frame.bytes for frame in frames)
        try:
            header = codec.decode_header(header_frame)
        except codec.WireError as error:
            self._drop(str(error))
            return
        if self._keyring is not None and engine is None:  # readers keep connections, so silence would be no answer
            reply: Answered = refusal("your CURVE key has left our curve_peers_dir")
        else:
            reply = self._reply_to(header, body_frame, engine)
        if isinstance(reply, asyncio.Future):
            reply.add_done_callback(partial(self._send_late, sender, header))
        else:
            self._send(sender, header, reply)

    def _send_late(self, sender: bytes, asked: codec.Header, reply: asyncio.Future[messages.Reply]) -> None:
        """Send a reply that was promised."""
        if not reply.cancelled() and not self._socket.closed:
            self._send(sender, asked, reply.result())

    def _send(self, sender: bytes, asked: codec.Header, reply: messages.Reply) -> None:
        """Send a reply, or drop it if its connection takes no more."""
        outcome = "answered"
        if isinstance(reply, messages.Refusal):
            outcome = "refused"
            self._log(logging.INFO, f"refused a peer's request: {reply.reason}")
        header = codec.our_header(b"", asked.question)
        frames = codec.encode_frames(header, reply)
        most = asked.answer_bytes_max or self._answer_bytes_max  # a reader that gets more closes the connection
        if (size := sum(map(len, frames))) > most:
            outcome, why = "refused", f"its answer takes {counted(size, 'byte')}, the reader takes at most {most}"
            self._log(logging.WARNING, f"refused a peer's request: {why} (its limits.block_ids_max raises that)")
            frames = codec.encode_frames(header, _too_large(reply, why))
        self._post([sender, *frames], outcome)

    def _answer_stranger(self, answer: AnswerStranger, sender: bytes, question: bytes) -> None:
        """Answer a reader of another make as it expects it, or not at all: another answer may make it exit."""
        frames = answer(question)
        if frames is None:
            self._drop("a question of another make that has no answer")
            return
        self._post([sender, b"", *frames], "answered")

    def _post(self, frames: list[bytes], outcome: str) -> None:
        """Send an answer, and count it as that; as dropped if its connection takes no more."""
        sent = self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future), "and it is done: nothing waits to be sent"
        problem = sent.exception()
        if isinstance(problem, zmq.Again):
            self._drop("an answer to a reader that takes none")
            return
        gone = isinstance(problem, zmq.ZMQError) and problem.errno == zmq.EHOSTUNREACH
        if problem is not None and not gone:
            raise problem
        self._counts[outcome] += 1

    def _reply_to(self, header: codec.Header, body_frame: bytes, engine: str | None) -> Answered:
        try:
            if header.version != codec.PROTOCOL_VERSION:
                ours = codec.PROTOCOL_VERSION
                raise codec.WireError(f"kvflow protocol version: ours {ours}, theirs {header.version}")
            request = codec.decode_request(body_frame, self._kinds)
            claimed = messages.asked_by(request)
            if engine not in (None, claimed):
                whose = f"the request is in the name of {claimed[:300]!r}, its key belongs to {engine!r}"
                raise codec.WireError(whose)
        except codec.WireError as error:
            return refusal(str(error))
        return self._answer(header, request)

    def _drop(self, why: str) -> None:
        self._counts["dropped"] += 1
        self._log(logging.INFO, f"dropped a message on the side channel: {why}")

    def _log(self, level: int, text: str) -> None:
        """Log what a peer caused: a few lines a second, however many it causes."""
        if self._log_lines.allows("", self._now_s()):
            logger.log(level, "%s", text)

    async def _check_keys(self, keyring: Keyring) -> None:
        """Tell ZeroMQ whether the owner of a key may connect."""
        while not self._inherited:
            _, request_id, *_, key = await self._zap.recv_multipart()
            known = await keyring.engine_of(key) is not None
            verdict = (b"200", b"OK", key.hex().encode()) if known else (b"400", b"unknown key", b"")
            await self._zap.send_multipart([b"1.0", request_id, *verdict, b""])
            await asyncio.sleep(0)

    async def _watch_connections(self) -> None:
        """Count connections, and drop all when there are too many: those that wait for an answer ask again."""
        while not self._inherited:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            match event:
                case zmq.Event.ACCEPTED:
                    self._connections += 1
                    self._drop_too_many()
                case zmq.Event.DISCONNECTED:
                    self._connections = max(self._connections - 1, 0)  # may be one of those that were dropped
                case zmq.Event.CLOSED:
                    told = (self._endpoint, self._connections, self._dropping)
                    logger.warning("side channel at %s: dropped all %s connections: %s", *told)
                    self._counts["recycled"] += 1
                    self._connections, self._bound = 0, False
                    self._bind_again()
                case _:
                    self._counts["rejected"] += 1
                    self._log(logging.WARNING, f"rejected a connection: {_REJECTIONS[event]}")
            await asyncio.sleep(0)

    async def _watch_files(self) -> None:
        """Notice that open files are used up, also while no connection can be accepted that would tell."""
        while not self._inherited:
            await asyncio.sleep(_LOOK_S)
            if self._bound:
                self._drop_too_many()
            else:
                self._bind_again()

    def _drop_too_many(self) -> None:
        """Begin to drop all connections if there are too many."""
        if not self._dropping and (why := self._too_many()):
            self._dropping = why
            self._socket.unbind(self._endpoint)

    def _too_many(self) -> str:
        """Return why all connections have to be dropped, or ""."""
        if self._connections > self._config.limits.side_channel_connections_max:
            return "too many at once"
        if self._connections > _FEW_CONNECTIONS:
            return open_files.shortage(open_files.SIDE_CHANNEL_STOPS_AT)
        return open_files.shortage(1)

    def _bind_again(self) -> None:
        """Bind the port once more, if there are files for it."""
        if open_files.shortage(open_files.SIDE_CHANNEL_STOPS_AT):
            return
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return
        self._dropping, self._bound = "", True


def _property(frame: zmq.Frame, name: str) -> str | None:
    """Properties of a frame's connection in ZeroMQ; None with peers that speak one of its first protocols."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return None


def _too_large(reply: messages.Reply, why: str) -> messages.Reply:
    """Return what is answered in place of a reply that is larger than readers take."""
    if isinstance(reply, messages.LeaseAnswer) and reply.offer is not None:
        given = counted(sum(map(len, reply.offer.block_ids)), "block id")
        reason = f"too much for an answer: {given}: {why} (limits.block_ids_max)"
        return messages.LeaseAnswer(state=messages.Told.FAILED, reason=reason)
    return refusal(why)
