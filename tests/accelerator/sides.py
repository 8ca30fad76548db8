"""Engines with caches on the stand-in. A test sees the bytes that a kernel would see if it were launched now."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kvflow import CacheLayout, LoadReport, LoadRequest, Runtime, ServeRequest
from kvflow.config import Config
from kvflow.core.cache.regions import Device, Span
from kvflow.runtime.part import Part
from kvflow.runtime.producer.lease import Lease
from kvflow.runtime.world import World, make_transport
from kvflow.testing import PatternCache, assert_closed, assert_loaded
from kvflow.transport import base
from kvflow.transport.base import MemoryUse, Transport
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.accelerator.mapping import mapping
from tests.accelerator.standin import COUNT, KIND, load
from tests.support.tests_support import PATIENT, limited

HERE, THERE = f"{KIND}:0", f"{KIND}:1"
THEIRS, OURS = [1, 7, 2, 5], [3, 0, 9, 8]
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 2, 16, 4, 4, 8
TOKENS = len(THEIRS) * BLOCK_SIZE
TRANSPORTS = ("inproc", "nixl", "direct", "mapped")
"""Without staging: `direct` reaches the memory of the stand-in past its streams, as RDMA does; `mapped` maps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One engine: its cache, the cache's device, and its settings."""

    device: str = "cpu"
    order: str = "HND"
    style: str = "kv_first"
    blocks: int = BLOCKS
    block_size: int = BLOCK_SIZE
    dtype: torch.dtype = torch.float32
    engine_copies: bool = False
    """Whether the engine's own function copies blocks."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)

    def make(self, engine_id: str) -> tuple[dict[str, Any], CacheLayout]:
        """Make the cache on the host, filled with the engine's pattern."""
        blocks = self.blocks
        inner = (self.block_size, HEADS) if self.order == "NHD" else (HEADS, self.block_size)

        def empty(*outer: int, width: int = HEAD_SIZE) -> torch.Tensor:
            return torch.zeros(*outer, *inner, width, dtype=torch.float32).to(self.dtype)

        kv_caches: dict[str, Any] = {}
        for index in range(LAYERS):
            match self.style:
                case "kv_first":
                    layer: Any = empty(2, blocks)
                case "blocks_first":
                    layer = empty(blocks, 2)
                case "fused":
                    layer = empty(blocks, width=2 * HEAD_SIZE)
                case "apart":
                    layer = (empty(blocks), empty(blocks))
                case _:
                    layer = torch.zeros(blocks, self.block_size, HEADS * HEAD_SIZE).to(self.dtype)
            kv_caches[f"layers.{index}"] = layer
        layout = CacheLayout.infer(kv_caches, order=self.order, block_size=self.block_size, style=self.style)
        PatternCache(engine_id, kv_caches, layout).fill()
        return kv_caches, layout


