"""An engine on asyncio, of 16 tokens a block, that hands prompts to real vLLM and takes them: the example's, unchanged.

vLLM's CPU kernels have an order of their own within a block (K with its tokens last), which no plan of a transfer can
turn into another one. So the engine has a second, small cache in vLLM's form, and copies a prompt's pages in and out.
On a GPU the two caches differ in shapes and block sizes only, and kvflow reads one out of the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import torch
from paged_engine.cache import BlockPool, Pages
from paged_engine.engine import Engine
from paged_engine.weights import load_model, write_checkpoint

import kvflow
from kvflow.attention_backends import layout_for_backend
from tests.vllm.servers import NAME, VERSION

BLOCK, PAGE = 128, 16
BLOCKS = 24


class OwnCache:
    """A cache as vLLM's CPU backend has it ("vec"): of each head of a block K as (size, tokens), then V as
    (tokens, size)."""

    def __init__(self, layers: int, heads: int, size: int) -> None:
        self.tensors = {
            f"model.layers.{layer}.self_attn.attn": torch.zeros(BLOCKS, heads, BLOCK, 2 * size)
            for layer in range(layers)
        }
        self.pool = BlockPool(BLOCKS, shuffle_seed=1)
        self._shape = (BLOCKS, heads, 2, BLOCK * size)
        self._size = size

    def layout(self) -> kvflow.CacheLayout:
        return layout_for_backend(
            self.tensors,
            backend="CPU_ATTN",
            block_size=BLOCK,
            engine_version=VERSION,
            kv_format="cpu_fused_vec",
            layer_indices=range(len(self.tensors)),
        )

    def both(self, layer: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a block as (heads, tokens, size); writing to them writes to the block."""
        keys, values = layer.view(self._shape)[block].unbind(1)
        heads = len(keys)
        return keys.view(heads, self._size, BLOCK).transpose(1, 2), values.view(heads, BLOCK, self._size)


class OwnEngine:
    """The example's engine, with a runtime on the cache in vLLM's form."""

    def __init__(self, engine: Engine, own_cache: OwnCache, runtime: kvflow.Runtime) -> None:
        self.engine, self.own_cache, self.runtime = engine, own_cache, runtime
        self._stack = AsyncExitStack()

    @classmethod
    async def open(cls, folder: Path) -> Self:
        write_checkpoint(folder)
        engine = Engine(load_model(folder), block_count=256, block_size=PAGE, shuffle_seed=2)
        layer = next(iter(engine.kv_caches.values()))
        own_cache = OwnCache(len(engine.kv_caches), layer.shape[2], layer.shape[4])
        runtime = kvflow.Runtime(kvflow.Config(engine_id="own", model=NAME, listen="tcp://127.0.0.1:0"))
        own = cls(engine, own_cache, runtime)
        await own._stack.enter_async_context(engine)
        await own._stack.enter_async_context(runtime)
        await runtime.register_kv_caches(own_cache.tensors, own_cache.layout())
        return own

    async def aclose(self) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def offered(self, prompt: Sequence[int], request_id: str) -> AsyncIterator[dict[str, Any]]:
        """Compute a prompt, and offer it until a reader has read it: the parameters for vLLM."""
        blocks = self.own_cache.pool.allocate(-(-len(prompt) // BLOCK))
        try:
            async with self.engine.reserve(len(prompt)) as pages:
                await self.engine.prefill(prompt, pages)
                self._copy(pages, blocks, len(prompt), out=True)
            lease = self.runtime.serve_blocks(
                kvflow.ServeRequest(request_id, block_ids=blocks, num_tokens=len(prompt), prompt=prompt)
            )
            yield lease.ticket.to_params()
            assert await lease is kvflow.LeaseOutcome.READ
        finally:
            self.own_cache.pool.free(blocks)

    async def answer(
        self, prompt: Sequence[int], params: dict[str, Any], request_id: str, max_tokens: int
    ) -> list[int]:
        """Load a prompt that vLLM has computed, and generate."""
        blocks = self.own_cache.pool.allocate(-(-len(prompt) // BLOCK))
        try:
            report = await self.runtime.load_blocks(
                kvflow.LoadRequest(request_id, ticket=params, block_ids=blocks, prompt=prompt)
            )
            assert report.tokens == len(prompt)
            async with self.engine.reserve(len(prompt) + max_tokens) as pages:
                self._copy(pages, blocks, len(prompt), out=False)
                steps = self.engine.statistics().steps
                token = await self.engine.prefill(prompt, pages, start=len(prompt) - 1)
                assert self.engine.statistics().steps == steps + 1, "it has computed more than the last token"
                found = [token]
                decoding = self.engine.decode(token, position=len(prompt), block_ids=pages, max_tokens=max_tokens - 1)
                async with aclosing(decoding) as rest:
                    found += [token async for token in rest]
                return found
        finally:
            self.own_cache.pool.free(blocks)

    async def alone(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the engine's answer without another engine."""
        async with aclosing(self.engine.generate(prompt, max_tokens=max_tokens)) as found:
            return [token async for token in found]

    def _copy(self, pages: Sequence[Any], blocks: Sequence[int], num_tokens: int, *, out: bool) -> None:
        """Copy a prompt out of the engine's pages into blocks of vLLM's form, or back."""
        held: Pages = self.engine._cache.pages(pages)
        names = zip(self.engine.kv_caches, self.own_cache.tensors.values(), strict=True)
        for name, layer in names:
            parts = [self.own_cache.both(layer, block) for block in blocks]
            if out:
                for source, side in zip(held.read(name, num_tokens), range(2), strict=True):
                    for index, part in enumerate(parts):
                        piece = source[:, index * BLOCK : (index + 1) * BLOCK]
                        part[side][:, : piece.shape[1]] = piece
            else:
                keys, values = (torch.cat([part[side] for part in parts], dim=1)[:, :num_tokens] for side in range(2))
                held.write(name, 0, keys.transpose(0, 1), values.transpose(0, 1))
