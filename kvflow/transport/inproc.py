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
from typing import Protocol, TypeAlias

import numpy as np

from kvflow.core.cache.regions import Device, Span, UInt64Array
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import TransportBroken
from kvflow.transport.base import (
    AgentName,
    Event,
    Notified,
    PeerGone,
    PostedRead,
    ReadEnded,
    TransportError,
    TransportStatistics,
)
from kvflow.transport.nixl.mailbox import Mailbox

Row: TypeAlias = tuple[int, int, int]


class InprocNetwork:
    """The agents that can reach each other."""

    def __init__(self) -> None:
        self.agents: dict[AgentName, InprocTransport] = {}


DEFAULT_NETWORK = InprocNetwork()


class InprocRead(PostedRead):
    """A read that has been posted and not performed yet."""

    __slots__ = ("descriptors", "peer")

    def __init__(self, peer: AgentName, descriptors: Descriptors) -> None:
        super().__init__(descriptors.size_bytes)
        self.peer = peer
        self.descriptors = descriptors

    def rows(self) -> list[Row]:
        """Its pieces: local address, remote address, size in bytes."""
        descriptors = self.descriptors
        columns = (descriptors.local.tolist(), descriptors.remote.tolist(), descriptors.sizes.tolist())
        return list(zip(*columns, strict=True))


class InprocFaults:
    """What goes wrong, for one agent's reads and notifications; the defaults are a perfect network."""

    def __init__(self) -> None:
        self.hold = False
        """Posted reads wait for `InprocTransport.perform`."""
        self.fail_next: deque[TransportError] = deque()
        """Errors for the next reads that are performed; their bytes do not land."""
        self.never_finish = False
        """Bytes land, but the end of the read is never reported."""
        self.drop_notifications = False
        self.duplicate_notifications = False
        self.cut = False
        """The agent is unreachable for others: their reads from it fail with PeerGone."""


