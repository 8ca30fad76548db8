"""The transport's side of connections: an agent per connected rank, added once and removed under no running read.

The transport knows an agent by a name that is unique per incarnation of a rank, even if two addresses lead to it. An
agent is removed when no peer uses its connection and the last load that held it has left. It is added again only after
that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from kvflow.errors import RuntimeClosed
from kvflow.runtime.context import RankContext
from kvflow.runtime.peers.peer import Connection
from kvflow.transport.base import AgentName


class Agents:
    """All agents that the transport knows, by name: open, or on their way in or out."""

    def __init__(self, context: RankContext) -> None:
        self._transport = context.transport
        self._spawn = context.spawn
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
