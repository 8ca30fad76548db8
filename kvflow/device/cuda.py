"""CUDA as threads need it: which device is current, and the few calls of the driver that torch does not offer.

Nothing here is loaded in a process that does not use CUDA: torch has been initialized for it before.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from kvflow.errors import ConfigError

# cuda.h
_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_FLUSH_OPTIONS, _WRITES_ORDERING = 117, 118  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_...
_FLUSH_BY_HOST, _ORDERED_FOR_OWNER = 1, 100
_CURRENT_CONTEXT, _TO_OWNER = 0, 100
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def current_device() -> int | None:
    """The device that is current on this thread; None if the process does not use CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def make_current(number: int) -> None:
    """Have calls on this thread go to a device; it has a context there from now on, and disturbs no capture."""
    import torch

    torch.cuda.set_device(number)
    torch.cuda.synchronize(number)
    driver().leave_captures_alone()


class Driver:
    """Calls of the CUDA driver. The calling thread has to have a context."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def allocate(self, size_bytes: int) -> int:
        """The address of memory from the driver itself. RuntimeError if there is not so much."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def is_shareable(self, address: int) -> bool:
        """Whether other processes can open the memory: not if its pages were mapped one by one (VMM)."""
        capable = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(capable), ctypes.c_int(_LEGACY_IPC_CAPABLE), ctypes.c_uint64(address)
        )
        return bool(capable.value)

    def needs_flush(self, number: int) -> bool:
        """Whether the device may see what a network card wrote to its memory only after `flush`."""
        ordering, options = self._attribute(_WRITES_ORDERING, number), self._attribute(_FLUSH_OPTIONS, number)
        return ordering < _ORDERED_FOR_OWNER and bool(options & _FLUSH_BY_HOST)

    def leave_captures_alone(self) -> None:
        """Let this thread ask events and allocate while another one captures a graph: it has nothing to do with that.

        A capture in the mode that is usual ("global") is broken by such calls of any thread that has not said so.
        """
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))

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
            raise RuntimeError(f"CUDA driver: {function} failed with error {result}")


@cache
def driver() -> Driver:
    """The driver of this machine. ConfigError if it does not load."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise ConfigError(f"a cache on a CUDA device needs the CUDA driver: {error}") from error
