"""KVFlowConnector: kvflow as vLLM's KV connector (KVConnectorBase_V1), for producers, consumers and both.

vLLM makes one connector object in its scheduler, and one in each worker. Each passes vLLM's calls on to its side:
`scheduler_side.SchedulerSide` or `worker_side.WorkerSide`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvflow.checks import counted
from kvflow.errors import ConfigError
from kvflow.vllm.extra_config import extra_of, token_shards
from kvflow.vllm.kv_cache_layout import groups_of
from kvflow.vllm.messages import KVFlowIntroduction, KVFlowMetadata
from kvflow.vllm.nixl_settings import settings_in
from kvflow.vllm.scheduler_side import SchedulerSide, scheduler_side_of
from kvflow.vllm.vllm_metrics import KVFlowPromMetrics, KVFlowStats
from kvflow.vllm.worker_side import WorkerSide, worker_side_of

try:  # vLLM 0.30 and later
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:
    KVConnectorTransferResults = None
try:  # vLLM 0.32 and later
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVFlowConnector(KVConnectorBase_V1, SupportsHMA):
    """kvflow as vLLM's KV connector: one object in vLLM's scheduler, and one in each worker."""

    _cache_hit_source = CacheHitSource and CacheHitSource.P2P
    _scheduler_side: SchedulerSide
    """In the scheduler only."""
    _worker_side: WorkerSide
    """In a worker only."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        self._groups = groups_of(kv_cache_config, token_shards(vllm_config))
        if KVConnectorTransferResults is None and len(self._groups) > 1:
            several = counted(len(self._groups), "group")
            raise ConfigError(f"KVFlowConnector: {several} of layers: vLLM before 0.30 cannot fail a load of several")
        extra = extra_of(vllm_config)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = scheduler_side_of(vllm_config, kv_cache_config, self._groups, extra)
        else:
            self._worker_side = worker_side_of(vllm_config, kv_cache_config, self._groups, extra)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the name of the cache layout that vLLM has to use: in a block, heads come before tokens.

        Then the bytes of a head in a block are contiguous, so a rank need not read the heads of other ranks. Return
        None for models with MLA: any layout will do.
        """
        return None if vllm_config.model_config is None or vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Return whether vLLM may sleep: kvflow unregisters the cache before, and registers it again afterwards.

        vLLM 0.33 and later ask this, and call `unregister_kv_caches` and `restore_kv_caches`. True for NIXL's backend
        UCX alone, with which vLLM's own NixlConnector sleeps, too.
        """
        return bool(settings_in(kv_transfer_config).get("nixl_backend", "UCX") == "UCX")

    def get_kv_connector_stats(self) -> KVFlowStats | None:
        """Return the statistics of this connector object since the last call; None if there are none."""
        side = self._side
        if side.stats.is_empty():
            return None
        taken, side.stats = side.stats, KVFlowStats()
        return taken

    def note_new_weights(self, version: str) -> None:
        """Note the version of vLLM's new weights, in either role (`kvflow.vllm.weights`): in the workers first."""
        self._side.note_new_weights(version)

    @property
    def _side(self) -> SchedulerSide | WorkerSide:
        return self._scheduler_side if self.role is KVConnectorRole.SCHEDULER else self._worker_side

    # --- the scheduler's role

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler_side.set_xfer_handshake_metadata_pp_aware(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler_side.bind_gpu_block_pool(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side.has_pending_push_work()

    def on_new_request(self, request: Request) -> None:
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_side.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished_all_groups(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(group.index for group in self._groups)

    def reset_cache(self) -> bool:
        self._scheduler_side.reset_cache()
        return True

    # --- the workers' role

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker_side.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker_side.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        self._worker_side.restore_kv_caches()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker_side.build_connector_worker_meta()

    def get_handshake_metadata(self) -> KVFlowIntroduction:
        return self._worker_side.get_handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._worker_side.handle_preemptions(cast(KVFlowMetadata, kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.role is KVConnectorRole.WORKER:
            self._worker_side.begin_step(self._metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker_side.start_load_kv(self._metadata.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: readers read the blocks directly from the cache."""

    def wait_for_save(self) -> None:
        self._worker_side.wait_for_save(self._metadata.step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker_side.collect(idle=self._idle)
        return KVConnectorTransferResults(
            finished_sending=results.sent - results.not_offered,
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """As `get_transfer_results`, for vLLM before 0.30, which recognizes a failed load by its blocks."""
        results = self._worker_side.collect(idle=self._idle)
        return results.sent - results.not_offered, set(results.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker_side.get_block_ids_with_load_errors()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker_side.shutdown()

    @property
    def _metadata(self) -> KVFlowMetadata:
        return cast(KVFlowMetadata, self._get_connector_metadata())

    @property
    def _idle(self) -> bool:
        """True if the engine computes nothing in this step."""
        return self.has_connector_metadata() and self._metadata.idle

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


def _log_as_vllm() -> None:
    """Pass kvflow's log lines to the handlers of vLLM's logger, unless the logger "kvflow" is already configured."""
    ours, vllms = logging.getLogger("kvflow"), logging.getLogger("vllm")
    if not ours.handlers and ours.level == logging.NOTSET:
        for handler in vllms.handlers:
            ours.addHandler(handler)
        ours.setLevel(vllms.level)
        ours.propagate = False
