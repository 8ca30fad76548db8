"""An engine with a store, for tests: short methods, and moves of files that can be held, lost or made to fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvflow import Config, Runtime
from kvflow.core.plan.descriptors import Descriptors
from kvflow.core.policy.ledger import BlockCounts
from kvflow.runtime.world import World
from kvflow.storage import RestoreReport, RestoreRequest, SaveReport, SaveRequest, Storage, StoreStatistics
from kvflow.storage.storage import make_store_thread
from kvflow.storage.store_thread import Direction, LostMoves, PlainMover, StoreThread
from kvflow.testing import assert_quiet
from kvflow.testing.pair import CacheSize, open_engine
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.support.tests_support import PATIENT, until

BLOCK_SIZE = 4
_SIZE = CacheSize()


class HeldMover(PlainMover):
    """A mover with ordinary system calls. Moves wait while the test closes the gate, and fail if it says so."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        """Moves wait while this is not set."""
        self.gate.set()
        self.errors: list[Exception] = []
        """Errors of the next moves; their bytes do not land."""
        self.stop_result = LostMoves.STOPPED
        """Result of `stop_lost_moves`."""
        self.stop_calls = 0
        """Number of calls of `stop_lost_moves`."""

    def stop_lost_moves(self) -> LostMoves:
        self.stop_calls += 1
        return self.stop_result

    def begin(self, descriptors: Descriptors, direction: Direction) -> object:
        return descriptors, direction

    def has_ended(self, begun: Any) -> bool:
        if not self.gate.is_set():
            return False
        if self.errors:
            raise self.errors.pop(0)
        super().begin(*begun)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StoringEngine:
    """An engine with a store, and its mover."""

    runtime: Runtime
    storage: Storage
    kv_caches: dict[str, torch.Tensor]
    mover: HeldMover
    folder: Path

    @property
    def store(self) -> StoreStatistics:
        found = self.runtime.statistics().parts["storage"]
        assert isinstance(found, StoreStatistics)
        return found

    @property
    def blocks(self) -> BlockCounts:
        found = self.runtime.statistics().blocks
        assert found is not None
        return found

    @property
    def files(self) -> list[Path]:
        """All files in the store's folder except the lock: entries, and remains of unfinished entries."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and path.name != "lock")

    async def save(self, key: str, ids: Sequence[int] = (1, 2, 3), **options: Any) -> SaveReport:
        return await self.storage.save(SaveRequest(f"save {key}", key, ids, len(ids) * BLOCK_SIZE, **options))

    async def restore(self, key: str, ids: Sequence[int] = (4, 5, 6), **options: Any) -> RestoreReport:
        return await self.storage.restore(RestoreRequest(f"restore {key}", key, ids, len(ids) * BLOCK_SIZE, **options))

    def fill(self, ids: Sequence[int], value: float) -> None:
        for tensor in self.kv_caches.values():
            tensor[:, list(ids)] = value

    def bytes_of(self, ids: Sequence[int]) -> list[torch.Tensor]:
        return [tensor[:, list(ids)].clone() for tensor in self.kv_caches.values()]

    def assert_equal(self, ids: Sequence[int], expected: Sequence[torch.Tensor]) -> None:
        assert all(map(torch.equal, self.bytes_of(ids), expected))

    async def held(self, key: str, ids: Sequence[int] = (4, 5, 6), **options: Any) -> asyncio.Task[RestoreReport]:
        """Start a restore, hold its moves, and return its task once a move is posted."""
        self.mover.gate.clear()
        task = asyncio.create_task(self.restore(key, ids, **options))
        await until(lambda: self.moves)
        return task

    @property
    def moves(self) -> int:
        """Number of moves under way."""
        assert self.storage._store is not None
        return self.storage._store._store_thread.moves_under_way

    async def quiet(self) -> None:
        await until(lambda: not self.store.open_requests)
        assert_quiet(self.runtime.statistics())


@contextlib.asynccontextmanager
async def storing(
    folder: Path,
    *,
    size: CacheSize = _SIZE,
    transport: str = "inproc",
    bytes_max: int = 16 << 30,
    **settings: Any,
) -> AsyncIterator[StoringEngine]:
    """Open an engine with its store in `folder`. If the block ends without an error, check that nothing is left."""
    base = replace(PATIENT, transport=transport, **settings)
    mover = HeldMover()

    def files(config: Config, name: str) -> StoreThread:
        return (
            make_store_thread(config, name)
            if transport == "nixl"
            else StoreThread(f"kvflow-store {name}", lambda _: mover)
        )

    def make(config: Config, name: str) -> Any:
        return World().transport(config, name) if transport == "nixl" else InprocTransport(name, InprocNetwork())

    storage = Storage(folder, bytes_max=bytes_max, files=files)
    async with open_engine("engine", base, make, size=size, parts=[storage]) as engine:
        try:
            yield StoringEngine(
                runtime=engine.runtime, storage=storage, kv_caches=engine.kv_caches, mover=mover, folder=folder
            )
        finally:
            mover.gate.set()
