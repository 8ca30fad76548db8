"""Decode context parallelism of MLA models: vLLM's own schedulers, and the connectors of all ranks of two engines.

No attention backend of vLLM's CPU build computes with sharded tokens. So a stand-in computes: it writes each token of a
prompt where vLLM has it, by the comment at `ParallelConfig.cp_kv_cache_interleave_size`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import kvflow.vllm.worker_side as worker_side
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.errors import ConfigError
from kvflow.vllm import kv_cache_layout
from kvflow.vllm.connector import KVFlowConnector
from kvflow.vllm.extra_config import scheduling_of, token_shards
from kvflow.vllm.kv_cache_layout import cache_groups, groups_of
from tests.vllm.servers import KVFLOW, MODELS, NAME
from tests.vllm.test_models import prompt_of
from tests.vllm.test_settings import HEADS, cache_of, vllm_config

BLOCK_SIZE, BLOCKS, DIM = 16, 32, 8
LATENT: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": DIM, "dtype": torch.float32}
LAYER = "model.layers.0.self_attn.attn"


def config_of(role: str, tp_size: int, shards: int) -> VllmConfig:
    extra = {"model": NAME, "transport": "inproc"}
    config = EngineArgs(
        model=str(MODELS / "mla"),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=512,
        tensor_parallel_size=tp_size,
        decode_context_parallel_size=shards,
        cp_kv_cache_interleave_size=BLOCK_SIZE,
        max_num_seqs=8,
        async_scheduling=False,
        kv_transfer_config=KVTransferConfig(**{**KVFLOW, "kv_role": role, "kv_connector_extra_config": extra}),
    ).create_engine_config()
    # Set afterwards: for latents on a CPU without AMX vLLM changes all three, also when they are asked for.
    config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.max_num_batched_tokens = 64
    return config


class Engine:
    """An engine with ranks that compute at once: a token's latent is its position, from 1."""

    def __init__(self, stack: ExitStack, role: str, tp_size: int, shards: int) -> None:
        config = config_of(role, tp_size, shards)
        config.cache_config.num_gpu_blocks = BLOCKS
        self.shards, self.tp_size = shards, tp_size
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([LAYER], MLAAttentionSpec(**LATENT))])
        stack.enter_context(set_current_vllm_config(config))
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK_SIZE * shards)
        stack.callback(self.scheduler.shutdown)
        self.caches = [torch.zeros(BLOCKS, BLOCK_SIZE, DIM) for _ in range(tp_size)]
        self.workers = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_side, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
            backends = [SimpleNamespace(get_name=lambda: "FLASHMLA")]
            patch.setattr(kv_cache_layout, "get_current_attn_backends", lambda *_: backends)
            for rank, tensor in enumerate(self.caches):
                patch.setattr(worker_side, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
                worker = KVFlowConnector(config, KVConnectorRole.WORKER, cache)
                stack.callback(worker.shutdown)
                worker.register_kv_caches({LAYER: tensor})
                self.workers.append(worker)
        assert self.scheduler.connector is not None
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self.finished: dict[str, dict[str, Any] | None] = {}
        """Of each request that has ended, what the router gets."""
        self.loaded: dict[str, int] = {}
        """Of each request, how many tokens its blocks held when it was first computed."""
        self.cached: dict[str, int] = {}
        """Of each request that loads, how many tokens it has in its own cache."""
        self._sent, self._received = Counter[str](), Counter[str]()

    def add(self, name: str, prompt: list[int], params: dict[str, Any], *, answer: int = 1) -> None:
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args={"kv_transfer_params": params})
        hasher = get_request_block_hasher(BLOCK_SIZE * self.shards, sha256)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=hasher))

    def slots(self, name: str, stop: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Each of a request's first tokens, and its slot on each rank that has it."""
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        for token in range(stop):
            block, within = divmod(token, BLOCK_SIZE * self.shards)
            rank, slot = divmod(within, BLOCK_SIZE)
            held = self.caches if self.shards == 1 else [self.caches[rank]]
            yield token, [cache[ids[block], slot] for cache in held]

    def step(self) -> None:
        output = self.scheduler.schedule()
        step: Any = output.kv_connector_metadata
        self.cached |= {one.request_id: one.cached_tokens for one in step.step.receive}
        for worker in self.workers:
            worker.handle_preemptions(step)
            worker.bind_connector_metadata(step)
            worker.start_load_kv(None)  # type: ignore[arg-type]
        names = list(output.num_scheduled_tokens)
        for name in names:
            stop = self.scheduler.requests[name].num_computed_tokens
            self._compute(name, stop - output.num_scheduled_tokens[name], stop)
        for worker in self.workers:
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            assert not results.failed_recving
            self._sent.update(results.finished_sending or ())
            self._received.update(results.finished_recving or ())
            worker.clear_connector_metadata()
        told = KVConnectorOutput(
            finished_sending=self._by_all(self._sent), finished_recving=self._by_all(self._received)
        )
        sampled = [[7] if self._complete(name) else [] for name in names]
        ran = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=told)
        for outputs in self.scheduler.update_from_output(output, ran).values():
            self.finished |= {one.request_id: one.kv_transfer_params for one in outputs.outputs if one.finished}

    def _compute(self, name: str, start: int, stop: int) -> None:
        if name not in self.loaded:
            self.loaded[name] = start
        for token, slots in self.slots(name, stop):
            for slot in slots:
                if token >= start:
                    slot[:] = token + 1
                assert slot.unique().tolist() == [token + 1], f"{name}: token {token} of {start} before this step"

    def _by_all(self, told: Counter[str]) -> set[str]:
        return {name for name, ranks in list(told.items()) if ranks == self.tp_size and told.pop(name)}

    def _complete(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens

    def run(self, name: str) -> dict[str, Any] | None:
        """Step until the request has ended. Return what the router gets."""
        for _ in range(20_000):
            if name in self.finished:
                return self.finished[name]
            self.step()
        raise AssertionError(f"{name} has not ended: {self.scheduler.requests}")


@pytest.mark.parametrize("producer", [(2, 1), (2, 2)], ids=["from 1", "from 2"])
@pytest.mark.parametrize("consumer", [(2, 1), (2, 2), (4, 4)], ids=["to 1", "to 2", "to 4"])
def test_a_prompt_is_where_vllm_looks_for_it(producer: tuple[int, int], consumer: tuple[int, int]) -> None:
    """On every rank, whatever a block id stands for; also of short prompts, and behind a prefix that is cached."""
    init_none_hash(sha256)
    with ExitStack() as stack:
        prefill, decode = Engine(stack, "kv_producer", *producer), Engine(stack, "kv_consumer", *consumer)
        for tokens in (10, 90, 150):
            name, prompt = f"prompt of {tokens}", prompt_of(150)[:tokens]
            prefill.add(name, prompt, {"do_remote_decode": True})
            ticket = prefill.run(name)
            assert ticket is not None
            decode.add(name, prompt, ticket, answer=3)
            decode.run(name)
            assert decode.loaded[name] == tokens - 1, "all but the last token, which is computed again"
        block_tokens = BLOCK_SIZE * consumer[1]
        assert [*decode.cached.values()] == [0, 0, 90 // block_tokens * block_tokens]
        while prefill.scheduler.has_requests() or prefill.scheduler.has_finished_requests():
            prefill.step()
        free = [engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() for engine in (prefill, decode)]
        assert free == [BLOCKS - 1] * 2, "a block of each pool is vLLM's null block"


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "extra", "why"),
    [
        ({"tensor_parallel_size": 4}, {}, "it is not --tensor-parallel-size, 4"),
        ({"use_mla": False}, {}, r"the model has no latents \(MLA\)"),
        ({}, {"stock_peers": True}, "stock_peers is on"),
        ({}, {"share_prefixes": True}, "share_prefixes, prefix_peers or prefix_events is set"),
        ({}, {"prefix_peers": []}, "share_prefixes, prefix_peers or prefix_events is set"),
    ],
)
@pytest.mark.parametrize("role", KVConnectorRole)
def test_other_shards_are_refused_at_the_start(
    role: KVConnectorRole, changes: dict[str, Any], extra: dict[str, Any], why: str
) -> None:
    given = vllm_config(**extra)
    given.parallel_config.tensor_parallel_size = given.parallel_config.decode_context_parallel_size = 2
    given.model_config.use_mla = True
    assert extra or token_shards(given) == 2
    for name, value in changes.items():
        setattr(given.model_config if name == "use_mla" else given.parallel_config, name, value)
    with pytest.raises(
        ConfigError, match=f"^KVFlowConnector: --decode-context-parallel-size is 2, supported is 1: {why}"
    ):
        KVFlowConnector(given, role, cache_of(MLAAttentionSpec(**LATENT)))


