"""Circuit breaker per peer: a value, and functions that say when a peer that has failed may be asked again.

The back-off is exponential with jitter. Each failure in a row doubles the wait, up to a limit; chance shortens it by up
to a half, so that the readers of one dead producer do not come back together. After the wait one attempt is made
(`PeerState.CONNECTING` holds everybody else): it works, or the wait grows. Only a successful read ends the row, so a
peer that shakes hands and then fails every read is asked ever more seldom.

The first failed read costs no wait: it means that the connection is dead, not that the peer is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

_DOUBLINGS_MAX = 64  # 2.0 ** more might overflow; any limit is reached long before


class BackOff(NamedTuple):
    """The limits of waits, both above 0."""

    first_s: float
    most_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Circuit:
    """The record of failures of a peer. `retry_at_s` is in the reader's own time."""

    failures: int = 0
    retry_at_s: float = -math.inf

    def wait_s(self, now_s: float) -> float:
        """Seconds for which the peer must not be asked yet; 0 if it may be."""
        return max(self.retry_at_s - now_s, 0.0)


NEVER_FAILED = Circuit()


def after_failed_handshake(circuit: Circuit, back_off: BackOff, *, now_s: float, chance: float) -> Circuit:
    """Note that the peer was asked and did not answer as it should. `chance` is random, from 0 to less than 1."""
    failures = circuit.failures + 1
    return Circuit(failures=failures, retry_at_s=now_s + delay_s(failures, back_off, chance))


def after_failed_read(circuit: Circuit, back_off: BackOff, *, now_s: float, chance: float) -> Circuit:
    """Note a broken connection: no wait after the first since a success, then that of a failed handshake."""
    if circuit.failures == 0:
        return replace(circuit, failures=1)
    return after_failed_handshake(circuit, back_off, now_s=now_s, chance=chance)


def delay_s(failures: int, back_off: BackOff, chance: float) -> float:
    """Seconds to wait after so many failures in a row: half of the full time to all of it, by `chance`."""
    whole_s = min(back_off.first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MAX), back_off.most_s)
    return whole_s * (1 + chance) / 2
