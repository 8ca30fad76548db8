"""A plugin of vLLM that lets servers on a CPU sleep: they call the connector's hooks, as the workers of a GPU do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

VARIABLE = "KVFLOW_TEST_SLEEP"
_OTHER = 3.0  # what a cache holds whose memory was unmapped and is mapped again


def apply() -> None:
    """In every process of a server that has the variable set."""
    if VARIABLE not in os.environ:
        return
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    def unmap(worker: Any, *_: object, **__: object) -> None:
        for _ in range(2):
            get_kv_transfer_group().unregister_kv_caches()
        for cache in worker.model_runner.kv_caches:
            cache.fill_(_OTHER)

    def wake_up(worker: Any, tags: Sequence[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            for _ in range(2):
                get_kv_transfer_group().restore_kv_caches()

    CpuPlatform.is_sleep_mode_available = lambda _: True  # type: ignore[method-assign]
    CPUWorker.sleep = CPUWorker.discard = unmap  # type: ignore[method-assign]
    CPUWorker.wake_up = wake_up  # type: ignore[method-assign]