class Carrier(Protocol):
    """How the bytes of one agent travel, instead of at once: when its reads land and its notifications arrive."""

    def carry(self, reader: InprocTransport, read: InprocRead) -> None:
        """Perform a posted read some time: `InprocTransport.refusal`, `copy` in any portions, and `end` once."""

    def send(self, target: InprocTransport, payload: bytes) -> None:
        """Let a notification arrive by `InprocTransport.deliver`: some time, several times, or never."""

    def wake(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the loop, when the agent gets round to telling that something has happened."""

    async def landed(self, reader: InprocTransport) -> None:
        """Wait until no read of the agent is under way."""


class InprocTransport:
    """See `transport.base.Transport`. Without a `carrier` what is posted is performed in the next turn of the loop."""

    def __init__(self, name: str, network: InprocNetwork = DEFAULT_NETWORK, *, carrier: Carrier | None = None) -> None:
        self.name = AgentName(name)
        self.faults = InprocFaults()
        self.held: deque[InprocRead] = deque()
        self._network = network
        self._carrier = carrier
        self._spans: list[Span] = []
        self._keepalive: list[object] = []
        self._peers: set[AgentName] = set()
        self._reads: dict[InprocRead, None] = {}
        self._counts = {"reads": 0, "failed": 0, "bytes": 0, "sent": 0, "received": 0, "unsent": 0}
        self._open = False

    async def open(self) -> None:
        if self.name in self._network.agents:
            raise TransportError(f"agent name {self.name!r} is taken")
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(self._on_loop)
        self._network.agents[self.name] = self
        self._open = True

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object) -> None:
        self._require_open()
        if device.kind != "cpu":
            raise TransportError(f"the in-process transport cannot reach device {device.kind!r}")
        self._spans.extend(spans)
        self._keepalive.append(keepalive)

    async def metadata(self) -> bytes:
        self._require_open()
        return json.dumps({"name": self.name}).encode()

    async def add_peer(self, metadata: bytes) -> AgentName:
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
        self._require_open()
        assert not any(read.peer == name for read in self._reads), f"{name!r} is removed under a running read"
        self._peers.discard(name)

    def post_read(self, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        self._require_open()
        read = InprocRead(peer, descriptors)
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
        """Perform `count` (or all) waiting reads, oldest first; returns how many."""
        todo = len(self.held) if count is None else min(count, len(self.held))
        for _ in range(todo):
            read = self.held.popleft()
            error = self.refusal(read)
            if error is None:
                self.copy(read.rows())
                if self.faults.never_finish:
                    continue
            self.end(read, error)
        return todo

    def end(self, read: InprocRead, error: TransportError | None) -> None:
        """A read has stopped for good."""
        self._mailbox.put(ReadEnded(read, error, 0.0))

    def notify(self, peer: AgentName, payload: bytes) -> None:
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
        """Let a notification arrive here, as if a peer had sent it."""
        self._mailbox.put(Notified(payload))

    async def run(self, deliver: Callable[[Event], None]) -> None:
        def count_and_deliver(event: Event) -> None:
            match event:
                case ReadEnded(read=InprocRead() as read, error=error):
                    self._reads.pop(read, None)
                    self._counts["failed"] += error is not None
                    self._counts["bytes"] += read.size_bytes if error is None else 0
                case Notified():
                    self._counts["received"] += 1
            deliver(event)

        await self._mailbox.deliver_to(count_and_deliver)

    def die(self, cause: BaseException) -> None:
        """Fault: the transport itself breaks; nothing more is performed or reported."""
        self._network.agents.pop(self.name, None)
        self._mailbox.close(cause)

    async def aclose(self, timeout_s: float) -> None:
        """Reads that are still held count as under way: TransportError at once, since only a test can end them."""
        if not self._open:
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
        self._mailbox.close(TransportBroken("the transport was closed"))
        if under_way:
            raise TransportError(f"{under_way} reads have not stopped; the memory stays until they have")
        self._reads.clear()
        self._peers.clear()
        self._spans.clear()
        self._keepalive.clear()

    def abandon(self, wait_s: float) -> None:
        self._network.agents.pop(self.name, None)
        self._open = False
        for held in (self._reads, self._peers, self._spans, self._keepalive):
            held.clear()

    @property
    def statistics(self) -> TransportStatistics:
        return TransportStatistics(
            open_reads=len(self._reads),
            open_peers=len(self._peers),
            open_spans=len(self._spans),
            open_threads=0,
            reads=self._counts["reads"],
            reads_failed=self._counts["failed"],
            bytes_read=self._counts["bytes"],
            notifications_sent=self._counts["sent"],
            notifications_received=self._counts["received"],
            notifications_failed=self._counts["unsent"],
        )

    def covers(self, addresses: UInt64Array, sizes: UInt64Array) -> bool:
        """Whether every range lies in one registered span."""
        inside = np.zeros(len(addresses), dtype=np.bool_)
        for span in self._spans:
            start, end = np.uint64(span.address), np.uint64(span.address + span.size_bytes)
            inside |= (addresses >= start) & (addresses + sizes <= end)
            if inside.all():
                break
        return bool(inside.all())

    def refusal(self, read: InprocRead) -> TransportError | None:
        """Why a read cannot be performed, if so."""
        target = self._network.agents.get(read.peer)
        if target is None or target.faults.cut or read.peer not in self._peers:
            return PeerGone(f"agent {read.peer!r} is gone")
        if self.faults.fail_next:
            return self.faults.fail_next.popleft()
        descriptors = read.descriptors
        if not self.covers(descriptors.local, descriptors.sizes):
            return TransportError("a local range is not registered")
        if not target.covers(descriptors.remote, descriptors.sizes):
            return TransportError("a remote range is not registered")
        return None

    @staticmethod
    def copy(rows: Iterable[Row]) -> None:
        for local, remote, size in rows:
            ctypes.memmove(local, remote, size)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        if self._carrier is not None:
            self._carrier.wake(callback)
        else:
            self._loop.call_soon_threadsafe(callback)  # a notification may come from an agent on another thread's loop

    def _require_open(self) -> None:
        if not self._open:
            raise TransportBroken("the transport is not open")
