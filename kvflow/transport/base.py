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
"""Whether NIXL can read memory of a kind of device; False for every kind that is not listed, for example hpu, npu, tpu,
xla, neuron and privateuseone. The transport in use may know better: see `Transport.reaches`."""
BY_SOME_BUILDS = ("xpu",)
"""Kinds of devices with memory that only some builds of NIXL can read. A peer that registers memory of this kind has
such a build; its readers do not need one."""
_WITHOUT_MEMORY = "meta"


def usually_reached(device: str) -> bool:
    """Return whether NIXL can read memory of the kind `device`, according to `DEVICES`."""
    return DEVICES.get(device, False)


def is_staged(device: str, staging: str, reached: bool | None = None) -> bool:
    """Return whether a cache on a kind of device is staged: its blocks are copied through host buffers.

    Args:
        device: the kind of device.
        staging: Config.staging.
        reached: whether the transport can read memory of this kind; None: according to `DEVICES`.

    Raises:
        ConfigError: the cache must be staged but `staging` is "never"; or `device` is "meta", which holds no data.
    """
    if device == _WITHOUT_MEMORY:
        raise ConfigError(f"device {device!r} is not supported: its tensors have no memory")
    reached = usually_reached(device) if reached is None else reached
    if staging == "never" and not reached:
        raise ConfigError(f"staging: 'never', but the transport cannot reach a cache on {device!r}")
    return staging == "always" or not reached


class MemoryUse(enum.Flag):
    """How registered memory may be used. Each use costs a registration: time and, on some devices, address space."""

    SERVED = enum.auto()
    """Memory that peers read."""
    READ_INTO = enum.auto()
    """Memory that local reads write to."""


class TransportError(KVFlowError):
    """A call of the transport failed. The runtime translates this into an error that names the request and the peer."""


class PeerGone(TransportError):
    """The peer, or the connection to it, is dead. Remove the peer and add it again."""


@dataclass(slots=True, eq=False)
class PostedRead:
    """A posted read that has not ended. Two reads are equal only if they are the same object."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """An event: a posted read has ended, so no further byte can land. `error` is None if all bytes landed."""

    read: PostedRead
    error: TransportError | None
    post_s: float
    """Seconds spent in the call that posted the read. Over shared memory that call copies the bytes."""


@dataclass(frozen=True, slots=True)
class Notified:
    """An event: a peer's notification has arrived. Any agent can send one; the lease id in it proves the sender."""

    payload: bytes


Event: TypeAlias = ReadEnded | Notified


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStatistics:
    """Counts of a transport: `open_*` are objects open now (0 after `aclose`), the others events since `open`."""

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
    """Number of tcp listeners that the transport's library has closed by itself. No new peer can connect to them."""
    unreachable: bool = False
    """True if no new peer can connect: the library has closed all tcp listeners of the agent that peers read from."""


Join: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Function that takes several payloads for one peer and returns fewer payloads with the same content."""


class Transport(Protocol):
    """The agents of one registered cache, which read peers' memory and send notifications.

    Call all methods but `abandon` on the event loop that called `open`.
    """

    async def open(self) -> None:
        """Start the agent. Raises ConfigError if it cannot start as configured."""

    def reaches(self, device: str) -> bool:
        """Return whether the transport can read memory of the kind `device`. If not, blocks go through host buffers."""

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        """Register memory to be read by peers, written by reads of this transport, or both, according to `use`.

        The memory stays registered until `aclose`. `keepalive` is the object that owns the memory; the transport
        references that object until no read can touch the memory.
        """

    async def metadata(self) -> bytes:
        """Return the metadata that a reader passes to `add_peer`. It describes the agent and the registered memory."""

    async def add_peer(self, metadata: bytes) -> AgentName:
        """Add the peer that `metadata` describes and return its name. Raises TransportError for bad metadata."""

    async def remove_peer(self, name: AgentName) -> None:
        """Remove a peer. Illegal while a read from the peer is under way."""

    def post_read(self, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        """Start a read and return at once. A `ReadEnded` event follows even if the read cannot start.

        Reads may be performed in any order, and so may the copies within one read.
        """

    def notify(self, peer: AgentName, payload: bytes, join: Join | None = None) -> None:
        """Send `payload` to a peer and return at once. Delivery is best effort: failures are counted, not raised.

        If several payloads with the same `join` wait to be sent to one peer, the transport may send the payloads that
        `join` returns for them instead. `join` may be called on any thread.
        """

    async def run(self, deliver: Callable[[Event], None]) -> None:
        """Call `deliver` on the loop with every event, until cancelled. Only one `run` may be active at a time.

        Raises TransportBroken when no further event can come. Events that occur while no `run` is active are kept for
        the next.
        """

    async def aclose(self, timeout_s: float) -> None:
        """Deregister the memory and shut down. Closing twice is fine.

        Nothing is torn down while a read is under way. If reads do not stop within `timeout_s`, raise TransportError;
        the transport keeps itself and the memory alive until the reads have stopped, and then shuts down.
        """

    def abandon(self, wait_s: float) -> None:
        """Shut down without the event loop, which no longer runs, as soon as no read is under way.

        Wait up to `wait_s` for that. May be called on any thread.
        """

    @property
    def behind(self) -> bool:
        """True if more posted reads wait to start than can start in the next milliseconds.

        Then post no further reads: these would only wait, and preparing them takes the GIL from other threads.
        """

    @property
    def statistics(self) -> TransportStatistics: ...
