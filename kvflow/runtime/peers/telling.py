"""News of leases for our own producers, in notifications that name leases by their ids: `Telling`.

The handshake with a rank says how it is told (`Connection.telling`); ranks of another make have another way (`stock`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvflow.core.protocol import messages
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import LocalRank, Source
from kvflow.transport.base import AgentName


class LeaseIdTelling:
    """See `peer.Telling`."""

    heartbeat_s: float | None = None

    def __init__(self, context: RankContext, local: LocalRank) -> None:
        self._transport = context.transport
        self._reader = local.reader
        self._batch_max = messages.leases_max(local.reader, messages.NOTIFICATION_BYTES_MAX)
        self._join = partial(messages.joined, leases_most=self._batch_max)

    def needed(self, sources: Sequence[Source]) -> int:
        """See `Telling.needed`."""
        agent = sources[0].connection.agent
        lease_ids = tuple(dict.fromkeys(source.lease.lease_id for source in sources))
        for start in range(0, len(lease_ids), self._batch_max):
            message = messages.Renew(lease_ids=lease_ids[start : start + self._batch_max], reader=self._reader)
            self._transport.notify(agent, messages.encode(message))
        return len(lease_ids)

    def read(self, source: Source) -> None:
        """See `Telling.read`."""
        self.report(source.connection.agent, source.lease.lease_id, *source.connection.report_share)

    def report(self, agent: AgentName, lease_id: str, numerator: int, denominator: int) -> None:
        """Report our share of the reading of a lease."""
        if numerator > 0:  # else others report it
            message = messages.ReadDone(
                lease_ids=(lease_id,), reader=self._reader, numerator=numerator, denominator=denominator
            )
            self._transport.notify(agent, messages.encode(message), self._join)
