"""What a runtime takes from the world around it: bytes, questions and answers, time, secrets, a thread for copies.

Nothing else in `runtime/` reads a clock, opens a socket or draws a random number, so a simulator that gives a runtime
another world sees all of it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvflow.config import Config
from kvflow.runtime.channel.asking import ZmqSideChannel
from kvflow.runtime.channel.protocol import SideChannel
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.transport.base import Transport
from kvflow.transport.factory import make_transport

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Timer(Protocol):
    """A callback that is due later."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """One machine's time. It never goes back and means nothing to another machine."""

    def now_s(self) -> float:
        """Seconds since some moment of the past."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the loop after `delay_s` of this clock's seconds."""


class SystemClock:
    """This machine's clock; it goes on while the machine is suspended, where there is one that does."""

    def now_s(self) -> float:
        return time.clock_gettime(_CLOCK)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)


def _zmq_side_channel(config: Config) -> SideChannel:
    return ZmqSideChannel(config, SystemClock().now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where a runtime gets each of these from; the defaults are the real ones."""

    transport: Callable[[Config, str], Transport] = make_transport
    """From the config and the agent's name."""
    side_channel: Callable[[Config], SideChannel] = _zmq_side_channel
    clock: Callable[[], Clock] = SystemClock
    token_hex: Callable[[int], str] = secrets.token_hex
    """So many random bytes, in hexadecimal: incarnations and lease ids, which must not be guessed."""
    copier: Callable[[str], CopyThread] = CopyThread
    real: bool = True
    """Whether a runtime that is dropped, or that Python's end meets, is closed. A simulated process just crashes."""
