"""vLLM's own scheduler and block pool, without a server: a prefix cache never names a block that holds something else.

What lies in each block is played: a step writes the tokens that it computes, each with all tokens before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvflow.connector.paged_prefix_cache import PagedPrefixCache
from kvflow.connector.scheduler import PagedGroup
from kvflow.prefix.keys import prefix_keys
from kvflow.prefix.prefix_cache import PinnedPrefix
from kvflow.vllm.connector import KVFlowConnector
from kvflow.vllm.engine_requests import tokens_of as marked_tokens
from kvflow.vllm.messages import KVFlowMetadata
from tests.vllm.servers import KVFLOW, MODELS, NAME

BLOCK_SIZE, CHUNK, WINDOW = 16, 48, 40
ANSWER = 7
"""The token that is sampled every time."""
Content = tuple[int, ...]
"""Content of a token's slot: all tokens up to it."""


def config_of(*, share: bool = True, **changes: Any) -> VllmConfig:
    transfer = {**KVFLOW, "kv_role": "kv_both", "kv_connector_extra_config": {"model": NAME, "share_prefixes": share}}
    return EngineArgs(
        model=str(MODELS / "full"),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        kv_transfer_config=KVTransferConfig(**transfer),
        **{"async_scheduling": False, "enable_prefix_caching": True, **changes},
    ).create_engine_config()


