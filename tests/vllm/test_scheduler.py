"""vLLM's own scheduler, without a server: the owners of blocks while prompts flow and are preempted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvflow import Ticket
from kvflow.connector.parameters import producer_params
from kvflow.connector.step import Step
from kvflow.core.protocol.prompts import marked_by_keys, prompt_digest
from kvflow.errors import PromptMismatch
from kvflow.vllm.messages import KVFlowIntroduction, KVFlowWorkerReport
from tests.support.tests_support import any_ticket
from tests.vllm.servers import KVFLOW, MODELS, NAME
from tests.vllm.test_models import prompt_of

BLOCK_SIZE, CHUNK = 32, 64
INTRODUCTION = any_ticket(block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return config_of(kv_role="kv_producer")


def config_of(**changes: str) -> VllmConfig:
    transfer = {**KVFLOW, **changes, "kv_connector_extra_config": {"model": NAME}}
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
        """For each request with an open lease, the blocks that its readers read."""
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
        for name in step.send:
            self.offered.pop(name, None)
            self.sent.add(name)

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


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("flows", [False, True], ids=["named by its ticket", "found out by its load"])
@pytest.mark.parametrize("prompt_logprobs", [None, 1], ids=["", "without the prefix cache"])
def test_a_decode_request_without_its_picture_fails_whatever_the_policy(
    policy: str, flows: bool, prompt_logprobs: int | None
) -> None:
    """It would be computed from the picture's placeholders, and answered with HTTP 200."""
    prompt = prompt_of(100)
    config = config_of(kv_role="kv_consumer", kv_load_failure_policy=policy)
    with site_of(config, 16) as site:
        ticket = Ticket.rendezvous(INTRODUCTION, "remote")
        if not flows:
            digest = prompt_digest("remote", marked_by_keys(prompt, {3: [("mm", "red")]}))
            ticket = INTRODUCTION.without_leases(
                request_id="remote", block_ids=range(4), num_tokens=100, ttl_s=9.0, prompt_digest=digest
            )
        params = {"kv_transfer_params": ticket.to_params()}
        sampling = SamplingParams(max_tokens=4, prompt_logprobs=prompt_logprobs, extra_args=params)
        site.scheduler.add_request(Request("r", prompt, sampling, None))
        error, reasons, computed = PromptMismatch("request 'r': without its pictures", parts=("pictures",)), [], 0
        for _ in range(6):
            output = site.scheduler.schedule()
            assert output.kv_connector_metadata is not None
            names, told = list(output.num_scheduled_tokens), None
            computed += sum(output.num_scheduled_tokens.values())
            if output.kv_connector_metadata.step.receive:
                assert flows
                told = KVConnectorOutput(
                    finished_recving={"r"},
                    failed_recving={"r"},
                    kv_connector_worker_meta=KVFlowWorkerReport(refused=(("r", error),)),
                )
            ran = ModelRunnerOutput(names, dict.fromkeys(names, 0), [[] for _ in names], kv_connector_output=told)
            for outputs in site.scheduler.update_from_output(output, ran).values():
                reasons += [one.finish_reason for one in outputs.outputs if one.finish_reason is not None]
        if flows and prompt_logprobs:  # vLLM computes such a prompt, and asks nobody: no ticket is used
            assert computed
        else:
            assert (computed, reasons) == (0, [FinishReason.ERROR])
            assert not site.scheduler.requests
            assert site.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 15
