"""The listening end of the side channel: a ROUTER socket that answers requests, and its protection against bad peers.

Nothing from outside is trusted. A message that is too large, malformed or too frequent is counted and, if possible,
refused. No message stops the listener, and the loop runs other tasks between two messages. Rates are limited per peer:
per engine key with CURVE, else per address.

With CURVE only engines of the allowlist can send messages, and a request must name the engine that owns the key of its
connection. Over a protocol of its own (ZAP), ZeroMQ asks which keys to accept. This module answers, since no supervisor
watches the task of pyzmq's authenticator.

The receive queue has no limit, and heartbeats are off: ZeroMQ 4.3.5 has aborted the process with other settings. So the
listener bounds rates, not memory, and CURVE or the network must keep out a flood of bytes.

Readers keep a connection for a while, and ZeroMQ cannot limit the number of connections. If there are too many, or this
process has few open files left, all connections are dropped and the port is bound again; readers then repeat their
questions. If no file is left, the port stays unbound until files are free; ZeroMQ 4.3.5 has kept a core busy there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvflow import forks
from kvflow.checks import counted, try_call
from kvflow.config import Config
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.policy.rate_limit import RateLimiter
from kvflow.core.protocol import codec, messages
from kvflow.errors import ConfigError
from kvflow.hosts import ANY, ANY_V6, address_at, is_v6
from kvflow.logs import logger_of
from kvflow.runtime import open_files
from kvflow.runtime.channel.connections import answer_bytes_max
from kvflow.runtime.channel.protocol import QUESTIONS_MAX, Answer, AnswerBare, Answered, ListenerStatistics, refusal

if TYPE_CHECKING:
    from kvflow.runtime.channel.keyring import Keyring

logger = logger_of(__name__)

# Limits of one connection. ZeroMQ frees room in the queue of answers only after half of the queue has been sent, and
# drops answers that find no room. So at most half of the queue is used: QUESTIONS_MAX answers.
REQUEST_BYTES_MAX = 64 << 10
_ANSWERS_WAITING_MAX = 2 * QUESTIONS_MAX
_HEADER_BYTES_MAX = 256
_RATED_PEERS_MAX = 1 << 10
_BUSY_PER_REQUEST = 10  # of each request that may be answered: so many more are answered "busy", which costs less
_LOG_LINES_PER_S = 10
_C_INT_MAX = (1 << 31) - 1
_KEY_PROPERTY = "User-Id"  # set by `_answer_key_requests`: the key in hexadecimal
_ZAP = "inproc://zeromq.zap.01"
_MONITOR = "inproc://kvflow-connections"
_FILES_CHECK_S = 1.0  # no event says that open files are used up
_DROP_ABOVE_CONNECTIONS = 4  # dropping so few would free too few files
_REJECTIONS: dict[int, str] = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "its CURVE key is in no file of curve_peers_dir",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it does not use ZeroMQ, only one side uses CURVE, or it expects another key",
}
_MONITORED_EVENTS = sum(_REJECTIONS, zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED)


class ZmqListener:
    """A `Listener` over ZeroMQ."""

    def __init__(
        self,
        config: Config,
        host: str,
        keyring: Keyring | None,
        answer: Answer,
        now_s: Callable[[], float],
        requests: codec.RequestDecoder,
    ) -> None:
        self._config = config
        self._host = host
        self._keyring = keyring
        self._answer = answer
        self._requests = requests
        self._now_s = now_s
        per_s = config.limits.side_channel_requests_per_s_max
        self._answer_bytes_max = answer_bytes_max(config.limits)
        self._requests_per_s = per_s
        self._rates = RateLimiter(requests_per_s=per_s, peers_max=_RATED_PEERS_MAX)
        self._busy = RateLimiter(requests_per_s=_BUSY_PER_REQUEST * per_s, peers_max=_RATED_PEERS_MAX)
        self._warned_peers: BoundedMap[str, None] = BoundedMap(_RATED_PEERS_MAX)
        self._log_lines = RateLimiter(requests_per_s=_LOG_LINES_PER_S, peers_max=1)
        self._counts = dict.fromkeys(("answered", "refused", "dropped", "over_rate", "rejected", "recycled"), 0)
        self._connections = 0
        self._drop_reason = ""
        """Reason why all connections were dropped, while the port is unbound; "" while it is bound."""
        self._bound = True
        self._in_forked_child = False
        """True in a forked child, where the sockets belong to the parent process."""
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
        forks.register(self)
        self.answer_bare: AnswerBare | None = None

    @property
    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(connections=self._connections, **self._counts)

    def forked(self) -> None:
        """Called in a forked child: stop receiving, and never close the sockets, since the parent process owns them."""
        self._in_forked_child = True
        for socket in (self._monitor, self._zap, self._socket):
            forks.ignore_events(socket)

    async def serve(self) -> None:
        """Answer requests one after another, until cancelled. Sending never waits, so a slow peer delays no other peer.

        If an answer is a future, answer other requests until it is done, then send its result.

        Task `kvflow-listener`: runs from the opening to the closing of the runtime. It starts the tasks
        `kvflow-listener-requests`, `-connections`, `-files` and, if CURVE is used, `-keys`. If any of these tasks dies,
        the runtime breaks.
        """
        if self._in_forked_child:
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve_requests(), name="kvflow-listener-requests")
                group.create_task(self._watch_connections(), name="kvflow-listener-connections")
                group.create_task(self._watch_files(), name="kvflow-listener-files")
                if self._keyring is not None:
                    group.create_task(self._answer_key_requests(self._keyring), name="kvflow-listener-keys")
        except ExceptionGroup as problems:
            raise problems.exceptions[0] from problems

    def close(self) -> None:
        if self._in_forked_child:
            return
        for socket in (self._monitor, self._zap, self._socket):
            socket.close(linger=0)
        self._context.term()

    def _bind(self) -> str:
        """Set the options of the sockets and bind the port. Return the endpoint, which has the actual port number."""
        config, socket, host = self._config, self._socket, self._host
        everywhere = host in (ANY, ANY_V6)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, REQUEST_BYTES_MAX),
            (zmq.RCVHWM, 0),
            (zmq.SNDHWM, _ANSWERS_WAITING_MAX),
            (zmq.ROUTER_MANDATORY, 1),  # raise if an answer is dropped
            (zmq.IPV6, int(everywhere or is_v6(host))),
            (zmq.HANDSHAKE_IVL, min(max(int(config.handshake_timeout_s * 1000), 1), _C_INT_MAX)),
        ):
            socket.setsockopt(option, value)
        if self._keyring is not None:
            self._zap.bind(_ZAP)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keyring.own_keys.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"kvflow")
        socket.monitor(_MONITOR, _MONITORED_EVENTS)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue would block ZeroMQ's thread, and then `close`
        self._monitor.connect(_MONITOR)
        # The wildcard of ZeroMQ listens to both IP versions, or to IPv4 alone if the host has no IPv6.
        socket.bind(address_at(ANY if everywhere else host, config.listen_port or "*"))
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode().rstrip("\0")

    async def _serve_requests(self) -> None:
        while not self._in_forked_child:
            frames = await self._socket.recv_multipart(copy=False)
            await self._handle(frames)
            await asyncio.sleep(0)  # neither receiving nor sending yields while messages wait

    async def _handle(self, frames: Sequence[zmq.Frame]) -> None:
        peer = _property(frames[-1], "Peer-Address" if self._keyring is None else _KEY_PROPERTY)
        if peer is None:
            self._count_dropped("its connection names no peer: the ZeroMQ of the peer is too old")
            return
        if not self._rates.allows(peer, self._now_s()):
            self._answer_busy(peer, frames)
            return
        if len(frames) != 3 or len(frames[1]) > _HEADER_BYTES_MAX:
            self._count_dropped(f"expected 3 frames with a short header, got {counted(len(frames), 'frame')}")
            return
        if self.answer_bare is not None and len(frames[1]) == 0:  # a REQ socket's delimiter; our header is never empty
            self._answer_bare(self.answer_bare, frames[0].bytes, frames[2].bytes)
            return
        engine = None
        if self._keyring is not None:
            engine = await self._keyring.engine_of(bytes.fromhex(peer))
        sender, header_frame, body_frame = (frame.bytes for frame in frames)
        try:
            header = codec.decode_header(header_frame)
        except codec.WireError as error:
            self._count_dropped(str(error))
            return
        if self._keyring is not None and engine is None:  # kept connections outlive their keys
            reply: Answered = refusal("your CURVE key is no longer in our curve_peers_dir")
        else:
            reply = self._reply_to(header, body_frame, engine)
        if asyncio.isfuture(reply):  # a library may have put another class in the place of `asyncio.Future`
            reply.add_done_callback(partial(self._send_when_done, sender, header))
        else:
            self._send(sender, header, reply)

    def _answer_busy(self, peer: str, frames: Sequence[zmq.Frame]) -> None:
        """Count a message of `peer` above the rate. If it is a question, tell the reader when to ask again.

        Answers of one burst name one time after the other, at the rate. No answer if `peer` asks even more often.
        """
        if peer not in self._warned_peers:
            self._warned_peers[peer] = None
            logger.warning(
                "side channel at %s: more than %s a second from %s; readers ask again later "
                "(limits.side_channel_requests_per_s_max)",
                *(self._endpoint, counted(self._requests_per_s, "request"), peer),
            )
        waiting = self._busy.take(peer, self._now_s())
        header = None
        if waiting is not None and len(frames) == 3 and len(frames[1]) <= _HEADER_BYTES_MAX:
            header = try_call(partial(codec.decode_header, frames[1].bytes))
        if waiting is None or header is None:
            self._counts["over_rate"] += 1
            return
        reply = refusal(
            f"more than {self._requests_per_s} a second are asked (limits.side_channel_requests_per_s_max)",
            transient=True,
            retry_after_s=waiting / self._requests_per_s,
        )
        answer = codec.encode_frames(codec.our_header(b"", header.question), reply)
        self._send_frames([frames[0].bytes, *answer], "over_rate")

    def _send_when_done(self, sender: bytes, asked: codec.Header, reply: asyncio.Future[messages.Reply]) -> None:
        """Callback of `reply`: send the result to `sender`, unless the future was cancelled or the socket is closed.

        `asked`: header of the request.
        """
        if not reply.cancelled() and not self._socket.closed:
            self._send(sender, asked, reply.result())

    def _send(self, sender: bytes, asked: codec.Header, reply: messages.Reply) -> None:
        """Send `reply` to `sender`. `asked`: header of the request.

        If the reply is larger than the reader accepts, send a smaller one (`_reply_instead`). If the queue of replies
        to the reader is full, drop the reply.
        """
        outcome = "answered"
        if isinstance(reply, messages.Refusal):
            outcome = "refused"
            self._log_limited(logging.INFO, f"refused a peer's request: {reply.reason}")
        header = codec.our_header(b"", asked.question)
        frames = codec.encode_frames(header, reply)
        most = asked.answer_bytes_max or self._answer_bytes_max  # a reader closes the connection on a larger answer
        if (size := sum(map(len, frames))) > most:
            outcome, why = "refused", f"the answer has {counted(size, 'byte')}, the reader accepts at most {most}"
            self._log_limited(
                logging.WARNING, f"refused a peer's request: {why}; raise limits.block_ids_max of the reader"
            )
            frames = codec.encode_frames(header, _reply_instead(reply, why))
        self._send_frames([sender, *frames], outcome)

    def _answer_bare(self, answer: AnswerBare, sender: bytes, question: bytes) -> None:
        """Answer `question`, which has no header of kvflow, with the frames that `answer` returns.

        If `answer` returns None, send nothing: such a reader does not understand kvflow's replies.
        """
        frames = answer(question)
        if frames is None:
            self._count_dropped("no answer for a question without kvflow's header, such as of vLLM's NixlConnector")
            return
        self._send_frames([sender, b"", *frames], "answered")

    def _send_frames(self, frames: list[bytes], outcome: str) -> None:
        """Send the frames of an answer, and increment the counter that `outcome` names, such as "answered".

        If the queue of answers to the reader is full, drop the answer, and increment the counter "dropped" instead.
        """
        sent = self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        assert asyncio.isfuture(sent), "and it is done: nothing waits to be sent"
        problem = sent.exception()
        if isinstance(problem, zmq.Again):
            self._count_dropped("an answer to a reader that does not receive")
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
            request = codec.decode_request(body_frame, self._requests)
            claimed = messages.claimed_engine_id(request)
            if engine not in (None, claimed):
                why = f"the request names engine {claimed[:300]!r}, its CURVE key belongs to {engine!r}"
                raise codec.WireError(why)
        except codec.WireError as error:
            return refusal(str(error))
        return self._answer(header, request)

    def _count_dropped(self, why: str) -> None:
        self._counts["dropped"] += 1
        self._log_limited(logging.INFO, f"dropped a message on the side channel: {why}")

    def _log_limited(self, level: int, text: str) -> None:
        """Log `text` about an event that a peer caused, at most `_LOG_LINES_PER_S` lines a second for all peers."""
        if self._log_lines.allows("", self._now_s()):
            logger.log(level, "%s", text)

    async def _answer_key_requests(self, keyring: Keyring) -> None:
        """Answer ZeroMQ's ZAP requests. Each asks whether the CURVE key of a new client is in the allowlist."""
        while not self._in_forked_child:
            _, request_id, *_, key = await self._zap.recv_multipart()
            known = await keyring.engine_of(key) is not None
            verdict = (b"200", b"OK", key.hex().encode()) if known else (b"400", b"unknown key", b"")
            await self._zap.send_multipart([b"1.0", request_id, *verdict, b""])
            await asyncio.sleep(0)

    async def _watch_connections(self) -> None:
        """Follow ZeroMQ's monitor events: count open connections, and drop all if there are too many."""
        while not self._in_forked_child:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            match event:
                case zmq.Event.ACCEPTED:
                    self._connections += 1
                    self._drop_all_if_needed()
                case zmq.Event.DISCONNECTED:
                    self._connections = max(self._connections - 1, 0)  # it may be a connection that was dropped
                case zmq.Event.CLOSED:
                    values = (self._endpoint, self._connections, self._drop_reason)
                    logger.warning("side channel at %s: dropped all %s connections: %s", *values)
                    self._counts["recycled"] += 1
                    self._connections, self._bound = 0, False
                    self._bind_again()
                case _:
                    self._counts["rejected"] += 1
                    self._log_limited(logging.WARNING, f"rejected a connection: {_REJECTIONS[event]}")
            await asyncio.sleep(0)

    async def _watch_files(self) -> None:
        """Check every second how many more files this process may open.

        If few are left, drop all connections by unbinding the port; once enough are free, bind it again. This needs a
        timer: without a free file ZeroMQ accepts no connection, and reports nothing.
        """
        while not self._in_forked_child:
            await asyncio.sleep(_FILES_CHECK_S)
            if self._bound:
                self._drop_all_if_needed()
            else:
                self._bind_again()

    def _drop_all_if_needed(self) -> None:
        """If there are too many connections, or too few further files can be opened, drop all: unbind the port."""
        if not self._drop_reason and (why := self._why_drop_all()):
            self._drop_reason = why
            self._socket.unbind(self._endpoint)

    def _why_drop_all(self) -> str:
        """Return the reason why all connections must be dropped now, or "" if they may stay."""
        if self._connections > self._config.limits.side_channel_connections_max:
            return "too many at once"
        if self._connections > _DROP_ABOVE_CONNECTIONS:
            return open_files.shortage(open_files.SIDE_CHANNEL_STOPS_AT)
        return open_files.shortage(1)

    def _bind_again(self) -> None:
        """Bind the port again, if this process can open enough further files; otherwise change nothing."""
        if open_files.shortage(open_files.SIDE_CHANNEL_STOPS_AT):
            return
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return
        self._drop_reason, self._bound = "", True


def _property(frame: zmq.Frame, name: str) -> str | None:
    """Return the ZeroMQ metadata property `name` of the connection that sent `frame`.

    None if the peer's ZeroMQ is too old to have it.
    """
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return None


def _reply_instead(reply: messages.Reply, why: str) -> messages.Reply:
    """Return a small reply with the reason `why`, to send instead of `reply`, which is larger than the reader accepts.

    If `reply` has an offer, the small reply is a `LeaseAnswer` with the state FAILED, otherwise a `Refusal`.
    """
    if isinstance(reply, messages.LeaseAnswer) and reply.offer is not None:
        block_ids = counted(sum(map(len, reply.offer.block_ids)), "block id")
        reason = f"the answer is too large: {block_ids}: {why} (limits.block_ids_max)"
        return messages.LeaseAnswer(state=messages.LeaseAnswerState.FAILED, reason=reason)
    return refusal(why)
