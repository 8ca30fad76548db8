"""The handshake: ask a rank for its metadata, check all of the metadata, and only then pass it to the transport.

A connection is a remote agent in the transport. The agent is added once, and never removed while a read from it runs.
Text from a peer is made printable and cut to a maximum length before it enters errors and logs.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Collection, Sequence

from kvflow.checks import counted, is_name
from kvflow.core.cache.layout import has_separate_heads
from kvflow.core.cache.regions import Regions
from kvflow.core.plan import topology
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import UNKNOWN_ENGINE, Address, agent_name
from kvflow.core.protocol.claims import all_regions_from_wire, check_cache_shares, check_sets
from kvflow.errors import (
    PeerError,
    PeerIncompatible,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RuntimeUnavailable,
)
from kvflow.hosts import loopback_hint
from kvflow.logs import logger_of
from kvflow.runtime import open_files
from kvflow.runtime.channel.protocol import SideChannel
from kvflow.runtime.peers.first_contacts import overloaded
from kvflow.runtime.peers.peer import PEER_TEXT_CHARS_MAX, Connection, LeaseNotifier, LocalRank, Peer, peer_text
from kvflow.runtime.rank import RankContext, Spawn
from kvflow.transport.base import BY_SOME_BUILDS, DEVICES, AgentName, PeerGone, Transport, TransportError

logger = logger_of(__name__)

_DIFFERENCES_MAX = 2000


class Handshakes:
    """Client that shakes hands with kvflow peers and asks them questions, for one registered cache."""

    def __init__(
        self, context: RankContext, side_channel: SideChannel, agents: Agents, lease_notifier: LeaseNotifier
    ) -> None:
        self._config = context.config
        self._side_channel = side_channel
        self._local = context.local
        self.lease_notifier = lease_notifier
        """Notifies producers about their leases; every new connection gets this object."""
        self.agents = agents

    async def connect(self, peer: Peer, request_id: str | None) -> Connection:
        """Ask `peer` for its metadata. Return the open connection if the incarnation is the same, else a new one.

        `request_id`: the request of the load that needs the peer. Overloaded if this process has too few open files
        left; TimeoutError after Config.handshake_timeout_s. If cancelled, leave no agent in the transport.
        """
        async with asyncio.timeout(self._config.handshake_timeout_s):
            at = peer.at
            question = messages.MetadataRequest(
                reader=self._local.reader, target=at, request_id=request_id, caller=self._local.caller
            )
            reply = await self.ask(peer, question)
            if not isinstance(reply, messages.Metadata):
                raise at.failure(ProtocolError, f"asked for metadata, got {type(reply).__name__}")
            regions = check_metadata(at, reply, self._local)
            agent = AgentName(agent_name(at.engine_id, at.rank, reply.incarnation))
            known = await self.agents.find_open(agent)
            if known is not None:
                return known
            connection = Connection(agent, reply, regions, self._local, self.lease_notifier)
            # UCX and ZeroMQ do not survive that a process has no more open files (`open_files`).
            if why := open_files.shortage(open_files.READERS_STOP_AT):
                raise overloaded(at, why)
            await self.agents.add(at, connection, reply)
            return connection

    async def ask(self, peer: Peer, request: messages.Request, timeout_s: float | None = None) -> messages.Reply:
        """Ask `peer` a question and return the answer. PeerError if `peer` refuses or does not answer."""
        fingerprint = self._local.compatibility.fingerprint()
        reply = await self._side_channel.ask(request, fingerprint=fingerprint, timeout_s=timeout_s)
        if isinstance(reply, messages.Refusal):
            raise _refusal_error(peer.at, reply, self._local)
        return reply


class Agents:
    """The remote agents in the transport, by name. Each agent is open, being added, or being removed.

    Each incarnation of a remote rank's cache has its own agent. Several `Peer` objects may share the connection of one
    agent, because several addresses may lead to one rank. An agent is removed once no peer has its connection and no
    load holds the connection. The agent can be added again only after its removal has ended.
    """

    def __init__(self, transport: Transport, spawn: Spawn) -> None:
        self._transport = transport
        self._spawn = spawn
        self._open: dict[AgentName, Connection] = {}
        self._changing: dict[AgentName, asyncio.Future[None]] = {}

    async def find_open(self, agent: AgentName) -> Connection | None:
        """Wait until `agent` is not being added or removed, and return its open connection.

        None if the agent is not in the transport. The caller may then call `add`, if it awaits nothing before that.
        """
        while (change := self._changing.get(agent)) is not None:
            await asyncio.wait([change])
        return self._open.get(agent)

    async def add(self, at: Address, connection: Connection, metadata: messages.Metadata) -> None:
        """Add the agent of the rank at `at` to the transport, and make `find_open` return `connection` for it.

        `metadata`: what the rank has sent. PeerError if the transport refuses the metadata of the agent, or if it is of
        an agent with another name. If cancelled, remove the agent again.
        """
        agent = connection.agent
        change = self._begin(agent)
        try:
            name = await self._transport.add_peer(metadata.agent_metadata, metadata.device_memory)
        except asyncio.CancelledError:
            self._remove_soon(connection, change)  # the transport may be adding it
            raise
        except BaseException as error:
            self._finish(agent, change)
            if isinstance(error, TransportError):
                kind = PeerUnreachable if isinstance(error, PeerGone) else ProtocolError
                raise at.failure(kind, str(error)) from error
            raise
        if name == agent:
            self._open[agent] = connection
        self._finish(agent, change)
        if name != agent:
            if name not in self._open and name not in self._changing:
                await self._transport.remove_peer(name)
            raise at.failure(ProtocolError, f"agent name: expected {agent!r}, got {peer_text(name)!r}")

    def remove_when_idle(self, connection: Connection) -> None:
        """Start a task that removes the connection's agent from the transport once no load holds the connection."""
        if self._open.get(connection.agent) is connection:
            del self._open[connection.agent]
            self._remove_soon(connection, self._begin(connection.agent))

    def removal(self, agent: AgentName) -> asyncio.Future[None] | None:
        """Return the future of the removal of `agent` that is under way; None if there is none."""
        return self._changing.get(agent)

    async def wait_removed(self, agents: Collection[AgentName], timeout_s: float) -> bool:
        """Wait until each of `agents` that is being removed is gone. Return False after `timeout_s` seconds."""
        changes = [self._changing[agent] for agent in agents if agent in self._changing]
        if not changes:
            return True
        _, pending = await asyncio.wait(changes, timeout=timeout_s)
        return not pending

    def _remove_soon(self, connection: Connection, change: asyncio.Future[None]) -> None:
        try:
            task = self._spawn(self._remove(connection), name=f"kvflow-remove {connection.agent}")
        except RuntimeUnavailable:  # the transport closes, and removes all agents
            self._finish(connection.agent, change)
        else:
            task.add_done_callback(lambda _: self._finish(connection.agent, change))

    async def _remove(self, connection: Connection) -> None:
        """Remove the connection's agent from the transport once no load holds the connection.

        Task `kvflow-remove <agent>`: begun when a connection is dropped. It ends when no load holds the connection, and
        the transport has removed the agent.
        """
        await connection.wait_idle()
        await self._transport.remove_peer(connection.agent)

    def _begin(self, agent: AgentName) -> asyncio.Future[None]:
        change = self._changing[agent] = asyncio.get_running_loop().create_future()
        return change

    def _finish(self, agent: AgentName, change: asyncio.Future[None]) -> None:
        del self._changing[agent]
        change.set_result(None)


