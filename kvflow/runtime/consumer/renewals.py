"""Keeps leases open while this runtime needs them: the consumer's side of renewal.

It knows the leases of loads under way, and of requests that wait for their load (`Keeping`), and says to their
producers, in one notification per peer, that they are still needed: first when half of the time that is surely left
has passed, then every third of their ttl. So two notifications in a row may be lost. All are best effort, and none is
answered: whether a lease was open during a read is for its seal to say (`core.protocol.seals`).

Where a producer's clock was last asked for long ago a load has it asked for again, beside itself.

Most loads take a millisecond and renew nothing, so all that they pay for is an entry in a dict: there is one timer,
which is set earlier when an earlier lease comes, and otherwise looks, when it fires, whether anything is left to do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvflow.config import Config
from kvflow.core.protocol import messages
from kvflow.runtime.peers.reach import Source
from kvflow.runtime.peers.table import Peers
from kvflow.runtime.world import Clock, Timer
from kvflow.transport.base import AgentName, Transport

_PAUSE_LEAST_S = 0.01  # whatever a ticket says


@dataclass(slots=True)
class _Held:
    """A lease that is needed, and when it is renewed next."""

    source: Source
    ttl_s: float
    due_s: float


class Renewals:
    """The leases that are needed now."""

    def __init__(self, config: Config, *, reader: str, peers: Peers, transport: Transport, clock: Clock) -> None:
        self._reader = reader
        self._peers = peers
        self._transport = transport
        self._clock = clock
        self._batch_max = messages.renewals_max(reader, config.limits.notification_bytes_max)
        self._held: dict[object, list[_Held]] = {}
        self._timer: Timer | None = None
        self._timer_due_s = math.inf
        self.sent = 0
        """How many leases were renewed, counting each time."""

    def keep(self, owner: object, ttl_s: float, source: Source) -> None:
        """Renew a lease of `ttl_s` from now on until its owner needs it no more (`forget`)."""
        now_s = self._clock.now_s()
        due_s = (now_s + source.not_expired_before_s) / 2
        self._held.setdefault(owner, []).append(_Held(source, ttl_s, due_s))
        if due_s < self._timer_due_s:
            self._set_timer(now_s, due_s)
        self._peers.keep_clock(source.peer, now_s)

    def forget(self, owner: object) -> None:
        """Renew nothing for this owner any more. Nothing happens if it holds nothing."""
        self._held.pop(owner, None)

    def close(self) -> None:
        """Renew nothing any more, whoever comes."""
        self._stop_timer()
        self._timer_due_s = -math.inf

    def _set_timer(self, now_s: float, due_s: float) -> None:
        self._stop_timer()
        self._timer_due_s = due_s
        self._timer = self._clock.call_later(max(due_s - now_s, 0.0), self._renew)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _renew(self) -> None:
        """The timer: renew what is due, and what would be soon, so that a peer gets few messages for many leases."""
        now_s = self._clock.now_s()
        due: dict[AgentName, dict[str, None]] = {}
        for held in (held for leases in self._held.values() for held in leases):
            pause_s = max(held.ttl_s / 3, _PAUSE_LEAST_S)
            if held.due_s - pause_s / 2 <= now_s:
                due.setdefault(held.source.connection.agent, {})[held.source.lease.lease_id] = None
                held.source.peer.used_s = now_s  # it is not idle: its connection stays
                held.due_s = now_s + pause_s
        for agent, lease_ids in due.items():
            self._send(agent, tuple(lease_ids))
        self._timer, self._timer_due_s = None, math.inf
        if self._held:
            self._set_timer(now_s, min(held.due_s for leases in self._held.values() for held in leases))

    def _send(self, agent: AgentName, lease_ids: tuple[str, ...]) -> None:
        self.sent += len(lease_ids)
        for start in range(0, len(lease_ids), self._batch_max):
            message = messages.Renew(lease_ids=lease_ids[start : start + self._batch_max], reader=self._reader)
            self._transport.notify(agent, messages.encode(message))
