"""A plugin of vLLM that lets its CPU kernels take small blocks only, as GPU kernels do: vLLM splits its own then."""

from __future__ import annotations

import os

VARIABLE = "KVFLOW_TEST_KERNEL_BLOCK"


def apply() -> None:
    """In every process of a server that has the variable set."""
    size = os.environ.get(VARIABLE)
    if size is None:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(  # type: ignore[method-assign]
        lambda kv_cache_spec=None: [int(size)]
    )
