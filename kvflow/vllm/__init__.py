"""kvflow's connector for vLLM: `kv_connector` "KVFlowConnector", `kv_connector_module_path` "kvflow.vllm".

If kvflow is installed as a package, the connector's name is enough: vLLM finds `register` by the entry point
`vllm.general_plugins` and calls it in each process. So importing this module imports no heavy module of vLLM.

With the environment variable `KVFLOW_AS_NIXL=1` kvflow also has the name of vLLM's own NixlConnector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvflow.connector.as_nixl import acts_as_nixl

if TYPE_CHECKING:
    from kvflow.vllm.connector import KVFlowConnector

__all__ = ["KVFlowConnector", "register"]

_NAME = "KVFlowConnector"


def register() -> None:
    """Register the class KVFlowConnector with vLLM under its name and, with `KVFLOW_AS_NIXL`, under NixlConnector's.

    MultiConnector and vLLM's metrics find connectors only by name. ConfigError if `KVFLOW_AS_NIXL` is invalid.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvflow.vllm.nixl_settings import NIXL_NAMES

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "kvflow.vllm.connector", _NAME)
    if acts_as_nixl():
        for name in NIXL_NAMES:
            KVConnectorFactory._registry.pop(name, None)
            KVConnectorFactory.register_connector(name, "kvflow.vllm.named_nixl", NIXL_NAMES[0])


def __getattr__(name: str) -> Any:
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvflow.vllm.connector import KVFlowConnector

    register()
    return KVFlowConnector
