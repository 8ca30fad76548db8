"""The examples' engine: no block lost or given twice, and the same answers as transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from hypothesis import given
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
from paged_engine.cache import CacheShape, PagedKVCache, Pages
from paged_engine.model import Chunk
from paged_engine.tokenizer import ChatTokenizer, TextStream
from paged_engine.weights import MissingPackageError, load_model, read_checkpoint, require_modules
from tests_support import WAIT_S, turns

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Greedy = Callable[[Sequence[int], int], list[int]]

PROMPT = [5, 17, 3, 88, 41, 9, 60, 2, 33, 71]


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


class TestPages:
    @given(
        block_size=st.integers(min_value=1, max_value=5),
        cuts=st.sets(st.integers(min_value=1, max_value=12), max_size=4),
        seed=st.integers(min_value=0, max_value=99),
    )
    def test_what_is_written_in_pieces_is_read_in_order(self, block_size: int, cuts: set[int], seed: int) -> None:
        token_count = 13
        shape = CacheShape(block_count=40, kv_head_count=2, block_size=block_size, head_dim=4)
        cache = PagedKVCache(["layer"], shape, dtype=torch.float32)
        cache.tensors["layer"].fill_(torch.nan)
        block_ids = BlockPool(40, shuffle_seed=seed).allocate(blocks_for(token_count, block_size))
        pages = cache.pages(block_ids)
        keys = torch.arange(token_count * 8, dtype=torch.float32).view(token_count, 2, 4)
        bounds = [0, *sorted(cuts), token_count]
        for start, end in pairwise(bounds):
            pages.write("layer", start, keys[start:end], -keys[start:end])
        read_keys, read_values = pages.read("layer", token_count)
        assert torch.equal(read_keys, keys.transpose(0, 1))
        assert torch.equal(read_values, -keys.transpose(0, 1))
        untouched = sorted(set(range(40)) - set(block_ids))
        assert cache.tensors["layer"][:, untouched].isnan().all()


class TestSampling:
    # Not of subnormal numbers: a library in the same process may have torch take them for 0.
    @given(
        logits=st.lists(st.floats(-30, 30, width=32, allow_subnormal=False), min_size=1, max_size=9),
        position=st.integers(0, 9),
    )
    def test_greedy_is_the_likeliest_however_it_is_asked_for(self, logits: list[float], position: int) -> None:
        row = torch.tensor(logits)
        assert GREEDY.choose(row, position) == int(row.argmax())
        for sampling in (Sampling(temperature=2.0, top_p=0.0), Sampling(temperature=1e-300)):
            assert row[sampling.choose(row, position)] == row.max()

    @pytest.mark.parametrize(
        ("temperature", "top_p", "wanted"),
        [
            (1.0, 1.0, [0.5, 0.3, 0.15, 0.05]),
            (0.5, 1.0, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
            (1.0, 0.75, [0.5 / 0.8, 0.3 / 0.8, 0.0, 0.0]),
            (1.0, 0.79, [0.5 / 0.8, 0.3 / 0.8, 0.0, 0.0]),
            (1.0, 0.81, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
            (1.0, 0.1, [1.0, 0.0, 0.0, 0.0]),
        ],
    )
    def test_tokens_come_as_often_as_they_should(self, temperature: float, top_p: float, wanted: list[float]) -> None:
        order = [2, 0, 3, 1]  # the likeliest are not the first
        row = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()[order]
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=11)
        draws = [order[sampling.choose(row, position)] for position in range(4000)]
        for token, share in enumerate(wanted):
            assert draws.count(token) / len(draws) == pytest.approx(share, abs=0.03 if 0 < share < 1 else 0)

    def test_a_draw_depends_on_seed_and_position_alone(self) -> None:
        row = torch.zeros(1000)
        first, other = Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2)
        draws = [first.choose(row, position) for position in range(50)]
        assert draws == [first.choose(row, position) for position in range(50)]
        assert len(set(draws)) > 40
        assert draws != [other.choose(row, position) for position in range(50)]

    def test_it_is_the_same_in_other_processes_and_versions(self) -> None:
        """Workers of two versions answer one request together."""
        sampling = Sampling(temperature=1.0, seed=42)
        assert [sampling.choose(torch.zeros(1000), position) for position in range(5)] == [490, 173, 287, 334, 90]


class HeldModel(LlamaModel):
    """A fault: every step waits for the gate. It also notes the steps' threads and the decode batches' sizes."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, weights)
        self.gate = Event()
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


def engine_of(checkpoint: Path, **settings: Any) -> Engine:
    """An engine on that checkpoint with a poisoned cache."""
    return poisoned_engine(load_model(checkpoint), **settings)


