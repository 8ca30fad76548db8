"""The handshake with a stock rank: one question, whose answer is judged like any other peer's.

The address of such a peer is written "stock+ADDRESS/RANKS/STAGES". So it is never taken for one of ours at the same
port, and what one ticket claims of an engine's size concerns no other ticket.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from kvflow.core.cache.regions import Regions
from kvflow.core.plan import topology
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address, life_of
from kvflow.core.protocol.codec import WireError
from kvflow.errors import PeerIncompatible, PeerUnreachable, ProtocolError
from kvflow.logs import logger_of
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.handshake import Handshakes, block_maps, judge
from kvflow.runtime.peers.peer import Connection, LocalRank, Peer
from kvflow.stock.metadata import ask_rank
from kvflow.stock.shape import OurCache, Unfit, check_tp_size, metadata_of
from kvflow.stock.sights import Sights
from kvflow.stock.telling import TextTelling
from kvflow.stock.versions import Counting, Line, line_that_shows
from kvflow.stock.wire import Shown, agent_of
from kvflow.transport.base import AgentName, PeerGone, TransportError

logger = logger_of(__name__)

_MARK = "stock+"
_LOOK_AGAIN_S = 2.0  # no engine restarts as fast


class Whereabouts(NamedTuple):
    """Address of a stock engine, and how many tensor-parallel ranks and stages it is said to have."""

    address: str
    tp_size: int
    pp_size: int

    def of_rank(self, engine_id: str, rank: Rank) -> Address:
        """The peer that such a rank is."""
        return Address(engine_id, rank, f"{_MARK}{self.address}/{self.tp_size}/{self.pp_size}")


def whereabouts(peer: Peer) -> Whereabouts | None:
    """None for a peer of our own make."""
    if not peer.address.startswith(_MARK):
        return None
    address, tp_size, pp_size = peer.address.removeprefix(_MARK).rsplit("/", 2)
    return Whereabouts(address, int(tp_size), int(pp_size))


class Known(NamedTuple):
    """Facts that a rank was told of the stock engines that it reads from."""

    hashes: frozenset[str]
    learns: bool
    """True if the first hash beyond those that an engine shows is one of them from then on."""
    tp_sizes: frozenset[int]


class StockConnection(Connection):
    """A stock rank after its handshake."""

    line: Line
    split: int
    """Number of its blocks that are one of vLLM's, whose numbers parameters have."""
    reporters: int
    """Number of us that read, as we say it in a notification."""
    seen_s: float
    """Time at which it last showed that it lives."""
    told: messages.Metadata
    """Metadata of the engine whose agent it is, in our words."""


class KinConnection(StockConnection):
    """A rank that answers as a stock one does, and is of our own make: nothing is read by this connection."""

    rank: Rank
    life: str
    """Incarnation by which peers of our make know it."""


