"""A simulated `World`: the side channel, the clock, the copy thread and the secrets of one host.

Questions and answers travel as the bytes that `core.wire` makes of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from kvflow.config import Config
from kvflow.core import wire
from kvflow.errors import PeerUnreachable, ProtocolError
from kvflow.runtime.copier import Copier
from kvflow.runtime.side_channel import Answer, ListenerStatistics
from kvflow.runtime.world import World
from kvflow.testing.simulator.network import Host, Network
from kvflow.testing.virtual_loop import VirtualLoop

Frames = list[bytes]


class SimulatedListener:
    """See `runtime.side_channel.Listener`. What comes while nobody serves waits, as in a socket."""

    def __init__(self, network: Network, host: Host, address: str, port: int, answer: Answer) -> None:
        self.port = port
        self.host = host
        self._network = network
        self._address = address
        self._answer = answer
        self._inbox: asyncio.Queue[tuple[Frames, Callable[[Frames], None]]] = asyncio.Queue()
        self._counts = {"answered": 0, "refused": 0, "dropped": 0}
        network.listeners[address] = self

    @property
    def statistics(self) -> ListenerStatistics:
        return ListenerStatistics(**self._counts)

    def arrive(self, frames: Frames, reply: Callable[[Frames], None]) -> None:
        self._inbox.put_nowait((frames, reply))

    async def serve(self) -> None:
        while True:
            (header_frame, body_frame), reply = await self._inbox.get()
            try:
                header, request = wire.decode_header(header_frame), wire.decode_request(body_frame)
            except wire.WireError:
                self._counts["dropped"] += 1
                continue
            answer = self._answer(header, request)
            self._counts["refused" if isinstance(answer, wire.Refusal) else "answered"] += 1
            reply(wire.encode_frames(wire.our_header(b""), answer))

    def close(self) -> None:
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]


class SimulatedSideChannel:
    """See `runtime.side_channel.SideChannel`."""

    def __init__(self, network: Network, host: Host, config: Config) -> None:
        self._network = network
        self._host = host
        self._config = config

    def listen(self, answer: Answer) -> SimulatedListener:
        config = self._config
        address = f"tcp://{config.listen_host}:{config.listen_port}"
        return SimulatedListener(self._network, self._host, address, config.listen_port, answer)

    async def ask(self, address: str, request: wire.Request, *, fingerprint: bytes) -> wire.Reply:
        timeout_s = self._config.handshake_timeout_s
        answered: asyncio.Future[Frames] = asyncio.get_running_loop().create_future()
        self._send(address, wire.encode_frames(wire.our_header(fingerprint), request), answered)
        try:
            async with asyncio.timeout(timeout_s):
                frames = await answered
        except TimeoutError:
            raise PeerUnreachable(f"{address}: no answer within {timeout_s} s", peer=address) from None
        except ConnectionError as error:
            raise PeerUnreachable(f"{address}: {error}", peer=address) from error
        try:
            header_frame, body_frame = frames
            wire.decode_header(header_frame)
            return wire.decode_reply(body_frame)
        except (ValueError, wire.WireError) as error:
            raise ProtocolError(f"{address}: the answer is no kvflow message: {error}", peer=address) from error

    def _send(self, address: str, frames: Frames, answered: asyncio.Future[Frames]) -> None:
        network = self._network
        life = self._host.life

        def settle(reply: Frames | None) -> None:
            if answered.done():
                return
            if reply is None:
                answered.set_exception(ConnectionRefusedError("connection refused"))
            else:
                answered.set_result(reply)

        def come_back(reply: Frames | None) -> None:
            network.loop.call_soon(settle, reply, context=life.context())

        def reply(frames: Frames) -> None:
            if self._reaches(address):
                network.later(network.delay_s(), come_back, garbled(network, frames))

        def arrive() -> None:
            if not self._reaches(address):
                return
            listener = network.listeners.get(address)
            if listener is None:
                network.later(network.delay_s(), come_back, None)
            else:
                network.loop.call_soon(listener.arrive, frames, reply, context=listener.host.life.context())

        network.later(network.delay_s(), arrive)

    def _reaches(self, address: str) -> bool:
        """Whether a message gets through to whoever is at an address now."""
        listener = self._network.listeners.get(address)
        if self._network.chance(self._network.weather.unanswered_share):
            return False
        return listener is None or self._network.linked(self._host, listener.host)


def garbled(network: Network, frames: Frames) -> Frames:
    """An answer as it arrives: now and then cut, overwritten, of another kind, or of several frames too many."""
    if not network.chance(network.weather.garbled_share):
        return frames
    network.note("garbled")
    header, body = frames
    match network.rng.randrange(4):
        case 0:
            return [header, body[: network.rng.randrange(len(body))]]
        case 1:
            return [network.rng.randbytes(len(header)), body]
        case 2:
            return [header, wire.encode(wire.NoLease(ended=network.rng.random() < 0.5))]
        case _:
            return [header, body, body]


class SimulatedClock:
    """A machine's clock: it started some time ago and is a little fast or slow."""

    def __init__(self, loop: VirtualLoop, offset_s: float, rate: float) -> None:
        self._loop = loop
        self._offset_s = offset_s
        self._rate = rate

    def now_s(self) -> float:
        return self._offset_s + self._loop.time() * self._rate

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s / self._rate, callback)


class SimulatedCopier(Copier):
    """Copies that take virtual time, one after the other, on no thread."""

    def __init__(self, name: str, network: Network) -> None:
        super().__init__(name)
        self._network = network
        self._free_at_s = 0.0

    def submit(self, job: Callable[[], None], on_end: Callable[[BaseException | None], None]) -> None:
        self._open += 1
        network = self._network
        duration_s = network.rng.expovariate(1 / network.weather.read_s)
        self._free_at_s = max(self._free_at_s, network.loop.time()) + duration_s
        network.loop.call_at(self._free_at_s, self._run, job, on_end)

    def _run(self, job: Callable[[], None], on_end: Callable[[BaseException | None], None]) -> None:
        error: BaseException | None = None
        try:
            job()
        except Exception as problem:  # noqa: BLE001 - handed to who submitted the copy
            error = problem
        self._network.loop.call_soon(self._tell, on_end, error)


def make_world(network: Network, host: Host, *, clock_offset_s: float, clock_rate: float) -> World:
    """What a runtime on this host gets."""
    rng: random.Random = network.rng

    def token_hex(count: int) -> str:
        return rng.randbytes(count).hex()

    return World(
        transport=lambda config, name: network.attach(host, name),
        side_channel=lambda config: SimulatedSideChannel(network, host, config),
        clock=lambda: SimulatedClock(network.loop, clock_offset_s, clock_rate),
        token_hex=token_hex,
        copier=lambda name: SimulatedCopier(name, network),
    )
