"""The lease book: which leases are open, until when, who has read them, and which ended ones still hold their blocks.

It decides and does nothing: no clock, no loop, no memory. Time comes as an argument, and what follows from a step comes
back as the entries it concerns. Its user wipes the seal of an entry that has ended, and gives its blocks back when the
book says that its hold is over.

A lease ends exactly once (invariant I4): read by all its readers, expired, revoked, or failed. From then on its blocks
are *held* for a moment, since a quick read may vouch for itself by a seal that it saw shortly before the end (`seals`).
A renewal gives a lease its whole ttl_s again, up to the end of its lifetime.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from kvflow.core.policy.states import LEASE_TABLE, LeaseEvent, LeaseState, fire

_RECENT_MAX = 1 << 12
_SPARE_REMINDERS = 64
_WHOLE_MAX = 1 << 32


class Counted(enum.StrEnum):
    """Effect of a reader's notification about a lease."""

    NOTED = "noted"
    LATE = "late"
    """The lease has ended, or there was none."""
    DUPLICATE = "duplicate"
    """The reader has reported it before."""
    MALFORMED = "malformed"
    """A notification that cannot be true."""


@dataclass(slots=True, eq=False)
class LeaseEntry:
    """A lease in the book. Only the book changes it."""

    lease_id: str
    request_id: str
    reader_count: int
    """Engines whose ranks each read their share; 0: one rank, whatever its share."""
    holds_blocks: bool
    """True if there is something to read, and so to hold after its end; a lease of nothing leaves the book at once."""
    ttl_s: float
    """Time that a renewal gives."""
    offered_s: float
    expires_s: float
    lifetime_ends_s: float
    """Latest time to which renewals move `expires_s`."""
    state: LeaseState = LeaseState.OFFERED
    readers: dict[str, Fraction] = field(default_factory=dict)
    """Readers that have read, each with its share of an engine's reading."""
    ended_s: float = 0.0
    """Time of its end, from which on its blocks are held."""
    free_s: float = 0.0
    """End of that hold."""

    @property
    def is_open(self) -> bool:
        return self.state is LeaseState.OFFERED


