"""`torch.distributed._transport` over NIXL: one operation for each range, all posted, then awaited together.

Its buffers are whole tensors; a range of a remote one is a copy of its description with another address and length.
Each operation carries and loads the producer's metadata, which is how the library works. A cancelled wait stops no
transfer; the library's word is to wait again.

The files of torch 2.15 run over an older torch, too, if it has no such package.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress
from tests.bench.peers.folders import folder
from tests.bench.peers.memory import local_rows, remote_rows, runs_of
from tests.bench.peers.ranks import BreakableReader
from tests.bench.transfer.ranks import Job, together

_MODULE, _BACKEND = "torch.distributed._transport", "nixl"


def library() -> Any:
    """Where a rank starts: the import takes seconds."""
    import torch.distributed as distributed

    if found := folder("torch-2.15"):
        distributed.__path__.append(str(found / "torch" / "distributed"))
    transport: Any = importlib.import_module(_MODULE)
    if _BACKEND not in transport.available_transports():
        transport.register_transport(_BACKEND, importlib.import_module(f"{_MODULE}.nixl").NIXLTransport)
    return transport


@contextlib.asynccontextmanager
async def open_producer(shape: CacheShape) -> AsyncIterator[TransportProducer]:
    cache = BenchCache(shape)
    cache.fill()
    yield TransportProducer(cache)


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape) -> AsyncIterator[BreakableReader]:
    cache = BenchCache(shape)
    yield BreakableReader(cache, TransportReader(cache))


class TransportProducer:
    """Its tickets are none: its address describes its tensors."""

    def __init__(self, cache: BenchCache) -> None:
        self._transport = library().new_transport(_BACKEND, "cpu")
        self._bases = cache.bases
        self._registered = [self._transport.register_memory(tensor) for tensor in cache.tensors().values()]

    async def address(self) -> AgentAddress:
        described = [memory.to_remote_buffer().serialize() for memory in self._registered]
        return AgentAddress("", msgspec.msgpack.encode([self._transport.bind(), described]), self._bases)

    async def offer(self, loads: Sequence[PlannedLoad]) -> Sequence[Ticket]:
        return ()

    async def end_leases(self) -> None:
        """Nobody tells the producer of a read."""


class TransportReader:
    def __init__(self, cache: BenchCache) -> None:
        self._library = library()
        self._cache = cache
        self._transport = self._library.new_transport(_BACKEND, "cpu")
        self._registered = [self._transport.register_memory(tensor) for tensor in cache.tensors().values()]
        self._remote: list[Any] = []
        self._remote_bases: tuple[int, ...] = ()
        self._works: list[Any] = []

    async def connect(self, address: AgentAddress) -> None:
        described_as: Any = importlib.import_module(f"{_MODULE}.nixl").NIXLRemoteBuffer
        url, described = msgspec.msgpack.decode(address.metadata)
        self._transport.connect(url)
        self._remote = [described_as.deserialize(each) for each in described]
        self._remote_bases = address.bases

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        return together([partial(self._load, load) for load in loads])

    async def wait_safe(self) -> bool:
        await self._library.wait_all([work for work in self._works if not work.is_completed()])
        return True

    async def _load(self, load: PlannedLoad) -> None:
        runs, works = runs_of(load), list[Any]()
        local, remote = local_rows(self._cache, runs), remote_rows(self._cache, self._remote_bases, runs)
        a_layer = 2 * len(runs)
        for index, ((start, size), (there, _)) in enumerate(zip(local.tolist(), remote.tolist(), strict=True)):
            layer = index // a_layer
            view = self._registered[layer].to_mutable_view(start - self._cache.bases[layer], size)
            buffer = replace(self._remote[layer], address=there, length=size)
            works.append(self._transport.read(view, buffer, async_op=True))
        self._works = works
        await self._library.wait_all(works)
