"""Mapped memory on the stand-in, over real NIXL: what `kvflow.transport.device.mapper` asks of a device.

NIXL has no way to the stand-in's memory. It gets the addresses behind, where the bytes are, in the place of those that
tensors carry, as if it reached this device. So reads that are not mapped work, too, past the device's streams.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.core.cache.regions import HOST, Device, Span, UInt64Array
from kvflow.transport import base
from kvflow.transport.base import MemoryUse
from kvflow.transport.device.accelerator import AcceleratorDevice
from kvflow.transport.device.cuda import DriverError
from kvflow.transport.device.cuda_mapper import copy_by_kernels
from kvflow.transport.device.mapper import Addresses
from kvflow.transport.mapped import mapped_agents
from kvflow.transport.nixl import loop
from kvflow.transport.nixl.agents import NixlAgents
from kvflow.transport.nixl.defaults import POLLING
from tests.accelerator.standin import KIND, StandIn, load

DISTANCE = 1 << 40
"""From an address that tensors carry to where its bytes are, in every process."""


class Handle(ctypes.Structure):
    """What another process needs to map an allocation."""

    _fields_ = (
        ("process", ctypes.c_int64),
        ("file", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
    )


class StandInMapper:
    """A `Mapper` for the stand-in. Its own allocations are mapped, too, as if they were another process's."""

    refuses = ""
    """Why no memory can be opened; "" if it can."""
    by_kernels = False
    """True: like a driver without batches."""

    def __init__(self, where: Device) -> None:
        self._device = AcceleratorDevice(where)
        self._library: Any = load().library
        self._stream = torch.Stream(self._device.name)
        self._events: dict[int, torch.Event] = {}
        self._count = 0

    def allocation_at(self, address: int) -> Span:
        begin, size = ctypes.c_uint64(), ctypes.c_int64()
        self._library.standin_allocation_at(ctypes.c_void_p(address), ctypes.byref(begin), ctypes.byref(size))
        if not size.value:
            raise DriverError(f"no allocation at {address:#x}")
        return Span(address=begin.value, size_bytes=size.value)

    def export(self, address: int) -> bytes:
        handle = Handle()
        if not self._library.standin_export(ctypes.c_void_p(address), ctypes.byref(handle)):
            raise DriverError(f"no allocation begins at {address:#x}")
        return bytes(handle)

    def open(self, handle: bytes) -> Span:
        if self.refuses:
            raise DriverError(self.refuses)
        address = self._library.standin_open(ctypes.byref(Handle.from_buffer_copy(handle)))
        if not address:
            raise DriverError("the process of the memory has ended")
        return self.allocation_at(address)

    def close(self, address: int) -> None:
        if not self._library.standin_close(ctypes.c_void_p(address)):
            raise DriverError(f"nothing is open at {address:#x}")

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        if self.by_kernels:
            with self._stream:
                copy_by_kernels(self._device, targets, sources, sizes)
            return
        tables = [np.ascontiguousarray(table, dtype=np.uint64) for table in (targets, sources, sizes)]
        pointers = [ctypes.c_void_p(table.ctypes.data) for table in tables]
        stream = ctypes.c_int64(self._stream.stream_id)
        self._library.standin_copy_batch(*pointers, ctypes.c_int64(len(sizes)), stream)

    def record(self) -> int:
        self._count += 1
        self._events[self._count] = event = torch.Event(self._device.name)
        event.record(self._stream)
        return self._count

    def has_happened(self, event: int) -> bool:
        self._library.standin_waiting()  # lets go of Python's lock, as calls of a driver do, and torch's query does not
        try:
            happened = self._events[event].query()
        except RuntimeError:
            del self._events[event]
            raise
        if happened:
            del self._events[event]
        return happened

    def wait(self) -> None:
        self._stream.synchronize()


class ReachingAgents(NixlAgents):
    """NIXL's agents, for which memory of the stand-in is where its bytes are."""

    def register(self, spans: Sequence[Span], device: Device, keepalive: object, use: MemoryUse) -> None:
        if device.kind == KIND:
            spans, device = [replace(span, address=span.address + DISTANCE) for span in spans], HOST
        super().register(spans, device, keepalive, use)

    def _descriptor_list(self, rows: UInt64Array, device: Device) -> Any:
        if device.kind == KIND:
            rows, device = rows.copy(), HOST
            rows[:, 0] += np.uint64(DISTANCE)
            rows[:, 2] = 0
        return super()._descriptor_list(rows, device)


@contextlib.contextmanager
def mapping(*, refuses: str = "", by_kernels: bool = False) -> Iterator[StandIn]:
    """Inside the block NIXL reaches the stand-in, and its memory can be mapped unless that `refuses`.

    Afterwards nothing is mapped, and no batch has touched what was not there.
    """
    standin = load()
    before = standin.mapped(), standin.wrong_pieces()
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(base.DEVICES, KIND, True)
        patched.setitem(POLLING, KIND, POLLING["cpu"])
        patched.setattr(loop, "NixlAgents", ReachingAgents)
        patched.setattr(mapped_agents, "make_mapper", StandInMapper)
        patched.setattr(StandInMapper, "refuses", refuses)
        patched.setattr(StandInMapper, "by_kernels", by_kernels)
        yield standin
    assert (standin.mapped(), standin.wrong_pieces()) == before, "still mapped, and wrong pieces"
