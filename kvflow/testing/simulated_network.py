"""A simulated network between engines: delays, losses, and the times at which bytes land.

A `SimFlight` is a posted read. The bytes are copied out of the producer's memory at random times between the post and
the end of the read, in several portions if the read is torn. So if memory is reused too early, some reader gets wrong
bytes. A posted read cannot be cancelled: it continues after the load that posted it has ended. The end of the read is
reported once to the reader's transport, or not at all if the reader's process dies.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvflow.testing.network_conditions import CALM, NetworkConditions
from kvflow.testing.side_channel import Exchange
from kvflow.testing.virtual_loop import SimProcess, SimProcessState, VirtualLoop, process_of
from kvflow.transport.base import AgentName, PeerGone, TransportError
from kvflow.transport.inproc import InprocNetwork, InprocRead, InprocTransport, Row

LOAD: ContextVar[object] = ContextVar("kvflow_simulated_load", default=None)
"""The load that the running code belongs to. A simulated engine sets this variable for each load, so that a posted read
knows its load (`SimFlight.load`).
"""


@dataclass(slots=True, eq=False)
class SimHost:
    """A simulated host of one engine: its address, its running process, and the agents of that process."""

    name: str
    address: str
    """Address of the host's side-channel listeners, without the port."""
    process: SimProcess
    agents: list[InprocTransport] = field(default_factory=list)
    poller_stalled_until_s: float = 0.0
    agent_lost: bool = False
    """True if the simulation has killed an agent of the running process."""
    stands_still: bool = False
    """True while reads that the host has posted wait for its machine, which is paused (`Network.pause`)."""


@dataclass(slots=True, eq=False)
class SimFlight:
    """A simulated read under way. Its `portions` are copied one after another, at intervals of `pause_s` on average.

    `target`: the transport that is read from. `hosts`, `processes`: pairs (the reader's, the target's).
    """

    reader: InprocTransport
    target: InprocTransport
    hosts: tuple[SimHost, SimHost]
    read: InprocRead
    load: object
    portions: deque[list[Row]]
    fails_after: int | None
    """Number of portions that will still land before the read fails; None if the read does not fail."""
    pause_s: float
    processes: tuple[SimProcess, SimProcess]
    posted_s: float


