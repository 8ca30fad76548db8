"""A rank of a stock engine without a server: worker and scheduler of the installed vLLM's own NixlConnector."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from kvflow.transport.nixl import native
from tests.support.ports import free_port
from tests.vllm.servers import MODELS

BLOCK_SIZE, NUM_BLOCKS = 32, 64
WITHIN_S = 60.0


class StockEngine:
    """A worker that has registered its cache, and a scheduler with its listener."""

    def __init__(self, port: int) -> None:
        os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        os.environ["VLLM_KV_CACHE_LAYOUT"] = "HND"
        transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", engine_id="stock")
        self.config = EngineArgs(
            model=str(MODELS / "full"),
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_model_len=1024,
            kv_transfer_config=transfer,
        ).create_engine_config()
        if hasattr(self.config.cache_config, "kv_cache_layout"):
            self.config.cache_config.kv_cache_layout = "LBHNC"
        model, parallel = self.config.model_config, self.config.parallel_config
        self.heads, size = model.get_num_kv_heads(parallel), model.get_head_size()
        self.names = [f"model.layers.{layer}.self_attn.attn" for layer in range(model.get_num_layers(parallel))]
        self.shape = NUM_BLOCKS, self.heads, BLOCK_SIZE, 2 * size
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=self.heads, head_size=size, dtype=torch.float32)
        cache = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(self.names, spec)])
        self.cache = self.new_cache()
        self.steps = 0
        native.load_verbs()  # before vLLM makes its agent
        with set_current_vllm_config(self.config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
            initialize_model_parallel(1, 1)
            self.worker = NixlPullConnectorWorker(self.config, "stock", cache)
            self.worker.register_kv_caches(self.cache)
            self.scheduler = NixlPullConnectorScheduler(self.config, "stock", cache)
        self.publish()

    @property
    def counts(self) -> bool:
        """True if this version counts its registrations (0.33 and later)."""
        return hasattr(self.worker, "restore_kv_caches")

    def new_cache(self) -> dict[str, torch.Tensor]:
        return {name: torch.rand(*self.shape) for name in self.names}

    def publish(self) -> None:
        """Hand the worker's metadata to the scheduler, as an engine does at its start and after it has woken."""
        self.scheduler.set_xfer_handshake_metadata({(0, 0): self.worker.xfer_handshake_metadata})

    def register_again(self) -> None:
        """Sleep and wake, each hook twice as in a GPU worker. NIXL's metadata changes, as it does with RDMA's keys."""
        self.worker.unregister_kv_caches()
        self.worker.unregister_kv_caches()
        more = torch.zeros(1 << 16)
        wrapper = self.worker.nixl_wrapper
        wrapper.register_memory(wrapper.get_reg_descs([(more.data_ptr(), more.nbytes, 0, "")], "DRAM"))
        self.worker.more = more
        for tensor in self.cache.values():
            tensor.copy_(torch.rand(*self.shape))
        self.worker.restore_kv_caches()
        self.worker.restore_kv_caches()
        self.publish()

    def offer(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Return the `kv_transfer_params` of a finished prefill request; its worker then holds the blocks."""
        request = SimpleNamespace(
            request_id=request_id,
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
            kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
            num_computed_tokens=num_tokens,
        )
        held, params = self.scheduler.request_finished(request, (list(block_ids),))
        assert held
        work = NixlConnectorMetadata()
        work.reqs_in_batch, work.reqs_to_send = {request_id}, {request_id: time.perf_counter() + WITHIN_S}
        self.worker.start_load_kv(work)
        return dict(params)

    def wait_freed(self, request_id: str) -> None:
        self._until(lambda sent, _: request_id in sent)

    def read(self, params: dict[str, Any], block_ids: Sequence[int]) -> None:
        """Load what `params` offer into the local blocks `block_ids`."""
        self.steps += 1
        name = f"read-{self.steps}"
        work = NixlConnectorMetadata()
        work.add_new_req_to_recv(name, (list(block_ids),), dict(params))
        self.worker.start_load_kv(work)
        self._until(lambda _, received: name in received)

    def _until(self, done: Any) -> None:
        end_s = time.monotonic() + WITHIN_S
        while not done(*self.worker.get_finished()):
            assert time.monotonic() < end_s
            self.worker.start_load_kv(NixlConnectorMetadata())

    def shown(self) -> NixlAgentMetadata:
        return msgspec.msgpack.decode(self.worker.xfer_handshake_metadata.agent_metadata_bytes, type=NixlAgentMetadata)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()
        del self.worker, self.scheduler
        gc.collect()  # NIXL's agent has to end before the process does
        destroy_model_parallel()
        destroy_distributed_environment()


@contextmanager
def stock_engine() -> Iterator[StockEngine]:
    """A stock engine; vLLM binds its process to one core, and leaves environment variables."""
    cores, environment = os.sched_getaffinity(0), dict(os.environ)
    made = StockEngine(free_port())
    try:
        yield made
    finally:
        made.close()
        os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(environment)
