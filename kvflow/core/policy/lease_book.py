"""The lease book: which leases are open, when they expire, which readers have read, and which ended leases hold blocks.

The book only decides: it has no clock, no event loop and no access to blocks or seals. Methods return the leases that
they have ended or released. The caller then wipes the seals of ended leases, and gives back the blocks of released
leases.

A lease ends exactly once (invariant I4): as read by all its readers, expired, revoked or failed. Once the caller has
wiped the seal, the blocks are *held* for `hold_s`, because a quick read may be proven by a seal that was fetched just
before the wipe (`core.protocol.proof`).
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
_DENOMINATOR_MAX = 1 << 32


class Counted(enum.StrEnum):
    """Effect of a reader's notification, `ReadDone` or `Renew`, on a lease."""

    NOTED = "noted"
    LATE = "late"
    """No effect: the lease has ended or is unknown, or a reader renews it after reporting its share as read."""
    DUPLICATE = "duplicate"
    """No effect: the reader has already reported its share of this lease."""
    MALFORMED = "malformed"
    """No effect: the reported share is not a fraction above 0 and up to 1."""


@dataclass(slots=True, eq=False)
class LeaseEntry:
    """A lease in a rank's lease book. Only the methods of `LeaseBook` change the fields."""

    lease_id: str
    request_id: str
    reader_count: int
    """Number of engines that have to read the lease, which ends once the shares reported by reader ranks add up to this
    number. The shares of one engine add up to 1. If the number is 0, the first report of any rank ends the lease.
    """
    holds_blocks: bool
    """True if the lease has blocks. A lease with blocks stays in the book until `free_s`."""
    ttl_s: float
    offered_s: float
    expires_s: float
    lifetime_ends_s: float
    """Latest time to which renewals can move `expires_s`."""
    state: LeaseState = LeaseState.OFFERED
    readers: dict[str, int | Fraction] = field(default_factory=dict)
    """Share of the lease that each reader rank has reported as read, by the name of the reader's transport agent."""
    ended_s: float = 0.0
    """Time at which the seal of the ended lease was wiped; 0 before that."""
    free_s: float = 0.0
    """Time from which the producer may reuse the blocks, `hold_s` after the seal was wiped; 0 before that."""

    @property
    def is_open(self) -> bool:
        return self.state is LeaseState.OFFERED