class Network:
    """A simulated network, which decides whether and when reads are performed and messages arrive.

    The messages are notifications, and requests on the side channel.

    `rng` makes the random choices, by the delays and fault rates of `conditions`. `note(event, *facts)` is called for
    the simulation's log. `on_landing` and `on_landed` are called before and after each portion of a read is copied.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        note: Callable[..., None] = lambda *_: None,
        on_landing: Callable[[SimFlight, list[Row]], None] = lambda *_: None,
        on_landed: Callable[[SimFlight, list[Row]], None] = lambda *_: None,
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.conditions: NetworkConditions = CALM
        self.note = note
        self.agents = InprocNetwork()
        self.agents.leaves_memory = True
        self.exchange = Exchange()
        self._on_landing = on_landing
        self._on_landed = on_landed
        self._hosts: dict[InprocTransport, SimHost] = {}
        self._addresses: dict[str, SimHost] = {}
        self._flights: dict[SimFlight, None] = {}
        self._cut: dict[frozenset[str], None] = {}
        self._stalled: list[SimFlight] = []
        self._begun_s: dict[tuple[InprocTransport, InprocTransport], float] = {}
        """When the latest read of which bytes have landed was posted, by its reader and target."""
        self._ended: asyncio.Future[None] = loop.create_future()
        """Future that is done as soon as any read ends. `_landed` replaces this future before each wait."""
        self._context = copy_context()

    # --- hosts

    def attach(self, host: SimHost, name: str) -> InprocTransport:
        """Create an agent called `name` on `host`, and return its transport."""
        self._addresses[host.address] = host
        ways = partial(self._post, host), partial(self._notify, host), partial(self._wake, host), self._landed
        transport = InprocTransport(name, self.agents, link=_NetworkLink(*ways))
        host.agents.append(transport)
        self._hosts[transport] = host
        return transport

    def detach(self, host: SimHost) -> None:
        """Remove all agents and listeners of a host whose process died, so peers can no longer read its memory."""
        for agent in host.agents:
            self.agents.agents.pop(agent.name, None)
            self.agents.closed.pop(agent.name, None)
            del self._hosts[agent]
        host.agents.clear()
        listeners = self.exchange.listeners
        for address, listener in tuple(listeners.items()):
            if process_of(listener.context) is host.process:
                del listeners[address]

    def host_at(self, address: str) -> SimHost | None:
        """Return the simulated host with a side-channel listener at `address` ("tcp://host:port"), or None."""
        return self._addresses.get(address.rpartition(":")[0])

    # --- links

    def cut(self, one: SimHost, other: SimHost) -> None:
        self._cut[frozenset((one.name, other.name))] = None

    def heal(self) -> None:
        """Repair all cut links between hosts. Reads that were stalled by a cut link continue."""
        self._cut.clear()
        self.resume()

    def pause(self, host: SimHost, *, waits: bool) -> None:
        """Pause the machine of `host`: the reads that it has posted land now or, with `waits`, after `resume`.

        A read of which bytes have landed, and every read posted before it, ends now in any case: reads go in order.
        """
        host.stands_still = False  # of an earlier pause
        for flight in [flight for flight in self._flights if flight.hosts[0] is host]:
            if not waits or flight.posted_s <= self._begun_s.get((flight.reader, flight.target), -1.0):
                while flight in self._flights:
                    if self.linked(*flight.hosts):
                        self._land(flight)
                    else:
                        self._end(flight, TransportError("simulated failure"))
        host.stands_still = waits

    def resume(self) -> None:
        """Continue all stalled reads. Those of a host that stands still, or over a cut link, are stalled again."""
        stalled, self._stalled = self._stalled, []
        for flight in stalled:
            self.later(self.delay_s(), self._land, flight)

    def linked(self, one: SimHost, other: SimHost) -> bool:
        return not self._cut or frozenset((one.name, other.name)) not in self._cut

    # --- time

    def later(self, delay_s: float, callback: Callable[..., None], *args: object) -> None:
        """Call `callback(*args)` after `delay_s` virtual seconds, even if simulated processes are frozen or dead."""
        self.loop.call_later(delay_s, callback, *args, context=self._context)

    def delay_s(self) -> float:
        """Return a random number of seconds that a small message takes between two hosts."""
        return self.conditions.latency_s * (0.5 + self.rng.random())

    def chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    # --- reads

    def _post(self, host: SimHost, reader: InprocTransport, read: InprocRead) -> None:
        refusal = reader.refusal(read)
        if refusal is not None:
            self.later(self.delay_s(), reader.end, read, refusal)
            return
        target = self._readable(read.peer)
        assert target is not None, "else it is refused"
        conditions, rng = self.conditions, self.rng
        portions = self._tear(read.rows()) if self.chance(conditions.torn_share) else deque([read.rows()])
        slow = self.chance(conditions.slow_share)
        duration_s = rng.uniform(0.0, conditions.slow_s) if slow else rng.expovariate(1 / conditions.read_s)
        other = self._hosts[target]
        flight = SimFlight(
            reader=reader,
            target=target,
            hosts=(host, other),
            processes=(host.process, other.process),
            read=read,
            load=LOAD.get(),
            portions=portions,
            fails_after=rng.randrange(len(portions)) if self.chance(conditions.failed_share) else None,
            pause_s=duration_s / (len(portions) + 1),
            posted_s=self.loop.time(),
        )
        self._flights[flight] = None
        self._next(flight)

    def _readable(self, name: AgentName) -> InprocTransport | None:
        """Return the transport of agent `name`, closed or not, if its memory can still be read; else None."""
        return self.agents.agents.get(name) or self.agents.closed.get(name)

    async def _landed(self, reader: InprocTransport) -> None:
        """Wait until no read that `reader` has posted is under way, so that no byte can land."""
        while any(flight.reader is reader for flight in self._flights):
            self._ended = self.loop.create_future()
            await asyncio.shield(self._ended)

    def _next(self, flight: SimFlight) -> None:
        self.later(flight.pause_s * 2 * self.rng.random(), self._land, flight)

    def _land(self, flight: SimFlight) -> None:
        """Copy the next portion of a read, or end the read if no portion is left.

        If the read must fail now, or its target is gone, end the read with an error. If the link is cut or the reader's
        host stands still, stall the read until `resume`. If the reader's process is dead, forget the read.
        """
        reader, target = flight.reader, flight.target
        if flight not in self._flights:
            return  # `pause` has ended it
        if flight.processes[0].state is SimProcessState.DEAD:
            self._forget(flight)
        elif flight.hosts[0].stands_still or not self.linked(*flight.hosts):
            self._stalled.append(flight)
        elif self._readable(target.name) is not target:
            self._end(flight, PeerGone(f"agent {target.name!r} is gone"))
        elif flight.fails_after == 0:
            self._end(flight, TransportError("simulated failure"))
        elif flight.portions:
            rows = flight.portions.popleft()
            self._on_landing(flight, rows)
            reader.copy(rows)
            self._on_landed(flight, rows)
            pair = reader, target
            self._begun_s[pair] = max(flight.posted_s, self._begun_s.get(pair, -1.0))
            if flight.fails_after is not None:
                flight.fails_after -= 1
            self._next(flight)
        else:
            self._end(flight, None)

    def _end(self, flight: SimFlight, error: TransportError | None) -> None:
        self._forget(flight)
        self.note("read", flight.reader.name, flight.target.name, flight.read.size_bytes, str(error or "landed"))
        flight.reader.end(flight.read, error)

    def _forget(self, flight: SimFlight) -> None:
        self._flights.pop(flight)
        if not self._ended.done():
            self._ended.set_result(None)

    def _tear(self, rows: list[Row]) -> deque[list[Row]]:
        """Divide the rows (local address, remote address, size) of a read at random into up to three portions.

        Some rows are cut in two, and all are put in random order.
        """
        rng = self.rng
        pieces: list[Row] = []
        for local, remote, size in rows:
            if size >= 16 and rng.random() < 0.3:
                first = rng.randrange(8, size, 8)
                pieces.append((local, remote, first))
                local, remote, size = local + first, remote + first, size - first
            pieces.append((local, remote, size))
        rng.shuffle(pieces)
        edges = sorted(rng.randrange(len(pieces) + 1) for _ in range(2))
        cut = (pieces[: edges[0]], pieces[edges[0] : edges[1]], pieces[edges[1] :])
        return deque(portion for portion in cut if portion)

    # --- notifications

    def _notify(self, host: SimHost, target: InprocTransport, payload: bytes) -> None:
        conditions = self.conditions
        other = self._hosts[target]
        for _ in range(2 if self.chance(conditions.repeated_share) else 1):
            if self.chance(conditions.lost_share) or not self.linked(host, other):
                self.note("lost", host.name, other.name)
                continue
            late_s = self.rng.uniform(0.0, conditions.late_s) if self.chance(conditions.late_share) else 0.0
            self.later(self.delay_s() + late_s, self._arrive, target, payload)

    def _arrive(self, target: InprocTransport, payload: bytes) -> None:
        if self.agents.agents.get(target.name) is target:
            self.note("notified", target.name)
            target.deliver(payload)

    # --- polling

    def _wake(self, host: SimHost, callback: Callable[[], None]) -> None:
        """Call `callback` when the poller of the host's engine next looks for ended reads and notifications."""
        when_s = self.loop.time()
        if self.conditions.poll_s:
            when_s += self.rng.uniform(0.0, self.conditions.poll_s)
        self.loop.call_at(max(when_s, host.poller_stalled_until_s), callback, context=host.process.context())


@dataclass(frozen=True, slots=True)
class _NetworkLink:
    """Implementation of `transport.inproc.SimulatedLink` for one agent, by four functions of the simulated network."""

    take_read: Callable[[InprocTransport, InprocRead], None]
    send: Callable[[InprocTransport, bytes], None]
    report: Callable[[Callable[[], None]], None]
    wait_for_reads: Callable[[InprocTransport], Coroutine[Any, Any, None]]
