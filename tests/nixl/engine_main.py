"""A kvflow engine that lives in a process of its own and does what it is told, several commands at once.

Commands and answers are lines of JSON: `{"call": 3, "verb": "load", "arguments": {...}}` is answered by
`{"call": 3, "value": ...}` or by `{"call": 3, "error": {...}}`, in whatever order the verbs end. The test's end is
`engine_process`.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

import psutil
import torch
import uvloop
from pattern import count_wrong, write_pattern
from steered_loop import SteeredLoop

import kvflow
from kvflow.runtime.world import World
from kvflow.testing import LoopClock
from kvflow.transport.nixl import agents
from tests.gpu.device import open_device

BLOCK_SIZE = 16
LAYERS = 4
KV_HEADS, HEAD_SIZE = 4, 64
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK_SIZE * HEAD_SIZE * 2  # K and V, float16
LEASE_TTL_S, LOAD_DEADLINE_S, HANDSHAKE_S = 300.0, 50.0, 30.0  # long: a test that is about them lets them pass
_STUCK_TURNS = 1000
_LINE_BYTES_MAX = 1 << 24
_MAP_FIXED = 0x10  # linux/mman.h
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000  # linux/sched.h
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000  # linux/mount.h
_BOUNDS = {
    "drain_timeout_s": 1.0,
    "handshake_timeout_s": HANDSHAKE_S,
    "load_deadline_s": LOAD_DEADLINE_S,
    "lease_ttl_s": LEASE_TTL_S,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What one engine is. Every element of its cache is `fill`; port 0 is any free one."""

    engine_id: str
    fill: float = 0.0
    num_blocks: int = 64
    host: str = "127.0.0.1"
    port: int = 0
    namespace: str | None = None
    """The network namespace that it lives in."""
    steered: bool = False
    """Whether the test moves its time on."""
    device: str = "cpu"
    """Where its cache is: cpu or cuda."""
    own_stream: bool = False
    """On cuda, whether it computes on a stream of its own in place of the default one."""
    order: str = "HND"
    block_size: int = BLOCK_SIZE
    first_head: int = 0
    kv_heads: int = KV_HEADS
    """Its rank's heads: so many from `first_head` on."""
    config: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)
    parks: bool = True
    """Whether reads that are stuck can be given up."""


def run_engine(commands: socket, brake: Connection, setup: EngineSetup, environment: Mapping[str, str]) -> None:
    """What the process runs: until told to quit, or until the test's end is gone."""
    os.environ.update(environment)
    if not setup.parks:
        agents._PARKED_MAX = 0
    if setup.namespace is not None:
        enter_namespace(setup.namespace)
    with asyncio.Runner(loop_factory=SteeredLoop if setup.steered else uvloop.new_event_loop) as runner:
        runner.run(Engine(commands, brake, setup).run())


