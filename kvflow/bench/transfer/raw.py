"""Contenders (a) and (b): NIXL without kvflow, one initiator and one target.

(a) `ExampleAgent`: the default agent, used as the examples of NIXL use it. Its progress thread spins on both sides; the
    reader makes descriptor lists, initializes a transfer, posts it and checks its state in a tight loop.
(b) `TunedAgent`: the fastest way we found. Descriptors are prepared once, as strided rows, and a load picks
    them by index, which lets NIXL join neighbours. Backends have the parameters that kvflow gives its own, such as
    the size of UCX's frames over tcp. The producer's progress thread sleeps in poll() and wakes when something
    arrives; the reader has none and checks tightly at first, then sleeps between checks: on a machine with few cores
    a reader that spins takes them from the tcp stack.

Both start from the lists of block ids that kvflow is given, and both send the producer a notification. NIXL is
imported where an agent is made: the parent of the bench has none, and the import takes a second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvflow.bench.cache import BenchCache
from kvflow.bench.loads import AgentAddress

_SPIN_S = 300e-6
_SLEEP_MIN_S = 50e-6
_SLEEP_MAX_S = 1e-3
_PRODUCER_THREAD_DELAY_US = 100_000
_NOTIFICATION = b"read"
_DEVICE = 0

Backends: TypeAlias = Mapping[str, Mapping[str, str]]
"""Parameters of NIXL's backends, by name."""


class RawAgent(Protocol):
    """One side of a raw contender; `load` belongs to the reader, `drain` to the producer."""

    def address(self) -> AgentAddress: ...
    def connect(self, address: AgentAddress) -> None: ...
    def load(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None: ...
    def drain(self) -> None: ...


class ExampleAgent:
    """Contender (a)."""

    def __init__(self, name: str, cache: BenchCache, backends: Sequence[str]) -> None:
        import nixl

        self._cache = cache
        self._name = name
        self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=list(backends)))
        size = cache.shape.layer_size_bytes
        self._agent.register_memory([(base, size, _DEVICE, "") for base in cache.bases], "DRAM")
        self._remote_agent = ""
        self._remote_bases: tuple[int, ...] = ()

    def address(self) -> AgentAddress:
        return AgentAddress(self._name, self._agent.get_agent_metadata(), self._cache.bases)

    def connect(self, address: AgentAddress) -> None:
        self._remote_agent = self._agent.add_remote_agent(address.metadata)
        self._remote_bases = address.bases

    def load(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        agent = self._agent
        local = agent.get_xfer_descs(block_rows(self._cache, self._cache.bases, local_ids), "DRAM")
        remote = agent.get_xfer_descs(block_rows(self._cache, self._remote_bases, remote_ids), "DRAM")
        handle = agent.initialize_xfer("READ", local, remote, self._remote_agent, _NOTIFICATION)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"raw NIXL transfer ended in state {state}")
        agent.release_xfer_handle(handle)

    def drain(self) -> None:
        self._agent.get_new_notifs()


def block_rows(cache: BenchCache, bases: Sequence[int], block_ids: Sequence[int]) -> npt.NDArray[np.uint64]:
    """One row (address, length, device) for each block of K and of V in each layer."""
    size = cache.shape.region_block_size_bytes
    starts = (np.arange(2)[:, None] * cache.shape.blocks + np.array(block_ids)).ravel() * size
    rows = np.empty((len(bases) * len(starts), 3), dtype=np.uint64)
    rows[:, 0] = (np.array(bases, dtype=np.uint64)[:, None] + starts.astype(np.uint64)).ravel()
    rows[:, 1] = size
    rows[:, 2] = _DEVICE
    return rows


class TunedAgent:
    """Contender (b)."""

    def __init__(self, name: str, cache: BenchCache, backends: Backends, *, producer: bool) -> None:
        import nixl

        self._cache = cache
        self._name = name
        self._api: Any = nixl._bindings
        self._agent: Any = self._api.nixlAgent(name, _tuned_config(self._api, producer=producer))
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


def _tuned_config(api: Any, *, producer: bool) -> Any:
    config = api.nixlAgentConfig()
    config.useProgThread = producer
    config.pthrDelay = _PRODUCER_THREAD_DELAY_US
    config.syncMode = api.NIXL_THREAD_SYNC_RW if producer else api.NIXL_THREAD_SYNC_NONE
    config.useListenThread = False
    return config
