"""kvflow for vLLM, loaded by name: `kv_connector` "KVFlowConnector", and `kv_connector_module_path` "kvflow.vllm".

An installed kvflow is a plugin of vLLM's, and the name alone will do: vLLM finds `register` by the entry point
`vllm.general_plugins` and calls it in each of its processes, so it imports nothing of vLLM's that is heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvflow.vllm.connector import KVFlowConnector

__all__ = ["KVFlowConnector", "register"]

_NAME = "KVFlowConnector"


def register() -> None:
    """Tell vLLM the connector's name. MultiConnector and vLLM's metrics find connectors by name only."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "kvflow.vllm.connector", _NAME)


def __getattr__(name: str) -> Any:
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvflow.vllm.connector import KVFlowConnector

    register()
    return KVFlowConnector