class LeaseBook:
    """All leases of one rank that are open, or have ended and still hold blocks."""

    def __init__(self, *, hold_s: float, lifetime_s: float) -> None:
        self._hold_s = hold_s
        self._lifetime_s = lifetime_s
        self._entries: dict[str, LeaseEntry] = {}
        self._open: dict[str, LeaseEntry] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        """Request ids of the leases that ended most recently, in the order of their ends."""
        self._expiring: list[tuple[float, int, LeaseEntry]] = []
        """Heap of (expiry, unique number, lease). A heap entry is out of date if its lease was renewed or has ended."""
        self._held: deque[LeaseEntry] = deque()
        """Ended leases that hold blocks, in the order of `free_s`."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> Collection[LeaseEntry]:
        """Leases that are open or still hold blocks, in the order of their opening."""
        return self._entries.values()

    @property
    def next_s(self) -> float | None:
        """Time at which to call `expire` and `release_held` again; None if no lease is open or holds blocks."""
        due = [self._held[0].free_s] if self._held else []
        if self._expiring and self._open:
            due.append(self._expiring[0][0])
        return min(due, default=None)

    def open_lease_of(self, request_id: str | None) -> LeaseEntry | None:
        """Return the open lease of request `request_id`; None if the request has no open lease or the id is None."""
        return self._open.get(request_id) if request_id is not None else None

    def ended_recently(self, request_id: str) -> bool:
        """Return True if a lease of the request ended recently and the request has no open lease."""
        return request_id in self._recent

    def find(self, lease_id: str) -> LeaseEntry | None:
        return self._entries.get(lease_id)

    def open(
        self, lease_id: str, request_id: str, now_s: float, *, ttl_s: float, reader_count: int, holds_blocks: bool
    ) -> LeaseEntry:
        """Add and return an open lease, which expires after `ttl_s` unless it is renewed.

        The request must not have an open lease. `reader_count`: number of engines that have to read the lease.
        """
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
        """Set `ttl_s`, expiry and end of lifetime of the lease `entry` as if it were opened with `ttl_s` at `now_s`.

        Expiry and end of lifetime never become earlier, because readers may rely on the times that they know. No effect
        on an ended lease.
        """
        if entry.is_open:
            entry.ttl_s, entry.expires_s = ttl_s, max(entry.expires_s, now_s + ttl_s)
            entry.lifetime_ends_s = max(entry.lifetime_ends_s, now_s + max(ttl_s, self._lifetime_s))

    def renew(self, lease_id: str, reader: str, now_s: float) -> Counted:
        """Move the expiry of a lease to `now_s` plus the lease's `ttl_s`, but not beyond the end of the lease's
        lifetime.

        Return NOTED. If the lease is not open or `reader` has already read it, change nothing and return LATE.
        """
        entry = self._entries.get(lease_id)
        if entry is None or not entry.is_open or reader in entry.readers:
            return Counted.LATE
        entry.expires_s = max(entry.expires_s, min(now_s + entry.ttl_s, entry.lifetime_ends_s))
        return Counted.NOTED

    def note_read(self, lease_id: str, reader: str, share: tuple[int, int]) -> tuple[Counted, LeaseEntry | None]:
        """Record that `reader` has read its share (numerator, denominator) of a lease.

        Return the effect, and the lease if this report has ended it, else None.
        """
        entry = self._entries.get(lease_id)
        if entry is None or entry.state is not LeaseState.OFFERED:
            return Counted.LATE, None
        numerator, denominator = share
        if not 0 < numerator <= denominator <= _DENOMINATOR_MAX:
            return Counted.MALFORMED, None
        if reader in entry.readers:
            return Counted.DUPLICATE, None
        # Most readers read all that there is, and sums of fractions cost a load's end more than all else here.
        entry.readers[reader] = 1 if numerator == denominator else Fraction(numerator, denominator)
        all_read = sum(entry.readers.values()) >= entry.reader_count
        return Counted.NOTED, entry if all_read and self.end(entry, "all_read") else None

    def end(self, entry: LeaseEntry, event: LeaseEvent) -> bool:
        """End the lease `entry` by `event`. Return True if the lease was open; else change nothing and return False.

        The caller then wipes the seal of a lease that was open, and calls `hold`.
        """
        if entry.state is not LeaseState.OFFERED:
            return False
        entry.state = fire(LEASE_TABLE, entry.state, event)
        del self._open[entry.request_id]
        self._recent[entry.request_id] = None  # a late reader need not wait for a lease
        if len(self._recent) > _RECENT_MAX:
            self._recent.popitem(last=False)
        return True

    def hold(self, entry: LeaseEntry, now_s: float) -> None:
        """Begin the hold of the blocks, if any, of an ended lease. `now_s`: a time after its seal was wiped."""
        entry.ended_s = now_s
        if entry.holds_blocks:
            entry.free_s = now_s + self._hold_s
            self._held.append(entry)
        else:
            del self._entries[entry.lease_id]

    def expire(self, now_s: float) -> Iterator[LeaseEntry]:
        """End the leases that have expired, and yield them."""
        while self._expiring and self._expiring[0][0] <= now_s:
            _, _, entry = heapq.heappop(self._expiring)
            if entry.is_open and entry.expires_s > now_s:
                heapq.heappush(self._expiring, (entry.expires_s, next(self._numbers), entry))
            elif self.end(entry, "expire"):
                yield entry

    def release_held(self, now_s: float) -> list[LeaseEntry]:
        """Remove from the book, and return, all leases with blocks that are held for at least `hold_s` at `now_s`.

        No read of these blocks can be proven now, so the producer may reuse the blocks (invariant I3).
        """
        released = []
        while self._held and self._held[0].free_s <= now_s:
            released.append(self._held.popleft())
            del self._entries[released[-1].lease_id]
        return released

    def _forget_old_reminders(self) -> None:
        self._expiring = [(entry.expires_s, next(self._numbers), entry) for entry in self._open.values()]
        heapq.heapify(self._expiring)
