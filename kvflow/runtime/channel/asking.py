"""The asking end of the side channel over ZeroMQ, which keeps connections for later questions.

ZeroMQ silently retries a failed connection; its monitor socket reports the failure, so that the question can end. Host
names are looked up first (`lookups`), because ZeroMQ would look them up on the one thread that all questions share.

With CURVE the peer must own the key that this engine's allowlist has under the peer's engine id, and the peer's
allowlist must have this engine's key.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from kvflow.checks import printable
from kvflow.config import Config
from kvflow.core.bounds import REASON_CHARS_MAX
from kvflow.core.policy.circuit import BackOff, delay_s
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.errors import ConfigError, PeerError, PeerNotReady, PeerRefused, PeerUnreachable, ProtocolError
from kvflow.hosts import WILDCARDS, address_at, loopback_hint, split_address
from kvflow.runtime.channel.connections import Connections, ListenerRoute
from kvflow.runtime.channel.listening import ZmqListener
from kvflow.runtime.channel.lookups import Lookups
from kvflow.runtime.channel.protocol import Answer
from kvflow.runtime.clock import SystemClock

if TYPE_CHECKING:
    from kvflow.runtime.channel.keyring import Keyring

ATTEMPTS_MAX = 6
"""Maximum number of times to send a question, including the first, if connections close before the answer."""

REFUSALS_MAX = 2
"""Maximum number of refused connections after which one question is sent again. The next refusal is an error.

A listener that drops all connections has no bound port for a moment, and refuses new connections meanwhile.
"""

RETRY_PAUSES = BackOff(first_s=0.01, most_s=0.2)
"""Pauses between the attempts of a question: readers that a listener has dropped should not all return together."""

_NO_ANSWER_HINT = "its process is stopped or very busy, or a firewall drops the packets"

_CLOSED_BY_PEER = (zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL)
"""ZeroMQ monitor events that mean that the peer closed the connection.

The second also comes if only one side uses CURVE.
"""


class ZmqSideChannel:
    """A `SideChannel` over ZeroMQ."""

    def __init__(self, config: Config, now_s: Callable[[], float] = SystemClock.now_s) -> None:
        self._config = config
        self._now_s = now_s
        self._keyring: Keyring | None = None
        self._lookups = Lookups()
        self._connections = Connections(config.limits)

    async def listen(self, answer: Answer, requests: codec.RequestDecoder = codec.CORE_REQUESTS) -> ZmqListener:
        host, keyring = await self._own_host(), await self._get_keyring()
        return ZmqListener(self._config, host, keyring, answer, self._now_s, requests)

    async def ask(
        self, request: messages.Request, *, fingerprint: bytes, timeout_s: float | None = None
    ) -> messages.Reply:
        at = request.target
        if timeout_s is None:
            timeout_s = self._config.handshake_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as bound:
                route = await self._route_to(at)
                while True:
                    reply = _decode(request, await self._exchange(route, request, fingerprint))
                    if not isinstance(reply, messages.Refusal) or not reply.retry_after_s:
                        return reply
                    await _wait_until_asked_again(at, reply, bound)
        except TimeoutError:
            raise at.failure(PeerUnreachable, f"no answer within {timeout_s} s: {_NO_ANSWER_HINT}") from None
        except (zmq.ZMQError, OSError) as error:  # for example too few open files
            raise at.failure(PeerUnreachable, error.strerror or str(error)) from error

    def close(self) -> None:
        self._connections.close()

    def abandon(self) -> None:
        self._connections.abandon()

    async def _own_host(self) -> str:
        """Return Config.listen_host as a numeric address, since ZeroMQ looks names up in one IP version only.

        If the lookup fails, return the name unchanged: it may name a network interface, which ZeroMQ accepts.
        """
        host = self._config.listen_host
        if host in WILDCARDS:
            return host
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                return await self._lookups.find_address(host)
        except (OSError, ValueError):  # TimeoutError is an OSError
            return host

    async def _get_keyring(self) -> Keyring | None:
        """Return this engine's key pair and allowlist, or None without CURVE. The first call reads the key files."""
        config, secret, peers = self._config, self._config.curve_secret_key_file, self._config.curve_peers_dir
        if self._keyring is None and secret is not None and peers is not None:
            from kvflow.runtime.channel.keyring import Keyring

            self._keyring = await Keyring.read(config.engine_id, Path(secret), Path(peers), self._now_s)
        return self._keyring

    async def _route_to(self, at: Address) -> ListenerRoute:
        """Return how to connect to the listener at `at`: its numeric endpoint and, with CURVE, the keys to use.

        PeerRefused if the allowlist has no key of the peer's engine, PeerUnreachable if the peer's host name cannot be
        resolved.
        """
        keyring = await self._get_keyring()
        server_key = b""
        if keyring is not None:
            known_key = await keyring.key_of(at.engine_id)
            if known_key is None:
                why = f"CURVE: {keyring.folder} has no key of engine {at.engine_id!r}"
                raise at.failure(PeerRefused, why)
            server_key = known_key
        with _translate_errors(at):
            host, port = split_address(at.address, what="peer")
            endpoint = address_at(await self._lookups.find_address(host), port)
        return ListenerRoute(endpoint, server_key, None if keyring is None else keyring.own_keys)

    async def _exchange(self, route: ListenerRoute, request: messages.Request, fingerprint: bytes) -> list[bytes]:
        """Send `request` to the listener of `route`, and return the frames of the answer.

        `fingerprint`: hash of this rank's `Compatibility`. If the connection closes before the answer comes, because
        the peer restarted or its listener drops all connections, ask again over a new connection: asking any question
        twice does no harm.
        """
        body, at = codec.encode(request), request.target
        shared, outcome = self._connections.find_shared(route), None
        if shared is not None:
            with self._connections.open_question(shared, fingerprint, body) as question:
                outcome = await question.arrivals.get()
        attempts = refusals = 0
        while not isinstance(outcome, list):
            if attempts:
                await _pause(delay_s(attempts, RETRY_PAUSES, random.random()))
            with self._connections.open_question(self._connections.open(route), fingerprint, body) as question:
                outcome = await question.arrivals.get()
                while outcome == zmq.Event.CONNECT_RETRIED:
                    with _translate_errors(at):
                        bound = await _probe(route.endpoint, final=refusals == REFUSALS_MAX)
                    refusals += not bound
                    outcome = await question.arrivals.get() if bound else zmq.Event.DISCONNECTED
            attempts += 1
            if isinstance(outcome, zmq.Event) and (outcome not in _CLOSED_BY_PEER or attempts == ATTEMPTS_MAX):
                raise _connection_error(outcome, at, self._config.engine_id, curve=route.own_keys is not None)
        return outcome


