"""PrefixPeers: asks peers for prefixes of prompts, for a worker: all peers together, for a bounded time.

In each engine, one rank asks on behalf of all ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from kvflow.connector.parameters import runtime_id_of
from kvflow.connector.prefix_questions import PrefixOutcome
from kvflow.connector.step import Question
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.prefix.kv_events import EventSource, PrefixMap, Subscriber
from kvflow.prefix.prefix_requests import PEERS_MAX, PrefixOffer, PrefixRequest
from kvflow.prefix.prefixes import Prefixes
from kvflow.runtime.load.requests import TICKETS_MAX

__all__ = ["PrefixPeers"]

logger = logger_of(__name__)

_EVENT_PEERS_MAX = 4


@dataclass(slots=True, kw_only=True)
class PrefixPeers:
    """The peers that a worker asks for prefixes of prompts, and the settings for asking."""

    prefixes: Prefixes
    """The `Prefixes` object in the `parts` of the worker's runtime: it sends the questions to the peers."""
    wait_s: float = 0.05
    """Seconds to wait at most for the answers to a question."""
    recompute_s_per_token: float | None = None
    """Seconds that this engine takes to compute a token. If given, no prefix is loaded that this engine can compute
    faster, judged by the speed of earlier loads from the same peer."""
    every_rank: bool = False
    """True if all ranks of this engine load the found prefix; False if only the rank that asks does."""
    events: tuple[EventSource, ...] = ()
    """Sources of other engines' KV events (`follow_events`). Engines that have part of a prefix according to their
    events are asked in addition. A source's `holder` is the address of the engine's side channel."""
    known_peers: tuple[str, ...] = ()
    """Addresses for `connect_peers`: connecting takes longer than a question may, so it is done in advance."""
    _map: PrefixMap = field(default_factory=PrefixMap)

    async def ask(self, question: Question) -> tuple[PrefixOutcome, tuple[Ticket, ...], tuple[Ticket, ...]]:
        """Ask the peers that `question` names, and those that have part of the prefix according to their KV events.

        Return the outcome and two tuples of the peers' tickets. The first tuple is for the load: the tickets that offer
        the most tokens, the least busy peer first. The second tuple is to be released.
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

    async def connect_peers(self) -> None:
        """Connect this rank to `known_peers`, for at most Config.handshake_timeout_s.

        If a peer is not reached in time, the first question to that peer connects to it.
        """
        with contextlib.suppress(KVFlowError):  # the runtime closes
            await self.prefixes.connect(self.known_peers[:PEERS_MAX])

    async def follow_events(self) -> None:
        """Receive the KV events of the sources in `events` until this task is cancelled."""
        async with Subscriber(self._map, self.events):
            await asyncio.Event().wait()

    def _holders_by_events(self, question: Question) -> list[str]:
        """Return addresses of peers that, by their KV events, have more of the prefix than this engine, best first.

        Empty if the question does not use events.
        """
        holders = self._map.holders(question.keys, question.key_tokens) if question.use_events else []
        return [peer for peer, tokens in holders if tokens > question.cached_tokens][:_EVENT_PEERS_MAX]

    async def _seek(self, request: PrefixRequest) -> tuple[PrefixOffer, ...]:
        try:
            return await self.prefixes.seek(request)
        except KVFlowError as error:
            logger.warning("request %s: no peer was asked for its prefix: %s", request.request_id, error)
            return ()
