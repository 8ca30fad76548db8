"""KVFlowConnector under the name of vLLM's own connector, for launchers and routers that know only that name.

Dynamo reads the connector's name from vLLM's configuration and refuses unknown names. vLLM makes this class if the
environment has `KVFLOW_AS_NIXL=1`, or with `kv_connector` "NixlConnector" and `kv_connector_module_path`
"kvflow.vllm.named_nixl". But vLLM then treats the engine like one with NixlConnector: it refuses routed experts, and on
the CPU it lays out the state of Mamba layers as NixlConnector needs it ("DS"). So both sides of a hand-over need the
same name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvflow.logs import logger_of
from kvflow.vllm.connector import KVFlowConnector
from kvflow.vllm.nixl_settings import has_nixls_name, switch_warning

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["NixlConnector"]

logger = logger_of("vllm.kvflow")


class NixlConnector(KVFlowConnector):
    """KVFlowConnector under the name of vLLM's own NixlConnector."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        if role is KVConnectorRole.SCHEDULER and has_nixls_name(transfer):  # one line for each engine
            logger.warning("%s", switch_warning(transfer.kv_connector_extra_config, os.environ))
        super().__init__(vllm_config, role, kv_cache_config)
