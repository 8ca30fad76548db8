"""Which of kvflow's layouts vLLM has given a rank's KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvflow.core.cache.backends import layout_for_backend, rows_of
from kvflow.core.cache.layout import CacheLayout
from kvflow.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def block_size_of(kv_cache_config: KVCacheConfig) -> int:
    """Tokens of one block. ConfigError unless all layers keep the blocks of a whole prompt, and the same ones."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(type(spec).__name__ for spec in specs) or "none"
        raise ConfigError(f"KVFlowConnector: expected one KV cache group with full attention, the model has {kinds}")
    size: int = specs[0].block_size
    return size


def layout_of(
    kv_caches: dict[str, torch.Tensor], vllm_config: VllmConfig, *, block_size: int, kv_format: str | None
) -> CacheLayout:
    """The layout of a rank's caches. Raises LayoutError if kvflow does not know how its backend lays blocks out."""
    backends = sorted({backend.get_name() for backend in get_current_attn_backends(vllm_config, list(kv_caches))})
    if len(backends) != 1:
        raise LayoutError(f"attention backends: expected one for all layers, got {', '.join(backends)}")
    backend = backends[0]
    if kv_format is None and backend == "CPU_ATTN":
        kv_format = _cpu_format(kv_caches, vllm_config)
    return layout_for_backend(
        kv_caches, backend=backend, block_size=block_size, engine_version=vllm.__version__, kv_format=kv_format
    )


def _cpu_format(kv_caches: dict[str, torch.Tensor], vllm_config: VllmConfig) -> str | None:
    """CPU kernels order the bytes of a block as their instruction set likes it."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(kv_caches))
    found = {getattr(layer, "isa", None) for layer in layers.values()}
    formats = [name for row in rows_of("CPU_ATTN", vllm.__version__) for name in row.kv_formats]
    return next((name for name in formats if found == {name.rpartition("_")[2]}), None)
