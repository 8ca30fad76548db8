"""Whom a reader means, and where: ranks of remote engines as tickets name them, and errors that name them."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import messages
from kvflow.errors import PeerError

ErrorT = TypeVar("ErrorT", bound=PeerError)


def failure(
    kind: type[ErrorT], target: messages.Target, address: str, why: str, *, retry_after_s: float | None = None
) -> ErrorT:
    """An error about a rank, which it names."""
    return kind(f"{target.at(address)}: {why}", peer=address, engine_id=target.engine_id, retry_after_s=retry_after_s)


class Address(NamedTuple):
    """A rank of a remote engine, and where we believe its side channel to listen."""

    engine_id: str
    rank: Rank
    address: str

    def __str__(self) -> str:
        return self.target.at(self.address)

    @property
    def target(self) -> messages.Target:
        return messages.Target(self.engine_id, *self.rank)

    def failure(self, kind: type[ErrorT], why: str, *, retry_after_s: float | None = None) -> ErrorT:
        """An error about the rank, which it names."""
        return failure(kind, self.target, self.address, why, retry_after_s=retry_after_s)
