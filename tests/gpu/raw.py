"""Bare NIXL between the memories of two processes, on a device or not: what the path itself can do, without kvflow.

The producer's agent has a progress thread that sleeps in poll(), the reader's has none and checks without a pause.
Each agent lives on a thread of its own, made with a CUDA context current on it or without one, as the experiment says.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from kvflow.bench.child import QUIET_ENVIRONMENT, Child, Environment, RankProcess, open_children

_PRODUCER_THREAD_DELAY_US = 100_000
_TIMEOUT_S = 60.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSpec:
    """One side: memory of `size_bytes` on a device. `context`: whether the agent's thread has a CUDA context."""

    name: str
    device: str
    size_bytes: int
    context: bool


class RawAddress(NamedTuple):
    """The address that the other side needs."""

    agent: str
    metadata: bytes
    base: int


class Moved(NamedTuple):
    """One transfer: how long posting it took, and all of it."""

    post_s: float
    seconds: float


class RawRank:
    """The steps of a side; all of NIXL happens on its thread."""

    def __init__(self, spec: RawSpec) -> None:
        fill = 1 if spec.name == "producer" else 0
        self._memory = torch.full((spec.size_bytes,), fill, dtype=torch.uint8, device=spec.device)
        if spec.device == "cuda":
            torch.cuda.synchronize()
        self._spec = spec
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvflow-bench-raw")
        self._remote: RawAddress | None = None
        self._on_thread(self._make_agent)

    def _on_thread(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result(_TIMEOUT_S)

    def _make_agent(self) -> None:
        import nixl

        spec = self._spec
        if spec.device == "cuda" and spec.context:
            torch.cuda.set_device(0)
        api: Any = nixl._bindings
        config = api.nixlAgentConfig()
        producer = spec.name == "producer"
        config.useProgThread = producer
        config.pthrDelay = _PRODUCER_THREAD_DELAY_US
        config.syncMode = api.NIXL_THREAD_SYNC_RW if producer else api.NIXL_THREAD_SYNC_NONE
        config.useListenThread = False
        self._api, self._kind = api, api.VRAM_SEG if spec.device == "cuda" else api.DRAM_SEG
        self._agent = api.nixlAgent(spec.name, config)
        self._backends = [self._agent.createBackend("UCX", {})]
        rows = [(self._memory.data_ptr(), spec.size_bytes, 0, "")]
        self._agent.registerMem(api.nixlRegDList(self._kind, rows), self._backends)

    async def address(self) -> RawAddress:
        metadata = self._on_thread(self._agent.getLocalMD)
        return RawAddress(self._spec.name, bytes(metadata), self._memory.data_ptr())

    async def connect(self, remote: RawAddress) -> None:
        self._remote = remote
        self._on_thread(lambda: self._agent.loadRemoteMD(remote.metadata))

    async def move(self, piece_bytes: int, total_bytes: int, operation: str, seed: int) -> Moved:
        """Read or write `total_bytes` in pieces. The pieces lie in another order on the other side."""
        return self._on_thread(partial(self._move, piece_bytes, total_bytes, operation, seed))

    def _move(self, piece_bytes: int, total_bytes: int, operation: str, seed: int) -> Moved:
        remote = self._remote
        assert remote is not None, "connect first"
        api, agent = self._api, self._agent
        rng, count = np.random.default_rng(seed), total_bytes // piece_bytes
        ours = self._rows(self._memory.data_ptr(), rng.permutation(self._spec.size_bytes // piece_bytes), piece_bytes)
        theirs = self._rows(remote.base, rng.permutation(self._spec.size_bytes // piece_bytes), piece_bytes)
        kind = api.NIXL_READ if operation == "READ" else api.NIXL_WRITE
        handle = agent.createXferReq(
            kind,
            api.nixlXferDList(self._kind, ours[:count]),
            api.nixlXferDList(self._kind, theirs[:count]),
            remote.agent,
            "",
            self._backends,
        )
        start_s = time.perf_counter()
        state = agent.postXferReq(handle, "")
        posted_s = time.perf_counter()
        while state == api.NIXL_IN_PROG and time.perf_counter() - start_s < _TIMEOUT_S:
            state = agent.getXferStatus(handle)
        end_s = time.perf_counter()
        if state != api.NIXL_SUCCESS:
            raise RuntimeError(f"raw NIXL {operation} of {count} pieces of {piece_bytes} bytes ended in {state}")
        agent.releaseXferReq(handle)
        return Moved(posted_s - start_s, end_s - start_s)

    def _rows(self, base: int, pieces: Any, piece_bytes: int) -> Any:
        rows = np.empty((len(pieces), 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(base) + pieces.astype(np.uint64) * np.uint64(piece_bytes)
        rows[:, 1], rows[:, 2] = piece_bytes, 0
        return rows

    async def count_value(self, value: int) -> int:
        """How many bytes of our memory have that value."""
        return int((self._memory == value).sum())

    def close(self) -> None:
        self._thread.shutdown()


@contextlib.asynccontextmanager
async def open_raw(spec: RawSpec) -> AsyncIterator[RawRank]:
    rank = RawRank(spec)
    yield rank
    rank.close()


@contextlib.contextmanager
def raw_pair(device: str, size_bytes: int, environment: Environment, *, context: bool = True) -> Iterator[Child]:
    """The reader of two that are connected."""
    ranks = [
        RankProcess(
            name,
            partial(open_raw, RawSpec(name=name, device=device, size_bytes=size_bytes, context=context)),
        )
        for name in ("producer", "reader")
    ]
    with open_children(ranks, {**QUIET_ENVIRONMENT, **environment}) as children:
        producer, reader = children["producer"], children["reader"]
        reader.run(RawRank.connect, producer.run(RawRank.address))
        yield reader