def _refusal_error(peer: Address, refusal: messages.Refusal, local: LocalRank) -> PeerError:
    """Return the error to raise for `refusal`, the answer of `peer`; its class depends on the refusal's fields."""
    if refusal.compatibility is not None:
        differences = local.compatibility.differences(refusal.compatibility) or [peer_text(refusal.reason)]
        if refusal.cache_shares:
            # Before they are compared: a tp_size of 0 in a refusal has broken the runtime (I8).
            try:
                check_cache_shares(refusal.cache_shares)
            except codec.WireError as error:
                return peer.failure(ProtocolError, str(error))
            differences += topology.differences(local.cache_shares, refusal.cache_shares)
        return _incompatible_error(peer, list(dict.fromkeys(differences)))
    if refusal.version != codec.PROTOCOL_VERSION:
        versions = f"kvflow protocol version: ours {codec.PROTOCOL_VERSION}, theirs {refusal.version}"
        return peer.failure(PeerIncompatible, versions)
    if refusal.transient:
        return peer.failure(PeerNotReady, f"refused: {peer_text(refusal.reason)}")
    hint = loopback_hint(peer.address) if refusal.reason.startswith(UNKNOWN_ENGINE) else ""
    return peer.failure(PeerRefused, f"refused: {peer_text(refusal.reason)}{hint}")


