"""A transport inside one process: memcpy between agents of one network, with faults to script.

It behaves like the real one where it matters. A posted read cannot be taken back: its bytes land when it is performed,
whatever has happened to the load meanwhile. Ranges are checked at the initiator against what was registered. Faults
are named tools (`InprocFaults`), not sleeps: a test steps the transport.

Copies run on the event loop, so this is for tests and small caches.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
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


class InprocNetwork:
    """Agents that can reach each other."""

    def __init__(self) -> None:
        self.agents: dict[AgentName, InprocTransport] = {}
        self.leaves_memory = False
        """True if memory of a closed agent can still be read by whoever knows it, as over shared memory, where
        nothing but its addresses is needed. Whatever it holds then, nobody may take it for good."""
        self.closed: dict[AgentName, InprocTransport] = {}
        """Agents that were closed, whose memory can still be read."""


DEFAULT_NETWORK = InprocNetwork()


@dataclass(slots=True, eq=False)
class InprocRead(PostedRead):
    """A read that has been posted and not performed yet."""

    peer: AgentName
    descriptors: Descriptors

    def rows(self) -> list[Row]:
        """Pieces of the read: local address, remote address, size in bytes."""
        ours, theirs = self.descriptors.table
        return list(zip(ours[:, 0].tolist(), theirs[:, 0].tolist(), ours[:, 1].tolist(), strict=True))


def flip(address: int) -> None:
    """Invert a byte of this process's memory."""
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 0xFF


class InprocFaults:
    """Faults of one agent's reads and notifications; the defaults are a perfect network."""

    def __init__(self) -> None:
        self.hold = False
        """Posted reads wait for `InprocTransport.perform`."""
        self.fail_next: deque[TransportError] = deque()
        """Errors for the next reads that are performed; their bytes do not land."""
        self.flip_next = 0
        """Number of the next reads that land with a byte flipped, the last one."""
        self.behind = False
        """True to report that reads wait to be started."""
        self.never_finish = False
        """Bytes land, but the end of the read is never reported."""
        self.drop_notifications = False
        self.duplicate_notifications = False
        self.cut = False
        """The agent is unreachable for others: their reads from it fail with PeerGone."""


