"""What a cache's device is asked for, and when: by devices that only tell, with memory of the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvflow import Config, LoadRequest, ServeRequest
from kvflow.core.cache.regions import Device, Span
from kvflow.errors import ConfigError, TransferFailed, UsageError
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.world import World
from kvflow.staging.copies import Ids
from kvflow.testing import CacheSize, assert_loaded
from kvflow.testing.pair import Engine, open_engine
from kvflow.transport.base import MemoryUse
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.transport.device.cuda import DEVICE_ATTRIBUTES, CudaDriver, DriverError
from kvflow.transport.device.cuda_device import CudaDevice
from kvflow.transport.inproc import InprocNetwork, InprocTransport

QUICK = Config(engine_id="any", drain_timeout_s=1.0)
NHD, HND = CacheSize(order="NHD", kv_heads=4), CacheSize(order="HND", kv_heads=4)


class Told(CacheDevice):
    """A device that is not the CPU's and needs everything; what it is asked for, and on which thread."""

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
    def eager(self) -> bool:
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

    def upload(self, ids: Ids) -> torch.Tensor:
        assert self.inside, "ids go by the device's stream"
        self._note("upload")
        return super().upload(ids)

    def bounce(self, count: int, size_bytes: int) -> torch.Tensor:
        return torch.empty(min(count, 2), size_bytes, dtype=torch.uint8)

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.threads.add(threading.current_thread().name)


class Spied(InprocTransport):
    """What memory is registered for."""

    def __init__(self, name: str, network: InprocNetwork) -> None:
        super().__init__(name, network)
        self.uses: list[MemoryUse] = []

    async def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        await super().register(spans, device, keepalive, use)
        self.uses.append(use)


class Opened:
    """One engine after the other, on devices that tell."""

    def __init__(self) -> None:
        self.network = InprocNetwork()
        self.devices: list[Told] = []
        self.room = 1 << 30

    def device(self, where: Device) -> Told:
        self.devices.append(Told(where))
        self.devices[-1].room = self.room
        return self.devices[-1]

    def engine(
        self, name: str, size: CacheSize, **settings: Any
    ) -> contextlib.AbstractAsyncContextManager[Engine[Spied]]:
        world = World(copier=lambda thread: CopyThread(thread, self.device))
        config = replace(QUICK, transport="inproc", **settings)
        return open_engine(name, config, lambda _, agent: Spied(agent, self.network), world=world, size=size)


async def handed_over(producer: Engine[Spied], consumer: Engine[Spied]) -> None:
    """Four blocks, and all of their bytes."""
    lease = producer.runtime.serve_blocks(ServeRequest("req", [1, 7, 2, 5], num_tokens=16))
    await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [3, 0, 9, 8]))
    await lease
    assert_loaded(consumer.cache, [3, 0, 9, 8], producer.cache, [1, 7, 2, 5])


async def test_copies_through_scratch_run_on_the_devices_stream() -> None:
    opened = Opened()
    async with opened.engine("p", NHD) as producer, opened.engine("c", HND, scratch="always") as consumer:
        device = opened.devices[1]
        assert device.calls == ["check"] + ["allocate"] * consumer.runtime.config.limits.scratch_slots_max
        assert device.threads == {f"kvflow-copy {consumer.transport.name}"}
        device.calls.clear()
        await handed_over(producer, consumer)
        assert device.calls == ["begin", "upload", "upload", "end"], "ids go up once, and it is waited for once"


async def test_staged_copies_run_on_the_devices_stream() -> None:
    opened = Opened()
    async with (
        opened.engine("p", HND, staging="always") as producer,
        opened.engine("c", HND, staging="always") as consumer,
    ):
        told = [device.calls for device in opened.devices]
        assert told == [[], []], "peers read host memory: it is not checked, and scratch memory is the host's"
        await handed_over(producer, consumer)
        assert told == [["begin", "upload", "end"]] * 2
        assert all(len(device.threads) == 1 for device in opened.devices)


async def test_a_device_without_room_for_scratch_reads_straight(caplog: pytest.LogCaptureFixture) -> None:
    opened = Opened()
    opened.room = 1 << 20
    with caplog.at_level(logging.WARNING):
        async with opened.engine("p", NHD) as producer, opened.engine("c", HND) as consumer:
            await handed_over(producer, consumer)
            assert "begin" not in opened.devices[1].calls
    assert "reads small pieces one by one: no 33554432 bytes of scratch memory on cpu: no memory" in caplog.text


async def test_scratch_that_has_to_be_and_cannot() -> None:
    opened = Opened()
    opened.room = 1 << 20
    with pytest.raises(ConfigError, match="no 33554432 bytes of scratch memory"):
        async with opened.engine("c", HND, scratch="always"):
            pass