class Engine:
    """A scheduler, and a worker that has its steps in turn; `steps_behind` are computed late, as with async
    scheduling."""

    def __init__(
        self, config: VllmConfig, blocks: int, *, windows: bool, steps_behind: int, retention: int | None = None
    ) -> None:
        config.cache_config.num_gpu_blocks = blocks
        shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["layers.0"], FullAttentionSpec(**shape))]
        if windows:
            groups.append(KVCacheGroupSpec(["layers.1"], SlidingWindowSpec(**shape, sliding_window=WINDOW)))
        cache = KVCacheConfig(blocks, [], groups)
        if retention is not None:  # vLLM before 0.32 has no such field
            cache.prefix_cache_retention_interval = retention
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK_SIZE)
        assert isinstance(self.scheduler.connector, KVFlowConnector)
        self.connector = self.scheduler.connector
        self.prefix_cache = PagedPrefixCache([PagedGroup(group.facts) for group in self.connector._groups], BLOCK_SIZE)
        self.content: dict[int, list[Content | None]] = {}
        """For each block, the contents of its slots."""
        self.steps_behind = steps_behind
        self.in_flight: list[tuple[SchedulerOutput, list[Any], bool]] = []
        """Steps that are scheduled and not computed: what each writes, and whether it is the first after a reset."""
        self.was_reset = False
        self.reading: list[tuple[PinnedPrefix, list[int]]] = []
        """Runs that peers read, and their prompts."""
        self.revoked = 0
        self.prompts: list[list[int]] = []
        """The prompt and the answer of each request: the next turn of the conversation asks for both."""
        self.steps = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, name: str, prompt: list[int], answer: int, adapter: LoRARequest | None = None) -> None:
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        request = Request(name, prompt, sampling, None, lora_request=adapter, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self.prompts.append([*prompt, *[ANSWER] * answer])

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running: bool, connector: bool) -> None:
        """Reset the cache, if vLLM can. After the next step no earlier block is in the prefix cache."""
        before = self.pool.cached_block_hash_to_block
        self.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=connector)
        self.was_reset |= self.pool.cached_block_hash_to_block is not before

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.in_flight)

    def step(self) -> None:
        """Schedule a step. If more than `steps_behind` steps are not computed, compute the oldest."""
        self.steps += 1
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.in_flight.append((output, self._writes(output), self.was_reset))
            self.was_reset = False
        if self.in_flight and (len(self.in_flight) > self.steps_behind or not self.scheduler.has_requests()):
            self._compute(*self.in_flight.pop(0))

    def _writes(self, output: SchedulerOutput) -> list[Any]:
        """Return the writes of a step, by block and slot."""
        found = []
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            request, tables = self.scheduler.requests[name], self.scheduler.kv_cache_manager.get_block_ids(name)
            for at in range(starts[name], starts[name] + count):
                for table in tables:
                    block = table[at // BLOCK_SIZE]
                    if block != 0:
                        found.append((block, at % BLOCK_SIZE, name, at, request))
        return found

    def _compute(self, output: SchedulerOutput, writes: list[Any], was_reset: bool = False) -> None:
        assert isinstance(output.kv_connector_metadata, KVFlowMetadata)
        step = output.kv_connector_metadata.step
        for pinned in self.prefix_cache.remove_reused(step.reused):
            self.revoked += 1
            self.reading = [entry for entry in self.reading if entry[0] is not pinned]
            self.prefix_cache.unpin(pinned)
        if was_reset:
            self.content.clear()
        for block, slot, _, at, request in writes:
            tokens = tuple(request.all_token_ids[: at + 1])
            if len(tokens) <= at:  # a token that is sampled by a step that has not come back
                tokens = (*tokens, *([-1] * (at + 1 - len(tokens))))
            self.content.setdefault(block, [None] * BLOCK_SIZE)[slot] = tokens
        self.prefix_cache.add(step.cached_blocks, None)
        self.look()
        names = list(output.num_scheduled_tokens)
        sampled = [[ANSWER] if self._complete(name) else [] for name in names]
        index = {name: at for at, name in enumerate(names)}
        ran = ModelRunnerOutput(names, index, sampled, kv_connector_output=KVConnectorOutput())
        self.scheduler.update_from_output(output, ran)

    def _complete(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and request.num_computed_tokens >= request.num_tokens

    def look(self) -> None:
        """Check that the prefix cache names only blocks with the prompt's content, also while peers read them."""
        for pinned, prompt in self.reading:
            self.check(pinned, prompt)

    def ask(self, prompt: list[int], key_tokens: int = BLOCK_SIZE) -> PinnedPrefix | None:
        pinned = self.prefix_cache.match(prefix_keys(prompt, key_tokens), key_tokens)
        if pinned is not None:
            self.check(pinned, prompt)
            self.reading.append((pinned, prompt))
        return pinned

    def check(self, pinned: PinnedPrefix, prompt: list[int]) -> None:
        ids: Any = pinned.block_ids
        tables = [ids] if isinstance(ids[0], int) else ids
        for group, table in zip(self.connector._groups, tables, strict=True):
            first = group.facts.first_needed(pinned.num_tokens) // BLOCK_SIZE
            assert len(table) == pinned.num_tokens // BLOCK_SIZE - first
            for nth, block in enumerate(table, first):
                for slot in range(BLOCK_SIZE):
                    at = nth * BLOCK_SIZE + slot
                    held = self.content.get(block, [None] * BLOCK_SIZE)[slot]
                    assert held == tuple(prompt[: at + 1]), f"block {block} of token {at}"


@contextmanager
def engine_of(config: VllmConfig, blocks: int, **how: Any) -> Iterator[Engine]:
    with set_current_vllm_config(config):
        made = Engine(config, blocks, **{"windows": False, "steps_behind": 0, **how})
        yield made
        made.scheduler.shutdown()


def tokens_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(8, 2000) for _ in range(count)]


def run_all(engine: Engine) -> None:
    while engine.has_work():
        engine.step()
        assert engine.steps < 20_000


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize("windows", [False, True], ids=["full", "windows"])
@pytest.mark.parametrize("steps_behind", [0, 1], ids=["in turn", "steps_behind"])
@pytest.mark.parametrize("retention", [None, 0], ids=["dense", "sparse"])
@pytest.mark.parametrize("seed", range(4))
def test_no_run_is_of_blocks_that_hold_something_else(
    seed: int, retention: int | None, steps_behind: int, windows: bool, caching: bool
) -> None:
    """Prompts with common beginnings, in a cache too small for them: evicted, preempted, aborted, reset."""
    rng = random.Random(seed)
    stems = [tokens_of(rng, rng.randrange(60, 200)) for _ in range(3)]
    config = config_of(enable_prefix_caching=caching)
    if retention is not None and not windows:
        pytest.skip("only windows are retained sparsely")
    with engine_of(config, 40, windows=windows, steps_behind=steps_behind, retention=retention) as engine:
        free = engine.pool.get_num_free_blocks()
        found, longest = 0, 0
        for nth in range(60):
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(20, len(stem))] + tokens_of(rng, rng.randrange(1, 60))
            engine.add(f"r{nth}", prompt, rng.choice((1, 5, 40)))
            for _ in range(rng.randrange(0, 12)):
                engine.step()
                pinned = engine.ask(
                    rng.choice(engine.prompts), rng.choice((BLOCK_SIZE, 2 * BLOCK_SIZE, BLOCK_SIZE // 2))
                )
                found += pinned is not None
                longest = max(longest, 0 if pinned is None else pinned.num_tokens)
                while len(engine.reading) > 3:
                    engine.prefix_cache.unpin(engine.reading.pop(0)[0])
            if rng.random() < 0.15:
                engine.abort(f"r{nth}")
            if rng.random() < 0.1:
                engine.reset(running=rng.random() < 0.5, connector=rng.random() < 0.5)
        run_all(engine)
        assert found > 50
        assert longest >= 4 * BLOCK_SIZE
        assert engine.revoked > 0, "no block was reused that a peer read: this test has shown nothing"
        assert engine.pool.get_num_free_blocks() == free, "a block is kept for a peer"


def test_everything_that_the_pool_has_is_in_the_prefix_cache_too() -> None:
    """Also of an answer, for the next turn of a conversation. An idle engine reports its blocks like a busy one."""
    rng = random.Random(1)
    with engine_of(config_of(), 64) as engine:
        prompt = tokens_of(rng, 100)
        engine.add("a", prompt, 40)
        engine.step()
        assert engine.ask(prompt) is not None, "a chunk of it"
        run_all(engine)
        pinned = engine.ask([*prompt, *[ANSWER] * 40])
        assert pinned is not None
        assert pinned.num_tokens == 128  # of 139 tokens that were computed
        assert engine.ask(tokens_of(rng, 100)) is None


@pytest.mark.parametrize("steps_behind", [0, 1], ids=["in turn", "steps_behind"])
@pytest.mark.parametrize("answer", range(90, 90 + BLOCK_SIZE, 3))
def test_an_answer_longer_than_the_window_is_in_the_prefix_cache(answer: int, steps_behind: int) -> None:
    """The window has lost the answer's first blocks, of which a shorter prefix, or the whole answer, needs some."""
    rng = random.Random(answer)
    with engine_of(config_of(), 64, windows=True, steps_behind=steps_behind) as engine:
        prompt = tokens_of(rng, 50)
        engine.add("a", prompt, answer)
        run_all(engine)
        said = [*prompt, *[ANSWER] * answer]
        for length in (len(said) - 1, 2 * WINDOW + 25):
            pinned = engine.ask(said[:length])
            assert pinned is not None
            assert pinned.num_tokens == length // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("steps_behind", [0, 1], ids=["in turn", "steps_behind"])
def test_windows_of_an_answer_are_reused_last(steps_behind: int) -> None:
    """By default vLLM's own cache does not keep them, and vLLM would give them to the next request."""
    rng = random.Random(7)
    with engine_of(config_of(), 64, windows=True, steps_behind=steps_behind, retention=0) as engine:
        prompt = tokens_of(rng, 50)
        engine.add("a", prompt, 60)
        run_all(engine)
        for name in ("b", "c"):
            engine.add(name, tokens_of(rng, 100), 30)
            run_all(engine)
        pinned = engine.ask([*prompt, *[ANSWER] * 60])
        assert pinned is not None
        assert pinned.num_tokens == 96  # of 109 tokens that were computed


def test_a_reset_leaves_nothing_in_the_prefix_cache_and_takes_one_step_of_an_idle_engine() -> None:
    rng = random.Random(2)
    with engine_of(config_of(), 64) as engine:
        prompt = tokens_of(rng, 100)
        engine.add("a", prompt, 1)
        run_all(engine)
        pinned = engine.ask(prompt)
        assert pinned is not None
        assert not engine.has_work()
        assert engine.scheduler.reset_prefix_cache()
        assert engine.has_work(), "its workers have to be told"
        steps = engine.steps
        run_all(engine)
        assert engine.steps == steps + 1
        assert engine.revoked == 1
        assert engine.ask(prompt) is None


@pytest.mark.parametrize(
    "again",
    [LoRARequest("one", 1, "/one", load_inplace=True), LoRARequest("one", 2, "/one")],
    ids=["loaded in place", "unloaded and loaded"],
)
def test_prefixes_of_an_adapter_that_was_loaded_again_are_withdrawn_and_not_shared_again(again: LoRARequest) -> None:
    """Their keys are those of the old weights. All others are shared again when they are next computed or found."""
    rng, first = random.Random(5), LoRARequest("one", 1, "/one")
    with engine_of(config_of(), 64) as engine:
        prompt, other = tokens_of(rng, 100), tokens_of(rng, 100)
        request = Request("any", prompt, SamplingParams(), None, lora_request=first)
        keys = prefix_keys(marked_tokens(request, 100, picture_ids_from_content=True) or [], BLOCK_SIZE)
        engine.add("before", prompt, 1, first)
        engine.add("running", prompt, 40, first)
        engine.step()
        engine.step()
        found = engine.prefix_cache.match(keys, BLOCK_SIZE)
        assert found is not None
        for name, adapter in (("after", again), ("later", again), ("old flag", first)):
            engine.add(name, prompt, 1, adapter)
            run_all(engine)
            assert engine.prefix_cache.match(keys, BLOCK_SIZE) is None
        assert engine.revoked == 1
        engine.add("other", other, 1)
        run_all(engine)
        assert engine.ask(other) is not None


def test_readers_change_nothing_for_the_engine_s_own_requests() -> None:
    """The same requests through a small cache, with a reader of everything and without: the same steps."""

    def played(*, read: bool) -> tuple[list[dict[str, int]], int]:
        rng, steps = random.Random(3), []
        with engine_of(config_of(share=read), 30) as engine:
            for nth in range(25):
                engine.add(f"r{nth}", tokens_of(rng, 150), 20)
                while engine.scheduler.has_requests() and (nth == 24 or len(engine.scheduler.requests) > 2):
                    output = engine.scheduler.schedule()
                    steps.append(dict(output.num_scheduled_tokens))
                    engine._compute(output, engine._writes(output))
                    if read:
                        for prompt in engine.prompts[-3:]:
                            engine.ask(prompt)
            assert engine.revoked > 20 or not read, "nothing was taken from a reader: this test has shown nothing"
            return steps, engine.pool.get_num_free_blocks()

    assert played(read=True) == played(read=False)


def test_nothing_is_told_where_nothing_is_shared() -> None:
    with engine_of(config_of(share=False), 64) as engine:
        engine.add("a", tokens_of(random.Random(4), 100), 4)
        while engine.scheduler.has_requests():
            output = engine.scheduler.schedule()
            assert isinstance(output.kv_connector_metadata, KVFlowMetadata)
            step = output.kv_connector_metadata.step
            assert (step.reused, step.cached_blocks, step.questions) == ((), [], [])
            engine._compute(output, [])
        assert not engine.pool._reuse_watchers
