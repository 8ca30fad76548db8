"""Resources that all flights into one registered cache share: the poller, host memory for seals, the load throttle.

The `Poller` is the only task that takes events from the transport. When it ends, for whatever reason, it settles every
flight, so no flight waits for events that nothing delivers (invariant I7). When a cache is unregistered, reads are
settled after the transport has closed, since closing waits for them.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvflow.config import Config
from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.queue import FairQueue
from kvflow.core.protocol.proof import SealTable
from kvflow.errors import RuntimeBroken, TransportBroken
from kvflow.runtime.clock import Clock
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.peers.peer import Source
from kvflow.transport.base import AgentName, Event, Notified, PostedRead, ReadEnded, Transport, TransportError

OnReadEnd: TypeAlias = Callable[["ReadEnded | RuntimeBroken"], None]
"""Callback for the end of a read. It gets RuntimeBroken if it can never be known whether the read has ended."""

TURN_S = 1e-3
"""Length, in seconds, of a period in which at most `_TURN_LOADS` loads start immediately; others wait in a queue."""
_TURN_LOADS = 3
_PAUSE_MAX_S = 5e-3

_TOTAL_MAX = (1 << 17, 512)  # descriptors and reads in flight in all, beside Config.in_flight_bytes_max
_PER_RANK_MAX = (1 << 15, 128)  # the same, from one rank
_AHEAD_S = 1e-3  # longest time from the end of a read until another one is posted


class ReadPoster(Protocol):
    """An object that posts reads: the `Poller` for reads from other ranks, a `StoreTransfer` for reads from a file."""

    @property
    def behind(self) -> bool: ...

    def post(self, agent: AgentName, descriptors: Descriptors, on_end: OnReadEnd) -> None: ...


class Poller:
    """Posts reads to the transport, and dispatches the transport's events. `run` is the body of the poller task."""

    def __init__(self, transport: Transport, on_notification: Callable[[bytes], None]) -> None:
        self._transport = transport
        self.on_notification = on_notification
        """Called with each notification of a peer."""
        self.on_caught_up: Callable[[], None] | None = None
        """Called when the transport is no longer `behind`."""
        self._under_way: dict[PostedRead, OnReadEnd] = {}
        self._cause: BaseException | None = None
        self._ended = self._transport_closing = False

    @property
    def behind(self) -> bool:
        """True if the posted reads that have not started yet are so many that the caller should not post more now."""
        return self._transport.behind

    def post(self, agent: AgentName, descriptors: Descriptors, on_end: OnReadEnd) -> None:
        """Post a read of `descriptors` from the peer `agent`. Call `on_end` once when the read ends or fails.

        RuntimeBroken if the poller task has ended.
        """
        if self._ended:
            raise RuntimeBroken("the transfer poller has ended") from self._cause
        self._under_way[self._transport.post_read(agent, descriptors)] = on_end

    async def run(self) -> None:
        """Dispatch the transport's events until this task is cancelled. TransportBroken if the transport breaks.

        Task `kvflow-poller`: one for each registration; the end of the registration cancels the task. If the task ends
        earlier, flights with posted reads get TransportBroken, and the runtime breaks.
        """
        try:
            await self._transport.run(self._dispatch)
        except BaseException as error:
            self._cause = error
            raise
        finally:
            self._ended = True
            if not self._transport_closing:
                self.end_reads(stopped=False)

    def let_transport_close(self) -> None:
        """Let `run` end without failing the reads under way.

        The caller closes the transport next, which waits for these reads, and then calls `end_reads`.
        """
        self._transport_closing = True

    def end_reads(self, *, stopped: bool) -> None:
        """Call the callbacks of all reads under way with an error.

        `stopped`: True if these reads are known to have stopped. The error is then TransportError, else
        TransportBroken.
        """
        under_way, self._under_way = self._under_way, {}
        for posted, on_end in under_way.items():
            if stopped:
                on_end(ReadEnded(posted, TransportError("the transport was closed"), 0.0))
            else:
                lost = TransportBroken("the transfer poller ended while the read was under way")
                lost.__cause__ = self._cause
                on_end(lost)

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, ReadEnded):
            self._under_way.pop(event.read)(event)
        elif isinstance(event, Notified):
            self.on_notification(event.payload)
        elif self.on_caught_up is not None:
            self.on_caught_up()


