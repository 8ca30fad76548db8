"""What this runtime knows of its peers' clocks: one reading per peer, taken from the answers that show a clock.

`core.protocol.clock` says what a reading is good for: when to renew a lease, and when to ask before reading.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from kvflow.config import Config
from kvflow.core.protocol import messages
from kvflow.core.protocol.clock import RemoteClock
from kvflow.errors import ProtocolError
from kvflow.runtime.peers.link import Address
from kvflow.runtime.world import Clock

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    reading: RemoteClock
    due_s: float
    """When it is to be asked for again, on our clock."""


class PeerClocks:
    """Readings by peer."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._known: dict[Address, _Known] = {}

    def note(self, peer: Address, incarnation: str, theirs_s: float, *, sent_s: float) -> None:
        """An answer to what was asked at `sent_s` showed `theirs_s`. ProtocolError if no clock can show that."""
        try:
            messages.check_clock(theirs_s)
        except messages.WireError as error:
            raise ProtocolError(f"{peer.address}: {error}", peer=peer.address) from error
        now_s = self._clock.now_s()
        newer = RemoteClock(incarnation=incarnation, theirs_s=theirs_s, sent_s=sent_s, received_s=now_s)
        known = self._known.get(peer)
        reading = known.reading.combined(newer) if known else newer
        self._known[peer] = _Known(reading, now_s + self._config.limits.clock_age_s)
        logger.debug("clock of %s: ours %+f s, to %f s", peer.address, newer.offset_s, newer.uncertainty_s)

    def not_expired_before_s(self, peer: Address, incarnation: str, theirs_s: float) -> float:
        """While our clock shows less, that of this life of the peer has not reached `theirs_s`; -inf if unknown."""
        known = self._known.get(peer)
        if known is None or known.reading.incarnation != incarnation:
            return -math.inf
        return known.reading.not_expired_before_s(theirs_s)

    def is_due(self, peer: Address, now_s: float) -> bool:
        """Whether what is known has aged. Who is told so asks: for others it is not due then, until it has aged again.

        A peer of which nothing is known was not connected yet, which will tell.
        """
        known = self._known.get(peer)
        if known is None or now_s < known.due_s:
            return False
        known.due_s = now_s + self._config.limits.clock_age_s
        return True

    def forget(self, peer: Address) -> None:
        self._known.pop(peer, None)
