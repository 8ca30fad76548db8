"""The circuit breaker of a peer: a value, and functions that compute when a failed peer may be contacted again.

The back-off is exponential with jitter. Each failure in a row doubles the wait, up to a limit. A random part of the
wait, up to half, is left out, so that the readers of one dead producer do not return all at once. After the wait one
attempt is made, for which other loads wait (`PeerState.CONNECTING`). The attempt succeeds, or the wait grows. Only a
successful read ends the row of failures. So a peer that answers handshakes and then fails every read is contacted less
and less often.

After the first failed read the peer may be contacted at once: the connection is dead, but the peer may not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

_DOUBLINGS_MAX = 64  # 2.0 ** n overflows for large n; any limit is reached long before


class BackOff(NamedTuple):
    """Seconds to wait after the first failure, and the longest wait in seconds; both above 0."""

    first_s: float
    most_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit:
    """The failures of a peer, as a reader counts them."""

    failures: int = 0
    """Failures since the last successful read."""
    retry_at_s: float = -math.inf
    """Time from which the peer may be contacted again, on the reader's clock."""

    def wait_s(self, now_s: float) -> float:
        """Return for how many seconds from `now_s` the peer must not be contacted; 0 if it may be contacted now."""
        return max(self.retry_at_s - now_s, 0.0)


NEVER_FAILED = Circuit()


def after_failed_handshake(circuit: Circuit, back_off: BackOff, *, now_s: float, chance: float) -> Circuit:
    """Return the circuit after a handshake that failed. `chance`: a random number from 0 to less than 1 (jitter)."""
    failures = circuit.failures + 1
    return Circuit(failures=failures, retry_at_s=now_s + delay_s(failures, back_off, chance))


def after_failed_read(circuit: Circuit, back_off: BackOff, *, now_s: float, chance: float) -> Circuit:
    """Return the circuit after a failed read: no wait after the first failure in a row, else as for a handshake."""
    if circuit.failures == 0:
        return replace(circuit, failures=1)
    return after_failed_handshake(circuit, back_off, now_s=now_s, chance=chance)


def delay_s(failures: int, back_off: BackOff, chance: float) -> float:
    """Return the wait in seconds after `failures` failures in a row: half of the full wait or more, by `chance`."""
    whole_s = min(back_off.first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX), back_off.most_s)
    return whole_s * (1 + chance) / 2
