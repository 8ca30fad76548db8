"""CUDA as threads need it: which device is current, and the few calls of the driver (libcuda) that torch lacks.

A runtime loads the driver only in a process that uses CUDA: torch has been initialized for it before.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvflow.errors import ConfigError
from kvflow.transport.device.cache_device import is_rocm

# Numbers of attributes are from cuda.h, where they never change.
DEVICE_ATTRIBUTES: Mapping[str, int] = {
    "compute mode": 20,
    "GPUDirect RDMA supported": 116,
    "GPUDirect RDMA writes ordering": 118,
    "DMA-BUF supported": 124,
}
"""Attributes of a device that concern RDMA and peers."""
WRITES_ORDERING_OWNER = 100
"""Least value with which a NIC's writes are seen by the owner of the memory once the host has seen their end."""
_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_FLUSH_OPTIONS, _WRITES_ORDERING = 117, 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_...
_FLUSH_BY_HOST = 1
_CURRENT_CONTEXT, _TO_OWNER = 0, 100
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: in which order sources are read, two hints for managed memory, and flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def current_device() -> int | None:
    """The device that is current on this thread; None if the process does not use CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or is_rocm() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def make_current(number: int) -> None:
    """Have calls on this thread go to a device; it has a context there from now on, and disturbs no capture."""
    import torch

    torch.cuda.set_device(number)
    torch.cuda.synchronize(number)
    driver().leave_captures_alone()


class DriverError(RuntimeError):
    """The driver is not there, does not start, or refuses a call."""


class CudaDriver:
    """Calls of the CUDA driver, which raise DriverError. Where it says no other, the thread has to have a context."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def start(self) -> None:
        """Before anything is asked in a process that has not used CUDA. Needs no context."""
        self._call("cuInit", ctypes.c_uint(0))

    def version(self) -> tuple[int, int]:
        """The CUDA version that it supports, such as (13, 0). Needs no context."""
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def attributes(self, number: int = 0) -> dict[str, int | None]:
        """`DEVICE_ATTRIBUTES` of a device; None where it does not know one. Needs no context."""
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
        found: dict[str, int | None] = {}
        for name, attribute in DEVICE_ATTRIBUTES.items():
            try:
                found[name] = self._attribute(attribute, device.value)
            except DriverError:
                found[name] = None
        return found

    def allocate(self, size_bytes: int) -> int:
        """The address of memory from the driver itself. DriverError if there is not so much."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def is_shareable(self, address: int) -> bool:
        """True if other processes can open the memory, as cuda_ipc does: not if its pages were mapped one by one (VMM),
        as torch's expandable segments are. Needs no context.
        """
        capable = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(capable), ctypes.c_int(_LEGACY_IPC_CAPABLE), ctypes.c_uint64(address)
        )
        return bool(capable.value)

    def needs_flush(self, number: int) -> bool:
        """True if the device may see what a network card wrote to its memory only after `flush`."""
        ordering, options = self._attribute(_WRITES_ORDERING, number), self._attribute(_FLUSH_OPTIONS, number)
        return ordering < WRITES_ORDERING_OWNER and bool(options & _FLUSH_BY_HOST)

    def leave_captures_alone(self) -> None:
        """Let this thread ask events and allocate while another one captures a graph: it has nothing to do with that.

        A capture in the mode that is usual ("global") is broken by such calls of any thread that has not said so.
        """
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))

    @property
    def has_batches(self) -> bool:
        """True if the driver has `copy_batch`: CUDA 12.8."""
        return hasattr(self._library, "cuMemcpyBatchAsync")

    def copy_batch(
        self,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Queue copies between addresses on a stream that is not the default one, in one call.

        The copies of a batch are in no order among themselves; memory of the host has to be page-locked.
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

    def flush(self) -> None:
        """Wait until what network cards have written is what the device sees."""
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
    """The driver of this machine, started, so that what needs no context can be asked. Raises DriverError."""
    try:
        loaded = CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise DriverError(f"libcuda.so.1 does not load: {error}") from error
    loaded.start()
    return loaded


@cache
def driver() -> CudaDriver:
    """The driver of this machine. ConfigError if it does not load or start."""
    try:
        return load_driver()
    except DriverError as error:
        raise ConfigError(f"a cache on a CUDA device needs the CUDA driver: {error}") from error
