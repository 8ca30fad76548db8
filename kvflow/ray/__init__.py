"""kvflow in replicas of Ray Serve; needs the extra `kvflow[ray]`.

    replica    `ReplicaRuntime`: a runtime whose Config follows from its replica, and that drains in the time it has
    lifetime   `Lifetime`: one task owns what a replica has open
    metrics    records and statistics as `ray.serve.metrics`
    peers      the replicas behind a handle, connected before the first load from them
    llm        KVFlowConnector's backend in Ray Serve LLM: `register()`

Nothing of Ray is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvflow.ray.lifetime import Lifetime
    from kvflow.ray.metrics import RayMetrics
    from kvflow.ray.peers import keep_prewarmed, list_replicas
    from kvflow.ray.replica import ReplicaPlace, ReplicaRuntime

__all__ = ["Lifetime", "RayMetrics", "ReplicaPlace", "ReplicaRuntime", "keep_prewarmed", "list_replicas"]

_HOMES = {
    "Lifetime": "lifetime",
    "RayMetrics": "metrics",
    "ReplicaPlace": "replica",
    "ReplicaRuntime": "replica",
    "keep_prewarmed": "peers",
    "list_replicas": "peers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
