"""The examples' engine: no block lost or given twice, and the same answers as transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from threading import Event, get_ident

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from paged_engine import (
    GREEDY,
    BlockId,
    BlockPool,
    Engine,
    LlamaModel,
    ModelConfig,
    OutOfBlocksError,
    Sampling,
    blocks_for,
)
from paged_engine.cache import PagedKVCache, Pages
from paged_engine.model import Chunk
from paged_engine.tokenizer import ChatTokenizer, TextStream
from paged_engine.weights import load_model, read_checkpoint
from tests_support import WAIT_S, turns
from tiny_model import PROMPT, Model


class TestBlockPool:
    @given(st.lists(st.integers(min_value=0, max_value=6), max_size=30), st.randoms())
    def test_free_and_used_are_all_blocks(self, counts: list[int], random: object) -> None:
        pool = BlockPool(12, shuffle_seed=7)
        held: list[list[BlockId]] = []
        for count in counts:
            if count > pool.free_count:
                with pytest.raises(OutOfBlocksError):
                    pool.allocate(count)
                pool.free(held.pop(len(held) // 2))
            else:
                held.append(pool.allocate(count))
            owned = [block_id for block_ids in held for block_id in block_ids]
            assert len(set(owned)) == len(owned) == pool.used_count
            assert pool.free_count + pool.used_count == 12

    @pytest.mark.parametrize("returned", [[0, 0], [0, 5], [99]], ids=["twice", "never taken", "unknown"])
    def test_a_refused_return_changes_nothing(self, returned: list[BlockId]) -> None:
        pool = BlockPool(6)
        assert pool.allocate(2) == [0, 1]
        with pytest.raises(ValueError, match="not in use"):
            pool.free(returned)
        assert (pool.free_count, pool.used_count) == (4, 2)

    def test_a_shuffled_pool_hands_out_scattered_blocks(self) -> None:
        assert BlockPool(64, shuffle_seed=0).allocate(8) != BlockPool(64, shuffle_seed=1).allocate(8)


class TestSampling:
    # Not of subnormal numbers: a library in the same process may have torch take them for 0.
    @example(logits=[-8.496598081819727e-17, 0.0], position=0)
    @given(
        logits=st.lists(st.floats(-30, 30, width=32, allow_subnormal=False), min_size=1, max_size=9),
        position=st.integers(0, 9),
    )
    def test_greedy_is_the_likeliest_however_it_is_asked_for(self, logits: list[float], position: int) -> None:
        row = torch.tensor(logits)
        assert GREEDY.choose(row, position) == int(row.argmax())
        for sampling in (Sampling(temperature=2.0, top_p=0.0), Sampling(temperature=1e-300)):
            # Probabilities are doubles: of logits that lie closer than they tell, either is the likeliest.
            assert row[sampling.choose(row, position)] >= row.max() - 1e-12

    @pytest.mark.parametrize(
        ("temperature", "top_p", "wanted"),
        [
            (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]),
            (0.5, 1.0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
            (1.0, 0.79, [0.5 / 0.8, 0.3 / 0.8, 0.0, 0.0]),
            (1.0, 0.81, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
            (1.0, 0.1, [1.0, 0.0, 0.0, 0.0]),
        ],
    )
    def test_tokens_come_as_often_as_they_should(self, temperature: float, top_p: float, wanted: list[float]) -> None:
        order = [2, 0, 3, 1]  # the likeliest are not the first
        row = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()[order]
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=11)
        draws = [order[sampling.choose(row, position)] for position in range(2000)]
        for token, share in enumerate(wanted):
            assert draws.count(token) / len(draws) == pytest.approx(share, abs=0.04 if 0 < share < 1 else 0)

    def test_a_draw_depends_on_seed_and_position_alone(self) -> None:
        """Also in other processes and versions: workers of two versions answer one request together."""
        draws = [
            [Sampling(temperature=1.0, seed=seed).choose(torch.zeros(1000), position) for position in range(50)]
            for seed in (42, 43)
        ]
        assert draws[0][:5] == [490, 173, 287, 334, 90]
        assert draws[0] != draws[1]
        assert len(set(draws[0])) > 40


class WatchedModel(LlamaModel):
    """Notes the steps' threads and the decode batches' sizes. A fault: while the gate is closed, every step waits."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, weights)
        self.gate = Event()
        self.gate.set()
        self.threads: set[int] = set()
        self.batches: list[int] = []
        self.row_counts: set[int] = set()

    def forward(self, token_ids: Sequence[int], start: int, pages: Pages) -> torch.Tensor:
        self._wait()
        return super().forward(token_ids, start, pages)

    def forward_batch(self, chunks: Sequence[Chunk], *, row_count: int) -> torch.Tensor:
        self._wait()
        self.batches.append(len(chunks))
        self.row_counts.add(row_count)
        return super().forward_batch(chunks, row_count=row_count)

    def _wait(self) -> None:
        self.threads.add(get_ident())
        assert self.gate.wait(timeout=WAIT_S), "the test never opened the gate"


