"""The device on which a cache lies: how blocks are copied to and from it, in which order, and memory for copies.

On the CPU a copy is finished when its call returns. If torch has streams and events for the device, copies have their
own stream (`accelerator`, `cuda_device`). If torch has no streams for the device, only the engine's own function can
copy its blocks. No library of a device is loaded in a process that does not use it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.regions import Device, Span
from kvflow.core.policy.events import DeviceEvent

if TYPE_CHECKING:
    import torch

_GATHER_BUFFER_BYTES = 8 << 20


class CacheDevice:
    """A device on which a cache lies. This class is for devices without streams; its subclasses use streams.

    All methods run on the copy thread.
    """

    def __init__(self, where: Device) -> None:
        self.where = where
        self._gather_buffer: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Torch's name of the device, for example "cuda:0"."""
        return self.where.kind if self.where.kind == "cpu" else f"{self.where.kind}:{self.where.number}"

    @property
    def on_host(self) -> bool:
        """True if the device is the CPU, which needs no stream and no buffer to gather blocks."""
        return self.where.kind == "cpu"

    @property
    def allocates_at_registration(self) -> bool:
        """True if device memory for copies is allocated at registration, because the engine may take all free memory
        later.
        """
        return False

    @property
    def as_bytes(self) -> bool:
        """True if blocks are copied as bytes; False if they are copied in the dtype of the engine's tensors."""
        return self.on_host

    def check(self, spans: Sequence[Span]) -> None:
        """Raise ConfigError if other processes cannot read the device memory at `spans`."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Context manager: copies made in the `with` body run in order.

        The exit, also after an error, waits until the copies are finished, and raises the error of a failed copy.
        """
        yield

    def wait(self) -> None:
        """Wait for all work that this thread has queued on its current stream. Raises the error of failed work."""
        import torch

        accelerator = getattr(torch, "accelerator", None)  # torch 2.6
        current = None if self.on_host or accelerator is None else accelerator.current_accelerator()
        if current is not None and current.type == self.where.kind:
            torch.accelerator.current_stream(self.name).synchronize()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate device memory that no queued work of the engine uses.

        Raises RuntimeError if the device has too little free memory.
        """
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, device=self.name)

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Allocate zeroed host memory from and to which the device copies at full speed: page-locked if possible."""
        import torch

        memory = torch.empty(size_bytes, dtype=torch.uint8)
        return memory.zero_()  # touches every page, so that it has memory now

    def upload(self, ids: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """Copy block ids to the device as an index tensor, and return it. For use inside `copying` only.

        Return None if the device has no gather and scatter kernels; then blocks are copied one by one.
        """
        import torch

        return torch.tensor(ids, device=self.name)

    def copy_pieces(
        self, targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
    ) -> None:
        """Copy `sizes[i]` bytes from address `sources[i]` to address `targets[i]`, for each i.

        Addresses are on the device or in `host_memory`. For use inside `copying` only, and only if `piece_bytes_min` is
        not None.
        """
        raise NotImplementedError(self.name)

    @property
    def piece_bytes_min(self) -> int | None:
        """Size in bytes from which copying a range by `copy_pieces` is faster than by gather kernels.

        None if the device does not support `copy_pieces`.
        """
        return None

    def view_elements(self, *views: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `views`, tensors of cache memory, reinterpreted in one dtype: the first among them that is not uint8.

        If all are uint8, return them unchanged.
        """
        import torch

        dtype = next((view.dtype for view in views if view.dtype is not torch.uint8), torch.uint8)
        return tuple(view.view(dtype) for view in views)

    def gather_buffer(self, count: int, size_bytes: int) -> torch.Tensor:
        """Return a device tensor to gather blocks into, with one row of `size_bytes` bytes for each block.

        The tensor is a view of one buffer that all calls share. The tensor has `count` rows, or as many as fit in the
        buffer. If not even one row fits, a larger buffer replaces the shared buffer. For use inside `copying` only.
        """
        if self._gather_buffer is None or len(self._gather_buffer) < size_bytes:
            self._gather_buffer = self.allocate(max(_GATHER_BUFFER_BYTES, size_bytes))
        rows = min(count, len(self._gather_buffer) // size_bytes)
        return self._gather_buffer[: rows * size_bytes].view(rows, size_bytes)


def is_rocm() -> bool:
    """Return whether the loaded torch is built for ROCm. Torch then calls AMD devices "cuda", but they have another
    driver.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.hip is not None


def record_event(where: Device) -> DeviceEvent | None:
    """Record a device event behind all work that this thread has queued on its current stream of the device `where`.

    `where` must be the current device of its kind.

    Returns:
        The event, for `ServeRequest.ready` or `LoadRequest.after`. None for the CPU, where all work is already done,
        and for devices without events in torch, where the engine's own function makes the copies.
    """
    if where.kind == "cpu":
        return None
    import torch

    if where.kind == "cuda":  # on ROCm, too, torch calls its devices "cuda"
        on_cuda = torch.cuda.Event()  # type: ignore[no-untyped-call]
        on_cuda.record()
        return on_cuda
    name = f"{where.kind}:{where.number}"
    try:
        event = torch.Event(name)
        event.record(torch.accelerator.current_stream(name))
    except (RuntimeError, AttributeError):
        return None
    return event
