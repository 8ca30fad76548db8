"""Loads by NIXL alone, tuned as well as we could: the baseline for kvflow's loads.

Descriptors are prepared once, as strided rows, and a load picks them by index, so that NIXL can merge neighbours.
NIXL's backends get the same parameters as in kvflow, such as UCX's frame size over tcp. The producer's progress thread
sleeps in poll() until something arrives. The reader has no progress thread: it first polls without a pause, then sleeps
between polls, because on a machine with few cores a spinning reader takes CPU time from the tcp stack.

As in kvflow, a load starts from lists of block ids, and sends the producer a notification. NIXL is imported only where
an agent is created, since the import takes a second.
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
_DEVICE_ID = 0

Backends: TypeAlias = Mapping[str, Mapping[str, str]]
"""Parameters of each NIXL backend, by the backend's name."""


class AgentAddress(NamedTuple):
    """Facts about a producer that its reader needs before the first load: agent name, NIXL metadata, layer bases.

    `bases`: start addresses of the layers.
    """

    agent: str = ""
    metadata: bytes = b""
    bases: tuple[int, ...] = ()


class TunedAgent:
    """The NIXL agent of a producer or a reader, with its registered cache."""

    def __init__(self, name: str, cache: BenchCache, backends: Backends, *, producer: bool) -> None:
        import nixl

        self._cache = cache
        self._name = name
        self._nixl: Any = nixl._bindings
        self._agent: Any = self._nixl.nixlAgent(name, _agent_config(self._nixl, producer=producer))
        self._backends = [self._agent.createBackend(backend, dict(params)) for backend, params in backends.items()]
        regions = [(base, cache.shape.layer_size_bytes, _DEVICE_ID, "") for base in cache.bases]
        self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, regions), self._backends)
        self._local_blocks = 0
        self._remote_blocks = 0

    def address(self) -> AgentAddress:
        return AgentAddress(self._name, self._agent.getLocalMD(), self._cache.bases)

    def connect(self, address: AgentAddress) -> None:
        self._agent.loadRemoteMD(address.metadata)
        self._local_blocks = self._prepare_blocks(self._nixl.NIXL_INIT_AGENT, self._cache.bases)
        self._remote_blocks = self._prepare_blocks(address.agent, address.bases)

    def _prepare_blocks(self, agent: str, bases: Sequence[int]) -> int:
        """Prepare descriptors for all blocks of the agent `agent`, one strided row per layer, and return NIXL's handle.

        `bases`: start addresses of the layers. With plane 0 for K and 1 for V, the descriptor of block number `block`
        has index `(2 * layer + plane) * blocks + block`.
        """
        size, count = self._cache.shape.region_block_size_bytes, 2 * self._cache.shape.blocks
        rows = np.array([(base, size, _DEVICE_ID, size, count) for base in bases], dtype=np.uint64)
        handle: int = self._agent.prepXferDlist(agent, self._nixl.DRAM_SEG, rows, self._backends)
        return handle

    def load(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        remote = np.array(remote_ids, dtype=np.int32)
        order = np.argsort(remote)
        handle = self._agent.makeXferReq(
            self._nixl.NIXL_READ,
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
        while state == self._nixl.NIXL_IN_PROG:
            elapsed = time.perf_counter() - posted
            if elapsed > _SPIN_S:
                time.sleep(min(max(elapsed / 8, _SLEEP_MIN_S), _SLEEP_MAX_S))
            state = self._agent.getXferStatus(handle)
        if state != self._nixl.NIXL_SUCCESS:
            raise RuntimeError(f"raw NIXL transfer ended in state {state}")
        self._agent.releaseXferReq(handle)

    def _indices(self, block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        shape = self._cache.shape
        regions = np.arange(shape.block_descriptors, dtype=np.int32)[:, None] * np.int32(shape.blocks)
        return (regions + block_ids).ravel()

    def take_notifications(self) -> None:
        self._agent.getNotifs({}, [])


def _agent_config(api: Any, *, producer: bool) -> Any:
    config = api.nixlAgentConfig()
    config.useProgThread = producer
    config.pthrDelay = _PRODUCER_THREAD_DELAY_US
    config.syncMode = api.NIXL_THREAD_SYNC_RW if producer else api.NIXL_THREAD_SYNC_NONE
    config.useListenThread = False
    return config


class RawRank:
    """The rank of a producer or a reader on NIXL alone, in a child process."""

    def __init__(self, agent: TunedAgent, cache: BenchCache) -> None:
        self._agent, self._cache = agent, cache

    async def address(self) -> AgentAddress:
        return self._agent.address()

    async def connect(self, address: AgentAddress) -> None:
        self._agent.connect(address)

    async def load(self, loads: Sequence[PlannedLoad]) -> list[float]:
        """Run `loads` one after another, then compare every byte. Return the seconds that each load took."""
        self._cache.poison_loads(loads)
        seconds = []
        for load in loads:
            start = time.perf_counter()
            self._agent.load(load.local_ids, load.remote_ids)
            seconds.append(time.perf_counter() - start)
        self._cache.check_loads(loads)
        return seconds

    async def take_notifications(self) -> None:
        self._agent.take_notifications()


@contextlib.asynccontextmanager
async def open_raw(shape: CacheShape, backends: Backends, *, producer: bool) -> AsyncIterator[RawRank]:
    cache = BenchCache(shape)
    if producer:
        cache.fill()
    yield RawRank(TunedAgent("producer" if producer else "reader", cache, backends, producer=producer), cache)
