"""One rank of a remote engine, as a reader knows it, and the handshake with it that is under way."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from kvflow.core.policy.circuit import Circuit
from kvflow.core.policy.contacts import Contact
from kvflow.core.policy.states import PEER_TABLE, PeerEvent, PeerState, fire
from kvflow.runtime.peers.link import Address, Connection

logger = logging.getLogger(__name__)

LIVES_MAX = 64
_ERROR_CHARS_MAX = 500
_QUESTIONS_AT_ONCE_MAX = 8


@dataclass(slots=True, eq=False)
class Handshake:
    """A handshake under way. All who need the peer meanwhile wait for its future."""

    future: asyncio.Future[Connection]
    since_s: float
    task: asyncio.Task[None] | None = None
    contact: Contact | None = None
    """Its turn, if it needs one and has it."""
    waiters: int = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for it."""
        return self.waiters > 0

    def is_idle(self, before_s: float) -> bool:
        """Whether nobody waits for it, or it was begun before that time."""
        return not self.wanted or self.since_s < before_s

    def join(self) -> None:
        self.waiters += 1
        self._tell()

    def leave(self) -> None:
        self.waiters -= 1
        self._tell()

    def begin(self, contact: Contact) -> None:
        """Its turn has come."""
        self.contact = contact
        self._tell()

    def _tell(self) -> None:
        if self.contact is not None:
            self.contact.wanted = self.wanted


class Peer:
    """One rank of a remote engine, by the address of its side channel."""

    def __init__(self, address: Address, now_s: float) -> None:
        self.engine_id, self.rank, self.address = address
        self.at = address
        self.state = PeerState.UNKNOWN
        self.met = False
        """Whether it was ever connected."""
        self.current: Connection | None = None
        self.handshake: Handshake | None = None
        self.circuit = Circuit()
        self.last_error = ""
        self.used_s = now_s
        self.tried: set[str] = set()
        """Incarnations of tickets that have asked for it since it was last connected."""
        self.over: deque[str] = deque(maxlen=LIVES_MAX)
        """Incarnations that are known to be over."""
        self.questions = asyncio.Semaphore(_QUESTIONS_AT_ONCE_MAX)
        """Bounds what it is asked at once: sockets, should it be silent."""

    def __repr__(self) -> str:
        return f"<Peer {self.engine_id} at {self.address}: {self.state}>"

    @property
    def busy(self) -> bool:
        """Whether a load uses it or waits for it."""
        return self.handshake is not None or (self.current is not None and self.current.used)

    def fire(self, event: PeerEvent, why: str = "") -> None:
        before, self.state = self.state, fire(PEER_TABLE, self.state, event)
        logger.info("peer %s at %s: %s -> %s%s", self.engine_id, self.address, before, self.state, why and f" ({why})")

    def note_error(self, why: str) -> None:
        """Remember what failed, without the peer's name in front."""
        self.last_error = why.removeprefix(f"{self.at}: ")[:_ERROR_CHARS_MAX]

    def usable(self, incarnation: str | None) -> Connection | None:
        """The connection, unless a ticket of this incarnation shows that it may be outdated."""
        if self.current is None or incarnation is None or incarnation in self.over:
            return self.current
        return self.current if self.current.incarnation == incarnation else None


def expendable(peers: Collection[Peer], *, asked_before_s: float, used_before_s: float) -> Peer | None:
    """Who goes for another one: the oldest of those that nobody has ever met, or else who was not used for longest.

    One that is being asked for the first time would have answered by now if it was asked before `asked_before_s`, and
    lived. Of those that were met the lost ones go before those that are connected, which a load may have been given
    that does not hold it yet, unless they were used before `used_before_s`.
    """
    strangers = [peer for peer in peers if not peer.met]
    silent = (one for one in strangers if one.handshake and one.handshake.is_idle(asked_before_s))
    found = next((one for one in strangers if one.handshake is None), None) or next(silent, None)
    if found is not None:
        return found
    unused = [one for one in peers if one.met and not one.busy and (one.current is None or one.used_s <= used_before_s)]
    return min(unused, key=lambda one: (one.current is not None, one.used_s), default=None)
