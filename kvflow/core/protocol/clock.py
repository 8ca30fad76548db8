"""What a reader knows of another machine's clock: never what it shows, only what it cannot show yet.

Clocks of two machines start anywhere and run at slightly different rates, so readings of one mean nothing to the other.
A *reading* is: their clock showed `theirs_s` at some moment after our clock showed `sent_s` (we asked) and before it
showed `received_s` (the answer was here). The offset between the clocks lies between the two, and what is not known of
it grows as the clocks drift apart. A reader only ever needs one side of that: a moment of ours at which theirs has not
reached a deadline for sure, however long the question and its answer took.

This module decides nothing about freshness (seals do, `core.protocol.seals`); it says when to renew a lease and when to
ask before reading.
"""

from __future__ import annotations

from dataclasses import dataclass

DRIFT_MAX = 200e-6
"""Seconds per second that two clocks may drift apart: quartz is within 100 parts per million, and there are two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteClock:
    """What we know of the clock of one incarnation of a peer; times are each clock's own."""

    incarnation: str
    theirs_s: float
    sent_s: float
    received_s: float

    @property
    def offset_s(self) -> float:
        """The best guess of what theirs shows more than ours, when it was read; wrong by at most `uncertainty_s`."""
        return self.theirs_s - (self.sent_s + self.received_s) / 2

    @property
    def uncertainty_s(self) -> float:
        """Half of the time between question and answer, and what the clocks may drift apart in it."""
        return (self.received_s - self.sent_s) * (0.5 + DRIFT_MAX)

    def not_expired_before_s(self, theirs_s: float) -> float:
        """While our clock shows less than this, theirs has not reached `theirs_s`; for moments after the reading.

        It takes the answer to be as old as it can be, and their clock to be as fast as it can be.
        """
        return self.sent_s + (theirs_s - self.theirs_s) / (1 + DRIFT_MAX)

    def combined(self, newer: RemoteClock) -> RemoteClock:
        """The reading that says more; they are compared where their drift makes them equal, so always alike."""
        if self.incarnation != newer.incarnation:
            return newer
        ours_ahead = newer.not_expired_before_s(0.0) - self.not_expired_before_s(0.0)
        return newer if ours_ahead > 0 else self
