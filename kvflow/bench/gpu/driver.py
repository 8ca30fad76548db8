"""What the CUDA driver says of a device and of memory, through libcuda by ctypes: torch does not tell these.

Numbers of attributes are from cuda.h, where they never change. Values are None where the driver does not know one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

DEVICE_ATTRIBUTES: Mapping[str, int] = {
    "compute mode": 20,
    "GPUDirect RDMA supported": 116,
    "GPUDirect RDMA writes ordering": 118,
    "DMA-BUF supported": 124,
}
"""Those of `cuDeviceGetAttribute` that concern RDMA and peers."""
WRITES_ORDERING_OWNER = 100
"""From here on a NIC's writes are seen by the device that owns the memory once the host has seen their completion."""
_POINTER_IS_LEGACY_IPC_CAPABLE = 10


class NoDriver(RuntimeError):
    """libcuda is not there, or does not start."""


def _libcuda() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoDriver(f"libcuda.so.1 does not load: {error}") from error
    if status := library.cuInit(0):
        raise NoDriver(f"cuInit failed: CUDA error {status}")
    return library


def device_attributes(number: int = 0) -> dict[str, int | None]:
    """The attributes of a device. NoDriver if there is no CUDA here."""
    library, device = _libcuda(), ctypes.c_int()
    if status := library.cuDeviceGet(ctypes.byref(device), number):
        raise NoDriver(f"no CUDA device {number}: CUDA error {status}")
    found: dict[str, int | None] = {}
    for name, attribute in DEVICE_ATTRIBUTES.items():
        value = ctypes.c_int()
        failed = library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        found[name] = None if failed else value.value
    return found


def driver_version() -> tuple[int, int]:
    """The CUDA version that the driver supports, such as (13, 0)."""
    library, version = _libcuda(), ctypes.c_int()
    if status := library.cuDriverGetVersion(ctypes.byref(version)):
        raise NoDriver(f"cuDriverGetVersion failed: CUDA error {status}")
    return version.value // 1000, version.value % 1000 // 10


def legacy_ipc_capable(address: int) -> bool | None:
    """Whether memory at this address can be opened by other processes the way cuda_ipc does; memory that is mapped
    by hand, such as torch's expandable segments, cannot. None if the driver does not say."""
    library, value = _libcuda(), ctypes.c_uint()
    failed = library.cuPointerGetAttribute(
        ctypes.byref(value), _POINTER_IS_LEGACY_IPC_CAPABLE, ctypes.c_uint64(address)
    )
    return None if failed else bool(value.value)
