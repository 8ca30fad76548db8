"""The peers that a worker asks for prefixes: side by side, for a bounded time, and not those that have just been late.

Of a worker's ranks one asks for all of them.
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from kvflow.connector.parameters import name_of
from kvflow.connector.step import Question
from kvflow.core.policy.rates import LoadRates
from kvflow.core.prefix.keys import KEY_BYTES
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError
from kvflow.kv_events import EventSource, PrefixMap, Subscriber
from kvflow.logs import logger_of
from kvflow.runtime.prefix.requests import PrefixOffer, PrefixRequest
from kvflow.runtime.runtime import Runtime

__all__ = ["PrefixOutcome", "PrefixPeers"]

logger = logger_of(__name__)

_LEFT_OUT_FIRST_S, _LEFT_OUT_MOST_S = 1.0, 30.0
_PEERS_MAX = 1 << 10  # that are remembered
_HINTS_MAX = 4


class PrefixOutcome(enum.StrEnum):
    """What has come of a question."""

    FOUND = "found"
    NOTHING = "nothing"
    SLOWER = "slower"
    """Something whose load takes longer than computing it."""
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
    """What computing a token takes here. With it nothing is taken of an engine that loads have been slower from."""
    every_rank: bool = False
    """Whether other ranks of this engine load what is found, too."""
    events: tuple[EventSource, ...] = ()
    """Engines whose KV events are followed, to ask those that have something (`follow`); each by the address of its
    side channel."""
    known: tuple[str, ...] = ()
    """Peers that are connected at the start (`greet`), which takes longer than a question may."""
    _map: PrefixMap = field(default_factory=PrefixMap)
    _late: dict[str, _Late] = field(default_factory=dict)
    _expected: dict[str, int] = field(default_factory=dict)
    """Tokens that each load is to bring, by its request."""
    _rates: LoadRates = field(default_factory=LoadRates)

    async def ask(self, runtime: Runtime, question: Question) -> tuple[PrefixOutcome, list[Ticket]]:
        """What is offered, leased, the best first: the others are for the caller to give back."""
        now_s = asyncio.get_running_loop().time()
        peers = dict.fromkeys((*question.peers, *self._hints(question)))
        asked = [peer for peer in peers if peer not in self._late or self._late[peer].until_s <= now_s]
        answers = await asyncio.gather(*(self._ask_one(runtime, question, peer) for peer in asked))
        offers = [offer for answer in answers for offer in answer or ()]
        offers.sort(key=lambda offer: (-offer.num_tokens, offer.queued_bytes))
        tickets = [offer.ticket for offer in offers]
        if offers and not self._pays(offers[0], offers[0].num_tokens - question.cached_tokens):
            return PrefixOutcome.SLOWER, tickets
        if offers:
            self._expected[question.request_id] = offers[0].num_tokens - question.cached_tokens
            return PrefixOutcome.FOUND, tickets
        answered = len(asked) == len(peers) and None not in answers
        return PrefixOutcome.NOTHING if answered else PrefixOutcome.LATE, []

    async def greet(self, runtime: Runtime) -> None:
        """Connect this rank to those that are known; who is not up yet is connected by the first question."""
        await asyncio.gather(*(self._greet(runtime, peer) for peer in self.known))

    async def _greet(self, runtime: Runtime, peer: str) -> None:
        request = PrefixRequest(
            "greeting",
            keys=(bytes(KEY_BYTES),),
            key_tokens=1,
            block_ids=(),
            peers=(peer,),
            answer_within_s=runtime.config.handshake_timeout_s,
        )
        try:
            await runtime.seek_prefix(request)
        except KVFlowError as error:
            logger.info("%s was not connected: %s", peer, error)

    async def follow(self) -> None:
        """The body of a task, for as long as peers are asked."""
        async with Subscriber(self._map, self.events):
            await asyncio.Event().wait()

    def _hints(self, question: Question) -> list[str]:
        """Those that are likely to have some of it, most of it first."""
        found = self._map.holders(question.keys, question.key_tokens) if question.hinted else []
        return [peer for peer, tokens in found if tokens > question.cached_tokens][:_HINTS_MAX]

    def loaded(self, request_id: str, engine_id: str, total_s: float | None) -> None:
        """A load has ended, and has taken so long; None if it has failed, or was not begun."""
        tokens = self._expected.pop(request_id, 0)
        if tokens > 0 and total_s is not None:
            self._rates.learn(engine_id, tokens, total_s)

    def _pays(self, offer: PrefixOffer, tokens: int) -> bool:
        expected_s = self._rates.expected_s(offer.ticket.engine_id, tokens)
        if self.recompute_s_per_token is None or expected_s is None:
            return True
        return expected_s + offer.round_trip_s <= self.recompute_s_per_token * tokens

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
