"""A rank with a pool on a device that runs kvflow, in a process of its own, and the pair of them in each experiment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

import kvflow
from kvflow.bench.child import QUIET, Child, Environment, RankProcess, open_children
from kvflow.bench.loads import Ticket
from kvflow.core.policy.events import DeviceEvent
from tests.gpu.device import Device, open_device
from tests.gpu.pool import Pool, PoolShape, scattered_ids

_CONFIG = {"lease_ttl_s": 300.0, "load_deadline_s": 60.0, "drain_timeout_s": 1.0}
PRODUCER_VALUE, READER_VALUE = 1.0, 0.0


class LoadEnd(NamedTuple):
    """How a load went: `error` is the name of what it raised, "" if it succeeded."""

    seconds: float
    error: str = ""
    text: str = ""

    def succeeded(self) -> LoadEnd:
        """Itself; one that has failed ends the experiment."""
        if self.error:
            raise RuntimeError(f"a load failed: {self.error}: {self.text}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What one rank is."""

    engine_id: str
    device: str
    pool: PoolShape
    value: float = READER_VALUE
    own_stream: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def open_engine(spec: EngineSpec) -> AsyncIterator[Engine]:
    """The rank with its cache registered."""
    device = open_device(spec.device, own_stream=spec.own_stream)
    pool = Pool(spec.pool, spec.device, spec.value)
    device.wait()
    config = kvflow.Config(engine_id=spec.engine_id, listen="tcp://127.0.0.1:0", **{**_CONFIG, **spec.config})
    async with kvflow.Runtime(config) as runtime:
        start_s = time.perf_counter()
        await runtime.register_kv_caches(pool.tensors, pool.layout())
        engine = Engine(runtime, pool, device, time.perf_counter() - start_s)
        yield engine
        engine.end()


