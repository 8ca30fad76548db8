"""Connections: what a handshake gives, shared by all loads, and the transport's side of them.

The transport knows an agent once, by a name that is unique per life of a rank, even if two addresses lead to it. An
agent is removed when no peer uses its connection and the last load that held it has left: nothing is torn down under
a running read. It is added again only after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from kvflow.core.cache.regions import Regions
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.topology import CacheShare, Rank
from kvflow.core.protocol import messages
from kvflow.core.protocol.seals import HOST, SEAL_SIZE_BYTES, quick_read_max_s
from kvflow.errors import RuntimeClosed
from kvflow.runtime.channel.protocol import ErrorT, failure
from kvflow.runtime.context import Spawn
from kvflow.runtime.memory.scratch import Permutation
from kvflow.transport.base import AgentName, Transport


class Address(NamedTuple):
    """A rank of a remote engine, and where we believe its side channel to listen."""

    engine_id: str
    rank: Rank
    address: str

    def __str__(self) -> str:
        return self.target.at(self.address)

    @property
    def target(self) -> messages.Target:
        return messages.Target(self.engine_id, self.rank.dp, self.rank.pp, self.rank.tp)

    def failure(self, kind: type[ErrorT], why: str, *, retry_after_s: float | None = None) -> ErrorT:
        """What went wrong with the rank, as an error that names it."""
        return failure(kind, self.target, self.address, why, retry_after_s=retry_after_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """What this rank tells peers and compares with theirs; complete once a cache is registered."""

    reader: str
    caller: messages.Caller
    compatibility: messages.Compatibility
    cache_share: CacheShare
    regions: Regions


class Connection:
    """A peer after its handshake: what we read from it, and what we tell it."""

    def __init__(
        self,
        agent: AgentName,
        metadata: messages.Metadata,
        num_blocks: int,
        block_map: BlockMap | None,
        permutation: Permutation | None,
        told: tuple[int, int],
    ) -> None:
        self.agent = agent
        self.incarnation = metadata.incarnation
        self.cache_share = metadata.cache_share
        self.parallelism = metadata.cache_share.parallelism
        self.num_blocks = num_blocks
        self.block_map = block_map
        """What we read from it; None if it only has to be told."""
        self.permutation = permutation
        self.share, self.whole = told
        """How much of it we answer for (`topology.share_of`); a share of 0 means that it is none of our business."""
        self.staged = metadata.staged
        self.quick_read_max_s = quick_read_max_s(metadata.seals.hold_s)
        # Seals lie in host memory on both sides; a read is of one kind of memory on each. A staged rank's seal has to
        # be seen before anything is read.
        self.carries_seals = (
            block_map is not None and not self.staged and block_map.local.device == block_map.remote.device == HOST
        )
        self._seals = metadata.seals
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Connection {self.agent}, {self._users} loads>"

    @property
    def used(self) -> bool:
        """Whether a load holds it."""
        return self._users > 0

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


class Connections:
    """All agents that the transport knows, by name: open, or on their way in or out."""

    def __init__(self, transport: Transport, spawn: Spawn) -> None:
        self._transport = transport
        self._spawn = spawn
        self._open: dict[AgentName, Connection] = {}
        self._changing: dict[AgentName, asyncio.Future[None]] = {}

    async def find(self, agent: AgentName) -> Connection | None:
        """The agent's open connection; None if it has to be added, which is possible at once then."""
        while (change := self._changing.get(agent)) is not None:
            await asyncio.wait([change])
        return self._open.get(agent)

    async def add(self, connection: Connection, metadata: bytes) -> AgentName:
        """Let the transport know the agent, right after `find`; the name by which it took it, or a TransportError.

        Under another name than the connection's it is not kept. Cancelling leaves the agent unknown.
        """
        agent = connection.agent
        change = self._begin(agent)
        try:
            name = await self._transport.add_peer(metadata)
        except asyncio.CancelledError:
            self._remove_soon(connection, change)  # the transport may be in the middle of it
            raise
        except BaseException:
            self._finish(agent, change)
            raise
        if name == agent:
            self._open[agent] = connection
        self._finish(agent, change)
        if name != agent and name not in self._open and name not in self._changing:
            await self._transport.remove_peer(name)
        return name

    def leave(self, connection: Connection) -> None:
        """Give the connection back to the transport once no load holds it."""
        if self._open.get(connection.agent) is connection:
            del self._open[connection.agent]
            self._remove_soon(connection, self._begin(connection.agent))

    async def gone(self, agents: Collection[AgentName], timeout_s: float) -> bool:
        """Wait until the transport has forgotten the agents that are on their way out; whether it has in time."""
        changes = [self._changing[agent] for agent in agents if agent in self._changing]
        if not changes:
            return True
        _, pending = await asyncio.wait(changes, timeout=timeout_s)
        return not pending

    def _remove_soon(self, connection: Connection, change: asyncio.Future[None]) -> None:
        try:
            task = self._spawn(self._remove(connection), name=f"kvflow-remove {connection.agent}")
        except RuntimeClosed:  # the closing transport forgets everybody
            self._finish(connection.agent, change)
        else:
            task.add_done_callback(lambda _: self._finish(connection.agent, change))

    async def _remove(self, connection: Connection) -> None:
        await connection.idle()
        await self._transport.remove_peer(connection.agent)

    def _begin(self, agent: AgentName) -> asyncio.Future[None]:
        change = self._changing[agent] = asyncio.get_running_loop().create_future()
        return change

    def _finish(self, agent: AgentName, change: asyncio.Future[None]) -> None:
        del self._changing[agent]
        change.set_result(None)
