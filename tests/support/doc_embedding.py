"""A scripted engine for the code of docs/embedding.md, with an allocator that counts blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import torch

import kvflow
from kvflow.testing import CacheSize, InprocCluster, InprocTransport, TestEngine

SIZE = CacheSize(layers=1, num_blocks=16, block_size=16)
BLOCKS = [3, 7, 9]

Names = dict[str, Any]


def kv_caches() -> dict[str, torch.Tensor]:
    """Return a cache with the size of `kvflow.testing`'s engines, for a page to register."""
    return {"layers.0": torch.full((2, SIZE.num_blocks, 2, SIZE.block_size, 8), -1.0)}


class Embedded:
    """The engine's parts that docs/embedding.md names, scripted by a test, and another engine as the peer.

    A freed block is overwritten at once, as by its next owner. Faults are collected in `problems`, because an error
    raised in a background task would be lost.
    """

    def __init__(self, cluster: InprocCluster, other: TestEngine) -> None:
        self.other = other
        self._cluster = cluster
        self.problems: list[str] = []
        self.taken: set[int] = set()
        self.broken: set[str] = set()
        """Names of the parts that fail when called."""
        self.computing = asyncio.Event()
        self.computing.set()
        """While this is not set, `compute` waits."""
        self.chunks_computed = 0
        self.serving, self.ending = asyncio.Event(), asyncio.Event()
        self.answer: torch.Tensor | None = None
        self.kv_caches = kv_caches()
        parts = (self.compute, self.compute_chunks, self.generate, self.cached_blocks, self.serve)
        self.names: Names = {part.__name__: part for part in parts} | {
            "allocator": SimpleNamespace(take=self.take, give_back=self.give_back),
            "kv_caches": self.kv_caches,
            "PrefillAgain": type("PrefillAgain", (Exception,), {}),
            "Request": SimpleNamespace,
        }

    @property
    def runtime(self) -> kvflow.Runtime:
        runtime: kvflow.Runtime = self.names["runtime"]
        return runtime

    @property
    def transport(self) -> InprocTransport:
        return self._cluster.transport(self.runtime.config.engine_id)

    async def prefill(self, request: SimpleNamespace) -> Names:
        params: Names = await self.names["prefill"](request)
        return params

    def prefill_in_chunks(self, request: SimpleNamespace) -> tuple[asyncio.Task[None], asyncio.Future[Names]]:
        """Begin a growing prefill. Return its task, and the ticket that it sends."""
        ticket: asyncio.Future[Names] = asyncio.get_running_loop().create_future()
        return asyncio.create_task(self.names["prefill_in_chunks"](request, ticket.set_result)), ticket

    async def decode(self, request: SimpleNamespace) -> None:
        await self.names["decode"](request)

    @property
    def background(self) -> set[asyncio.Task[None]]:
        """Background tasks of the page, which wait until blocks are safe."""
        return set(self.names["background"])

    def take(self, request: SimpleNamespace) -> list[int]:
        self._meet("take")
        self.taken.update(BLOCKS)
        return list(BLOCKS)

    def give_back(self, block_ids: list[int]) -> None:
        if not self.taken.issuperset(block_ids):
            self.problems.append(f"{block_ids} given back, taken are {self.taken}")
        self.taken.difference_update(block_ids)
        self.kv_caches["layers.0"][:, block_ids] = -1.0
        blocks = self.runtime.statistics().blocks
        if blocks is not None and blocks.total - blocks.free > len(self.taken):
            self.problems.append(f"{block_ids} given back while kvflow uses them: {blocks}")

    async def compute(self, prompt: list[int], block_ids: list[int]) -> None:
        await self.computing.wait()
        self._meet("compute")
        self.kv_caches["layers.0"][:, block_ids] = 1.0

    async def compute_chunks(self, prompt: list[int], block_ids: list[int]) -> AsyncIterator[int]:
        for index, block_id in enumerate(block_ids):
            await self.computing.wait()
            self._meet("compute")
            self.kv_caches["layers.0"][:, block_id] = 1.0
            self.chunks_computed += 1
            yield min((index + 1) * SIZE.block_size, len(prompt))

    async def generate(self, request: SimpleNamespace, block_ids: list[int]) -> None:
        self._meet("generate")
        self.answer = self.kv_caches["layers.0"][:, block_ids].clone()

    def cached_blocks(self, request: SimpleNamespace) -> int:
        self._meet("cached_blocks")
        return 0

    async def serve(self) -> None:
        self.serving.set()
        await self.ending.wait()

    def let_go(self) -> None:
        """Perform all held reads, and hold no further reads."""
        for transport in (self.transport, self.other.transport):
            transport.faults.hold = False
            transport.perform()

    def assert_whole(self) -> None:
        """Assert that every block was freed once, not too early, and not written to afterwards."""
        assert self.problems == []
        assert not self.taken, f"never given back: {self.taken}"
        assert (self.kv_caches["layers.0"] == -1.0).all(), "written after it was given back"

    def _meet(self, part: str) -> None:
        if part in self.broken:
            raise MemoryError(part)


@asynccontextmanager
async def embedded(cluster: InprocCluster) -> AsyncIterator[Embedded]:
    config = kvflow.Config(engine_id="other", model="llama-3-8b")
    async with cluster.engine("other", config=config, size=SIZE) as other:
        other.kv_caches["layers.0"].fill_(2.0)
        yield Embedded(cluster, other)
