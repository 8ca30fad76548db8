"""A CUDA device, as copies need it: a stream of their own, and memory that is not torch's.

Copies run on a stream that waits for nobody. So whoever asks for one has made sure that what it reads was computed
(`ServeRequest.ready`), and that nothing writes to its target any more (`LoadRequest.after`); that a busy engine does
not hold it up is the point. Memory comes from the driver: a block of torch's cache may still be written to by what the
engine has queued, and one of expandable segments cannot be shared with other processes.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvflow.core.cache.regions import Device, Span
from kvflow.device.cache_device import CacheDevice
from kvflow.device.cuda import CudaDriver, driver, make_current
from kvflow.errors import ConfigError

_BOUNCE_BYTES = 8 << 20
_HIGH_PRIORITY = -1  # of streams: ahead of what the engine has queued on ordinary ones


class CudaDevice(CacheDevice):
    """See `CacheDevice`. Made on the copy thread, for which it makes the device current."""

    def __init__(self, where: Device) -> None:
        super().__init__(where)
        make_current(where.number)
        self._driver = driver()
        self._stream = torch.cuda.Stream(where.number, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # who waits for it sleeps
        self._bounce: torch.Tensor | None = None

    @property
    def eager(self) -> bool:
        return True

    def check(self, spans: Sequence[Span]) -> None:
        for span in spans:
            if not self._driver.is_shareable(span.address):
                raise ConfigError(
                    f"a cache on {self.name} at {span.address:#x} cannot be read by other processes: its pages were "
                    "mapped one by one. Allocate it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or set "
                    "staging='always'"
                )

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._done.record(self._stream)
                self._done.synchronize()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        found = torch.as_tensor(_DriverMemory(self._driver, size_bytes), device=self.name)
        torch.cuda.synchronize(self.where.number)
        return found

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size_bytes)  # zeroed
        found = torch.frombuffer(memory, dtype=torch.uint8)
        address, runtime = found.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(runtime.cudaHostRegister(address, size_bytes, 0)):
            raise RuntimeError(f"cannot lock {size_bytes} bytes of host memory: CUDA error {error}")
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return found

    def upload(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids)).pin_memory().to(self.name, non_blocking=True)

    def bounce(self, count: int, size_bytes: int) -> torch.Tensor:
        if self._bounce is None or len(self._bounce) < size_bytes:
            self._bounce = self.allocate(max(_BOUNCE_BYTES, size_bytes))
        rows = min(count, len(self._bounce) // size_bytes)
        return self._bounce[: rows * size_bytes].view(rows, size_bytes)


class _DriverMemory:
    """Bytes of the device from the driver, as torch takes memory of others; given back when nothing uses it."""

    def __init__(self, calls: CudaDriver, size_bytes: int) -> None:
        address = calls.allocate(size_bytes)
        number = torch.cuda.current_device()
        weakref.finalize(self, _free, calls, number, address).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _free(calls: CudaDriver, number: int, address: int) -> None:
    with torch.cuda.device(number):
        calls.free(address)
