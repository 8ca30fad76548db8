"""The memory of a registered cache: the engine's layers, the layers that peers read, and pools of host blocks."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakSet

import numpy as np

from kvflow.core.cache.groups import CacheGroup, LayerSet
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import HOST
from kvflow.core.cache.state import StateLayout
from kvflow.core.cache.tensors import KVCaches, TensorAddresses
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.policy.queue import FairQueue, Permit, PermitState
from kvflow.transport.device.cache_device import CacheDevice


async def wait_granted(queue: FairQueue, permit: Permit) -> None:
    """Wait until `queue` grants `permit`. If cancelled, end the permit, whether it was granted or still waits."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    permit.on_grant = lambda: None if waiter.done() else waiter.set_result(None)
    try:
        await waiter
    except asyncio.CancelledError:
        queue.end(permit)
        raise


class Pool:
    """A pool of `size` buffers with the numbers 0 to `size` - 1. Calls of `take` are served in their order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._queue = FairQueue((size,))
        self._permits: dict[int, Permit] = {}
        """The permit of each set of buffers that is taken now, by the first number of the set."""

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def take_nowait(self, count: int) -> BlockIds | None:
        """Take `count` buffers and return their numbers. Return None if too few are free, or if other callers wait."""
        permit = self._queue.request_permit((count,)) if count <= len(self._free) else None
        if permit is None or permit.state is PermitState.UNDER_WAY:
            return None if permit is None else self._pop(permit)
        self._queue.end(permit)
        return None

    async def take(self, count: int) -> BlockIds:
        """Wait until `count` buffers, at most `size`, are free. Take them and return their numbers.

        If cancelled, leave the queue.
        """
        assert 0 < count <= self.size, f"{count} of {self.size}"
        permit = self._queue.request_permit((count,))
        if permit.state is PermitState.WAITING:
            await wait_granted(self._queue, permit)
        return self._pop(permit)

    def give_back(self, numbers: BlockIds) -> None:
        """Give back the buffers `numbers`, exactly the result of one call of `take` or `take_nowait`.

        If the next call takes as many buffers, it gets `numbers` again, in the same order.
        """
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
"""Function of the engine, `copy(host_caches, pairs, direction)`, that copies whole blocks of all layers between the
engine's cache and `host_caches`. The host caches have the layer names and shapes of the cache, but fewer blocks. Each
item of `pairs` is (block id in the cache, block id in the host caches). kvflow calls the function on its copy thread;
the function must return only when the copy is finished."""


class HostBlocks:
    """Host blocks for one group of layers of a cache that peers cannot read directly. `kvflow.staging` makes them."""

    pool: Pool
    """The pool of host blocks; a host block's id is its number in the pool."""
    block_size_bytes: int
    layers: Sequence[tuple[KVCaches, CacheLayout | StateLayout]]
    """(host tensors by layer name, layout of these tensors), for each layout that layers of the group have."""

    def copy(self, direction: CopyDirection, device_ids: BlockIds, host_ids: BlockIds) -> None:
        """Copy blocks from the cache to host blocks, or from host blocks to the cache. Called on the copy thread.

        `device_ids`: block ids in the cache. `host_ids`: ids of the host blocks, one for each of `device_ids`.
        """
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class RankMemory:
    """The memory of a registered cache; empty after `release`.

    Handles, parts and the frames of kept errors outlive the registration. They may refer to this object and to `views`.
    """

    groups: Sequence[CacheGroup]
    own_layers: tuple[LayerSet, ...]
    """The engine's layers, in sets. The layers of a set belong to one group and have the same layout."""
    device: CacheDevice
    staging: Sequence[HostBlocks]
    """Host blocks of each group of layers; empty if peers read the cache itself."""
    served_layers: tuple[LayerSet, ...]
    """Layers that peers read: the layers of the cache or, with host staging, of the host blocks."""
    addresses: TensorAddresses
    """The tensors of `own_layers` and `served_layers`, which must not move while they are registered."""
    scratch: str
    """How loads use scratch memory for small pieces: "auto", "always" or "never", as `Config.scratch`."""
    pools: list[Pool] = field(init=False)
    """The pool of host blocks of each group and, once scratch memory is in use, the pool of scratch buffers."""
    views: WeakSet[object] = field(default_factory=WeakSet)
    """Other objects that hold tensors of the cache, or views of these."""

    def __post_init__(self) -> None:
        self.pools = [blocks.pool for blocks in self.staging]

    def release(self) -> None:
        """Drop all tensors, so that the engine frees them by dropping its own. Called when nothing uses the cache."""
        for view in (*self.staging, *self.views):
            vars(view).clear()
        self.addresses.tensors.clear()
        self.addresses.registered.clear()
        self.groups = self.own_layers = self.staging = self.served_layers = ()

    @property
    def target_device(self) -> CacheDevice:
        """The device that the transport's reads write to: the CPU with host staging, else the device of the cache."""
        return CacheDevice(HOST) if self.staging else self.device
