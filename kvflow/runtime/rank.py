"""`RankContext`: the facts about one rank with a registered cache, for all objects that work with that cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.runtime.clock import Clock
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.records import Observers


class Spawn(Protocol):
    """Function that starts a task, which is cancelled at the end of the registration (`Registration.spawn`)."""

    def __call__(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]: ...


class Weights:
    """Version of the weights that the engine computes with. Belongs to the runtime, and outlasts its registrations."""

    def __init__(self) -> None:
        self.version = ""
        """What the latest `Runtime.set_weights` said; "" before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The facts about one rank that do not change while its cache is registered."""

    config: Config
    """The runtime's config, with the limits for the cache's kind of device."""
    rank: Rank
    incarnation: str
    """Name of this registration of the cache."""
    local: LocalRank
    """Description of this rank, for comparison with peers."""
    host: str
    port: int
    """Where peers reach the side channel of this rank."""
    clock: Clock
    token_hex: Callable[[int], str]
    """Function `token_hex(count)` that returns `count` unpredictable random bytes as hexadecimal digits."""
    spawn: Spawn
    observers: Observers
    weights: Weights
    """The one object here with a value that changes while the cache is registered."""
