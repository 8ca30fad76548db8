"""Parts: capabilities that a runtime is given beside its core, in a list, in the order in which they are walked.

A rank whose fleet has engines of another make is given a part that is a `Foreign`, such as `kvflow.stock` has. Its
loads find their sources by a `Resolver` that knows both kinds of tickets, and each handshake says how the peer is told
of its leases (`Telling`) and what vouches for reads from it (`Proof`). Peers, loads, leases and their books are the
same objects for all makes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvflow.errors import ConfigError, UsageError
from kvflow.runtime.statistics import PartStatistics, RuntimeState

if TYPE_CHECKING:
    from kvflow.core.protocol import messages
    from kvflow.runtime.assembly import RegisteredCache
    from kvflow.runtime.channel.protocol import Answered
    from kvflow.runtime.peers.handshake import Handshakes
    from kvflow.runtime.peers.peer import Resolver
    from kvflow.runtime.peers.table import Handshaking
    from kvflow.runtime.supervisor import Supervisor


class Ending(enum.Enum):
    """Reason for which a part ends what it has under way."""

    CLOSED = enum.auto()
    """The runtime is closed, or has drained."""
    UNREGISTERED = enum.auto()
    """The cache is unregistered; another one may be registered later."""
    ABANDONED = enum.auto()
    """The event loop is gone, or Python ends: nothing can be awaited any more."""


class Part:
    """A capability beside the core: `Runtime(config, parts=[...])`. It is used through its own object.

    A part belongs to one runtime at a time, which calls the methods below on its loop: `registered` first, and the
    others only if it has returned. The core calls nothing else of it, and parts do not know each other. What a part
    does not need it leaves as it is here.
    """

    name: str
    """Name in `RuntimeStatistics.parts`, in logs and in errors."""
    answers: Mapping[type[messages.ReaderRequest], Callable[[Any], Answered]] = {}
    """Answers to the requests of peers that are this part's, by type; they never wait. Only these types are decoded."""

    async def registered(self, runtime: Supervisor, cache: RegisteredCache) -> None:
        """Begin with a cache that is being registered. Cancelling leaves the part without one.

        Args:
            runtime: of the part.
            cache: with its memory and what loads and leases of it are made with.

        Raises:
            ConfigError: the cache cannot be registered with this part.
        """

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Take no more work, and have what is under way end soon.

        Args:
            why: the reason.
            wait_s: seconds that an abandoned part may wait for its threads.
        """

    async def drained(self) -> None:
        """Wait until nothing is under way. Cancelling stops the waiting."""

    async def closed(self, timeout_s: float) -> str:
        """Let go of the cache: no read is under way any more.

        Args:
            timeout_s: seconds that it may take.

        Returns:
            What went wrong, or "".
        """
        return ""

    @property
    def statistics(self) -> PartStatistics | None:
        """Counts now; None without a registered cache."""
        return None


class PartOwner:
    """The runtime of a part. It may be another one once the runtime is closed."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._runtime: Supervisor | None = None

    @property
    def registered(self) -> bool:
        """True while the runtime has a registered cache, also one that is being unregistered."""
        return self._runtime is not None and self._runtime.held is not None

    @property
    def open(self) -> bool:
        """True while the runtime takes new work."""
        return self._runtime is not None and self._runtime.state is RuntimeState.OPEN

    def begin(self, runtime: Supervisor) -> None:
        """Take the runtime whose cache is registered. Raises ConfigError if the part is at work for another one."""
        before = self._runtime
        if before not in (None, runtime) and before.state is not RuntimeState.CLOSED:
            raise ConfigError(f"{self._part!r}: it is a part of another runtime, {before}")
        self._runtime = runtime

    def require(self, what: str, *, new_work: bool = True) -> RegisteredCache:
        """Return the registered cache for a verb.

        Args:
            what: the verb, for the error.
            new_work: True if the verb begins something, which a runtime that drains refuses.

        Raises:
            UsageError: the part has no runtime with a registered cache, or this is not the runtime's loop.
            RuntimeUnavailable, RuntimeBroken: as for loads.
        """
        if self._runtime is None:
            raise UsageError(f"{what}: {self._part!r} is a part of no runtime whose KV cache was registered")
        self._runtime.require(what, new_work=new_work)
        return self._runtime.require_cache()


class Service(Protocol):
    """Answers to readers of another make."""

    def answer(self, question: bytes) -> list[bytes] | None:
        """The frames of an answer; None if there is none. Never waits, and never raises."""

    def hears(self, payload: bytes) -> bool:
        """Take a notification if it is one of theirs. True if it is."""


class Foreign(Part):
    """A part that knows engines of another make. As it is here it knows none."""

    def handshakes(self, cache: RegisteredCache, own: Handshakes) -> Handshaking:
        """Return the handshakes with peers of both kinds."""
        return own

    def resolver(self, cache: RegisteredCache) -> Resolver:
        """Return the way from tickets of both kinds to their ranks."""
        return cache.own_reach

    def service(self, cache: RegisteredCache) -> Service | None:
        """Return the service that answers their readers, None if there is none.

        Raises:
            ConfigError: they cannot be answered.
        """
        return None


def foreign_of(parts: Sequence[Part]) -> Foreign:
    """Return the part that knows engines of another make, or one that knows none."""
    return next((part for part in parts if isinstance(part, Foreign)), Foreign())
