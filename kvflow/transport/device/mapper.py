"""Device memory of other processes of this machine: opened once, and copied from in batches on a stream of its own.

A process cannot open its own handles by CUDA IPC, and need not: its addresses are valid as they are. That is the only
difference between two engines in one process and in two.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.core.cache.regions import Span

Addresses: TypeAlias = npt.NDArray[np.uint64]


class Mapper(Protocol):
    """Maps memory of one kind of device between processes, and copies within one device's address space.

    All methods run on one thread, and raise RuntimeError (`DriverError`) if the device refuses.
    """

    def allocation_at(self, address: int) -> Span:
        """Return the whole allocation of this process that contains `address`."""

    def export(self, address: int) -> bytes:
        """Return a handle by which another process can open the allocation that begins at `address`."""

    def open(self, handle: bytes) -> Span:
        """Map the allocation that `handle` stands for, and return where it lies in this process."""

    def close(self, address: int) -> None:
        """Unmap an allocation that `open` has mapped at `address`. No copy may use it."""

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Queue copies of `sizes[i]` bytes from `sources[i]` to `targets[i]`, for all i. They run in any order.

        If this raises, some of the copies may be queued all the same.
        """

    def record(self) -> int:
        """Record an event behind all copies that are queued. Return its number, for `has_happened`."""

    def has_happened(self, event: int) -> bool:
        """Return whether `event` has happened, without waiting. Once it has, or this raises, forget the event.

        Raises if copies have failed. The device then runs no further copy of this process.
        """

    def wait(self) -> None:
        """Wait until all queued copies have run. For use where `record` fails."""
