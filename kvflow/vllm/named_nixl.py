"""KVFlowConnector under the name of vLLM's own connector, for routers that choose their protocol by that name.

Dynamo takes the connector's name out of vLLM's configuration, and refuses names that it does not know. With
`kv_connector` "NixlConnector" and `kv_connector_module_path` "kvflow.vllm.named_nixl" it hands tickets on, and vLLM
makes this class. vLLM then treats the engine as one with NixlConnector: it refuses routed experts, and on the CPU lays
out state of Mamba layers as that connector needs it ("DS"), so both sides of a hand-over need the same name.
"""

from __future__ import annotations

from kvflow.vllm.connector import KVFlowConnector

__all__ = ["NixlConnector"]


class NixlConnector(KVFlowConnector):
    """KVFlowConnector under another name."""
