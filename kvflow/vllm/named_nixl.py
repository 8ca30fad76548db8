"""KVFlowConnector under the name of vLLM's own connector, for routers that choose their protocol by that name.

Dynamo reads the connector's name from vLLM's configuration and refuses unknown names. With `kv_connector`
"NixlConnector" and `kv_connector_module_path` "kvflow.vllm.named_nixl", vLLM makes this class and Dynamo passes tickets
on. But vLLM then treats the engine like one with NixlConnector: it refuses routed experts, and on the CPU it lays out
the state of Mamba layers as NixlConnector needs it ("DS"). So both sides of a hand-over need the same name.
"""

from __future__ import annotations

from kvflow.vllm.connector import KVFlowConnector

__all__ = ["NixlConnector"]


class NixlConnector(KVFlowConnector):
    """KVFlowConnector under the name of vLLM's own NixlConnector."""
