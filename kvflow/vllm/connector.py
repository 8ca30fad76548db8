"""KVFlowConnector: kvflow as vLLM's KV connector (KVConnectorBase_V1), for producers, consumers and both.

vLLM makes one object in its scheduler and one in each worker. This one only says who answers which call: the
scheduler's role is `scheduler.SchedulerHalf`, the workers' is `worker.WorkerHalf`. A worker's step never waits for a
transfer, and transfers go on while no step runs.

What it refuses: models whose KV cache is not one group of full attention, and caches on a device that the transport
cannot reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvflow.connector.step import Step
from kvflow.core.protocol.ticket import Ticket
from kvflow.vllm.layout import block_size_of
from kvflow.vllm.metrics import KVFlowPromMetrics, KVFlowStats
from kvflow.vllm.scheduler import SchedulerHalf
from kvflow.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(frozen=True)
class KVFlowMetadata(KVConnectorMetadata):
    """One step's work, on its way from the scheduler to the workers."""

    step: Step


@dataclass(frozen=True)
class KVFlowIntroduction(KVConnectorHandshakeMetadata):
    """Who a worker is, on its way to the scheduler."""

    ticket: Ticket


class KVFlowConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Each method belongs to the role that KVConnectorBase_V1 says."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        block_size = block_size_of(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(vllm_config, block_size)
        else:
            self._worker = WorkerHalf(vllm_config, block_size)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads before tokens, where there are heads: a rank's share of them is contiguous in a block then."""
        return None if vllm_config.model_config is None or vllm_config.model_config.use_mla else "LBHNC"

    # --- the scheduler's role

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.introduce(cast(KVFlowIntroduction, entry).ticket for entry in metadata.values())

    def on_new_request(self, request: Request) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return KVFlowMetadata(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.ended(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request)

    def reset_cache(self) -> bool:
        """What blocks hold is not valid any more, after new weights for example: nobody may read it."""
        self._scheduler.withdraw_all()
        return True

    # --- the workers' role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        return KVFlowIntroduction(self._worker.introduction())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.begin_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled after its load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to save: readers take blocks from where they are."""

    def wait_for_save(self) -> None:
        self._worker.begin_saves(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    def get_kv_connector_stats(self) -> KVFlowStats | None:
        """Of the workers; the scheduler has none."""
        return self._worker.take_stats() if self.role is KVConnectorRole.WORKER else None

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.shutdown()

    @property
    def _step(self) -> Step:
        return cast(KVFlowMetadata, self._get_connector_metadata()).step

    # --- the frontend's

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFlowStats:
        return KVFlowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFlowPromMetrics:
        return KVFlowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
