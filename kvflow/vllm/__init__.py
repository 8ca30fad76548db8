"""kvflow's connector for vLLM: `kv_connector` "KVFlowConnector", `kv_connector_module_path` "kvflow.vllm".

If kvflow is installed as a package, the connector's name is enough: vLLM finds `register` by the entry point
`vllm.general_plugins` and calls it in each process. So importing this module imports no heavy module of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvflow.vllm.connector import KVFlowConnector

__all__ = ["KVFlowConnector", "register"]

_NAME = "KVFlowConnector"


def register() -> None:
    """Register the class KVFlowConnector with vLLM under its name.

    MultiConnector and vLLM's metrics find connectors only by name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "kvflow.vllm.connector", _NAME)


def __getattr__(name: str) -> Any:
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvflow.vllm.connector import KVFlowConnector

    register()
    return KVFlowConnector
