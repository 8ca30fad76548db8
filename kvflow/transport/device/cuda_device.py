"""Block copies on a CUDA device: an accelerator with a few features that only CUDA has.

The copy stream has priority over the engine's streams, and a thread that waits for an event of this stream sleeps.
Memory for copies comes from the driver: queued work of the engine may still write to memory in torch's cache, and other
processes cannot share expandable segments. CUDA's kernels copy elements of up to 16 bytes.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvflow.checks import counted
from kvflow.core.cache.regions import Span
from kvflow.errors import ConfigError
from kvflow.transport.device.accelerator import AcceleratorDevice
from kvflow.transport.device.cuda import CudaDriver, driver, make_current
from kvflow.transport.device.foreign_memory import OnCuda

_PIECE_BYTES_MIN = 1 << 10  # from here on half the time of kernels, on an H100; smaller pieces were not measured
_HIGH_PRIORITY = -1  # of a stream: it runs before the engine's streams, which have priority 0


class CudaDevice(AcceleratorDevice):
    """A `CacheDevice` for CUDA. Created on the copy thread."""

    def _open(self) -> tuple[torch.Stream, torch.Event]:
        make_current(self.where.number)
        self._driver = driver()
        stream = torch.cuda.Stream(self.where.number, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        return stream, torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # a waiting thread sleeps

    def _stream_context(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)  # type: ignore[arg-type]

    @property
    def stream_handle(self) -> int:
        """The driver's handle of the stream for copies."""
        return int(self._stream.cuda_stream)  # type: ignore[attr-defined]

    def queueing(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager: copies made in the `with` body are queued, in order, and nothing waits for them."""
        return self._stream_context()

    @property
    def as_bytes(self) -> bool:
        return True

    def check(self, spans: Sequence[Span]) -> None:
        for span in spans:
            if not self._driver.is_shareable(span.address):
                raise ConfigError(
                    f"a cache on {self.name} at {span.address:#x} cannot be read by other processes: its pages were "
                    "mapped one by one. Allocate it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or set "
                    "staging='always'"
                )

    def wait(self) -> None:
        torch.cuda.current_stream(self.where.number).synchronize()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        memory = OnCuda(address := self._driver.allocate(size_bytes), size_bytes)
        weakref.finalize(memory, _free, self._driver, self.where.number, address).atexit = False
        tensor = torch.as_tensor(memory, device=self.name)
        torch.cuda.synchronize(self.where.number)
        return tensor

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size_bytes)  # zeroed
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        address, runtime = tensor.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(runtime.cudaHostRegister(address, size_bytes, 0)):
            raise RuntimeError(f"cannot lock {counted(size_bytes, 'byte')} of host memory: CUDA error {error}")
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return tensor

    def upload(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids)).pin_memory().to(self.name, non_blocking=True)

    @property
    def piece_bytes_min(self) -> int | None:
        return _PIECE_BYTES_MIN if self._driver.has_batches else None

    def copy_pieces(
        self, targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
    ) -> None:
        self._driver.copy_batch(targets, sources, sizes, torch.cuda.current_stream(self.where.number).cuda_stream)

    def view_elements(self, *views: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `views`, tensors of bytes, reinterpreted with elements of 1, 2, 4, 8 or 16 bytes.

        All views get the same dtype: the largest that the addresses and strides of all `views` allow.
        """
        unit = 16
        for view in views:
            unit = math.gcd(unit, view.data_ptr(), view.storage_offset(), view.shape[-1], *view.stride()[:-1])
        dtypes = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
        return tuple(view.view(dtypes[unit]) for view in views)


def _free(calls: CudaDriver, number: int, address: int) -> None:
    with torch.cuda.device(number):
        calls.free(address)