class Broke(CacheDevice):
    """The CPU, without memory when it is asked for some."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")


async def test_memory_that_runs_out_under_a_load_is_that_loads_failure() -> None:
    opened = Opened()
    opened.device = Broke  # type: ignore[method-assign,assignment]
    async with opened.engine("p", NHD) as producer, opened.engine("c", HND, scratch="always") as consumer:
        lease = producer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4))
        with pytest.raises(TransferFailed, match="no memory"):
            await consumer.runtime.load_blocks(LoadRequest("req", lease.ticket, [3]))
        lease.revoke()


async def test_memory_is_registered_for_what_the_role_does() -> None:
    opened = Opened()
    served, read = MemoryUse.SERVED, MemoryUse.READ_INTO
    async with (
        opened.engine("p", HND, role="producer", scratch="never") as producer,
        opened.engine("c", HND, role="consumer", scratch="never") as consumer,
        opened.engine("b", HND, scratch="never") as both,
    ):
        await handed_over(producer, consumer)
        await handed_over(producer, both)
        with pytest.raises(UsageError, match="'req': serve_blocks: the role of engine 'c' is 'consumer'"):
            consumer.runtime.serve_blocks(ServeRequest("req", [1], num_tokens=4))
        introduction = consumer.runtime.introduce()  # who it is anybody may say
        with pytest.raises(UsageError, match="load_blocks: the role of engine 'p' is 'producer'"):
            await producer.runtime.load_blocks(LoadRequest("req", introduction, []))
        seals = [served, read]  # a reader's questions are answered, whatever it is
        assert [engine.transport.uses for engine in (producer, consumer, both)] == [
            [served, *seals],
            [read, *seals],
            [served | read, *seals],
        ]


# --- the driver's calls, by a library that tells


class Library:
    """Answers as libcuda does: through pointers, and an error's number."""

    def __init__(self) -> None:
        self.error = 0
        self.attributes: dict[tuple[str, int], int] = {}
        self.calls: list[tuple[str, ...]] = []

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((function, *(str(getattr(some, "value", "*")) for some in arguments)))
            first = getattr(arguments[0], "_obj", None)
            if function == "cuThreadExchangeStreamCaptureMode":
                self.calls[-1] = (function, str(first.value))
            elif isinstance(first, ctypes.c_uint64):
                first.value = 0x7000
            elif first is not None:
                first.value = self.attributes[function, arguments[1].value]
            return self.error

        return call


def test_memory_from_the_driver() -> None:
    library = Library()
    driver = CudaDriver(library)
    assert driver.allocate(512) == 0x7000
    driver.free(0x7000)
    driver.flush()
    driver.leave_captures_alone()
    assert library.calls == [
        ("cuMemAlloc_v2", "*", "512"),
        ("cuMemFree_v2", str(0x7000)),
        ("cuFlushGPUDirectRDMAWrites", "0", "100"),
        ("cuThreadExchangeStreamCaptureMode", "2"),
    ]
    library.error = 2
    with pytest.raises(RuntimeError, match="cuMemAlloc_v2 failed with error 2"):
        driver.allocate(1 << 60)


@pytest.mark.parametrize(
    ("ordering", "options", "needed"), [(0, 1, True), (0, 2, False), (100, 1, False), (200, 3, False)]
)
def test_when_a_network_cards_writes_are_flushed(ordering: int, options: int, needed: bool) -> None:
    library = Library()
    library.attributes = {("cuDeviceGetAttribute", 118): ordering, ("cuDeviceGetAttribute", 117): options}
    assert CudaDriver(library).needs_flush(1) is needed


def test_what_the_driver_says_of_itself_and_of_a_device() -> None:
    library = Library()
    driver = CudaDriver(library)
    driver.start()
    known = {("cuDeviceGetAttribute", number): number for number in DEVICE_ATTRIBUTES.values()}
    library.attributes = {("cuDeviceGet", 1): 7} | known
    assert driver.attributes(1) == DEVICE_ATTRIBUTES
    assert library.calls[:2] == [("cuInit", "0"), ("cuDeviceGet", "*", "1")]
    library.error = 3
    with pytest.raises(DriverError, match="cuInit failed with error 3"):
        driver.start()
    with pytest.raises(DriverError, match="cuDeviceGet failed with error 3"):
        driver.attributes(1)


def test_memory_that_cannot_be_shared_is_refused() -> None:
    library = Library()
    device = CudaDevice.__new__(CudaDevice)
    CacheDevice.__init__(device, Device("cuda", 1))
    device._driver = CudaDriver(library)
    span = Span(address=0x7F00, size_bytes=64)
    library.attributes = {("cuPointerGetAttribute", 10): 1}
    device.check([span])
    library.attributes = {("cuPointerGetAttribute", 10): 0}
    with pytest.raises(ConfigError, match=r"cuda:1 at 0x7f00 .*expandable_segments:False.*staging='always'"):
        device.check([span])


def test_ids_of_every_shape_go_up_as_they_are() -> None:
    device = CacheDevice(Device("cpu", 0))
    for shape in ((0,), (3,), (2, 3)):
        ids = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        assert torch.equal(device.upload(ids), torch.from_numpy(ids))
