"""Engines of another make: how a rank reads from them and is read by them. `stock` has them.

A rank whose fleet has such engines is given a part that is a `Foreign`. Then its loads find their sources by a
`Resolver` that knows both kinds of tickets, and each handshake says how the peer is told of its leases (`Telling`) and
what vouches for reads from it (`Proof`). Peers, loads, leases and their books are the same objects for all makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvflow.runtime.part import Part
from kvflow.runtime.peers.handshake import Handshakes
from kvflow.runtime.peers.peer import Resolver
from kvflow.runtime.peers.table import Handshaking

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache


class Service(Protocol):
    """Answers to readers of another make."""

    def answer(self, question: bytes) -> list[bytes] | None:
        """The frames of an answer; None if there is none. Never waits, and never raises."""

    def hears(self, payload: bytes) -> bool:
        """Take a notification if it is one of theirs. True if it is."""


class Foreign(Part):
    """A part that knows engines of another make. As it is here it knows none."""

    def handshakes(self, cache: RegisteredCache, own: Handshakes) -> Handshaking:
        """Return the handshakes with peers of both kinds."""
        return own

    def resolver(self, cache: RegisteredCache) -> Resolver:
        """Return the way from tickets of both kinds to their ranks."""
        return cache.own_reach

    def service(self, cache: RegisteredCache) -> Service | None:
        """Return the service that answers their readers, None if there is none.

        Raises:
            ConfigError: they cannot be answered.
        """
        return None


def foreign_of(parts: Sequence[Part]) -> Foreign:
    """Return the part that knows engines of another make, or one that knows none."""
    return next((part for part in parts if isinstance(part, Foreign)), Foreign())