async def _wait_until_asked_again(at: Address, busy: messages.Refusal, bound: asyncio.Timeout) -> None:
    """Wait as long as the rank at `at` has said in `busy`. PeerNotReady if that is beyond `bound`."""
    pause_s, until_s = max(busy.retry_after_s, RETRY_PAUSES.first_s), bound.when()
    if until_s is not None and asyncio.get_running_loop().time() + pause_s >= until_s:
        why = f"refused: {printable(busy.reason, REASON_CHARS_MAX)}; it may be asked again in {pause_s:.3g} s"
        raise at.failure(PeerNotReady, why, retry_after_s=pause_s)
    await _pause(pause_s)


async def _pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _connection_error(event: zmq.Event, at: Address, ours: str, *, curve: bool) -> PeerError:
    """Return the error for a connection to `at` that ended with the monitor event `event`.

    `ours`: id of this engine. `curve`: this engine uses CURVE.
    """
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        why = f"CURVE: the peer does not accept our key: does its curve_peers_dir have our {ours}.public?"
        return at.failure(PeerRefused, why)
    if event == zmq.Event.DISCONNECTED:
        why = "the peer closed the connection without an answer: it is not a kvflow side channel, it is closing, it has"
        why += " too many readers (limits.side_channel_connections_max), or its answer is larger than this reader"
        return at.failure(PeerUnreachable, f"{why} accepts (limits.block_ids_max)")
    why = "it may use CURVE, which we do not (curve_secret_key_file, curve_peers_dir)"
    if curve:
        why = f"it may not use CURVE, as we do, or our {at.engine_id}.public is not the key that it uses"
    return at.failure(PeerUnreachable, f"the connection failed in its handshake: {why}")


async def _probe(endpoint: str, *, final: bool) -> bool:
    """Open a plain TCP connection to `endpoint` and close it, to learn why ZeroMQ cannot connect.

    Return True if that succeeded. If it was refused, return False or, if `final`, raise ConnectionRefusedError.
    """
    host, port = split_address(endpoint, what="peer")
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        if final:
            raise
        return False
    writer.close()
    return True


@contextmanager
def _translate_errors(at: Address) -> Iterator[None]:
    try:
        yield
    except ConnectionRefusedError as error:
        why = f"nobody listens there ({error}): the engine has ended, is not open yet, or has another address"
        raise at.failure(PeerUnreachable, f"{why}{loopback_hint(at.address)}") from error
    except (OSError, ValueError, ConfigError) as error:  # ValueError: a host name that cannot be encoded
        raise at.failure(PeerUnreachable, str(error)) from error


def _decode(request: messages.Request, frames: list[bytes]) -> messages.Reply:
    """Decode the answer to `request`. ProtocolError if it is no kvflow message, PeerRefused if of another version."""
    at = request.target
    try:
        header_frame, body_frame = frames
        header = codec.decode_header(header_frame)
        reply = codec.decode_reply(body_frame, request)
    except (ValueError, codec.WireError) as error:
        raise at.failure(ProtocolError, f"the answer is not a kvflow message: {error}") from error
    if header.version != codec.PROTOCOL_VERSION and not isinstance(reply, messages.Refusal):
        versions = f"kvflow protocol version: ours {codec.PROTOCOL_VERSION}, theirs {header.version}"
        raise at.failure(PeerRefused, versions)
    return reply
