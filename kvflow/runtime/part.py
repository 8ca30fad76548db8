"""Parts: optional features, given to a runtime as a list. They begin and end in the order of the list.

A part may add peers that do not run kvflow (`Part.handshakes`, `resolver`, `reader_service`). Its `Resolver` resolves
the tickets of both kinds of engines. Each handshake chooses how the peer is notified about its leases
(`LeaseNotifier`), and by which proof (`Proof`) bytes read from the peer count as fresh. Peers, loads and leases are the
same classes for both kinds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvflow.core.protocol import messages
from kvflow.errors import ConfigError, UsageError
from kvflow.runtime.channel.protocol import Answered, SideChannel
from kvflow.runtime.load.flight_resources import FlightResources
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.load.steps import LoadSteps
from kvflow.runtime.memory import RankMemory
from kvflow.runtime.optional import OptionalParts
from kvflow.runtime.peers.handshake import Handshakes
from kvflow.runtime.peers.peer import Resolver
from kvflow.runtime.peers.table import HandshakeClient, Peers
from kvflow.runtime.peers.ticket_resolver import TicketResolver
from kvflow.runtime.producer.serving import Serving
from kvflow.runtime.rank import RankContext
from kvflow.runtime.statistics import PartStatistics, RuntimeState
from kvflow.transport.base import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class PartHost:
    """The objects of one registered cache that a part (an optional feature) may use. They end before the part does."""

    context: RankContext
    peers: Peers
    resolver: Resolver
    """Resolves any ticket, also of peers that do not run kvflow."""
    kvflow_resolver: TicketResolver
    """Resolves the tickets of kvflow engines."""
    leases: RemoteLeases
    loader: Loader
    steps: LoadSteps
    serving: Serving
    memory: RankMemory
    resources: FlightResources
    """What flights share. Has the block ledger and the copy thread, too."""
    transport: Transport
    side_channel: SideChannel
    optional: OptionalParts


class PartRuntime(Protocol):
    """What a part sees of its runtime: whether the part may be called now."""

    state: RuntimeState

    def require(self, what: str, *, new_work: bool) -> None:
        """Raise an error, which names the call `what`, unless the runtime is running and belongs to this event loop."""

    def require_host(self) -> PartHost:
        """Return the objects of the registered cache. CacheUnregistered or UsageError if there is none now."""


class Ending(enum.Enum):
    """The reason why a part (an optional feature of a runtime) must end its work."""

    CLOSED = enum.auto()
    """The runtime is closed, or has drained."""
    UNREGISTERED = enum.auto()
    """The cache is unregistered; another one may be registered later."""
    ABANDONED = enum.auto()
    """The event loop no longer runs, or Python ends: nothing can be awaited."""


class ReaderService(Protocol):
    """Answers readers that do not run kvflow on the side channel, and applies their notifications."""

    def answer(self, question: bytes) -> list[bytes] | None:
        """Return the frames of the answer to a bare question, or None to send none. Never waits or raises."""

    def apply_notification(self, payload: bytes) -> bool:
        """Handle the notification `payload`. Return False if it is of another kind of readers."""


class Part:
    """An optional feature of a runtime: `Runtime(config, parts=[...])`. Users call the methods of its subclass.

    A part belongs to one runtime at a time. The runtime calls the methods below on its loop: while a cache is being
    registered, `handshakes`, `resolver`, `reader_service` and then `registered`, and the others only after `registered`
    has returned. The core calls no other method. Which parts need which is on docs/architecture.md. At most one part of
    a runtime may return handshakes, and one a resolver; else the registration raises ConfigError.
    Override only the methods that the part needs. If `end`, `drained` or `release` fails, or `release` takes too long,
    all other parts are still ended and released, and then RuntimeBroken is raised.
    """

    name: str
    """Name of the part, for logs, errors and `RuntimeStatistics.parts`."""
    answers: Mapping[type[messages.ReaderRequest], Callable[[Any], Answered]] = {}
    """Functions that answer peers' requests to this part, by type of request. They must not wait. The side channel
    decodes only these types of requests and those of the core."""

    def handshakes(self, context: RankContext, transport: Transport, own: Handshakes) -> HandshakeClient | None:
        """Return a client that connects to peers that do not run kvflow, too.

        Args:
            context: facts about the rank.
            transport: the transport that the rank's peers are connected with.
            own: the client for peers that run kvflow. The part's client leaves these to it.

        Returns:
            The client; None if this part has none.
        """
        return None

    def resolver(self, context: RankContext, peers: Peers, own: TicketResolver) -> Resolver | None:
        """Return a resolver that resolves tickets of engines that do not run kvflow, too.

        Args:
            context: facts about the rank.
            peers: the rank's peers.
            own: the resolver for tickets of engines that run kvflow. The part's resolver leaves these to it.

        Returns:
            The resolver; None if this part has none.
        """
        return None

    def reader_service(
        self, context: RankContext, serving: Serving, metadata: messages.Metadata
    ) -> ReaderService | None:
        """Return the service for readers that do not run kvflow.

        Args:
            context: facts about the rank.
            serving: the leases of the rank.
            metadata: what the rank tells peers about its cache.

        Returns:
            The service; None if this part has none.

        Raises:
            ConfigError: such readers cannot be served with this cache.
        """
        return None

    async def registered(self, runtime: PartRuntime, host: PartHost) -> None:
        """Begin to work with a cache that is being registered. If cancelled, the part must not use the cache.

        Args:
            runtime: the runtime of the part.
            host: the memory of the cache, and the objects that its loads and leases share.

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
        """Wait until the part has no work under way. Cancelling stops the waiting."""

    async def release(self, timeout_s: float) -> str:
        """Release the cache. Called after `end` and `drained`, when no read into the cache is under way.

        Args:
            timeout_s: seconds that this call may take.

        Returns:
            Why the part could not release the cache, as a text for an error; "" if it has.
        """
        return ""

    @property
    def statistics(self) -> PartStatistics | None:
        """Counts of this optional feature since the last cache was registered with it; None before the first one."""
        return None


class PartOwner:
    """Remembers the runtime that a part belongs to. After that runtime is closed, the part may belong to another."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._runtime: PartRuntime | None = None

    @property
    def open(self) -> bool:
        return self._runtime is not None and self._runtime.state is RuntimeState.OPEN

    def begin(self, runtime: PartRuntime) -> None:
        """Remember `runtime` as the part's runtime. ConfigError if the part has another runtime that is not closed."""
        before = self._runtime
        if before not in (None, runtime) and before.state is not RuntimeState.CLOSED:
            raise ConfigError(f"{self._part!r}: it is a part of another runtime, {before}")
        self._runtime = runtime

    def require(self, what: str, *, new_work: bool = True) -> PartHost:
        """Return the objects of the registered cache of the part's runtime, or raise if the part may not be called now.

        `what`: name of the called method, for the error. `new_work`: the call begins new work, which a draining runtime
        refuses. UsageError if no runtime has registered a cache with the part, or if called on another loop.
        """
        if self._runtime is None:
            raise UsageError(f"{what}: {self._part!r}: no runtime has registered a KV cache with this part")
        self._runtime.require(what, new_work=new_work)
        return self._runtime.require_host()
