"""CUDA IPC by a library that answers as libcuda does, and batches of copies by torch's kernels, on the CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.regions import HOST, Device, Span
from kvflow.errors import ConfigError
from kvflow.transport.device import cuda_mapper
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.transport.device.cuda import CudaDriver, DriverError
from kvflow.transport.device.cuda_mapper import CudaMapper, copy_by_kernels
from kvflow.transport.device.opening import make_mapper

OWN, OPENED, SIZE = 0x7000_0000, 0x9000_0000, 1 << 20
HANDLE = bytes(range(64))
STREAM = 0x5EA


class Library:
    """Answers of libcuda: one allocation of this process, one of another, and events that happen when told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, int] = {}
        self.device = 0
        self.event = 600

    def __getattr__(self, function: str) -> Any:
        if function not in CALLS:
            raise AttributeError(function)

        def call(*arguments: Any) -> int:
            told = [getattr(some, "value", "*") for some in arguments]
            self.calls.append((function, *told))
            if function in self.failing:
                return self.failing[function]
            return CALLS[function](self, *arguments) or 0

        return call


def _range(_: Library, base: Any, size: Any, address: Any) -> None:
    base._obj.value, size._obj.value = (OPENED if address.value >= OPENED else OWN), SIZE


def _export(_: Library, handle: Any, address: Any) -> None:
    assert address.value == OWN
    ctypes.memmove(ctypes.addressof(handle._obj), HANDLE, len(HANDLE))


def _open(_: Library, address: Any, handle: Any, flags: Any) -> None:
    assert (bytes(handle), flags.value) == (HANDLE[::-1], 1)
    address._obj.value = OPENED


def _create(_: Library, event: Any, flags: Any) -> None:
    assert flags.value == 2, "without times"
    event._obj.value = 0xE0


CALLS: dict[str, Any] = {
    "cuMemGetAddressRange_v2": _range,
    "cuIpcGetMemHandle": _export,
    "cuIpcOpenMemHandle_v2": _open,
    "cuIpcCloseMemHandle": lambda *_: 0,
    "cuPointerGetAttribute": lambda library, value, *_: setattr(value._obj, "value", library.device),
    "cuEventCreate": _create,
    "cuEventRecord": lambda *_: 0,
    "cuEventQuery": lambda library, *_: library.event,
    "cuEventDestroy_v2": lambda *_: 0,
    "cuMemcpyBatchAsync": lambda *_: 0,
    "cuStreamSynchronize": lambda *_: 0,
}


def mapper_of(library: Any) -> CudaMapper:
    mapper = CudaMapper.__new__(CudaMapper)
    mapper._device = CacheDevice(Device("cuda", 0))  # type: ignore[assignment]
    mapper._driver, mapper._stream, mapper._opened = CudaDriver(library), STREAM, []
    return mapper


@pytest.fixture(autouse=True)
def no_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_mapper, "_own_handles", {})


class WithoutBatches(Library):
    """A driver before CUDA 12.8."""

    def __getattr__(self, function: str) -> Any:
        if function == "cuMemcpyBatchAsync":
            raise AttributeError(function)
        return super().__getattr__(function)


def test_memory_of_another_process_is_opened_and_closed() -> None:
    library = Library()
    mapper = mapper_of(library)
    assert mapper.allocation_at(OWN + 5) == Span(address=OWN, size_bytes=SIZE)
    assert mapper.open(HANDLE[::-1]) == Span(address=OPENED, size_bytes=SIZE)
    mapper.close(OPENED)
    assert library.calls[-1] == ("cuIpcCloseMemHandle", OPENED)


def test_memory_that_lies_where_own_memory_was_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported cache is freed, and the driver maps a peer's memory at its address."""
    monkeypatch.setitem(cuda_mapper._own_handles, b"of a cache that is free again", OPENED)
    library = Library()
    mapper = mapper_of(library)
    mapper.close(mapper.open(HANDLE[::-1]).address)
    assert ("cuIpcCloseMemHandle", OPENED) in library.calls


