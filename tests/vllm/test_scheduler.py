"""vLLM's own scheduler, without a server: whose blocks are whose while prompts flow and are preempted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvflow import Ticket
from kvflow.connector.parameters import producer_params
from kvflow.connector.step import Step
from kvflow.vllm.connector import KVFlowIntroduction
from tests.support.tests_support import any_ticket
from tests.vllm.servers import KVFLOW, MODELS, NAME
from tests.vllm.test_models import prompt_of

BLOCK_SIZE, CHUNK = 32, 64
INTRODUCTION = any_ticket(block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    transfer = {**KVFLOW, "kv_role": "kv_producer", "kv_connector_extra_config": {"model": NAME}}
    return EngineArgs(
        model=str(MODELS / "full"),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        enable_prefix_caching=False,
        async_scheduling=False,
        kv_transfer_config=KVTransferConfig(**transfer),
    ).create_engine_config()


class Site:
    """A scheduler with a cache of few blocks; workers that compute and send at once, and a reader for every lease."""

    def __init__(self, config: VllmConfig, blocks: int) -> None:
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layers.0"], spec)])
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK_SIZE)
        connector = self.scheduler.connector
        assert connector is not None
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): KVFlowIntroduction(INTRODUCTION)})
        self.offered: dict[str, list[int]] = {}
        """Of each request whose lease is open, the blocks that its readers read."""
        self.recalled: list[str] = []
        self.sent: set[str] = set()

    def add(self, name: str, tokens: int, answer: int) -> None:
        """A prompt that flows."""
        params = producer_params(Ticket.rendezvous(INTRODUCTION, f"secret-{name}"))
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args={"kv_transfer_params": params})
        self.scheduler.add_request(Request(name, prompt_of(tokens), sampling, None))

    def step(self) -> None:
        """One step. No lease that is open when it is computed may name a block that is another request's."""
        output = self.scheduler.schedule()
        assert output.kv_connector_metadata is not None
        self._carry_out(output.kv_connector_metadata.step)
        owners = {
            block: name
            for name in self.scheduler.requests
            for block in self.scheduler.kv_cache_manager.get_block_ids(name)[0]
        }
        for name, blocks in self.offered.items():
            for block in blocks:
                assert owners.get(block, name) == name, f"{name} offers block {block}, which {owners[block]} has now"
        names = list(output.num_scheduled_tokens)
        sampled = [[7] if self._complete(name) else [] for name in names]
        sent, self.sent = self.sent, set()
        told = KVConnectorOutput(finished_sending=sent)
        ran = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=told)
        self.scheduler.update_from_output(output, ran)

    def _carry_out(self, step: Step) -> None:
        for name in (*step.recall, *step.withdraw):
            self.offered.pop(name, None)
        self.recalled += step.recall
        for save in step.save:
            self.offered[save.request_id] = list(save.block_tables[0])
        for grow in step.grow:
            assert grow.request_id in self.offered, f"{grow.request_id} grows, and its lease is over"
            self.offered[grow.request_id] += grow.block_tables[0]
        for send in step.send:
            self.offered.pop(send.request_id, None)
            self.sent.add(send.request_id)

    def _complete(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens


@contextmanager
def site_of(config: VllmConfig, blocks: int) -> Iterator[Site]:
    with set_current_vllm_config(config):
        made = Site(config, blocks)
        yield made
        made.scheduler.shutdown()


@pytest.mark.parametrize(("second", "answer"), [(1600, 1), (480, 200)], ids=["in its prompt", "in its answer"])
def test_blocks_of_a_preempted_prompt_are_not_offered_any_more(config: VllmConfig, second: int, answer: int) -> None:
    """Two prompts that flow fill the cache; the first one's answer takes what the second one has."""
    full = -(-400 // BLOCK_SIZE) + -(-second // BLOCK_SIZE)
    with site_of(config, full + 1) as site:
        site.add("first", 400, 300)
        site.add("second", second, answer)
        steps = 0
        while site.scheduler.has_requests() and steps < 2000:
            site.step()
            steps += 1
        assert "second" in site.recalled, "there was room for both: this test has shown nothing"
        assert not site.offered
        assert site.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == full
