"""The asyncio face of the model: blocks for as long as a `with`, prefill, decode, tokens as a stream.

The engine owns the cache, the block pool and one worker thread. All torch work runs in that thread, so
the event loop stays free; steps of concurrent requests take turns there in the order they were asked for.
Decode steps that wait for their turn are computed together, at most `batch_size` at once; each request joins
and leaves the batch by itself. An answer does not depend on how many others are answered meanwhile: every
decode step computes `batch_size` rows, and those that nobody needs are padding (see `model`).

Theory of memory: whoever reserves blocks owns them until the `with` ends, and no step of the engine
touches them after that. A step that runs cannot be called back, so a cancelled request first waits for
its step to end and only then gives its blocks back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Self

import torch

from paged_engine.batching import StepBatcher, held_back
from paged_engine.cache import BlockId, BlockPool, CacheShape, OutOfBlocksError, PagedKVCache, blocks_for
from paged_engine.model import Chunk, LlamaModel
from paged_engine.sampling import GREEDY, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """A snapshot; free + used is the whole pool, and used is 0 when the engine is idle."""

    blocks_free: int
    blocks_used: int
    steps: int
    tokens_prefilled: int
    """Tokens of prompts that were computed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One sequence's next token: what to compute, and how to choose."""

    chunk: Chunk
    sampling: Sampling

    @property
    def position(self) -> int:
        """Where the token will stand."""
        return self.chunk.start + len(self.chunk.token_ids)


class Engine:
    """Generation with one model over one paged cache; any number of concurrent requests, each greedy or sampled."""

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
        """`prefill_tokens`: of a prompt, how many are computed in one step; decode steps take turns with these."""
        config = model.config
        shape = CacheShape(
            block_count=block_count,
            kv_head_count=config.kv_head_count,
            block_size=block_size,
            head_dim=config.head_dim,
        )
        self._model = model
        self._cache = PagedKVCache(model.layer_names, shape, dtype=model.dtype)
        self._pool = BlockPool(block_count, shuffle_seed=shuffle_seed)
        self._reserve_timeout_s = reserve_timeout_s
        # The head of the queue waits for room, the others wait for their turn: nobody is overtaken.
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paged-engine")
        self._decoding = StepBatcher(self._compute, self._executor, batch_size=batch_size)
        self._batch_size = batch_size
        self._prefill_tokens = prefill_tokens
        self._prefills = 0
        self._tokens_prefilled = 0

    def __repr__(self) -> str:
        return f"Engine({self._pool}, {self._cache})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let the steps that were asked for end and stop the thread; closing twice is fine."""
        await asyncio.to_thread(self._executor.shutdown)

    @property
    def kv_caches(self) -> dict[str, torch.Tensor]:
        """One tensor per layer, [2, blocks, KV heads, block size, head size]; live as long as the engine."""
        return self._cache.tensors

    @property
    def model_name(self) -> str:
        return self._model.config.name

    @property
    def windows(self) -> Mapping[str, int]:
        """By layer name, how many tokens a token attends to there; 0: all of them."""
        return self._model.windows

    @property
    def block_size(self) -> int:
        return self._cache.shape.block_size

    @property
    def vocabulary_size(self) -> int:
        """Tokens are below it."""
        return self._model.vocabulary_size

    @property
    def eos_token_id(self) -> int:
        """The token that ends an answer."""
        return self._model.config.eos_token_id

    @property
    def token_count_max(self) -> int:
        """How long a sequence can be at most: what the model takes and the cache holds."""
        return min(self._model.config.position_count_max, self._cache.shape.block_count * self.block_size)

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            blocks_free=self._pool.free_count,
            blocks_used=self._pool.used_count,
            steps=self._prefills + self._decoding.batch_count,
            tokens_prefilled=self._tokens_prefilled,
        )

    @asynccontextmanager
    async def reserve(self, token_count: int) -> AsyncIterator[list[BlockId]]:
        """Blocks for that many tokens; waits for room, first come first served.

        A request reserves all it will need at once, so two half-served requests never wait for each other.
        Cancelling a waiting caller takes nothing.
        """
        block_ids = await self._allocated(self._block_count(token_count))
        try:
            yield block_ids
        finally:
            self._pool.free(block_ids)
            self._room.set()

    async def prefill(
        self,
        prompt: Sequence[int],
        block_ids: Sequence[BlockId],
        *,
        sampling: Sampling = GREEDY,
        computed: Callable[[int], None] | None = None,
        start: int = 0,
    ) -> int:
        """Fill the blocks with the keys and values of the whole prompt; return the first new token.

        With `start` the blocks hold that many tokens already, which are fewer than the prompt.
        `computed` is called on the loop after each step but the last, with how many tokens are in the blocks by then.
        When it is cancelled, it raises once the running step has left the blocks alone.
        """
        if not prompt:
            raise ValueError("prompt: needs at least one token")
        pages, loop = self._cache.pages(block_ids), asyncio.get_running_loop()

        def step(start: int) -> torch.Tensor:
            return self._model.forward(prompt[start : start + self._prefill_tokens], start, pages)

        def last_step(start: int) -> int:
            return sampling.choose(step(start), len(prompt))

        *starts, last = range(start, len(prompt), self._prefill_tokens)
        for begin in starts:
            self._prefills += 1
            await held_back(loop.run_in_executor(self._executor, step, begin))
            if computed is not None:
                computed(begin + self._prefill_tokens)
        self._prefills += 1
        token = await held_back(loop.run_in_executor(self._executor, last_step, last))
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
        """Continue after `token` at `position`, whose predecessors are in the blocks; at most `max_tokens`.

        The end-of-text token is yielded, and is the last one. Closing the generator leaves the blocks alone.
        """
        pages = self._cache.pages(block_ids)
        for current in range(position, position + max_tokens):
            if token == self.eos_token_id:
                return
            chunk = Chunk(token_ids=[token], start=current, pages=pages)
            token = await self._decoding.step(DecodeStep(chunk=chunk, sampling=sampling))
            yield token

    async def generate(
        self, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling = GREEDY
    ) -> AsyncGenerator[int, None]:
        """Prefill and decode in blocks of its own; yields at most `max_tokens` tokens."""
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
        block_count = self._cache.shape.block_count
        position_count_max = self._model.config.position_count_max
        if count > block_count:
            raise OutOfBlocksError(f"{token_count} tokens need {count} blocks, the cache has {block_count}")
        if token_count > position_count_max:
            raise ValueError(f"tokens: {token_count} wanted, the model takes {position_count_max}")
        return count

    async def _allocated(self, count: int) -> list[BlockId]:
        """Wait until that many blocks are free, and take them."""
        try:
            async with asyncio.timeout(self._reserve_timeout_s), self._turn:
                while self._pool.free_count < count:
                    self._room.clear()
                    await self._room.wait()
                return self._pool.allocate(count)
        except TimeoutError:
            raise OutOfBlocksError(
                f"blocks: {count} wanted, {self._pool.free_count} free after {self._reserve_timeout_s} s"
            ) from None

    def _compute(self, steps: Sequence[DecodeStep]) -> list[int]:
        """Run the model over a batch in the worker thread; the next token of each sequence."""
        logits = self._model.forward_batch([step.chunk for step in steps], row_count=self._batch_size)
        return [step.sampling.choose(row, step.position) for step, row in zip(steps, logits, strict=True)]
