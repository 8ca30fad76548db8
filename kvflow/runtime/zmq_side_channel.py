"""The side channel over ZeroMQ: the end that asks is a DEALER, one per question; the other is `zmq_listener`.

A socket of its own for each question means that a late answer to an old question cannot be taken for a new one. ZeroMQ
itself would try a connection that fails again and again, in silence; its monitor says why, and the question ends.

With CURVE the engine that is asked must own the key that our allowlist has under its name, and it must have ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvflow.config import Config, split_address
from kvflow.core import wire
from kvflow.errors import ConfigError, PeerError, PeerRefused, PeerUnreachable, ProtocolError
from kvflow.runtime.keyring import Keyring
from kvflow.runtime.side_channel import Answer
from kvflow.runtime.zmq_listener import ZmqListener

_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.DISCONNECTED
)


class ZmqSideChannel:
    """See `SideChannel`."""

    def __init__(self, config: Config, now_s: Callable[[], float]) -> None:
        self._config = config
        self._now_s = now_s
        self._keyring: Keyring | None = None

    async def listen(self, answer: Answer) -> ZmqListener:
        return ZmqListener(self._config, await self._keys(), answer, self._now_s)

    async def ask(self, address: str, request: wire.Request, *, fingerprint: bytes) -> wire.Reply:
        timeout_s = self._config.handshake_timeout_s
        frames = wire.encode_frames(wire.our_header(fingerprint), request)
        try:
            async with asyncio.timeout(timeout_s):
                await _probe(address)
                return _decode(address, await self._exchange(address, request.target.engine_id, frames))
        except TimeoutError:
            raise PeerUnreachable(f"{address}: no answer within {timeout_s} s", peer=address) from None

    async def _keys(self) -> Keyring | None:
        """This engine's keys, read when they are first needed; None without CURVE."""
        config = self._config
        if self._keyring is None and config.curve_secret_key_file is not None and config.curve_peers_dir is not None:
            self._keyring = await Keyring.read(
                config.engine_id, Path(config.curve_secret_key_file), Path(config.curve_peers_dir), self._now_s
            )
        return self._keyring

    async def _exchange(self, address: str, engine_id: str, frames: list[bytes]) -> list[bytes]:
        """Send a question and return the frames of its answer."""
        keyring = await self._keys()
        server_key = await _server_key(keyring, engine_id, address) if keyring is not None else b""
        with (
            zmq.asyncio.Context() as context,
            context.socket(zmq.DEALER) as socket,
            context.socket(zmq.PAIR) as monitor,
        ):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)  # see `zmq_listener`
            socket.setsockopt(zmq.MAXMSGSIZE, self._config.side_channel_message_bytes_max)
            socket.setsockopt(zmq.IPV6, int("[" in address))
            if keyring is not None:
                socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
                socket.setsockopt(zmq.CURVE_PUBLICKEY, keyring.own.public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.own.secret)
            socket.monitor("inproc://failures", _FAILURES)
            monitor.connect("inproc://failures")
            socket.connect(address)
            await socket.send_multipart(frames)
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            ready = dict(await poller.poll())
            if socket in ready or await socket.poll(0):  # an answer and the end of its connection may come together
                return await socket.recv_multipart()
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
        raise _failure(event, address, self._config.engine_id, None if keyring is None else engine_id)


async def _server_key(keyring: Keyring, engine_id: str, address: str) -> bytes:
    key = await keyring.key_of(engine_id)
    if key is None:
        raise PeerRefused(f"{address}: CURVE: {keyring.folder} has no key of engine {engine_id!r}", peer=address)
    return key


def _failure(event: int, address: str, ours: str, theirs: str | None) -> PeerError:
    """The error for a connection that failed; `theirs` is the engine whose key we used, None without CURVE."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return PeerRefused(
            f"{address}: CURVE: the peer does not accept our key: has its curve_peers_dir our {ours}.public?",
            peer=address,
        )
    if event == zmq.Event.DISCONNECTED:
        return PeerUnreachable(f"{address}: the peer closed the connection without an answer", peer=address)
    why = (
        "it may use CURVE, which we do not (curve_secret_key_file, curve_peers_dir)"
        if theirs is None
        else f"it may not use CURVE, as we do, or our {theirs}.public is not the key that it uses"
    )
    return PeerUnreachable(f"{address}: the connection failed in its handshake: {why}", peer=address)


async def _probe(address: str) -> None:
    """Connect once by plain TCP: the system says why a connection fails, ZeroMQ does not."""
    try:
        host, port = split_address(address, what="peer")
        _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, ValueError, ConfigError) as error:  # ValueError: a host that the resolver chokes on
        raise PeerUnreachable(f"{address}: {error}", peer=address) from error
    writer.close()


def _decode(address: str, frames: list[bytes]) -> wire.Reply:
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
