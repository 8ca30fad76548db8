"""World: functions that make a runtime's transport, side channel, clock, random numbers and copy thread.

No other module in `runtime/` chooses a clock, a socket or a source of random numbers, so a simulator controls all of
these by giving a runtime another `World`.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.runtime.channel.protocol import SideChannel
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.copy_thread import CopyThread
from kvflow.transport.base import Transport


def make_transport(config: Config, agent_name: str) -> Transport:
    """Return a new, unopened transport of the kind that `config.transport` names. ConfigError for an unknown kind.

    Only the module of that kind is imported.
    """
    match config.transport:
        case "nixl":
            from kvflow.transport.nixl.loop import NixlTransport

            return NixlTransport(config, agent_name)
        case "inproc":
            from kvflow.transport.inproc import InprocTransport

            return InprocTransport(agent_name)
        case unknown:
            raise ConfigError(f"transport: expected 'nixl' or 'inproc', got {unknown[:80]!r}")


def make_side_channel(config: Config) -> SideChannel:
    """Return a new side channel over ZeroMQ, which is imported now: an engine may import kvflow and never transfer."""
    from kvflow.runtime.channel.asking import ZmqSideChannel

    return ZmqSideChannel(config)


async def find_own_host(config: Config) -> str:
    """Return the host name or address under which peers reach this rank. Cancelling stops the waiting."""
    from kvflow.runtime.channel.lookups import own_host

    return await own_host(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Functions that make the objects by which a runtime reaches the outside. Tests and simulators replace some."""

    transport: Callable[[Config, str], Transport] = make_transport
    """Function that makes a transport from the config and the agent's name."""
    side_channel: Callable[[Config], SideChannel] = make_side_channel
    own_host: Callable[[Config], Awaitable[str]] = find_own_host
    """Function that finds the host name or address under which peers reach this rank, to write into tickets."""
    clock: Callable[[], Clock] = SystemClock
    token_hex: Callable[[int], str] = secrets.token_hex
    """Function `token_hex(count)` that returns `count` unpredictable random bytes as hexadecimal digits.

    Used for incarnations, lease ids and random delays.
    """
    copy_thread: Callable[[str], CopyThread] = CopyThread
    logs_observer_errors: bool = True
    """True if errors that observers raise are only logged. If False, as in tests, closing the runtime raises the first.
    """
    real_process: bool = True
    """True if the runtime runs in a real process. An open runtime is then closed when the `Runtime` object is dropped,
    and when Python ends.

    False in a simulation, where a process may die without closing its runtime.
    """
