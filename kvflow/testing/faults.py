"""The simulator's network for engines of tests: faults by seed, and engines as processes that crash."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvflow.errors import UsageError
from kvflow.runtime.clock import Clock
from kvflow.runtime.world import World
from kvflow.testing.simulator.network import Host, Network
from kvflow.testing.simulator.settings import Weather, draw_weather
from kvflow.testing.simulator.world import make_world
from kvflow.testing.virtual_loop import Life, VirtualLoop

ResultT = TypeVar("ResultT")


class Faults:
    """One seed's network, with a host for each engine id. Everything is drawn from one generator."""

    def __init__(self, seed: int, weather: Weather | None) -> None:
        self._rng = random.Random(seed)
        self._weather = weather or draw_weather(self._rng)
        self._hosts: dict[str, Host] = {}
        self._made: Network | None = None

    def world(self, clock: Callable[[], Clock]) -> World:
        """What a runtime of any engine gets."""
        return make_world(lambda: self.network, lambda config: self.host(config.engine_id), clock)

    @property
    def network(self) -> Network:
        """Made when the first engine opens, in its loop."""
        if self._made is None:
            loop = asyncio.get_running_loop()
            if not isinstance(loop, VirtualLoop):
                raise UsageError("faults by seed need virtual time: run the test with run_virtual")
            self._made = Network(loop, self._rng)
            self._made.weather = self._weather
        return self._made

    def host(self, engine_id: str) -> Host:
        """Where an engine's ranks run."""
        if engine_id not in self._hosts:
            self._hosts[engine_id] = Host(engine_id, f"host of {engine_id}", Life(self.network.loop, engine_id))
        return self._hosts[engine_id]

    async def run_process(
        self, engine_id: str, body: Callable[[], Coroutine[Any, Any, ResultT]], crashes: int, within_s: float
    ) -> ResultT:
        """See `InprocCluster.run_process`."""
        network, host = self.network, self.host(engine_id)
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
