"""Attendance: the readers at each lease, and whether their processes still live.

A reader is *at* a lease from its first message about it: a question for it, or a renewal. It has said where it listens
when it connected. It is asked for its clock there at once, which shows that this address leads to it, and again and
again while it is at an open lease. A reader has died if another incarnation answers in its place, or if its machine
refuses connections there several times in a row although it had answered before. A silent reader has not died: it may
be slow, stopped, or cut off.

A lease ends when all its readers have come, and those that have not read have died (`LeaseEntry.is_deserted`). Safety
does not depend on that: its seal is wiped first, as whenever a lease ends.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvflow.core.policy.lease_book import LeaseEntry
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import life_of
from kvflow.errors import PeerError, RuntimeUnavailable
from kvflow.runtime.clock import Timer
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import LocalRank

LOOK_EVERY_S = 0.5
"""Time a reader may be at a lease before it is looked at, and between two looks."""
REFUSED_MAX = 2
"""Connections refused in a row that show a death; a listener that drops all its connections is gone for a moment."""
_ANSWERS_WITHIN_S = 2.0
_AT_ONCE_MAX = 16


@dataclass(slots=True, eq=False)
class _Reader:
    """A reader's incarnation, and what is known of its life."""

    caller: messages.Caller
    incarnation: str
    answered: bool = False
    refused: int = 0
    died: str = ""
    """The evidence of its death, in words; "" while it lives."""
    asked: bool = False
    """True while it is being asked."""


class Attendance:
    """The readers of one rank's leases."""

    def __init__(
        self,
        context: RankContext,
        local: LocalRank,
        leases: Iterable[LeaseEntry],
        end: Callable[[LeaseEntry, str], None],
    ) -> None:
        """`leases`: the open ones, at any time. `end` is called with one that is deserted, and why."""
        self._clock = context.clock
        self._spawn = context.spawn
        self._side_channel = context.side_channel
        self._readers_max = context.config.limits.readers_max
        self._local = local
        self._leases = leases
        self._end = end
        self._readers: OrderedDict[str, _Reader] = OrderedDict()
        """Readers by their agents' names; the one that came first makes room."""
        self._room = asyncio.Semaphore(_AT_ONCE_MAX)
        self._timer: Timer | None = None

    def introduced(self, name: str, caller: messages.Caller) -> None:
        """Note where a reader listens. Only its first word counts: an incarnation stays where it is."""
        life = life_of(name, caller.target.engine_id)
        if name in self._readers or life is None:
            return
        self._readers[name] = reader = _Reader(caller, life[1])
        if len(self._readers) > self._readers_max:
            self._readers.popitem(last=False)
        self._look_at(reader)

    def came(self, entry: LeaseEntry, name: str) -> None:
        """Note a message of a reader about a lease: it lives."""
        entry.note_came(name, self._clock.now_s())
        reader = self._readers.get(name)
        if reader is not None:
            reader.refused, reader.died = 0, ""
        if self._timer is None:
            self._timer = self._clock.call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Ask no reader any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Callback of the timer: end deserted leases, and ask readers that are at a lease for long."""
        self._timer = None
        since_s = self._clock.now_s() - LOOK_EVERY_S
        attended = [entry for entry in self._leases if entry.is_open and entry.came]
        for entry in attended:
            awaited = [self._readers[name] for name in entry.awaited if name in self._readers]
            if entry.is_deserted(self._has_died):
                self._end(entry, "; ".join(reader.died for reader in awaited))
            elif min(entry.came.values()) <= since_s:
                for reader in awaited:
                    self._look_at(reader)
        if attended:
            self._timer = self._clock.call_later(LOOK_EVERY_S, self._look)

    def _has_died(self, name: str) -> bool:
        return name in self._readers and self._readers[name].died != ""

    def _look_at(self, reader: _Reader) -> None:
        if not reader.asked and not reader.died:
            reader.asked = True
            try:
                self._spawn(self._ask(reader), name=f"kvflow-look {reader.caller.address}")
            except RuntimeUnavailable:
                reader.asked = False

    async def _ask(self, reader: _Reader) -> None:
        """Body of a task: ask one reader for its clock."""
        target, address = reader.caller.target, reader.caller.address
        question = messages.ClockRequest(reader=self._local.reader, target=target)
        fingerprint = self._local.compatibility.fingerprint()
        who, refused = f"its reader {target.at(address)} has died", 0
        try:
            async with self._room:
                reply = await self._side_channel.ask(
                    address, question, fingerprint=fingerprint, timeout_s=_ANSWERS_WITHIN_S
                )
        except PeerError as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                refused = reader.refused + 1
        else:
            if isinstance(reply, messages.ClockShown) and reply.incarnation != reader.incarnation and reader.answered:
                reader.died = f"{who}: {reply.incarnation} listens in place of {reader.incarnation}"
            elif isinstance(reply, messages.ClockShown) and reply.incarnation == reader.incarnation:
                reader.answered = True
        finally:
            reader.asked = False
        reader.refused = refused
        if reader.answered and refused >= REFUSED_MAX:
            reader.died = f"{who}: connections are refused there"
