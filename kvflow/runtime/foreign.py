"""Engines of another make: how a rank reads from them and is read by them. Protocols only; `stock` has them.

A rank whose fleet has such engines is given a `Foreign`. Then its loads find their sources by a `Reaching` that knows
both kinds of tickets, and each handshake says how the peer is told of its leases (`Telling`) and what vouches for
reads from it (`Proof`). Peers, loads, leases and their books are the same objects for all makes.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvflow.core.protocol import messages
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.handshake import Handshakes
from kvflow.runtime.peers.peer import LocalRank, Reaching
from kvflow.runtime.peers.reach import Reach
from kvflow.runtime.peers.table import Handshaking, Peers


class Leases(Protocol):
    """The leases of this rank: `producer.serving.Serving`, as far as readers of another make need it.

    Named here to keep chains of imports short.
    """

    def lease_id_of(self, request_id: str) -> str | None: ...

    def on_notification(self, payload: bytes) -> None: ...

    def note_late_read(self) -> None: ...


class Service(Protocol):
    """Answers to readers of another make."""

    def answer(self, question: bytes) -> list[bytes] | None:
        """The frames of an answer; None if there is none. Never waits, and never raises."""

    def hears(self, payload: bytes) -> bool:
        """Take a notification if it is one of theirs. True if it is."""


@runtime_checkable
class Foreign(Protocol):
    """Engines of another make, as a runtime is told of them."""

    def handshakes(self, context: RankContext, local: LocalRank, own: Handshakes) -> Handshaking:
        """The handshakes with peers of both kinds."""

    def reach(self, context: RankContext, peers: Peers, own: Reach) -> Reaching:
        """The way from tickets of both kinds to their ranks."""

    def service(
        self, context: RankContext, local: LocalRank, metadata: messages.Metadata, leases: Leases
    ) -> Service | None:
        """The service that answers their readers, None if there is none. ConfigError if they cannot be answered."""
