"""The handshake with a stock rank: one question for its metadata, which is checked like any other peer's metadata.

A stock peer has the address "stock+ADDRESS/RANKS", where RANKS is the number of its engine's ranks. So it is never
taken for a kvflow peer at the same port, and a ticket with a wrong number of ranks does not affect other tickets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from kvflow.core.plan import topology
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address, parse_agent_name
from kvflow.core.protocol.codec import WireError
from kvflow.errors import PeerIncompatible, ProtocolError
from kvflow.runtime.peers.handshake import Handshakes, check_metadata
from kvflow.runtime.peers.peer import Connection, Peer
from kvflow.runtime.rank import RankContext
from kvflow.stock.deadline import Terms
from kvflow.stock.metadata import ask_rank
from kvflow.stock.metadata_conversion import check_tp_size, metadata_of, our_cache
from kvflow.stock.params import StockTicket
from kvflow.stock.stock_leases import StockConnection, StockLeases
from kvflow.stock.versions import line_of_metadata
from kvflow.stock.wire import StockAnswer, agent_name_of
from kvflow.transport.base import AgentName, Transport

_ADDRESS_PREFIX = "stock+"
_ASK_AGAIN_S = 2.0  # an engine takes longer than that to restart


def peer_address(ticket: StockTicket, rank: Rank) -> Address:
    """Return a peer's address, "stock+ADDRESS/RANKS", for `rank` of the stock engine that `ticket` names."""
    return Address(ticket.engine_id, rank, f"{_ADDRESS_PREFIX}{ticket.address}/{ticket.tp_size}")


class StockHandshakes:
    """Connects this rank to kvflow peers and to stock peers; implements `runtime.peers.table.HandshakeClient`."""

    def __init__(
        self,
        context: RankContext,
        transport: Transport,
        own: Handshakes,
        *,
        hashes: Collection[str],
        tp_sizes: Collection[int],
        terms: Terms,
    ) -> None:
        """Prepare for handshakes; those with kvflow peers are left to `own`.

        `hashes`, `tp_sizes`, `terms`: settings of the same names in `StockPeers`. ConfigError if blocks of this rank's
        cache cannot be exchanged with stock engines.
        """
        local = context.local
        self.ours = our_cache(local.cache_shares, local.regions, local.groups)
        self.leases = StockLeases(context.clock, transport, terms)
        self._config = context.config
        self._clock = context.clock
        self._local = local
        self._own = own
        self._hashes = hashes
        self._tp_sizes = {*tp_sizes, local.cache_shares[0].tp_size}

    async def connect(self, peer: Peer, request_id: str | None) -> Connection:
        """Connect to `peer` and return the connection. `Handshakes.connect` does this for kvflow peers."""
        if not peer.address.startswith(_ADDRESS_PREFIX):
            return await self._own.connect(peer, request_id)
        async with asyncio.timeout(self._config.handshake_timeout_s):
            return await self._connect(peer)

    async def ask(self, peer: Peer, request: messages.Request, timeout_s: float | None = None) -> messages.Reply:
        """Send `request` to a kvflow peer and return the answer, by `Handshakes.ask`.

        ProtocolError if `peer` is a stock peer, which expects no such request.
        """
        if peer.address.startswith(_ADDRESS_PREFIX):
            raise peer.at.failure(ProtocolError, "a stock engine is asked for its metadata, and nothing else")
        return await self._own.ask(peer, request, timeout_s)

    async def is_current(self, peer: Peer, connection: StockConnection, generation: int) -> bool:
        """Return whether `connection` is to the present registration of a stock rank's cache.

        A rank that has restarted has another NIXL agent. A rank that has registered its cache again (vLLM 0.33, after a
        sleep) has the same agent with other metadata. Return True without a question if the rank was known to be alive
        within the last 2 s, unless `generation`, the number in the parameters, is above the connection's. PeerError if
        the rank does not answer. Cancelling ends the wait for the answer.
        """
        asked_s = self._clock.now_s()
        if asked_s - connection.alive_s < _ASK_AGAIN_S and generation <= connection.generation:
            return True
        answer = await self._ask_metadata(peer)
        if _incarnation(_agent(peer, answer), answer) != connection.incarnation:
            return False
        connection.alive_s = max(connection.alive_s, asked_s)
        connection.generation = max(connection.generation, generation)
        return True

    async def _connect(self, peer: Peer) -> Connection:
        at, asked_s = peer.at, self._clock.now_s()
        answer = await self._ask_metadata(peer)
        agent = _agent(peer, answer)
        if parse_agent_name(agent, at.engine_id) is not None:
            lost = "a router has removed from its parameters all that kvflow writes into them"
            why = f"it is a kvflow engine, but {lost}: the router must pass remote_request_id on unchanged"
            raise at.failure(PeerIncompatible, why)
        if (theirs := answer.compatibility_hash) not in self._hashes:
            pinned = ", ".join(one[:12] for one in self._hashes)
            why = f"compatibility hash: ours {pinned}, theirs {theirs} (another model, version or cache)"
            raise at.failure(PeerIncompatible, why)
        incarnation, tp_size = _incarnation(agent, answer), int(at.address.rpartition("/")[2])
        metadata = metadata_of(at, answer.metadata, incarnation, self.ours, tp_size=tp_size)
        check_tp_size(at, metadata.cache_shares[0], self.ours, self._tp_sizes)
        regions = check_metadata(at, metadata, self._local)
        connection = StockConnection(agent, metadata, regions, self._local, self.leases)
        connection.stock_metadata, connection.alive_s = metadata, asked_s
        connection.reporters = self._reporter_count(metadata, answer)
        known = await self._own.agents.find_open(agent)
        if known is None:
            await self._own.agents.add(at, connection, metadata)
            return connection
        if not isinstance(known, StockConnection) or known.stock_metadata != metadata:
            raise at.failure(ProtocolError, f"agent {agent!r} belongs to another rank, {known!r}")
        return known

    async def _ask_metadata(self, peer: Peer) -> StockAnswer:
        return await ask_rank(
            peer.address.removeprefix(_ADDRESS_PREFIX).rpartition("/")[0],
            tp_rank=peer.rank.tp,
            timeout_s=self._config.handshake_timeout_s,
            engine_id=peer.engine_id,
        )

    def _reporter_count(self, metadata: messages.Metadata, answer: StockAnswer) -> int:
        if line_of_metadata(answer.fields).reports_tp_size:
            return self._local.cache_shares[0].tp_size
        pairs = topology.common_shares(self._local.cache_shares, metadata.cache_shares)
        sources = (topology.source_at(mine, theirs) for _, _, mine, theirs in pairs)
        return max((source.reporters for source in sources if source is not None), default=1)


def _incarnation(agent: AgentName, answer: StockAnswer) -> str:
    """Return a name for the registration of a stock rank's cache that `answer` describes."""
    return f"{agent}/{answer.crc32:08x}"


def _agent(peer: Peer, answer: StockAnswer) -> AgentName:
    try:
        return AgentName(agent_name_of(answer.metadata.agent_metadata))
    except WireError as error:
        raise peer.at.failure(ProtocolError, str(error)) from error
