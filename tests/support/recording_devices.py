"""Engines on fake devices, which use the CPU's memory and record the calls that kvflow makes to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvflow import Config, LoadRequest, ServeRequest
from kvflow.core.cache.regions import Device, Span
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.world import World
from kvflow.testing import CacheSize, assert_loaded
from kvflow.testing.pair import Engine, open_engine
from kvflow.transport.base import MemoryUse
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.transport.inproc import InprocNetwork, InprocTransport

QUICK = Config(engine_id="any", drain_timeout_s=1.0)
NHD, HND = CacheSize(order="NHD", kv_heads=4), CacheSize(order="HND", kv_heads=4)


class RecordingDevice(CacheDevice):
    """A fake device that is not the host. It records the calls to it, and the threads that made them."""

    def __init__(self, where: Device) -> None:
        super().__init__(where)
        self.calls: list[str] = []
        self.threads = {threading.current_thread().name}
        self.inside = 0
        self.room = 1 << 30

    @property
    def on_host(self) -> bool:
        return False

    @property
    def allocates_at_registration(self) -> bool:
        return True

    def check(self, spans: Sequence[Span]) -> None:
        self._note("check")

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self._note("begin")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self._note("end")

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self._note("allocate")
        self.room -= size_bytes
        if self.room < 0:
            raise torch.OutOfMemoryError("no memory")
        return super().allocate(size_bytes)

    def upload(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        assert self.inside, "ids go by the device's stream"
        self._note("upload")
        return super().upload(ids)

    def gather_buffer(self, count: int, size_bytes: int) -> torch.Tensor:
        return torch.empty(min(count, 2), size_bytes, dtype=torch.uint8)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)


class RecordingTransport(InprocTransport):
    """An in-process transport that records the use of each registered memory."""

    def __init__(self, name: str, network: InprocNetwork) -> None:
        super().__init__(name, network)
        self.uses: list[MemoryUse] = []

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        await super().register(spans, device, keepalive, use)
        self.uses.append(use)


class RecordingEngines:
    """Opens engines on fake devices, and keeps the devices."""

    def __init__(self) -> None:
        self.network = InprocNetwork()
        self.devices: list[RecordingDevice] = []
        self.room = 1 << 30

    def device(self, where: Device) -> RecordingDevice:
        self.devices.append(RecordingDevice(where))
        self.devices[-1].room = self.room
        return self.devices[-1]

    def engine(
        self, name: str, size: CacheSize, **settings: Any
    ) -> contextlib.AbstractAsyncContextManager[Engine[RecordingTransport]]:
        world = World(copy_thread=lambda thread: CopyThread(thread, self.device))
        config = replace(QUICK, transport="inproc", **settings)
        return open_engine(
            name, config, lambda _, agent: RecordingTransport(agent, self.network), world=world, size=size
        )


async def handed_over(producer: Engine[RecordingTransport], consumer: Engine[RecordingTransport]) -> None:
    """Hand four blocks over, and compare every byte."""
    lease = producer.runtime.serve_blocks(ServeRequest("req", [1, 7, 2, 5], num_tokens=16))
    await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [3, 0, 9, 8]))
    await lease
    assert_loaded(consumer.cache, [3, 0, 9, 8], producer.cache, [1, 7, 2, 5])
