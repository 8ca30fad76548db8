"""Transport: the protocol between the runtime and the library that moves the bytes.

A transport owns one agent, or several that act as one. A posted read cannot be cancelled: it ends with exactly one
event, unless the transport itself dies.
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
"""Whether NIXL can usually read memory of a device, keyed by the kind of device. A kind without a key counts as False.

This is only a default: the method `reaches` of the transport in use decides.
"""
BY_SOME_BUILDS = ("xpu",)
"""Kinds of devices with memory that only some builds of NIXL can read.

If a peer has registered memory of such a kind, the peer has such a build. The peer's readers can have any build.
"""
_WITHOUT_MEMORY = "meta"


def usually_reached(device: str) -> bool:
    """Return whether NIXL can usually read memory of the device kind `device` (`DEVICES`)."""
    return DEVICES.get(device, False)


def is_staged(device: str, staging: str, reached: bool | None = None) -> bool:
    """Return whether a cache on the device kind `device` is staged: peers read copies of its blocks in host buffers.

    `staging`: Config.staging. `reached`: whether the transport can read memory of this kind; None: as in `DEVICES`.

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
    """How registered memory may be used.

    Each use needs a registration, which costs time and, on some devices, address space.
    """

    SERVED = enum.auto()
    """Memory that peers read."""
    READ_INTO = enum.auto()
    """Memory that local reads write to."""


class TransportError(KVFlowError):
    """A call of the transport failed. The runtime translates this to an error that names the request and the peer."""


class PeerGone(TransportError):
    """The peer, or the connection to the peer, is dead. To read from the peer again, remove it and add it again."""


@dataclass(slots=True, eq=False)
class PostedRead:
    """A read that was posted to the transport."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Event of the transport: a posted read has ended, so no further byte can land.

    `error`: None if all bytes landed.
    """

    read: PostedRead
    error: TransportError | None
    post_s: float
    """Seconds spent in the call that posted the read. Over shared memory that call copies the bytes."""


@dataclass(frozen=True, slots=True)
class Notified:
    """Event of the transport: a notification has arrived.

    Any agent can send a notification. The secret lease id in `payload` shows that the sender is a reader of that lease.
    """

    payload: bytes


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Event: the transport is no longer `behind`, because it has started posted reads.

    It comes before the bytes of these reads have landed, so that further reads can be prepared meanwhile.
    """


Event: TypeAlias = ReadEnded | Notified | CaughtUp


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStatistics:
    """Counts of a transport since the call of `Transport.open`.

    The fields `open_*` instead have the number of reads, peers, spans or threads now, which is 0 after `aclose`.
    """

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
    """Number of tcp listeners that the library has closed on its own, so that no new peer can connect to them."""
    mapped_peers: int = 0
    """Number of peers with device memory that is mapped into this process; 0 after `aclose`."""
    mapping_problem: str = ""
    """Why device memory of this rank, or of a peer on this machine, was not mapped, at last; "" if none was refused."""
    unreachable: bool = False
    """True if no new peer can connect: the library has closed all tcp listeners of the agent that peers read from."""


Join: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Function that takes several notification payloads for one peer, and returns fewer payloads with the same content."""


class Transport(Protocol):
    """The agents of one registered cache. The agents read the memory of peers and send notifications.

    Call all methods but `abandon` on the event loop that called `open`.
    """

    async def open(self) -> None:
        """Start the agent. Raises ConfigError if it cannot start as configured."""

    def reaches(self, device: str) -> bool:
        """Return whether the transport can read memory of the device kind `device`.

        If not, a cache on a device of this kind must be staged.
        """

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        """Register the address ranges `spans` on `device`.

        `use`: whether peers read this memory, local reads write to the memory, or both. The memory stays registered
        until `aclose`. The transport references `keepalive`, the owner of the memory, until no read can touch the
        memory.
        """

    async def metadata(self) -> bytes:
        """Return the bytes that describe this agent and its registered memory, for the `add_peer` of readers."""

    async def device_memory(self) -> bytes:
        """Return the bytes by which readers on this machine can map registered device memory, for their `add_peer`.

        b"" if they cannot, or need not.
        """

    async def add_peer(self, metadata: bytes, device_memory: bytes = b"") -> AgentName:
        """Add the peer that `metadata` describes and return its agent name. Raises TransportError for bad metadata.

        `device_memory`: what the peer's `device_memory` returned. If it cannot be used, the peer is added without.
        """

    async def remove_peer(self, name: AgentName) -> None:
        """Remove a peer. The call is illegal while a read from the peer is under way."""

    def post_read(self, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        """Start to read from `peer` what `descriptors` describe, and return immediately.

        A `ReadEnded` event follows, even if the read cannot start. Reads, and the copies within a read, may be
        performed in any order; but a read of host memory comes after earlier reads of mapped device memory.
        """

    def notify(self, peer: AgentName, payload: bytes, join: Join | None = None) -> None:
        """Send `payload` to a peer and return immediately. Delivery is best effort: failures are counted, not raised.

        Payloads with the same `join` that wait for one peer may be passed to `join`, on any thread, and replaced by the
        result of `join`.
        """

    def expect_notifications(self) -> None:
        """Note that a reader may soon send a notification. A transport that polls for notifications polls more often.

        The call returns immediately and wakes no thread.
        """

    async def run(self, deliver: Callable[[Event], None]) -> None:
        """Call `deliver` on the loop with every event, until cancelled. Only one `run` may be active at a time.

        Events that occur while no `run` is active are kept. Raises TransportBroken when no further event can come.
        """

    async def aclose(self, timeout_s: float) -> None:
        """Deregister the memory and shut down, once no read is under way. Closing twice is fine.

        If reads do not stop within `timeout_s`, raise TransportError; the transport shuts down once they have stopped,
        and keeps itself and the memory alive until then.
        """

    def abandon(self, wait_s: float) -> None:
        """Shut down as soon as no read is under way; wait up to `wait_s` for that.

        For use after the event loop has ended, on any thread.
        """

    @property
    def behind(self) -> bool:
        """True if many posted reads have not started yet: more than can start within the next milliseconds.

        The caller should then post no further reads: preparing them takes the GIL from other threads. A transport that
        starts reads on a thread of its own reports with a `CaughtUp` event that this is over.
        """

    @property
    def statistics(self) -> TransportStatistics: ...
