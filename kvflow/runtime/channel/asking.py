"""The side channel over ZeroMQ: the end that asks is a DEALER, one per question; the other is `zmq_listener`.

A socket of its own for each question means that a late answer to an old question cannot be taken for a new one. ZeroMQ
itself would try a connection that fails again and again, in silence; its monitor says so, and the question ends. Names
of hosts are looked up before (`lookups`), since ZeroMQ's thread, which all questions share, would stand still for that.

With CURVE the engine that is asked must own the key that our allowlist has under its name, and it must have ours.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvflow.config import Config, split_address
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import failure
from kvflow.errors import ConfigError, PeerError, PeerRefused, PeerUnreachable, ProtocolError
from kvflow.runtime.channel.keyring import Keyring
from kvflow.runtime.channel.listening import ZmqListener
from kvflow.runtime.channel.lookups import Lookups
from kvflow.runtime.channel.protocol import Answer
from kvflow.runtime.clock import SystemClock

_FAILURES = (
    zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.DISCONNECTED
)


class ZmqSideChannel:
    """See `SideChannel`."""

    def __init__(self, config: Config, now_s: Callable[[], float] = SystemClock.now_s) -> None:
        self._config = config
        self._now_s = now_s
        self._keyring: Keyring | None = None
        self._context: zmq.asyncio.Context | None = None
        self._lookups = Lookups()
        self._questions = itertools.count(1)
        self._asking = 0
        self._sockets: dict[zmq.asyncio.Socket, zmq.asyncio.Socket] = {}
        """Of questions under way, each with its monitor."""
        self._closed = False

    async def listen(self, answer: Answer) -> ZmqListener:
        return ZmqListener(self._config, await self._keys(), answer, self._now_s)

    async def ask(self, address: str, request: messages.Request, *, fingerprint: bytes) -> messages.Reply:
        timeout_s, target = self._config.handshake_timeout_s, request.target
        frames = messages.encode_frames(messages.our_header(fingerprint), request)
        self._asking += 1
        try:
            async with asyncio.timeout(timeout_s):
                return _decode(target, address, await self._exchange(target, address, frames))
        except TimeoutError:
            raise failure(PeerUnreachable, target, address, f"no answer within {timeout_s} s") from None
        except zmq.ZMQError as error:  # such as too many open files
            raise failure(PeerUnreachable, target, address, str(error)) from error
        finally:
            self._asking -= 1
            self._end_if_idle()

    def close(self) -> None:
        self._closed = True
        self._end_if_idle()

    def abandon(self) -> None:
        self._closed = True
        context, self._context = self._context, None
        if context is None:
            return
        for socket in self._sockets:
            socket.disable_monitor()
            socket.close(linger=0)
        for monitor in self._sockets.values():
            monitor.close(linger=0)
        self._sockets.clear()
        context.term()

    def _end_if_idle(self) -> None:
        """End ZeroMQ's thread once nobody asks any more."""
        if self._closed and self._asking == 0 and self._context is not None:
            context, self._context = self._context, None
            context.term()

    async def _keys(self) -> Keyring | None:
        """This engine's keys, read when they are first needed; None without CURVE."""
        config, secret, peers = self._config, self._config.curve_secret_key_file, self._config.curve_peers_dir
        if self._keyring is None and secret is not None and peers is not None:
            self._keyring = await Keyring.read(config.engine_id, Path(secret), Path(peers), self._now_s)
        return self._keyring

    async def _exchange(self, target: messages.Target, address: str, frames: list[bytes]) -> list[bytes]:
        """Send a question and return the frames of its answer."""
        keyring = await self._keys()
        server_key = b""
        if keyring is not None:
            known_key = await keyring.key_of(target.engine_id)
            if known_key is None:
                why = f"CURVE: {keyring.folder} has no key of engine {target.engine_id!r}"
                raise failure(PeerRefused, target, address, why)
            server_key = known_key
        with _explained(target, address):
            host, port = split_address(address, what="peer")
            endpoint = f"tcp://{await self._lookups.find(host)}:{port}"
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        failures = f"inproc://failures-{next(self._questions)}"
        with self._context.socket(zmq.DEALER) as socket, self._context.socket(zmq.PAIR) as monitor:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)  # see `zmq_listener`
            socket.setsockopt(zmq.MAXMSGSIZE, self._config.limits.side_channel_message_bytes_max)
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            if keyring is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
                socket.setsockopt(zmq.CURVE_PUBLICKEY, keyring.own.public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.own.secret)
            socket.monitor(failures, _FAILURES)
            self._sockets[socket] = monitor
            try:
                monitor.connect(failures)
                socket.connect(endpoint)
                await socket.send_multipart(frames)
                poller = zmq.asyncio.Poller()
                poller.register(socket, zmq.POLLIN)
                poller.register(monitor, zmq.POLLIN)
                while True:
                    ready = dict(await poller.poll())
                    if socket in ready or await socket.poll(0):  # an answer and its connection's end may come together
                        return await socket.recv_multipart()
                    event = parse_monitor_message(await monitor.recv_multipart())["event"]
                    if event != zmq.Event.CONNECT_RETRIED:
                        curve = keyring is not None
                        raise _failure(event, target, address, self._config.engine_id, curve=curve)
                    with _explained(target, address):
                        await _probe(endpoint)
            finally:
                if self._sockets.pop(socket, None) is not None:  # else it was abandoned
                    # Before the monitor's end closes: ZeroMQ would wait for it to take an event.
                    socket.disable_monitor()


def _failure(event: int, target: messages.Target, address: str, ours: str, *, curve: bool) -> PeerError:
    """The error for a connection that failed."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        why = f"CURVE: the peer does not accept our key: has its curve_peers_dir our {ours}.public?"
        return failure(PeerRefused, target, address, why)
    if event == zmq.Event.DISCONNECTED:
        return failure(PeerUnreachable, target, address, "the peer closed the connection without an answer")
    why = "it may use CURVE, which we do not (curve_secret_key_file, curve_peers_dir)"
    if curve:
        why = f"it may not use CURVE, as we do, or our {target.engine_id}.public is not the key that it uses"
    return failure(PeerUnreachable, target, address, f"the connection failed in its handshake: {why}")


async def _probe(endpoint: str) -> None:
    """Connect once by plain TCP: the system says why a connection fails, ZeroMQ does not."""
    host, port = split_address(endpoint, what="peer")
    _, writer = await asyncio.open_connection(host.strip("[]"), port)
    writer.close()


@contextmanager
def _explained(target: messages.Target, address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ConfigError) as error:  # ValueError: a host that the resolver chokes on
        raise failure(PeerUnreachable, target, address, str(error)) from error


def _decode(target: messages.Target, address: str, frames: list[bytes]) -> messages.Reply:
    try:
        header_frame, body_frame = frames
        header = messages.decode_header(header_frame)
        reply = messages.decode_reply(body_frame)
    except (ValueError, messages.WireError) as error:
        raise failure(ProtocolError, target, address, f"the answer is no kvflow message: {error}") from error
    if header.version != messages.PROTOCOL_VERSION and not isinstance(reply, messages.Refusal):
        versions = f"kvflow protocol version: ours {messages.PROTOCOL_VERSION}, theirs {header.version}"
        raise failure(PeerRefused, target, address, versions)
    return reply