def poisoned_engine(
    model: LlamaModel, *, block_count: int = 32, shuffle_seed: int | None = 1, batch_size: int = 1
) -> Engine:
    """An engine whose unwritten cache is poison: reading a slot before it was written gives nonsense."""
    engine = Engine(
        model,
        block_count=block_count,
        block_size=4,
        batch_size=batch_size,
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
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 10])
    @pytest.mark.parametrize("shuffle_seed", [None, 1, 2])
    def test_answers_as_transformers_does(
        self, tiny: tuple[Path, Greedy], run: Run, length: int, shuffle_seed: int | None
    ) -> None:
        checkpoint, greedy = tiny

        async def scenario() -> None:
            async with engine_of(checkpoint, shuffle_seed=shuffle_seed) as engine:
                assert await answer_of(engine, PROMPT[:length], 20) == greedy(PROMPT[:length], 20)
                assert engine.statistics().blocks_used == 0

        run(scenario())

    @pytest.mark.parametrize("batch_size", [1, 4])
    def test_concurrent_requests_share_a_small_cache(
        self, tiny: tuple[Path, Greedy], run: Run, batch_size: int
    ) -> None:
        checkpoint, greedy = tiny
        prompts = [PROMPT[:length] for length in range(1, 10)]

        async def scenario() -> None:
            # Nine requests need four to six blocks each; twelve make most of them wait.
            async with engine_of(checkpoint, block_count=12, batch_size=batch_size) as engine:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(answer_of(engine, prompt, 12)) for prompt in prompts]
                assert [task.result() for task in tasks] == [greedy(prompt, 12) for prompt in prompts]
                assert (engine.statistics().blocks_free, engine.statistics().blocks_used) == (12, 0)

        run(scenario())

    @pytest.mark.parametrize("batch_size", [1, 4])
    def test_company_does_not_change_what_is_drawn(self, tiny: tuple[Path, Greedy], run: Run, batch_size: int) -> None:
        samplings = [Sampling(temperature=1.5, seed=seed) for seed in range(4)]

        async def scenario() -> None:
            async with engine_of(tiny[0], batch_size=batch_size, block_count=64) as engine:
                alone = [await answer_of(engine, PROMPT, 12, sampling) for sampling in samplings]
                together = await asyncio.gather(
                    *(answer_of(engine, PROMPT, 12, sampling) for sampling in (*samplings, GREEDY))
                )
                assert together == [*alone, tiny[1](PROMPT, 12)]
                assert len({tuple(answer) for answer in together}) == 5

        run(scenario())

    def test_decode_continues_from_blocks_that_another_engine_filled(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        checkpoint, greedy = tiny

        async def scenario() -> None:
            async with (
                engine_of(checkpoint, shuffle_seed=1) as prefill,
                engine_of(checkpoint, shuffle_seed=2) as decode,
                prefill.reserve(len(PROMPT)) as theirs,
                decode.reserve(len(PROMPT) + 20) as ours,
            ):
                first = await prefill.prefill(PROMPT, theirs)
                for name, cache in decode.kv_caches.items():
                    cache[:, ours[: len(theirs)]] = prefill.kv_caches[name][:, theirs]
                decoding = decode.decode(first, position=len(PROMPT), block_ids=ours, max_tokens=19)
                async with aclosing(decoding) as tokens:
                    assert [first, *[token async for token in tokens]] == greedy(PROMPT, 20)

        run(scenario())

    def test_a_cancelled_request_keeps_its_blocks_until_its_step_has_ended(
        self, tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        checkpoint, _ = tiny

        async def scenario() -> None:
            model = HeldModel(*read_checkpoint(checkpoint))
            async with poisoned_engine(model) as engine:
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

        run(scenario())

    def test_a_stream_closed_early_gives_its_blocks_back(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        checkpoint, _ = tiny

        async def scenario() -> None:
            async with engine_of(checkpoint) as engine:
                async with aclosing(engine.generate(PROMPT, max_tokens=20)) as tokens:
                    await anext(tokens)
                    assert engine.statistics().blocks_used == blocks_for(len(PROMPT) + 20, 4)
                assert engine.statistics().blocks_used == 0

        run(scenario())

    def test_the_model_runs_in_one_thread_that_is_not_the_loops(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        model = HeldModel(*read_checkpoint(tiny[0]))
        model.gate.set()

        async def scenario() -> None:
            async with poisoned_engine(model) as engine, asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(answer_of(engine, PROMPT, 5))
            assert len(model.threads) == 1
            assert get_ident() not in model.threads

        run(scenario())

    def test_requests_join_and_leave_the_batch_by_themselves(self, tiny: tuple[Path, Greedy], run: Run) -> None:
        checkpoint, greedy = tiny
        lengths = [4, 9, 14, 6, 12]
        model = HeldModel(*read_checkpoint(checkpoint))
        model.gate.set()

        async def scenario() -> None:
            async with poisoned_engine(model, batch_size=3, block_count=64) as engine:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(answer_of(engine, PROMPT, length)) for length in lengths]
                assert [task.result() for task in tasks] == [greedy(PROMPT, length) for length in lengths]

        run(scenario())
        # Every answer but for its first token, which the prefill gives, comes from batches; many of them are full.
        assert sum(model.batches) == sum(len(greedy(PROMPT, length)) - 1 for length in lengths)
        assert max(model.batches) == 3
        assert len(model.batches) < sum(model.batches) * 2 / 3
        # However few they are, the matrices have the same shape: so company does not change the rounding.
        assert model.row_counts == {3}

    def test_company_does_not_change_a_bit(self, tiny: tuple[Path, Greedy]) -> None:
        model = load_model(tiny[0])

        def logits(prompts: Sequence[Sequence[int]]) -> torch.Tensor:
            """The first decode step of each, computed together."""
            shape = CacheShape(block_count=40, kv_head_count=2, block_size=4, head_dim=8)
            cache = PagedKVCache(model.layer_names, shape, dtype=torch.float32)
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

    def test_a_step_in_line_is_left_at_once_and_a_running_one_is_waited_for(
        self, tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        checkpoint, greedy = tiny
        model = HeldModel(*read_checkpoint(checkpoint))

        async def scenario() -> None:
            async with poisoned_engine(model, batch_size=1) as engine:
                async with engine.reserve(16) as first_blocks, engine.reserve(16) as second_blocks:
                    steps = [
                        asyncio.ensure_future(anext(engine.decode(3, position=0, block_ids=block_ids, max_tokens=5)))
                        for block_ids in (first_blocks, second_blocks)
                    ]
                    await asyncio.sleep(0)
                    for step in steps:
                        step.cancel()
                    await turns(5)
                    running, in_line = steps
                    assert in_line.cancelled()
                    assert not running.done()
                    model.gate.set()
                    await asyncio.wait([running])
                    assert running.cancelled()
                assert await answer_of(engine, PROMPT, 5) == greedy(PROMPT, 5)

        run(scenario())

    def test_a_step_that_fails_fails_for_all_in_the_batch_and_the_engine_goes_on(
        self, tiny: tuple[Path, Greedy], run: Run
    ) -> None:
        checkpoint, greedy = tiny

        async def scenario() -> None:
            async with engine_of(checkpoint, batch_size=2) as engine, engine.reserve(8) as block_ids:
                tokens = [
                    engine.decode(3, position=position, block_ids=block_ids, max_tokens=5) for position in (0, 900)
                ]
                failed = await asyncio.gather(*map(anext, tokens), return_exceptions=True)
                assert any("outgrew its blocks" in str(error) for error in failed)
                assert await answer_of(engine, PROMPT, 5) == greedy(PROMPT, 5)

        run(scenario())

    @pytest.mark.parametrize(("token_count", "error"), [(5 * 4 + 1, OutOfBlocksError), (129, ValueError)])
    def test_a_request_that_can_never_fit_is_refused_at_once(
        self, tiny: tuple[Path, Greedy], run: Run, token_count: int, error: type[Exception]
    ) -> None:
        checkpoint, _ = tiny

        async def scenario() -> None:
            async with engine_of(checkpoint, block_count=5 if error is OutOfBlocksError else 40) as engine:
                with pytest.raises(error, match=str(token_count)):
                    async with engine.reserve(token_count):
                        pass

        run(scenario())


@pytest.mark.thorough
@pytest.mark.timeout(600)
class TestRealModel:
    """Thorough: see `test_answers_as_transformers_does` of this file, with the tiny model."""

    @pytest.mark.parametrize(
        "prompt",
        ["What is the capital of France?", "Write a haiku about memory.", "Name three prime numbers. 🙂"],
    )
    def test_the_real_model_answers_as_transformers_does(
        self, smollm2: tuple[Path, Greedy], run: Run, prompt: str
    ) -> None:
        checkpoint, greedy = smollm2
        token_ids = ChatTokenizer(checkpoint).encode_chat(prompt)

        async def scenario() -> list[int]:
            model = load_model(checkpoint)
            async with Engine(model, block_count=24, block_size=8, shuffle_seed=3) as engine:
                return await answer_of(engine, token_ids, 12)

        assert run(scenario()) == greedy(token_ids, 12)

    def test_tokens_are_those_of_transformers(self, smollm2: tuple[Path, Greedy]) -> None:
        from paged_engine.weights import GGUF_NAME, package_directory
        from transformers import AutoTokenizer

        ours = ChatTokenizer(smollm2[0])
        theirs = AutoTokenizer.from_pretrained(package_directory(), gguf_file=GGUF_NAME)
        assert ours.token_count == len(theirs)
        for text in ("Größe, 日本, 🙂!", "In 1984, 3.14159  x", "def f(x):\n\treturn x\n", "<|im_start|>user\nhi"):
            token_ids = ours.encode_text(text)
            assert token_ids == theirs.encode(text, add_special_tokens=False)
            assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why 42?"}]
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.encode_messages(messages) == theirs.encode(text, add_special_tokens=False)

    def test_streamed_text_grows_to_the_whole_text(self, smollm2: tuple[Path, Greedy]) -> None:
        tokenizer = ChatTokenizer(smollm2[0])
        token_ids = tokenizer.encode_text("Größe, 日本, 🙂!")
        stream = TextStream(tokenizer)
        pieces = [stream.push(token_id) for token_id in token_ids]
        assert pieces[-1] == "Größe, 日本, 🙂!"
        assert all(later.startswith(earlier) for earlier, later in pairwise(pieces))


def test_a_missing_package_is_named_with_the_cure() -> None:
    with pytest.raises(MissingPackageError, match=r"no_such_module.*pip install 'kvflow\[examples\]'"):
        require_modules("json", "no_such_module")
