"""The world around a runtime: its transport, side channel, clock, random numbers and copy thread.

Nothing else in `runtime/` reads a clock, opens a socket or draws a random number. So a simulator controls all of these
by giving a runtime another world.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.runtime.channel.asking import ZmqSideChannel
from kvflow.runtime.channel.lookups import own_host
from kvflow.runtime.channel.protocol import SideChannel
from kvflow.runtime.clock import Clock, SystemClock
from kvflow.runtime.copy_thread import CopyThread
from kvflow.transport.base import Transport


def make_transport(config: Config, agent_name: str) -> Transport:
    """Return the transport that `config` names, not opened yet. Only that transport is imported.

    Raises ConfigError for an unknown name.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Functions that make everything that connects a runtime to the outside. The defaults are the real ones."""

    transport: Callable[[Config, str], Transport] = make_transport
    """Function that makes the transport, from the config and the name of the agent."""
    side_channel: Callable[[Config], SideChannel] = ZmqSideChannel
    own_host: Callable[[Config], Awaitable[str]] = own_host
    """Function that finds the host to name in tickets."""
    clock: Callable[[], Clock] = SystemClock
    token_hex: Callable[[int], str] = secrets.token_hex
    """Function that returns random bytes, unpredictable, in hexadecimal, for incarnations and lease ids."""
    copier: Callable[[str], CopyThread] = CopyThread
    forgives: bool = True
    """True if errors of observers are only logged. If False, as in tests, closing the runtime also raises the first."""
    real: bool = True
    """True if a runtime that is dropped, or still open when Python ends, is closed. A simulated process just dies."""
