"""Host staging: blocks of a device that the transport cannot reach go through host buffers.

Peers see a bounded set of host blocks, laid out like the blocks of the device. A producer copies the blocks of a lease
there before peers can read them, and the lease's seal says how many tokens are copied. A consumer reads into host
blocks, and copies from there to the device. The copies run on the copy thread, by kvflow's own function for torch
devices or by a function of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from kvflow.config import Config
from kvflow.core.cache.groups import CacheGroup
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.state import StateLayout
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import ConfigError
from kvflow.runtime.memory import BlockCopier, CopyDirection, HostBlocks, Pool
from kvflow.staging.copies import (
    CacheTensors,
    LayerTensors,
    allocate_host_caches,
    block_rows,
    copy_blocks,
    to_device,
    to_host,
)
from kvflow.staging.host_memory import host_memory_bytes
from kvflow.transport.device.cache_device import CacheDevice

if TYPE_CHECKING:
    import torch


_BYTES_LEAST = 256 << 20


class HostBuffers(HostBlocks):
    """The host blocks of one group of layers: memory, the pool of free blocks, and copies to and from the device."""

    def __init__(self, group: CacheGroup, count: int, copier: BlockCopier | None, device: CacheDevice) -> None:
        self.block_size_bytes = group.block_size_bytes
        self.pool = Pool(count)
        self._device = device
        self._copier = copier
        self._device_rows: list[torch.Tensor] = []
        self._host_rows: list[torch.Tensor] = []
        self.layers: list[tuple[dict[str, LayerTensors], CacheLayout | StateLayout]] = []
        """Host tensors and their layout, for each layer set of the group (layers of equal shape)."""
        for caches, layout in group.sets:
            device_caches = cast(CacheTensors, caches)
            host_caches = allocate_host_caches(device_caches, layout, count, device)
            if copier is None:
                self._device_rows += block_rows(device_caches, layout, as_bytes=device.as_bytes)
                self._host_rows += block_rows(host_caches, layout, as_bytes=device.as_bytes)
            if isinstance(layout, StateLayout):
                self.layers.append((host_caches, replace(layout, num_slots=count)))
            else:
                self.layers.append((host_caches, replace(layout, num_blocks=count)))
        if self._device_rows and not device.on_host:
            # Allocate the bounce memory now, while there is memory, and find out which copies the device can do.
            device.gather_buffer(1, max(row.shape[1] * row.element_size() for row in self._device_rows))
            for row in {row.dtype: row for row in self._device_rows}.values():
                device.view_elements(row)

    def copy(self, direction: CopyDirection, device_ids: BlockIds, host_ids: BlockIds) -> None:
        """Copy between device block `device_ids[i]` and host block `host_ids[i]`, for each i, in `direction`.

        This runs on the copy thread.
        """
        if self._copier is not None:
            host_caches = {name: layer for caches, _ in self.layers for name, layer in caches.items()}
            self._copier(host_caches, list(zip(device_ids.tolist(), host_ids.tolist(), strict=True)), direction)
            self._device.wait()  # the engine's function may only have queued its copies
            return
        with self._device.copying():
            if direction is CopyDirection.TO_HOST:
                copy_blocks(self._device_rows, self._host_rows, device_ids, host_ids, to_host(self._device))
            else:
                copy_blocks(self._host_rows, self._device_rows, host_ids, device_ids, to_device(self._device))


def host_buffers(
    groups: Sequence[CacheGroup], config: Config, copier: BlockCopier | None, device: CacheDevice
) -> tuple[HostBuffers, ...]:
    """Allocate and return the host blocks of each group of layers, at most Config.host_buffer_bytes_max in total.

    Each group gets a share of these bytes in proportion to its size. Raise ConfigError if a share is less than a block.
    `copier`: the engine's function that copies blocks, or None for kvflow's own.
    """
    sizes = [group.num_blocks * group.block_size_bytes for group in groups]
    most = config.host_buffer_bytes_max or _default_bytes_max(sum(sizes), config.tp_size)
    found = []
    for group, size in zip(groups, sizes, strict=True):
        bytes_max = most * size // sum(sizes)
        count = min(bytes_max // group.block_size_bytes, group.num_blocks)
        if count < 1:
            what = "" if len(groups) == 1 else f" of group {group.name!r}"
            raise ConfigError(f"host_buffer_bytes_max: {most} is less than a block{what} has, {group.block_size_bytes}")
        found.append(HostBuffers(group, count, copier, device))
    return tuple(found)


def _default_bytes_max(cache_bytes: int, ranks: int) -> int:
    """Return the default of Config.host_buffer_bytes_max: a quarter of the cache, and at least 256 MiB.

    The result is at most an eighth of the host's memory, divided by `ranks`.
    """
    return min(max(cache_bytes // 4, _BYTES_LEAST), host_memory_bytes() // 8 // ranks)