def _incompatible_error(peer: Address, differences: list[str]) -> PeerIncompatible:
    shown = peer_text("; ".join(differences), _DIFFERENCES_MAX)
    return peer.failure(PeerIncompatible, f"it is not compatible: {shown}")


def check_metadata(peer: Address, metadata: messages.Metadata, local: LocalRank) -> tuple[Regions, ...]:
    """Check the metadata that `peer` has sent, and return the decoded regions, one `Regions` for each set of layers.

    A set of layers has one shape of blocks. `local` describes this rank. PeerRefused if another engine answered,
    PeerIncompatible if this rank cannot read the peer's blocks, ProtocolError if the metadata is malformed.
    """
    if metadata.engine_id != peer.engine_id:
        who = f"expected engine {peer.engine_id!r}, found {peer_text(metadata.engine_id)!r}"
        raise peer.failure(PeerRefused, f"{who}{loopback_hint(peer.address)}")
    if not is_name(metadata.incarnation, PEER_TEXT_CHARS_MAX):
        raise peer.failure(ProtocolError, f"incarnation {peer_text(metadata.incarnation, 80)!r} is not a valid name")
    for name, content, sent in (
        ("agent metadata", metadata.agent_metadata, metadata.agent_metadata_crc32),
        ("device memory", metadata.device_memory, metadata.device_memory_crc32),
    ):
        actual = zlib.crc32(content)
        if actual != sent:
            raise peer.failure(ProtocolError, f"{name} checksum: computed {actual:#010x}, sent {sent:#010x}")
    try:
        regions = all_regions_from_wire(metadata.regions)
        check_sets(metadata.cache_shares, regions, metadata.groups)
    except codec.WireError as error:
        raise peer.failure(ProtocolError, str(error)) from error
    problems = incompatibilities(peer.rank, metadata, regions, local)
    if problems:
        raise _incompatible_error(peer, problems)
    return regions


def incompatibilities(
    rank: Rank, metadata: messages.Metadata, regions: Sequence[Regions], local: LocalRank
) -> list[str]:
    """Return one text for each reason why this rank cannot read blocks of the peer `rank` into its cache.

    `metadata` and its decoded `regions` describe the peer, `local` describes this rank.
    """
    first = metadata.cache_shares[0]
    problems = topology.differences(local.cache_shares, metadata.cache_shares)
    problems += _difference("rank (pp, tp)", rank[1:], (first.pp_rank, first.tp_rank))
    for index, remote_index, share, _ in topology.common_shares(local.cache_shares, metadata.cache_shares):
        local_regions, remote_regions = local.regions[index], regions[remote_index]
        problems += _difference("bytes of a head", _head_bytes(local_regions), _head_bytes(remote_regions))
        if share.part:
            problems += _difference(f"rows of {share.part}", len(local_regions.planes), len(remote_regions.planes))
        elif not share.plain:
            problems += _difference(
                "opaque blocks (kv_format)",
                *(_opaque_block_text(side, share.kv_format) for side in (local_regions, remote_regions)),
            )
    reachable = {kind for kind, reached in DEVICES.items() if reached} | {*BY_SOME_BUILDS}
    if regions[0].device.kind not in reachable:
        problems.append(f"device: ours {sorted(reachable)}, theirs {regions[0].device.kind}")
    return list(dict.fromkeys(problems))


def _difference(name: str, local: object, remote: object) -> list[str]:
    return [] if local == remote else [f"{name}: ours {local}, theirs {remote}"]


def _opaque_block_text(regions: Regions, kv_format: str) -> str:
    """Return a text that describes the shape of opaque blocks: blocks of bytes that are not plain values.

    Two ranks can exchange opaque blocks only if both compute the same text. If the blocks can be read head by head, the
    text leaves out the number of heads, so that this number may differ.
    """
    tokens, heads, run, *strides = regions.block
    planes = " and ".join(regions.planes)
    if has_separate_heads(kv_format, regions.block):
        return f"{counted(tokens, 'token')} of any heads, {counted(run, 'byte')} of {planes} each"
    block = f"{counted(tokens, 'token')} of {counted(heads, 'head')}"
    return f"{block}, {counted(run, 'byte')} of {planes} each, strides {strides}"


def _head_bytes(regions: Regions) -> int:
    """Return the size in bytes of one head of one token, with all its planes (K and V, for example)."""
    return regions.block.run * len(regions.planes)
