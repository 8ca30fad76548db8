"""NixlAgents: the two NIXL agents of one registered cache, on the thread `kvflow-agent`, which owns them.

Serving and reading need opposite settings of NIXL (measured; docs/decisions/0002-two-agents.md), so there is one agent
for each:

- The *serving* agent owns the memory that peers read. It must progress while Python does nothing. So it has NIXL's
  progress thread with a long delay: the thread sleeps in poll() on UCX's event descriptors, costs almost nothing when
  idle, wakes when a peer writes, and needs neither the loop nor the GIL.
- The *reading* agent posts reads and sends notifications. It has no progress thread. The owner thread polls it, first
  without a pause for latency, then with growing sleeps, which on tcp is a third faster than polling without a pause.

Reads are made from arrays of addresses, not from descriptor lists of all blocks, so the cost of a peer does not depend
on its number of blocks (docs/decisions/0001-address-plans.md).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvflow.checks import counted
from kvflow.config import Config
from kvflow.core.cache.regions import HOST, Device, Span, UInt64Array
from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.policy.queue import ShortestFirst
from kvflow.errors import ConfigError
from kvflow.logs import logger_of
from kvflow.transport.base import (
    AgentName,
    CaughtUp,
    Event,
    Join,
    MemoryUse,
    Notified,
    PeerGone,
    PostedRead,
    ReadEnded,
    TransportError,
)
from kvflow.transport.device import cuda
from kvflow.transport.device.cache_device import is_rocm
from kvflow.transport.nixl.defaults import POLLING
from kvflow.transport.nixl.native import Agent, error_types, import_bindings, plugin_dir_note, prefault, translate_error
from kvflow.transport.owner_thread import pause_s

logger = logger_of(__name__)

_SPIN_S = POLLING["cpu"].spin_s
_SPIN_TURN_S = 50e-6  # a new job waits at most this long for the polling thread
# A notification wakes the peer and delays the next read by 30 to 100 us. These delays are short beside a lease's hold.
_SEND_QUIET_S = 2e-3
SEND_DELAY_MAX_S = 10e-3
POST_COST_BYTES = 256 << 10
"""Fixed cost of posting a read, in bytes: the number of bytes that could be copied in the time that posting takes."""
# Limits of several reads that are posted as one request. A small read that is queued meanwhile waits for at most one
# request, which is no larger than a slice (`limits.BY_DEVICE`).
_REQUEST_BYTES_MAX = 8 << 20
_REQUEST_RANGES_MAX = 4096
# An idle process wakes up less often: a wake-up costs 25 to 100 us on a virtual machine. The end of a lease is noticed
# late by at most this share of the time since its tokens could be read.
_LATE_SHARE = 0.05
_QUIET_FACTOR = 10
_LISTENER_CHECK_S = 1.0


def notification_interval_s(shortest_s: float, quiet_s: float) -> float:
    """Return the seconds between two polls for notifications, `quiet_s` after the last sign that one may come.

    `shortest_s`: `Limits.notification_poll_interval_s`.
    """
    return min(max(shortest_s, _LATE_SHARE * quiet_s), _QUIET_FACTOR * shortest_s)


class _QueuedRead(NamedTuple):
    """A read that waits to be posted to NIXL."""

    read: PostedRead
    peer: AgentName
    descriptors: Descriptors

    def can_join(self, other: _QueuedRead) -> bool:
        """Return True if one NIXL request can serve both this read and `other`: same peer, same devices."""
        mine, others = self.descriptors, other.descriptors
        same_devices = mine.local_device == others.local_device and mine.remote_device == others.remote_device
        return self.peer == other.peer and same_devices


@dataclass(slots=True, eq=False)
class _Request:
    """A NIXL transfer request for one or several reads.

    `handle`: NIXL's handle of the request; 0 before NIXL has created the request, and after its release.
    """

    reads: Sequence[_QueuedRead]
    handle: int = 0
    size_bytes: int = 0
    post_s: float = 0.0
    error: TransportError | None = None


class NixlAgents:
    """The serving and the reading NIXL agent, and the reads in flight. Only the thread `kvflow-agent` uses them."""

    mapped_peers, mapping_problem = 0, ""
    """As of `MappedAgents`: these agents map nothing."""

    def __init__(
        self,
        config: Config,
        name: str,
        put_event: Callable[[Event], None],
        has_jobs: Callable[[], bool],
        behind: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start both agents. Raises ConfigError if NIXL cannot start as configured.

        `put_event` passes an event to the event loop. `has_jobs` returns True while jobs wait for this thread. `behind`
        returns `Transport.behind`.
        """
        self._bindings = bindings = import_bindings()
        self._memory_kinds = defaultdict[str, Any](lambda: bindings.VRAM_SEG, cpu=bindings.DRAM_SEG)
        """NIXL's memory type by kind of device: DRAM for the CPU, VRAM for every other kind."""
        self._errors = error_types(self._bindings)
        self._put_event = put_event
        self._has_jobs = has_jobs
        self._behind = behind
        self._config = config
        failures: tuple[type[Exception], ...] = (*self._errors, RuntimeError)  # or the system's: its limit of threads
        try:
            self._serving = Agent(self._bindings, name, config, progress=True)
            self._reading = Agent(self._bindings, f"{name}/reader", config, progress=False)
        except failures as error:
            what = f"backend {config.nixl_backend!r} as configured"
            raise ConfigError(f"NIXL cannot start {what}: {error}{plugin_dir_note()}") from error
        self._name = name
        self._serving_listeners = self._serving.listener_count
        self._in_flight: list[_Request] = []
        self._created: deque[_Request] = deque()
        """Requests that NIXL has created, to be posted next, in order."""
        self._ended: list[_Request] = []
        """Requests that have ended and are not reported to the event loop yet."""
        self.taken_cost_bytes = 0
        """Summed cost of all reads taken from the queue to be posted; a read costs its bytes and `POST_COST_BYTES`. Any
        thread may read this number.
        """
        self._to_post: ShortestFirst[_QueuedRead] = ShortestFirst(POST_COST_BYTES)
        self._keepalive: list[object] = []
        self._active_s = 0.0
        self._spin_until_s = 0.0
        self._flush: Callable[[], None] | None = None
        self._last_notification_s = 0.0
        self.expected_s = 0.0
        """When readers were last given something to read. Any thread may set this number."""
        self._outbox: dict[tuple[AgentName, Join | None], list[bytes]] = {}
        self._outbox_since_s = 0.0
        self._next_notifications_s = 0.0
        self._next_listener_check_s = 0.0
        self.listeners_lost: tuple[int, int] = (0, 0)
        """Numbers of tcp listeners that UCX has closed: of the serving agent, and of the reading agent."""
        self.sent = 0
        self.unsent = 0

    @property
    def unreachable(self) -> bool:
        """True if UCX has closed all tcp listeners of the serving agent, so that no new peer can connect."""
        return 0 < self._serving_listeners == self.listeners_lost[0]

    @property
    def busy(self) -> bool:
        """True if a read waits to be posted, is under way, or has ended and is not reported yet.

        While it is true, `close` is illegal.
        """
        return bool(self._in_flight or self._ended) or self._has_reads_to_post

    @property
    def _has_reads_to_post(self) -> bool:
        return bool(self._created or self._to_post)

    def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        if device.kind == "cuda" and not is_rocm():
            self._use_cuda(device.number)
        if device.kind == "cpu":
            for span in spans:
                prefault(span)
        rows = [(span.address, span.size_bytes, device.number, "") for span in spans]
        self._keepalive.append(keepalive)
        try:
            for agent, its_use in ((self._serving, MemoryUse.SERVED), (self._reading, MemoryUse.READ_INTO)):
                if its_use in use:
                    agent.register(self._bindings.nixlRegDList(self._memory_kinds[device.kind], rows))
        except self._errors as error:
            raise TransportError(f"NIXL cannot register {counted(len(spans), 'span')} on {device}: {error}") from error

    def _use_cuda(self, number: int) -> None:
        """Make CUDA device `number` current on this thread, as UCX needs.

        If the device sees data from a NIC only after a flush, set `_flush`, which is called after each read.
        """
        cuda.make_current(number)
        calls = cuda.driver()
        if calls.needs_flush(number):
            self._flush = calls.flush

    def metadata(self) -> bytes:
        return bytes(self._serving.native.getLocalMD())

    def host_metadata(self, spans: Sequence[Span]) -> bytes:
        """Return the metadata of only `spans`, registered host memory that peers read."""
        rows, agent = [(span.address, span.size_bytes, 0, "") for span in spans], self._serving
        served = self._bindings.nixlRegDList(self._memory_kinds[HOST.kind], rows)
        try:
            return bytes(agent.native.getLocalPartialMD(served, True, agent.backends))
        except self._errors as error:
            raise TransportError(f"NIXL does not describe the host memory alone: {error}") from error

    def device_memory(self) -> bytes:
        """Return b"": NIXL's agents map nothing."""
        return b""

    def add_peer(self, metadata: bytes, device_memory: bytes = b"") -> AgentName:
        try:
            name = self._reading.native.loadRemoteMD(metadata)
        except self._bindings.nixlBackendError as error:  # UCX makes endpoints here, and the network may be down
            raise PeerGone(f"NIXL cannot reach the peer: {error}") from error
        except self._errors as error:
            raise TransportError(f"NIXL does not accept the peer's metadata: {error}") from error
        # A name that is not UTF-8 is never the expected name, which the caller compares.
        return AgentName(name.decode(errors="replace"))

    def remove_peer(self, name: AgentName) -> None:
        self.send_notifications()
        self._reading.native.invalidateRemoteMD(name)

    def post(self, read: PostedRead, peer: AgentName, descriptors: Descriptors) -> None:
        """Queue a read. A later `step` call posts it, small reads first. A `ReadEnded` event always follows.

        Over shared memory the call that posts a read also copies the bytes, so reads happen in the order of posting.
        """
        self._to_post.add(_QueuedRead(read, peer, descriptors), descriptors.size_bytes)

    def _post_next(self) -> None:
        """Create the next NIXL request, report ended reads to the event loop, and only then post the request.

        Each NIXL call releases the GIL, and in a burst this thread waits for milliseconds to get the GIL back. In this
        order the event loop can handle the reported reads while the NIXL request is being posted.
        """
        if not self._created:
            self._create_next()
        ended = self._report_ended()
        if self._created:
            self._post_request(self._created.popleft())
        self._release(ended)

    def _create_next(self) -> None:
        """Create one NIXL request for the next queued read and for those behind it with the same peer and devices.

        A request of several reads has at most `_REQUEST_BYTES_MAX` bytes. A burst of small reads takes few NIXL calls.
        """
        first = self._to_post.pop()
        reads, size_bytes, count = [first], first.descriptors.size_bytes, len(first.descriptors)
        while self._to_post:
            following = self._to_post.next
            more, count = following.descriptors.size_bytes, count + len(following.descriptors)
            if size_bytes + more > _REQUEST_BYTES_MAX or count > _REQUEST_RANGES_MAX or not first.can_join(following):
                break
            reads.append(self._to_post.pop())
            size_bytes += more
        was_behind = self._behind()
        self.taken_cost_bytes += size_bytes + len(reads) * POST_COST_BYTES
        if was_behind and not self._behind():
            self._put_event(CaughtUp())  # before the post, which may copy for milliseconds
        self._create_request(reads)

    def _create_request(self, reads: Sequence[_QueuedRead]) -> None:
        """Create one NIXL request for all of `reads`, which have the same peer and devices.

        If NIXL raises an error, create a request for each read. If NIXL raises an error for a single read, that read
        ends with the error.
        """
        peer, descriptors = reads[0].peer, reads[0].descriptors
        table, size_bytes = descriptors.table, descriptors.size_bytes
        if len(reads) > 1:
            table = np.concatenate([read.descriptors.table for read in reads], axis=1)
            size_bytes = sum(read.descriptors.size_bytes for read in reads)
        request, native = _Request(reads), self._reading.native
        started_s = time.monotonic()
        try:
            local = self._descriptor_list(table[0], descriptors.local_device)
            remote = self._descriptor_list(table[1], descriptors.remote_device)
            request.handle = native.createXferReq(
                self._bindings.NIXL_READ, local, remote, peer, "", self._reading.backends
            )
        except self._errors as error:
            self._failed_to_start(request, error)
            return
        request.size_bytes, request.post_s = size_bytes, time.monotonic() - started_s
        self._created.append(request)

    def _failed_to_start(self, request: _Request, error: Exception) -> None:
        if len(request.reads) == 1:
            self._end_request(request, translate_error(error, self._bindings))
            return
        self._release([request])
        for read in request.reads:  # at least one of the reads is faulty
            self._create_request([read])

    def _post_request(self, request: _Request) -> None:
        """Post `request`, which NIXL has created. If it ends within this call, mark it as ended."""
        started_s = time.monotonic()
        try:
            status = self._reading.native.postXferReq(request.handle, "")
        except self._errors as error:
            self._failed_to_start(request, error)
            return
        self._active_s = time.monotonic()
        request.post_s += self._active_s - started_s
        poll_s = POLLING[request.reads[0].descriptors.local_device.kind].until_s(request.size_bytes)
        self._spin_until_s = max(self._spin_until_s, self._active_s + poll_s)
        if status == self._bindings.NIXL_SUCCESS:
            self._end_request(request, None)
        else:
            self._in_flight.append(request)

    def notify(self, peer: AgentName, payload: bytes, join: Join | None) -> None:
        """Queue a notification for `peer`. Reads go first, since sending a notification would delay the next read.

        All queued notifications are sent once no read has been posted or ended for `_SEND_QUIET_S`, but not later than
        `SEND_DELAY_MAX_S` after the first of them was queued.
        """
        if not self._outbox:
            self._outbox_since_s = time.monotonic()
        self._outbox.setdefault((peer, join), []).append(payload)

    def send_notifications(self) -> None:
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, {}
        for (peer, join), payloads in outbox.items():
            for payload in payloads if join is None or len(payloads) == 1 else join(payloads):
                try:
                    self._reading.native.genNotif(peer, payload, self._reading.backends)
                except self._errors:
                    self.unsent += 1
                else:
                    self.sent += 1
        # The first message to a peer takes several steps: poll often for a while.
        self._last_notification_s = time.monotonic()
        self._next_notifications_s = min(self._next_notifications_s, self._last_notification_s)
        self._reading.native.getNotifs({}, [])  # progress, so that the message leaves now

    def step(self) -> float:
        """Make progress: post and check reads, send and collect notifications, and report events to the event loop.

        Return the seconds for which the agents' thread may sleep before the next call.
        """
        if self._has_reads_to_post:
            self._post_next()
        elif self._ended:
            self._release(self._report_ended())
        now_s = time.monotonic()
        if now_s >= self._next_listener_check_s:
            self._next_listener_check_s = now_s + _LISTENER_CHECK_S
            self._check_listeners()
        if self._in_flight:
            if not self._has_reads_to_post and now_s < self._spin_until_s:
                self._spin(now_s + _SPIN_TURN_S)
            self._check_reads()
        if self._ended and not self._has_reads_to_post and not self._has_jobs():
            self._release(self._report_ended())  # else the next call reports, after the waiting jobs
        send_s = self._active_s + _SEND_QUIET_S
        if self._outbox:
            send_s = min(send_s, self._outbox_since_s + SEND_DELAY_MAX_S)
            if now_s >= send_s:
                self.send_notifications()
                send_s = math.inf
        elif now_s >= send_s:
            send_s = math.inf  # else the thread wakes then: the notification of a read does not wake it
        if now_s >= self._next_notifications_s:
            if self._collect_notifications():
                self._last_notification_s = now_s
            quiet_s = now_s - max(self._last_notification_s, self.expected_s)
            shortest_s = self._config.limits.notification_poll_interval_s
            self._next_notifications_s = now_s + notification_interval_s(shortest_s, quiet_s)
        if self._has_reads_to_post or self._ended:
            return 0.0
        if not self._in_flight:
            return max(min(self._next_notifications_s, send_s) - now_s, 0.0)
        if now_s < self._spin_until_s:
            return 0.0
        return pause_s(now_s - self._active_s)

    def _check_listeners(self) -> None:
        """Count the tcp listeners that UCX has closed, and log an error if there are more than before."""
        ports = [*(serving := self._serving.lost_listeners()), *self._reading.lost_listeners()]
        lost = (len(serving), len(ports) - len(serving))
        if sum(lost) > sum(self.listeners_lost):
            logger.error(
                "agent %s: UCX has closed its listener at port %s, as it does when open files run out: no new peer can "
                "connect there until the cache is unregistered and registered again",
                self._name,
                ports,
            )
        self.listeners_lost = lost

    def close(self) -> None:
        """Deregister the memory and destroy both agents. The call is illegal while `busy`."""
        assert not self.busy, "agents closed under a running read"
        for agent in (self._reading, self._serving):
            agent.deregister()
        del self._reading, self._serving
        self._keepalive.clear()

    def _spin(self, until_s: float) -> None:
        """Poll the oldest read without a pause until it ends, or until `until_s`.

        A tcp read progresses only while it is polled, and small reads end soon.
        """
        status, handle = self._reading.native.getXferStatus, self._in_flight[0].handle
        in_progress = self._bindings.NIXL_IN_PROG
        try:
            while status(handle) == in_progress and time.monotonic() < until_s:
                pass
        except self._errors:
            pass  # `_still_in_flight` gets the error again

    def _check_reads(self) -> None:
        still = [request for request in self._in_flight if self._still_in_flight(request)]
        if len(still) != len(self._in_flight):
            self._active_s = time.monotonic()
            self._spin_until_s = max(self._spin_until_s, self._active_s + _SPIN_S)
            self._in_flight = still

    def _still_in_flight(self, request: _Request) -> bool:
        """Ask NIXL for the status of `request`. Return True if it is still in flight; else mark it as ended."""
        error = None
        try:
            if self._reading.native.getXferStatus(request.handle) != self._bindings.NIXL_SUCCESS:
                return True
        except self._errors as problem:
            error = translate_error(problem, self._bindings)
        self._end_request(request, error)
        return False

    def _end_request(self, request: _Request, error: TransportError | None) -> None:
        """Mark `request` as ended, with `error` if it failed, to be reported to the loop later.

        If the request failed, release it in NIXL, so that no byte can still land. Otherwise flush, if the device needs
        a flush to see the bytes that landed.
        """
        if error is not None:
            self._release([request])
        elif self._flush is not None:
            self._flush()
        request.error = error
        self._ended.append(request)

    def _report_ended(self) -> Sequence[_Request]:
        """Report the ended reads to the event loop. Return their requests, which the caller must then release in NIXL.

        Releasing a request gives up the GIL, so it comes after the report.
        """
        ended, self._ended = self._ended, []
        for request in ended:
            for queued in request.reads:
                self._put_event(ReadEnded(queued.read, request.error, request.post_s))
        return ended

    def _release(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            if request.handle:
                self._reading.native.releaseXferReq(request.handle)
                request.handle = 0

    def _collect_notifications(self) -> int:
        """Report each notification that has arrived to the event loop. Return the number of notifications."""
        count = 0
        for payloads in self._serving.native.getNotifs({}, []).values():
            for payload in payloads:
                self._put_event(Notified(bytes(payload)))
                count += 1
        self._reading.native.getNotifs({}, [])  # the reading agent gets no notifications: this only makes progress
        return count

    def _descriptor_list(self, rows: UInt64Array, device: Device) -> Any:
        return self._bindings.nixlXferDList(self._memory_kinds[device.kind], rows)