class Carrier(Protocol):
    """Carrier of one agent's bytes: it decides when reads land and notifications arrive; else they do at once."""

    def carry(self, reader: InprocTransport, read: InprocRead) -> None:
        """Perform a posted read some time: `InprocTransport.refusal`, `copy` in any portions, and `end` once."""

    def send(self, target: InprocTransport, payload: bytes) -> None:
        """Let a notification arrive by `InprocTransport.deliver`: some time, several times, or never."""

    def wake(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop, when the agent gets round to telling that something has happened."""

    async def landed(self, reader: InprocTransport) -> None:
        """Wait until no read of the agent is under way."""


class InprocTransport:
    """A transport within one process: see `transport.base.Transport`.

    Args:
        name: The agent's, which no other one on its network has.
        network: Whom it reaches.
        carrier: When what is posted is performed; None is in the next turn of the loop.
    """

    def __init__(self, name: str, network: InprocNetwork = DEFAULT_NETWORK, *, carrier: Carrier | None = None) -> None:
        self.name = AgentName(name)
        self.faults = InprocFaults()
        self.held: deque[InprocRead] = deque()
        self._network = network
        self._carrier = carrier
        self._served: list[Span] = []
        self._read_into: list[Span] = []
        self._keepalive: list[object] = []
        self._left: tuple[list[Span], list[object]] = ([], [])
        """Memory that can be read after the agent's end: `InprocNetwork.leaves_memory`."""
        self._peers: set[AgentName] = set()
        self._reads: dict[InprocRead, None] = {}
        self._counts = {"reads": 0, "failed": 0, "bytes": 0, "sent": 0, "received": 0, "unsent": 0}
        self._open = False
        self._deliver: Callable[[Event], None] | None = None
        self._kept: deque[Event] = deque()
        """Events that came while nobody took any."""

    async def open(self) -> None:
        """Join the network.

        Raises:
            TransportError: An agent of that name is on it.
        """
        if self.name in self._network.agents:
            raise TransportError(f"agent name {self.name!r} is taken")
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._network.agents[self.name] = self
        self._open = True

    def reaches(self, device: str) -> bool:
        """Return whether reads reach memory of this kind of device.

        Args:
            device: The kind.

        Returns:
            What NIXL's answer would be, so that tests stage what engines stage.
        """
        return usually_reached(device)

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        """Let memory be read by peers, written by reads, or both.

        Args:
            spans: Addresses and sizes in bytes, of this process.
            device: Where they are; the CPU's memory only.
            keepalive: Owns the memory; held until the transport is closed.
            use: Which of the two.

        Raises:
            TransportError: The device is another one.
            TransportBroken: The transport is not open.
        """
        self._require_open()
        if device.kind != "cpu":
            raise TransportError(f"the in-process transport cannot reach device {device.kind!r}")
        self._served.extend(spans if MemoryUse.SERVED in use else ())
        self._read_into.extend(spans if MemoryUse.READ_INTO in use else ())
        self._keepalive.append(keepalive)

    async def metadata(self) -> bytes:
        """Metadata by which a reader adds this agent as a peer.

        Returns:
            JSON with its name.

        Raises:
            TransportBroken: The transport is not open.
        """
        self._require_open()
        return json.dumps({"name": self.name}).encode()

    async def add_peer(self, metadata: bytes) -> AgentName:
        """Learn a peer.

        Args:
            metadata: As the peer's own `metadata` gave it.

        Returns:
            The peer's name, for reads and notifications.

        Raises:
            TransportError: It is not the metadata of an in-process agent.
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
        """Forget a peer.

        Args:
            name: As `add_peer` gave it; one that is not known is fine.

        Raises:
            AssertionError: A read from it is under way.
            TransportBroken: The transport is not open.
        """
        self._require_open()
        assert not any(read.peer == name for read in self._reads), f"{name!r} is removed under a running read"
        self._peers.discard(name)

    def post_read(self, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        """Start to read; an event tells the end.

        Args:
            peer: Whom to read from.
            descriptors: Local and remote ranges, in bytes; judged when the read is performed.

        Returns:
            The read, which its `ReadEnded` names. With `InprocFaults.hold` it is in `held` until `perform`.

        Raises:
            TransportBroken: The transport is not open.
        """
        if not self._open:
            self._require_open()
        read = InprocRead(descriptors.size_bytes, peer, descriptors)
        self._counts["reads"] += 1
        self._reads[read] = None
        if self._carrier is not None:
            self._carrier.carry(self, read)
            return read
        self.held.append(read)
        if not self.faults.hold:
            self._loop.call_soon(self.perform)
        return read

    def perform(self, count: int | None = None) -> int:
        """Perform waiting reads, oldest first.

        Args:
            count: How many at most; None for all.

        Returns:
            How many were performed, those included that have failed.
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
                    flip(rows[-1][0] + rows[-1][2] - 1)
                if self.faults.never_finish:
                    continue
            self._tell(ReadEnded(read, error, 0.0))
        return todo

    def end(self, read: InprocRead, error: TransportError | None) -> None:
        """End a read that a carrier has: it is stopped for good.

        Args:
            read: As the carrier got it.
            error: Why it has failed; None if all bytes have landed.
        """
        assert self._carrier is not None, "it says so"
        self._carrier.wake(partial(self._tell, ReadEnded(read, error, 0.0)))

    def notify(self, peer: AgentName, payload: bytes, join: Join | None = None) -> None:
        """Send a notification; returns at once. One to a peer that is gone, cut off or not added is counted as failed.

        Args:
            peer: To whom.
            payload: What arrives there.
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
        if self._carrier is not None:
            self._carrier.send(target, payload)
            return
        if self.faults.drop_notifications:
            return
        for _ in range(2 if self.faults.duplicate_notifications else 1):
            target.deliver(payload)

    def deliver(self, payload: bytes) -> None:
        """Let a notification arrive here, as if a peer had sent it; from any thread.

        Args:
            payload: What arrives.
        """
        tell = partial(self._tell, Notified(payload))
        if self._carrier is not None:
            self._carrier.wake(tell)
        else:
            self._loop.call_soon_threadsafe(tell)  # the peer may be an agent on another thread's loop

    @property
    def behind(self) -> bool:
        return self.faults.behind

    async def run(self, deliver: Callable[[Event], None]) -> None:
        """Hand out events, those first that were kept while nobody took any, until cancelled.

        Args:
            deliver: Called on the loop with each.

        Raises:
            TransportBroken: The transport was closed or has died, or `deliver` has raised.
        """
        self._deliver = deliver
        try:
            while self._kept:
                self._tell(self._kept.popleft())
            await asyncio.shield(self._over)
        finally:
            self._deliver = None

    def die(self, cause: BaseException) -> None:
        """Fault: the transport itself breaks; nothing more is performed or reported.

        Args:
            cause: What has broken it, as the TransportBroken that `run` raises says.
        """
        self._network.agents.pop(self.name, None)
        self._fail(cause)

    def _tell(self, event: Event) -> None:
        """Give an event to whoever takes them, on the loop."""
        if self._deliver is None or self._over.done():
            self._kept.append(event)
            return
        if isinstance(event, Notified):
            self._counts["received"] += 1
        elif isinstance(event.read, InprocRead):
            self._reads.pop(event.read, None)
            self._counts["failed" if event.error else "bytes"] += 1 if event.error else event.read.size_bytes
        try:
            self._deliver(event)
        except BaseException as error:  # noqa: BLE001 - whoever takes events is broken; its task gets to know
            self._fail(error)

    def _fail(self, cause: BaseException) -> None:
        if not self._over.done():
            error = TransportBroken(f"the transport ended: {cause}")
            error.__cause__ = cause
            self._over.set_exception(error)
            self._over.exception()  # seen: there may be nobody who takes events

    async def aclose(self, timeout_s: float) -> None:
        """Leave the network and let go of the memory. Closing twice is fine.

        Args:
            timeout_s: How long a carrier's reads are waited for. Held reads are not: only a test can end them.

        Raises:
            TransportError: Reads are under way; the memory stays registered.
        """
        if not self._open and not self._reads:
            return
        self._open = False
        under_way = len(self.held)
        if self._carrier is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._carrier.landed(self)
            except TimeoutError:
                under_way = len(self._reads)
        self._network.agents.pop(self.name, None)
        self._fail(TransportBroken("the transport was closed"))
        if under_way:
            raise TransportError(f"not stopped: {counted(under_way, 'read')}; the memory stays until then")
        if self._network.leaves_memory:
            self._left = (list(self._served), list(self._keepalive))
            self._network.closed[self.name] = self
        self._reads.clear()
        self._peers.clear()
        self._served.clear()
        self._read_into.clear()
        self._keepalive.clear()

    def abandon(self, wait_s: float) -> None:
        """Leave the network and let go of the memory at once, without the loop.

        Args:
            wait_s: Ignored: nothing is waited for.
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
        """Error of a read that cannot be performed; None if it can. An error of `InprocFaults.fail_next` is used up.

        Args:
            read: One that was posted here.

        Returns:
            PeerGone, the next scripted error, or that a range is not registered; None if it can be performed.
        """
        target = self._network.agents.get(read.peer) or self._network.closed.get(read.peer)
        if target is None or target.faults.cut or read.peer not in self._peers:
            return PeerGone(f"agent {read.peer!r} is gone")
        if self.faults.fail_next:
            return self.faults.fail_next.popleft()
        ours, theirs = read.descriptors.table
        sides = ("local", ours, self._read_into), ("remote", theirs, target._served or target._left[0])
        for side, rows, spans in sides:  # every range lies in one of the spans
            starts, ends, inside = rows[:, 0], rows[:, 0] + ours[:, 1], np.zeros(len(rows), dtype=np.bool_)
            for span in spans:
                inside |= (starts >= np.uint64(span.address)) & (ends <= np.uint64(span.address + span.size_bytes))
            if not inside.all():
                return TransportError(f"a {side} range is not registered")
        return None

    @staticmethod
    def copy(rows: Iterable[Row]) -> None:
        """Copy the bytes of a read, or of a part of it.

        Args:
            rows: Local address, remote address, size in bytes; from remote to local.
        """
        for local, remote, size in rows:
            ctypes.memmove(local, remote, size)

    def _require_open(self) -> None:
        if not self._open:
            raise TransportBroken("the transport is not open")
