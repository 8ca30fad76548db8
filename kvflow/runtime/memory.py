"""Memory of a registered cache: the engine's layers, and those that peers read and loads fill."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvflow.core.cache.groups import CacheGroup, LayerSet
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.state import StateLayout
from kvflow.core.cache.tensors import KVCaches
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.protocol.proof import HOST
from kvflow.runtime.pool import Pool
from kvflow.transport.device.cache_device import CacheDevice


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
