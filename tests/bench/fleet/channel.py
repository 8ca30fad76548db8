"""A model of the side channel's connections: how many a listener has, and how long it takes to answer.

Questions and answers are the real ones, and so are the bounds: what is kept and for how long, how many connections a
listener takes before it drops all, how often a question is asked again. What a connection and an answer take is given.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial

from kvflow.config import Config
from kvflow.core.policy.circuit import delay_s
from kvflow.limits import Limits
from kvflow.runtime.channel.asking import ATTEMPTS_MAX, RETRY_PAUSES
from kvflow.runtime.channel.connections import KEPT_IDLE_S, KEPT_MAX
from kvflow.testing.side_channel import Exchange, Frames, InprocSideChannel, set_reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Virtual seconds that the network and the engines' loops take."""

    latency_s: float = 1e-4
    """One way."""
    answer_s: float = 1e-3
    """Of the asked rank's loop, for a question; they are answered one after the other."""


@dataclass(slots=True, eq=False)
class _Connection:
    """From one asker to one listener."""

    port: SimulatedListener
    asked: set[_Question] = field(default_factory=set)
    open: bool = True


@dataclass(slots=True, eq=False)
class _Question:
    address: str
    frames: Frames
    answered: asyncio.Future[Frames]
    attempts: int = 0


class SimulatedListener:
    """The listening end of one address, over all processes that have listened there."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.busy_until_s = 0.0
        self.connections: OrderedDict[_Connection, float] = OrderedDict()
        """Each connection and the time of its last use, the longest unused first."""
        self.connections_peak = 0
        """Connections at once, so far."""
        self.times_dropped = 0
        """How often all were dropped."""
        self.slowest_s = 0.0
        """The longest that a question has waited for its answer to be made."""

    def accept(self, connection: _Connection, now_s: float) -> None:
        """One more; all are dropped if that is too many, as `listening` does it."""
        self._end_idle(now_s)
        self.connections[connection] = now_s
        self.connections_peak = max(self.connections_peak, len(self.connections))
        if len(self.connections) > self._limits.side_channel_connections_max:
            self.times_dropped += 1
            self.drop()

    def drop(self) -> None:
        """Close all connections."""
        for connection in self.connections:
            connection.open = False
        self.connections.clear()

    def _end_idle(self, now_s: float) -> None:
        for connection, used_s in list(self.connections.items()):
            if used_s > now_s - KEPT_IDLE_S:
                break
            if connection.asked:
                self.connections.move_to_end(connection)
            else:
                connection.open = False
                del self.connections[connection]


class SimulatedConnections:
    """All connections of a fleet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random, limits: Limits, costs: Costs) -> None:
        self.exchange = Exchange()
        self.ports: dict[str, SimulatedListener] = {}
        self.loop = loop
        self.rng = rng
        self.limits = limits
        self.costs = costs

    def side_channel(self, config: Config) -> InprocSideChannel:
        """For one rank's process."""
        return InprocSideChannel(self.exchange, config, send=_AskingRank(self).send)

    def port(self, address: str) -> SimulatedListener:
        """Made when an address is first asked."""
        if address not in self.ports:
            self.ports[address] = SimulatedListener(self.limits)
        return self.ports[address]


class _AskingRank:
    """The connections that one rank has to others."""

    def __init__(self, connections_model: SimulatedConnections) -> None:
        self._connections_model = connections_model
        self._loop = connections_model.loop
        self._kept_connections: OrderedDict[str, _Connection] = OrderedDict()

    def send(self, address: str, frames: Frames, answered: asyncio.Future[Frames]) -> None:
        """See `InprocSideChannel`."""
        self._send_question(_Question(address, frames, answered))

    def _send_question(self, question: _Question) -> None:
        """Over the connection that is kept, or a new one, which takes a round trip more."""
        if question.answered.done():
            return
        latency_s, now_s = self._connections_model.costs.latency_s, self._loop.time()
        connection = self._kept_connections.get(question.address)
        way_s = latency_s
        if connection is None or not connection.open:
            if question.address not in self._connections_model.exchange.listeners:
                self._loop.call_later(2 * latency_s, set_reply, question.answered, None)
                return
            connection, way_s = _Connection(self._connections_model.port(question.address)), 3 * latency_s
            connection.port.accept(connection, now_s)
        connection.asked.add(question)
        question.attempts += 1
        self._loop.call_later(way_s, self._on_question_arrival, connection, question)

    def _on_question_arrival(self, connection: _Connection, question: _Question) -> None:
        """At the listener, which answers when it has answered those before."""
        listener, port = self._connections_model.exchange.listeners.get(question.address), connection.port
        if listener is None or not connection.open:
            self._on_closed(connection, question)
            return
        now_s = self._loop.time()
        port.busy_until_s = max(port.busy_until_s, now_s) + self._connections_model.costs.answer_s
        port.slowest_s = max(port.slowest_s, port.busy_until_s - now_s)
        reply = partial(self._send_answer, connection, question)
        self._loop.call_at(port.busy_until_s, listener.arrive, question.frames, reply, context=listener.context)

    def _send_answer(self, connection: _Connection, question: _Question, frames: Frames) -> None:
        self._loop.call_later(
            self._connections_model.costs.latency_s, self._on_answer_arrival, connection, question, frames
        )

    def _on_answer_arrival(self, connection: _Connection, question: _Question, frames: Frames) -> None:
        if not connection.open:
            self._on_closed(connection, question)
            return
        connection.asked.discard(question)
        set_reply(question.answered, frames)
        self._keep_connection(question.address, connection)

    def _on_closed(self, connection: _Connection, question: _Question) -> None:
        """It ended before the answer: ask again after a while, as `asking` does."""
        connection.asked.discard(question)
        if question.answered.done():
            return
        if question.attempts < ATTEMPTS_MAX:
            pause_s = delay_s(question.attempts, RETRY_PAUSES, self._connections_model.rng.random())
            self._loop.call_later(pause_s, self._send_question, question)
        else:
            question.answered.set_exception(ConnectionResetError("the peer closed the connection without an answer"))

    def _keep_connection(self, address: str, connection: _Connection) -> None:
        """Keep a connection for the next question: one for each address, and at most a fixed number in all."""
        port, now_s = connection.port, self._loop.time()
        if (
            self._kept_connections.setdefault(address, connection) is not connection
            and self._kept_connections[address].open
        ):
            connection.open = False
            port.connections.pop(connection, None)
            return
        self._kept_connections[address] = connection
        self._kept_connections.move_to_end(address)
        port.connections[connection] = now_s
        port.connections.move_to_end(connection)
        if len(self._kept_connections) > KEPT_MAX:
            _, oldest = self._kept_connections.popitem(last=False)
            if not oldest.asked:
                oldest.open = False
                oldest.port.connections.pop(oldest, None)
