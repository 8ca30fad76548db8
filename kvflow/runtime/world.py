"""The world around a runtime: bytes, questions and answers, time, secrets, a thread for copies.

Nothing else in `runtime/` reads a clock, opens a socket or draws a random number, so a simulator that gives a runtime
another world sees all of it.
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
    """Make the transport that `config` names, not opened yet. A process imports the one that it uses, and no other.

    ConfigError for an unknown name.
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
    """Sources of what a runtime gets from outside; the defaults are the real ones."""

    transport: Callable[[Config, str], Transport] = make_transport
    """Maker of the transport, from the config and the agent's name."""
    side_channel: Callable[[Config], SideChannel] = ZmqSideChannel
    own_host: Callable[[Config], Awaitable[str]] = own_host
    """Finds the host that tickets name."""
    clock: Callable[[], Clock] = SystemClock
    token_hex: Callable[[int], str] = secrets.token_hex
    """Random bytes, so many, in hexadecimal: incarnations and lease ids, which must not be guessed."""
    copier: Callable[[str], CopyThread] = CopyThread
    forgives: bool = True
    """True if the error of an observer is only logged. If False, as in tests, closing raises it, too."""
    real: bool = True
    """True if a runtime that is dropped, or is left at Python's end, is closed. A simulated process just crashes."""
