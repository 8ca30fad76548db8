"""Ray's direct transport over NIXL, without Ray around it: no cluster, no actors, no object store.

A load is an object of tensors, which the producer describes and the reader receives into tensors of its own; both have
registered their memory for good, as Ray's page on the transport advises. Ray's own threads wait for a transfer, here a
thread of the loop's. What Ray adds, calls of actors and references to objects, is not timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress
from tests.bench.peers.folders import import_from
from tests.bench.peers.memory import runs_of
from tests.bench.peers.ranks import BreakableReader
from tests.bench.transfer.ranks import Job, together


def library() -> Any:
    """Where a rank starts: the import takes seconds."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else asking for an actor's id starts a cluster
    logging.getLogger("ray").setLevel(logging.ERROR)
    import_from("ray")
    from ray.experimental.rdt import nixl_tensor_transport

    return nixl_tensor_transport


@contextlib.asynccontextmanager
async def open_producer(shape: CacheShape) -> AsyncIterator[RdtProducer]:
    cache = BenchCache(shape)
    cache.fill()
    yield RdtProducer(cache)


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape) -> AsyncIterator[BreakableReader]:
    cache = BenchCache(shape)
    yield BreakableReader(cache, RdtReader(cache))


class Tensors:
    """The transport of one side, with its cache registered."""

    def __init__(self, cache: BenchCache) -> None:
        self._shape = cache.shape
        self.transport = library().NixlTensorTransport()
        self._layers = [tensor.view(-1) for tensor in cache.tensors().values()]
        for layer in self._layers:
            self.transport.register_nixl_memory(layer)

    def of(self, firsts: Sequence[int], counts: Sequence[int]) -> list[Any]:
        """Return a tensor for K and V of each run of blocks in each layer."""
        size, plane = self._shape.region_block_size_bytes // 2, self._shape.blocks  # elements of two bytes
        starts = [(half * plane + first) * size for half in range(2) for first in firsts]
        return [
            layer[start : start + count * size]
            for layer in self._layers
            for start, count in zip(starts, [*counts, *counts], strict=True)
        ]


class RdtProducer:
    """Its tickets are the transport's descriptions of the objects."""

    def __init__(self, cache: BenchCache) -> None:
        self._tensors = Tensors(cache)
        self._numbers = itertools.count()
        self._offered: list[tuple[str, Any, list[Any]]] = []

    async def address(self) -> AgentAddress:
        return AgentAddress()

    async def offer(self, loads: Sequence[PlannedLoad]) -> Sequence[Ticket]:
        return [self._offer(load) for load in loads]

    def _offer(self, load: PlannedLoad) -> Ticket:
        runs, name = runs_of(load), f"object {next(self._numbers)}"
        tensors = self._tensors.of([run.remote for run in runs], [run.blocks for run in runs])
        described = self._tensors.transport.extract_tensor_transport_metadata(name, tensors)
        self._offered.append((name, described, tensors))
        return {"name": name, "described": pickle.dumps(described)}

    async def end_leases(self) -> None:
        for offered in self._offered:
            self._tensors.transport.garbage_collect(*offered)
        self._offered = []


class RdtReader:
    def __init__(self, cache: BenchCache) -> None:
        self._tensors = Tensors(cache)
        self._communicator = library().NixlCommunicatorMetadata()

    async def connect(self, address: AgentAddress) -> None:
        """Tickets say where to go."""

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        return together([partial(self._load, *pair) for pair in zip(loads, tickets, strict=True)])

    async def wait_safe(self) -> bool:
        """The call has ended: the transport has let go of the transfer and of the tensors."""
        return True

    async def _load(self, load: PlannedLoad, ticket: Ticket) -> None:
        name, described = str(ticket["name"]), ticket["described"]
        assert isinstance(described, bytes)
        runs = runs_of(load)
        targets = self._tensors.of([run.local for run in runs], [run.blocks for run in runs])
        receive = self._tensors.transport.recv_multiple_tensors
        received = asyncio.ensure_future(
            asyncio.to_thread(receive, name, pickle.loads(described), self._communicator, targets)
        )
        try:
            await asyncio.shield(received)
        except asyncio.CancelledError:
            self._tensors.transport.abort_transport(name, self._communicator)
            await asyncio.wait([received])
            received.exception()
            raise
