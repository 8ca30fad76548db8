"""Peers: one object per remote rank, one handshake at a time for each, connections shared by all loads.

A handshake asks the peer's side channel for its metadata, judges it, and only then lets the transport see it. It runs
in a task of its own, so a load that gives up does not take it away from the others that wait. A connection that broke
is given back to the transport when its last user has left: nothing is torn down under a running read.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Protocol

from kvflow.config import Config
from kvflow.core import topology, wire
from kvflow.core.clock import RemoteClock
from kvflow.core.layout import PLAIN
from kvflow.core.pairing import HeadSlice, Pairing
from kvflow.core.regions import Regions
from kvflow.core.seals import HOST, SEAL_SIZE_BYTES, trust_s
from kvflow.core.states import PEER_TABLE, PeerEvent, PeerState, fire, knows
from kvflow.core.topology import Holding, Rank
from kvflow.errors import (
    KVFlowError,
    PeerError,
    PeerIncompatible,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RuntimeBroken,
    RuntimeClosed,
)
from kvflow.runtime.landing import Landing
from kvflow.runtime.permute import Permutation
from kvflow.runtime.side_channel import SideChannel
from kvflow.runtime.world import Clock
from kvflow.transport.base import BUFFER_DEVICES, AgentName, PeerGone, Transport, TransportError

logger = logging.getLogger(__name__)


class Spawn(Protocol):
    """Starts a task in the runtime's task group."""

    def __call__(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """What this rank tells peers and compares with theirs; complete once a cache is registered."""

    reader: str
    compatibility: wire.Compatibility
    holding: Holding
    regions: Regions


class Connection:
    """A peer after its handshake: what we read from it, and what we tell it."""

    def __init__(
        self,
        agent: AgentName,
        metadata: wire.Metadata,
        num_blocks: int,
        pairing: Pairing | None,
        permutation: Permutation | None,
        told: tuple[int, int],
    ) -> None:
        self.agent = agent
        self.incarnation = metadata.incarnation
        self.holding = metadata.holding
        self.cut = metadata.holding.cut
        self.num_blocks = num_blocks
        self.pairing = pairing
        """What we read from it; None if it only has to be told."""
        self.permutation = permutation
        self.share, self.whole = told
        """How much of it we answer for (`topology.share_of`); a share of 0 means that it is none of our business."""
        self.staged = metadata.staged
        self.seal_trust_s = trust_s(metadata.seals.hold_s)
        # Seals lie in host memory on both sides; a read is of one kind of memory on each. A staged rank's seal has to
        # be seen before anything is read.
        self.carries_seals = (
            pairing is not None and not self.staged and pairing.local.device == pairing.remote.device == HOST
        )
        self._seals = metadata.seals
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def seal_address(self, index: int) -> int | None:
        """Where the peer keeps seal `index`, or None if it has no such seal."""
        return self._seals.address + index * SEAL_SIZE_BYTES if 0 <= index < self._seals.count else None

    def hold(self) -> None:
        """Keep the transport's side of the connection alive until `release`."""
        self._users += 1
        self._idle.clear()

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no load holds it."""
        await self._idle.wait()


class Peer:
    """One rank of a remote engine, by the address of its side channel."""

    def __init__(self, engine_id: str, rank: Rank, address: str) -> None:
        self.engine_id = engine_id
        self.rank = rank
        self.address = address
        self.state = PeerState.UNKNOWN
        self.current: Connection | None = None
        self.retired: list[Connection] = []
        self.handshake: asyncio.Future[Connection] | None = None
        self.clock: RemoteClock | None = None
        self.clock_due_s = -math.inf
        """When it is to be asked for its clock, on ours."""

    def __repr__(self) -> str:
        return f"<Peer {self.engine_id} at {self.address}: {self.state}>"

    def sure_until_s(self, incarnation: str, theirs_s: float) -> float:
        """While our clock shows less, that of this life of the peer has not reached `theirs_s`; -inf if unknown."""
        if self.clock is None or self.clock.incarnation != incarnation:
            return -math.inf
        return self.clock.sure_until_s(theirs_s)

    def fire(self, event: PeerEvent, why: str = "") -> None:
        before, self.state = self.state, fire(PEER_TABLE, self.state, event)
        logger.info("peer %s at %s: %s -> %s%s", self.engine_id, self.address, before, self.state, why and f" ({why})")

    def retire(self, connection: Connection, why: str) -> None:
        """Use `connection` for no new load. Firing twice is fine: several reads may find out."""
        if self.current is connection:
            self.current = None
            self.retired.append(connection)
            self.fire(PeerEvent.BREAK, why)


class Peers:
    """All peers of a runtime."""

    def __init__(
        self,
        config: Config,
        transport: Transport,
        side_channel: SideChannel,
        local: LocalRank,
        landing: Landing,
        clock: Clock,
        spawn: Spawn,
    ) -> None:
        self._config = config
        self._transport = transport
        self._side_channel = side_channel
        self._local = local
        self._landing = landing
        self._clock = clock
        self._spawn = spawn
        self._peers: dict[tuple[str, Rank, str], Peer] = {}
        self._closed = False

    @property
    def states(self) -> tuple[PeerState, ...]:
        return tuple(peer.state for peer in self._peers.values())

    def get(self, engine_id: str, rank: Rank, address: str) -> Peer:
        """The one object for this peer."""
        key = (engine_id, rank, address)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(engine_id, rank, address)
        return peer

    async def connect(self, peer: Peer, incarnation: str | None) -> Connection:
        """The peer's connection, made if need be; all who ask meanwhile share one handshake.

        A connection to another incarnation than the ticket's is outdated and replaced once; None takes any. Raises a
        PeerError. Cancelling stops the waiting, not the handshake.
        """
        if peer.current is not None and incarnation is not None and peer.current.incarnation != incarnation:
            peer.retire(peer.current, f"it restarted: {peer.current.incarnation} is not {incarnation}")
        if peer.current is not None:
            return peer.current
        if peer.handshake is None:
            self._start_handshake(peer)
        assert peer.handshake is not None
        return await asyncio.shield(peer.handshake)

    async def find_lease(self, peer: Peer, question: wire.LeaseRequest) -> wire.LeaseFound | wire.NoLease:
        """Ask a rank for its lease of a request. Raises a PeerError."""
        reply = await self._ask(peer, question)
        if isinstance(reply, wire.LeaseFound | wire.NoLease):
            return reply
        raise ProtocolError(f"{peer.address}: asked for a lease, got {type(reply).__name__}", peer=peer.address)

    async def release(self, peer: Peer, question: wire.ReleaseRequest) -> wire.Released | wire.NoLease:
        """Tell a rank that we need a lease's blocks no more. No connection is made. Raises a PeerError."""
        reply = await self._ask(peer, question)
        if isinstance(reply, wire.Released | wire.NoLease):
            return reply
        raise ProtocolError(f"{peer.address}: released a lease, got {type(reply).__name__}", peer=peer.address)

    def ask_clock(self, peer: Peer) -> None:
        """Have a peer's clock asked for, since it is due; nobody waits for that, and a failure may be tried later."""
        peer.clock_due_s = self._clock.now_s() + self._config.clock_age_s
        self._spawn(self._ask_clock(peer), name=f"kvflow-clock {peer.address}")

    async def aclose(self) -> None:
        """Forget all peers. Loads have ended before, and the task group ends handshakes."""
        self._closed = True
        for peer in self._peers.values():
            if knows(PEER_TABLE, peer.state, PeerEvent.CLOSE):
                peer.fire(PeerEvent.CLOSE)
            peer.current = None
        self._peers.clear()

    def _start_handshake(self, peer: Peer) -> None:
        if self._closed:
            raise RuntimeClosed("the runtime is closed")
        future: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self._spawn(self._run_handshake(peer, future), name=f"kvflow-handshake {peer.address}")
        peer.handshake = future
        peer.fire(PeerEvent.CONNECT)

    async def _run_handshake(self, peer: Peer, future: asyncio.Future[Connection]) -> None:
        """The handshake task: settles `future` whatever happens."""
        error: KVFlowError = RuntimeClosed("the runtime closed during the handshake")
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                connection = await self._shake_hands(peer)
        except KVFlowError as problem:
            error = problem
        except TimeoutError:
            error = PeerUnreachable(
                f"{peer.address}: handshake not done within {self._config.handshake_timeout_s} s", peer=peer.address
            )
        except asyncio.CancelledError:
            raise
        except BaseException as bug:
            error = RuntimeBroken("the handshake task died")
            error.__cause__ = bug
            raise
        else:
            peer.current = connection
            peer.fire(PeerEvent.CONNECTED)
            future.set_result(connection)
        finally:
            peer.handshake = None
            if not future.done():
                peer.fire(PeerEvent.CONNECT_FAILED, str(error))
                future.set_exception(error)
                future.exception()  # seen: everybody who waited may have given up

    async def _shake_hands(self, peer: Peer) -> Connection:
        await self._drop_retired(peer)
        reply = await self._ask(peer, wire.MetadataRequest(reader=self._local.reader, target=target_of(peer)))
        if not isinstance(reply, wire.Metadata):
            raise ProtocolError(f"{peer.address}: asked for metadata, got {type(reply).__name__}", peer=peer.address)
        regions = _judge(peer, reply, self._local)
        agent = await self._add_agent(peer, reply)
        pairing, told = _relation(peer, reply, self._local, regions)
        permutation = self._landing.permutation(pairing, regions)
        return Connection(agent, reply, regions.num_blocks, pairing, permutation, told)

    async def _ask(self, peer: Peer, request: wire.Request) -> wire.Reply:
        """Put a question to a peer; its refusal is raised. Answers that show its clock are noted."""
        fingerprint = self._local.compatibility.fingerprint()
        sent_s = self._clock.now_s()
        reply = await self._side_channel.ask(peer.address, request, fingerprint=fingerprint)
        match reply:
            case wire.Refusal():
                raise _refused(peer, reply, self._local)
            case wire.Metadata() | wire.LeaseFound() | wire.ClockShown():
                self._note_clock(peer, reply.incarnation, reply.clock_s, sent_s)
        return reply

    async def _ask_clock(self, peer: Peer) -> None:
        """The task that asks for a peer's clock."""
        try:
            await self._ask(peer, wire.ClockRequest(reader=self._local.reader, target=target_of(peer)))
        except PeerError as error:
            logger.info("no clock from %s: %s", peer.address, error)

    def _note_clock(self, peer: Peer, incarnation: str, theirs_s: float, sent_s: float) -> None:
        try:
            wire.check_clock(theirs_s)
        except wire.WireError as error:
            raise ProtocolError(f"{peer.address}: {error}", peer=peer.address) from error
        now_s = self._clock.now_s()
        newer = RemoteClock(incarnation=incarnation, theirs_s=theirs_s, sent_s=sent_s, received_s=now_s)
        peer.clock = peer.clock.combined(newer) if peer.clock else newer
        peer.clock_due_s = now_s + self._config.clock_age_s
        logger.debug("clock of %s: ours %+f s, to %f s", peer.address, newer.offset_s, newer.uncertainty_s)

    async def _drop_retired(self, peer: Peer) -> None:
        """Give outdated connections back to the transport, each once its last user has left."""
        while peer.retired:
            await peer.retired[0].idle()
            await self._transport.remove_peer(peer.retired.pop(0).agent)

    async def _add_agent(self, peer: Peer, metadata: wire.Metadata) -> AgentName:
        expected = wire.agent_name(peer.engine_id, peer.rank, metadata.incarnation)
        try:
            agent = await self._transport.add_peer(metadata.agent_metadata)
        except PeerGone as error:
            raise PeerUnreachable(f"{peer.address}: {error}", peer=peer.address) from error
        except TransportError as error:
            raise ProtocolError(f"{peer.address}: {error}", peer=peer.address) from error
        if agent != expected:
            await self._transport.remove_peer(agent)
            raise ProtocolError(f"{peer.address}: agent name: expected {expected!r}, got {agent!r}", peer=peer.address)
        return agent


def target_of(peer: Peer) -> wire.Target:
    """Whom we believe to listen at the peer's address."""
    return wire.Target(peer.engine_id, peer.rank.dp, peer.rank.pp, peer.rank.tp)


def _refused(peer: Peer, refusal: wire.Refusal, ours: LocalRank) -> PeerError:
    """The error for a peer that said no."""
    if refusal.compatibility is not None:
        differences = ours.compatibility.differences(refusal.compatibility) or [refusal.reason]
        if refusal.holding is not None:
            try:
                wire.check_holding(refusal.holding)
            except wire.WireError as error:
                return ProtocolError(f"{peer.address}: {error}", peer=peer.address)
            differences += topology.differences(ours.holding, refusal.holding)
        return _incompatible(peer, differences)
    if refusal.version != wire.PROTOCOL_VERSION:
        return PeerIncompatible(
            f"{peer.address}: kvflow protocol version: ours {wire.PROTOCOL_VERSION}, theirs {refusal.version}",
            peer=peer.address,
        )
    return PeerRefused(f"{peer.address}: refused: {refusal.reason}", peer=peer.address)


def _incompatible(peer: Peer, differences: list[str]) -> PeerIncompatible:
    return PeerIncompatible(
        f"{peer.address}: engine {peer.engine_id!r} ({peer.rank}) is not compatible: {'; '.join(differences)}",
        peer=peer.address,
    )


def _judge(peer: Peer, metadata: wire.Metadata, ours: LocalRank) -> Regions:
    """Check everything a peer says of itself before any of it is used."""
    if metadata.engine_id != peer.engine_id:
        raise PeerRefused(
            f"{peer.address}: expected engine {peer.engine_id!r}, found {metadata.engine_id!r}", peer=peer.address
        )
    actual = wire.checksum(metadata.agent_metadata)
    if actual != metadata.agent_metadata_crc32:
        raise ProtocolError(
            f"{peer.address}: agent metadata checksum: computed {actual:#010x}, "
            f"sent {metadata.agent_metadata_crc32:#010x}",
            peer=peer.address,
        )
    try:
        regions = wire.regions_from_wire(metadata.regions)
        wire.check_holding_of(metadata.holding, regions)
        wire.check_seals(metadata.seals)
    except wire.WireError as error:
        raise ProtocolError(f"{peer.address}: {error}", peer=peer.address) from error
    found = topology.differences(ours.holding, metadata.holding)
    for name, mine, theirs in (
        ("attention", ours.holding.latent, metadata.holding.latent),
        ("rank (pp, tp)", peer.rank[1:], (metadata.holding.pp_rank, metadata.holding.tp_rank)),
        ("bytes of a head", _head_bytes(ours.regions), _head_bytes(regions)),
        ("opaque blocks (kv_format)", *_opaque_shapes(ours, regions)),
    ):
        if mine != theirs:
            found.append(f"{name}: ours {mine}, theirs {theirs}")
    reachable = {kind for kinds in BUFFER_DEVICES.values() for kind in kinds}
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


def _relation(
    peer: Peer, metadata: wire.Metadata, ours: LocalRank, regions: Regions
) -> tuple[Pairing | None, tuple[int, int]]:
    """What we read from a rank, and what share of it we answer for."""
    theirs = metadata.holding
    source = next((one for one in topology.sources_of(ours.holding, theirs) if one.tp_rank == theirs.tp_rank), None)
    if source is None:
        raise _incompatible(peer, [f"tp_rank: ours {ours.holding.tp_rank} has nothing to do with {theirs.tp_rank}"])
    told = topology.share_of(ours.holding, theirs, source.tellers)
    if source.heads == 0 or told[0] == 0:
        return None, told
    pairing = Pairing(
        ours.regions,
        regions,
        heads=HeadSlice(source.local_start, source.remote_start, source.heads),
        local_layers=ours.holding.layers,
        remote_layers=theirs.layers,
        opaque=_opaque(ours),
    )
    return pairing, told
