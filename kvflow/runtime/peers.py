"""Peers: one object per remote rank, one handshake at a time for each, connections shared by all loads.

A handshake asks the peer's side channel for its metadata, judges it, and only then lets the transport see it. It runs
in a task of its own, so a load that gives up does not take it away from the others that wait. A connection that broke
is given back to the transport when its last user has left: nothing is torn down under a running read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvflow.config import Config
from kvflow.core import wire
from kvflow.core.layout import Regions
from kvflow.core.plan import RegionPairs, pair_regions
from kvflow.core.seals import HOST, SEAL_SIZE_BYTES, trust_s
from kvflow.core.states import PEER_TABLE, PeerEvent, PeerState, fire, knows
from kvflow.errors import (
    KVFlowError,
    PeerIncompatible,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RuntimeBroken,
    RuntimeClosed,
)
from kvflow.runtime.side_channel import ask
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
    regions: Regions


class Connection:
    """A peer after its handshake. `users` counts the loads that hold it."""

    def __init__(
        self, agent: AgentName, metadata: wire.Metadata, regions: Regions, pairs: Sequence[RegionPairs]
    ) -> None:
        self.agent = agent
        self.incarnation = metadata.incarnation
        self.num_blocks = regions.num_blocks
        self.pairs = pairs
        self.seal_trust_s = trust_s(metadata.seals.hold_s)
        # Seals lie in host memory on both sides; a read is of one kind of memory on each.
        self.carries_seals = all(pair.local_device == pair.remote_device == HOST for pair in pairs)
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

    def __init__(self, engine_id: str, address: str) -> None:
        self.engine_id = engine_id
        self.address = address
        self.state = PeerState.UNKNOWN
        self.current: Connection | None = None
        self.retired: list[Connection] = []
        self.handshake: asyncio.Future[Connection] | None = None

    def __repr__(self) -> str:
        return f"<Peer {self.engine_id} at {self.address}: {self.state}>"

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

    def __init__(self, config: Config, transport: Transport, local: LocalRank, spawn: Spawn) -> None:
        self._config = config
        self._transport = transport
        self._local = local
        self._spawn = spawn
        self._peers: dict[tuple[str, str], Peer] = {}
        self._closed = False

    @property
    def states(self) -> tuple[PeerState, ...]:
        return tuple(peer.state for peer in self._peers.values())

    def get(self, engine_id: str, address: str) -> Peer:
        """The one object for this peer."""
        return self._peers.setdefault((engine_id, address), Peer(engine_id, address))

    async def connect(self, peer: Peer, incarnation: str) -> Connection:
        """The peer's connection, made if need be; all who ask meanwhile share one handshake.

        A connection to another incarnation than the ticket's is outdated and replaced once. Raises a PeerError.
        Cancelling stops the waiting, not the handshake.
        """
        if peer.current is not None and peer.current.incarnation != incarnation:
            peer.retire(peer.current, f"it restarted: {peer.current.incarnation} is not {incarnation}")
        if peer.current is not None:
            return peer.current
        if peer.handshake is None:
            self._start_handshake(peer)
        assert peer.handshake is not None
        return await asyncio.shield(peer.handshake)

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
        request = wire.MetadataRequest(
            reader=self._local.reader,
            engine_id=peer.engine_id,
            tp_rank=self._config.tp_rank,
            pp_rank=self._config.pp_rank,
        )
        reply = await ask(
            peer.address,
            request,
            fingerprint=self._local.compatibility.fingerprint(),
            timeout_s=self._config.handshake_timeout_s,
            message_bytes_max=self._config.side_channel_message_bytes_max,
        )
        if isinstance(reply, wire.Refusal):
            raise _refused(peer, reply, self._local.compatibility)
        regions = _judge(peer, reply, self._local.regions)
        agent = await self._add_agent(peer, reply)
        return Connection(agent, reply, regions, pair_regions(self._local.regions, regions))

    async def _drop_retired(self, peer: Peer) -> None:
        """Give outdated connections back to the transport, each once its last user has left."""
        while peer.retired:
            await peer.retired[0].idle()
            await self._transport.remove_peer(peer.retired.pop(0).agent)

    async def _add_agent(self, peer: Peer, metadata: wire.Metadata) -> AgentName:
        expected = wire.agent_name(peer.engine_id, metadata.pp_rank, metadata.tp_rank, metadata.incarnation)
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


def _refused(peer: Peer, refusal: wire.Refusal, ours: wire.Compatibility) -> PeerRefused | PeerIncompatible:
    """The error for a peer that said no."""
    if refusal.compatibility is not None:
        differences = ours.differences(refusal.compatibility) or [refusal.reason]
        return PeerIncompatible(
            f"{peer.address}: engine {peer.engine_id!r} is not compatible: {'; '.join(differences)}", peer=peer.address
        )
    if refusal.version != wire.PROTOCOL_VERSION:
        return PeerIncompatible(
            f"{peer.address}: kvflow protocol version: ours {wire.PROTOCOL_VERSION}, theirs {refusal.version}",
            peer=peer.address,
        )
    return PeerRefused(f"{peer.address}: refused: {refusal.reason}", peer=peer.address)


def _judge(peer: Peer, metadata: wire.Metadata, local: Regions) -> Regions:
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
        wire.check_seals(metadata.seals)
    except wire.WireError as error:
        raise ProtocolError(f"{peer.address}: {error}", peer=peer.address) from error
    reachable = {kind for kinds in BUFFER_DEVICES.values() for kind in kinds}
    for name, ours, theirs, fits in (
        ("regions", len(local), len(regions), len(regions) == len(local)),
        (
            "block_size_bytes",
            local.block_size_bytes,
            regions.block_size_bytes,
            local.block_size_bytes == regions.block_size_bytes,
        ),
        ("device", sorted(reachable), regions.device.kind, regions.device.kind in reachable),
    ):
        if not fits:
            raise PeerIncompatible(f"{peer.address}: {name}: ours {ours}, theirs {theirs}", peer=peer.address)
    return regions
