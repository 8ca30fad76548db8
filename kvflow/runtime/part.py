"""Parts: optional features that a runtime gets beside its core, as a list. They begin and end in its order.

If other engines of a fleet do not run kvflow (stock peers, for example vLLM's own connector), a rank gets a part that
is a `Foreign`, as in `kvflow.stock`. Its `Resolver` knows the tickets of both kinds of engines. Each handshake chooses
how the peer is notified about its leases (`Telling`), and which proof (`Proof`) reads from the peer have. Peers, loads
and leases are the same classes for both kinds.
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
    """The reason why a part must end its work."""

    CLOSED = enum.auto()
    """The runtime is closed, or has drained."""
    UNREGISTERED = enum.auto()
    """The cache is unregistered; another one may be registered later."""
    ABANDONED = enum.auto()
    """The event loop no longer runs, or Python ends: nothing can be awaited."""


class Part:
    """An optional feature of a runtime: `Runtime(config, parts=[...])`. Users call the methods of its subclass.

    A part belongs to one runtime at a time. The runtime calls the methods below on its loop: `registered` first, and
    the others only after `registered` has returned. The core calls no other method, and parts do not use each other.
    Override only the methods that the part needs.
    """

    name: str
    """Name in `RuntimeStatistics.parts`, in logs and in errors."""
    answers: Mapping[type[messages.ReaderRequest], Callable[[Any], Answered]] = {}
    """Functions that answer requests of peers to this part, by type of request. They never wait. The side channel
    decodes only these types and those of the core."""

    async def registered(self, runtime: Supervisor, cache: RegisteredCache) -> None:
        """Begin to work with a cache that is being registered. If cancelled, the part is left without a cache.

        Args:
            runtime: the runtime of the part.
            cache: the cache, its memory, and the objects that its loads and leases share.

        Raises:
            ConfigError: this part cannot work with the cache.
        """

    def end(self, why: Ending, wait_s: float = 0.0) -> None:
        """Take no new work, and let the work under way end soon.

        Args:
            why: the reason.
            wait_s: for ABANDONED, seconds that the part may wait for its threads.
        """

    async def drained(self) -> None:
        """Wait until no work is under way. Cancelling stops the waiting."""

    async def closed(self, timeout_s: float) -> str:
        """Release the cache. By now no read is under way.

        Args:
            timeout_s: seconds that this call may take.

        Returns:
            A text for the error if something went wrong, or "".
        """
        return ""

    @property
    def statistics(self) -> PartStatistics | None:
        """Current counts of the part; None without a registered cache."""
        return None


class PartOwner:
    """The runtime that a part works for. After that runtime is closed, the part may work for another."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._runtime: Supervisor | None = None

    @property
    def registered(self) -> bool:
        """True while the runtime has a registered cache, or one that is being unregistered."""
        return self._runtime is not None and self._runtime.held is not None

    @property
    def open(self) -> bool:
        """True while the runtime takes new work."""
        return self._runtime is not None and self._runtime.state is RuntimeState.OPEN

    def begin(self, runtime: Supervisor) -> None:
        """Note the runtime that registers a cache. Raises ConfigError if the part still works for another runtime."""
        before = self._runtime
        if before not in (None, runtime) and before.state is not RuntimeState.CLOSED:
            raise ConfigError(f"{self._part!r}: it is a part of another runtime, {before}")
        self._runtime = runtime

    def require(self, what: str, *, new_work: bool = True) -> RegisteredCache:
        """Return the registered cache for a call of the part.

        Args:
            what: name of the call, for the error.
            new_work: True if the call begins new work, which a draining runtime refuses.

        Raises:
            UsageError: the part has no runtime with a registered cache, or this is not the runtime's loop.
            RuntimeUnavailable, RuntimeBroken: as for loads.
        """
        if self._runtime is None:
            raise UsageError(f"{what}: {self._part!r} is a part of no runtime whose KV cache was registered")
        self._runtime.require(what, new_work=new_work)
        return self._runtime.require_cache()


class Service(Protocol):
    """A service that answers stock readers and applies their notifications."""

    def answer(self, question: bytes) -> list[bytes] | None:
        """Return the frames of the answer, or None for no answer. Never waits, and never raises."""

    def hears(self, payload: bytes) -> bool:
        """Apply a notification if it came from a stock reader. Return whether it did."""


class Foreign(Part):
    """A part that knows stock peers: engines that do not run kvflow. This base class knows none."""

    def handshakes(self, cache: RegisteredCache, own: Handshakes) -> Handshaking:
        """Return handshakes with kvflow peers, as `own` does them, and with stock peers."""
        return own

    def resolver(self, cache: RegisteredCache) -> Resolver:
        """Return the resolver of kvflow tickets and of stock tickets."""
        return cache.own_reach

    def service(self, cache: RegisteredCache) -> Service | None:
        """Return the service that answers stock readers, or None if there is none.

        Raises:
            ConfigError: stock readers cannot be served with this configuration.
        """
        return None


def foreign_of(parts: Sequence[Part]) -> Foreign:
    """Return the first part that is a `Foreign`, or a `Foreign` that knows no stock peers."""
    return next((part for part in parts if isinstance(part, Foreign)), Foreign())
