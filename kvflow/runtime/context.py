"""The context of every part of a running rank: who it is, and what it may use of the world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.proof import SealTable
from kvflow.hosts import address_at
from kvflow.runtime.channel.protocol import SideChannel
from kvflow.runtime.clock import Clock
from kvflow.runtime.records import Observers
from kvflow.transport.base import Transport


class Spawn(Protocol):
    """Starts a task in the runtime's task group, which ends with the registration.

    Raises RuntimeClosed once the runtime is closing, CacheUnregistered once the registration is over.
    """

    def __call__(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Name and place of this rank, and its incarnation."""

    rank: Rank
    incarnation: str
    agent_name: str
    """Name in the transport, and as a reader: unique per incarnation."""
    host: str
    port: int

    @property
    def address(self) -> str:
        """Address of its side channel, as tickets name it."""
        return address_at(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank, from the registration of its cache to the end of that."""

    config: Config
    identity: Identity
    clock: Clock
    spawn: Spawn
    observers: Observers
    transport: Transport
    side_channel: SideChannel
    seals: SealTable
    """Seals of the leases, one table for all registrations: its words lie where readers of any of them look."""
    token_hex: Callable[[int], str]
    """Draws that many random bytes, in hexadecimal, which nobody can guess."""
