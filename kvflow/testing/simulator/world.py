"""A simulated `World`: the side channel, the clock, the copy thread and the secrets of one host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.config import Config
from kvflow.core.protocol import messages
from kvflow.runtime.clock import Clock
from kvflow.runtime.world import World
from kvflow.testing.copier import InlineCopier
from kvflow.testing.side_channel import Frames, InprocSideChannel, settle
from kvflow.testing.simulator.network import Host, Network


class Questions:
    """How one host's questions, and the answers to them, travel through the network."""

    def __init__(self, network: Network, host: Host) -> None:
        self._network = network
        self._host = host

    def send(self, address: str, frames: Frames, answered: asyncio.Future[Frames]) -> None:
        network, context = self._network, self._host.life.context()

        def come_back(reply: Frames | None) -> None:
            network.loop.call_soon(settle, answered, reply, context=context)

        def reply(frames: Frames) -> None:
            if self._reaches(address):
                network.later(network.delay_s(), come_back, garbled(network, frames))

        def arrive() -> None:
            if not self._reaches(address):
                return
            listener = network.exchange.listeners.get(address)
            if listener is None:
                network.later(network.delay_s(), come_back, None)
            else:
                network.loop.call_soon(listener.arrive, frames, reply, context=listener.context)

        network.later(network.delay_s(), arrive)

    def _reaches(self, address: str) -> bool:
        """Whether a message gets through between this host and who is at an address now."""
        if self._network.chance(self._network.weather.unanswered_share):
            return False
        other = self._network.host_at(address)
        return other is None or self._network.linked(self._host, other)


def garbled(network: Network, frames: Frames) -> Frames:
    """An answer as it arrives: now and then cut, overwritten, of another kind, or of a frame too many."""
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
            return [header, messages.encode(messages.NoLease(ended=network.rng.random() < 0.5))]
        case _:
            return [header, body, body]


def make_world(network: Callable[[], Network], host: Callable[[Config], Host], clock: Callable[[], Clock]) -> World:
    """What a runtime gets on the host of its engine."""

    def side_channel(config: Config) -> InprocSideChannel:
        return InprocSideChannel(network().exchange, config, send=Questions(network(), host(config)).send)

    return World(
        transport=lambda config, name: network().attach(host(config), name),
        side_channel=side_channel,
        clock=clock,
        token_hex=lambda count: network().rng.randbytes(count).hex(),
        copier=lambda name: InlineCopier(name, lambda: network().rng.expovariate(1 / network().weather.read_s)),
        real=False,
    )
