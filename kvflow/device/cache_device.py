"""The device that a cache is on, as copies need it: whose calls go there, in which order, and memory of their own.

One is made per registration. Most are plain: memory of the CPU is copied at once, and other devices are reached by an
engine's own function only. A CUDA device (`device.cuda_device`) has a stream and memory apart from the engine's;
nothing of it is loaded where there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.regions import Device, Span

if TYPE_CHECKING:
    import torch


class CacheDevice:
    """A plain device. Everything here is called on the copy thread."""

    def __init__(self, where: Device) -> None:
        self.where = where

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

    def check(self, spans: Sequence[Span]) -> None:
        """ConfigError if peers cannot read this memory as they should."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies inside go to the device in order; when it ends they are done, also those before an error."""
        yield

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Bytes on the device that nothing else uses, or has queued work for. RuntimeError if there are not so many."""
        import torch

        return torch.empty(size_bytes, dtype=torch.uint8, device=self.name)

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Zeroed bytes of the host, which the device copies from and to as fast as it can."""
        import torch

        memory = torch.empty(size_bytes, dtype=torch.uint8)
        return memory.zero_()  # gives every page its memory now

    def upload(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """Ids as copies on the device take them; inside `copying`, and only there."""
        import torch

        return torch.tensor(ids, device=self.name)

    def bounce(self, count: int, size_bytes: int) -> torch.Tensor:
        """Rows of bytes on the device to gather into, at most `count`, as many as there is room for; inside `copying`.

        It is the same memory each time.
        """
        return self.allocate(count * size_bytes).view(count, size_bytes)
