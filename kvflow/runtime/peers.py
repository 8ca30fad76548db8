"""Peers: one object per remote rank, one handshake at a time for each, connections shared by all loads.

A handshake runs in a task of its own, so a load that gives up does not take it away from the others that wait. A peer
that fails is left alone for a while (`core.circuit`): loads that need it fail at once, without a packet. A ticket of
a life of the peer that was not tried yet may try at once: it shows that the peer lived after it had failed.

Peers that no load has used for `Config.peer_idle_s` are forgotten; a timer looks, as long as there are any.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from kvflow.config import Config
from kvflow.core import wire
from kvflow.core.circuit import BackOff, Circuit, after_failed_handshake, after_failed_read
from kvflow.core.states import PEER_TABLE, PeerEvent, PeerState, fire, knows
from kvflow.core.topology import Rank
from kvflow.errors import (
    KVFlowError,
    PeerError,
    PeerNotReady,
    PeerUnreachable,
    ProtocolError,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
)
from kvflow.runtime.clocks import PeerClocks
from kvflow.runtime.connection import Address, Connection, Connections, Spawn
from kvflow.runtime.handshake import Handshakes
from kvflow.runtime.world import Clock, Timer

logger = logging.getLogger(__name__)

_LIVES_MAX = 64
_ERROR_CHARS_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatistics:
    """One rank of a remote engine, as it is now."""

    engine_id: str
    rank: Rank
    address: str
    state: PeerState
    failures: int
    """Failures in a row."""
    retry_after_s: float
    """How long loads from it fail at once; 0 if the next one may ask it."""
    last_error: str
    """What failed last, since it was last connected; "" if nothing did."""


class Peer:
    """One rank of a remote engine, by the address of its side channel."""

    def __init__(self, address: Address, now_s: float) -> None:
        self.engine_id, self.rank, self.address = address
        self.at = address
        self.state = PeerState.UNKNOWN
        self.current: Connection | None = None
        self.handshake: asyncio.Future[Connection] | None = None
        self.circuit = Circuit()
        self.last_error = ""
        self.used_s = now_s
        self.tried: set[str] = set()
        """Incarnations of tickets that have asked for it since it was last connected."""
        self.over: deque[str] = deque(maxlen=_LIVES_MAX)
        """Incarnations that are known to be over."""

    def __repr__(self) -> str:
        return f"<Peer {self.engine_id} at {self.address}: {self.state}>"

    @property
    def busy(self) -> bool:
        """Whether a load uses it or waits for it."""
        return self.handshake is not None or (self.current is not None and self.current.used)

    def fire(self, event: PeerEvent, why: str = "") -> None:
        before, self.state = self.state, fire(PEER_TABLE, self.state, event)
        logger.info("peer %s at %s: %s -> %s%s", self.engine_id, self.address, before, self.state, why and f" ({why})")

    def usable(self, incarnation: str | None) -> Connection | None:
        """The connection, unless a ticket of this incarnation shows that it may be outdated."""
        if self.current is None or incarnation is None or incarnation in self.over:
            return self.current
        return self.current if self.current.incarnation == incarnation else None


class Peers:
    """All peers of a runtime."""

    def __init__(
        self,
        config: Config,
        *,
        reader: str,
        handshakes: Handshakes,
        connections: Connections,
        clocks: PeerClocks,
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self._config = config
        self._back_off = BackOff(config.peer_backoff_first_s, config.peer_backoff_max_s)
        self._reader = reader
        self._handshakes = handshakes
        self._connections = connections
        self._clocks = clocks
        self._clock = clock
        self._spawn = spawn
        self._peers: dict[Address, Peer] = {}
        self._sweep_timer: Timer | None = None
        self._closed = False

    @property
    def statistics(self) -> tuple[PeerStatistics, ...]:
        now_s = self._clock.now_s()
        return tuple(
            PeerStatistics(
                engine_id=peer.engine_id,
                rank=peer.rank,
                address=peer.address,
                state=peer.state,
                failures=peer.circuit.failures,
                retry_after_s=peer.circuit.wait_s(now_s),
                last_error=peer.last_error,
            )
            for peer in self._peers.values()
        )

    def get(self, engine_id: str, rank: Rank, address: str) -> Peer:
        """The one object for this peer. RequestError if there are `Config.peers_max` others and all in use."""
        key = Address(engine_id, rank, address)
        peer = self._peers.get(key)
        if peer is None:
            self._make_room(key)
            peer = self._peers[key] = Peer(key, self._clock.now_s())
            if self._sweep_timer is None and not self._closed:
                self._sweep_later()
        return peer

    async def connect(self, peer: Peer, incarnation: str | None, request_id: str | None = None) -> Connection:
        """The peer's connection, made if need be; all who ask meanwhile share one handshake.

        With the incarnation of a ticket, a connection to another one is not taken before the peer was asked once;
        None takes any. `request_id` is for peers that drain: they connect readers of open leases only. Raises a
        PeerError. Cancelling stops the waiting, not the handshake.
        """
        while True:
            if peer.state is PeerState.CLOSED:  # forgotten since: a rank may take long to say its lease
                peer = self.get(*peer.at)
            peer.used_s = self._clock.now_s()
            connection = peer.usable(incarnation)
            if connection is not None:
                return connection
            handshake, ours = peer.handshake, peer.handshake is None
            if handshake is None:
                handshake = self._start_handshake(peer, incarnation, request_id)
            try:
                connection = await asyncio.shield(handshake)
            except PeerNotReady:  # that was about another request
                if ours:
                    raise
            else:
                if ours or incarnation in (None, connection.incarnation):
                    return connection

    async def find_lease(self, peer: Peer, question: wire.LeaseRequest) -> wire.LeaseFound | wire.NoLease:
        """Ask a rank for its lease of a request. Raises a PeerError."""
        connection = peer.current
        try:
            reply = await self._handshakes.ask(peer.at, question)
        except PeerUnreachable as error:
            if connection is not None:
                self.failed(connection, str(error))
            raise
        if isinstance(reply, wire.LeaseFound | wire.NoLease):
            return reply
        raise ProtocolError(f"{peer.address}: asked for a lease, got {type(reply).__name__}", peer=peer.address)

    async def release(self, peer: Peer, question: wire.ReleaseRequest) -> wire.Released | wire.NoLease:
        """Tell a rank that we need a lease's blocks no more. No connection is made. Raises a PeerError."""
        self._check_wait(peer, None)
        reply = await self._handshakes.ask(peer.at, question)
        if isinstance(reply, wire.Released | wire.NoLease):
            return reply
        raise ProtocolError(f"{peer.address}: released a lease, got {type(reply).__name__}", peer=peer.address)

    def keep_clock(self, peer: Peer, now_s: float) -> None:
        """Have a peer's clock asked for if what we know of it has aged; nobody waits for that."""
        if self._clocks.is_due(peer.at, now_s):
            self._spawn(self._handshakes.ask_clock(peer.at), name=f"kvflow-clock {peer.address}")

    def sure_until_s(self, peer: Peer, incarnation: str, theirs_s: float) -> float:
        """See `PeerClocks.sure_until_s`."""
        return self._clocks.sure_until_s(peer.at, incarnation, theirs_s)

    def succeeded(self, peer: Peer) -> None:
        """Bytes were read from it: whatever failed before is over."""
        peer.circuit = Circuit()
        peer.used_s = self._clock.now_s()

    def failed(self, connection: Connection, why: str) -> None:
        """Use the connection for no new load. Several reads may find out; the first one counts."""
        for peer in self._users_of(connection):
            peer.circuit = after_failed_read(
                peer.circuit, self._back_off, now_s=self._clock.now_s(), name=self._name_for(peer)
            )
            peer.last_error = why[:_ERROR_CHARS_MAX]
            waits = peer.circuit.wait_s(self._clock.now_s()) > 0
            self._disconnect(peer, PeerEvent.BACK_OFF if waits else PeerEvent.BREAK, why)

    def said_goodbye(self, goodbye: wire.Goodbye) -> None:
        """A peer drains, or closes: then its connection goes. Nothing happens unless we have one to that very life."""
        sender = goodbye.sender
        rank = Rank(sender.dp_rank, sender.pp_rank, sender.tp_rank)
        for peer in self._peers.values():
            connection = peer.current
            if (peer.engine_id, peer.rank) != (sender.engine_id, rank) or connection is None:
                continue
            if connection.incarnation != goodbye.incarnation:
                continue
            if goodbye.closing:
                self._disconnect(peer, PeerEvent.BREAK, "it closes")
            elif knows(PEER_TABLE, peer.state, PeerEvent.DRAIN):
                peer.fire(PeerEvent.DRAIN)

    async def forget(self, engine_id: str, address: str | None) -> bool:
        """See `Runtime.forget_peer`."""

        def chosen() -> list[Peer]:
            found = [peer for peer in self._peers.values() if peer.engine_id == engine_id]
            return [peer for peer in found if address in (None, peer.address)]

        handshakes = [peer.handshake for peer in chosen() if peer.handshake is not None]
        if handshakes:
            await asyncio.wait(handshakes)  # bounded by handshake_timeout_s
        agents = [peer.current.agent for peer in chosen() if peer.current is not None]
        for peer in chosen():
            if peer.handshake is None:  # else it was begun just now, from scratch
                self._drop(peer, "forgotten")
        return await self._connections.gone(agents, self._config.handshake_timeout_s)

    async def aclose(self) -> None:
        """Forget all peers. Loads have ended before, and the task group has ended handshakes."""
        self._closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for peer in list(self._peers.values()):
            self._drop(peer, "closing")

    def _start_handshake(
        self, peer: Peer, incarnation: str | None, request_id: str | None
    ) -> asyncio.Future[Connection]:
        if self._closed:
            raise RuntimeClosed("the runtime is closed")
        self._check_wait(peer, incarnation)
        future: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        body = self._run_handshake(peer, incarnation, request_id, future)
        task = self._spawn(body, name=f"kvflow-handshake {peer.address}")
        # Here rather than in the task: one that is cancelled before its first step never runs.
        task.add_done_callback(
            lambda _: self._no_handshake(peer, future, RuntimeClosed("the runtime closed during the handshake"))
        )
        peer.handshake = future
        peer.fire(PeerEvent.CONNECT)
        if incarnation is not None:
            peer.tried.add(incarnation)
        return future

    def _check_wait(self, peer: Peer, incarnation: str | None) -> None:
        """PeerUnreachable if the peer must not be asked yet."""
        wait_s = peer.circuit.wait_s(self._clock.now_s())
        another_life = incarnation is not None and incarnation not in peer.tried and len(peer.tried) < _LIVES_MAX
        if wait_s > 0 and not another_life:
            raise PeerUnreachable(
                f"{peer.address}: engine {peer.engine_id!r} ({peer.rank}) is not asked for another {wait_s:.3g} s "
                f"(failures in a row: {peer.circuit.failures}, the last: {peer.last_error})",
                peer=peer.address,
                retry_after_s=wait_s,
            )

    async def _run_handshake(
        self, peer: Peer, incarnation: str | None, request_id: str | None, future: asyncio.Future[Connection]
    ) -> None:
        """The handshake task: settles `future`, unless it is cancelled."""
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                connection = await self._handshakes.connect(peer.at, request_id)
        except KVFlowError as problem:
            self._no_handshake(peer, future, problem)
        except TimeoutError:
            bound = f"handshake not done within {self._config.handshake_timeout_s} s"
            self._no_handshake(peer, future, PeerUnreachable(f"{peer.address}: {bound}", peer=peer.address))
        except Exception as bug:
            error = RuntimeBroken("the handshake task died")
            error.__cause__ = bug
            self._no_handshake(peer, future, error)
            raise
        else:
            peer.handshake = None
            self._connected(peer, connection, incarnation)
            future.set_result(connection)

    def _no_handshake(self, peer: Peer, future: asyncio.Future[Connection], error: KVFlowError) -> None:
        """A handshake came to nothing. No effect if its waiters know already what came of it."""
        if future.done():
            return
        peer.handshake = None
        self._not_connected(peer, error)
        future.set_exception(error)
        future.exception()  # seen: everybody who waited may have given up

    def _connected(self, peer: Peer, connection: Connection, incarnation: str | None) -> None:
        """A handshake worked. What other life the ticket or the last connection was of is over."""
        before = peer.current
        others = {incarnation, before.incarnation if before else None} - {None, connection.incarnation}
        peer.over.extend(other for other in others if other is not None and other not in peer.over)
        peer.fire(PeerEvent.CONNECTED)
        peer.current = connection
        peer.tried = {connection.incarnation}
        peer.last_error = ""
        if connection.pairing is None:  # nothing will be read from it, which would end a row of failures
            peer.circuit = Circuit()
        if before is not None and before is not connection:
            self._leave(before)

    def _not_connected(self, peer: Peer, error: KVFlowError) -> None:
        """A handshake failed; the peer's own fault is counted."""
        event = PeerEvent.POSTPONE
        if isinstance(error, PeerError) and not isinstance(error, PeerNotReady):
            event = PeerEvent.BACK_OFF
            now_s = self._clock.now_s()
            peer.circuit = after_failed_handshake(peer.circuit, self._back_off, now_s=now_s, name=self._name_for(peer))
            error.retry_after_s = peer.circuit.wait_s(now_s)
        peer.last_error = str(error)[:_ERROR_CHARS_MAX]
        self._disconnect(peer, event, str(error))

    def _name_for(self, peer: Peer) -> str:
        """What a wait's jitter depends on: another one for every reader of a peer."""
        return f"{self._reader} {peer.address}"

    def _users_of(self, connection: Connection) -> list[Peer]:
        """Peers that connect by it: two, if two addresses lead to one rank."""
        return [peer for peer in self._peers.values() if peer.current is connection]

    def _disconnect(self, peer: Peer, event: PeerEvent, why: str) -> None:
        """Take the peer's connection away. If a handshake is under way, that decides about the state."""
        connection, peer.current = peer.current, None
        if peer.handshake is None:
            peer.fire(event, why)
        if connection is not None:
            self._leave(connection)

    def _leave(self, connection: Connection) -> None:
        if not self._users_of(connection):
            self._connections.leave(connection)

    def _drop(self, peer: Peer, why: str) -> None:
        """Forget a peer that has no handshake."""
        del self._peers[peer.at]
        self._clocks.forget(peer.at)
        self._disconnect(peer, PeerEvent.CLOSE, why)

    def _make_room(self, newcomer: Address) -> None:
        if len(self._peers) < self._config.peers_max:
            return
        # A load that was given a connection takes a moment until it holds it.
        idle_before_s = self._clock.now_s() - self._config.handshake_timeout_s
        idle = [peer for peer in self._peers.values() if not peer.busy and peer.used_s <= idle_before_s]
        if not idle:
            raise RequestError(
                f"{newcomer.address}: engine {newcomer.engine_id!r}: {len(self._peers)} peers are in use (peers_max)"
            )
        self._drop(min(idle, key=lambda peer: peer.used_s), f"idle, and there are {len(self._peers)} peers")

    def _sweep_later(self) -> None:
        self._sweep_timer = self._clock.call_later(self._config.peer_idle_s / 4, self._sweep)

    def _sweep(self) -> None:
        """The timer: forget who was not used for long enough."""
        idle_before_s = self._clock.now_s() - self._config.peer_idle_s
        for peer in list(self._peers.values()):
            if not peer.busy and peer.used_s <= idle_before_s:
                self._drop(peer, f"not used for {self._config.peer_idle_s} s")
        self._sweep_timer = None
        if self._peers:
            self._sweep_later()
