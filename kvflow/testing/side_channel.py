"""A side channel inside one process, without sockets. Requests and replies are encoded as on the real side channel."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextvars import copy_context
from functools import partial

from kvflow.config import Config
from kvflow.core.protocol import codec, messages
from kvflow.errors import ConfigError, PeerUnreachable, ProtocolError
from kvflow.hosts import address_at
from kvflow.runtime.channel.protocol import Answer, AnswerBare, ListenerStatistics, refusal

Frames = list[bytes]
Reply = Callable[[Frames], None]


LOOPBACK = "127.0.0.1"


def host_of(config: Config) -> str:
    """Return the host name or address in this rank's tickets, from its `config`; LOOPBACK by default."""
    if config.advertise_toward is None:
        return config.advertise_host or config.listen_host
    return LOOPBACK if config.listens_everywhere else config.listen_host


async def own_host(config: Config) -> str:
    """Implementation of `World.own_host`: return the host name or address in this rank's tickets."""
    return host_of(config)


class Exchange:
    """All in-process side-channel listeners of a test, by their addresses."""

    def __init__(self) -> None:
        self.listeners: dict[str, InprocListener] = {}
        self._ports = itertools.count(20000)
        """Port numbers for listeners with port 0 in their config."""

    def listen(
        self, config: Config, answer: Answer, requests: codec.RequestDecoder = codec.CORE_REQUESTS
    ) -> InprocListener:
        """Create a listener at the address that `config` names. Raise ConfigError if the address is in use.

        `answer`: function that answers a request. `requests`: decoder of the requests that the listener answers.
        """
        host = host_of(config)
        free = (port for port in self._ports if address_at(host, port) not in self.listeners)
        port = config.listen_port or next(free)
        address = address_at(host, port)
        if address in self.listeners:
            raise ConfigError(f"listen: cannot bind {address}: it is in use")
        self.listeners[address] = listener = InprocListener(self, address, port, answer, requests)
        return listener


class InprocListener:
    """Implementation of `runtime.channel.protocol.Listener` without a socket. Requests wait in a queue for `serve`."""

    def __init__(
        self, exchange: Exchange, address: str, port: int, answer: Answer, requests: codec.RequestDecoder
    ) -> None:
        self.port = port
        self.answer_bare: AnswerBare | None = None
        self.context = copy_context()
        """Context of the listener's creation. Requests arrive in this context, so that the code that answers belongs to
        the listener's simulated process (`SimProcess`)."""
        self._exchange = exchange
        self._address = address
        self._answer = answer
        self._requests = requests
        self._inbox: asyncio.Queue[tuple[Frames, Reply]] = asyncio.Queue()
        self._counts = dict.fromkeys(("answered", "refused", "dropped"), 0)

    @property
    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(**self._counts)

    def arrive(self, frames: Frames, reply: Reply) -> None:
        """Queue a request (`frames`: header and body) for `serve`, which later calls `reply` with the answer."""
        self._inbox.put_nowait((frames, reply))

    async def serve(self) -> None:
        while True:
            frames, reply = await self._inbox.get()
            try:
                header_frame, body_frame = frames
                header = codec.decode_header(header_frame)
                request = codec.decode_request(body_frame, self._requests)
            except codec.UnknownRequest as error:
                self._send(reply, refusal(str(error)))
                continue
            except (ValueError, codec.WireError):
                self._counts["dropped"] += 1
                continue
            answer = self._answer(header, request)
            if asyncio.isfuture(answer):
                answer.add_done_callback(partial(self._send_late, reply))
            else:
                self._send(reply, answer)

    def _send_late(self, reply: Reply, answer: asyncio.Future[messages.Reply]) -> None:
        if not answer.cancelled():
            self._send(reply, answer.result())

    def _send(self, reply: Reply, answer: messages.Reply) -> None:
        self._counts["refused" if isinstance(answer, messages.Refusal) else "answered"] += 1
        reply(codec.encode_frames(codec.our_header(b""), answer))

    def close(self) -> None:
        if self._exchange.listeners.get(self._address) is self:
            del self._exchange.listeners[self._address]


class InprocSideChannel:
    """Implementation of `runtime.channel.protocol.SideChannel` without sockets.

    `send(address, frames, answered)`: function that delivers a request to the listener at `address`, and later sets the
    frames of the answer as the result of the future `answered`. By default the request is delivered immediately.
    """

    def __init__(
        self,
        exchange: Exchange,
        config: Config,
        *,
        send: Callable[[str, Frames, asyncio.Future[Frames]], None] | None = None,
    ) -> None:
        self._exchange = exchange
        self._config = config
        self._send = send or self._send_at_once

    async def listen(self, answer: Answer, requests: codec.RequestDecoder = codec.CORE_REQUESTS) -> InprocListener:
        return self._exchange.listen(self._config, answer, requests)

    def abandon(self) -> None:
        """Do nothing, since the side channel holds no resources."""

    def close(self) -> None:
        """Do nothing, since the side channel holds no resources."""

    async def ask(
        self, request: messages.Request, *, fingerprint: bytes, timeout_s: float | None = None
    ) -> messages.Reply:
        if timeout_s is None:
            timeout_s = self._config.handshake_timeout_s
        answered: asyncio.Future[Frames] = asyncio.get_running_loop().create_future()
        self._send(request.target.address, codec.encode_frames(codec.our_header(fingerprint), request), answered)
        try:
            async with asyncio.timeout(timeout_s):
                frames = await answered
        except TimeoutError:
            raise request.target.failure(PeerUnreachable, f"no answer within {timeout_s} s") from None
        except ConnectionError as error:
            raise request.target.failure(PeerUnreachable, str(error)) from error
        try:
            header_frame, body_frame = frames
            codec.decode_header(header_frame)
            return codec.decode_reply(body_frame, request)
        except (ValueError, codec.WireError) as error:
            why = f"the answer is not a kvflow message: {error}"
            raise request.target.failure(ProtocolError, why) from error

    def _send_at_once(self, address: str, frames: Frames, answered: asyncio.Future[Frames]) -> None:
        listener = self._exchange.listeners.get(address)
        if listener is None:
            set_reply(answered, None)
        else:
            listener.arrive(frames, lambda reply: set_reply(answered, reply))


def set_reply(answered: asyncio.Future[Frames], reply: Frames | None) -> None:
    """Set the result of the future `answered` to `reply`, the frames of the answer, unless `answered` is done.

    If `reply` is None (there is no listener at the address), set a ConnectionRefusedError instead.
    """
    if answered.done():
        return
    if reply is None:
        answered.set_exception(ConnectionRefusedError("connection refused"))
    else:
        answered.set_result(reply)
