"""Peers: one object per remote rank, at most one handshake at a time for each, connections shared by all loads.

A handshake has a task of its own, so a load that gives up does not end the handshake for other loads. After a failure a
peer is in back-off (`core.policy.circuit`): loads that need the peer fail immediately, without a packet. If a ticket
names an incarnation that was not tried yet, the peer has restarted since, and is asked nevertheless.

An address in a ticket proves nothing. So never-connected peers are asked a few at a time (`first_contacts`), and are
evicted first when `Limits.peers_max` is reached. A timer also evicts peers that no load has used for
`Limits.peer_idle_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from kvflow.checks import counted
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.policy.circuit import NEVER_FAILED, BackOff, Circuit, after_failed_handshake, after_failed_read
from kvflow.core.policy.contacts import Contact
from kvflow.core.policy.states import PeerEvent, PeerState
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address, PeerAddress, peer_at
from kvflow.core.protocol.messages import LeaseAnswerState
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import (
    KVFlowError,
    PeerError,
    PeerIncompatible,
    PeerNotReady,
    PeerUnreachable,
    ProtocolError,
    RequestError,
    RuntimeBroken,
    RuntimeClosed,
)
from kvflow.limits import QUESTION_WAIT_S
from kvflow.logs import logger_of
from kvflow.runtime.clock import Alarm
from kvflow.runtime.peers.first_contacts import FirstContacts, first_contact_timeout_s, overloaded
from kvflow.runtime.peers.handshake import Agents
from kvflow.runtime.peers.peer import INCARNATIONS_MAX, Connection, Handshake, Peer, Source, peer_to_evict
from kvflow.runtime.rank import RankContext

logger = logger_of(__name__)

_FIRST_PAUSE_S, _PAUSE_MAX_S = 0.005, 0.2
_UNREACHABLE_MAX = 3  # failures in a row: a listener that has too many connections drops all
_LOGGED_MAX = 1024
_SUCCESSORS_MAX = 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatistics:
    """The current state of one peer, which is one rank of a remote engine at one address."""

    engine_id: str
    rank: Rank
    address: str
    state: PeerState
    failures: int
    """Number of failures since the last success."""
    retry_after_s: float
    """Seconds of back-off left, in which loads that need the peer fail immediately; 0 without back-off."""
    last_error: str
    """Text of the last failure; "" if nothing has failed since the last successful handshake."""
    was_connected: bool
    """True once a handshake has succeeded. If False, perhaps no peer exists, since a ticket can name any address."""


class HandshakeClient(Protocol):
    """Interface that shakes hands with peers and asks them questions, such as `handshake.Handshakes`."""

    async def connect(self, peer: Peer, request_id: str | None) -> Connection: ...

    async def ask(self, peer: Peer, request: messages.Request, timeout_s: float | None = None) -> messages.Reply: ...


class Peers:
    """All peers of one registered cache: their connections, questions, back-off and eviction."""

    def __init__(self, context: RankContext, agents: Agents, handshakes: HandshakeClient) -> None:
        config = context.config
        self._config = config
        self._back_off = BackOff(config.limits.peer_backoff_first_s, config.limits.peer_backoff_max_s)
        self.handshakes = handshakes
        self._agents = agents
        self._clock = context.clock
        self._spawn = context.spawn
        self._token_hex = context.token_hex
        self._contacts = FirstContacts(config)
        self.by_address: dict[tuple[str, Rank, str], Peer] = {}
        """All peers by `Address`. Other modules may read this dict but not change it."""
        self._own = (context.local.caller, context.incarnation)
        self._logged: BoundedMap[tuple[str, str], None] = BoundedMap(_LOGGED_MAX)
        """Bounded set of (address or engine id, text) for which a warning was logged."""
        self.successors: BoundedMap[tuple[str, Rank], PeerAddress] = BoundedMap(_SUCCESSORS_MAX)
        """For each rank that has closed, by engine id and rank: the rank that takes its place, as its goodbye said."""
        self._sweep_alarm = Alarm(context.clock, self._evict_idle)
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
                was_connected=peer.was_connected,
            )
            for peer in self.by_address.values()
        )

    def get(self, at: Address) -> Peer:
        """Return the `Peer` object for `at`, and create it on the first call.

        If that would exceed `Limits.peers_max`, first evict another peer. Overloaded if no peer may be evicted.
        """
        peer = self.by_address.get(at)
        if peer is None:
            self._make_room(at)
            peer = self.by_address[at] = Peer(at, self._clock.now_s())
            if self._sweep_alarm.due_s == math.inf and not self._closed:
                self._set_sweep_alarm()
        return peer

    async def connect(self, peer: Peer, incarnation: str | None, request_id: str | None = None) -> Connection:
        """Return the connection to `peer`, after a handshake if there is none. Concurrent calls share one handshake.

        `incarnation`: the one that a ticket names; None for any. If this rank does not know that incarnation, shake
        hands in any case, since the peer may have restarted. `request_id`: sent to the peer, since a draining peer
        accepts only requests with an open lease.

        If cancelled, stop waiting; the handshake goes on. But if the peer was never connected, and no other load waits
        for the handshake, it is cancelled if the peer was not asked yet, or once another new peer waits to be asked.
        """
        while True:
            if peer.state is PeerState.CLOSED:  # evicted while its rank took long to answer
                peer = self.get(peer.at)
            peer.last_used_s = self._clock.now_s()
            connection = peer.usable_connection(incarnation)
            if connection is not None:
                return connection
            handshake, ours = peer.handshake, peer.handshake is None
            if handshake is None:
                handshake = self._start_handshake(peer, incarnation, request_id)
            handshake.add_waiters(1)
            try:
                connection = await asyncio.shield(handshake.future)
            except PeerNotReady:  # if the handshake was for another request, ask for this one
                if ours:
                    raise
            else:
                if ours or incarnation in (None, connection.incarnation):
                    return connection
            finally:
                handshake.add_waiters(-1)
                self._note_waiters(peer, handshake)

    async def ask_once(self, peer: Peer, question: messages.ReaderRequest) -> messages.LeaseAnswer:
        """Ask `peer` about a lease and return the answer. If the peer does not answer, drop its connection.

        The peer has to answer `question` immediately: a LeaseRequest must have `wait_s` 0.
        """
        connection = peer.connection
        async with peer.questions:
            if connection is not None and peer.connection is None:  # another question has failed meanwhile
                raise peer.at.failure(PeerUnreachable, peer.last_error)
            connection = peer.connection
            try:
                return await self.ask(peer, question, messages.LeaseAnswer)
            except PeerUnreachable as error:
                if connection is not None:
                    self.note_read_failure(connection, str(error))
                raise

    async def ask_until_answered(
        self, peer: Peer, question: messages.LeaseRequest, give_up_s: float = math.inf
    ) -> messages.LeaseAnswer:
        """Repeat `question`, about a lease, until the state in the answer is not WAITING, and return that answer.

        `give_up_s`: time, by the event loop's clock, at which to return the last answer even if its state is WAITING.
        If a question gets no answer, ask again. PeerUnreachable if three questions in a row, or the last question
        before `give_up_s`, get none.
        """
        loop, pause_s, unreachable = asyncio.get_running_loop(), _FIRST_PAUSE_S, 0
        while True:
            begun_s = loop.time()
            wait_s = min(max(give_up_s - begun_s, 0.0), QUESTION_WAIT_S)
            try:
                asked = msgspec.structs.replace(question, wait_s=wait_s)
                timeout_s = wait_s + self._config.handshake_timeout_s
                answer = await self.ask(peer, asked, messages.LeaseAnswer, timeout_s=timeout_s)
            except PeerUnreachable:
                unreachable += 1
                if unreachable == _UNREACHABLE_MAX or wait_s < QUESTION_WAIT_S:  # the last question
                    raise
            else:
                unreachable = 0
                if answer.state is not LeaseAnswerState.WAITING or loop.time() >= give_up_s:
                    return answer
            if loop.time() - begun_s < wait_s / 2:  # the rank has no room for a question that waits
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
            else:
                pause_s = _FIRST_PAUSE_S

    async def ask(self, peer: Peer, question: messages.Request, *kinds: type[T], timeout_s: float | None = None) -> T:
        """Send `question` to `peer` and return the answer. If the peer was never connected, wait for a turn first.

        ProtocolError if the answer is of none of the types `kinds`.
        """
        reply = await self._ask_in_turn(peer, partial(self.handshakes.ask, peer, question, timeout_s))
        if not isinstance(reply, kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise peer.at.failure(ProtocolError, f"expected {names}, got {type(reply).__name__}")
        return reply

    async def send(self, peer: Peer, message: messages.ReaderRequest) -> messages.Ack:
        """Send `message` to a peer, and return the peer's acknowledgement."""
        self.check_back_off(peer, None)
        async with peer.questions:
            return await self.ask(peer, message, messages.Ack)

    def note_read_success(self, sources: Sequence[Source], *, fresh: bool) -> None:
        """Record successful reads from `sources`: reset the failure counts of their peers.

        `fresh`: proofs have shown that the bytes were fresh.
        """
        now_s = self._clock.now_s()
        for source in sources:
            source.peer.circuit, source.peer.last_used_s = NEVER_FAILED, now_s
            source.peer.has_delivered |= fresh

    def in_back_off(self, ticket: Ticket) -> bool:
        """Return True if a rank that the ticket names is in back-off, so that a load with the ticket would fail."""
        now_s = self._clock.now_s()
        places = (((ticket.dp_rank, rank.pp_rank, rank.tp_rank), rank.address) for rank in ticket.ranks)
        peers = (self.by_address.get((ticket.engine_id, Rank(*place), address)) for place, address in places)
        return any(peer.circuit.wait_s(now_s) > 0 for peer in peers if peer is not None)

    def has_delivered(self, engine_id: str) -> bool:
        """Return True if some known rank of engine `engine_id` has delivered fresh bytes to a load."""
        return any(peer.engine_id == engine_id and peer.has_delivered for peer in self.by_address.values())

    def note_read_failure(self, connection: Connection, why: str) -> None:
        """After a failed read, drop `connection` and count a failure of its peers. New loads then shake hands again.

        Further calls for the same connection change nothing: the connection's other reads fail too.
        """
        for peer in self._peers_with(connection):
            waits = self._count_failure(peer, after_failed_read) > 0
            peer.last_error_type = PeerUnreachable
            peer.note_error(why)
            self._disconnect(peer, "back_off" if waits else "break", why)

    def on_goodbye(self, goodbye: messages.Goodbye) -> asyncio.Future[None] | None:
        """Drop the connection to the rank that sent `goodbye`, if the connection is to the incarnation in `goodbye`.

        Return a future of the removal of the rank's agent from the transport; None if nothing is removed.
        """
        removal = None
        for peer in self.by_address.values():
            connection = peer.connection
            # Without the address, since one rank may be known by several. A goodbye that is late changes nothing (I4).
            if peer.at[:2] == goodbye.sender[:2] and connection and connection.incarnation == goodbye.incarnation:
                if goodbye.successor is not None:
                    with contextlib.suppress(RequestError):  # of an address that no rank has
                        self.successors[peer.at[:2]] = peer_at(goodbye.successor)
                self._disconnect(peer, "break", "the peer closes")
                removal = self._agents.removal(connection.agent)
        return removal

    async def forget(self, engine_id: str, address: str | None) -> bool:
        """Forget the peers of `engine_id` at `address`, or at any address if None, once their handshakes have ended.

        Return True if their agents have left the transport, False if that takes longer than Config.handshake_timeout_s.
        """

        def chosen() -> list[Peer]:
            peers = self.by_address.values()
            return [peer for peer in peers if peer.engine_id == engine_id and address in (None, peer.address)]

        handshakes = [peer.handshake.future for peer in chosen() if peer.handshake is not None]
        if handshakes:
            await asyncio.wait(handshakes)  # bounded: handshake_timeout_s for a turn, and as long again
        agents = [peer.connection.agent for peer in chosen() if peer.connection is not None]
        for peer in chosen():
            if peer.handshake is None:  # a handshake that began meanwhile starts from scratch anyway
                self._drop(peer, "forgotten")
        return await self._agents.wait_removed(agents, self._config.handshake_timeout_s)

    async def aclose(self) -> None:
        """Drop all peers, after all loads and handshakes have ended."""
        self._closed = True
        self._sweep_alarm.set(math.inf)
        for peer in list(self.by_address.values()):
            self._drop(peer, "closing")

    def _start_handshake(self, peer: Peer, incarnation: str | None, request_id: str | None) -> Handshake:
        self.check_back_off(peer, incarnation)
        handshake = Handshake(asyncio.get_running_loop().create_future(), self._clock.now_s())
        body = self._run_handshake(peer, incarnation, request_id, handshake)
        handshake.task = self._spawn(body, name=f"kvflow-handshake {peer.address}")
        # Not in the task's body, which never runs if the task is cancelled before its first step.
        handshake.task.add_done_callback(
            lambda _: self._fail_handshake(
                peer, handshake, RuntimeClosed("the runtime closed, or its cache was unregistered")
            )
        )
        peer.handshake = handshake
        peer.fire("connect")
        if incarnation is not None:
            peer.tried_incarnations.add(incarnation)
        return handshake

    def check_back_off(self, peer: Peer, incarnation: str | None) -> None:
        """If the peer is in back-off, raise an error of the same class as the peer's last failure.

        Do not raise if `incarnation`, which a ticket names, was not tried yet: then the peer has restarted.
        """
        wait_s = peer.circuit.wait_s(self._clock.now_s())
        tried = peer.tried_incarnations
        # Bounded, since forged tickets may name any number of incarnations (I8).
        may_try = incarnation is not None and incarnation not in tried and len(tried) < INCARNATIONS_MAX
        if wait_s > 0 and not may_try:
            failures = f"failures in a row: {peer.circuit.failures}, the last: {peer.last_error}"
            why = f"in back-off for another {wait_s:.3g} s ({failures})"
            raise peer.at.failure(peer.last_error_type, why, retry_after_s=wait_s)

    async def _ask_in_turn(
        self, peer: Peer, question: Callable[[], Awaitable[T]], on_turn: Callable[[Contact], None] = lambda _: None
    ) -> T:
        """Await `question()` and return its result. If `peer` was never connected, first wait for a turn.

        `on_turn` is called with that turn.
        """
        if peer.was_connected:
            return await question()
        return await self._contacts.ask_in_turn(peer.at, question, on_turn)

    async def _run_handshake(
        self, peer: Peer, incarnation: str | None, request_id: str | None, handshake: Handshake
    ) -> None:
        """Shake hands with `peer` and set the result or error of `handshake.future`.

        Task `kvflow-handshake <address>`: begun by the first load that needs a peer. It ends when the peer answers,
        or `handshake_timeout_s` after the peer was asked. If no load waits for the handshake, and another new peer
        waits to be asked, the task ends earlier. Waiting loads get the task's error.
        """
        try:
            shake_hands = partial(self.handshakes.connect, peer, request_id)
            connection = await self._ask_in_turn(peer, shake_hands, handshake.start_turn)
        except KVFlowError as problem:
            self._fail_handshake(peer, handshake, problem)
        except TimeoutError:
            bound = f"handshake not done within {self._config.handshake_timeout_s} s (handshake_timeout_s)"
            self._fail_handshake(peer, handshake, peer.at.failure(PeerUnreachable, bound))
        except Exception as bug:
            error = RuntimeBroken("the handshake task died")
            error.__cause__ = bug
            self._fail_handshake(peer, handshake, error)
            raise
        else:
            peer.handshake = None
            self._set_connection(peer, connection, incarnation)
            handshake.future.set_result(connection)

    def _fail_handshake(self, peer: Peer, handshake: Handshake, error: KVFlowError) -> None:
        """Set `error` on a handshake's future, and record the failure of `peer`. No effect if the future is done."""
        future = handshake.future
        if future.done():
            return
        peer.handshake = None
        self._note_failed_handshake(peer, error)
        future.set_exception(error)
        future.exception()  # retrieved here, since every waiter may have given up

    def _note_waiters(self, peer: Peer, handshake: Handshake) -> None:
        """Called after a load has stopped waiting for `handshake`. If no other load waits, let the handshake end early.

        If the peer was never connected, and the handshake still waits for its turn as a first contact, cancel the
        handshake. If the handshake has a turn, let it end as soon as another new peer waits for a turn.
        """
        if handshake.waiters or handshake.future.done():
            return
        if not peer.was_connected and handshake.waits_for_turn:
            self._cancel_handshake(peer, handshake, "no load waits for it")
        else:
            self._contacts.end_overdue()

    def _cancel_handshake(self, peer: Peer, handshake: Handshake, why: str) -> None:
        """Cancel `handshake`, without counting a failure of the peer. Its waiters get Overloaded, with `why`."""
        self._fail_handshake(peer, handshake, overloaded(peer.at, why))
        if handshake.task is not None:
            handshake.task.cancel()

    def _set_connection(self, peer: Peer, connection: Connection, incarnation: str | None) -> None:
        """Make `connection` the current connection of `peer`, after a handshake.

        `incarnation`: the one in the ticket that led to the handshake. The previous connection's incarnation and the
        ticket's incarnation become past ones, except one that is also the incarnation of `connection`.
        """
        # A ticket that names a past incarnation must not replace the connection again: NIXL leaks file descriptors for
        # each live agent that is removed and added (decision 0009).
        before, past = peer.connection, peer.past_incarnations
        others = {incarnation, before.incarnation if before else None} - {None, connection.incarnation}
        past.extend(other for other in others if other is not None and other not in past)
        peer.fire("connected")
        peer.connection = connection
        self.successors.pop(peer.at[:2], None)
        self._note_twins(peer, connection.incarnation)
        peer.was_connected = True
        peer.tried_incarnations = {connection.incarnation}
        peer.last_error = ""
        if not connection.block_maps:  # no read will ever reset its failures
            peer.circuit = NEVER_FAILED
        if before is not None and before is not connection:
            self._leave_connection(before)

    def _note_failed_handshake(self, peer: Peer, error: KVFlowError) -> None:
        """Record that a handshake failed with `error`. A PeerError other than PeerNotReady begins a back-off."""
        event: PeerEvent = "postpone"
        if isinstance(error, PeerError) and not isinstance(error, PeerNotReady):
            event = "back_off"
            error.retry_after_s = self._count_failure(peer, after_failed_handshake)
            peer.last_error_type = type(error)
        if isinstance(error, PeerIncompatible):
            self.note_incompatible(error)
        peer.note_error(str(error))
        self._disconnect(peer, event, str(error))

    def _note_twins(self, peer: Peer, incarnation: str) -> None:
        """Log a warning, once for each engine id, if another engine with the id of `peer`'s engine is known.

        An engine that has moved to another address without a goodbye looks the same for a while.
        """
        connected = [(known.at, known.connection.incarnation) for known in self.by_address.values() if known.connection]
        places = [at.address for at, other in [*connected, self._own] if at[:2] == peer.at[:2] and other != incarnation]
        if places and (warning := (peer.engine_id, "several engines")) not in self._logged:
            self._logged[warning] = None
            logger.warning(
                "engine id %r (%s) is that of several engines: at %s and at %s: give each engine its own engine_id, "
                "or counts, back-off and warnings of one are taken for those of the other",
                peer.engine_id,
                peer.rank,
                peer.address,
                ", ".join(places),
            )

    def note_incompatible(self, error: PeerIncompatible) -> None:
        """Log, once for each address and reason, that no load can read from an incompatible peer."""
        known = (str(error.peer), str(error))
        if known not in self._logged:
            logger.warning("%s; every load from it fails until the configuration of one side is changed", error)
        self._logged[known] = None

    def _count_failure(self, peer: Peer, after: Callable[..., Circuit]) -> float:
        """Count a failure of `peer` and return its back-off in seconds.

        `after`: function that computes the peer's next circuit, either `after_failed_handshake` or `after_failed_read`.
        """
        now_s, chance = self._clock.now_s(), int(self._token_hex(4), 16) / (1 << 32)
        peer.circuit = after(peer.circuit, self._back_off, now_s=now_s, chance=chance)
        return peer.circuit.wait_s(now_s)

    def _peers_with(self, connection: Connection) -> list[Peer]:
        """Return the peers that share `connection`. Several do if several addresses lead to one rank."""
        return [peer for peer in self.by_address.values() if peer.connection is connection]

    def _disconnect(self, peer: Peer, event: PeerEvent, why: str) -> None:
        """Drop the connection of `peer`, if it has one, and change the peer's state by `event` (see `PEER_TABLE`).

        While a handshake is under way, leave the state as it is, because the handshake's outcome will change the state.
        """
        connection, peer.connection = peer.connection, None
        if peer.handshake is None:
            peer.fire(event, why)
        if connection is not None:
            self._leave_connection(connection)

    def _leave_connection(self, connection: Connection) -> None:
        if not self._peers_with(connection):
            self._agents.remove_when_idle(connection)

    def _drop(self, peer: Peer, why: str) -> None:
        """Close `peer`, which has no handshake under way, and remove it from `by_address`."""
        del self.by_address[peer.at]
        self._disconnect(peer, "close", why)

    def _make_room(self, new_peer: Address) -> None:
        """If this rank knows `Limits.peers_max` peers, evict one for `new_peer`. Overloaded if none may be evicted."""
        if len(self.by_address) < self._config.limits.peers_max:
            return
        now_s = self._clock.now_s()
        asked_s, used_s = now_s - first_contact_timeout_s(self._config), now_s - self._config.handshake_timeout_s
        peer = peer_to_evict(self.by_address.values(), asked_before_s=asked_s, used_before_s=used_s)
        if peer is None:
            raise overloaded(
                new_peer, f"no room for it: {counted(len(self.by_address), 'peer')} in use (limits.peers_max)"
            )
        why = f"evicted for a new peer, {counted(len(self.by_address), 'peer')} known (limits.peers_max)"
        if peer.handshake is not None:
            self._cancel_handshake(peer, peer.handshake, why)
        self._drop(peer, why)

    def _set_sweep_alarm(self) -> None:
        self._sweep_alarm.set(self._clock.now_s() + self._config.limits.peer_idle_s / 4)

    def _evict_idle(self) -> None:
        """Evict the peers that are not busy and have not been used for `Limits.peer_idle_s`. Called by the alarm."""
        now_s, idle_s = self._clock.now_s(), self._config.limits.peer_idle_s
        for peer in list(self.by_address.values()):
            if not peer.busy and peer.last_used_s <= now_s - idle_s:
                self._drop(peer, f"not used for {idle_s} s")
        if self.by_address:
            self._set_sweep_alarm()
