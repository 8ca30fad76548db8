"""A search: one prefix that several engines are asked for, and what has come of it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvflow.core.protocol.ticket import Ticket
from kvflow.prefix.prefix_requests import PrefixAnswer, PrefixOffer


@dataclass(slots=True, eq=False)
class Holder:
    """An engine that has offered a prefix."""

    offer: PrefixOffer
    why: str = "another one was taken"
    """The reason why nothing is read from it; "" if the prefix is."""

    def worth(self) -> tuple[int, int]:
        """Sort key among holders: the longest prefix first, then the least busy engine."""
        return -self.offer.num_tokens, self.offer.queued_bytes

    def is_at(self, engine_id: str, address: str) -> bool:
        """Return True if its ticket names that engine, and that address first."""
        return (self.offer.ticket.engine_id, self.offer.ticket.address) == (engine_id, address)


@dataclass(slots=True, eq=False)
class AskedPeer:
    """An engine that is asked."""

    given: str
    peer: str
    """Name of the engine once that is known, before that as given."""
    answer: Holder | str = "it has not answered in time"
    """The holder that it is, or the reason why it is none."""
    task: asyncio.Task[None] | None = None


class Search:
    """The engines that are asked for one prefix. They may answer until it is over."""

    def __init__(self, peers: Iterable[str], release: Callable[[Ticket], None]) -> None:
        """`release` gives an offer back, soon."""
        self.asked = [AskedPeer(given, given) for given in peers]
        self._release = release
        self._over = False

    @property
    def holders(self) -> list[Holder]:
        """Engines with an offer: after `order` the best first, but for those that have answered since."""
        return [one.answer for one in self.asked if isinstance(one.answer, Holder)]

    def take(self, one: AskedPeer, answer: PrefixOffer | str) -> None:
        """Take an engine's offer, or why it has none. An offer that comes too late is given back."""
        if isinstance(answer, str):
            one.answer = answer
        elif self._over:
            self._release(answer.ticket)
        else:
            one.answer = Holder(answer)

    def order(self, turn: int) -> None:
        """Put holders first, by their worth. Of equals one begins that `turn` draws: not all readers read from one."""
        at = turn % max(len(self.asked), 1)

        def place(one: AskedPeer) -> tuple[int, ...]:
            return (0, *one.answer.worth()) if isinstance(one.answer, Holder) else (1,)

        self.asked = sorted(self.asked[at:] + self.asked[:at], key=place)

    async def best(self, tried: Collection[Holder], until_s: float) -> list[Holder]:
        """Return the holders of most tokens that were not tried, the least busy first.

        They are among those that have answered by now; if there is none, the first answer until `until_s` is waited
        for.
        """
        while True:
            left = [one for one in self.holders if one not in tried]
            if left:
                most = max(one.offer.num_tokens for one in left)
                return sorted((one for one in left if one.offer.num_tokens == most), key=Holder.worth)
            waiting = [one.task for one in self.asked if one.task is not None and not one.task.done()]
            left_s = until_s - asyncio.get_running_loop().time()
            if not waiting or left_s <= 0:
                return []
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def give_back(self, but: Collection[Holder] = ()) -> None:
        """End the search. Offers are given back, soon, also those that are still to come."""
        self._over = True
        for one in self.holders:
            if one not in but:
                self._release(one.offer.ticket)

    def answers(self) -> tuple[PrefixAnswer, ...]:
        """The answer of each engine, for the report."""
        return tuple(
            PrefixAnswer(peer=one.peer, num_tokens=one.answer.offer.num_tokens, why=one.answer.why)
            if isinstance(one.answer, Holder)
            else PrefixAnswer(peer=one.peer, num_tokens=0, why=one.answer)
            for one in self.asked
        )
