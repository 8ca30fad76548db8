"""KVFlowConnector in Ray Serve LLM: a backend that sets the address at which each replica's workers listen.

    import kvflow.ray.llm

    kvflow.ray.llm.register()  # before the application is built
    app = build_pd_openai_app({"prefill_config": ..., "decode_config": ...})  # kv_connector: "KVFlowConnector"

The backend's base class and registry are internals of ray 2.60, which only this module uses. If they differ in another
version of Ray, `register` raises a ConfigError.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from kvflow.errors import ConfigError
from kvflow.hosts import ANY_V4, ANY_V6, address_at, is_v6

NAME = "KVFlowConnector"
WRITTEN_FOR = "2.60"
_INTERNALS = "ray.llm._internal.serve.engines.vllm.kv_transfer"


def register() -> None:
    """Register the backend with the Ray cluster that this process is connected to. Registering twice changes nothing.

    Raises:
        ConfigError: Ray Serve LLM is not installed, or its registry differs from ray 2.60.
    """
    factory = _ray_internal("factory", "KVConnectorBackendFactory", ("is_registered", "register_backend"))
    if not factory.is_registered(NAME):
        factory.register_backend(NAME, f"{__name__}:Backend")


def worker_settings(given: Mapping[str, Any], *, node_ip: str, head: str, workers: int) -> dict[str, Any]:
    """Return the user's `kv_connector_extra_config`, `given`, with an address at which vLLM workers listen.

    An address that the user has set stays. A single worker is on the replica's node, `node_ip`. Several `workers` may
    be on other nodes, so each finds its own address by its route to `head`, the address of the cluster's head node.
    """
    if "listen" in given:
        return dict(given)
    if workers == 1:
        return {**given, "listen": address_at(node_ip, 0)}
    return {"advertise_host": f"auto:{head}", **given, "listen": address_at(ANY_V6 if is_v6(head) else ANY_V4, 0)}


@cache
def _backend() -> Any:
    """Return kvflow's backend class for Ray Serve LLM, created at the first call, since its base classes are Ray's."""
    base = _ray_internal("base", "BaseConnectorBackend", ("setup", "kv_transfer_config"))
    protocol = _ray_internal("base", "DefaultPDProtocolMixin", ("prepare_prefill_request", "prepare_decode_request"))

    return type("Backend", (protocol, base), {"__module__": __name__, "setup": _setup})


def _setup(backend: Any) -> None:
    """Write into the backend's settings the address at which a replica's vLLM workers listen.

    No other setting is needed: vLLM makes the engine id, and tickets carry the ports.
    """
    import ray

    kwargs, transfer = backend.llm_config.engine_kwargs, backend.kv_transfer_config
    transfer["kv_connector_extra_config"] = worker_settings(
        transfer.get("kv_connector_extra_config") or {},
        node_ip=ray.util.get_node_ip_address(),
        head=ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]"),
        workers=kwargs.get("tensor_parallel_size", 1) * kwargs.get("pipeline_parallel_size", 1),
    )


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _backend()


def _ray_internal(module: str, name: str, needed: tuple[str, ...]) -> Any:
    try:
        import ray

        internal = getattr(importlib.import_module(f"{_INTERNALS}.{module}"), name)
        missing = [entry for entry in needed if not hasattr(internal, entry)]
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"Ray Serve LLM: {error}; kvflow.ray.llm is written for ray {WRITTEN_FOR}") from error
    if missing:
        raise ConfigError(
            f"Ray Serve LLM: {name} has no {', '.join(missing)} in ray {ray.__version__}; "
            f"kvflow.ray.llm is written for ray {WRITTEN_FOR}"
        )
    return internal