class LeaseBook:
    """All leases of one rank."""

    def __init__(self, *, hold_s: float, lifetime_s: float) -> None:
        self._hold_s = hold_s
        self._lifetime_s = lifetime_s
        self._entries: dict[str, LeaseEntry] = {}
        self._open: dict[str, LeaseEntry] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        """Requests whose leases have ended lately."""
        self._expiring: list[tuple[float, int, LeaseEntry]] = []
        """Heap of expiries. Some entries are out of date: of leases that have ended or were renewed."""
        self._held: deque[LeaseEntry] = deque()
        """Ended leases, in the order in which their holds end."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Leases that are open or hold their blocks."""
        return len(self._entries)

    @property
    def entries(self) -> Collection[LeaseEntry]:
        """Leases that are open or hold their blocks, oldest first."""
        return self._entries.values()

    @property
    def next_s(self) -> float | None:
        """Next moment at which a lease expires or a hold ends; None if there is nothing to wait for."""
        due = [self._held[0].free_s] if self._held else []
        if self._expiring and self._open:
            due.append(self._expiring[0][0])
        return min(due, default=None)

    def serving(self, request_id: str | None) -> LeaseEntry | None:
        """Open lease of a request."""
        return self._open.get(request_id) if request_id is not None else None

    def served(self, request_id: str) -> bool:
        """True if a lease of the request has ended lately."""
        return request_id in self._recent

    def find(self, lease_id: str) -> LeaseEntry | None:
        return self._entries.get(lease_id)

    def open(
        self, lease_id: str, request_id: str, now_s: float, *, ttl_s: float, reader_count: int, holds_blocks: bool
    ) -> LeaseEntry:
        """Note a new lease, which `reader_count` engines have to read. Its request has none that is open."""
        assert request_id not in self._open, "a request has one lease at a time"
        until = now_s + ttl_s, now_s + max(ttl_s, self._lifetime_s)
        entry = LeaseEntry(lease_id, request_id, reader_count, holds_blocks, ttl_s, now_s, *until)
        self._entries[lease_id] = self._open[request_id] = entry
        self._recent.pop(request_id, None)
        heapq.heappush(self._expiring, (entry.expires_s, next(self._numbers), entry))
        if len(self._expiring) > 2 * len(self._open) + _SPARE_REMINDERS:
            self._forget_old_reminders()
        return entry

    def restart(self, entry: LeaseEntry, ttl_s: float, now_s: float) -> None:
        """Restart the time of an open lease, as if it were opened now with that `ttl_s`.

        It never ends earlier than before: a reader may have been told when that is, and count on it.
        """
        if entry.is_open:
            entry.ttl_s, entry.expires_s = ttl_s, max(entry.expires_s, now_s + ttl_s)
            entry.lifetime_ends_s = max(entry.lifetime_ends_s, now_s + max(ttl_s, self._lifetime_s))

    def renew(self, lease_id: str, reader: str, now_s: float) -> Counted:
        """Give a lease its ttl_s again. The word of a reader that has read already is late."""
        entry = self._entries.get(lease_id)
        if entry is None or not entry.is_open or reader in entry.readers:
            return Counted.LATE
        entry.expires_s = max(entry.expires_s, min(now_s + entry.ttl_s, entry.lifetime_ends_s))
        return Counted.NOTED

    def read(
        self, lease_id: str, reader: str, share: tuple[int, int], now_s: float
    ) -> tuple[Counted, LeaseEntry | None]:
        """Note that a reader has read its share (numerator, denominator). The lease that this ends is named."""
        entry = self._entries.get(lease_id)
        if entry is None or not entry.is_open:
            return Counted.LATE, None
        part, whole = share
        if not 0 < part <= whole <= _WHOLE_MAX:
            return Counted.MALFORMED, None
        if reader in entry.readers:
            return Counted.DUPLICATE, None
        entry.readers[reader] = Fraction(part, whole)
        all_read = sum(entry.readers.values()) >= entry.reader_count
        return Counted.NOTED, entry if all_read and self.end(entry, "all_read", now_s) else None

    def end(self, entry: LeaseEntry, event: LeaseEvent, now_s: float) -> bool:
        """End a lease. True if it was open."""
        if entry.state is not LeaseState.OFFERED:
            return False
        entry.state = fire(LEASE_TABLE, entry.state, event)
        entry.ended_s, entry.free_s = now_s, now_s + self._hold_s
        del self._open[entry.request_id]
        self._recent[entry.request_id] = None  # a reader that comes late need not wait for one to be opened
        if len(self._recent) > _RECENT_MAX:
            self._recent.popitem(last=False)
        if entry.holds_blocks:
            self._held.append(entry)
        else:
            del self._entries[entry.lease_id]
        return True

    def expire(self, now_s: float) -> Iterator[LeaseEntry]:
        """End the leases whose time has passed, and name them."""
        while self._expiring and self._expiring[0][0] <= now_s:
            _, _, entry = heapq.heappop(self._expiring)
            if entry.is_open and entry.expires_s > now_s:
                heapq.heappush(self._expiring, (entry.expires_s, next(self._numbers), entry))
            elif self.end(entry, "expire", now_s):
                yield entry

    def release(self, now_s: float) -> list[LeaseEntry]:
        """Take out of the book, and name, the ended leases whose hold is over.

        Nobody can take their blocks for good any more: the producer may reuse them (invariant I3).
        """
        released = []
        while self._held and self._held[0].free_s <= now_s:
            released.append(self._held.popleft())
            del self._entries[released[-1].lease_id]
        return released

    def _forget_old_reminders(self) -> None:
        self._expiring = [(entry.expires_s, next(self._numbers), entry) for entry in self._open.values()]
        heapq.heapify(self._expiring)
