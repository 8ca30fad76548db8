"""The traffic of a fleet: requests as a router sends them, while ranks start, stop and are killed.

A load is *honest* if both of its ranks lived from the offer to its end. If an honest load fails, kvflow is at fault. If
a rank is killed during a load, the load is lost: no router tries again here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from kvflow.errors import KVFlowError
from kvflow.runtime.load.requests import LoadRequest
from kvflow.testing.virtual_loop import VirtualLoop
from tests.bench.fleet.channel import Costs, SimulatedConnections
from tests.bench.fleet.ranks import LIMITS, FleetEnvironment, FleetRank, Process, Role, first_of

HOP_S = 0.002
RESTART_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """Number of ranks, and number of peers of each."""

    prefill: int
    decode: int
    peers: int
    """How many prefill ranks a decode rank's requests go to."""
    hot: int = 0
    """Number of prefill ranks that all decode ranks ask, for popular prompts."""
    seed: int = 1


@dataclass(slots=True)
class Loads:
    """Outcomes of the loads of one phase."""

    right: int = 0
    lost: int = 0
    """With a rank that was killed."""
    errors: Counter[str] = field(default_factory=Counter)
    """Of honest loads, by their type."""
    wrong: int = 0
    """Loads that were reported and have other bytes."""
    slowest_s: float = 0.0


class Fleet:
    """The ranks, and a router that knows which are in service."""

    def __init__(self, shape: FleetShape, costs: Costs) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "a fleet lives in virtual time"
        self.loop = loop
        self.rng = random.Random(shape.seed)
        self.shape = shape
        self.connections_model = SimulatedConnections(loop, self.rng, LIMITS, costs)
        environment = FleetEnvironment(loop, self.connections_model)
        self.prefill = [FleetRank(Role.PREFILL, number, environment) for number in range(shape.prefill)]
        self.decode = [FleetRank(Role.DECODE, number, environment) for number in range(shape.decode)]
        hot, rest = self.prefill[: shape.hot], self.prefill[shape.hot :]
        count = min(shape.peers - shape.hot, len(rest))
        self.prefills_of = {one.name: [*hot, *self.rng.sample(rest, count)] for one in self.decode}
        """The prefill ranks of each decode rank, in the order of its configuration."""
        self.loads = Loads()
        self._numbers = 0

    async def start(self, ranks: Sequence[FleetRank]) -> None:
        """Open ranks at once, and let decode ranks connect to all of their prefill ranks."""
        await asyncio.gather(*(self._start_one(rank) for rank in ranks))

    async def serve_for(self, seconds: float, rate: float) -> None:
        """Requests at random moments, `rate` a second for each decode rank; returns when the last has ended."""
        async with asyncio.TaskGroup() as group:
            for rank in self.decode:
                group.create_task(self._requests(rank, seconds, rate))

    async def burst(self, rank: FleetRank, count: int) -> None:
        """Send `count` requests to one decode rank at once, as if they had waited for it."""
        await asyncio.gather(*(self.request(rank) for _ in range(count)))

    async def churn(self, seconds: float, kills: int) -> None:
        """Kill ranks of both kinds at random moments; each is back a while after."""
        async with asyncio.TaskGroup() as group:
            for rank in self.rng.sample([*self.prefill, *self.decode], kills):
                group.create_task(self._kill_one(rank, self.rng.uniform(0.0, seconds)))

    async def roll(self, ranks: Sequence[FleetRank], at_once: int) -> None:
        """Restart ranks, a few at a time, drained."""
        waiting = list(ranks)
        while waiting:
            now, waiting = waiting[:at_once], waiting[at_once:]
            await asyncio.gather(*(self._roll_one(rank) for rank in now))

    async def restart_all(self, ranks: Sequence[FleetRank], backlog: int) -> None:
        """Kill all ranks at one moment, and open each again within `RESTART_S`. `backlog` requests wait for each."""

        async def one(rank: FleetRank) -> None:
            await asyncio.sleep(self.rng.uniform(0.0, RESTART_S))
            await self._start_one(rank, backlog)

        for rank in ranks:
            rank.kill()
        await asyncio.gather(*(one(rank) for rank in ranks))

    @asynccontextmanager
    async def phase(self) -> AsyncIterator[Loads]:
        """Counts the loads that begin meanwhile."""
        self.loads = Loads()
        yield self.loads

    async def request(self, reader: FleetRank) -> None:
        """One request: offered by a prefill rank in service, loaded by `reader`."""
        loads, start_s = self.loads, self.loop.time()
        self._numbers += 1
        request_id = f"request-{self._numbers}"
        producer = self.rng.choice(self.prefills_of[reader.name])
        offered = await producer.serve(request_id)
        if offered is None:  # the router sends it elsewhere
            return
        source, block, lease = offered
        await asyncio.sleep(HOP_S)
        process, runtime = reader.process, reader.runtime
        if process is None or runtime is None or not process.free_blocks:
            lease.revoke()
            return
        wanted = process.free_blocks.popleft()
        load = LoadRequest(request_id, ticket=lease.ticket.to_params(), block_ids=[wanted])
        task = process.sim_process.task(runtime.load_blocks(load), name=request_id)
        await first_of(task, process.ended)
        if not task.done():
            loads.lost += 1
            return
        process.free_blocks.append(wanted)
        self._judge(loads, task, source)
        if task.exception() is None:
            loads.slowest_s = max(loads.slowest_s, self.loop.time() - start_s)
            loads.wrong += not torch.equal(reader.block_of[wanted], producer.block_of[block])

    def _judge(self, loads: Loads, task: asyncio.Task[object], source: Process) -> None:
        error = task.exception()
        if error is None:
            loads.right += 1
        elif not isinstance(error, KVFlowError):
            raise error
        elif source.alive:
            loads.errors[type(error).__name__] += 1
        else:
            loads.lost += 1

    async def _start_one(self, rank: FleetRank, backlog: int = 0) -> None:
        await rank.start()
        if rank.name in self.prefills_of:
            async with asyncio.TaskGroup() as group:
                group.create_task(rank.prewarm(self.prefills_of[rank.name]))
                group.create_task(self.burst(rank, backlog))

    async def _requests(self, rank: FleetRank, seconds: float, rate: float) -> None:
        end_s = self.loop.time() + seconds
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self.rng.expovariate(rate))
                if self.loop.time() >= end_s:
                    return
                group.create_task(self.request(rank))

    async def _kill_one(self, rank: FleetRank, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        rank.kill()
        await asyncio.sleep(RESTART_S)
        await self._start_one(rank)

    async def _roll_one(self, rank: FleetRank) -> None:
        await rank.drain()
        await self._start_one(rank)
