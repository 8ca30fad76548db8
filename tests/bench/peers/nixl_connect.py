"""Dynamo's `nixl_connect`, used as its pages show: a readable operation for each load, and a read of it.

A descriptor is K or V of neighbouring blocks in one layer, as for everybody. The operations register their descriptors
with NIXL and take that back, and look for their end every few milliseconds, which is how the library works. What the
producer does to offer, and to describe what it offers, is not timed, as with kvflow's leases and tickets.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress
from tests.bench.peers.memory import local_rows, remote_rows, runs_of
from tests.bench.peers.ranks import BreakableReader
from tests.bench.transfer.ranks import Job, together


@contextlib.asynccontextmanager
async def open_producer(shape: CacheShape) -> AsyncIterator[ConnectProducer]:
    cache = BenchCache(shape)
    cache.fill()
    yield ConnectProducer(cache)


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape) -> AsyncIterator[BreakableReader]:
    cache = BenchCache(shape)
    yield BreakableReader(cache, ConnectReader(cache))


class ConnectProducer:
    """Its tickets are the operations' own descriptions of themselves."""

    def __init__(self, cache: BenchCache) -> None:
        nixl_connect = library()
        self._cache = cache
        self._descriptor = nixl_connect.Descriptor
        self._connector = nixl_connect.Connector()
        self._readable: list[Any] = []

    async def address(self) -> AgentAddress:
        return AgentAddress()

    async def offer(self, loads: Sequence[PlannedLoad]) -> list[Ticket]:
        tickets: list[Ticket] = []
        for load in loads:
            operation = await self._connector.create_readable(
                _descriptors(self._descriptor, remote_rows(self._cache, self._cache.bases, runs_of(load)))
            )
            self._readable.append(operation)
            tickets.append(operation.metadata().model_dump())
        return tickets

    async def end_leases(self) -> None:
        for operation in self._readable:
            with operation:
                await operation.wait_for_completion()
        self._readable = []


class ConnectReader:
    def __init__(self, cache: BenchCache) -> None:
        nixl_connect = library()
        self._cache = cache
        self._descriptor = nixl_connect.Descriptor
        self._connector = nixl_connect.Connector()
        self._read_ticket = nixl_connect.RdmaMetadata.model_validate

    async def connect(self, address: AgentAddress) -> None:
        """Tickets say where to go."""

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        pairs = zip(loads, tickets, strict=True)
        return together([partial(self._load, *pair) for pair in pairs])

    async def wait_safe(self) -> bool:
        """The operation's block has ended: it has let go of the transfer and of the memory."""
        return True

    async def _load(self, load: PlannedLoad, ticket: Ticket) -> None:
        local = _descriptors(self._descriptor, local_rows(self._cache, runs_of(load)))
        readable = self._read_ticket(ticket)
        with await self._connector.begin_read(readable, local) as operation:
            await operation.wait_for_completion()


def library() -> Any:
    """Where a rank starts: the import takes seconds."""
    logging.getLogger("dynamo.nixl_connect").setLevel(logging.ERROR)  # it warns that there is no GPU
    from dynamo import nixl_connect

    return nixl_connect


def _descriptors(descriptor: Any, rows: npt.NDArray[np.uint64]) -> list[Any]:
    return [descriptor((start, size, "cpu", None)) for start, size in rows.tolist()]
