"""`MappedAgents`: NIXL's agents, and the mapped device memory of peers on this machine, on the thread of the agents.

A producer exports the allocations of its cache. A reader maps them when it adds the peer and unmaps them when it
removes the peer, and copies all pieces of a read as one batch. Everything else goes by NIXL: host memory, so also
seals; notifications; and all reads from peers that are not mapped (docs/decisions/0046-mapped-memory.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvflow.checks import counted
from kvflow.core.cache.regions import HOST, Device, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import ConfigError
from kvflow.logs import logger_of
from kvflow.transport.base import AgentName, Event, MemoryUse, PostedRead, ReadEnded, TransportError
from kvflow.transport.device.mapper import Mapper
from kvflow.transport.device.opening import make_mapper
from kvflow.transport.mapped.mapped_peer import HostRead, MappedPeer
from kvflow.transport.mapped.shared_memory import (
    AddressMap,
    Allocation,
    NotMappable,
    OnOtherMachine,
    RegisteredRange,
    SharedMemory,
    decode,
    encode,
    own_process,
)
from kvflow.transport.nixl.agents import POST_COST_BYTES, NixlAgents
from kvflow.transport.nixl.defaults import Polling
from kvflow.transport.owner_thread import pause_s

logger = logger_of(__name__)

_POLLING = Polling(150e-6, 100e9)  # copies on one GPU, or over NVLink


class MappedAgents:
    """The agents of one registered cache that maps its peers' device memory. Takes the place of `NixlAgents`."""

    def __init__(self, nixl: NixlAgents, name: str, put_event: Callable[[Event], None]) -> None:
        self._nixl = nixl
        self._name = name
        self._put_event = put_event
        self.mapping_problem = ""
        """Why memory was not mapped, at last; "" if all was that peers on this machine share."""
        self._mapper: Mapper | None = None
        self._kind = ""
        """Kind of the device with memory to share or to read into; "" before it is registered."""
        self._served: list[Span] = []
        self._served_host: list[Span] = []
        self._targets: list[Span] = []
        self._target_map = AddressMap([])
        self._peers: dict[AgentName, MappedPeer] = {}
        self._reading: dict[AgentName, MappedPeer] = {}
        """The peers with reads that have not ended, or that wait for those before them."""
        self._last_end_s = self._spin_until_s = 0.0

    @property
    def mapped_peers(self) -> int:
        return len(self._peers)

    @property
    def busy(self) -> bool:
        """True if a read waits or is under way. While it is true, `close` is illegal."""
        return bool(self._reading) or self._nixl.busy

    def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        self._nixl.register(spans, device, keepalive, use)
        if device.kind == HOST.kind:
            self._served_host += spans if MemoryUse.SERVED in use else ()
            return
        if not self._kind:
            self._kind = device.kind
            try:
                self._mapper = make_mapper(device)
            except (ConfigError, RuntimeError) as error:
                self._note_problem("no device memory is mapped, NIXL reads it", error)
        self._served += spans if MemoryUse.SERVED in use else ()
        if MemoryUse.READ_INTO in use:
            self._targets += spans
            self._target_map = AddressMap([(span, span.address) for span in self._targets])

    def device_memory(self) -> bytes:
        """Return what readers on this machine need to map the served device memory; b"" if they cannot map it."""
        mapper = self._mapper
        if mapper is None or not self._served:
            return b""
        try:
            whole = {mapper.allocation_at(span.address) for span in self._served}
            shared = SharedMemory(
                process=own_process(),
                kind=self._kind,
                allocations=tuple(
                    Allocation(address=one.address, size_bytes=one.size_bytes, handle=mapper.export(one.address))
                    for one in whole
                ),
                ranges=tuple(
                    RegisteredRange(address=span.address, size_bytes=span.size_bytes) for span in self._served
                ),
                host_metadata=self._nixl.host_metadata(self._served_host),
            )
        except (RuntimeError, TransportError) as error:
            self._note_problem("peers cannot map its device memory, NIXL reads it", error)
            return b""
        return encode(shared)

    def add_peer(self, metadata: bytes, device_memory: bytes) -> AgentName:
        mapped = why = None
        if device_memory and self._mapper is not None and self._targets:
            try:
                shared = decode(device_memory)
                mapped, metadata = MappedPeer(self._mapper, self._kind, shared), shared.host_metadata
            except NotMappable as error:
                why = error
        try:
            name = self._nixl.add_peer(metadata)
        except BaseException:
            if mapped is not None:
                mapped.close()
            raise
        if why is not None and not isinstance(why, OnOtherMachine):
            self._note_problem(f"{name} is not mapped, NIXL reads it", why)
        if mapped is not None and name in self._peers:  # added by a call that was given up
            mapped.close()
        elif mapped is not None:
            self._peers[name] = mapped
            logger.info("agent %s: %s is mapped, %s", self._name, name, counted(mapped.size_bytes, "byte"))
        return name

    def remove_peer(self, name: AgentName) -> None:
        self._nixl.remove_peer(name)
        if name in self._peers:
            self._peers[name].close()
            del self._peers[name]

    def post(self, read: PostedRead, peer: AgentName, descriptors: Descriptors) -> None:
        """Start a read, or let it wait for those before it. A `ReadEnded` event always follows."""
        mapped = self._peers.get(peer)
        if mapped is not None and descriptors.remote_device.kind == self._kind:
            self._nixl.taken_cost_bytes += read.size_bytes + POST_COST_BYTES
            mapped.start(read, descriptors, self._target_map)
            self._reading[peer] = mapped
            self._last_end_s = time.monotonic()
            self._spin_until_s = max(self._spin_until_s, self._last_end_s + _POLLING.until_s(read.size_bytes))
        elif peer in self._reading:
            self._reading[peer].queue.append(HostRead(read, descriptors))
        else:
            self._nixl.post(read, peer, descriptors)

    def step(self) -> float:
        """Make progress with reads. Return the seconds for which the thread may sleep before the next call."""
        idle_s = self._nixl.step()
        if not self._reading:
            return idle_s
        now_s, seen = time.monotonic(), False
        for name, peer in list(self._reading.items()):
            for read in peer.take_ended():
                seen = True
                if isinstance(read, HostRead):
                    self._nixl.post(read.read, name, read.descriptors)
                else:
                    self._put_event(ReadEnded(read.read, read.error, read.post_s))
            if not peer.queue:
                del self._reading[name]
        if seen:
            self._last_end_s = now_s
        if seen or now_s < self._spin_until_s:
            return 0.0
        return min(idle_s, pause_s(now_s - self._last_end_s))

    def _note_problem(self, what: str, error: Exception) -> None:
        self.mapping_problem = str(error)
        logger.info("agent %s: %s: %s", self._name, what, error)

    def close(self) -> None:
        """Unmap the memory of all peers, and close NIXL's agents. The call is illegal while `busy`."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._nixl.close()