class StockHandshakes:
    """Handshakes of one rank with peers of both kinds; see `runtime.peers.table.Handshaking`."""

    def __init__(
        self,
        context: RankContext,
        local: LocalRank,
        own: Handshakes,
        ours: OurCache,
        known: Known,
        sights: Sights,
    ) -> None:
        self._context = context
        self._local = local
        self._own = own
        self.ours = ours
        self.sights = sights
        self._telling = TextTelling(context, sights)
        self._hashes = {*known.hashes}
        self._learns = known.learns
        self._tp_sizes = {*known.tp_sizes, local.cache_shares[0].tp_size}
        self.leave, self.gone = own.leave, own.gone

    async def connect(self, peer: Peer, request_id: str | None) -> Connection:
        """See `Handshakes.connect`."""
        where = whereabouts(peer)
        if where is None:
            return await self._own.connect(peer, request_id)
        async with asyncio.timeout(self._context.config.handshake_timeout_s):
            return await self._connect(peer, where)

    async def ask(self, peer: Peer, request: messages.Request, timeout_s: float | None = None) -> messages.Reply:
        """See `Handshakes.ask`. ProtocolError for a stock rank: its listener would die of a question of ours."""
        if whereabouts(peer) is not None:
            raise peer.at.failure(ProtocolError, "a stock engine is asked for its metadata, and nothing else")
        return await self._own.ask(peer, request, timeout_s)

    async def lives(self, peer: Peer, connection: StockConnection) -> bool:
        """True if a rank is still the one that we know. Raises a PeerError; cancelling stops the asking."""
        now_s = self._context.clock.now_s
        if now_s() - connection.seen_s < _LOOK_AGAIN_S:
            return True
        where, asked_s = whereabouts(peer), now_s()
        assert where is not None, "a stock rank"
        shown = await self._ask(peer, where)
        if _agent(peer, shown) != connection.agent:
            return False
        connection.seen_s = max(connection.seen_s, asked_s)
        return True

    async def _connect(self, peer: Peer, where: Whereabouts) -> Connection:
        at, asked_s = peer.at, self._context.clock.now_s()
        shown = await self._ask(peer, where)
        agent = _agent(peer, shown)
        own = life_of(agent, at.engine_id)
        if own is None:
            self._check_hash(at, shown.compatibility_hash)
        metadata, regions = self._judged(peer, where, shown, agent)
        share = topology.report_share(self._local.cache_shares, metadata.cache_shares)
        maps = tuple(block_maps(metadata, self._local, regions))
        if own is not None:
            logger.warning(
                "%s is of our own make, but parameters of it have lost all that kvflow writes into them: its ranks are"
                " asked for their leases, and which prompt these are of is not known; the router has to pass"
                " remote_request_id on as it is",
                at,
            )
            kin = KinConnection(agent, metadata, regions, maps, share, self._own.telling)
            kin.rank, kin.life, kin.seen_s = *own, asked_s
            return kin
        self._check_hash(at, shown.compatibility_hash, fits=True)
        known_already = await self._own.agents.find(agent)
        if known_already is not None:
            if not isinstance(known_already, StockConnection) or known_already.told != metadata:
                raise at.failure(ProtocolError, f"agent {agent!r} is that of {known_already!r}, which is another rank")
            return known_already
        connection = StockConnection(agent, metadata, regions, maps, share, self._telling)
        connection.line = line_that_shows(shown.fields)
        connection.split = shown.metadata.physical_blocks_per_logical_kv_block
        connection.reporters = self._reporters(metadata, connection.line)
        connection.seen_s = asked_s
        connection.told = metadata
        try:
            name = await self._own.agents.add(connection, metadata.agent_metadata)
        except PeerGone as error:
            raise at.failure(PeerUnreachable, str(error)) from error
        except TransportError as error:
            raise at.failure(ProtocolError, str(error)) from error
        if name != agent:
            raise at.failure(ProtocolError, f"agent name: its metadata says {agent!r}, NIXL {name[:80]!r}")
        return connection

    def _judged(
        self, peer: Peer, where: Whereabouts, shown: Shown, agent: AgentName
    ) -> tuple[messages.Metadata, tuple[Regions, ...]]:
        """Metadata of a rank in our words, and its regions. Raises a PeerError."""
        at, sizes = peer.at, (where.tp_size, where.pp_size)
        try:
            metadata = metadata_of(shown, agent, self.ours, rank=peer.rank, sizes=sizes)
            check_tp_size(metadata.cache_shares[0], self.ours, self._tp_sizes)
        except Unfit as error:
            raise at.failure(PeerIncompatible, str(error)) from error
        except WireError as error:
            raise at.failure(ProtocolError, str(error)) from error
        return metadata, judge(at, metadata, self._local)

    def _check_hash(self, at: Address, found: str, *, fits: bool = False) -> None:
        """PeerIncompatible for a hash that is not known, nor to be learned from an engine that `fits` otherwise."""
        if found in self._hashes:
            return
        if not self._learns:
            known = ", ".join(one[:12] for one in self._hashes)
            why = f"compatibility hash: ours {known}, theirs {found} (another model, version or cache)"
            raise at.failure(PeerIncompatible, why)
        if fits:
            self._hashes.add(found)
            self._learns = False
            logger.warning("learned from %s: its compatibility hash %s is read from now on, and no other", at, found)

    async def _ask(self, peer: Peer, where: Whereabouts) -> Shown:
        config, rank = self._context.config, peer.rank
        return await ask_rank(
            where.address,
            pp_rank=rank.pp,
            tp_rank=rank.tp,
            timeout_s=config.handshake_timeout_s,
            engine_id=peer.engine_id,
        )

    def _reporters(self, metadata: messages.Metadata, line: Line) -> int:
        if line.counting is Counting.ENGINE:
            return self._local.cache_shares[0].tp_size
        pairs = topology.in_common(self._local.cache_shares, metadata.cache_shares)
        sources = (topology.source_at(mine, theirs) for _, _, mine, theirs in pairs)
        return max((source.reporters for source in sources if source is not None), default=1)


def _agent(peer: Peer, shown: Shown) -> AgentName:
    try:
        return AgentName(agent_of(shown.metadata.agent_metadata))
    except WireError as error:
        raise peer.at.failure(ProtocolError, str(error)) from error
