"""A worker's role: one rank's runtime on a thread of its own, and vLLM's step calls, none of which waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvflow.blocking import Runtime
from kvflow.connector.step import Step
from kvflow.connector.worker import ConnectorWorker
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError
from kvflow.transport.base import is_staged
from kvflow.vllm.layout import layout_of
from kvflow.vllm.metrics import KVFlowStats
from kvflow.vllm.settings import config_of, extra_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class WorkerHalf:
    """Lives in one worker. `shutdown` ends its thread."""

    def __init__(self, vllm_config: VllmConfig, block_size: int) -> None:
        self._vllm_config = vllm_config
        self._block_size = block_size
        self._kv_format = extra_of(vllm_config).kv_format
        config = config_of(vllm_config, tp_rank=get_tensor_model_parallel_rank(), pp_rank=get_pp_group().rank_in_group)
        self._runtime = Runtime(config)
        self._worker = ConnectorWorker(self._runtime)
        self._stats = KVFlowStats()
        self._failed_blocks: set[int] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        device = next(iter(kv_caches.values())).device.type
        if is_staged(device, self._runtime.config.staging) and device != "cpu":
            # A step's saves begin while the device still computes them: copying then would copy unfinished blocks.
            raise ConfigError(f"KVFlowConnector: a cache on {device!r} cannot be staged in host buffers")
        layout = layout_of(kv_caches, self._vllm_config, block_size=self._block_size, kv_format=self._kv_format)
        self._runtime.open()
        self._runtime.register_kv_caches(kv_caches, layout)

    def introduction(self) -> Ticket:
        return self._worker.introduction()

    def begin_loads(self, step: Step) -> None:
        """Everything but the saves: nothing of it concerns blocks that this step computes."""
        self._worker.begin(msgspec.structs.replace(step, save=[]))

    def begin_saves(self, step: Step) -> None:
        """Once the step's forward passes have been submitted; tickets leave when their results are there."""
        self._worker.begin(Step(save=step.save))

    def results(self) -> KVConnectorTransferResults:
        found = self._worker.collect()
        self._stats = self._stats.aggregate(KVFlowStats.of(found.happenings))
        self._failed_blocks.update(block for failed in found.failed.values() for block in failed.block_ids)
        return KVConnectorTransferResults(
            finished_sending=set(found.sent), finished_recving=set(found.received), failed_recving=set(found.failed)
        )

    def take_failed_blocks(self) -> set[int]:
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_stats(self) -> KVFlowStats | None:
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, KVFlowStats()
        return taken

    def shutdown(self) -> None:
        self._runtime.close()
