"""Requests to a cache's device, and their times: by recording devices with memory of the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from recording_devices import HND, RecordingEngines, handed_over

from kvflow import LoadRequest, ServeRequest
from kvflow.core.cache.regions import Device, Span
from kvflow.errors import ConfigError, UsageError
from kvflow.transport.base import MemoryUse
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.transport.device.cuda import DEVICE_ATTRIBUTES, CudaDriver, DriverError
from kvflow.transport.device.cuda_device import CudaDevice


async def test_memory_is_registered_for_what_the_role_does() -> None:
    opened = RecordingEngines()
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
    driver.relax_capture_mode()
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
