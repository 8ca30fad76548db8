"""NIXL without kvflow, at the best that we found: what kvflow's loads are compared with.

Descriptors are prepared once, as strided rows, and a load picks them by index, which lets NIXL join neighbours.
Backends have the parameters that kvflow gives its own, such as the size of UCX's frames over tcp. The producer's
progress thread sleeps in poll() and wakes when something arrives; the reader has none and checks tightly at first, then
sleeps between checks: on a machine with few cores a reader that spins takes them from the tcp stack.

A load starts from the lists of block ids that kvflow is given, and sends the producer a notification. NIXL is imported
where an agent is made: the parent of the bench has none, and the import takes a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.loads import PlannedLoad

_SPIN_S = 300e-6
_SLEEP_MIN_S = 50e-6
_SLEEP_MAX_S = 1e-3
_PRODUCER_THREAD_DELAY_US = 100_000
_NOTIFICATION = b"read"
_DEVICE = 0

Backends: TypeAlias = Mapping[str, Mapping[str, str]]
"""Parameters of NIXL's backends, by name."""


class AgentAddress(NamedTuple):
    """The address of a producer for a reader, before it loads; nothing where tickets say where to go."""

    agent: str = ""
    metadata: bytes = b""
    bases: tuple[int, ...] = ()


class TunedAgent:
    """An agent, of one side; `load` belongs to the reader, `drain` to the producer."""

    def __init__(self, name: str, cache: BenchCache, backends: Backends, *, producer: bool) -> None:
        import nixl

        self._cache = cache
        self._name = name
        self._api: Any = nixl._bindings
        self._agent: Any = self._api.nixlAgent(name, _config(self._api, producer=producer))
        self._backends = [self._agent.createBackend(one, dict(params)) for one, params in backends.items()]
        regions = [(base, cache.shape.layer_size_bytes, _DEVICE, "") for base in cache.bases]
        self._agent.registerMem(self._api.nixlRegDList(self._api.DRAM_SEG, regions), self._backends)
        self._local_blocks = 0
        self._remote_blocks = 0

    def address(self) -> AgentAddress:
        return AgentAddress(self._name, self._agent.getLocalMD(), self._cache.bases)

    def connect(self, address: AgentAddress) -> None:
        self._agent.loadRemoteMD(address.metadata)
        self._local_blocks = self._prepare(self._api.NIXL_INIT_AGENT, self._cache.bases)
        self._remote_blocks = self._prepare(address.agent, address.bases)

    def _prepare(self, agent: str, bases: Sequence[int]) -> int:
        """All blocks as descriptors, one strided row per layer: index = (2 * layer + part) * blocks + block."""
        size, count = self._cache.shape.region_block_size_bytes, 2 * self._cache.shape.blocks
        rows = np.array([(base, size, _DEVICE, size, count) for base in bases], dtype=np.uint64)
        handle: int = self._agent.prepXferDlist(agent, self._api.DRAM_SEG, rows, self._backends)
        return handle

    def load(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        remote = np.array(remote_ids, dtype=np.int32)
        order = np.argsort(remote)
        handle = self._agent.makeXferReq(
            self._api.NIXL_READ,
            self._local_blocks,
            self._indices(np.array(local_ids, dtype=np.int32)[order]),
            self._remote_blocks,
            self._indices(remote[order]),
            _NOTIFICATION,
            self._backends,
            False,
        )
        state = self._agent.postXferReq(handle, _NOTIFICATION)
        posted = time.perf_counter()
        while state == self._api.NIXL_IN_PROG:
            elapsed = time.perf_counter() - posted
            if elapsed > _SPIN_S:
                time.sleep(min(max(elapsed / 8, _SLEEP_MIN_S), _SLEEP_MAX_S))
            state = self._agent.getXferStatus(handle)
        if state != self._api.NIXL_SUCCESS:
            raise RuntimeError(f"raw NIXL transfer ended in state {state}")
        self._agent.releaseXferReq(handle)

    def _indices(self, block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        shape = self._cache.shape
        regions = np.arange(shape.block_descriptors, dtype=np.int32)[:, None] * np.int32(shape.blocks)
        return (regions + block_ids).ravel()

    def drain(self) -> None:
        self._agent.getNotifs({}, [])


def _config(api: Any, *, producer: bool) -> Any:
    config = api.nixlAgentConfig()
    config.useProgThread = producer
    config.pthrDelay = _PRODUCER_THREAD_DELAY_US
    config.syncMode = api.NIXL_THREAD_SYNC_RW if producer else api.NIXL_THREAD_SYNC_NONE
    config.useListenThread = False
    return config


class RawRank:
    """A producer or a reader without kvflow."""

    def __init__(self, agent: TunedAgent, cache: BenchCache) -> None:
        self._agent, self._cache = agent, cache

    async def address(self) -> AgentAddress:
        return self._agent.address()

    async def connect(self, address: AgentAddress) -> None:
        self._agent.connect(address)

    async def load(self, loads: Sequence[PlannedLoad]) -> list[float]:
        """Read loads one after the other, and compare every byte. Returns the seconds of each."""
        self._cache.poison_loads(loads)
        seconds = []
        for load in loads:
            start = time.perf_counter()
            self._agent.load(load.local_ids, load.remote_ids)
            seconds.append(time.perf_counter() - start)
        self._cache.check_loads(loads)
        return seconds

    async def drain(self) -> None:
        self._agent.drain()


@contextlib.asynccontextmanager
async def open_raw(shape: CacheShape, backends: Backends, *, producer: bool) -> AsyncIterator[RawRank]:
    cache = BenchCache(shape)
    if producer:
        cache.fill()
    yield RawRank(TunedAgent("producer" if producer else "reader", cache, backends, producer=producer), cache)
