"""One registration of a rank's cache, from the start of its agent to the end of its last task: an *incarnation*.

A cache that is registered again is another incarnation, with a new name, new agents and a new poller, as if the rank
had restarted at the same address. Peers notice the new name, and drop everything that they know about the previous
incarnation (docs/decisions/0017-generations.md).

The agent and the poller start before the cache is registered. A registration ends in this order: leases, loads and
parts end; readers get goodbyes; tasks and peers end; the agent closes. Then no read is under way, and loads and parts
release the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import agent_name
from kvflow.errors import CacheUnregistered, TransportBroken
from kvflow.runtime.incarnation import Incarnation
from kvflow.runtime.load.flight_resources import Poller
from kvflow.runtime.part import Ending
from kvflow.runtime.tasks import Tasks
from kvflow.runtime.world import World
from kvflow.transport.base import TransportError


class Registration:
    """One registration (incarnation) of a rank's cache: its name, transport, poller and tasks, and that cache."""

    def __init__(self, config: Config, world: World, tasks: Tasks) -> None:
        self.incarnation: str = world.token_hex(8)
        self.agent_name = agent_name(config.engine_id, Rank.of(config), self.incarnation)
        self.transport = world.transport(config, self.agent_name)
        self.poller = Poller(self.transport, self._count_early)
        self.registered: Incarnation | None = None
        """The registered cache, until all of its loads and leases have ended; None before it is registered."""
        self.early_notifications = 0
        self._config = config
        self._runtime_tasks = tasks
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ended = False

    async def open(self) -> None:
        """Start the transport. ConfigError if that fails. If cancelled, the transport is closed."""
        await self.transport.open()

    def run(self) -> None:
        """Start the task of the poller, which receives the transport's events, and return.

        RuntimeClosed if the runtime is already closing.
        """
        poller = self.spawn(self.poller.run(), name="kvflow-poller")
        self._runtime_tasks.break_if_cancelled(poller, "poller", lambda: self._ended)

    def spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        """Start a task that is cancelled at the end of the registration.

        RuntimeClosed if the runtime closes, CacheUnregistered if the registration has ended.
        """
        if self._ended:
            body.close()
            owner = f"{self._config.engine_id!r} ({Rank.of(self._config)})"
            raise CacheUnregistered(f"the cache of runtime {owner} is unregistered")
        task = self._runtime_tasks.spawn(body, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def attach(self, registered: Incarnation) -> None:
        """Pass all later notifications to `registered`, and end it with this registration."""
        self.registered = registered
        self.poller.on_notification = registered.on_notification
        self.poller.on_caught_up = registered.loader.resume

    def detach(self) -> Incarnation | None:
        """Return the registered cache, if any, and refer to it no longer."""
        registered, self.registered = self.registered, None
        self.poller.on_notification, self.poller.on_caught_up = self._count_early, None
        return registered

    async def aclose(self) -> str:
        """End the tasks, the peers and the transport, then let the parts release the cache.

        Return "" if all ended, else a text that says why not.
        """
        bound_s, registered = self._config.limits.transport_close_timeout_s, self.registered
        await self._end_tasks()
        if registered is not None:
            await registered.peers.aclose()
        problem = ""
        try:
            await self.transport.aclose(bound_s)
        except TransportError as error:
            problem = str(error)
        stopped = not problem and not isinstance(self._runtime_tasks.cause, TransportBroken)  # after the last read
        self.poller.end_reads(stopped=stopped)
        if registered is not None and stopped:
            registered.loader.note_all_stopped()
        return (await registered.release_parts(bound_s) if registered is not None else "") or problem

    def abandon(self, wait_s: float) -> None:
        """Release the transport and the cache. For use after the event loop has ended.

        Wait up to `wait_s` seconds for threads to end.
        """
        registered = self.detach()
        self.transport.abandon(wait_s)
        if registered is not None:
            registered.end_parts(Ending.ABANDONED, wait_s)

    async def _end_tasks(self) -> None:
        """Cancel the poller and all other tasks of this registration, and wait for their end. Make `spawn` raise."""
        self._ended = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _count_early(self, payload: bytes) -> None:
        self.early_notifications += 1
