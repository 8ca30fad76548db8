"""A rank with a pool on a device that runs kvflow, in a process of its own, and the pair of them in each experiment."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import kvflow
from kvflow.bench.child import Child, Environment, RankProcess, open_children
from kvflow.bench.gpu.device import Device, open_device
from kvflow.bench.gpu.pool import Pool, PoolShape
from kvflow.bench.gpu.steps import Steps
from kvflow.bench.loads import QUIET, Ticket
from kvflow.bench.ucx import ReadPath, read_path
from kvflow.core.policy.events import DeviceEvent

_CONFIG = {"lease_ttl_s": 300.0, "load_deadline_s": 60.0, "drain_timeout_s": 1.0}
PRODUCER_VALUE, READER_VALUE = 1.0, 0.0


class LoadEnd(NamedTuple):
    """How a load went: `error` is the name of what it raised, "" if it succeeded."""

    seconds: float
    error: str = ""
    text: str = ""
    descriptors: int = 0


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
        self._runtime = runtime
        self._pool = pool
        self._device = device
        self._registered_s = registered_s
        self._leases: dict[str, kvflow.Lease] = {}
        self._busy = contextlib.ExitStack()
        self._taken: Any = None
        self._steps: Steps | None = None

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
        self, name: str, block_ids: Sequence[int], value: float, *, delay_s: float = 0.0, events: bool = True
    ) -> Ticket:
        """Launch what fills the blocks, after a pause, and offer them at once: with its event, or without."""
        event = self._device.launch(self._pool.filling(block_ids, value), delay_s)
        return await self.offer(name, block_ids, ready=event if events else None)

    async def offer(self, name: str, block_ids: Sequence[int], ready: DeviceEvent | None = None) -> Ticket:
        num_tokens = len(block_ids) * self._pool.shape.block_size
        request = kvflow.ServeRequest(name, block_ids=block_ids, num_tokens=num_tokens, ready=ready)
        self._leases[name] = self._runtime.serve_blocks(request)
        return dict(self._leases[name].ticket.to_params())

    async def offer_computed(self, name: str, block_ids: Sequence[int]) -> Ticket:
        """Offer what is there, with an event that has happened: staged caches on a device want one."""
        return await self.offer(name, block_ids, ready=await self.computed())

    async def computed(self) -> DeviceEvent:
        """An event that has happened, behind all that was launched; waits for it."""
        event = self._device.launch(lambda: None)
        event.synchronize()
        return event

    async def revoke_after(self, name: str, block_ids: Sequence[int], value: float, pause_s: float) -> str:
        """End a lease after a pause, and as soon as its blocks may be used again have the device overwrite them."""
        lease = self._leases.pop(name)
        await asyncio.sleep(pause_s)
        lease.revoke()
        outcome = await lease
        self._device.launch(self._pool.filling(block_ids, value))
        return str(outcome)

    async def outcome(self, name: str) -> str:
        return str(await self._leases.pop(name))

    async def load(self, name: str, ticket: Ticket, block_ids: Sequence[int]) -> LoadEnd:
        return await self._load(kvflow.LoadRequest(name, ticket=ticket, block_ids=block_ids))

    async def offer_all(self, offers: Sequence[tuple[str, Sequence[int]]]) -> list[Ticket]:
        """Offer what is there under several names; blocks may be in more than one."""
        return [await self.offer_computed(name, block_ids) for name, block_ids in offers]

    async def load_all(self, loads: Sequence[tuple[str, Ticket, Sequence[int]]]) -> list[LoadEnd]:
        """One after the other, without a pause."""
        return [await self.load(*load) for load in loads]

    async def load_behind(
        self, name: str, ticket: Ticket, block_ids: Sequence[int], *, delay_s: float, events: bool
    ) -> LoadEnd:
        """Load into blocks that the device still writes after a pause, as the last step of their last owner does."""
        event = self._device.launch(self._pool.filling(block_ids, READER_VALUE), delay_s)
        request = kvflow.LoadRequest(name, ticket=ticket, block_ids=block_ids, after=event if events else None)
        end = await self._load(request)
        self._device.wait()
        return end

    async def _load(self, request: kvflow.LoadRequest) -> LoadEnd:
        start_s = time.perf_counter()
        load = self._runtime.start_load(request)
        try:
            report = await load
        except kvflow.errors.KVFlowError as error:
            await load.settled()
            return LoadEnd(time.perf_counter() - start_s, type(error).__name__, str(error))
        return LoadEnd(time.perf_counter() - start_s, descriptors=report.descriptors)

    async def count_other(self, block_ids: Sequence[int], value: float) -> int:
        """How many of the blocks hold anything but the value."""
        return self._pool.count_other(block_ids, value)

    async def forget(self, engine_id: str) -> bool:
        return await self._runtime.forget_peer(engine_id)

    async def take_memory(self, left_bytes: int) -> int:
        """Fill the CUDA device up to so much, as an engine with a large cache does; what is really left."""
        import torch

        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        self._taken = torch.empty(max(free - left_bytes, 0), dtype=torch.uint8, device="cuda")
        return int(torch.cuda.mem_get_info()[0])

    async def give_memory_back(self) -> None:
        import torch

        self._taken = None
        torch.cuda.empty_cache()

    async def begin_steps(self) -> None:
        """Start to run steps of some milliseconds, one after the other, in a thread of the engine."""
        self._steps = Steps(self._device)

    async def step_seconds(self, count: int) -> list[float]:
        """How long so many steps have taken that begin now."""
        assert self._steps is not None, "begin_steps first"
        return await asyncio.to_thread(self._steps.next, count)

    async def end_steps(self) -> None:
        assert self._steps is not None, "begin_steps first"
        await asyncio.to_thread(self._steps.end)
        self._steps = None

    async def load_for_a_while(
        self, loads: Sequence[tuple[str, Ticket, Sequence[int]]], pause_s: float, steps: int
    ) -> tuple[list[float], list[LoadEnd]]:
        """Load one after the other with pauses while so many steps are taken: their seconds, and how loads went."""
        assert self._steps is not None, "begin_steps first"
        stepping = asyncio.ensure_future(asyncio.to_thread(self._steps.next, steps))
        ends = []
        for name, ticket, block_ids in loads:
            ends.append(await self.load(name, ticket, block_ids))
            await asyncio.wait([stepping], timeout=pause_s)
            if stepping.done():
                break
        return await stepping, ends

    def end(self) -> None:
        """Before the runtime closes, which would wait for readers."""
        self._busy.close()
        if self._steps is not None:
            self._steps.end()
        for lease in self._leases.values():
            lease.revoke()
        self._device.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A producer and a reader, and what UCX will have said of the reader's way once both are gone."""

    producer: Child
    reader: Child
    pool: PoolShape

    def hand_over(self, name: str, remote_ids: Sequence[int], local_ids: Sequence[int]) -> LoadEnd:
        """One load of what is there."""
        ticket = self.producer.run(Engine.offer_computed, name, remote_ids)
        end = self.reader.run(Engine.load, name, ticket, local_ids)
        if not end.error:
            self.producer.run(Engine.outcome, name)
        return end

    def must_hand_over_all(self, name: str, ids: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[LoadEnd]:
        """Loads of (remote, local) blocks one after the other; one that fails ends the experiment."""
        names = [f"{name} {turn}" for turn in range(len(ids))]
        offers = [(one, remote) for one, (remote, _) in zip(names, ids, strict=True)]
        tickets = self.producer.run(Engine.offer_all, offers)
        loads = [(one, ticket, local) for one, ticket, (_, local) in zip(names, tickets, ids, strict=True)]
        ends = self.reader.run(Engine.load_all, loads)
        for one, end in zip(names, ends, strict=True):
            if end.error:
                raise RuntimeError(f"load {one!r} failed: {end.error}: {end.text}")
            self.producer.run(Engine.outcome, one)
        return ends

    def must_hand_over(self, name: str, remote_ids: Sequence[int], local_ids: Sequence[int]) -> LoadEnd:
        """As `hand_over`; a load that fails ends the experiment."""
        end = self.hand_over(name, remote_ids, local_ids)
        if end.error:
            raise RuntimeError(f"load {name!r} failed: {end.error}: {end.text}")
        return end


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


class UcxLog:
    """A folder for the logs of processes whose UCX says which ways it has chosen; it says so as late as they end."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.environment: Mapping[str, str] = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/%p.log"}

    def path(self, pid: int, size_bytes: int) -> ReadPath | None:
        """The way of reads of that size, of a process that has ended."""
        text = "".join(file.read_text(errors="replace") for file in self._folder.glob(f"{pid}.log*"))
        return read_path(text, size_bytes)

    def said(self, pid: int, size_bytes: int) -> str:
        """The same as a fact."""
        path = self.path(pid, size_bytes)
        return "UCX did not say" if path is None else f"{path.over} ({path.how})"


@contextlib.contextmanager
def ucx_log() -> Iterator[UcxLog]:
    with tempfile.TemporaryDirectory(prefix="kvflow-ucx-") as folder:
        yield UcxLog(folder)
