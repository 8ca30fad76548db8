"""Contender (a), NIXL as its examples use it, and what it and (b), `kvflow.bench.raw.TunedAgent`, have in common.

(a) is the default agent. Its progress thread spins on both sides; the reader makes descriptor lists, initializes a
transfer, posts it and checks its state in a tight loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvflow.bench.cache import BenchCache
from kvflow.bench.raw import AgentAddress

_NOTIFICATION = b"read"
_DEVICE = 0


class RawAgent(Protocol):
    """One side of a raw contender; `load` belongs to the reader, `take_notifications` to the producer."""

    def address(self) -> AgentAddress: ...
    def connect(self, address: AgentAddress) -> None: ...
    def load(self, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None: ...
    def take_notifications(self) -> None: ...


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

    def take_notifications(self) -> None:
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
