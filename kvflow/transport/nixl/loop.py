"""NixlTransport: the part of the NIXL transport on the event loop. Every NIXL call is a job for the agents' thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvflow.checks import counted
from kvflow.config import Config
from kvflow.core.cache.regions import Device, Span
from kvflow.core.plan.descriptors import Descriptors
from kvflow.errors import TransportBroken
from kvflow.transport.base import (
    AgentName,
    Event,
    Join,
    MemoryUse,
    Notified,
    PostedRead,
    ReadEnded,
    TransportError,
    TransportStatistics,
    usually_reached,
)
from kvflow.transport.device import cuda
from kvflow.transport.nixl.agents import POST_COST_BYTES, SEND_DELAY_MAX_S, NixlAgents
from kvflow.transport.nixl.native import readable_kinds
from kvflow.transport.owner_thread import OwnerThread

if TYPE_CHECKING:
    from kvflow.transport.mapped.mapped_agents import MappedAgents

_BEHIND_COST_BYTES = 8 << 20  # in the units of `NixlAgents.taken_cost_bytes`: one full request, while another is posted
_OPENING_S = 1.0  # sleep of the thread until the agents are made


class NixlTransport:
    """A `transport.base.Transport` over NIXL."""

    def __init__(self, config: Config, name: str) -> None:
        self._config = config
        self._name = name
        self._thread: OwnerThread | None = None
        self._agents: NixlAgents | None = None
        self._closing = False
        self._ending = False
        self._reads: set[PostedRead] = set()
        self._peers: set[AgentName] = set()
        self._open_spans = 0
        self._given_cost_bytes = 0
        """Total cost of all reads passed to the agents' thread, in the unit of `NixlAgents.taken_cost_bytes`."""
        self._reads_total = 0
        self._reads_failed = 0
        self._bytes_read = 0
        self._notifications_received = 0
        self._readable_kinds: Mapping[str, bool] = {}
        self._events: deque[Event] = deque()
        """Events that were reported and are not delivered on the event loop yet."""
        self._delivery_scheduled = False
        self._deliver: Callable[[Event], None] | None = None

    async def open(self) -> None:
        thread = OwnerThread(f"kvflow-agent {self._name}", self._step, self._on_death)
        self._run_on_loop = thread.run_on_loop
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        device = cuda.current_device()
        try:
            if device is not None:  # UCX uses the current device of the thread that makes an agent
                await thread.call(lambda: cuda.make_current(device))
            agents, self._readable_kinds = await thread.call(
                lambda: (
                    NixlAgents(self._config, self._name, self._put_event, thread.has_jobs, lambda: self.behind),
                    readable_kinds(),
                )
            )
        except BaseException:
            self._closing = True
            thread.submit(self._end_when_idle)
            raise
        self._readers: NixlAgents | MappedAgents = agents
        if self._config.cuda_ipc:
            from kvflow.transport.mapped.mapped_agents import MappedAgents

            self._readers = MappedAgents(agents, self._name, self._put_event)
        self._agents, self._thread = agents, thread

    def reaches(self, device: str) -> bool:
        return self._readable_kinds.get(device, usually_reached(device))

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        if not self.reaches(device.kind):
            raise TransportError(f"NIXL cannot reach device {device.kind!r}")
        thread, _ = self._require_open()
        await thread.call(lambda: self._readers.register(spans, device, keepalive, use))
        self._open_spans += len(spans)

    async def metadata(self) -> bytes:
        thread, agents = self._require_open()
        return await thread.call(agents.metadata)

    async def device_memory(self) -> bytes:
        thread, _ = self._require_open()
        return await thread.call(self._readers.device_memory)

    async def add_peer(self, metadata: bytes, device_memory: bytes = b"") -> AgentName:
        thread, _ = self._require_open()
        name = await thread.call(lambda: self._readers.add_peer(metadata, device_memory))
        self._peers.add(name)
        return name

    async def remove_peer(self, name: AgentName) -> None:
        thread, _ = self._require_open()
        self._peers.discard(name)
        await thread.call(lambda: self._readers.remove_peer(name))

    def post_read(self, peer: AgentName, descriptors: Descriptors) -> PostedRead:
        thread, _ = self._require_open()
        read = PostedRead(descriptors.size_bytes)
        self._given_cost_bytes += read.size_bytes + POST_COST_BYTES
        thread.submit(partial(self._readers.post, read, peer, descriptors))
        self._reads.add(read)
        self._reads_total += 1
        return read

    def notify(self, peer: AgentName, payload: bytes, join: Join | None = None) -> None:
        thread, agents = self._require_open()
        # Without a wake-up of its own: the thread wakes soon after each read, and sends then.
        thread.submit(partial(agents.notify, peer, payload, join), within_s=SEND_DELAY_MAX_S)

    def expect_notifications(self) -> None:
        if self._agents is not None:
            self._agents.expected_s = time.monotonic()

    async def run(self, deliver: Callable[[Event], None]) -> None:
        self._deliver = deliver
        try:
            self._deliver_events()
            await asyncio.shield(self._ended)
        finally:
            self._deliver = None

    async def aclose(self, timeout_s: float) -> None:
        self._closing = True
        thread = self._thread
        if thread is None:
            return
        if thread.alive:
            thread.submit(self._end_when_idle)
        try:
            async with asyncio.timeout(timeout_s):
                await thread.ended()
        except TimeoutError:
            raise TransportError(
                f"not stopped within {timeout_s} s: {counted(len(self._reads), 'read')}; "
                "the agent and its memory stay until they have"
            ) from None
        self._deliver_events()
        self._fail(TransportBroken("the transport was closed"))
        self._peers.clear()
        self._open_spans = 0

    def abandon(self, wait_s: float) -> None:
        self._closing = True
        thread = self._thread
        if thread is None:
            return
        thread.abandon(self._end_when_idle, wait_s)
        self._peers.clear()
        self._open_spans = 0

    @property
    def behind(self) -> bool:
        return self._agents is not None and self._given_cost_bytes - self._agents.taken_cost_bytes > _BEHIND_COST_BYTES

    @property
    def statistics(self) -> TransportStatistics:
        agents = self._agents
        return TransportStatistics(
            open_reads=len(self._reads),
            open_peers=len(self._peers),
            open_spans=self._open_spans,
            open_threads=int(self._thread is not None and self._thread.alive),
            reads=self._reads_total,
            reads_failed=self._reads_failed,
            bytes_read=self._bytes_read,
            notifications_sent=agents.sent if agents else 0,
            notifications_received=self._notifications_received,
            notifications_failed=agents.unsent if agents else 0,
            listeners_lost=sum(agents.listeners_lost) if agents else 0,
            unreachable=agents is not None and agents.unreachable,
            mapped_peers=self._readers.mapped_peers if agents else 0,
            mapping_problem=self._readers.mapping_problem if agents else "",
        )

    def _require_open(self) -> tuple[OwnerThread, NixlAgents]:
        if self._thread is None or self._agents is None or self._closing:
            raise TransportBroken("the transport is closed" if self._closing else "the transport is not open")
        return self._thread, self._agents

    def _step(self) -> float | None:
        """Run one step of the NIXL agents. Return the seconds that the thread may sleep, or None to end the thread.

        Thread `kvflow-agent <name>`: one for each registration. The thread ends once the transport is being closed and
        no read is under way. If the thread dies, `NixlTransport.run` raises TransportBroken and the runtime breaks.
        Besides this thread, NIXL has a progress thread of its own.
        """
        agents = self._agents
        if agents is None:
            return None if self._ending else _OPENING_S
        if self._thread is not None and self._thread.loop_closed:
            self._ending = True
        idle_s = self._readers.step()
        if self._ending and not self._readers.busy:
            agents.send_notifications()
            self._readers.close()
            return None
        return idle_s

    def _end_when_idle(self) -> None:
        """Make the agents' thread end once no read is under way.

        This method is submitted to the thread as a job, so that it runs after all earlier jobs.
        """
        self._ending = True

    def _on_death(self, cause: BaseException) -> None:
        self._deliver_events()  # deliver earlier events first
        self._fail(cause)

    def _put_event(self, event: Event) -> None:
        """Queue an event for delivery on the event loop. May be called on any thread.

        One callback on the loop (`_deliver_events`) delivers all queued events. Waking the task of `run` instead would
        cost every read a turn of the loop.
        """
        self._events.append(event)
        if not self._delivery_scheduled:
            self._delivery_scheduled = True
            self._run_on_loop(self._deliver_events)

    def _deliver_events(self) -> None:
        """Pass all queued events to the `deliver` function of `run`, if `run` is active.

        If `deliver` raises, `run` raises TransportBroken.
        """
        # Cleared first, so that an event that is put after this schedules another wake-up.
        self._delivery_scheduled = False
        while self._events and self._deliver is not None:
            event = self._events.popleft()
            if isinstance(event, ReadEnded):
                self._reads.discard(event.read)
                self._reads_failed += event.error is not None
                self._bytes_read += event.read.size_bytes if event.error is None else 0
            elif isinstance(event, Notified):
                self._notifications_received += 1
            try:
                self._deliver(event)
            except BaseException as error:  # noqa: BLE001 - `run` raises it
                self._fail(error)
                return

    def _fail(self, cause: BaseException) -> None:
        if not self._ended.done():
            error = TransportBroken(f"the transport ended: {cause}")
            error.__cause__ = cause
            self._ended.set_exception(error)
            self._ended.exception()  # retrieved here, since `run` may not be running
