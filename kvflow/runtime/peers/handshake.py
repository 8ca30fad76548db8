"""The handshake: ask a rank who it is, judge all that it says, and only then let the transport see its metadata.

Nothing of an answer is used before it was judged, and no text of a peer gets into our messages unbounded.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvflow.checks import is_name
from kvflow.core.cache.layout import PLAIN
from kvflow.core.cache.regions import Regions
from kvflow.core.plan import topology
from kvflow.core.plan.block_map import BlockMap, HeadSlice
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.freshness import RemoteClock
from kvflow.errors import (
    PeerError,
    PeerIncompatible,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
)
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.agents import Agents
from kvflow.runtime.peers.peer import Connection, LocalRank, Peer
from kvflow.transport.base import DEVICES, AgentName, PeerGone, TransportError

logger = logging.getLogger(__name__)

_WORDS_MAX = 300
_DIFFERENCES_MAX = 2000


class Handshakes:
    """Asks peers on behalf of one rank."""

    def __init__(self, context: RankContext, local: LocalRank) -> None:
        self._config = context.config
        self._side_channel = context.side_channel
        self._clock = context.clock
        self._local = local
        self._agents = Agents(context)

    async def connect(self, peer: Peer, request_id: str | None) -> Connection:
        """Shake hands with a peer; the connection that there is already if the peer is who it was.

        Raises a PeerError. Cancelling leaves no trace in the transport.
        """
        at = peer.at
        question = messages.MetadataRequest(
            reader=self._local.reader, target=at.target, request_id=request_id, caller=self._local.caller
        )
        reply = await self.ask(peer, question)
        if not isinstance(reply, messages.Metadata):
            raise at.failure(ProtocolError, f"asked for metadata, got {type(reply).__name__}")
        regions = _judge(at, reply, self._local)
        agent = AgentName(messages.agent_name(at.engine_id, at.rank, reply.incarnation))
        known = await self._agents.find(agent)
        if known is not None:
            return known
        share = topology.report_share(self._local.cache_share, reply.cache_share)
        block_map = _block_map(reply, self._local, regions)
        connection = Connection(agent, reply, regions, block_map, share)
        await self._add(at, connection, reply.agent_metadata)
        return connection

    async def ask(self, peer: Peer, request: messages.Request) -> messages.Reply:
        """Put a question to a peer; its refusal is raised. Answers that show its clock are noted."""
        fingerprint = self._local.compatibility.fingerprint()
        sent_s = self._clock.now_s()
        reply = await self._side_channel.ask(peer.address, request, fingerprint=fingerprint)
        match reply:
            case messages.Refusal():
                raise _refused(peer.at, reply, self._local)
            case messages.Metadata() | messages.LeaseFound() | messages.ClockShown():
                self._note_clock(peer, reply, sent_s)
        return reply

    async def ask_clock(self, peer: Peer) -> None:
        """The body of a task: ask for a peer's clock. One that cannot be asked is as unknown as before."""
        try:
            await self.ask(peer, messages.ClockRequest(reader=self._local.reader, target=peer.at.target))
        except PeerError as error:
            logger.info("no reading of a peer's clock: %s", error)

    def leave(self, connection: Connection) -> None:
        """Give a connection that no peer uses back to the transport, once no load holds it."""
        self._agents.leave(connection)

    async def gone(self, agents: Collection[AgentName], timeout_s: float) -> bool:
        """See `Agents.gone`."""
        return await self._agents.gone(agents, timeout_s)

    def _note_clock(
        self, peer: Peer, reply: messages.Metadata | messages.LeaseFound | messages.ClockShown, sent_s: float
    ) -> None:
        try:
            messages.check_clock(reply.clock_s)
        except messages.WireError as error:
            raise peer.at.failure(ProtocolError, str(error)) from error
        now_s = self._clock.now_s()
        peer.clock_due_s = now_s + self._config.limits.clock_age_s
        peer.note_clock(
            RemoteClock(incarnation=reply.incarnation, theirs_s=reply.clock_s, sent_s=sent_s, received_s=now_s)
        )

    async def _add(self, peer: Address, connection: Connection, metadata: bytes) -> None:
        try:
            name = await self._agents.add(connection, metadata)
        except PeerGone as error:
            raise peer.failure(PeerUnreachable, str(error)) from error
        except TransportError as error:
            raise peer.failure(ProtocolError, str(error)) from error
        if name != connection.agent:
            raise peer.failure(ProtocolError, f"agent name: expected {connection.agent!r}, got {_words(name)!r}")


