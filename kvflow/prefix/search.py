"""A search: one prefix that several engines are asked for, and what has come of it so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvflow.core.protocol.ticket import Ticket
from kvflow.prefix.prefix_requests import PrefixAnswer, PrefixOffer

_SILENT = "it has not answered in time"


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


class Search:
    """The engines that are asked for one prefix. They may answer until it is over."""

    def __init__(self, peers: Iterable[str], release: Callable[[Ticket], None]) -> None:
        """`release` gives an offer back, soon."""
        self._answers: dict[str, Holder | PrefixAnswer] = {}
        """Answers by the peers as they were given; a PrefixAnswer of an engine that has offered nothing."""
        self.tasks: list[asyncio.Task[None]] = []
        """Questions, one for each engine that was asked."""
        self._release = release
        self._over = False
        for peer in peers:
            self.refuse(peer, peer, _SILENT)

    @property
    def holders(self) -> list[Holder]:
        """Engines with an offer: after `order` the best first, but for those that have answered since."""
        return [answer for answer in self._answers.values() if isinstance(answer, Holder)]

    @property
    def answers(self) -> tuple[PrefixAnswer, ...]:
        """The answer of each engine, for the report."""
        return tuple(
            PrefixAnswer(peer=one.offer.peer, num_tokens=one.offer.num_tokens, why=one.why)
            if isinstance(one, Holder)
            else one
            for one in self._answers.values()
        )

    def refuse(self, given: str, peer: str, why: str = _SILENT) -> None:
        """Note the name of an engine, and why it has no offer so far."""
        self._answers[given] = PrefixAnswer(peer=peer, num_tokens=0, why=why)

    def take(self, given: str, offer: PrefixOffer) -> None:
        """Take an engine's offer. An offer that comes too late is given back."""
        if self._over:
            self._release(offer.ticket)
        else:
            self._answers[given] = Holder(offer)

    def order(self, turn: int) -> None:
        """Put holders first, by their worth. Of equals one begins that `turn` draws: not all readers read from one."""
        asked = list(self._answers.items())
        at = turn % max(len(asked), 1)

        def place(asked: tuple[str, Holder | PrefixAnswer]) -> tuple[int, ...]:
            return (0, *asked[1].worth()) if isinstance(asked[1], Holder) else (1,)

        self._answers = dict(sorted(asked[at:] + asked[:at], key=place))

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
            waiting = [task for task in self.tasks if not task.done()]
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
