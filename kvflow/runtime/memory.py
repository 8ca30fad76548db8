"""Memory of a registered cache: the engine's layers, those that peers read and loads fill, and pools of host blocks."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvflow.core.cache.groups import CacheGroup, LayerSet
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.state import StateLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.queue import FairQueue, Permit, PermitState
from kvflow.core.protocol.proof import HOST
from kvflow.transport.device.cache_device import CacheDevice


async def granted(queue: FairQueue, permit: Permit) -> None:
    """Return once a permit that waits is under way. Cancelling gives it, or its place, back."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    permit.on_grant = lambda: None if waiter.done() else waiter.set_result(None)
    try:
        await waiter
    except asyncio.CancelledError:
        queue.end(permit)
        raise


class Pool:
    """Numbers 0 to `size` - 1, given out first come, first served. Belongs to one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._queue = FairQueue((size,))
        self._permits: dict[int, Permit] = {}
        """Permits by the first of the numbers that were taken together."""

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def take_nowait(self, count: int) -> BlockIds | None:
        """`count` numbers, or None if they are not free now or others wait."""
        permit = self._queue.ask((count,)) if count <= len(self._free) else None
        if permit is None or permit.state is PermitState.UNDER_WAY:
            return None if permit is None else self._pop(permit)
        self._queue.end(permit)
        return None

    async def take(self, count: int) -> BlockIds:
        """`count` numbers once they are free; `count` is at most `size`. Cancelling gives the place in the queue up."""
        assert 0 < count <= self.size, f"{count} of {self.size}"
        permit = self._queue.ask((count,))
        if permit.state is PermitState.WAITING:
            await granted(self._queue, permit)
        return self._pop(permit)

    def give_back(self, numbers: BlockIds) -> None:
        """Give back numbers that were taken together. The next to take as many gets them in the same order."""
        self._free.extend(numbers[::-1].tolist())
        self._queue.end(self._permits.pop(int(numbers[0])))

    def _pop(self, permit: Permit) -> BlockIds:
        (count,) = permit.amount
        found = np.array(self._free[: -count - 1 : -1], dtype=np.int64)
        del self._free[len(self._free) - count :]
        self._permits[int(found[0])] = permit
        return found


class CopyDirection(enum.StrEnum):
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


BlockCopier: TypeAlias = "Callable[[KVCaches, Sequence[tuple[int, int]], CopyDirection], None]"
"""A function of the engine's: `copy(host_caches, pairs, direction)` copies whole blocks of all layers between its own
cache and `host_caches` (same layer names and shapes, fewer blocks). `pairs` are (device block, host block). It is
called on kvflow's copy thread and returns when the bytes are there."""


class HostBlocks:
    """Host blocks that stand for blocks of one group where peers cannot read the cache: `kvflow.staging` makes them."""

    pool: Pool
    """Which of the host blocks are free."""
    block_size_bytes: int
    layers: Sequence[tuple[KVCaches, CacheLayout | StateLayout]]
    """The host blocks of each layout of the group."""

    def copy(self, direction: CopyDirection, device_ids: BlockIds, host_ids: BlockIds) -> None:
        """Copy blocks to the host or to the device. Called on the copy thread.

        Args:
            direction: where the bytes go.
            device_ids: blocks of the cache.
            host_ids: as many host blocks.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of a cache that is being registered."""

    groups: Sequence[CacheGroup]
    own: tuple[LayerSet, ...]
    """Layers of the engine's cache."""
    device: CacheDevice
    """Device that `own` is on."""
    staging: Sequence[HostBlocks]
    """Host blocks of each group; none if peers read the cache itself."""
    shown: tuple[LayerSet, ...]
    """Layers that peers are shown: the cache's or, with host staging, the host blocks'."""

    @property
    def filled(self) -> CacheDevice:
        """The device whose memory loads fill."""
        return CacheDevice(HOST) if self.staging else self.device