@pytest.fixture
def model(tiny: Model) -> WatchedModel:
    return WatchedModel(*read_checkpoint(tiny.checkpoint))


def engine_of(
    model: LlamaModel,
    *,
    block_count: int = 32,
    shuffle_seed: int | None = 1,
    batch_size: int = 1,
    prefill_tokens: int = 512,
) -> Engine:
    """An engine with poison in its cache: reading a slot before it was written gives nonsense."""
    engine = Engine(
        model,
        block_count=block_count,
        block_size=4,
        batch_size=batch_size,
        prefill_tokens=prefill_tokens,
        shuffle_seed=shuffle_seed,
        reserve_timeout_s=WAIT_S,
    )
    for tensor in engine.kv_caches.values():
        tensor.fill_(torch.nan)
    return engine


async def answer_of(engine: Engine, prompt: list[int], max_tokens: int, sampling: Sampling = GREEDY) -> list[int]:
    async with aclosing(engine.generate(prompt, max_tokens=max_tokens, sampling=sampling)) as tokens:
        return [token async for token in tokens]


class TestEngine:
    @pytest.mark.parametrize("shuffle_seed", [None, 2])
    async def test_answers_as_transformers_does(
        self, tiny: Model, model: WatchedModel, shuffle_seed: int | None
    ) -> None:
        for length in (1, 3, 4, 5, 10):
            async with engine_of(model, shuffle_seed=shuffle_seed) as engine:
                assert await answer_of(engine, PROMPT[:length], 20) == tiny.greedy(PROMPT[:length], 20)
                assert engine.statistics().blocks_used == 0

    @pytest.mark.parametrize("prefill_tokens", [1, 3, 4, 9, 10, 11])
    async def test_a_prompt_is_computed_in_steps(self, tiny: Model, model: WatchedModel, prefill_tokens: int) -> None:
        async with (
            engine_of(model, prefill_tokens=prefill_tokens) as engine,
            engine.reserve(len(PROMPT)) as block_ids,
        ):
            told: list[int] = []
            assert [await engine.prefill(PROMPT, block_ids, computed=told.append)] == tiny.greedy(PROMPT, 1)
            assert told == list(range(prefill_tokens, len(PROMPT), prefill_tokens))
            assert engine.statistics().steps == len(told) + 1

    async def test_windows_are_those_of_transformers(self, tiny: Model, tiny_windowed: Model) -> None:
        async with Engine(load_model(tiny_windowed.checkpoint), block_count=16, block_size=4) as engine:
            answer = await answer_of(engine, PROMPT, 20)
        assert answer == tiny_windowed.greedy(PROMPT, 20) != tiny.greedy(PROMPT, 20)

    @pytest.mark.parametrize("batch_size", [1, 4])
    async def test_concurrent_requests_share_a_small_cache(
        self, tiny: Model, model: WatchedModel, batch_size: int
    ) -> None:
        prompts = [PROMPT[:length] for length in range(1, 10)]
        # Nine requests need four to six blocks each; twelve make most of them wait.
        async with engine_of(model, block_count=12, batch_size=batch_size) as engine:
            answers = await asyncio.gather(*(answer_of(engine, prompt, 12) for prompt in prompts))
            assert answers == [tiny.greedy(prompt, 12) for prompt in prompts]
            assert (engine.statistics().blocks_free, engine.statistics().blocks_used) == (12, 0)

    async def test_a_cancelled_request_keeps_its_blocks_until_its_step_has_ended(self, model: WatchedModel) -> None:
        model.gate.clear()
        async with engine_of(model) as engine:
            request = asyncio.create_task(answer_of(engine, PROMPT, 20), name="request")
            await asyncio.sleep(0)
            assert engine.statistics().steps == 1
            for _ in range(3):
                request.cancel()
                await asyncio.sleep(0)
                assert not request.done()
                assert engine.statistics().blocks_used > 0
            model.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await request
            assert engine.statistics().blocks_used == 0

    async def test_a_stream_closed_early_gives_its_blocks_back(self, model: WatchedModel) -> None:
        async with engine_of(model) as engine:
            async with aclosing(engine.generate(PROMPT, max_tokens=20)) as tokens:
                await anext(tokens)
                assert engine.statistics().blocks_used == blocks_for(len(PROMPT) + 20, 4)
            assert engine.statistics().blocks_used == 0

    async def test_requests_join_and_leave_the_batch_by_themselves(self, tiny: Model, model: WatchedModel) -> None:
        """All steps run in one thread, which is not the loop's."""
        lengths = [4, 9, 14, 6, 12]
        right = [tiny.greedy(PROMPT, length) for length in lengths]
        async with engine_of(model, batch_size=3, block_count=64) as engine:
            assert await asyncio.gather(*(answer_of(engine, PROMPT, length) for length in lengths)) == right
        # Every answer but for its first token, which the prefill gives, comes from batches; many of them are full.
        assert sum(model.batches) == sum(len(answer) - 1 for answer in right)
        assert max(model.batches) == 3
        assert len(model.batches) < sum(model.batches) * 2 / 3
        # However few they are, the matrices have the same shape: so company does not change the rounding.
        assert model.row_counts == {3}
        assert len(model.threads - {get_ident()}) == len(model.threads) == 1

    def test_company_does_not_change_a_bit(self, model: WatchedModel) -> None:
        def logits(prompts: Sequence[Sequence[int]]) -> torch.Tensor:
            """The first decode step of each, computed together."""
            shape = {"block_count": 40, "kv_head_count": 2, "block_size": 4, "head_dim": 8}
            cache = PagedKVCache(model.layer_names, **shape, dtype=torch.float32)
            pool = BlockPool(40)
            chunks = []
            for prompt in prompts:
                pages = cache.pages(pool.allocate(blocks_for(len(prompt) + 1, 4)))
                model.forward(prompt, 0, pages)
                chunks.append(Chunk(token_ids=[7], start=len(prompt), pages=pages))
            return model.forward_batch(chunks, row_count=8)

        prompts = [PROMPT[:length] for length in (10, 3, 7, 1, 5)]
        together = logits(prompts)
        assert all(torch.equal(logits([prompt])[0], row) for prompt, row in zip(prompts, together, strict=True))
        assert torch.equal(logits(prompts[::-1]), together.flip(0))

    async def test_a_step_in_line_is_left_at_once_and_a_running_one_is_waited_for(
        self, tiny: Model, model: WatchedModel
    ) -> None:
        model.gate.clear()
        async with engine_of(model) as engine:
            async with engine.reserve(16) as first_blocks, engine.reserve(16) as second_blocks:
                running, in_line = (
                    asyncio.ensure_future(anext(engine.decode(3, position=0, block_ids=block_ids, max_tokens=5)))
                    for block_ids in (first_blocks, second_blocks)
                )
                await asyncio.sleep(0)
                running.cancel()
                in_line.cancel()
                await turns(5)
                assert in_line.cancelled()
                assert not running.done()
                model.gate.set()
                await asyncio.wait([running])
                assert running.cancelled()
            assert await answer_of(engine, PROMPT, 5) == tiny.greedy(PROMPT, 5)

    async def test_a_step_that_fails_fails_for_all_in_the_batch_and_the_engine_goes_on(
        self, tiny: Model, model: WatchedModel
    ) -> None:
        async with engine_of(model, batch_size=2) as engine, engine.reserve(8) as block_ids:
            tokens = [engine.decode(3, position=position, block_ids=block_ids, max_tokens=5) for position in (0, 900)]
            failed = await asyncio.gather(*map(anext, tokens), return_exceptions=True)
            assert any("outgrew its blocks" in str(error) for error in failed)
            assert await answer_of(engine, PROMPT, 5) == tiny.greedy(PROMPT, 5)

    @pytest.mark.parametrize(
        ("block_count", "token_count", "error"), [(5, 5 * 4 + 1, OutOfBlocksError), (40, 129, ValueError)]
    )
    async def test_a_request_that_can_never_fit_is_refused_at_once(
        self, model: WatchedModel, block_count: int, token_count: int, error: type[Exception]
    ) -> None:
        async with engine_of(model, block_count=block_count) as engine:
            with pytest.raises(error, match=str(token_count)):
                async with engine.reserve(token_count):
                    pass


