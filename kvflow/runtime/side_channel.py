"""The ZeroMQ side channel: a ROUTER that answers requests and a DEALER that asks. The only module that imports zmq.

The listener trusts nothing: a message that is too large, has the wrong shape, does not decode or asks for what is
not there is counted and, where it can be answered, refused; it never stops the listener. A client uses one socket per
question, so that a late answer to an old question cannot be taken for a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio

from kvflow.config import Config, split_address
from kvflow.core import wire
from kvflow.errors import ConfigError, PeerRefused, PeerUnreachable, ProtocolError

logger = logging.getLogger(__name__)

_LISTEN_BACKLOG_MESSAGES = 1024
_HEADER_BYTES_MAX = 256

Answer = Callable[[wire.Header, wire.Request], wire.Reply]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerStatistics:
    """What the listener has seen. `refused` were answered with a reason, `dropped` could not be answered."""

    answered: int
    refused: int
    dropped: int


class Listener(Protocol):
    """A rank's side channel, bound; `port` is the real one."""

    @property
    def port(self) -> int: ...

    @property
    def statistics(self) -> ListenerStatistics: ...

    async def serve(self) -> None:
        """Answer until cancelled."""

    def close(self) -> None:
        """Stop listening at once. Closing twice is fine."""


class SideChannel(Protocol):
    """How the ranks of engines ask each other questions."""

    def listen(self, answer: Answer) -> Listener:
        """Bind this rank's address; ConfigError if that is not possible."""

    async def ask(self, address: str, request: wire.Request, *, fingerprint: bytes) -> wire.Reply:
        """Send one request and return its answer, a Refusal included.

        Raises PeerUnreachable if the port is refused or nobody answers within Config.handshake_timeout_s, ProtocolError
        if what answers is no kvflow. Cancelling gives the question up.
        """


class ZmqSideChannel:
    """See `SideChannel`."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def listen(self, answer: Answer) -> ZmqListener:
        config = self._config
        return ZmqListener(
            config.listen_host,
            config.listen_port,
            message_bytes_max=config.side_channel_message_bytes_max,
            answer=answer,
        )

    async def ask(self, address: str, request: wire.Request, *, fingerprint: bytes) -> wire.Reply:
        timeout_s = self._config.handshake_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await _probe(address)
                return await _exchange(address, request, fingerprint, self._config.side_channel_message_bytes_max)
        except TimeoutError:
            raise PeerUnreachable(f"{address}: no answer within {timeout_s} s", peer=address) from None


class ZmqListener:
    """See `Listener`."""

    def __init__(self, host: str, port: int, *, message_bytes_max: int, answer: Answer) -> None:
        self._answer = answer
        self._answered = 0
        self._refused = 0
        self._dropped = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
        self._socket.setsockopt(zmq.RCVHWM, _LISTEN_BACKLOG_MESSAGES)
        self._socket.setsockopt(zmq.SNDHWM, _LISTEN_BACKLOG_MESSAGES)
        self._socket.setsockopt(zmq.IPV6, int(host.startswith("[")))
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"listen: cannot bind tcp://{host}:{port}: {error}") from error
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.port = int(endpoint.decode().rstrip("\0").rpartition(":")[2])

    @property
    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(answered=self._answered, refused=self._refused, dropped=self._dropped)

    async def serve(self) -> None:
        """Answer requests one after the other; answering never waits, so a slow peer delays nobody."""
        while True:
            frames = await self._socket.recv_multipart()
            await self._handle(frames)

    def close(self) -> None:
        """Close the socket at once. Closing twice is fine."""
        self._socket.close(linger=0)
        self._context.term()

    async def _handle(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) > _HEADER_BYTES_MAX:
            self._drop(f"{len(frames)} frames")
            return
        sender, header_frame, body_frame = frames
        try:
            header = wire.decode_header(header_frame)
        except wire.WireError as error:
            self._drop(str(error))
            return
        reply = self._reply_to(header, body_frame)
        if isinstance(reply, wire.Refusal):
            self._refused += 1
            logger.info("refused a peer's request: %s", reply.reason)
        else:
            self._answered += 1
        try:
            await self._socket.send_multipart(
                [sender, *wire.encode_frames(wire.our_header(b""), reply)], flags=zmq.NOBLOCK
            )
        except zmq.Again:
            self._dropped += 1

    def _reply_to(self, header: wire.Header, body_frame: bytes) -> wire.Reply:
        if header.version != wire.PROTOCOL_VERSION:
            reason = f"kvflow protocol version: ours {wire.PROTOCOL_VERSION}, theirs {header.version}"
            return wire.Refusal(reason=reason, version=wire.PROTOCOL_VERSION)
        try:
            request = wire.decode_request(body_frame)
        except wire.WireError as error:
            return wire.Refusal(reason=str(error), version=wire.PROTOCOL_VERSION)
        return self._answer(header, request)

    def _drop(self, why: str) -> None:
        self._dropped += 1
        logger.info("dropped a message on the side channel: %s", why)


async def _probe(address: str) -> None:
    """Connect once by plain TCP: ZeroMQ itself would retry a refused port in silence until the timeout."""
    try:
        host, port = split_address(address, what="peer")
        _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, ValueError, ConfigError) as error:  # ValueError: a host that the resolver chokes on
        raise PeerUnreachable(f"{address}: {error}", peer=address) from error
    writer.close()


async def _exchange(address: str, request: wire.Request, fingerprint: bytes, message_bytes_max: int) -> wire.Reply:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.connect(address)
        await socket.send_multipart(wire.encode_frames(wire.our_header(fingerprint), request))
        frames = await socket.recv_multipart()
    try:
        header_frame, body_frame = frames
        header = wire.decode_header(header_frame)
        reply = wire.decode_reply(body_frame)
    except (ValueError, wire.WireError) as error:
        raise ProtocolError(f"{address}: the answer is no kvflow message: {error}", peer=address) from error
    if header.version != wire.PROTOCOL_VERSION and not isinstance(reply, wire.Refusal):
        raise PeerRefused(
            f"{address}: kvflow protocol version: ours {wire.PROTOCOL_VERSION}, theirs {header.version}", peer=address
        )
    return reply