def enter_namespace(name: str) -> None:
    """Move to another network; with a /sys of its own, where UCX looks for network devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        failed = (
            libc.setns(namespace.fileno(), _CLONE_NEWNET)
            or libc.unshare(_CLONE_NEWNS)
            or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
            or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
        )
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def map_other_pages(address: int, size_bytes: int) -> None:
    """Have other memory at the same addresses, as an engine that has slept: all whole pages that lie there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if libc.mmap(start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != start:
        raise OSError(ctypes.get_errno(), f"cannot map other pages at {start:#x}")


def _capture(count: int) -> None:
    matrix = torch.ones(64, 64, device="cuda")
    target = torch.mm(matrix, matrix)
    for _ in range(count):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
            for _ in range(100):
                torch.mm(matrix, matrix, out=target)


class Engine:
    """Each `do_` method is a verb; its parameters are the command's arguments."""

    def __init__(self, commands: socket, brake: Connection, setup: EngineSetup) -> None:
        self._socket = commands
        self._brake = brake
        self._setup = setup
        self._device = open_device(setup.device, own_stream=setup.own_stream)
        inner = (setup.kv_heads, setup.block_size)
        shape = (2, setup.num_blocks, *(inner if setup.order == "HND" else inner[::-1]), HEAD_SIZE)
        self._caches = {
            f"layers.{index}": torch.full(shape, setup.fill, dtype=torch.float16, device=setup.device)
            for index in range(LAYERS)
        }
        self._device.wait()
        self._leases: dict[str, kvflow.Lease] = {}
        self._loads: dict[str, asyncio.Task[kvflow.LoadReport]] = {}
        self._followed: dict[str, kvflow.Load] = {}
        self._stalling: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        setup = self._setup
        config = kvflow.Config(
            engine_id=setup.engine_id,
            listen=f"tcp://{setup.host}:{setup.port}",
            limits=kvflow.Limits(peer_backoff_first_s=1e-6, peer_backoff_max_s=1e-6, **setup.limits),  # tries at once
            **{**_BOUNDS, **setup.config},
        )
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_LINE_BYTES_MAX)
        world = World(clock=LoopClock) if setup.steered else World()
        async with asyncio.TaskGroup() as self._verbs, kvflow.Runtime(config, world=world) as self._runtime:
            await self._register()
            self._answer({"call": 0, "value": "ready"})
            while (command := json.loads(await reader.readline()))["verb"] != "quit":
                self._verbs.create_task(self._do(**command))
            for task in self._stalling:
                task.cancel()
        self._device.close()
        self._assert_nothing_left()

    async def _register(self) -> None:
        layout = kvflow.CacheLayout.infer(self._caches, order=self._setup.order, block_size=self._setup.block_size)
        await self._runtime.register_kv_caches(self._caches, layout)

    def _assert_nothing_left(self) -> None:
        statistics = self._runtime.statistics()
        threads = [thread.name for thread in threading.enumerate() if "kvflow" in thread.name]
        if statistics.transport.open_threads or statistics.tasks or threads:
            raise SystemExit(f"left behind: {statistics}, {threads}")

    async def _do(self, call: int, verb: str, arguments: dict[str, Any]) -> None:
        try:
            value = await getattr(self, f"do_{verb}")(**arguments)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is the test that judges it
            quarantine = getattr(error, "quarantine", None)
            described = {
                "kind": type(error).__name__,
                "text": str(error),
                "phase": getattr(error, "phase", None),
                "quarantined": list(quarantine.block_ids) if quarantine else [],
            }
            self._answer({"call": call, "error": described})
        else:
            self._answer({"call": call, "value": value})

    def _answer(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def do_offer(
        self, request_id: str, block_ids: list[int], ttl_s: float | None = None, ready: Any = None
    ) -> dict[str, Any]:
        num_tokens = len(block_ids) * self._setup.block_size
        if ready is None and self._setup.device != "cpu":  # staged caches on a device want an event
            ready = self._device.launch(lambda: None)
        request = kvflow.ServeRequest(request_id, block_ids, num_tokens, ttl_s=ttl_s, ready=ready)
        self._leases[request_id] = self._runtime.serve_blocks(request)
        return self._leases[request_id].ticket.to_params()

    async def do_compute_and_offer(
        self, request_id: str, block_ids: list[int], value: float, delay_s: float
    ) -> dict[str, Any]:
        """Launch what fills the blocks behind a pause of the device, and offer them at once, with its event."""
        ready = self._device.launch(self._filling(block_ids, value), delay_s)
        return await self.do_offer(request_id, block_ids, ready=ready)

    async def do_load_behind(
        self, request_id: str, ticket: dict[str, Any], block_ids: list[int], delay_s: float
    ) -> dict[str, int]:
        """Load into blocks that the device still writes behind a pause; ends when both have ended."""
        after = self._device.launch(self._filling(block_ids, self._setup.fill), delay_s)
        report = await self._load(kvflow.LoadRequest(request_id, ticket, block_ids, after=after))
        self._device.wait()
        return report

    async def do_write_pattern(self, block_ids: list[int]) -> None:
        write_pattern(self._caches, block_ids, self._setup.first_head, self._setup.order)

    async def do_count_wrong(self, block_ids: list[int]) -> int:
        return count_wrong(self._caches, block_ids, self._setup.first_head, self._setup.order)

    async def do_offer_growing(self, request_id: str, block_ids: list[int]) -> dict[str, Any]:
        """Offer blocks of which nothing is computed."""
        tokens = len(block_ids) * self._setup.block_size
        request = kvflow.ServeRequest(request_id, block_ids, tokens, computed_tokens=0)
        self._leases[request_id] = self._runtime.serve_blocks(request)
        return self._leases[request_id].ticket.to_params()

    async def do_advance(self, request_id: str, blocks: int) -> None:
        self._leases[request_id].advance(blocks * self._setup.block_size)

    async def do_fail(self, request_id: str) -> None:
        self._leases[request_id].fail("told to")

    async def do_load_growing(self, request_id: str, ticket: dict[str, Any], block_ids: list[int]) -> dict[str, int]:
        """A load whose progress `until_landed` can wait for."""
        load = self._followed[request_id] = self._runtime.start_load(kvflow.LoadRequest(request_id, ticket, block_ids))
        report = await load
        return {"bytes": report.bytes, "descriptors": report.descriptors}

    async def do_until_landed(self, request_id: str, blocks: int) -> None:
        """Wait until so many blocks have landed, or the load has ended."""
        async for progress in self._followed[request_id]:
            if progress.tokens >= blocks * self._setup.block_size:
                return

    async def do_revoke(self, request_id: str) -> None:
        self._leases[request_id].revoke()

    async def do_outcome(self, request_id: str) -> str:
        return str(await self._leases.pop(request_id))

    async def do_load(self, request_id: str, ticket: dict[str, Any], block_ids: list[int]) -> dict[str, int]:
        return await self._load(kvflow.LoadRequest(request_id, ticket, block_ids))

    async def _load(self, request: kvflow.LoadRequest) -> dict[str, int]:
        task = self._loads[request.request_id] = asyncio.ensure_future(self._runtime.load_blocks(request))
        try:
            report = await task
        finally:
            del self._loads[request.request_id]
        return {"bytes": report.bytes, "descriptors": report.descriptors}

    async def do_until_stuck(self, request_id: str) -> None:
        """Wait until reads are in flight of which nothing more lands, or the load has ended."""
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
        """Offer several requests; as soon as a lease has ended its blocks are filled with `then`.

        An offer may say `revoke_after_s`.
        """
        tickets = []
        for offer in offers:
            revoke_after_s = offer.pop("revoke_after_s", None)
            tickets.append(await self.do_offer(**offer))
            lease = self._leases.pop(offer["request_id"])
            self._verbs.create_task(self._reuse(lease, then))
            if revoke_after_s is not None:
                asyncio.get_running_loop().call_later(revoke_after_s, lease.revoke)
        return tickets

    async def _reuse(self, lease: kvflow.Lease, value: float) -> None:
        await lease
        self._fill(lease.block_ids, value)

    async def do_load_many(self, loads: list[dict[str, Any]]) -> list[str | list[float | None]]:
        """Load several tickets: what was in the blocks when each load returned, or the type of its error.

        A load may say `delay_s` and `cancel_after_s`.
        """
        return await asyncio.gather(*(self._load_one(**load) for load in loads))

    async def _load_one(
        self, delay_s: float = 0.0, cancel_after_s: float | None = None, **request: Any
    ) -> str | list[float | None]:
        await asyncio.sleep(delay_s)
        try:
            async with asyncio.timeout(cancel_after_s):
                await self._runtime.load_blocks(kvflow.LoadRequest(**request))
        except TimeoutError:
            return "cancelled"
        except kvflow.errors.KVFlowError as error:
            return type(error).__name__
        return [self._value_of(block) for block in request["block_ids"]]

    async def do_fill(self, block_ids: list[int], value: float) -> None:
        self._fill(block_ids, value)

    def _fill(self, block_ids: Sequence[int], value: float) -> None:
        if self._setup.device == "cpu":
            for tensor in self._caches.values():
                tensor[:, list(block_ids)] = value
        else:
            self._device.launch(self._filling(block_ids, value)).synchronize()

    def _filling(self, block_ids: Sequence[int], value: float) -> Callable[[], None]:
        """Work for the device, which waits for nothing once it is launched."""
        index = torch.tensor(list(block_ids)).to(self._setup.device)

        def fill() -> None:
            for tensor in self._caches.values():
                tensor.index_fill_(1, index, value)

        return fill

    async def do_values(self, block_ids: list[int]) -> list[float | None]:
        """For each block the one value that fills it, or None."""
        return [self._value_of(block) for block in block_ids]

    def _value_of(self, block: int) -> float | None:
        parts = [tensor[:, block] for tensor in self._caches.values()]
        value = float(parts[0].flatten()[0])
        return value if all(bool((part == value).all()) for part in parts) else None

    async def do_sleep(self, value: float, *, farewell: bool = True) -> None:
        """Unregister the cache; as soon as that may be other pages are mapped where it lies, full of `value`."""
        if not farewell:
            self._runtime._supervisor.cache.readers._callers.clear()
        await self._runtime.unregister()
        for tensor in self._caches.values():
            map_other_pages(tensor.data_ptr(), tensor.nbytes)
            tensor.fill_(value)

    async def do_wake(self, value: float) -> None:
        """Register it again."""
        for tensor in self._caches.values():
            tensor.fill_(value)
        await self._register()

    async def do_statistics(self) -> dict[str, Any]:
        return dataclasses.asdict(self._runtime.statistics())

    async def do_safe(self) -> None:
        """Wait until no block is quarantined."""
        for quarantine in self._runtime.quarantines:
            await quarantine.settled()

    async def do_stall(self, *, hold_gil: bool = False, after_reads: int = 0) -> None:
        """Stop the event loop, as an engine's long step does, until the test lets go of the brake.

        Waits before until the transport has been given `after_reads` more reads. With `hold_gil` no other thread can
        run Python either.
        """
        stalling = asyncio.create_task(self._until_reads(self._runtime.statistics().transport.reads + after_reads))
        self._stalling.add(stalling)
        try:
            await stalling
        finally:
            self._stalling.discard(stalling)
        self._brake.send_bytes(b"stalled")
        if hold_gil:
            ctypes.PyDLL(None).read(self._brake.fileno(), ctypes.create_string_buffer(64), 64)
        else:
            os.read(self._brake.fileno(), 64)

    async def _until_reads(self, count: int) -> None:
        while self._runtime.statistics().transport.reads < count:
            await asyncio.sleep(0)

    async def do_take_memory(self, left_bytes: int) -> int:
        """Fill the CUDA device but for so much; what is really left. No bytes: give it back."""
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        self._taken = torch.empty(max(free - left_bytes, 0), dtype=torch.uint8, device="cuda")
        return int(torch.cuda.mem_get_info()[0])

    async def do_give_memory_back(self) -> None:
        del self._taken
        torch.cuda.empty_cache()

    async def do_dirty_memory(self, size_bytes: int, delay_s: float) -> None:
        """Leave memory in torch's cache that kernels behind a pause are still going to write."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
        self._device.launch(lambda: memory.fill_(0x5A), delay_s)  # type: ignore[arg-type, return-value]

    async def do_capture(self, count: int) -> None:
        """Capture graphs as engines do, in a mode that any unsafe call of any other thread ends."""
        await asyncio.to_thread(_capture, count)

    async def do_resources(self) -> dict[str, int]:
        process = psutil.Process()
        return {
            "rss_bytes": process.memory_info().rss,
            "fds": process.num_fds(),
            "threads": process.num_threads(),
            "tasks": len(asyncio.all_tasks()),
        }
