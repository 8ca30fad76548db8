"""A toy engine that hands prompts over with kvflow.

It shows what an engine needs to be tested with `kvflow.testing`: it takes a `World` from the test, and it opens and
closes its own runtime. `test_engine.py` tests it with faults and in virtual time. Its "KV cache" holds the token ids
themselves, so that the decode engine can read the prompt from the blocks it has loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch

from kvflow import CacheLayout, Config, Lease, Load, LoadRequest, Runtime, ServeRequest
from kvflow.errors import KVFlowError
from kvflow.testing import World

BLOCK_SIZE = 4


class Engine:
    """A toy engine: one layer of KV cache, a list of free blocks, and a kvflow runtime. `world` is for tests."""

    def __init__(self, name: str, *, num_blocks: int = 8, world: World | None = None) -> None:
        config = Config(engine_id=name, listen="tcp://127.0.0.1:0", lease_ttl_s=5.0, cancel_grace_s=0.5)
        self.runtime = Runtime(config, world=world)
        self.free = list(range(num_blocks))
        self.num_blocks = num_blocks
        self.leases: set[Lease] = set()
        self.kv_caches = {"layers.0": torch.zeros((2, num_blocks, BLOCK_SIZE, 1, 4), dtype=torch.float32)}
        self.layout = CacheLayout.infer(self.kv_caches, order="NHD", block_size=BLOCK_SIZE)
        self._background: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.runtime.__aenter__()
        await self.runtime.register_kv_caches(self.kv_caches, self.layout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.runtime.aclose()
        await asyncio.gather(*self._background)

    def prefill(self, request_id: str, prompt: Sequence[int]) -> dict[str, Any]:
        """Compute a prompt, offer its blocks, and return the ticket. Free the blocks once the lease has ended."""
        blocks = self.take(len(prompt))
        for index, token in enumerate(prompt):
            self.kv_caches["layers.0"][:, blocks[index // BLOCK_SIZE], index % BLOCK_SIZE] = float(token)
        lease = self.runtime.serve_blocks(ServeRequest(request_id, block_ids=blocks, num_tokens=len(prompt)))
        self.leases.add(lease)
        self._in_background(self._free_after_lease(lease, blocks))
        return lease.ticket.to_params()

    async def decode(self, request_id: str, ticket: Mapping[str, Any], num_tokens: int) -> list[int]:
        """Load a prompt and "decode" it: return the prompt's tokens, read from the cache."""
        blocks = self.take(num_tokens)
        load = self.runtime.start_load(LoadRequest(request_id, ticket=ticket, block_ids=blocks))
        try:
            await load
            rows = self.kv_caches["layers.0"][0, blocks].flatten(0, 1)[:num_tokens]
            return [int(row.flatten()[0]) for row in rows]
        except BaseException:
            self._in_background(self._release_offer(ticket))
            raise
        finally:
            self._in_background(self._free_when_settled(load, blocks))

    def take(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_SIZE)
        if count > len(self.free):
            raise MemoryError(f"{count} blocks are needed, {len(self.free)} are free")
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        self.kv_caches["layers.0"][:, list(blocks)] = -1.0  # overwrite the blocks, as their next owner would
        self.free.extend(blocks)

    async def _free_after_lease(self, lease: Lease, blocks: Sequence[int]) -> None:
        await lease
        self.leases.discard(lease)
        self.give_back(blocks)

    async def _free_when_settled(self, load: Load, blocks: Sequence[int]) -> None:
        """Free the blocks once no byte can land in them. After a cancelled load bytes may still land for a while."""
        load.cancel()  # no effect if the load has ended
        await load.settled()
        self.give_back(blocks)

    async def _release_offer(self, ticket: Mapping[str, Any]) -> None:
        """Release an offer that will not be read: the prefill engine can free its blocks before the lease expires."""
        with suppress(KVFlowError):
            await self.runtime.release_blocks(ticket)

    def _in_background(self, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(body)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
