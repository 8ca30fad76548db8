"""The ranks of a fleet: real runtimes in virtual time, each in a process of its own that can be killed or drained."""

from __future__ import annotations

import asyncio
import enum
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from kvflow.config import Config
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.errors import KVFlowError
from kvflow.limits import Limits
from kvflow.runtime.producer.lease import Lease, ServeRequest
from kvflow.runtime.runtime import Runtime
from kvflow.runtime.world import World
from kvflow.testing.copier import InlineCopier
from kvflow.testing.pair import CacheSize
from kvflow.testing.virtual_clock import LoopClock
from kvflow.testing.virtual_loop import SimProcess, VirtualLoop
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.bench.fleet.channel import SimulatedConnections

SIZE = CacheSize(layers=1, num_blocks=64, block_size=4, kv_heads=1, head_size=4)
TTL_S = 5.0
LIMITS = Limits(leases_max=256)
"""The defaults, but for what only takes memory here."""


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FleetEnvironment:
    """The objects that all ranks of a fleet share."""

    def __init__(self, loop: VirtualLoop, connections_model: SimulatedConnections) -> None:
        self.loop = loop
        self.connections_model = connections_model
        self.agents = InprocNetwork()
        self._secrets = random.Random(connections_model.rng.random())
        self.world = World(
            transport=lambda _, name: InprocTransport(name, self.agents),
            side_channel=connections_model.side_channel,
            clock=LoopClock,
            token_hex=lambda count: self._secrets.randbytes(count).hex(),
            copy_thread=InlineCopier,
            real_process=False,
        )


@dataclass(slots=True, eq=False)
class Process:
    """One life of a rank: it ends by a kill, or drained."""

    sim_process: SimProcess
    runtime_opened: asyncio.Future[Runtime]
    ended: asyncio.Future[None]
    """Done when the process has ended."""
    drain_requested: asyncio.Event = field(default_factory=asyncio.Event)
    free_blocks: deque[int] = field(default_factory=lambda: deque(range(SIZE.num_blocks)))
    """Blocks that no request has."""

    @property
    def alive(self) -> bool:
        return not self.ended.done()


class FleetRank:
    """An engine of one rank at one address; it comes back there after it went."""

    def __init__(self, role: Role, number: int, environment: FleetEnvironment) -> None:
        self.name = f"{role}-{number}"
        self.host = f"{'p' if role is Role.PREFILL else 'd'}{number}"
        self.config = Config(
            engine_id=self.name,
            listen=f"tcp://{self.host}:5600",
            transport="inproc",
            lease_ttl_s=TTL_S,
            limits=LIMITS,
        )
        self.process: Process | None = None
        self.starts = 0
        self._environment = environment
        self._tensors, self._cache = SIZE.make(self.name)

    @property
    def address(self) -> str:
        return self.config.listen

    @property
    def block_of(self) -> torch.Tensor:
        """View of the only layer, by block."""
        return next(iter(self._tensors.values())).transpose(0, 1)

    @property
    def runtime(self) -> Runtime | None:
        """If it is open and stays so."""
        process = self.process
        if (
            process is None
            or not process.alive
            or process.drain_requested.is_set()
            or not process.runtime_opened.done()
        ):
            return None
        return process.runtime_opened.result()

    async def start(self) -> Runtime:
        """Open it in a new process."""
        assert self.process is None or not self.process.alive, "a rank has one process"
        loop = self._environment.loop
        self.starts += 1
        sim_process = SimProcess(loop, f"{self.name}.{self.starts}")
        process = self.process = Process(sim_process, loop.create_future(), loop.create_future())
        sim_process.task(self._run(process), name=sim_process.name)
        return await process.runtime_opened

    def kill(self) -> None:
        """End the process at once: stop its tasks and close its connections."""
        process = self.process
        assert process is not None
        process.sim_process.kill()
        environment = self._environment
        environment.connections_model.exchange.listeners.pop(self.address, None)
        environment.connections_model.port(self.address).drop()
        for name in [name for name in environment.agents.agents if name.startswith(f"{self.name}/")]:
            del environment.agents.agents[name]
        if not process.ended.done():
            process.ended.set_result(None)

    async def drain(self) -> None:
        """Take it out of service, as an operator does; returns when its process has ended."""
        assert self.process is not None
        self.process.drain_requested.set()
        await self.process.ended

    async def serve(self, request_id: str) -> tuple[Process, int, Lease] | None:
        """Offer one block; None if it takes no requests now."""
        process, runtime = self.process, self.runtime
        if process is None or runtime is None or not process.free_blocks:
            return None
        block = process.free_blocks.popleft()

        async def offer() -> Lease:
            request = ServeRequest(request_id, block_ids=[block], num_tokens=SIZE.block_size)
            lease = runtime.serve_blocks(request)
            self._environment.loop.create_task(returned(lease), name=f"lease {request_id}")
            return lease

        async def returned(lease: Lease) -> None:
            await lease
            process.free_blocks.append(block)

        try:
            return process, block, await process.sim_process.task(offer())
        except KVFlowError:  # it is on its way out
            return None

    async def prewarm(self, others: list[FleetRank]) -> tuple[KVFlowError | None, ...]:
        """Connect to others; nothing of it is left if the process ends meanwhile."""
        process, runtime = self.process, self.runtime
        assert process is not None
        assert runtime is not None
        addresses = [PeerAddress(engine_id=other.name, address=other.address) for other in others]
        task = process.sim_process.task(runtime.prewarm(addresses))
        await first_of(task, process.ended)
        return task.result() if task.done() else ()

    async def _run(self, process: Process) -> None:
        async with Runtime(self.config, world=self._environment.world) as runtime:
            await runtime.register_kv_caches(self._tensors, self._cache.layout)
            process.runtime_opened.set_result(runtime)
            await process.drain_requested.wait()
            await runtime.drain()
        process.ended.set_result(None)


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one future is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