def moved(kv_caches: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return a cache on another device."""
    return {
        name: tuple(part.to(device) for part in layer) if isinstance(layer, tuple) else layer.to(device)
        for name, layer in kv_caches.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    engine_id: str
    runtime: Runtime
    kv_caches: dict[str, Any]
    layout: CacheLayout
    device: str
    parts: Sequence[Part] = ()

    def seen(self) -> PatternCache:
        """Return the cache as a kernel sees it that is launched now, on a stream of its own."""
        stream = contextlib.nullcontext() if self.device == "cpu" else torch.Stream(self.device)
        with stream:
            there = moved(self.kv_caches, "cpu")
        return PatternCache(self.engine_id, there, self.layout)

    def serve(self, block_ids: Sequence[int] = THEIRS, **others: Any) -> Lease:
        given = {"num_tokens": len(block_ids) * self.layout.block_size, **others}
        return self.runtime.serve_blocks(ServeRequest("req", block_ids, **given))

    async def load(self, lease: Lease, block_ids: Sequence[int] = OURS, **others: Any) -> LoadReport:
        return await self.runtime.load_blocks(LoadRequest("req", lease.ticket.to_params(), block_ids, **others))


class DirectTransport(InprocTransport):
    """A transport that reads and writes a device's memory past its streams."""

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        await super().register(spans, Device("cpu", 0), keepalive, use)

    @staticmethod
    def copy(rows: Iterable[tuple[int, int, int]]) -> None:
        standin = load()
        for local, remote, size in rows:
            ctypes.memmove(standin.reach(int(local)), standin.reach(int(remote)), int(size))


class Site:
    """Engines of one test, on one transport."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._network = InprocNetwork()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Site:
        await self._stack.__aenter__()
        patched = self._stack.enter_context(pytest.MonkeyPatch.context())
        if self.transport == "direct":
            patched.setitem(base.DEVICES, KIND, True)  # type: ignore[arg-type]
        if self.transport == "mapped":
            self._stack.enter_context(mapping())
        return self

    async def __aexit__(self, *details: Any) -> None:
        await self._stack.__aexit__(*details)

    async def engine(self, engine_id: str, side: Side, parts: Sequence[Part] = ()) -> Engine:
        side = replace(side, settings={"cuda_ipc": self.transport == "mapped", **side.settings})
        return await self._stack.enter_async_context(open_engine(engine_id, side, self.make_transport, parts))

    async def pair(self, producer: Side, consumer: Side) -> tuple[Engine, Engine]:
        return await self.engine("producer", producer), await self.engine("consumer", consumer)

    def make_transport(self, config: Config, agent_name: str) -> Transport:
        match self.transport:
            case "nixl" | "mapped":
                return make_transport(replace(config, transport="nixl"), agent_name)
            case "direct":
                return DirectTransport(agent_name, self._network)
            case _:
                return InprocTransport(agent_name, self._network)


@contextlib.asynccontextmanager
async def open_engine(engine_id: str, side: Side, make: Any, parts: Sequence[Part] = ()) -> AsyncIterator[Engine]:
    """An engine with its pattern in its registered cache; after a clean exit nothing is left of it."""
    host_caches, layout = side.make(engine_id)
    kv_caches = moved(host_caches, side.device)
    finish()
    config = limited(
        replace(PATIENT, engine_id=engine_id, listen="tcp://127.0.0.1:0", transport="inproc"), **side.limits
    )
    world = World(transport=make, logs_observer_errors=False)
    async with Runtime(replace(config, **side.settings), world=world, parts=parts) as runtime:
        copier = EngineCopier(kv_caches, side.style) if side.engine_copies else None
        await runtime.register_kv_caches(kv_caches, layout, copy_blocks=copier)
        yield Engine(
            engine_id=engine_id,
            runtime=runtime,
            kv_caches=kv_caches,
            layout=layout,
            device=side.device,
            parts=parts,
        )
    assert_closed(runtime.statistics())


class EngineCopier:
    """An engine's own copy function, which returns before the copies have run."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], style: str) -> None:
        self._kv_caches = kv_caches
        self._axis = 1 if style == "kv_first" else 0

    def __call__(self, host_caches: Any, pairs: Sequence[tuple[int, int]], direction: str) -> None:
        for layer, tensor in self._kv_caches.items():
            for block, host_block in pairs:
                ours, hosts = tensor.select(self._axis, block), host_caches[layer].select(self._axis, host_block)
                if direction == "to_host":
                    hosts.copy_(ours, non_blocking=True)
                else:
                    ours.copy_(hosts, non_blocking=True)


def finish() -> None:
    """Wait for everything that is queued on the stand-in."""
    for number in range(COUNT):
        torch.accelerator.synchronize(f"{KIND}:{number}")


def assert_right(producer: Engine, consumer: Engine, **options: Any) -> None:
    """Assert that the consumer's engine sees the offered blocks, now, and that its other blocks are untouched."""
    found = consumer.seen()
    finish()
    assert_loaded(found, OURS, producer.seen(), THEIRS, **options)
