"""A transport inside one process: memcpy between the agents of one network, with scripted faults.

It behaves like NIXL where that matters: a posted read cannot be cancelled, and its bytes land even if its load has
ended meanwhile. Faults are named settings (`InprocFaults`), not sleeps: a test steps the transport.

Copies run on the event loop, so this transport is for tests and small caches.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Protocol, TypeAlias

import numpy as np

from kvflow.checks import counted
from kvflow.core.cache.regions import Device, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import TransportBroken
from kvflow.transport.base import (
    AgentName,
    Event,
    Join,
    MemoryUse,
    Notified,
    PeerGone,
    PostedRead,
    ReadEnded,
    TransportError,
    TransportStatistics,
    usually_reached,
)

Row: TypeAlias = tuple[int, int, int]
_SIZE_OF_ROW = itemgetter(2)


class InprocNetwork:
    """A set of in-process agents that can reach each other, by agent name."""

    def __init__(self) -> None:
        self.agents: dict[AgentName, InprocTransport] = {}
        self.leaves_memory = False
        """True if peers can still read the memory of a closed agent, as with shared memory. No load may succeed with
        bytes that were read after the agent was closed."""
        self.closed: dict[AgentName, InprocTransport] = {}
        """Closed agents with memory that can still be read, by name; filled only if `leaves_memory`."""


DEFAULT_NETWORK = InprocNetwork()


@dataclass(slots=True, eq=False)
class InprocRead(PostedRead):
    """A read posted to an `InprocTransport`: the name of the peer, and the address ranges to copy."""

    peer: AgentName
    descriptors: Descriptors

    def rows(self) -> list[Row]:
        """Return the ranges to copy, each as (local address, remote address, size in bytes)."""
        local, remote = self.descriptors.table
        return list(zip(local[:, 0].tolist(), remote[:, 0].tolist(), local[:, 1].tolist(), strict=True))


def flip_byte(address: int) -> None:
    """Invert all bits of the byte at `address` in this process."""
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 0xFF


class InprocFaults:
    """Scripted faults of the reads and notifications of one agent. By default there are none."""

    def __init__(self) -> None:
        self.hold = False
        """True: posted reads wait in `InprocTransport.held` until `InprocTransport.perform` is called."""
        self.fail_next: deque[TransportError] = deque()
        """Errors for the next reads, one per read. These reads fail without copying any byte."""
        self.flip_next = 0
        """Number of reads, beginning with the next, that land with all bits of one byte inverted: the last byte of the
        last of their largest ranges."""
        self.behind = False
        """Value that the property `InprocTransport.behind` returns."""
        self.never_finish = False
        """True: the bytes of this agent's reads land, but the end of the reads is never reported."""
        self.drop_notifications = False
        self.duplicate_notifications = False
        self.cut = False
        """True: other agents cannot reach this agent. Their reads from it fail with PeerGone, their notifications are
        lost."""


