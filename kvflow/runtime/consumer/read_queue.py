"""A budget of what may be under way at once, and the futures of those who wait for their turn (`core.policy.queue`).

The loader has two: of reads, in bytes, descriptors and reads, in all and per peer; and of places for loads. Whoever
waits here has nothing of the budget, and a turn is taken for a read that is posted at once, so it comes back by itself
when the read ends. What a load may hold while it waits (a place, buffers) is never taken by somebody who has a turn. So
there is no circle in who waits for whom.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from kvflow.core.policy.queue import Amount, Permit, Turns


class InFlight(NamedTuple):
    """What reads take of the budget of reads: the amount of `core.policy.queue`."""

    bytes: int
    descriptors: int
    reads: int


class Budget:
    """Gives turns out. Belongs to one event loop."""

    def __init__(self, limits: Amount, peer_limits: Amount) -> None:
        self._turns = Turns(limits, peer_limits)
        self._waiters: dict[Permit, asyncio.Future[None]] = {}

    @property
    def used(self) -> Amount:
        """What is under way."""
        return self._turns.used

    @property
    def waiting(self) -> int:
        """How many turns wait."""
        return self._turns.waiting

    def peers(self) -> Iterator[tuple[str, Amount, int]]:
        """Each peer that has turns: what is under way, and how many wait."""
        return self._turns.peers()

    def ask(self, peer: str, amount: Amount, priority: int) -> Permit:
        """A turn of `amount`, under way already or waiting; then `wait` has to follow."""
        return self._turns.ask(peer, amount, priority)

    async def wait(self, turn: Permit) -> None:
        """Return once a turn that waits is under way. Cancelling gives it, or its place, back."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[turn] = granted
        try:
            await granted
        except asyncio.CancelledError:
            self._waiters.pop(turn, None)
            self.give_back(turn)
            raise

    def give_back(self, turn: Permit) -> None:
        """What the turn was for is over."""
        for granted in self._turns.end(turn):
            waiter = self._waiters.pop(granted)
            if not waiter.done():  # else it was cancelled, and gives the turn back when it runs
                waiter.set_result(None)
