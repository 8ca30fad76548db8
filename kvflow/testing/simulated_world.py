"""A simulated `World` for runtimes: transport, side channel, clock, copy thread and random bytes are all simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvflow.config import Config
from kvflow.core.protocol import codec, messages
from kvflow.runtime.clock import Clock
from kvflow.runtime.world import World
from kvflow.testing.copier import InlineCopier
from kvflow.testing.side_channel import Frames, InprocSideChannel, own_host, set_reply
from kvflow.testing.simulated_network import Network, SimHost


def send_through(network: Network, host: SimHost) -> Callable[[str, Frames, asyncio.Future[Frames]], None]:
    """Return a function `send(address, frames, answered)` for the `InprocSideChannel` of the simulated host `host`.

    The function sends a request over the simulated network, and sets the result of the future `answered` to the answer.
    The request and the answer each take time and may be lost; the answer may also be garbled.
    """

    def reaches(address: str) -> bool:
        """Return True if a message between `host` and the host at `address` arrives.

        False for a cut link, else by chance.
        """
        if network.chance(network.conditions.unanswered_share):
            return False
        other = network.host_at(address)
        return other is None or network.linked(host, other)

    def send(address: str, frames: Frames, answered: asyncio.Future[Frames]) -> None:
        context = host.process.context()

        def come_back(reply: Frames | None) -> None:
            network.loop.call_soon(set_reply, answered, reply, context=context)

        def reply(frames: Frames) -> None:
            if reaches(address):
                network.later(network.delay_s(), come_back, garbled(network, frames))

        def arrive() -> None:
            if not reaches(address):
                return
            listener = network.exchange.listeners.get(address)
            if listener is None:
                network.later(network.delay_s(), come_back, None)
            else:
                network.loop.call_soon(listener.arrive, frames, reply, context=listener.context)

        network.later(network.delay_s(), arrive)

    return send


def garbled(network: Network, frames: Frames) -> Frames:
    """Return the `frames` of an answer or, with probability `NetworkConditions.garbled_share`, garbled frames.

    Garbled frames have a truncated body, a random header, another message as the body, or an additional frame.
    """
    if not network.chance(network.conditions.garbled_share):
        return frames
    network.note("garbled")
    header, body = frames
    match network.rng.randrange(4):
        case 0:
            return [header, body[: network.rng.randrange(len(body))]]
        case 1:
            return [network.rng.randbytes(len(header)), body]
        case 2:
            state = network.rng.choice((messages.LeaseAnswerState.WAITING, messages.LeaseAnswerState.ENDED))
            return [header, codec.encode(messages.LeaseAnswer(state=state))]
        case _:
            return [header, body, body]


def make_world(network: Callable[[], Network], host: Callable[[Config], SimHost], clock: Callable[[], Clock]) -> World:
    """Return a simulated `World` for runtimes.

    `network()`, `host(config)` and `clock()` return the simulated network, the simulated host of the engine with this
    config, and a clock for a runtime.
    """

    return World(
        transport=lambda config, name: network().attach(host(config), name),
        side_channel=lambda config: InprocSideChannel(
            network().exchange, config, send=send_through(network(), host(config))
        ),
        clock=clock,
        own_host=own_host,
        token_hex=lambda count: network().rng.randbytes(count).hex(),
        copy_thread=lambda name: InlineCopier(name, lambda: network().rng.expovariate(1 / network().conditions.read_s)),
        real_process=False,
    )