class Engine:
    """The steps that a rank can be asked for."""

    def __init__(self, runtime: kvflow.Runtime, pool: Pool, device: Device, registered_s: float) -> None:
        self._runtime, self._pool, self._device = runtime, pool, device
        self._registered_s = registered_s
        self._leases: dict[str, kvflow.Lease] = {}
        self._busy = contextlib.ExitStack()
        self._taken: Any = None

    async def registered_s(self) -> float:
        """How long registering the cache has taken."""
        return self._registered_s

    async def set_busy(self, busy: bool) -> None:
        """Keep the device's default stream busy, or no longer."""
        self._busy.close()
        if busy:
            self._busy.enter_context(self._device.busy())

    async def fill(self, block_ids: Sequence[int], value: float) -> None:
        """Give blocks a value, and wait for it."""
        self._device.launch(self._pool.filling(block_ids, value)).synchronize()

    async def compute_and_offer(
        self, name: str, block_ids: Sequence[int], value: float, *, delay_s: float, events: bool
    ) -> Ticket:
        """Launch what fills the blocks, after a pause, and offer them at once: with its event, or without."""
        event = self._device.launch(self._pool.filling(block_ids, value), delay_s)
        return self._offer(name, block_ids, event if events else None)

    async def offer(self, name: str, block_ids: Sequence[int]) -> Ticket:
        """Offer what is there, with an event that has happened: staged caches on a device want one."""
        event = self._device.launch(lambda: None)
        event.synchronize()
        return self._offer(name, block_ids, event)

    def _offer(self, name: str, block_ids: Sequence[int], ready: DeviceEvent | None) -> Ticket:
        num_tokens = len(block_ids) * self._pool.shape.block_size
        request = kvflow.ServeRequest(name, block_ids=block_ids, num_tokens=num_tokens, ready=ready)
        self._leases[name] = self._runtime.serve_blocks(request)
        return dict(self._leases[name].ticket.to_params())

    async def revoke_after(self, name: str, block_ids: Sequence[int], value: float, pause_s: float) -> None:
        """End a lease after a pause, and as soon as its blocks may be used again have the device overwrite them."""
        lease = self._leases.pop(name)
        await asyncio.sleep(pause_s)
        lease.revoke()
        await lease
        self._device.launch(self._pool.filling(block_ids, value))

    async def outcome(self, name: str) -> str:
        return str(await self._leases.pop(name))

    async def load(
        self, name: str, ticket: Ticket, block_ids: Sequence[int], after: DeviceEvent | None = None
    ) -> LoadEnd:
        start_s = time.perf_counter()
        load = self._runtime.start_load(kvflow.LoadRequest(name, ticket=ticket, block_ids=block_ids, after=after))
        try:
            await load
        except kvflow.errors.KVFlowError as error:
            await load.settled()
            return LoadEnd(time.perf_counter() - start_s, type(error).__name__, str(error))
        return LoadEnd(time.perf_counter() - start_s)

    async def load_behind(
        self, name: str, ticket: Ticket, block_ids: Sequence[int], *, delay_s: float, events: bool
    ) -> LoadEnd:
        """Load into blocks that the device still writes after a pause, as the last step of their last owner does."""
        event = self._device.launch(self._pool.filling(block_ids, READER_VALUE), delay_s)
        end = await self.load(name, ticket, block_ids, event if events else None)
        self._device.wait()
        return end

    async def count_other(self, block_ids: Sequence[int], value: float) -> int:
        """How many of the blocks hold anything but the value."""
        return self._pool.count_other(block_ids, value)

    async def forget(self, engine_id: str) -> bool:
        return await self._runtime.forget_peer(engine_id)

    async def take_memory(self, left_bytes: int) -> int:
        """Fill the CUDA device up to so much, as an engine with a large cache does; what is really left."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        self._taken = torch.empty(max(free - left_bytes, 0), dtype=torch.uint8, device="cuda")
        return int(torch.cuda.mem_get_info()[0])

    async def give_memory_back(self) -> None:
        self._taken = None
        torch.cuda.empty_cache()

    async def steps(
        self, count: int, loads: Sequence[tuple[str, Ticket, Sequence[int]]] = (), pause_s: float = 0.0
    ) -> tuple[list[float], list[LoadEnd]]:
        """The seconds of so many steps of an engine, in a thread of it, and how loads went beside them."""
        stepping = asyncio.ensure_future(asyncio.to_thread(_step_seconds, self._device.make_step(), count))
        ends = []
        for load in loads:
            ends.append(await self.load(*load))
            await asyncio.wait([stepping], timeout=pause_s)
            if stepping.done():
                break
        return await stepping, ends

    def end(self) -> None:
        """Before the runtime closes, which would wait for readers."""
        self._busy.close()
        for lease in self._leases.values():
            lease.revoke()
        self._device.close()


def _step_seconds(step: Callable[[], None], count: int) -> list[float]:
    seconds = []
    for _ in range(count + 20):  # the first warm up
        start_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start_s)
    return seconds[20:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A producer and a reader."""

    producer: Child
    reader: Child
    pool: PoolShape

    def hand_over(self, name: str, remote_ids: Sequence[int], local_ids: Sequence[int]) -> LoadEnd:
        """One load of what is there."""
        ticket = self.producer.run(Engine.offer, name, remote_ids)
        end = self.reader.run(Engine.load, name, ticket, local_ids)
        if not end.error:
            self.producer.run(Engine.outcome, name)
        return end

    def times(self, name: str, count: int, repeats: int) -> list[float]:
        """The seconds of loads of so many blocks, each in another order; without the first, which connects."""
        orders = [scattered_ids(turn, self.pool.blocks, count) for turn in range(repeats + 2)]
        ends = [self.hand_over(f"{name} {turn}", *ids) for turn, ids in enumerate(pairwise(orders))]
        if wrong := self.reader.run(Engine.count_other, orders[-1], PRODUCER_VALUE):
            raise RuntimeError(f"{name}: {wrong} of {count} blocks are not the producer's")
        return [end.succeeded().seconds for end in ends][1:]


@contextlib.contextmanager
def engines(producer: EngineSpec, reader: EngineSpec, environment: Environment | None = None) -> Iterator[Pair]:
    """Both in processes of their own; they end with the block."""
    ranks = [RankProcess(spec.engine_id, partial(open_engine, spec)) for spec in (producer, reader)]
    with open_children(ranks, {**QUIET, **(environment or {})}) as children:
        yield Pair(producer=children[producer.engine_id], reader=children[reader.engine_id], pool=reader.pool)


def specs(device: str, pool: PoolShape, **config: Any) -> tuple[EngineSpec, EngineSpec]:
    """A producer whose cache is full of 1 and a reader whose cache is full of 0, alike otherwise."""
    return (
        EngineSpec(engine_id="producer", device=device, pool=pool, value=PRODUCER_VALUE, config=config),
        EngineSpec(engine_id="reader", device=device, pool=pool, value=READER_VALUE, config=config),
    )
