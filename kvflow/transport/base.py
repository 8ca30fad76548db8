"""Transport: the protocol between the runtime and whatever moves the bytes.

A transport owns one agent (or a set that acts as one). The runtime registers memory once, hands its metadata to
readers, adds peers by the metadata they sent, posts reads without waiting, and takes events from `run`. What is posted
cannot be taken back: each posted read ends in exactly one event, or in the transport's own death.
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
"""Whether NIXL reaches the memory of a kind of device. Caches on all other kinds are staged, such as on hpu, npu, tpu,
xla, neuron and privateuseone. A transport may know better: see `Transport.reaches`."""
BY_SOME_BUILDS = ("xpu",)
"""Kinds of devices whose memory some builds of NIXL reach. A peer that shows such memory has one; readers need not."""
_WITHOUT_MEMORY = "meta"


def usually_reached(device: str) -> bool:
    """Return whether NIXL reaches the memory of a kind of device, as `DEVICES` says."""
    return DEVICES.get(device, False)


def is_staged(device: str, staging: str, reached: bool | None = None) -> bool:
    """Return whether a cache on a kind of device goes through host buffers.

    Args:
        device: the kind.
        staging: Config.staging.
        reached: whether the transport reaches memory of this kind; by default as `DEVICES` says.

    Raises:
        ConfigError: it has to be staged, and may not; or tensors of that kind have no memory.
    """
    if device == _WITHOUT_MEMORY:
        raise ConfigError(f"device {device!r} is not supported; supported are those whose tensors have memory")
    reached = usually_reached(device) if reached is None else reached
    if staging == "never" and not reached:
        raise ConfigError(f"staging: 'never', but the transport cannot reach a cache on {device!r}")
    return staging == "always" or not reached


class MemoryUse(enum.Flag):
    """The use of registered memory. Registering costs time and, on some devices, room in an address window."""

    SERVED = enum.auto()
    """Read by peers."""
    READ_INTO = enum.auto()
    """Written by our reads."""


class TransportError(KVFlowError):
    """Failure of a transport call. The runtime translates it into the error of the request that it belongs to."""


class PeerGone(TransportError):
    """Death of the peer, or of the connection to it; it has to be removed and added anew."""


@dataclass(slots=True, eq=False)
class PostedRead:
    """A read under way; compared by identity. The transport keeps what it needs in its own subclass."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """End of a posted read: no byte of it can land any more. `error` is None if all bytes landed."""

    read: PostedRead
    error: TransportError | None
    post_s: float
    """Time spent in the call that posted it; over shared memory that call copies the bytes."""


@dataclass(frozen=True, slots=True)
class Notified:
    """Notification from a peer. Its name is not authenticated: trust the payload's secret, never the sender."""

    payload: bytes


Event: TypeAlias = ReadEnded | Notified


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStatistics:
    """Counts of what is open now, and of what has happened so far. All `open_` counts are 0 after `aclose`."""

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
    """Listeners that the transport's library has closed while it is open: no new peer can connect by them."""
    deaf: bool = False
    """True if no new peer can connect at all, since all listeners of the agent that peers read from are lost."""


Join: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Function that makes few notifications out of many."""


class Transport(Protocol):
    """Mover of bytes for one runtime. All methods belong to the event loop that called `open`."""

    async def open(self) -> None:
        """Start the agent. Raises ConfigError if it cannot be started as configured."""

    def reaches(self, device: str) -> bool:
        """Return whether reads reach memory of this kind of device. Caches on other kinds are staged."""

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        """Make memory readable by peers, writable by our reads, or both; only `aclose` undoes it.

        `keepalive` owns the memory: the transport holds it until nothing can touch the memory any more.
        """

    async def metadata(self) -> bytes:
        """Metadata by which a reader adds us as a peer, registered memory included."""

    async def add_peer(self, metadata: bytes) -> AgentName:
        """Learn a peer from its metadata; TransportError if it is not acceptable."""

    async def remove_peer(self, name: AgentName) -> None:
        """Forget a peer. Only legal when none of its reads is under way."""

    def post_read(self, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        """Start to read; returns at once, and an event tells the end, a failure to start included.

        Reads, and the descriptors of one read, may be performed in any order.
        """

    def notify(self, peer: AgentName, payload: bytes, join: Join | None = None) -> None:
        """Send `payload` to a peer; returns at once. Failures are counted, not raised: delivery is best effort.

        Payloads to one peer that wait to be sent and come with the same `join` may be sent as what that makes of them;
        it is called on any thread.
        """

    async def run(self, deliver: Callable[[Event], None]) -> None:
        """Call `deliver` on the loop for every event, until cancelled; one caller only.

        Raises TransportBroken when there will be no more events. Events that come while nobody runs this are kept.
        """

    async def aclose(self, timeout_s: float) -> None:
        """Deregister and shut down. Closing twice is fine.

        Nothing is torn down under a read that is under way. If reads do not stop within `timeout_s`, TransportError
        is raised and the transport keeps itself and the memory alive until they have, then shuts down.
        """

    def abandon(self, wait_s: float) -> None:
        """Shut down without the loop, which is gone, once reads have stopped; waits up to `wait_s`. Any thread."""

    @property
    def behind(self) -> bool:
        """True if more reads wait than can be started in the next milliseconds.

        More of them gain nothing now, and preparing them keeps Python's lock from threads that need it.
        """

    @property
    def statistics(self) -> TransportStatistics: ...