def test_own_memory_is_used_as_it_is() -> None:
    """CUDA refuses to open a handle in the process that has made it."""
    library = Library()
    mapper = mapper_of(library)
    assert mapper.export(OWN) == HANDLE
    assert mapper_of(library).open(HANDLE) == Span(address=OWN, size_bytes=SIZE)
    mapper.close(OWN)
    assert [name for name, *_ in library.calls] == ["cuIpcGetMemHandle", "cuMemGetAddressRange_v2"]


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_handle_of_another_size_never_reaches_the_driver(size: int) -> None:
    library = Library()
    with pytest.raises(DriverError, match=f"a CUDA IPC handle has 64 bytes, this one {size}"):
        mapper_of(library).open(bytes(size))
    assert library.calls == []


@pytest.mark.parametrize("failing", ["cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"])
def test_what_the_driver_refuses_is_not_left_open(failing: str) -> None:
    library = Library()
    library.failing[failing] = 217
    with pytest.raises(DriverError, match=f"{failing} failed with error 217"):
        mapper_of(library).open(HANDLE[::-1])
    closed = [("cuIpcCloseMemHandle", OPENED)] if failing == "cuMemGetAddressRange_v2" else []
    assert [call for call in library.calls if call[0] == "cuIpcCloseMemHandle"] == closed


@pytest.mark.parametrize(("batches", "device", "works"), [(True, 1, True), (False, 0, True), (False, 1, False)])
def test_memory_of_another_gpu_needs_batches(batches: bool, device: int, works: bool) -> None:
    """Torch's kernels read memory of their own GPU only."""
    library = Library() if batches else WithoutBatches()
    library.device = device
    mapper = mapper_of(library)
    if works:
        assert mapper.open(HANDLE[::-1]).address == OPENED
        return
    with pytest.raises(DriverError, match=r"on another GPU.* CUDA 12\.8"):
        mapper.open(HANDLE[::-1])
    assert library.calls[-1] == ("cuIpcCloseMemHandle", OPENED)


def test_a_batch_is_one_call_on_the_mappers_stream() -> None:
    library = Library()
    tables = [np.arange(1, 4, dtype=np.uint64) * scale for scale in (1, 10, 100)]
    mapper_of(library).copy(*tables)
    ((name, *arguments),) = library.calls
    assert (name, arguments[:4], arguments[-1]) == (
        "cuMemcpyBatchAsync",
        [*(table.ctypes.data for table in tables), 3],
        STREAM,
    )


def test_an_event_is_forgotten_when_it_has_happened_or_failed() -> None:
    library = Library()
    mapper = mapper_of(library)
    event = mapper.record()
    assert library.calls[-1] == ("cuEventRecord", event, STREAM)
    assert not mapper.has_happened(event)
    library.event = 0
    assert mapper.has_happened(event)
    library.event = 700
    with pytest.raises(DriverError, match="cuEventQuery failed with error 700"):
        mapper.has_happened(event)
    library.failing["cuEventRecord"] = 400
    with pytest.raises(DriverError, match="cuEventRecord failed with error 400"):
        mapper.record()
    assert sum(call == ("cuEventDestroy_v2", event) for call in library.calls) == 3
    mapper.wait()
    assert library.calls[-1] == ("cuStreamSynchronize", STREAM)


def test_only_cuda_is_mapped() -> None:
    with pytest.raises(ConfigError, match="memory on 'npu' cannot be mapped"):
        make_mapper(Device("npu", 0))


@given(st.data())
def test_kernels_copy_pieces_of_any_size_and_place(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([1, 2, 4, 8, 16]))
    sizes = data.draw(st.lists(st.sampled_from([unit, 3 * unit, 8 * unit]), min_size=1, max_size=20))
    room = 8 * unit * len(sizes)
    shift = data.draw(st.integers(0, 15))
    source = torch.randint(0, 256, (room + 16,), dtype=torch.uint8)
    target, expected = torch.zeros(room + 16, dtype=torch.uint8), torch.zeros(room + 16, dtype=torch.uint8)
    places = data.draw(st.permutations(range(len(sizes))))
    local = [shift + 8 * unit * place for place in places]
    remote = [8 * unit * index for index in range(len(sizes))]
    for to, from_, size in zip(local, remote, sizes, strict=True):
        expected[to : to + size] = source[from_ : from_ + size]
    device = CacheDevice(HOST)
    device._gather_buffer = torch.empty(16 * unit, dtype=torch.uint8)  # of two pieces at most
    table = np.array([local, remote, sizes], dtype=np.uint64)
    copy_by_kernels(device, table[0] + np.uint64(target.data_ptr()), table[1] + np.uint64(source.data_ptr()), table[2])
    assert torch.equal(target, expected)
