"""CUDA: the current device of a thread, and the few calls of the CUDA driver (libcuda) that torch lacks.

The driver is loaded only in a process that uses CUDA, where torch has initialized CUDA before.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.regions import Span
from kvflow.errors import ConfigError
from kvflow.transport.device.cache_device import is_rocm

# The numbers of attributes come from cuda.h, where they never change.
DEVICE_ATTRIBUTES: Mapping[str, int] = {
    "compute mode": 20,
    "GPUDirect RDMA supported": 116,
    "GPUDirect RDMA writes ordering": 118,
    "DMA-BUF supported": 124,
}
"""CUDA's numbers, by name, of the device attributes that matter for RDMA and for reads by other processes."""
WRITES_ORDERING_OWNER = 100
"""Smallest value of the attribute "GPUDirect RDMA writes ordering" that makes a flush unnecessary.

The device then sees the data of a NIC's write once the host has seen the write's end.
"""
_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_FLUSH_OPTIONS, _WRITES_ORDERING = 117, 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_...
_FLUSH_BY_HOST = 1
_CURRENT_CONTEXT, _TO_OWNER = 0, 100
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_WITH_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_WITHOUT_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


class _CopyAttributes(ctypes.Structure):
    """The C struct CUmemcpyAttributes: the order in which sources are read, two hints for managed memory, and flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class _IpcHandle(ctypes.Structure):
    """The C struct CUipcMemHandle, which functions take by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


def current_device() -> int | None:
    """Return the number of this thread's current CUDA device; None if this process does not use CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or is_rocm() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def make_current(number: int) -> None:
    """Make CUDA device `number` current on this thread, with a context on the device.

    After this call, CUDA calls of this thread do not break a graph capture that runs on another thread.
    """
    import torch

    torch.cuda.set_device(number)
    torch.cuda.synchronize(number)
    driver().relax_capture_mode()


class DriverError(RuntimeError):
    """The CUDA driver is not installed, does not start, or refuses a call."""


class CudaDriver:
    """Calls of the CUDA driver.

    All raise DriverError. The calling thread needs a CUDA context unless a method says otherwise.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def start(self) -> None:
        """Initialize the driver. This call needs no context.

        If the process has not used CUDA yet, call this method before every other method.
        """
        self._call("cuInit", ctypes.c_uint(0))

    def version(self) -> tuple[int, int]:
        """Return the CUDA version that the driver supports, such as (13, 0). This call needs no context."""
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def attributes(self, number: int = 0) -> dict[str, int | None]:
        """Return all `DEVICE_ATTRIBUTES` of device `number`, by name; None for an attribute that the driver does not
        know.

        This call needs no context.
        """
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        values: dict[str, int | None] = {}
        for name, attribute in DEVICE_ATTRIBUTES.items():
            try:
                values[name] = self._attribute(attribute, device.value)
            except DriverError:
                values[name] = None
        return values

    def allocate(self, size_bytes: int) -> int:
        """Allocate `size_bytes` of device memory from the driver, not from torch, and return the address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def is_shareable(self, address: int) -> bool:
        """Return True if other processes can open the device memory at `address` by CUDA IPC. This call needs no
        context.

        False if pages were mapped one by one (VMM), as in torch's expandable segments.
        """
        capable = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(capable), ctypes.c_int(_LEGACY_IPC_CAPABLE), ctypes.c_uint64(address)
        )
        return bool(capable.value)

    def needs_flush(self, number: int) -> bool:
        """Return whether only `flush` makes sure that device `number` sees what a NIC has written to device memory."""
        ordering, options = self._attribute(_WRITES_ORDERING, number), self._attribute(_FLUSH_OPTIONS, number)
        return ordering < WRITES_ORDERING_OWNER and bool(options & _FLUSH_BY_HOST)

    def relax_capture_mode(self) -> None:
        """Let this thread query events and allocate memory while another thread captures a CUDA graph.

        In the default capture mode ("global") these calls, on any thread, break the capture.
        """
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))

    @property
    def has_batches(self) -> bool:
        """True if the driver supports `copy_batch`: CUDA 12.8 or newer."""
        return hasattr(self._library, "cuMemcpyBatchAsync")

    def copy_batch(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Queue copies of `sizes[i]` bytes from address `sources[i]` to address `targets[i]`, for all i, in one call.

        The copies run in any order. `stream`: handle of the CUDA stream, not the default stream. Host memory must be
        page-locked.
        """
        attributes, index, failed = _CopyAttributes(_IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._call(
            "cuMemcpyBatchAsync",
            *(ctypes.c_void_p(some.ctypes.data) for some in (targets, sources, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(index),
            ctypes.c_size_t(1),
            ctypes.byref(failed),
            ctypes.c_void_p(stream),
        )

    def allocation_at(self, address: int) -> Span:
        """Return the whole allocation that contains `address`, also one that `open_ipc` has mapped."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return Span(address=base.value, size_bytes=size.value)

    def device_of(self, address: int) -> int:
        """Return the number of the device with the memory at `address`. This call needs no context."""
        number = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(number), ctypes.c_int(_DEVICE_ORDINAL), ctypes.c_uint64(address)
        )
        return number.value

    def ipc_handle(self, address: int) -> bytes:
        """Return the CUDA IPC handle of the allocation that begins at `address`."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's allocation into this process, and return its address.

        If the memory is on another device, access to that device is enabled. Each call needs one of `close_ipc`.
        """
        if len(handle) != _HANDLE_BYTES:
            raise DriverError(f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, this one {len(handle)}")
        address, flags = ctypes.c_uint64(), ctypes.c_uint(_WITH_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _IpcHandle.from_buffer_copy(handle), flags)
        return address.value

    def close_ipc(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def record_event(self, stream: int) -> int:
        """Return a new event, recorded behind all work that is queued on the stream with the handle `stream`."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_WITHOUT_TIMING))
        try:
            self._call("cuEventRecord", event, ctypes.c_void_p(stream))
        except DriverError:
            self._library.cuEventDestroy_v2(event)
            raise
        return int(event.value or 0)

    def has_happened(self, event: int) -> bool:
        """Return whether `event` has happened. Once it has, or if work has failed (DriverError), destroy the event."""
        result = self._library.cuEventQuery(ctypes.c_void_p(event))
        if result == _NOT_READY:
            return False
        self._library.cuEventDestroy_v2(ctypes.c_void_p(event))
        if result:
            raise DriverError(f"CUDA driver: cuEventQuery failed with error {result}")
        return True

    def synchronize(self, stream: int) -> None:
        """Wait until all work that is queued on the stream with the handle `stream` has ended."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def flush(self) -> None:
        """Wait until the device sees all data that NICs have written to its memory."""
        self._call("cuFlushGPUDirectRDMAWrites", ctypes.c_int(_CURRENT_CONTEXT), ctypes.c_int(_TO_OWNER))

    def _attribute(self, attribute: int, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_int(number))
        return value.value

    def _call(self, function: str, *arguments: Any) -> None:
        result = getattr(self._library, function)(*arguments)
        if result:
            raise DriverError(f"CUDA driver: {function} failed with error {result}")


def load_driver() -> CudaDriver:
    """Load libcuda, initialize it and return the driver. Raises DriverError."""
    try:
        loaded = CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise DriverError(f"libcuda.so.1 does not load: {error}") from error
    loaded.start()
    return loaded


@cache
def driver() -> CudaDriver:
    """Return the CUDA driver. The first call loads it. Raises ConfigError if it does not load or initialize."""
    try:
        return load_driver()
    except DriverError as error:
        raise ConfigError(f"a cache on a CUDA device needs the CUDA driver: {error}") from error
