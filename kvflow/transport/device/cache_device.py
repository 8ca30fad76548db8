"""The device that a cache is on, as copies need it: whose calls go there, in which order, and memory of their own.

One is made per registration (`make_device`). The CPU's memory is copied at once. A device with streams and events has a
stream of its own for copies (`accelerator`), CUDA some things more (`cuda_device`). A device without them is reached by
an engine's own function only. Nothing of a device is loaded where there is none.
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
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    import torch

_BOUNCE_BYTES = 8 << 20


class CacheDevice:
    """A device without streams. Everything here is called on the copy thread."""

    def __init__(self, where: Device) -> None:
        self.where = where
        self._bounce: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """Name of the device in torch."""
        return self.where.kind if self.where.kind == "cpu" else f"{self.where.kind}:{self.where.number}"

    @property
    def on_host(self) -> bool:
        """True if its memory is the CPU's, which needs no stream and no memory to gather in."""
        return self.where.kind == "cpu"

    @property
    def eager(self) -> bool:
        """True if memory is to be had at registration: later the engine has taken it all."""
        return False

    @property
    def as_bytes(self) -> bool:
        """True if blocks are copied as bytes; else they are views of the engine's own tensors, in their dtype."""
        return self.on_host

    def check(self, spans: Sequence[Span]) -> None:
        """ConfigError if peers cannot read this memory as they should."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies inside go to the device in order; when it ends they are done, also those before an error.

        Raises what a queued copy has failed with.
        """
        yield

    def wait(self) -> None:
        """Wait for what this thread has queued on its current stream. Raises what has failed there."""
        import torch

        accelerator = getattr(torch, "accelerator", None)  # torch 2.6
        found = None if self.on_host or accelerator is None else accelerator.current_accelerator()
        if found is not None and found.type == self.where.kind:
            torch.accelerator.current_stream(self.name).synchronize()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Bytes on the device that nothing else uses, or has queued work for. RuntimeError if there are not so many."""
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, device=self.name)

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Zeroed bytes of the host, which the device copies from and to as fast as it can."""
        import torch

        memory = torch.empty(size_bytes, dtype=torch.uint8)
        return memory.zero_()  # gives every page its memory now

    def upload(self, ids: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """Ids as kernels of the device take them; inside `copying`, and only there.

        None if it has no kernels that gather and scatter: then blocks are copied one by one.
        """
        import torch

        return torch.tensor(ids, device=self.name)

    def copy_pieces(
        self, targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]
    ) -> None:
        """Copy between addresses of the device and of `host_memory`; inside `copying`, if pieces may be copied."""
        raise NotImplementedError(self.name)

    @property
    def piece_bytes_min(self) -> int | None:
        """Size in bytes from which `copy_pieces` is faster than kernels that gather; None if it has no such call."""
        return None

    def elements(self, *views: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """View all as elements that kernels take: in the dtype of the engine's own among them."""
        import torch

        dtype = next((view.dtype for view in views if view.dtype is not torch.uint8), torch.uint8)
        return tuple(view.view(dtype) for view in views)

    def bounce(self, count: int, size_bytes: int) -> torch.Tensor:
        """Rows of bytes on the device to gather into, at most `count`, as many as there is room for; inside `copying`.

        It is the same memory each time.
        """
        if self._bounce is None or len(self._bounce) < size_bytes:
            self._bounce = self.allocate(max(_BOUNCE_BYTES, size_bytes))
        rows = min(count, len(self._bounce) // size_bytes)
        return self._bounce[: rows * size_bytes].view(rows, size_bytes)


def is_rocm() -> bool:
    """Return whether torch was built for AMD's devices, which it calls "cuda", too. They have another driver."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.hip is not None


_WITHOUT_STREAMS = (
    "a cache on {name}: this torch ({version}) has no streams and events for {kind!r}, so kvflow cannot copy its "
    "blocks: {error}. Pass copy_blocks, the engine's own function, to register_kv_caches"
)


def make_device(where: Device, *, engine_copies: bool) -> CacheDevice:
    """Make the device of a cache, on the copy thread.

    Args:
        where: the device.
        engine_copies: whether the engine's own function copies blocks, so that a device without streams will do.

    Raises:
        ConfigError: kvflow cannot copy there.
    """
    if where.kind == "cpu":
        return CacheDevice(where)
    import torch

    if where.kind == "cuda" and not is_rocm():
        from kvflow.transport.device.cuda_device import CudaDevice  # loads the driver

        return CudaDevice(where)
    try:
        from kvflow.transport.device.accelerator import AcceleratorDevice

        return AcceleratorDevice(where)
    except (RuntimeError, AttributeError, TypeError) as error:
        if engine_copies:
            return CacheDevice(where)
        name = f"{where.kind}:{where.number}"
        text = _WITHOUT_STREAMS.format(name=name, kind=where.kind, version=torch.__version__, error=error)
        raise ConfigError(text) from error


def record_event(where: Device) -> DeviceEvent | None:
    """Record an event behind all that this thread has launched on its current stream of a device, its current one.

    Returns:
        The event, as `ServeRequest.ready` and `LoadRequest.after` take it. None for the CPU, which has done what it was
        told, and for a kind of device for which torch has no events: copies of such a device are the engine's own.
    """
    if where.kind == "cpu":
        return None
    import torch

    if where.kind == "cuda":  # torch's own name for AMD's devices, too
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
