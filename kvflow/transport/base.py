"""Transport: the protocol between the runtime and the library that moves the bytes.

A transport owns one agent, or several that act as one. The runtime registers memory once, sends the agent's metadata to
readers, adds peers by their metadata, posts reads without waiting, and gets events from `run`. A posted read cannot be
cancelled: it ends with exactly one event, unless the transport itself dies.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol, TypeAlias

from kvflow.core.cache.regions import Device, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import ConfigError, KVFlowError

AgentName = NewType("AgentName", str)

DEVICES: Mapping[str, bool] = {"cpu": True, "cuda": True}
"""Kinds of devices with memory that NIXL can read. A cache on any other kind is staged, for example on hpu, npu, tpu,
xla, neuron or privateuseone. A transport may know better: see `Transport.reaches`."""
BY_SOME_BUILDS = ("xpu",)
"""Kinds of devices with memory that only some builds of NIXL can read. A peer that registers memory of this kind has
such a build; its readers do not need one."""
_WITHOUT_MEMORY = "meta"


def usually_reached(device: str) -> bool:
    """Return whether NIXL can read memory of the kind `device`, according to `DEVICES`."""
    return DEVICES.get(device, False)


def is_staged(device: str, staging: str, reached: bool | None = None) -> bool:
    """Return whether a cache on a kind of device is staged, so that its blocks move through host buffers.

    Args:
        device: the kind of device.
        staging: Config.staging.
        reached: whether the transport can read memory of this kind; None: according to `DEVICES`.

    Raises:
        ConfigError: the cache must be staged but `staging` is "never", or tensors of this kind have no memory.
    """
    if device == _WITHOUT_MEMORY:
        raise ConfigError(f"device {device!r} is not supported; supported are those whose tensors have memory")
    reached = usually_reached(device) if reached is None else reached
    if staging == "never" and not reached:
        raise ConfigError(f"staging: 'never', but the transport cannot reach a cache on {device!r}")
    return staging == "always" or not reached


class MemoryUse(enum.Flag):
    """The use of registered memory. Registration costs time and, on some devices, part of an address window."""

    SERVED = enum.auto()
    """Memory that peers read."""
    READ_INTO = enum.auto()
    """Memory that local reads write to."""


class TransportError(KVFlowError):
    """A transport call failed. The runtime translates this into the error of the request concerned."""


class PeerGone(TransportError):
    """The peer, or the connection to it, is dead. Remove the peer and add it again."""


@dataclass(slots=True, eq=False)
class PostedRead:
    """A read under way, compared by identity. A transport may use a subclass with fields of its own."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The end of a posted read: no further byte can land. `error` is None if all bytes landed."""

    read: PostedRead
    error: TransportError | None
    post_s: float
    """Seconds spent in the call that posted the read. Over shared memory that call copies the bytes."""


@dataclass(frozen=True, slots=True)
class Notified:
    """A notification from a peer. The sender is not authenticated: trust only the secret in the payload."""

    payload: bytes


Event: TypeAlias = ReadEnded | Notified


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStatistics:
    """Counts of a transport: objects that are open now (0 after `aclose`), and events since `open`."""

    open_reads: int
    open_peers: int
    open_spans: int
    open_threads: int
    reads: int
    reads_failed: int
    bytes_read: int
    notifications_sent: int
    notifications_received: int
    notifications_failed: int
    listeners_lost: int = 0
    """Listeners that the transport's library has closed by itself. No new peer can connect to them."""
    deaf: bool = False
    """True if no new peer can connect, since all listeners of the serving agent are lost."""


Join: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""A function from several payloads for one peer to fewer payloads that say the same."""


class Transport(Protocol):
    """The reads of peers' memory for one registered cache. Call all methods on the event loop that called `open`."""

    async def open(self) -> None:
        """Start the agent. Raises ConfigError if it cannot start as configured."""

    def reaches(self, device: str) -> bool:
        """Return whether the transport can read memory of the kind `device`. If not, caches there are staged."""

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        """Make memory readable by peers, writable by local reads, or both, as `use` says. Only `aclose` undoes that.

        `keepalive` owns the memory. The transport refers to it until no read can touch the memory.
        """

    async def metadata(self) -> bytes:
        """Return the metadata that a reader passes to `add_peer`. It describes the agent and the registered memory."""

    async def add_peer(self, metadata: bytes) -> AgentName:
        """Add the peer that `metadata` describes and return its name. Raises TransportError for bad metadata."""

    async def remove_peer(self, name: AgentName) -> None:
        """Remove a peer. Illegal while a read from the peer is under way."""

    def post_read(self, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        """Start a read and return at once. A `ReadEnded` event follows, also if the read cannot start.

        Reads, and the descriptors of one read, may be performed in any order.
        """

    def notify(self, peer: AgentName, payload: bytes, join: Join | None = None) -> None:
        """Send `payload` to a peer and return at once. Delivery is best effort: failures are counted, not raised.

        If several payloads with the same `join` wait for one peer, the payloads that `join` makes from them may be sent
        instead. `join` may be called on any thread.
        """

    async def run(self, deliver: Callable[[Event], None]) -> None:
        """Call `deliver` on the loop for every event, until cancelled. Only one call may run at a time.

        Raises TransportBroken when no further event can come. Events that come while no call runs are kept.
        """

    async def aclose(self, timeout_s: float) -> None:
        """Deregister the memory and shut down. Closing twice is fine.

        Nothing is torn down while a read is under way. If reads do not stop within `timeout_s`, raise TransportError;
        the transport keeps itself and the memory alive until the reads have stopped, and then shuts down.
        """

    def abandon(self, wait_s: float) -> None:
        """Shut down, once reads have stopped, when the event loop no longer runs. Wait up to `wait_s`. Any thread."""

    @property
    def behind(self) -> bool:
        """True if more reads wait than can be started in the next milliseconds.

        Then it is better not to post more: they gain nothing, and preparing them takes the GIL from other threads.
        """

    @property
    def statistics(self) -> TransportStatistics: ...
