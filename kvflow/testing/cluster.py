"""Several engines in one process, without NIXL, sockets or threads: on any event loop, in real or virtual time.

Connect your own engine to the cluster by `Runtime(config, world=cluster.world())`, or open a ready-made engine by
`cluster.engine`. A test scripts faults on each rank's in-process transport (`cluster.transport`), or has the cluster
draw them by a seed.
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
from kvflow.testing.copier import InlineCopier
from kvflow.testing.network_conditions import CALM, NetworkConditions, draw_conditions
from kvflow.testing.pair import CacheSize, TestEngine, open_engine
from kvflow.testing.side_channel import Exchange, InprocSideChannel, own_host
from kvflow.testing.simulated_network import Network, SimHost
from kvflow.testing.simulated_world import make_world
from kvflow.testing.virtual_clock import LoopClock
from kvflow.testing.virtual_loop import SimProcess, VirtualLoop
from kvflow.transport.inproc import InprocNetwork, InprocTransport

ResultT = TypeVar("ResultT")

_FIRST_RANK = Rank(0, 0, 0)
_SMALL = CacheSize(layers=1)


class InprocCluster:
    """A network and a side channel inside one process, which connect any number of runtimes.

        cluster = InprocCluster()
        async with cluster.engine("prefill") as prefill, cluster.engine("decode") as decode:
            lease = prefill.runtime.serve_blocks(ServeRequest("req", block_ids=[1], num_tokens=4))
            ticket = lease.ticket.to_params()
            await decode.runtime.load_blocks(LoadRequest("req", ticket=ticket, block_ids=[5]))

    Args:
        seed: Seed of a simulated network with random faults: slow, torn and failed reads, lost, repeated and late
            notifications, unanswered questions, garbled answers. The same seed gives the same faults in every run.
            Needs virtual time (`run_virtual`). None: no random faults.
        conditions: Delays and fault rates of the simulated network; None: drawn at random by the seed.
    """

    def __init__(self, seed: int | None = None, *, conditions: NetworkConditions | None = None) -> None:
        self.network = InprocNetwork()
        self._exchange = Exchange()
        self._rng = random.Random(seed)
        self._conditions = None if seed is None else conditions or draw_conditions(self._rng)
        """Delays and fault rates of the simulated network; None without a seed."""
        self._simulated: Network | None = None
        self._hosts: dict[str, SimHost] = {}
        self._transports: dict[tuple[str, Rank], InprocTransport] = {}

    def world(self, *, clock: Callable[[], Clock] = LoopClock) -> World:
        """Return a `World` (transport, side channel, clock) that connects a runtime to the cluster.

        Pass it to `Runtime(config, world=...)`. Copies of blocks run on the event loop, so keep caches small.

        Args:
            clock: Function that makes the runtime's clock, called on the runtime's event loop.

        Returns:
            A `World`, which several runtimes may share.
        """
        if self._conditions is not None:
            world = make_world(self._simulation, lambda config: self._host(config.engine_id), clock)
            return replace(world, transport=self._make, logs_observer_errors=False)
        return World(
            transport=self._make,
            side_channel=lambda config: InprocSideChannel(self._exchange, config),
            clock=clock,
            copy_thread=InlineCopier,
            own_host=own_host,
            logs_observer_errors=False,
        )

    def transport(self, engine_id: str, rank: Rank = _FIRST_RANK) -> InprocTransport:
        """Return the transport of a rank. With it a test can delay reads, let them happen, and script faults.

        Args:
            engine_id: Name of the rank's engine.
            rank: Rank in the engine; by default the first.

        Returns:
            Transport of the rank's last registration of a KV cache; each registration makes a new one.
        """
        return self._transports[engine_id, rank]

    @contextlib.asynccontextmanager
    async def engine(
        self, engine_id: str, *, config: Config | None = None, size: CacheSize = _SMALL, parts: Sequence[Part] = ()
    ) -> AsyncIterator[TestEngine]:
        """Open a runtime with a small registered KV cache, filled with the engine's pattern (`TestEngine.cache`).

        Args:
            engine_id: Name of the engine.
            config: Limits and timeouts; engine id, address and transport are replaced.
            size: Size of the KV cache; by default one layer.
            parts: Optional features of the runtime, as for `Runtime(config, parts=...)`.

        Returns:
            An async context manager that yields the engine, and closes the runtime at the end.

        Raises:
            AssertionError: The `async with` block succeeded, but the closed runtime left something behind
                (`assert_closed`).
            UsageError: The cluster has a seed, and the event loop is not a `VirtualLoop`.
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
        """Run an engine as a simulated process that crashes and restarts at random times, drawn from the seed.

        If `run_process` is cancelled, it cancels the running `body`, and waits until `body` has ended.

        Args:
            engine_id: Name of every runtime that `body` opens.
            body: Coroutine function for one run of the process: it opens the engine and does the engine's work. After a
                crash no code of the run is executed, not even a `finally`, and peers can no longer read the run's
                memory.
            crashes: Maximum number of crashes.
            within_s: Maximum virtual seconds from start to crash, and from crash to restart.

        Returns:
            The result of the last run.

        Raises:
            UsageError: The cluster has no seed.
            Exception: Any error of the last run.
        """
        if self._conditions is None:
            raise UsageError("run_process: crashes come by a seed, as in InprocCluster(seed=7)")
        network, host = self._simulation(), self._host(engine_id)
        for number in itertools.count():
            host.process = SimProcess(network.loop, f"{engine_id}.{number}")
            task = host.process.task(body(), name=f"{engine_id}.{number}")
            try:
                bound_s = self._rng.uniform(0.0, within_s) if number < crashes else None
                done, _ = await asyncio.wait([task], timeout=bound_s)
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.wait([task])
                raise
            if done:
                break
            host.process.kill()
            network.detach(host)
            await asyncio.wait([task], timeout=self._rng.uniform(0.0, within_s))  # a pause: `task` cannot end
        return task.result()

    def _simulation(self) -> Network:
        """The simulated network, created on the running event loop by the first call."""
        if self._simulated is None:
            loop = asyncio.get_running_loop()
            if not isinstance(loop, VirtualLoop):
                raise UsageError("faults by seed need virtual time: run the test with run_virtual")
            self._simulated = Network(loop, self._rng)
            self._simulated.conditions = self._conditions or CALM
        return self._simulated

    def _host(self, engine_id: str) -> SimHost:
        """Return the simulated host of all ranks of an engine, created by the first call for the engine."""
        if engine_id not in self._hosts:
            life = SimProcess(self._simulation().loop, engine_id)
            self._hosts[engine_id] = SimHost(engine_id, f"host of {engine_id}", life)
        return self._hosts[engine_id]

    def _make(self, config: Config, agent_name: str) -> InprocTransport:
        if self._conditions is None:
            made = InprocTransport(agent_name, self.network)
        else:
            made = self._simulation().attach(self._host(config.engine_id), agent_name)
        self._transports[config.engine_id, Rank.of(config)] = made
        return made