@pytest.mark.thorough
@pytest.mark.timeout(600)
class TestRealModel:
    """Thorough: see `test_answers_as_transformers_does` of this file, with the tiny model."""

    async def test_the_real_model_answers_as_transformers_does(self, smollm2: Model) -> None:
        async with Engine(load_model(smollm2.checkpoint), block_count=24, block_size=8, shuffle_seed=3) as engine:
            for prompt in ("What is the capital of France?", "Name three prime numbers. 🙂"):
                token_ids = ChatTokenizer(smollm2.checkpoint).encode_chat(prompt)
                assert await answer_of(engine, token_ids, 12) == smollm2.greedy(token_ids, 12)

    def test_tokens_are_those_of_transformers(self, smollm2: Model) -> None:
        from paged_engine.weights import GGUF_NAME, package_directory
        from transformers import AutoTokenizer

        ours = ChatTokenizer(smollm2.checkpoint)
        theirs = AutoTokenizer.from_pretrained(package_directory(), gguf_file=GGUF_NAME)
        assert ours.token_count == len(theirs)
        for text in ("Größe, 日本, 🙂!", "In 1984, 3.14159  x", "def f(x):\n\treturn x\n", "<|im_start|>user\nhi"):
            token_ids = ours.encode_text(text)
            assert token_ids == theirs.encode(text, add_special_tokens=False)
            decoded = theirs.decode(token_ids, skip_special_tokens=True)
            assert ours.decode(token_ids) == decoded
            stream = TextStream(ours)
            pieces = [stream.push(token_id) for token_id in token_ids]
            assert pieces[-1] == decoded
            assert all(later.startswith(earlier) for earlier, later in pairwise(pieces))
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why 42?"}]
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.encode_text(ours.render(messages)) == theirs.encode(text, add_special_tokens=False)
