"""The engine: an asyncio interface to the model, with reserved blocks, prefill, decode, and tokens as a stream.

The engine owns the cache, the block pool and one worker thread. All torch work runs in that thread, so the event loop
stays free. Steps of concurrent requests run there in the order of their calls. Decode steps that wait for their turn
are computed together, at most `batch_size` at once; each request joins and leaves the batch by itself. An answer does
not depend on the other requests in its batch: every decode step computes `batch_size` rows, of which unused rows are
padding (see `model`).

Theory of memory: a request owns its reserved blocks until its `async with` ends, and no step of the engine touches them
after that. A running step cannot be stopped, so a cancelled request waits for its step to end before it frees its
blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Self

from paged_engine.batching import StepBatcher, wait_through_cancel
from paged_engine.cache import BlockId, BlockPool, OutOfBlocksError, PagedKVCache, blocks_for
from paged_engine.model import Chunk, LlamaModel
from paged_engine.sampling import GREEDY, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A snapshot of an engine. Free and used blocks add up to the whole pool; an idle engine uses no block."""

    blocks_free: int
    blocks_used: int
    steps: int
    tokens_prefilled: int
    """Number of prompt tokens computed by this engine."""


class Engine:
    """Generation with one model over one paged cache, for any number of concurrent requests."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        block_count: int,
        block_size: int,
        batch_size: int = 1,
        prefill_tokens: int = 512,
        shuffle_seed: int | str | None = None,
        reserve_timeout_s: float = 120.0,
    ) -> None:
        """Make an engine.

        `prefill_tokens` is the number of prompt tokens computed in one step; decode steps run between these steps.
        """
        config = model.config
        self._model = model
        self._cache = PagedKVCache(
            model.layer_names,
            block_count=block_count,
            kv_head_count=config.kv_head_count,
            block_size=block_size,
            head_dim=config.head_dim,
            dtype=model.dtype,
        )
        self.kv_caches = self._cache.tensors
        """One tensor per layer, [2, blocks, KV heads, block size, head size], valid as long as the engine is."""
        self.block_size = block_size
        self.windows = model.windows
        """Window of each layer in tokens, by layer name; 0: the layer attends to all tokens."""
        self.vocabulary_size = model.vocabulary_size
        """Size of the vocabulary; every token id is below it."""
        self.eos_token_id = config.eos_token_id
        """The token that ends an answer."""
        self.token_count_max = min(config.position_count_max, block_count * block_size)
        """Maximum length of a sequence, limited by the model and by the cache."""
        self._pool = BlockPool(block_count, shuffle_seed=shuffle_seed)
        self._reserve_timeout_s = reserve_timeout_s
        # The first request in the queue waits for free blocks, the others wait for the lock: first come, first served.
        self._allocation_lock = asyncio.Lock()
        self._blocks_freed = asyncio.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paged-engine")
        self._decoding = StepBatcher(self._compute, self._executor, batch_size=batch_size)
        self._batch_size = batch_size
        self._prefill_tokens = prefill_tokens
        self._prefills = 0
        self._tokens_prefilled = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the steps already queued, and stop the thread."""
        await asyncio.to_thread(self._executor.shutdown)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            blocks_free=self._pool.free_count,
            blocks_used=self._pool.used_count,
            steps=self._prefills + self._decoding.batch_count,
            tokens_prefilled=self._tokens_prefilled,
        )

    @asynccontextmanager
    async def reserve(self, token_count: int) -> AsyncIterator[list[BlockId]]:
        """Reserve blocks for `token_count` tokens, and free them at the end of the block.

        Wait for free blocks, first come, first served. A request must reserve all its blocks at once, so that two
        requests with half their blocks never wait for each other. Cancelling a waiting call takes no block.
        """
        block_ids = await self._allocated(self._block_count(token_count))
        try:
            yield block_ids
        finally:
            self._pool.free(block_ids)
            self._blocks_freed.set()

    async def prefill(
        self,
        prompt: Sequence[int],
        block_ids: Sequence[BlockId],
        *,
        sampling: Sampling = GREEDY,
        computed: Callable[[int], None] | None = None,
        start: int = 0,
    ) -> int:
        """Compute a prompt into `block_ids`, and return the first new token.

        `start` is the number of tokens that the blocks already hold; it is smaller than the prompt. After each step but
        the last, `computed` is called on the loop with the number of tokens in the blocks. If cancelled, wait until the
        running step has ended, so that nothing writes to the blocks afterwards.
        """
        if not start < len(prompt):
            raise ValueError(f"start: {start} tokens of a prompt of {len(prompt)}, needs at least one token to compute")
        pages, loop = self._cache.pages(block_ids), asyncio.get_running_loop()

        def step(start: int, stop: int) -> int:
            return sampling.choose(self._model.forward(prompt[start:stop], start, pages), len(prompt))

        for begin in range(start, len(prompt), self._prefill_tokens):
            end = min(begin + self._prefill_tokens, len(prompt))
            self._prefills += 1
            token = await wait_through_cancel(loop.run_in_executor(self._executor, step, begin, end))
            if computed is not None and end < len(prompt):  # the token of such a step is of no use
                computed(end)
        self._tokens_prefilled += len(prompt) - start
        return token

    async def decode(
        self,
        token: int,
        *,
        position: int,
        block_ids: Sequence[BlockId],
        max_tokens: int,
        sampling: Sampling = GREEDY,
    ) -> AsyncGenerator[int, None]:
        """Yield at most `max_tokens` tokens after `token`, which is at `position`. The blocks hold all tokens before.

        The end-of-text token is yielded as well, as the last. Once the generator is closed nothing uses the blocks.
        """
        pages = self._cache.pages(block_ids)
        for current in range(position, position + max_tokens):
            if token == self.eos_token_id:
                return
            token = await self._decoding.step((Chunk(token_ids=[token], start=current, pages=pages), sampling))
            yield token

    async def generate(
        self, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling = GREEDY
    ) -> AsyncGenerator[int, None]:
        """Reserve blocks, prefill and decode. Yield at most `max_tokens` tokens."""
        async with self.reserve(len(prompt) + max_tokens) as block_ids:
            token = await self.prefill(prompt, block_ids, sampling=sampling)
            yield token
            decoding = self.decode(
                token, position=len(prompt), block_ids=block_ids, max_tokens=max_tokens - 1, sampling=sampling
            )
            async with aclosing(decoding) as rest:
                async for token in rest:
                    yield token

    def _block_count(self, token_count: int) -> int:
        count = blocks_for(token_count, self.block_size)
        block_count = self._cache.block_count
        position_count_max = self._model.config.position_count_max
        if count > block_count:
            raise OutOfBlocksError(f"{token_count} tokens need {count} blocks, the cache has {block_count}")
        if token_count > position_count_max:
            raise ValueError(f"tokens: {token_count} wanted, the model takes {position_count_max}")
        return count

    async def _allocated(self, count: int) -> list[BlockId]:
        """Wait until `count` blocks are free, and take them. Raises OutOfBlocksError after the engine's timeout."""
        try:
            async with asyncio.timeout(self._reserve_timeout_s), self._allocation_lock:
                while self._pool.free_count < count:
                    self._blocks_freed.clear()
                    await self._blocks_freed.wait()
                return self._pool.allocate(count)
        except TimeoutError:
            raise OutOfBlocksError(
                f"blocks: {count} wanted, {self._pool.free_count} free after {self._reserve_timeout_s} s"
            ) from None

    def _compute(self, steps: Sequence[tuple[Chunk, Sampling]]) -> list[int]:
        """Run the model over a batch, in the worker thread. Return the next token of each sequence."""
        logits = self._model.forward_batch([chunk for chunk, _ in steps], row_count=self._batch_size)
        return [sampling.choose(row, chunk.stop) for (chunk, sampling), row in zip(steps, logits, strict=True)]
