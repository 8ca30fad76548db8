"""CUDA IPC: allocations of other processes, and batches of copies from there. Not yet run on a device.

A batch is one call of the driver, from CUDA 12.8 on. An older driver gathers pieces of one size by a kernel of torch
into a buffer, and scatters them from there by another.
"""

from __future__ import annotations

from functools import reduce
from math import gcd

import numpy as np
import torch

from kvflow.core.cache.regions import Device, Span
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.transport.device.cuda import DriverError, driver
from kvflow.transport.device.cuda_device import CudaDevice
from kvflow.transport.device.foreign_memory import bytes_at
from kvflow.transport.device.mapper import Addresses

_DTYPES = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_own_handles: dict[bytes, int] = {}
"""Addresses of this process's allocations that were exported, by handle."""


class CudaMapper:
    """A `Mapper` for one CUDA device: its copies have a stream of their own."""

    def __init__(self, where: Device) -> None:
        self._device = CudaDevice(where)
        self._driver = driver()
        self._stream = self._device.stream_handle
        self._opened: list[int] = []
        """Addresses of other processes' allocations, one for each time that one was opened."""

    def allocation_at(self, address: int) -> Span:
        return self._driver.allocation_at(address)

    def export(self, address: int) -> bytes:
        handle = self._driver.ipc_handle(address)
        _own_handles[handle] = address
        return handle

    def open(self, handle: bytes) -> Span:
        if (own := _own_handles.get(handle)) is not None:
            return self._driver.allocation_at(own)
        address = self._driver.open_ipc(handle)
        try:
            if not self._driver.has_batches and self._driver.device_of(address) != self._device.where.number:
                raise DriverError("it is on another GPU, and batches of copies from there need a driver for CUDA 12.8")
            opened = self._driver.allocation_at(address)
        except DriverError:
            self._driver.close_ipc(address)
            raise
        self._opened.append(address)
        return opened

    def close(self, address: int) -> None:
        if address in self._opened:  # else it is this process's own
            self._opened.remove(address)
            self._driver.close_ipc(address)

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        if self._driver.has_batches:
            self._driver.copy_batch(targets, sources, sizes, self._stream)
        else:
            with self._device.queueing():
                copy_by_kernels(self._device, targets, sources, sizes)

    def record(self) -> int:
        return self._driver.record_event(self._stream)

    def has_happened(self, event: int) -> bool:
        return self._driver.has_happened(event)

    def wait(self) -> None:
        self._driver.synchronize(self._stream)


def copy_by_kernels(device: CacheDevice, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
    """Queue copies of `sizes[i]` bytes from `sources[i]` to `targets[i]` by gather and scatter kernels of torch.

    The kernels run on the current stream, in order. Sources and targets must not overlap.
    """
    for size in np.unique(sizes).tolist():
        chosen = sizes == size
        ours, theirs = targets[chosen], sources[chosen]
        unit = reduce(gcd, (*ours.tolist(), *theirs.tolist(), size), 16)
        (to, to_rows), (from_, from_rows) = (_rows(device.name, some, size, unit) for some in (ours, theirs))
        begin = 0
        while begin < len(ours):
            buffer = device.gather_buffer(len(ours) - begin, size)
            gathered, end = buffer.view(_DTYPES[unit]), begin + len(buffer)
            torch.index_select(from_rows, 0, _upload(device, from_[begin:end]), out=gathered)
            to_rows.index_copy_(0, _upload(device, to[begin:end]), gathered)
            begin = end


def _rows(device: str, addresses: Addresses, size: int, unit: int) -> tuple[np.ndarray, torch.Tensor]:
    """Return (numbers, rows): piece i, of `size` bytes at `addresses[i]`, is the row `numbers[i]` of the tensor `rows`.

    A row begins at each multiple of `unit` bytes, so rows overlap. `unit` divides all distances between the addresses.
    """
    first = int(addresses.min())
    flat = bytes_at(first, int(addresses.max()) - first + size, device).view(_DTYPES[unit])
    length = size // unit
    numbers = ((addresses - np.uint64(first)) // np.uint64(unit)).astype(np.int64)
    return numbers, flat.as_strided((len(flat) - length + 1, length), (1, 1))


def _upload(device: CacheDevice, numbers: np.ndarray) -> torch.Tensor:
    ids = device.upload(numbers)
    assert ids is not None, "CUDA and the CPU have kernels to gather and scatter"
    return ids
