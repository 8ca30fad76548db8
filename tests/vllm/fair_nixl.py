"""vLLM's NixlConnector with a progress thread that does not spin: the baseline of comparisons on few cores.

NIXL's Python API sets no delay for the progress thread of UCX, so every agent keeps a core busy, idle or not. On a
machine of two cores that slows vLLM itself down, and flatters whoever is compared with it.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector

_DELAY_US = 1000


class FairNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Every agent of the process gets the delay; and the process keeps the cores that it had."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _slow_progress_threads()
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, cores)  # on a CPU the connector binds its process to some of them


def _slow_progress_threads() -> None:
    from nixl._api import nixl_agent

    bindings = nixl_agent.__init__.__globals__["nixlBind"]
    plain = bindings.nixlAgentConfig
    if getattr(plain, "delay_us", None) is not None:
        return

    class SlowedConfig(plain):  # type: ignore[misc, valid-type]
        delay_us = _DELAY_US

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, self.delay_us if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = SlowedConfig