def _words(text: str, chars_max: int = _WORDS_MAX) -> str:
    """A peer's words as they may stand in our messages and logs: printable, and not too many."""
    cut = text if len(text) <= chars_max else f"{text[:chars_max]}..."
    return cut if cut.isprintable() else ascii(cut)[1:-1]


def _refused(peer: Address, refusal: messages.Refusal, ours: LocalRank) -> PeerError:
    """The error for a peer that said no."""
    if refusal.compatibility is not None:
        differences = ours.compatibility.differences(refusal.compatibility) or [_words(refusal.reason)]
        if refusal.cache_share is not None:
            try:
                messages.check_cache_share(refusal.cache_share)
            except messages.WireError as error:
                return peer.failure(ProtocolError, str(error))
            differences += topology.differences(ours.cache_share, refusal.cache_share)
        return _incompatible(peer, differences)
    if refusal.version != messages.PROTOCOL_VERSION:
        versions = f"kvflow protocol version: ours {messages.PROTOCOL_VERSION}, theirs {refusal.version}"
        return peer.failure(PeerIncompatible, versions)
    kind = PeerNotReady if refusal.transient else PeerRefused
    return peer.failure(kind, f"refused: {_words(refusal.reason)}")


def _incompatible(peer: Address, differences: list[str]) -> PeerIncompatible:
    shown = _words("; ".join(differences), _DIFFERENCES_MAX)
    return peer.failure(PeerIncompatible, f"it is not compatible: {shown}")


def _judge(peer: Address, metadata: messages.Metadata, ours: LocalRank) -> Regions:
    """Check everything a peer says of itself before any of it is used."""
    if metadata.engine_id != peer.engine_id:
        raise peer.failure(PeerRefused, f"expected engine {peer.engine_id!r}, found {_words(metadata.engine_id)!r}")
    if not is_name(metadata.incarnation, _WORDS_MAX):
        raise peer.failure(ProtocolError, f"incarnation {_words(metadata.incarnation, 80)!r} is no name")
    actual = messages.checksum(metadata.agent_metadata)
    if actual != metadata.agent_metadata_crc32:
        sums = f"computed {actual:#010x}, sent {metadata.agent_metadata_crc32:#010x}"
        raise peer.failure(ProtocolError, f"agent metadata checksum: {sums}")
    try:
        regions = messages.regions_from_wire(metadata.regions)
        messages.check_cache_share_of(metadata.cache_share, regions)
        messages.check_seals(metadata.seals)
    except messages.WireError as error:
        raise peer.failure(ProtocolError, str(error)) from error
    found = topology.differences(ours.cache_share, metadata.cache_share)
    for name, mine, theirs in (
        ("attention", ours.cache_share.latent, metadata.cache_share.latent),
        ("rank (pp, tp)", peer.rank[1:], (metadata.cache_share.pp_rank, metadata.cache_share.tp_rank)),
        ("bytes of a head", _head_bytes(ours.regions), _head_bytes(regions)),
        ("opaque blocks (kv_format)", *_opaque_shapes(ours, regions)),
    ):
        if mine != theirs:
            found.append(f"{name}: ours {mine}, theirs {theirs}")
    reachable = {kind for kind, reached in DEVICES.items() if reached}
    if regions.device.kind not in reachable:
        found.append(f"device: ours {sorted(reachable)}, theirs {regions.device.kind}")
    if found:
        raise _incompatible(peer, found)
    return regions


def _head_bytes(regions: Regions) -> int:
    """Bytes of one head of one token over all parts."""
    return regions.block.run * len(regions.parts)


def _opaque(ours: LocalRank) -> bool:
    """Whether blocks mean more than values at strides, so that only whole ones of the same shape can be read."""
    return ours.compatibility.kv_format != PLAIN


def _opaque_shapes(ours: LocalRank, regions: Regions) -> tuple[object, object]:
    """What has to be equal if blocks are opaque."""
    if not _opaque(ours):
        return None, None
    return (ours.regions.block, ours.regions.parts), (regions.block, regions.parts)


def _block_map(metadata: messages.Metadata, ours: LocalRank, regions: Regions) -> BlockMap | None:
    """What we read from a rank; None if nothing."""
    theirs = metadata.cache_share
    source = topology.source_at(ours.cache_share, theirs)
    if source is None or source.heads == 0 or set(ours.cache_share.layers).isdisjoint(theirs.layers):
        return None
    return BlockMap(
        ours.regions,
        regions,
        heads=HeadSlice(source.local_start, source.remote_start, source.heads),
        local_layers=ours.cache_share.layers,
        remote_layers=theirs.layers,
        opaque=_opaque(ours),
    )
