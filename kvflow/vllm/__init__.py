"""kvflow for vLLM, loaded by name: `kv_connector` "KVFlowConnector", `kv_connector_module_path` this module."""

from kvflow.vllm.connector import KVFlowConnector

__all__ = ["KVFlowConnector"]
