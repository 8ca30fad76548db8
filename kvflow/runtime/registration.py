"""One registration of a rank's cache, from its agent to its last task: it is an *incarnation* of the rank.

A cache that is registered again gets another incarnation: another name, other agents, another poller, as if the rank
had restarted at its address. Peers drop what they know of the one before by the comparison of names that also tells
them of a restart (docs/decisions/0017-generations.md).

The agent and the poller are there before the cache is. What ends, ends in one order: leases, loads and parts are told;
they are waited for; readers are told; tasks and peers end; the agent closes; then no read is under way, and loads and
parts let go of the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

from kvflow.checks import counted
from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol.addresses import agent_name
from kvflow.errors import CacheUnregistered, TransportBroken
from kvflow.logs import logger_of
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.load.flight_resources import Poller
from kvflow.runtime.part import Ending, Part
from kvflow.runtime.tasks import Tasks
from kvflow.runtime.world import World
from kvflow.transport.base import TransportError

if TYPE_CHECKING:
    from kvflow.runtime.supervisor import Supervisor

logger = logger_of(__name__)

_NAMED_MAX = 5


class Registration:
    """One incarnation of a rank. A transport is opened once, so another registration is another object."""

    def __init__(self, config: Config, world: World, tasks: Tasks, parts: Sequence[Part]) -> None:
        self.incarnation: str = world.token_hex(8)
        self.agent_name = agent_name(config.engine_id, Rank.of(config), self.incarnation)
        self.transport = world.transport(config, self.agent_name)
        self.poller = Poller(self.transport, self._on_notification)
        self.cache: RegisteredCache | None = None
        """The cache, once it is registered, until the last of it has ended."""
        self.early_notifications = 0
        """Notifications that came before the cache, when no lease could exist."""
        self._given = parts
        self.parts: list[Part] = []
        """Parts that have begun with the cache. Others are not ended here: one may be at work for another runtime."""
        self._config = config
        self._runtime_tasks = tasks
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._over = False

    async def open(self) -> None:
        """Start the transport. Raises ConfigError; cancelling leaves it closed."""
        await self.transport.open()

    def run(self) -> None:
        """Have its poller run. Raises RuntimeClosed."""
        poller = self.spawn(self.poller.run(), name="kvflow-poller")
        self._runtime_tasks.must_last(poller, "poller", lambda: self._over)

    def spawn(self, body: Coroutine[None, None, None], *, name: str) -> asyncio.Task[None]:
        """Start a task that ends with the registration. Raises RuntimeClosed, CacheUnregistered once it is over."""
        if self._over:
            body.close()
            owner = f"{self._config.engine_id!r} ({Rank.of(self._config)})"
            raise CacheUnregistered(f"the cache of runtime {owner} is unregistered")
        task = self._runtime_tasks.spawn(body, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def begin_parts(self, runtime: Supervisor, cache: RegisteredCache) -> None:
        """Have the parts begin with the cache, in order. Raises ConfigError."""
        for part in self._given:
            await part.registered(runtime, cache)
            self.parts.append(part)

    @property
    def busy(self) -> bool:
        """True if a lease or a load is open, or a part has work under way, or blocks are quarantined."""
        if self.cache is None:
            return False
        loading = self.cache.loader.statistics
        open_now = self.cache.serving.statistics.open_leases or loading.open_loads or loading.quarantines
        return bool(open_now or any(map(open_of, self.parts)))

    async def drain(self, deadline_s: float) -> bool:
        """Wait until nothing is open, at most `deadline_s`; then end what is left, and wait for that, too.

        The second wait is bounded by Limits.seal_hold_s, cancel_grace_s and drain_timeout_s. Return whether everything
        ended within `deadline_s`. Cancelling stops the waiting.
        """
        if self.cache is None:
            return True
        serving, loader, engine_id = self.cache.serving, self.cache.loader, self._config.engine_id
        serving.news.turn_away(f"engine {engine_id!r} is draining")
        waits = [serving.drained(), loader.drained(), *(part.drained() for part in self.parts)]
        finished = await _all_within(waits, deadline_s)
        if not finished:
            what = f"leases of {_some(serving.open_requests)}, loads of {_some(loader.open_requests)}"
            logger.warning("engine %r: open after draining for %s s, ended now: %s", engine_id, deadline_s, what)
        await self.end()
        return finished

    def stop(self, why: Ending) -> None:
        """Take no more work: revoke leases, and have loads and what parts have under way end soon."""
        if self.cache is None:
            return
        self.cache.serving.close()
        self.cache.loader.close(unregistered=why is Ending.UNREGISTERED)
        for part in self.parts:
            part.end(why)

    async def end(self, *, broken: bool = False) -> None:
        """Stop, and wait until leases, loads and what parts have under way have ended.

        In a broken runtime it may never be known when the last bytes of loads have landed.
        """
        if self.cache is None:
            return
        self.stop(Ending.CLOSED)
        serving, loader, bound_s = self.cache.serving, self.cache.loader, self._config.ending_s
        waits = [serving.drained()] if broken else [serving.drained(), loader.drained()]
        waits += [part.drained() for part in self.parts]
        if not await _all_within(waits, bound_s):
            loads = counted(len(loader.quarantines), "load")
            what = f"bytes may still land of {loads}, leases of {_some(serving.open_requests)}"
            logger.warning("engine %r: still open after another %s s: %s", self._config.engine_id, bound_s, what)

    async def tell_readers(self) -> None:
        """Tell readers that this incarnation goes."""
        if self.cache is not None:
            await self.cache.readers.tell()

    async def aclose(self) -> str:
        """End its tasks and its transport, once no read is under way, and no copy. Returns what went wrong, or ""."""
        bound_s = self._config.limits.transport_close_timeout_s
        await self._end_tasks()
        if self.cache is not None:
            await self.cache.peers.aclose()
        problem = ""
        try:
            await self.transport.aclose(bound_s)
        except TransportError as error:
            problem = str(error)
        stopped = not problem and not isinstance(self._runtime_tasks.cause, TransportBroken)  # after the last read
        self.poller.settle(stopped=stopped)
        if self.cache is not None and stopped:
            self.cache.loader.all_stopped()
        for part in self.parts:
            problem = await part.closed(bound_s) or problem
        return problem

    async def copies_ended(self, copy_thread: CopyThread) -> str:
        """Wait until no copy of its cache runs; the copy thread stays. Returns what is left then, or ""."""
        if self.cache is None:
            return ""
        bound_s = self._config.limits.transport_close_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                await copy_thread.run(lambda: None)  # jobs run one after the other
        except TimeoutError:
            return f"a copy still runs after {bound_s} s"
        loads, leases = self.cache.loader.open_requests, self.cache.serving.open_requests
        parts = {part.name: count for part in self.parts if (count := open_of(part))}
        if not (loads or leases or parts):
            return ""
        return f"bytes of loads {loads} may still land, leases {leases} hold their blocks, requests of parts: {parts}"

    def abandon(self, wait_s: float) -> None:
        """Give back what it has without the loop, which is gone; waits up to `wait_s` for its threads."""
        self.cache = None
        self.transport.abandon(wait_s)
        for part in self.parts:
            part.end(Ending.ABANDONED, wait_s)

    async def _end_tasks(self) -> None:
        """End its poller and all spawned tasks, and wait for that. `spawn` raises from now on."""
        self._over = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _on_notification(self, payload: bytes) -> None:
        if self.cache is None:
            self.early_notifications += 1
        elif self.cache.strangers is None or not self.cache.strangers.hears(payload):
            self.cache.serving.on_notification(payload)


def open_of(part: Part) -> int:
    """Requests that a part has under way."""
    return 0 if (now := part.statistics) is None else now.open_requests


def _some(requests: Sequence[str]) -> str:
    """The first of some requests, for a log line."""
    more = f" and {len(requests) - _NAMED_MAX} more" if len(requests) > _NAMED_MAX else ""
    return f"{list(requests[:_NAMED_MAX])}{more}"


async def _all_within(waits: Sequence[Coroutine[None, None, None]], timeout_s: float) -> bool:
    """Wait for all of `waits`, at most `timeout_s`. True if all are over."""
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*waits)
    except TimeoutError:
        return False
    return True