def test_groups_count_the_tokens_of_all_ranks() -> None:
    (group,) = groups_of(cache_of(MLAAttentionSpec(**LATENT)), 4)
    assert group.facts == GroupFacts(name="group0", block_size=4 * BLOCK_SIZE, kind=GroupKind.SHARDED)
    assert (group.held_tokens, group.frees_blocks) == (BLOCK_SIZE, False)
    for spec in (FullAttentionSpec(**HEADS, sliding_window=96), FullAttentionSpec(**HEADS, dcp_sharded=False)):
        with pytest.raises(ConfigError, match="with --decode-context-parallel-size only full attention"):
            groups_of(cache_of(spec), 4)


def test_tokens_that_are_not_dealt_out_by_blocks_are_refused_with_both_values() -> None:
    given = vllm_config()
    given.parallel_config.cp_kv_cache_interleave_size = 1
    given.model_config.get_total_num_hidden_layers = lambda: 1
    given.cache_config.cache_dtype = "auto"
    groups = groups_of(cache_of(MLAAttentionSpec(**LATENT)), 4)
    given.parallel_config.decode_context_parallel_size = given.parallel_config.tensor_parallel_size = 4
    given.model_config.use_mla = True
    with pytest.raises(ConfigError, match=r"--cp-kv-cache-interleave-size is 1, supported .* is the block size, 16"):
        scheduling_of(given, groups)
    with pytest.raises(ConfigError, match=r"--cp-kv-cache-interleave-size is 1, supported .* is the block size, 16"):
        cache_groups({"layers.0": torch.zeros(BLOCKS, BLOCK_SIZE, DIM)}, groups, given, kv_format=None)
