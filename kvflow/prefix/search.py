"""One search for a prefix: the engines that were asked, and their answers so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvflow.core.protocol.ticket import Ticket
from kvflow.prefix.prefix_requests import PrefixAnswer, PrefixOffer

_NOT_ANSWERED = "it has not answered in time"


@dataclass(slots=True, eq=False)
class Holder:
    """An engine that has offered a prefix, with its offer."""

    offer: PrefixOffer
    why: str = "another peer was chosen"
    """Reason why the prefix was not read from the engine; "" if it was."""

    def sort_key(self) -> tuple[int, int]:
        """Return a key that sorts holders by offered tokens, most first, then by queued bytes, fewest first."""
        return -self.offer.num_tokens, self.offer.queued_bytes

    def is_at(self, engine_id: str, address: str) -> bool:
        """Return True if the offer's ticket is of engine `engine_id`, with the first rank at `address`."""
        return (self.offer.ticket.engine_id, self.offer.ticket.address) == (engine_id, address)


class Search:
    """The engines that are asked for one prefix, and their answers. Offers that arrive after `end` are released."""

    def __init__(self, peers: Iterable[str], release: Callable[[Ticket], None]) -> None:
        """`peers`: the peers to ask, as the request names them. `release`: releases the lease of a ticket."""
        self._answers: dict[str, Holder | PrefixAnswer] = {}
        """For each peer, by its name in the request: a Holder if the peer has made an offer, else a PrefixAnswer."""
        self.tasks: list[asyncio.Task[None]] = []
        """Tasks that ask the engines, one for each engine."""
        self._release_ticket = release
        self._ended = False
        for peer in peers:
            self.set_reason(peer, peer, _NOT_ANSWERED)

    @property
    def holders(self) -> list[Holder]:
        """Engines that have made an offer: first those sorted by the last `sort`, then those with later offers."""
        return [answer for answer in self._answers.values() if isinstance(answer, Holder)]

    @property
    def answers(self) -> tuple[PrefixAnswer, ...]:
        """The answers of all engines, for the report."""
        return tuple(
            PrefixAnswer(peer=answer.offer.peer, num_tokens=answer.offer.num_tokens, why=answer.why)
            if isinstance(answer, Holder)
            else answer
            for answer in self._answers.values()
        )

    def set_reason(self, peer_given: str, peer: str, why: str = _NOT_ANSWERED) -> None:
        """Record why an engine has made no offer so far.

        `peer_given`: the peer, as the request names it. `peer`: the peer's name in the report. `why`: the reason.
        """
        self._answers[peer_given] = PrefixAnswer(peer=peer, num_tokens=0, why=why)

    def add_offer(self, peer_given: str, offer: PrefixOffer) -> None:
        """Record a peer's offer or, if the search has ended, release the offer.

        `peer_given`: the peer, as the request names it.
        """
        if self._ended:
            self._release_ticket(offer.ticket)
        else:
            self._answers[peer_given] = Holder(offer)

    def sort(self, offset: int) -> None:
        """Sort the answers: holders first, in the order of `Holder.sort_key`, then the peers without an offer.

        `offset`: a random number that orders equally good holders, so that not all readers read from the same one.
        """
        asked = list(self._answers.items())
        at = offset % max(len(asked), 1)

        def place(asked: tuple[str, Holder | PrefixAnswer]) -> tuple[int, ...]:
            return (0, *asked[1].sort_key()) if isinstance(asked[1], Holder) else (1,)

        self._answers = dict(sorted(asked[at:] + asked[:at], key=place))

    async def wait_for_best(self, tried: Collection[Holder], until_s: float) -> list[Holder]:
        """Return those holders not in `tried` that offer most tokens, the least busy engine first.

        If all holders are in `tried`, wait for further offers until loop time `until_s`. Return an empty list if none
        arrives.
        """
        while True:
            left = [holder for holder in self.holders if holder not in tried]
            if left:
                most = max(holder.offer.num_tokens for holder in left)
                return sorted((holder for holder in left if holder.offer.num_tokens == most), key=Holder.sort_key)
            waiting = [task for task in self.tasks if not task.done()]
            left_s = until_s - asyncio.get_running_loop().time()
            if not waiting or left_s <= 0:
                return []
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def end(self, keep: Collection[Holder] = ()) -> None:
        """End the search: release all offers, also later ones, except those of the holders in `keep`."""
        self._ended = True
        for holder in self.holders:
            if holder not in keep:
                self._release_ticket(holder.offer.ticket)
