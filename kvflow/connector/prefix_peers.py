"""Asks peers for prefixes on behalf of a worker: all peers at once, for a bounded time. One rank asks for all ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvflow.connector.parameters import runtime_id_of
from kvflow.connector.prefix_questions import PrefixOutcome
from kvflow.connector.step import Question
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.kv_events import EventSource, PrefixMap, Subscriber
from kvflow.prefix.prefix_requests import PEERS_MAX, PrefixOffer, PrefixRequest
from kvflow.prefix.prefixes import Prefixes
from kvflow.runtime.load.requests import TICKETS_MAX

__all__ = ["PrefixPeers"]

logger = logger_of(__name__)

_EVENT_PEERS_MAX = 4


@dataclass(slots=True, kw_only=True)
class PrefixPeers:
    """The peers that a worker asks for prefixes, and the settings of these questions."""

    prefixes: Prefixes
    """The `Prefixes` object of the worker's runtime, which sends the questions."""
    wait_s: float = 0.05
    """Longest time that a question may take, in seconds."""
    recompute_s_per_token: float | None = None
    """Seconds to compute a token locally. If given, a prefix is not loaded from an engine with earlier loads that were
    slower."""
    every_rank: bool = False
    """True if other ranks of this engine load the found prefix, too."""
    events: tuple[EventSource, ...] = ()
    """Engines with KV events to follow (`follow_events`): a question also goes to the engines that, by their events,
    have part of the prefix. The holder of each source is the address of that engine's side channel."""
    known_peers: tuple[str, ...] = ()
    """Addresses of peers that `connect_peers` connects to at the start, since connecting takes longer than a question
    may."""
    _map: PrefixMap = field(default_factory=PrefixMap)

    async def ask(self, question: Question) -> tuple[PrefixOutcome, tuple[Ticket, ...], tuple[Ticket, ...]]:
        """Ask the peers in `question`, and the peers that by their KV events have part of the prefix.

        Return the outcome and two tuples of leased tickets. The tickets of the first tuple are to load with: all offer
        the most tokens that any peer has, the best peer first. The tickets of the second tuple are to be given back.
        """
        request = PrefixRequest(
            runtime_id_of(question.request_id),
            keys=question.keys,
            key_tokens=question.key_tokens,
            block_ids=(),
            peers=tuple(dict.fromkeys((*self._holders_by_events(question), *question.peers)))[:PEERS_MAX],
            cached_tokens=question.cached_tokens,
            answer_within_s=self.wait_s,
            recompute_s_per_token=self.recompute_s_per_token,
            every_rank=self.every_rank,
        )
        now_s = asyncio.get_running_loop().time
        ends_s = now_s() + self.wait_s
        offers = await self._seek(request)
        if not offers:
            return PrefixOutcome.LATE if now_s() >= ends_s else PrefixOutcome.NOTHING, (), ()
        tickets, most = tuple(offer.ticket for offer in offers), offers[0].num_tokens
        if not offers[0].pays:
            return PrefixOutcome.SLOWER, (), tickets
        best_count = min(sum(offer.num_tokens == most for offer in offers), TICKETS_MAX)
        return PrefixOutcome.FOUND, tickets[:best_count], tickets[best_count:]

    async def connect_peers(self, within_s: float) -> None:
        """Connect this rank to the known peers, within `within_s` seconds.

        A peer that is not up yet is connected by the first question to it.
        """
        peers, nothing = self.known_peers[:PEERS_MAX], (bytes(KEY_BYTES),)
        await self._seek(
            PrefixRequest("connect-peers", nothing, 1, block_ids=(), peers=peers, answer_within_s=within_s)
        )

    async def follow_events(self) -> None:
        """Follow the KV events of `events` until cancelled: the body of a task."""
        async with Subscriber(self._map, self.events):
            await asyncio.Event().wait()

    def _holders_by_events(self, question: Question) -> list[str]:
        """Return addresses of peers that by their KV events have more of the prefix than is cached here, best first."""
        found = self._map.holders(question.keys, question.key_tokens) if question.use_events else []
        return [peer for peer, tokens in found if tokens > question.cached_tokens][:_EVENT_PEERS_MAX]

    async def _seek(self, request: PrefixRequest) -> tuple[PrefixOffer, ...]:
        try:
            return await self.prefixes.seek(request)
        except KVFlowError as error:
            logger.warning("request %s: no peer was asked for its prefix: %s", request.request_id, error)
            return ()
