"""Several engines in one process, without NIXL, sockets or threads: on any event loop, in real or in virtual time.

Give your own engine a world of the cluster, `Runtime(config, world=cluster.world())`, or take a ready one from
`cluster.engine`. Faults are those of the in-process transport, one set per rank (`cluster.transport`), or come by a
seed, in virtual time: `InprocCluster(seed=7)`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvflow.config import Config
from kvflow.core.plan.topology import Rank
from kvflow.errors import UsageError
from kvflow.runtime.clock import Clock
from kvflow.runtime.part import Part
from kvflow.runtime.world import World
from kvflow.testing.clock import LoopClock
from kvflow.testing.copier import InlineCopier
from kvflow.testing.pair import CacheSize, TestEngine, open_engine
from kvflow.testing.side_channel import Exchange, InprocSideChannel, own_host
from kvflow.testing.simulated_network import Network, SimHost
from kvflow.testing.simulated_world import make_world
from kvflow.testing.virtual_loop import Life, VirtualLoop
from kvflow.testing.weather import CALM, Weather, draw_weather
from kvflow.transport.inproc import InprocNetwork, InprocTransport

ResultT = TypeVar("ResultT")

_FIRST_RANK = Rank(0, 0, 0)
_SMALL = CacheSize(layers=1)


class InprocCluster:
    """The network and the side channel that runtimes of one process share.

    Args:
        seed: With one, everything that engines send each other is slow, torn, lost, repeated, late, refused or garbled
            as the simulator does it, the same in every run; it needs virtual time. None is a perfect network.
        weather: How bad that is; drawn from the seed if None.
    """

    def __init__(self, seed: int | None = None, *, weather: Weather | None = None) -> None:
        self.network = InprocNetwork()
        self._exchange = Exchange()
        self._rng = random.Random(seed)
        self._weather = None if seed is None else weather or draw_weather(self._rng)
        """Weather of the simulated network; None for a perfect one."""
        self._simulated: Network | None = None
        self._hosts: dict[str, SimHost] = {}
        self._transports: dict[tuple[str, Rank], InprocTransport] = {}

    def world(self, *, clock: Callable[[], Clock] = LoopClock) -> World:
        """The world of a runtime that is part of the cluster. Copies run on the event loop: keep caches small.

        Args:
            clock: Makes the runtime's clock, in its loop.

        Returns:
            A world for one runtime or several.
        """
        if self._weather is not None:
            world = make_world(self._simulation, lambda config: self._host(config.engine_id), clock)
            return replace(world, transport=self._make, forgives=False)
        return World(
            transport=self._make,
            side_channel=lambda config: InprocSideChannel(self._exchange, config),
            clock=clock,
            copier=InlineCopier,
            own_host=own_host,
            forgives=False,
        )

    def transport(self, engine_id: str, rank: Rank = _FIRST_RANK) -> InprocTransport:
        """The transport of a rank's latest runtime: hold its reads, perform them, and script its `faults`.

        Args:
            engine_id: Whose.
            rank: Which of the engine's ranks; the first if not given.

        Returns:
            The one that was made last.
        """
        return self._transports[engine_id, rank]

    @contextlib.asynccontextmanager
    async def engine(
        self,
        engine_id: str,
        *,
        config: Config | None = None,
        size: CacheSize = _SMALL,
        parts: Sequence[Part] = (),
    ) -> AsyncIterator[TestEngine]:
        """An open runtime with a small registered cache, filled with its pattern (`TestEngine.cache`).

        Args:
            engine_id: Its name.
            config: Limits and timeouts; the name, address and transport are the cluster's.
            size: Of the cache; one layer if not given.
            parts: Of the runtime.

        Returns:
            A context manager; its block gets the engine.

        Raises:
            AssertionError: On a clean exit, if something is left (`assert_closed`).
            UsageError: The cluster has a seed, and the loop is not virtual.
        """
        base = config or Config(engine_id=engine_id, drain_timeout_s=1.0)
        async with open_engine(engine_id, base, self._make, world=self.world(), size=size, parts=parts) as engine:
            yield engine

    async def run_process(
        self,
        engine_id: str,
        body: Callable[[], Coroutine[Any, Any, ResultT]],
        *,
        crashes: int = 1,
        within_s: float = 0.1,
    ) -> ResultT:
        """Run an engine as a process that is killed and starts again under its name, at moments drawn from the seed.

        Args:
            engine_id: Of the runtimes that `body` opens.
            body: One life, from opening the engine on. When it is killed nothing of it runs any more, no `finally`
                either, and its memory cannot be reached.
            crashes: How often it is killed at most.
            within_s: It is killed at most so long after its start, and starts again at most so long after that.

        Returns:
            What the life that came to its end returned; what that raised is raised. Cancelling cancels it.

        Raises:
            UsageError: The cluster has no seed.
        """
        if self._weather is None:
            raise UsageError("run_process: crashes come by a seed, as in InprocCluster(seed=7)")
        network, host = self._simulation(), self._host(engine_id)
        for number in itertools.count():
            host.life = Life(network.loop, f"{engine_id}.{number}")
            task = host.life.task(body(), name=f"{engine_id}.{number}")
            try:
                bound_s = self._rng.uniform(0.0, within_s) if number < crashes else None
                done, _ = await asyncio.wait([task], timeout=bound_s)
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait([task])
                raise
            if done:
                break
            host.life.kill()
            network.detach(host)
            await asyncio.wait([task], timeout=self._rng.uniform(0.0, within_s))  # the dead are never done
        return task.result()

    def _simulation(self) -> Network:
        """Return the simulated network, which is made when the first engine opens, in its loop."""
        if self._simulated is None:
            loop = asyncio.get_running_loop()
            if not isinstance(loop, VirtualLoop):
                raise UsageError("faults by seed need virtual time: run the test with run_virtual")
            self._simulated = Network(loop, self._rng)
            self._simulated.weather = self._weather or CALM
        return self._simulated

    def _host(self, engine_id: str) -> SimHost:
        """Return the host that an engine's ranks run on."""
        if engine_id not in self._hosts:
            life = Life(self._simulation().loop, engine_id)
            self._hosts[engine_id] = SimHost(engine_id, f"host of {engine_id}", life)
        return self._hosts[engine_id]

    def _make(self, config: Config, agent_name: str) -> InprocTransport:
        if self._weather is None:
            made = InprocTransport(agent_name, self.network)
        else:
            made = self._simulation().attach(self._host(config.engine_id), agent_name)
        self._transports[config.engine_id, Rank.of(config)] = made
        return made
