"""A kvflow engine that runs a test's commands ("verbs"), several at once. `engine_process` starts it in a process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import mmap
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import kvflow
from kvflow.runtime.world import World
from kvflow.testing import LoopClock
from tests.gpu.device import Device, open_device
from tests.support.pools import Pool, PoolShape
from tests.support.steered_loop import SteeredLoop

LEASE_TTL_S, LOAD_DEADLINE_S, HANDSHAKE_S = 300.0, 50.0, 30.0  # long: a test of a bound moves time past it
_STUCK_TURNS = 1000
_MAP_FIXED = 0x10  # linux/mman.h
_WARM_UP_STEPS = 20
_BOUNDS = {
    "drain_timeout_s": 1.0,
    "handshake_timeout_s": HANDSHAKE_S,
    "load_deadline_s": LOAD_DEADLINE_S,
    "lease_ttl_s": LEASE_TTL_S,
}


def small(**others: Any) -> PoolShape:
    """Return the default shape of an engine's cache, with changes. K or V of a block in one layer is 8 KiB."""
    return PoolShape(**{"layers": 4, "blocks": 64, "kv_heads": 4, "head_size": 64, "kv_first": True, **others})


BLOCK_BYTES = small().block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Settings of one engine. Every element of its cache is `fill` at first. Port 0 means any free port."""

    engine_id: str
    fill: float = 0.0
    pool: PoolShape = field(default_factory=small)
    host: str = "127.0.0.1"
    port: int = 0
    namespace: str | None = None
    """Network namespace of the engine's process; None for the test's."""
    steered: bool = False
    """True if the test moves the engine's time forward (`SteeredLoop`)."""
    device: str = "cpu"
    """Device of the cache: cpu, cuda or standin."""
    own_stream: bool = False
    """True to compute on another CUDA stream than the default stream."""
    first_head: int = 0
    """Index in the model of the rank's first head."""
    config: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def open_engine(setup: EngineSetup, brake: Connection | None = None) -> AsyncIterator[Engine]:
    """Open an engine and register its cache."""
    if setup.device.startswith("standin"):
        from tests.accelerator.mapping import mapping  # it needs a compiler

        with mapping():
            async with open_on_device(setup, brake) as engine:
                yield engine
    else:
        async with open_on_device(setup, brake) as engine:
            yield engine


@contextlib.asynccontextmanager
async def open_on_device(setup: EngineSetup, brake: Connection | None) -> AsyncIterator[Engine]:
    device = open_device(setup.device, own_stream=setup.own_stream)
    pool = Pool(setup.pool, setup.device, setup.fill)
    device.wait()
    config = kvflow.Config(
        engine_id=setup.engine_id,
        listen=f"tcp://{setup.host}:{setup.port}",
        limits=kvflow.Limits(peer_backoff_first_s=1e-6, peer_backoff_max_s=1e-6, **setup.limits),  # retry at once
        **{**_BOUNDS, **setup.config},
    )
    world = World(clock=LoopClock) if setup.steered else World()
    async with kvflow.Runtime(config, world=world) as runtime:
        engine = Engine(setup, runtime, pool, device, brake)
        await engine.register()
        yield engine
        engine.end()
    await engine.ended()


