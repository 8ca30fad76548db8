"""The peers that a worker asks for prefixes: side by side, for a bounded time, and not those that have just been late.

Of a worker's ranks one asks for all of them.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from kvflow.connector.parameters import name_of
from kvflow.connector.step import Question
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.runtime.prefix.requests import PrefixOffer, PrefixRequest
from kvflow.runtime.runtime import Runtime

__all__ = ["Outcome", "PrefixPeers"]

logger = logger_of(__name__)

_LEFT_OUT_FIRST_S, _LEFT_OUT_MOST_S = 1.0, 30.0
_PEERS_MAX = 1 << 10  # that are remembered as late


class Outcome(enum.StrEnum):
    """What has come of a question."""

    FOUND = "found"
    NOTHING = "nothing"
    LATE = "late"
    """Nothing, and not all have answered in time."""


@dataclass(slots=True)
class _Late:
    """A peer that has not answered in time."""

    until_s: float
    pause_s: float


@dataclass(slots=True, kw_only=True)
class PrefixPeers:
    """Engines by their addresses."""

    wait_s: float = 0.05
    """Longest time that a question may take."""
    recompute_s_per_token: float | None = None
    every_rank: bool = False
    """Whether other ranks of this engine load what is found, too."""
    _late: dict[str, _Late] = field(default_factory=dict)

    async def ask(self, runtime: Runtime, question: Question) -> tuple[Outcome, list[Ticket]]:
        """What is offered, leased, the best first: the others are for the caller to give back."""
        now_s = asyncio.get_running_loop().time()
        asked = [peer for peer in question.peers if peer not in self._late or self._late[peer].until_s <= now_s]
        answers = await asyncio.gather(*(self._ask_one(runtime, question, peer) for peer in asked))
        offers = [offer for answer in answers for offer in answer or ()]
        offers.sort(key=lambda offer: (-offer.num_tokens, offer.queued_bytes))
        if offers:
            return Outcome.FOUND, [offer.ticket for offer in offers]
        answered = len(asked) == len(question.peers) and None not in answers
        return Outcome.NOTHING if answered else Outcome.LATE, []

    async def _ask_one(self, runtime: Runtime, question: Question, peer: str) -> tuple[PrefixOffer, ...] | None:
        """What a peer offers; None if it has not answered in time."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        request = PrefixRequest(
            name_of(question.request_id),
            keys=question.keys,
            key_tokens=question.key_tokens,
            block_ids=(),
            peers=(peer,),
            cached_tokens=question.cached_tokens,
            answer_within_s=self.wait_s,
            recompute_s_per_token=self.recompute_s_per_token,
            every_rank=self.every_rank,
        )
        try:
            offers = await runtime.seek_prefix(request)
        except KVFlowError as error:
            logger.warning("request %s: %s was not asked for its prefix: %s", question.request_id, peer, error)
            offers = ()
        if offers or loop.time() - begun_s < self.wait_s:
            self._late.pop(peer, None)
            return offers
        self._leave_out(peer, loop.time())
        return None

    def _leave_out(self, peer: str, now_s: float) -> None:
        before = self._late.pop(peer, None)
        pause_s = _LEFT_OUT_FIRST_S if before is None else min(before.pause_s * 2, _LEFT_OUT_MOST_S)
        logger.info("%s has not answered in %s s and is not asked for %s s", peer, self.wait_s, pause_s)
        self._late[peer] = _Late(now_s + pause_s, pause_s)
        if len(self._late) > _PEERS_MAX:
            del self._late[next(iter(self._late))]

