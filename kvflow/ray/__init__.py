"""kvflow in replicas of Ray Serve; needs the extra `kvflow[ray]`.

    replica       `ReplicaRuntime`: a runtime configured from its replica, and drained in the replica's shutdown time
    lifetime      `Lifetime`: enters and leaves a context, such as a runtime, in one task
    ray_metrics   `RayMetrics`: records and statistics as `ray.serve.metrics`
    peers         `keep_prewarmed`: connects to a deployment's replicas before the first load from each
    llm           `register()`: the backend for KVFlowConnector in Ray Serve LLM

Ray is imported only when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvflow.ray.lifetime import Lifetime
    from kvflow.ray.peers import keep_prewarmed, list_replicas
    from kvflow.ray.ray_metrics import RayMetrics
    from kvflow.ray.replica import ReplicaPlace, ReplicaRuntime

__all__ = ["Lifetime", "RayMetrics", "ReplicaPlace", "ReplicaRuntime", "keep_prewarmed", "list_replicas"]

_MODULE_OF = {
    "Lifetime": "lifetime",
    "RayMetrics": "ray_metrics",
    "ReplicaPlace": "replica",
    "ReplicaRuntime": "replica",
    "keep_prewarmed": "peers",
    "list_replicas": "peers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