def map_other_pages(address: int, size_bytes: int) -> None:
    """Map new memory at the same addresses, as in an engine after its sleep mode. Only whole pages are replaced."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if libc.mmap(start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != start:
        raise OSError(ctypes.get_errno(), f"cannot map other pages at {start:#x}")


def _capture(capturing: threading.Event, over: threading.Event) -> int:
    """Capture CUDA graphs until `over` is set, and return their number.

    In capture mode "global" an unsafe CUDA call of any thread breaks the capture.
    """
    matrix, count = torch.ones(64, 64, device="cuda"), 0
    target = torch.mm(matrix, matrix)
    while not over.is_set():
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
            capturing.set()
            for _ in range(100):
                torch.mm(matrix, matrix, out=target)
        count += 1
    return count


class Engine:
    """The engine. Each `do_` method is a verb, with the command's arguments as its parameters."""

    def __init__(
        self, setup: EngineSetup, runtime: kvflow.Runtime, pool: Pool, device: Device, brake: Connection | None
    ) -> None:
        self._setup, self._runtime, self._pool, self._device, self._brake = setup, runtime, pool, device, brake
        self._leases: dict[str, kvflow.Lease] = {}
        self._loads: dict[str, asyncio.Task[kvflow.LoadReport]] = {}
        self._followed: dict[str, kvflow.Load] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stalling: set[asyncio.Task[None]] = set()
        self._busy = ExitStack()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a background task. An error of the task is raised when the engine ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._tasks.discard(task)

    def end(self) -> None:
        """End stalls and busy streams. Called before the runtime closes."""
        self._busy.close()
        for task in self._stalling:
            task.cancel()

    async def ended(self) -> None:
        """Wait for all background tasks, and raise their errors. Called after the runtime has closed."""
        await asyncio.gather(*self._tasks)
        self._device.close()

    def assert_nothing_left(self) -> None:
        statistics = self._runtime.statistics()
        threads = [thread.name for thread in threading.enumerate() if "kvflow" in thread.name]
        if statistics.transport.open_threads or statistics.tasks or threads:
            raise SystemExit(f"left behind: {statistics}, {threads}")

    async def register(self) -> None:
        start_s = time.perf_counter()
        await self._runtime.register_kv_caches(self._pool.tensors, self._pool.layout())
        self._registered_s = time.perf_counter() - start_s

    async def do_registered_s(self) -> float:
        """Return how long the registration of the cache took."""
        return self._registered_s

    async def do_offer(self, request_id: str, block_ids: list[int], ttl_s: float | None = None) -> dict[str, Any]:
        ready = None
        if self._setup.device != "cpu":  # a staged cache on a device needs an event
            ready = self._device.launch(lambda: None)
            ready.synchronize()
        return self._offer(request_id, block_ids, ttl_s=ttl_s, ready=ready)

    def _offer(self, request_id: str, block_ids: list[int], **others: Any) -> dict[str, Any]:
        num_tokens = len(block_ids) * self._pool.shape.block_size
        request = kvflow.ServeRequest(request_id, block_ids, num_tokens, **others)
        self._leases[request_id] = self._runtime.serve_blocks(request)
        return self._leases[request_id].ticket.to_params()

    async def do_compute_and_offer(
        self, request_id: str, block_ids: list[int], value: float, delay_s: float, *, events: bool = True
    ) -> dict[str, Any]:
        """Launch device work that fills the blocks after a pause, and offer them at once, with its event or without."""
        ready = self._device.launch(self._pool.filling(block_ids, value), delay_s)
        return self._offer(request_id, block_ids, ready=ready if events else None)

    async def do_load_behind(
        self,
        request_id: str,
        ticket: dict[str, Any],
        block_ids: list[int],
        delay_s: float,
        *,
        events: bool = True,
    ) -> dict[str, Any]:
        """Load into blocks that the device is going to write after a pause, and wait for both."""
        after = self._device.launch(self._pool.filling(block_ids, self._setup.fill), delay_s)
        request = kvflow.LoadRequest(request_id, ticket, block_ids, after=after if events else None)
        try:
            return await self._load(request)
        finally:
            self._device.wait()

    async def do_write_pattern(self, block_ids: list[int]) -> None:
        self._pool.write_pattern(block_ids, self._setup.first_head)

    async def do_layer_values(self, block: int) -> dict[str, list[float]]:
        return self._pool.layer_values(block)

    async def do_count_wrong(self, block_ids: list[int]) -> int:
        return self._pool.count_wrong(block_ids, self._setup.first_head)

    async def do_count_other(self, block_ids: list[int], value: float) -> int:
        """Return the number of blocks with any element other than `value`."""
        return self._pool.count_other(block_ids, value)

    async def do_offer_growing(self, request_id: str, block_ids: list[int]) -> dict[str, Any]:
        """Offer blocks as a growing lease, with no token computed yet."""
        return self._offer(request_id, block_ids, computed_tokens=0)

    async def do_advance(self, request_id: str, blocks: int) -> None:
        self._leases[request_id].advance(blocks * self._pool.shape.block_size)

    async def do_fail(self, request_id: str) -> None:
        self._leases[request_id].fail("told to")

    async def do_load_growing(self, request_id: str, ticket: dict[str, Any], block_ids: list[int]) -> dict[str, int]:
        """Load from a growing lease. The verb `until_landed` can wait for its progress."""
        load = self._followed[request_id] = self._runtime.start_load(kvflow.LoadRequest(request_id, ticket, block_ids))
        report = await load
        return {"bytes": report.bytes, "descriptors": report.descriptors}

    async def do_until_landed(self, request_id: str, blocks: int) -> None:
        """Wait until `blocks` blocks have landed, or the load has ended."""
        async for progress in self._followed[request_id]:
            if progress.tokens >= blocks * self._pool.shape.block_size:
                return

    async def do_revoke(self, request_id: str) -> None:
        self._leases[request_id].revoke()

    async def do_outcome(self, request_id: str) -> str:
        return str(await self._leases.pop(request_id))

    async def do_load(self, request_id: str, ticket: dict[str, Any], block_ids: list[int]) -> dict[str, Any]:
        return await self._load(kvflow.LoadRequest(request_id, ticket, block_ids))

    async def _load(self, request: kvflow.LoadRequest) -> dict[str, Any]:
        start_s = time.perf_counter()
        task = self._loads[request.request_id] = asyncio.ensure_future(self._runtime.load_blocks(request))
        try:
            report = await task
        finally:
            del self._loads[request.request_id]
        seconds = time.perf_counter() - start_s
        return {"bytes": report.bytes, "descriptors": report.descriptors, "seconds": seconds}

    async def do_until_stuck(self, request_id: str) -> None:
        """Wait until the reads in flight make no progress, or the load has ended."""
        before, quiet_turns = None, 0
        while request_id in self._loads and quiet_turns < _STUCK_TURNS:
            transport = self._runtime.statistics().transport
            progress = (transport.reads, transport.open_reads, transport.bytes_read)
            quiet_turns = quiet_turns + 1 if transport.open_reads and progress == before else 0
            before = progress
            await asyncio.sleep(0)

    async def do_pass_time(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SteeredLoop), f"{self._setup.engine_id} is not steered"
        loop.pass_time(seconds)

    async def do_cancel(self, request_id: str) -> None:
        self._loads[request_id].cancel()

    async def do_offer_many(self, offers: list[dict[str, Any]], then: float) -> list[dict[str, Any]]:
        """Offer several requests, and return their tickets. Fill the blocks of a lease with `then` once it has ended.

        An offer may have `revoke_after_s`, after which its lease is revoked.
        """
        tickets = []
        for offer in offers:
            revoke_after_s = offer.pop("revoke_after_s", None)
            tickets.append(await self.do_offer(**offer))
            lease = self._leases.pop(offer["request_id"])
            self.start(self._reuse(lease, then))
            if revoke_after_s is not None:
                asyncio.get_running_loop().call_later(revoke_after_s, lease.revoke)
        return tickets

    async def _reuse(self, lease: kvflow.Lease, value: float) -> None:
        await lease
        self._fill(lease.block_ids, value)

    async def do_load_many(self, loads: list[dict[str, Any]]) -> list[str | list[float | None]]:
        """Run several loads. Return for each the content of its blocks when it returned, or the type of its error.

        A load may have `delay_s`, after which it begins, and `cancel_after_s`.
        """
        return await asyncio.gather(*(self._load_one(**load) for load in loads))

    async def _load_one(
        self, delay_s: float = 0.0, cancel_after_s: float | None = None, **request: Any
    ) -> str | list[float | None]:
        await asyncio.sleep(delay_s)
        try:
            async with asyncio.timeout(cancel_after_s):
                error = await self._error_of(kvflow.LoadRequest(**request))
        except TimeoutError:
            return "cancelled"
        return error or [self._pool.value_of(block) for block in request["block_ids"]]

    async def do_fill(self, block_ids: list[int], value: float) -> None:
        self._fill(block_ids, value)

    def _fill(self, block_ids: Sequence[int], value: float) -> None:
        """Fill blocks on the device, after all work launched before, and wait for the end of that."""
        self._device.launch(self._pool.filling(block_ids, value)).synchronize()

    async def do_values(self, block_ids: list[int]) -> list[float | None]:
        """Return for each block the value of all its elements, or None if they differ."""
        return [self._pool.value_of(block) for block in block_ids]

    async def do_sleep(self, value: float, *, farewell: bool = True) -> None:
        """Unregister the cache, then map new pages full of `value` at its addresses.

        Without `farewell`, the cache's readers are not notified.
        """
        if not farewell:
            incarnation = self._runtime._supervisor.incarnation
            assert incarnation is not None, "it is registered"
            incarnation.goodbyes._readers.clear()
        await self._runtime.unregister()
        for tensor in self._pool.tensors.values():
            map_other_pages(tensor.data_ptr(), tensor.nbytes)
            tensor.fill_(value)

    async def do_wake(self, value: float) -> None:
        """Fill the cache with `value` and register it again."""
        for tensor in self._pool.tensors.values():
            tensor.fill_(value)
        await self.register()

    async def do_statistics(self) -> dict[str, Any]:
        return dataclasses.asdict(self._runtime.statistics())

    async def do_safe(self) -> None:
        """Wait until no block is quarantined."""
        for quarantine in self._runtime.quarantines:
            await quarantine.settled()

    async def do_stall(self, *, hold_gil: bool = False, after_reads: int = 0) -> None:
        """Block the event loop, as a long step of an engine does, until the test sends a byte through the brake.

        First wait until `after_reads` more reads have been posted. With `hold_gil`, the GIL is held as well, so no
        other thread runs Python.
        """
        stalling = asyncio.create_task(self._until_reads(self._runtime.statistics().transport.reads + after_reads))
        self._stalling.add(stalling)
        try:
            await stalling
        finally:
            self._stalling.discard(stalling)
        brake = self._brake
        assert brake is not None, "its process has one"
        brake.send_bytes(b"stalled")
        if hold_gil:
            ctypes.PyDLL(None).read(brake.fileno(), ctypes.create_string_buffer(64), 64)
        else:
            os.read(brake.fileno(), 64)

    async def _until_reads(self, count: int) -> None:
        while self._runtime.statistics().transport.reads < count:
            await asyncio.sleep(0)

    async def do_take_memory(self, left_bytes: int) -> int:
        """Allocate CUDA memory until `left_bytes` are free, and return how much is really free.

        `do_give_memory_back` frees it.
        """
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        self._taken = torch.empty(max(free - left_bytes, 0), dtype=torch.uint8, device="cuda")
        return int(torch.cuda.mem_get_info()[0])

    async def do_revoke_all(self) -> None:
        """Revoke all leases, because closing would wait for their readers."""
        for lease in self._leases.values():
            lease.revoke()

    async def do_give_memory_back(self) -> None:
        del self._taken
        torch.cuda.empty_cache()

    async def do_dirty_memory(self, size_bytes: int, delay_s: float) -> None:
        """Free memory to torch's allocator that a kernel is still going to write to after a pause."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        self._device.launch(lambda: memory.fill_(0x5A), delay_s)  # type: ignore[arg-type]

    async def do_load_while_capturing(self, loads: list[dict[str, Any]]) -> int:
        """Load while another thread captures CUDA graphs, as engines do. Return the number of captured graphs."""
        capturing, over = threading.Event(), threading.Event()
        graphs = asyncio.create_task(asyncio.to_thread(_capture, capturing, over))
        try:
            await asyncio.to_thread(capturing.wait)
            for load in loads:
                await self.do_load(**load)
        finally:
            over.set()
        return await graphs

    async def do_resources(self) -> dict[str, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "rss_bytes": pages * mmap.PAGESIZE,
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "tasks": len(asyncio.all_tasks()),
        }

    async def do_forget(self, engine_id: str) -> bool:
        return await self._runtime.forget_peer(engine_id)

    async def do_set_busy(self, busy: bool) -> None:
        """Start or stop keeping the device's default stream busy."""
        self._busy.close()
        if busy:
            self._busy.enter_context(self._device.busy())

    async def do_revoke_after(self, request_id: str, value: float, pause_s: float) -> None:
        """Revoke a lease after a pause. Once it has ended, launch device work that overwrites its blocks."""
        lease = self._leases.pop(request_id)
        await asyncio.sleep(pause_s)
        lease.revoke()
        await lease
        self._device.launch(self._pool.filling(lease.block_ids, value))

    async def do_steps(
        self, count: int, loads: Sequence[dict[str, Any]] = (), pause_s: float = 0.0
    ) -> dict[str, list[Any]]:
        """Run `count` engine steps in a thread, and loads at the same time.

        Return the seconds of each step, and for each load the type of its error, or "".
        """
        stepping = asyncio.ensure_future(asyncio.to_thread(_step_seconds, self._device.make_step(), count))
        errors = []
        for load in loads:
            errors.append(await self._error_of(kvflow.LoadRequest(**load)))
            await asyncio.wait([stepping], timeout=pause_s)
            if stepping.done():
                break
        return {"seconds": await stepping, "errors": errors}

    async def _error_of(self, request: kvflow.LoadRequest) -> str:
        """Run a load. Return the name of its error's type; "" if it succeeds."""
        try:
            await self._runtime.load_blocks(request)
        except kvflow.errors.KVFlowError as error:
            return type(error).__name__
        return ""


def _step_seconds(step: Callable[[], None], count: int) -> list[float]:
    seconds = []
    for _ in range(count + _WARM_UP_STEPS):
        start_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start_s)
    return seconds[_WARM_UP_STEPS:]
