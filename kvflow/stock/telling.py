"""News of leases for stock producers: heartbeats while they are needed, and one text when they are not.

A producer is sent the texts of `stock.texts` and nothing else: anything that it does not expect ends its engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import Source
from kvflow.stock.deadline import DeadlineProof
from kvflow.stock.sights import Sight, Sights
from kvflow.stock.texts import heartbeat_texts


@dataclass(slots=True, eq=False, kw_only=True)
class StockSource(Source):
    """One rank of a stock producer, connected, and how long it may be believed."""

    sight: Sight
    text: bytes
    """The notification that we have read."""


class TextTelling:
    """See `runtime.peers.peer.Telling`."""

    def __init__(self, context: RankContext, sights: Sights) -> None:
        self._transport = context.transport
        self._sights = sights
        self.heartbeat_s: float | None = sights.terms.heartbeat_s

    def needed(self, sources: Sequence[Source]) -> int:
        """Send a heartbeat."""
        requests = {}
        for source in sources:
            assert isinstance(source, StockSource), "of a connection that is told so"
            requests[source.sight.request_id] = source.proof
        for proof in requests.values():
            assert isinstance(proof, DeadlineProof), "of a stock source"
            proof.beat()
        for text in heartbeat_texts(requests):
            self._transport.notify(sources[0].connection.agent, text)
        return len(requests)

    def read(self, source: Source) -> None:
        """Report that we have read: from now on nothing is read for this request."""
        assert isinstance(source, StockSource), "of a connection that is told so"
        self._sights.told(source.sight)
        self._transport.notify(source.connection.agent, source.text)