class SealSlots:
    """Slots in host memory into which seals are fetched, and the queue of loads that wait for free slots.

    A load may begin when each rank that it reads from has a slot. Loads wait in order of priority, smallest first;
    loads of equal priority wait in order of arrival. While the first load in this order lacks slots, all others wait,
    even if they need fewer slots.
    """

    def __init__(self, count: int) -> None:
        self.table = SealTable(count)
        """Table of the slots. Each slot holds the seal that was last fetched into it."""
        self.address = self.table.address(0)
        """Address of the first slot."""
        self._free = list(range(count - 1, -1, -1))
        self._queue: list[tuple[int, int, Sequence[Source], asyncio.Future[None]]] = []
        """Heap of waiting loads: (priority, order of arrival, ranks to read from, future that ends the wait)."""
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for *_, turn in self._queue)

    @property
    def used(self) -> int:
        return self.table.count - len(self._free)

    def take(self, sources: Sequence[Source]) -> bool:
        """Give each of `sources` a slot. Return False, and give none, if too few are free or another load waits."""
        if self._queue or len(self._free) < len(sources):
            return False
        for source in sources:
            source.seal_slot = self._free.pop()
        return True

    async def wait_for_slots(self, sources: Sequence[Source], priority: int) -> None:
        """Wait until each of `sources` has a slot. If cancelled, leave the queue, and give back slots already taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority, next(self._numbers), sources, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # this load may have been the first in the queue
            else:
                self.give_back(sources)
            raise

    def give_back(self, sources: Sequence[Source]) -> None:
        """Wipe and free the slots of `sources`, and give free slots to the loads that wait."""
        for source in sources:
            self.table.slots[source.seal_slot] = 0
            self._free.append(source.seal_slot)
        if self._queue:
            self._admit()

    def _admit(self) -> None:
        while self._queue:
            *_, sources, turn = self._queue[0]
            if not turn.done():
                if len(self._free) < len(sources):
                    return
                for source in sources:
                    source.seal_slot = self._free.pop()
                turn.set_result(None)
            heapq.heappop(self._queue)


class LoadThrottle:
    """Limits how many loads start in one turn of the event loop, so that a burst of loads does not block the loop.

    While many posted reads wait to start, no load starts, so that the event loop is idle at times. The transport's
    thread that starts reads needs Python's GIL: it gets the GIL immediately while the loop is idle, but only after a
    tenth of a second while the loop is busy.
    """

    def __init__(self, poller: ReadPoster) -> None:
        self.paused = False
        """True if no load in the queue may start now, because too many posted reads wait. `resume` ends the pause."""
        self._poller = poller
        self._next_turn: asyncio.Handle | None = None
        self._turn_begun_s = -math.inf
        self._starts_left = 0
        """Number of loads that may still start without waiting, in the period of `TURN_S` that began at
        `_turn_begun_s`."""
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        """Heap of waiting loads: (priority, `not started_before`, order of arrival, future that ends the wait)."""
        self._numbers = itertools.count()

    def try_start(self, now_s: float) -> bool:
        """Return whether a load may start now, and count the start. If not, the load has to await `wait_for_turn`."""
        if self._waiting:
            return False
        if now_s - self._turn_begun_s >= TURN_S:
            self._turn_begun_s, self._starts_left = now_s, _TURN_LOADS
        self._starts_left -= 1
        return self._starts_left >= 0

    async def wait_for_turn(self, priority: int, *, started_before: bool = False) -> None:
        """Wait until a load may start. Of the loads that wait, one with a smaller `priority` goes first.

        Among equal priorities, loads with `started_before` go first: they had started, and then waited for a handshake.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._next_turn = asyncio.get_running_loop().call_soon(self._start_few)
        heapq.heappush(self._waiting, (priority, not started_before, next(self._numbers), turn))
        await turn

    def _start_few(self) -> None:
        """Start at most `_TURN_LOADS` waiting loads, and schedule the next few for a later turn of the event loop.

        If too many posted reads wait to start, the next few loads start when `resume` is called, or 5 ms from now.
        """
        for _ in range(min(_TURN_LOADS, len(self._waiting))):
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
        loop, self.paused = asyncio.get_running_loop(), False
        if not self._waiting:
            return
        if self._poller.behind:
            self.paused, self._next_turn = True, loop.call_later(_PAUSE_MAX_S, self._start_few)
        else:
            self._next_turn = loop.call_soon(self._start_few)

    def resume(self) -> None:
        """Let waiting loads begin again, if they are `paused`. No effect while too many posted reads wait.

        Call this when a load has ended, and when the transport has started reads: while it reads these, the next loads
        are prepared.
        """
        if self.paused and not self._poller.behind and self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn, self.paused = asyncio.get_running_loop().call_soon(self._start_few), False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightResources:
    """The objects that all loads into one registered cache share: ledger, slots, permits, poller and copy thread."""

    ledger: BlockLedger
    seal_slots: SealSlots
    """Slots of host memory into which seals are fetched, one for each rank that a load reads from."""
    permit_queue: FairQueue
    """Permits for reads, which limit the bytes, descriptors and reads in flight, in total and from each rank."""
    poller: ReadPoster
    copy_thread: CopyThread
    clock: Clock
    reads_max: int
    """Maximum number of reads that one load has under way. As many copies may run beside these reads. With 2, the next
    read is under way already when a read ends."""


def read_permit_queue(config: Config, *, grows: bool) -> FairQueue:
    """Return the queue of permits for reads, with limits in total and for each rank.

    `grows`: True to raise the limit in bytes of a fast rank to the bytes that the rank delivers in 1 ms (`_AHEAD_S`).
    """
    of_peer = config.limits.peer_in_flight_bytes_max, *_PER_RANK_MAX
    in_all = config.in_flight_bytes_max, *_TOTAL_MAX
    return FairQueue(in_all, of_peer, ahead_s=_AHEAD_S if grows else 0.0)
