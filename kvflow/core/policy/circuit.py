"""The circuit breaker of a peer: a value, and functions that compute when a failed peer may be contacted again.

The back-off is exponential with jitter. Each failure in a row doubles the wait, up to a limit. The wait is shortened at
random, by up to half, so that the readers of a dead producer do not all return at the same time. After the wait one
load attempts a handshake, and other loads wait for its result. Only a successful read ends the row of failures, so a
peer that answers handshakes and then fails every read is contacted less and less often.

After the first failed read the peer may be contacted immediately: the connection is dead, but the peer may not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

_DOUBLINGS_MAX = 64  # 2.0 ** n overflows for large n; any limit is reached long before


class BackOff(NamedTuple):
    """First and longest wait before a failed peer is contacted again, both in seconds and above 0."""

    first_s: float
    most_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit:
    """A reader's record of one peer's failures."""

    failures: int = 0
    """Number of failures since the last successful read."""
    retry_at_s: float = -math.inf
    """Time on the reader's clock from which the peer may be contacted again."""

    def wait_s(self, now_s: float) -> float:
        """Return for how many more seconds the peer must not be contacted; 0 if it may be contacted now."""
        return max(self.retry_at_s - now_s, 0.0)


NEVER_FAILED = Circuit()


def after_failed_handshake(circuit: Circuit, back_off: BackOff, *, now_s: float, chance: float) -> Circuit:
    """Return `circuit` after a handshake that failed at `now_s`: one failure more, and a wait until the next contact.

    `chance`: a random number from 0 to 1, for the jitter.
    """
    failures = circuit.failures + 1
    return Circuit(failures=failures, retry_at_s=now_s + delay_s(failures, back_off, chance))


def after_failed_read(circuit: Circuit, back_off: BackOff, *, now_s: float, chance: float) -> Circuit:
    """Return `circuit` after a read that failed at `now_s`: one failure more and, unless it is the first, a wait.

    `chance`: a random number from 0 to 1, for the jitter.
    """
    if circuit.failures == 0:
        return replace(circuit, failures=1)
    return after_failed_handshake(circuit, back_off, now_s=now_s, chance=chance)


def delay_s(failures: int, back_off: BackOff, chance: float) -> float:
    """Return the seconds until a peer may be contacted again after `failures` failures in a row.

    `chance`, from 0 to 1, chooses between half of the full wait (0) and the full wait (1).
    """
    whole_s = min(back_off.first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX), back_off.most_s)
    return whole_s * (1 + chance) / 2
