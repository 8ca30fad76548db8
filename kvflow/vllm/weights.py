"""Follows the versions of vLLM's weights, which vLLM tells its engine core, and no connector.

A training loop names a version by `/finish_weight_update` or `/update_weight_version`; both end in
`EngineCore.set_weight_version` (vLLM 0.32 and later), in the process of the scheduler's connector object. kvflow
wraps that method: it passes the version to the workers' connectors, and then to the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, cast, runtime_checkable

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.engine.core import EngineCore

from kvflow import checks
from kvflow.core.bounds import WEIGHTS_CHARS_MAX


@runtime_checkable
class _FollowsWeights(Protocol):
    def note_new_weights(self, version: str) -> None: ...


def follow_weight_versions() -> None:
    """Have this process's engine core pass on each version of its weights. A second call does nothing."""
    told = getattr(EngineCore, "set_weight_version", None)
    if told is None or told.__module__ == __name__:
        return

    def set_weight_version(core: EngineCore, weight_version: str) -> None:
        connectors = list(_kvflow_in(core.scheduler.get_kv_connector()))
        if connectors:  # first, so that vLLM refuses a version that kvflow refuses
            checks.name(weight_version, "weight_version", most=WEIGHTS_CHARS_MAX)
            core.model_executor.collective_rpc(_tell_worker, args=(weight_version,))
        for connector in connectors:
            connector.note_new_weights(weight_version)
        told(core, weight_version)

    cast(Any, EngineCore).set_weight_version = set_weight_version


def _tell_worker(_: object, version: str) -> None:
    """Run by vLLM in each worker: pass `version` to the worker's connector."""
    if has_kv_transfer_group():
        for connector in _kvflow_in(get_kv_transfer_group()):
            connector.note_new_weights(version)


def _kvflow_in(connector: object) -> Iterator[_FollowsWeights]:
    """Yield `connector`, or those in a `MultiConnector`, if they are kvflow's."""
    for one in getattr(connector, "_connectors", (connector,)):
        if isinstance(one, _FollowsWeights):
            yield one