class SimulatedLink(Protocol):
    """Interface of a simulated network for one agent. It decides when reads are performed and notifications arrive."""

    def take_read(self, reader: InprocTransport, read: InprocRead) -> None:
        """Take over `read`, which `reader` has posted, and perform it now or at any later time.

        To perform it, call `reader.refusal(read)`, then `reader.copy` with some or all of the read's rows, then
        `reader.end` exactly once.
        """

    def send(self, target: InprocTransport, payload: bytes) -> None:
        """Take over a notification for `target`. Call `target.deliver(payload)` now, later, several times, or never."""

    def report(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop, now or later. `callback` reports an event of this agent to the runtime."""

    async def wait_for_reads(self, reader: InprocTransport) -> None:
        """Wait until every read that `reader` has posted has ended."""


class InprocTransport:
    """A transport within one process, which implements `transport.base.Transport` by copying memory.

    Args:
        name: Name of the agent, unique on its network.
        network: The agents that this agent can reach.
        link: Decides when reads are performed and notifications arrive. None: both happen in the next turn of the loop.
    """

    def __init__(
        self, name: str, network: InprocNetwork = DEFAULT_NETWORK, *, link: SimulatedLink | None = None
    ) -> None:
        self.name = AgentName(name)
        self.faults = InprocFaults()
        self.held: deque[InprocRead] = deque()
        self._network = network
        self._link = link
        self._served: list[Span] = []
        self._read_into: list[Span] = []
        self._keepalive: list[object] = []
        self._left_memory: tuple[list[Span], list[object]] = ([], [])
        """Memory that peers can read after this agent is closed (`InprocNetwork.leaves_memory`), and its owners."""
        self._peers: set[AgentName] = set()
        self._reads: dict[InprocRead, None] = {}
        self._counts = {"reads": 0, "failed": 0, "bytes": 0, "sent": 0, "received": 0, "unsent": 0}
        self._open = False
        self._deliver: Callable[[Event], None] | None = None
        self._undelivered: deque[Event] = deque()
        """Events that occurred while no `run` was active, oldest first. The next `run` delivers them."""

    async def open(self) -> None:
        """Add this agent to its network.

        Raises:
            TransportError: The network has an agent of this name.
        """
        if self.name in self._network.agents:
            raise TransportError(f"agent name {self.name!r} is taken")
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._network.agents[self.name] = self
        self._open = True

    def reaches(self, device: str) -> bool:
        """Return whether NIXL would usually be able to read memory of the device kind `device`.

        Args:
            device: The kind of device.

        Returns:
            The answer for NIXL, so that a test stages a cache exactly if the cache would be staged with NIXL. This
            transport itself reads only memory of the CPU.
        """
        return usually_reached(device)

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        """Register memory to be read by peers, written by this agent's reads, or both.

        Args:
            spans: Addresses and sizes in bytes, in this process.
            device: Device of the memory; only the CPU is supported.
            keepalive: Owner of the memory, kept until the transport is closed.
            use: Read by peers, written by local reads, or both.

        Raises:
            TransportError: The device is not the CPU.
            TransportBroken: The transport is not open.
        """
        self._require_open()
        if device.kind != "cpu":
            raise TransportError(f"the in-process transport cannot reach device {device.kind!r}")
        self._served.extend(spans if MemoryUse.SERVED in use else ())
        self._read_into.extend(spans if MemoryUse.READ_INTO in use else ())
        self._keepalive.append(keepalive)

    async def metadata(self) -> bytes:
        """Return the metadata that a reader passes to `add_peer`.

        Returns:
            JSON with the name of the agent.

        Raises:
            TransportBroken: The transport is not open.
        """
        self._require_open()
        return json.dumps({"name": self.name}).encode()

    async def device_memory(self) -> bytes:
        """Return no bytes: in one process nothing is mapped.

        Returns:
            b"".
        """
        return b""

    async def add_peer(self, metadata: bytes, device_memory: bytes = b"") -> AgentName:
        """Add the peer that `metadata` describes, so that this agent can read from it and notify it.

        Args:
            metadata: The result of the peer's own `metadata`.
            device_memory: Ignored.

        Returns:
            The peer's agent name, for reads and notifications.

        Raises:
            TransportError: `metadata` does not come from an in-process agent.
            PeerGone: The agent is not on the network.
            TransportBroken: The transport is not open.
        """
        self._require_open()
        try:
            name = AgentName(json.loads(metadata)["name"])
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"not the metadata of an in-process agent: {metadata[:40]!r}") from error
        if name not in self._network.agents:
            raise PeerGone(f"agent {name!r} is not on this network")
        self._peers.add(name)
        return name

    async def remove_peer(self, name: AgentName) -> None:
        """Remove a peer that was added with `add_peer`.

        Args:
            name: The result of `add_peer`. No effect if there is no peer of this name.

        Raises:
            AssertionError: A read from the peer is under way.
            TransportBroken: The transport is not open.
        """
        self._require_open()
        assert not any(read.peer == name for read in self._reads), f"{name!r} is removed under a running read"
        self._peers.discard(name)

    def post_read(self, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        """Start a read and return immediately; a `ReadEnded` event reports its end.

        Args:
            peer: Name of the peer to read from.
            descriptors: Local and remote ranges, in bytes; checked when the read is performed.

        Returns:
            The read, which its `ReadEnded` event names. With `InprocFaults.hold` it waits until `perform`.

        Raises:
            TransportBroken: The transport is not open.
        """
        if not self._open:
            self._require_open()
        read = InprocRead(descriptors.size_bytes, peer, descriptors)
        self._counts["reads"] += 1
        self._reads[read] = None
        if self._link is not None:
            self._link.take_read(self, read)
            return read
        self.held.append(read)
        if not self.faults.hold:
            self._loop.call_soon(self.perform)
        return read

    def perform(self, count: int | None = None) -> int:
        """Perform reads that wait in `held`, oldest first: copy their bytes and report their end.

        Args:
            count: Maximum number of reads to perform; None for all.

        Returns:
            Number of performed reads, including failed ones.
        """
        todo = len(self.held) if count is None else min(count, len(self.held))
        for _ in range(todo):
            read = self.held.popleft()
            error = self.refusal(read)
            if error is None:
                rows = read.rows()
                self.copy(rows)
                if self.faults.flip_next:
                    self.faults.flip_next -= 1
                    local, _, size = max(reversed(rows), key=_SIZE_OF_ROW)  # not a seal
                    flip_byte(local + size - 1)
                if self.faults.never_finish:
                    continue
            self._report(ReadEnded(read, error, 0.0))
        return todo

    def end(self, read: InprocRead, error: TransportError | None) -> None:
        """Report the end of a read that this agent's `SimulatedLink` has performed. No byte may land after this call.

        Args:
            read: The read.
            error: Why the read failed; None if all bytes have landed.
        """
        assert self._link is not None, "it says so"
        self._link.report(partial(self._report, ReadEnded(read, error, 0.0)))

    def notify(self, peer: AgentName, payload: bytes, join: Join | None = None) -> None:
        """Send a notification and return immediately. If the peer is gone, cut off or not added, count a failure.

        Args:
            peer: Name of the peer.
            payload: Content of the notification.
            join: Ignored: notifications are sent one by one.

        Raises:
            TransportBroken: The transport is not open.
        """
        if not self._open:
            self._require_open()
        target = self._network.agents.get(peer)
        if target is None or target.faults.cut or peer not in self._peers:
            self._counts["unsent"] += 1
            return
        self._counts["sent"] += 1
        if self._link is not None:
            self._link.send(target, payload)
            return
        if self.faults.drop_notifications:
            return
        for _ in range(2 if self.faults.duplicate_notifications else 1):
            target.deliver(payload)

    def deliver(self, payload: bytes) -> None:
        """Report to this agent's runtime that a notification has arrived. May be called on any thread.

        Args:
            payload: Content of the notification.
        """
        tell = partial(self._report, Notified(payload))
        if self._link is not None:
            self._link.report(tell)
        else:
            self._loop.call_soon_threadsafe(tell)  # the peer may be an agent on another thread's loop

    def expect_notifications(self) -> None:
        """Do nothing: notifications are delivered when they are sent."""

    @property
    def behind(self) -> bool:
        return self.faults.behind

    async def run(self, deliver: Callable[[Event], None]) -> None:
        """Call `deliver` on the loop for every event, until cancelled. Events that occurred before the call come first.

        Args:
            deliver: Function that takes an event.

        Raises:
            TransportBroken: The transport was closed or died, or `deliver` raised.
        """
        self._deliver = deliver
        try:
            while self._undelivered:
                self._report(self._undelivered.popleft())
            await asyncio.shield(self._ended)
        finally:
            self._deliver = None

    def die(self, cause: BaseException) -> None:
        """Simulate the death of this transport: `run` raises, peers cannot reach it, and no further event is reported.

        Args:
            cause: The cause of the TransportBroken that `run` raises.
        """
        self._network.agents.pop(self.name, None)
        self._fail(cause)

    def _report(self, event: Event) -> None:
        """Pass an event to the `deliver` function of `run` or, if no `run` is active, keep it for the next.

        Call this on the loop.
        """
        if self._deliver is None or self._ended.done():
            self._undelivered.append(event)
            return
        if isinstance(event, Notified):
            self._counts["received"] += 1
        elif isinstance(event, ReadEnded) and isinstance(event.read, InprocRead):
            self._reads.pop(event.read, None)
            self._counts["failed" if event.error else "bytes"] += 1 if event.error else event.read.size_bytes
        try:
            self._deliver(event)
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)

    def _fail(self, cause: BaseException) -> None:
        if not self._ended.done():
            error = TransportBroken(f"the transport ended: {cause}")
            error.__cause__ = cause
            self._ended.set_exception(error)
            self._ended.exception()  # retrieved here, since `run` may not be running

    async def aclose(self, timeout_s: float) -> None:
        """Leave the network and release the memory. Closing twice is fine.

        Args:
            timeout_s: Seconds to wait for the reads that a `SimulatedLink` performs. Reads held by `InprocFaults.hold`
                are not waited for, since only a test ends them.

        Raises:
            TransportError: Reads are still under way; the memory stays registered.
        """
        if not self._open and not self._reads:
            return
        self._open = False
        under_way = len(self.held)
        if self._link is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._link.wait_for_reads(self)
            except TimeoutError:
                under_way = len(self._reads)
        self._network.agents.pop(self.name, None)
        self._fail(TransportBroken("the transport was closed"))
        if under_way:
            raise TransportError(f"not stopped: {counted(under_way, 'read')}; the memory stays until then")
        if self._network.leaves_memory:
            self._left_memory = (list(self._served), list(self._keepalive))
            self._network.closed[self.name] = self
        self._reads.clear()
        self._peers.clear()
        self._served.clear()
        self._read_into.clear()
        self._keepalive.clear()

    def abandon(self, wait_s: float) -> None:
        """Leave the network and release the memory immediately. For use after the event loop has ended.

        Args:
            wait_s: Ignored, since this call never waits.
        """
        self._network.agents.pop(self.name, None)
        self._open = False
        for held in (self._reads, self._peers, self._served, self._read_into, self._keepalive):
            held.clear()

    @property
    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            open_reads=len(self._reads),
            open_peers=len(self._peers),
            open_spans=len({*self._served, *self._read_into}),
            open_threads=0,
            reads=self._counts["reads"],
            reads_failed=self._counts["failed"],
            bytes_read=self._counts["bytes"],
            notifications_sent=self._counts["sent"],
            notifications_received=self._counts["received"],
            notifications_failed=self._counts["unsent"],
        )

    def refusal(self, read: InprocRead) -> TransportError | None:
        """Return the error with which a read must fail, or None if the read can be performed.

        Args:
            read: A read that was posted on this transport.

        Returns:
            PeerGone if the peer is gone; else the next error in `InprocFaults.fail_next`, removed from there; else an
            error if a range is not registered; else None.
        """
        target = self._network.agents.get(read.peer) or self._network.closed.get(read.peer)
        if target is None or target.faults.cut or read.peer not in self._peers:
            return PeerGone(f"agent {read.peer!r} is gone")
        if self.faults.fail_next:
            return self.faults.fail_next.popleft()
        local, remote = read.descriptors.table
        sides = ("local", local, self._read_into), ("remote", remote, target._served or target._left_memory[0])
        for side, rows, spans in sides:  # every range must lie within one span
            starts, ends, inside = rows[:, 0], rows[:, 0] + local[:, 1], np.zeros(len(rows), dtype=np.bool_)
            for span in spans:
                inside |= (starts >= np.uint64(span.address)) & (ends <= np.uint64(span.address + span.size_bytes))
            if not inside.all():
                return TransportError(f"a {side} range is not registered")
        return None

    @staticmethod
    def copy(rows: Iterable[Row]) -> None:
        """Copy address ranges of a read from the peer's memory to local memory.

        Args:
            rows: (local address, remote address, size in bytes) of each range.
        """
        for local, remote, size in rows:
            ctypes.memmove(local, remote, size)

    def _require_open(self) -> None:
        if not self._open:
            raise TransportBroken("the transport is not open")
