"""One incarnation of a rank: the life of one registration, from its agents to its last task.

A cache that is registered again gets another incarnation: another name, other agents, another poller, as if the rank
had restarted at its address. Peers drop what they know of the one before by the comparison of names that also tells
them of a restart (docs/decisions/0017-generations.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import agent_name
from kvflow.errors import CacheUnregistered
from kvflow.runtime.load.gear import Poller
from kvflow.runtime.services import Services
from kvflow.runtime.world import World


class Incarnation:
    """Tasks and transport of one registration. They end in order, the tasks first; a transport is opened once."""

    def __init__(self, config: Config, world: World, on_notification: Callable[[bytes], None]) -> None:
        self.name: str = world.token_hex(8)
        self.agent_name = agent_name(config.engine_id, Rank.of(config), self.name)
        self.transport = world.transport(config, self.agent_name)
        self._owner = f"{config.engine_id!r} ({Rank.of(config)})"
        self.poller = Poller(self.transport, on_notification)
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._over = False

    async def open(self) -> None:
        """Start the transport. Raises ConfigError; cancelling leaves it closed."""
        await self.transport.open()

    def run(self, services: Services) -> None:
        """Have its poller run, and from now on its other tasks (`spawn`). Raises RuntimeClosed."""
        self._services = services
        services.must_last(self.spawn(self.poller.run(), name="kvflow-poller"), "poller", lambda: self._over)

    def spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        """See `context.Spawn`."""
        if self._over:
            body.close()
            raise CacheUnregistered(f"the cache of runtime {self._owner} is unregistered")
        task = self._services.spawn(body, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def end_tasks(self) -> None:
        """End its poller and all spawned tasks, and wait for that. `spawn` raises from now on."""
        self._over = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
