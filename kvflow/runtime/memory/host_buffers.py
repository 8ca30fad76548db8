"""Host staging: blocks of a device that the transport cannot reach go through host buffers.

A bounded set of host blocks, laid out like the device's, is what peers see. A producer copies a lease's blocks there
before they can be read, and says through the seal how far it is; a consumer reads into host blocks and copies from
there. The copies run on the copy thread: by kvflow's own function for torch devices, or by one that the engine gives.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

from kvflow.config import Config
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import Regions, map_regions
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.descriptors import BlockIds
from kvflow.errors import ConfigError
from kvflow.runtime.memory.copies import CacheTensors, allocate_host_caches, copy_blocks
from kvflow.runtime.memory.pool import Pool


class CopyDirection(enum.StrEnum):
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


BlockCopier: TypeAlias = "Callable[[KVCaches, Sequence[tuple[int, int]], CopyDirection], None]"
"""What an engine may supply: `copy(host_caches, pairs, direction)` copies whole blocks of all layers between its own
cache and `host_caches` (same layer names and shapes, fewer blocks). `pairs` are (device block, host block). It is
called on kvflow's copy thread and returns when the bytes are there."""


class HostBuffers:
    """The host blocks of one runtime: their memory, which of them are free, and the copies to and from them."""

    def __init__(self, kv_caches: KVCaches, layout: CacheLayout, config: Config, copier: BlockCopier | None) -> None:
        count = min(config.host_buffer_bytes_max // layout.block_size_bytes, layout.num_blocks)
        if count < 1:
            most, size = config.host_buffer_bytes_max, layout.block_size_bytes
            raise ConfigError(f"host_buffer_bytes_max: {most} bytes hold no block, which has {size}")
        self.layout = replace(layout, num_blocks=count)
        pin = map_regions(layout, kv_caches).device.kind == "cuda"
        self.caches = allocate_host_caches(cast(CacheTensors, kv_caches), layout, count, pin=pin)
        self.regions: Regions = map_regions(self.layout, self.caches)
        self.pool = Pool(count)
        self._kv_caches = kv_caches
        self._own_layout = layout
        self._copier = copier

    def copy(self, direction: CopyDirection, device_ids: BlockIds, host_ids: BlockIds) -> None:
        """Copy blocks to the host or to the device; on the copy thread."""
        device_caches = cast(CacheTensors, self._kv_caches)
        if self._copier is not None:
            self._copier(self.caches, list(zip(device_ids.tolist(), host_ids.tolist(), strict=True)), direction)
        elif direction is CopyDirection.TO_HOST:
            copy_blocks(device_caches, self.caches, self._own_layout, device_ids, host_ids)
        else:
            copy_blocks(self.caches, device_caches, self._own_layout, host_ids, device_ids)
