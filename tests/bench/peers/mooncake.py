"""Mooncake's transfer engine over tcp, in both directions.

`MooncakeReader` reads from a producer that does nothing. `MooncakeWriteRequester` asks the producer to write,
which is how the connectors of engines use it; a load ends when the producer has answered. Loads at once are batches
that are all under way before one is waited for; those that are to be written are asked for in one message.

The engine has its default settings but for what variables of the caller's (MC_TCP_LANES_PER_PEER and others) say. Of
those we tried none was faster throughout but MC_TCP_PROTO=1, with which a write may end before its bytes have arrived.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import PlannedLoad, Ticket
from kvflow.bench.raw import AgentAddress
from tests.bench.peers.folders import folder, import_from
from tests.bench.peers.memory import local_rows, remote_rows, runs_of
from tests.bench.peers.ranks import BreakableReader
from tests.bench.transfer.ranks import Job

_HOST = "127.0.0.1"
_RANGES_MAX = 1024
"""Ranges in one call; more are several calls in turn (findings/mooncake_many_ranges_in_one_call_fail.sh)."""
SYSTEM_LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
"""In the order in which they need each other."""
_NO_DEVICE = ""
_NO_METADATA_SERVER = "P2PHANDSHAKE"


def library() -> Any:
    """Where a rank starts. Libraries of the system that the engine needs come from the environment's own folder."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if found := folder("mooncake-system"):
        for name in SYSTEM_LIBRARIES:
            ctypes.CDLL(str(found / name), mode=ctypes.RTLD_GLOBAL)
    import_from("mooncake")
    from mooncake import engine

    return engine


@contextlib.asynccontextmanager
async def open_producer(shape: CacheShape) -> AsyncIterator[MooncakeProducer]:
    cache = BenchCache(shape)
    cache.fill()
    yield MooncakeProducer(MooncakeEngine(cache))


@contextlib.asynccontextmanager
async def open_reader(shape: CacheShape, *, writes: bool) -> AsyncIterator[BreakableReader]:
    cache = BenchCache(shape)
    engine = MooncakeEngine(cache)
    yield BreakableReader(cache, MooncakeWriteRequester(engine) if writes else MooncakeReader(engine))


class MooncakeEngine:
    """One side: an engine with the cache registered."""

    def __init__(self, cache: BenchCache) -> None:
        self._cache = cache
        self._engine: Any = library().TransferEngine()
        _succeeded("initialize", self._engine.initialize(_HOST, _NO_METADATA_SERVER, "tcp", _NO_DEVICE))
        sizes = [cache.shape.layer_size_bytes] * len(cache.bases)
        _succeeded("register", self._engine.batch_register_memory(list(cache.bases), sizes))

    def address(self) -> AgentAddress:
        return AgentAddress(f"{_HOST}:{self._engine.get_rpc_port()}", bases=self._cache.bases)

    def read(self, peer: AgentAddress, loads: Sequence[PlannedLoad]) -> None:
        engine = self._engine
        lists = [self._lists(peer, load) for load in loads]
        self._move(engine.batch_transfer_sync_read, engine.batch_transfer_async_read, peer, lists)

    def write(self, peer: AgentAddress, loads: Sequence[PlannedLoad]) -> None:
        engine = self._engine
        swapped = [replace(load, local_ids=load.remote_ids, remote_ids=load.local_ids) for load in loads]
        lists = [self._lists(peer, load) for load in swapped]
        self._move(engine.batch_transfer_sync_write, engine.batch_transfer_async_write, peer, lists)

    def _lists(self, peer: AgentAddress, load: PlannedLoad) -> tuple[list[int], ...]:
        """Where the ranges are here, where they are there, and how long they are."""
        runs = runs_of(load)
        own, there = local_rows(self._cache, runs), remote_rows(self._cache, peer.bases, runs)
        return own[:, 0].tolist(), there[:, 0].tolist(), own[:, 1].tolist()

    def _move(self, sync: Any, begin: Any, peer: AgentAddress, lists: Sequence[tuple[list[int], ...]]) -> None:
        if len(lists) == 1:
            for piece in _pieces_of(lists[0]):
                _succeeded("transfer", sync(peer.agent, *piece))
        else:
            batches = [begin(peer.agent, *each) for each in lists]
            _succeeded("transfer", self._engine.get_batch_transfer_status(batches))


class MooncakeProducer:
    """Its tickets are none. It writes when asked, in a thread of its own; one reader asks."""

    def __init__(self, engine: MooncakeEngine) -> None:
        self._engine = engine
        self._listener = Listener(family="AF_UNIX")
        threading.Thread(target=self._answer, name="bench-mooncake", daemon=True).start()

    async def address(self) -> AgentAddress:
        return self._engine.address()._replace(metadata=str(self._listener.address).encode())

    async def offer(self, loads: Sequence[PlannedLoad]) -> Sequence[Ticket]:
        return ()

    async def end_leases(self) -> None:
        """Nobody tells the producer of a read."""

    def _answer(self) -> None:
        with contextlib.suppress(EOFError), self._listener.accept() as reader:
            peer = reader.recv()
            while True:
                loads = reader.recv()
                try:
                    self._engine.write(peer, loads)
                    reader.send("")
                except RuntimeError as error:
                    reader.send(str(error))


class MooncakeReader:
    """A way to load that reads."""

    def __init__(self, engine: MooncakeEngine) -> None:
        self._engine = engine
        self._peer = AgentAddress()

    async def connect(self, address: AgentAddress) -> None:
        self._peer = address

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        async def job() -> None:
            self._engine.read(self._peer, loads)

        return job

    async def wait_safe(self) -> bool:
        """The call has returned."""
        return True


class MooncakeWriteRequester:
    """A way to load that has the producer write."""

    def __init__(self, engine: MooncakeEngine) -> None:
        self._engine = engine
        self._producer: Connection

    async def connect(self, address: AgentAddress) -> None:
        self._producer = Client(address.metadata.decode(), family="AF_UNIX")
        self._producer.send(self._engine.address())

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        async def job() -> None:
            self._producer.send(loads)
            if error := self._producer.recv():
                raise RuntimeError(f"the producer's write: {error}")

        return job

    async def wait_safe(self) -> bool:
        """The producer has answered."""
        return True


def _pieces_of(lists: tuple[list[int], ...]) -> Iterator[tuple[list[int], ...]]:
    for start in range(0, len(lists[0]), _RANGES_MAX):
        yield tuple(each[start : start + _RANGES_MAX] for each in lists)


def _succeeded(what: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"Mooncake's engine: {what} ended with {code}")
