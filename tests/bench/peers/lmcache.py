"""LMCache's NIXL channel, used as its peer-to-peer backend does: asynchronous reads of pages by index.

A page is K or V of a block in one layer, as for everybody; the channel knows no larger range, so neighbours are read as
pages, too. The channel has no way to end a read, and none to ask after it once the coroutine has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress
from tests.bench.peers.folders import import_from
from tests.bench.peers.ranks import BreakableReader
from tests.bench.transfer.ranks import Job, together

_HOST = "127.0.0.1"
_PRODUCER = "producer"


def library() -> Any:
    """Where a rank starts: the import takes seconds."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # else it tells its authors
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    import_from("lmcache")
    from lmcache.v1 import transfer_channel

    return transfer_channel


@contextlib.asynccontextmanager
async def open_producer(shape: CacheShape) -> AsyncIterator[ChannelProducer]:
    cache = BenchCache(shape)
    cache.fill()
    yield ChannelProducer(cache)


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape) -> AsyncIterator[BreakableReader]:
    cache = BenchCache(shape)
    yield BreakableReader(cache, ChannelReader(cache))


def _channel(cache: BenchCache, url: str | None) -> Any:
    return library().CreateTransferChannel(
        channel_type="nixl",
        async_mode=True,
        role="both",
        buffer_ptr=cache.bases[0],
        buffer_size=cache.shape.size_bytes,
        align_bytes=cache.shape.region_block_size_bytes,
        tp_rank=0,
        peer_init_url=url,
        peer_lookup_url=url,
        backends=["UCX"],
        event_loop=asyncio.get_running_loop(),
        device="cpu",
    )


def pages_of(shape: CacheShape, block_ids: Sequence[int]) -> list[int]:
    """Return the numbers of the pages of K and V of the blocks, layer by layer."""
    planes = np.arange(shape.block_descriptors)[:, None] * shape.blocks
    numbers: list[int] = (planes + np.array(block_ids)).ravel().tolist()
    return numbers


class ChannelProducer:
    """Its tickets are none: the reader knows the numbers of the pages."""

    def __init__(self, cache: BenchCache) -> None:
        with contextlib.closing(socket.socket()) as free:
            free.bind((_HOST, 0))
            self._url = f"{_HOST}:{free.getsockname()[1]}"
        self._channel = _channel(cache, self._url)

    async def address(self) -> AgentAddress:
        return AgentAddress(self._url)

    async def offer(self, loads: Sequence[PlannedLoad]) -> Sequence[Ticket]:
        return ()

    async def end_leases(self) -> None:
        """Nobody tells the producer of a read."""


class ChannelReader:
    def __init__(self, cache: BenchCache) -> None:
        self._shape = cache.shape
        self._channel = _channel(cache, None)
        import torch
        from lmcache.v1 import memory_management as memory  # imported by the channel

        # The channel looks at nothing of a page but its number.
        size = torch.Size([cache.shape.region_block_size_bytes])
        self._pages = [
            memory.TensorMemoryObj(None, memory.MemoryObjMetadata(size, torch.uint8, number, size.numel(), 1), None)
            for number in range(cache.shape.block_descriptors * cache.shape.blocks)
        ]

    async def connect(self, address: AgentAddress) -> None:
        await self._channel.async_lazy_init_peer_connection("reader", _PRODUCER, address.agent)

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        return together([partial(self._load, load) for load in loads])

    async def wait_safe(self) -> bool:
        return False

    async def _load(self, load: PlannedLoad) -> None:
        pages = [self._pages[number] for number in pages_of(self._shape, load.local_ids)]
        there = {"sender_id": _PRODUCER, "remote_indexes": pages_of(self._shape, load.remote_ids)}
        await self._channel.async_batched_read(pages, there)
