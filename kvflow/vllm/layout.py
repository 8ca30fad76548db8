"""vLLM's KV cache in kvflow's words: its groups of layers, their windows, and how its tensors are laid out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from kvflow.attention_backends import layout_for_backend, rows_of
from kvflow.checks import counted
from kvflow.core.cache.groups import CacheGroup, GroupFacts, GroupKind
from kvflow.core.cache.layout import CacheLayout, is_draft
from kvflow.core.cache.state import StateLayout
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER, NAMED_LAYERS_MAX, LayerCache
from kvflow.errors import ConfigError, LayoutError
from kvflow.vllm.state import slots_of, state_tensors

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_POOL = "vllm"  # all groups take their block ids from it
_UNUSUAL = (HiddenStateCacheSpec, SinkFullAttentionSpec)
_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Group:
    """One of vLLM's groups that is transferred: its place among a request's block tables, its layers and its facts."""

    at: int
    specs: Mapping[str, KVCacheSpec]
    """The spec of each layer."""
    facts: GroupFacts
    recycles: bool
    """True if its layers need less than the whole prompt, so that blocks of its beginning may be given back."""


def groups_of(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """The groups that vLLM transfers. ConfigError naming the layers of one that kvflow cannot carry."""
    transferred = kv_cache_config.transfer_group_ids
    found = tuple(_group(at, kv_cache_config.kv_cache_groups[at]) for at in transferred)
    if not found:
        raise ConfigError("KVFlowConnector: the model has no KV cache")
    return found


def _group(at: int, group: KVCacheGroupSpec) -> Group:
    whole = group.kv_cache_spec
    specs = {
        name: whole.kv_cache_specs[name] if isinstance(whole, UniformTypeKVCacheSpecs) else whole
        for name in group.layer_names
    }
    what = f"KVFlowConnector: layers {group.layer_names[0]}, ..."
    if group.host_resident:
        raise ConfigError(f"{what}: their cache is in the host's memory (HiSparse), which is not transferred")
    kinds = {_kind(spec, what) for spec in specs.values()}
    if len(kinds) != 1:
        raise ConfigError(f"{what}: one block table for several kinds of attention: {sorted(kinds)}")
    kind, window = next(iter(kinds))
    block_size = 1 if kind is GroupKind.STATE else whole.block_size
    facts = GroupFacts(name=f"group{at}", block_size=block_size, kind=kind, window=window)
    recycles = kind is not GroupKind.FULL or any(_hidden_window(spec) for spec in specs.values())
    return Group(at=at, specs=specs, facts=facts, recycles=recycles)


def _kind(spec: KVCacheSpec, what: str) -> tuple[GroupKind, int]:
    """The kind of a layer's attention, and its window in tokens as kvflow counts it."""
    if isinstance(spec, AttentionSpec) and spec.tokens_per_state != 1:
        raise ConfigError(f"{what}: tokens_per_state is {spec.tokens_per_state}: compressed tokens are not transferred")
    match spec:
        case MambaSpec() if spec.num_speculative_blocks:
            raise ConfigError(f"{what}: state with speculative decoding is not transferred")
        case MambaSpec():
            return GroupKind.STATE, 0
        case SlidingWindowSpec():
            # A token attends to itself, too, and vLLM keeps what the next one needs, not what the last one needed.
            return GroupKind.SLIDING, max(spec.sliding_window - 1, 1)
        case ChunkedLocalAttentionSpec():
            return GroupKind.CHUNKED, spec.attention_chunk_size
        case FullAttentionSpec() if not isinstance(spec, _UNUSUAL):
            return GroupKind.FULL, 0
    raise ConfigError(f"{what}: {type(spec).__name__} is not transferred; known are full, sliding, chunked and state")


def _hidden_window(spec: KVCacheSpec) -> bool:
    """True if a layer attends to a window although its whole prompt is kept: the hybrid cache manager is off."""
    return isinstance(spec, FullAttentionSpec) and (
        spec.sliding_window is not None or spec.attention_chunk_size is not None
    )


def cache_groups(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[Group],
    vllm_config: VllmConfig,
    *,
    kv_format: str | None,
) -> list[CacheGroup]:
    """A rank's caches, as they are registered.

    Where kernels take smaller blocks than vLLM's, the kernels' are registered, several to one of vLLM's.
    Raises LayoutError if kvflow does not know how an attention backend lays out its blocks.
    """
    numbers = _layer_numbers(
        [name for group in groups for name in group.specs], vllm_config.model_config.get_total_num_hidden_layers()
    )
    found = []
    for group in groups:
        caches, split = {name: kv_caches[name] for name in group.specs if name in kv_caches}, 1
        if group.facts.kind is GroupKind.STATE:
            layers: dict[str, LayerCache] = {name: slots_of(cache, _state(group)) for name, cache in caches.items()}
            layout: StateLayout | list[CacheLayout] = StateLayout.infer(
                layers,
                state_tensors(
                    _state(group),
                    vllm_config.parallel_config.tensor_parallel_size,
                    model_groups=_model_groups(group, vllm_config),
                ),
                layer_indices=[numbers[name] for name in layers],
            )
        else:
            caches = {name: _attention(name, cache, group, vllm_config) for name, cache in caches.items()}
            layers, split = {**caches}, _split(caches, group)
            layout = [
                _layout_of(same, backend, group.facts.block_size // split, vllm_config, kv_format, numbers)
                for backend, same in _alike(caches, vllm_config)
            ]
        found.append(
            CacheGroup(
                group.facts.name,
                layers,
                layout,
                window=group.facts.window or None,
                kind=group.facts.kind,
                pool=_POOL,
                split=split,
            )
        )
    return found


def _layer_numbers(names: Sequence[str], model_layers: int | None = None) -> dict[str, int]:
    """Number each layer as the other engine does, whatever other layers are there: a stage of a pipeline has some, and
    a draft model may be on one side only.

    The number is that in the layer's name. Layers of one number, such as an attention and the indexer beside it, are
    told apart by the order of their names. A draft model's layers are numbered apart: their names say so, or their
    numbers go on behind the model's own, of which there are `model_layers`.

    Raises:
        LayoutError: more layers than there are numbers for.
    """
    by_number: defaultdict[tuple[bool, int], list[str]] = defaultdict(list)
    for name in sorted(names):
        number = extract_layer_index(name)
        draft = is_draft(name) or (model_layers is not None and number >= model_layers)
        by_number[draft, number].append(name)
    alike_max = FIRST_DRAFT_LAYER // NAMED_LAYERS_MAX
    found = {}
    for (draft, number), alike in by_number.items():
        if number >= NAMED_LAYERS_MAX or len(alike) > alike_max:
            counts = f"expected numbers below {NAMED_LAYERS_MAX}, and {counted(alike_max, 'layer')} of one at most"
            raise LayoutError(f"layer {alike[0]!r}: {counts}, got {len(alike)} of number {number}")
        for nth, name in enumerate(alike):
            found[name] = number + nth * NAMED_LAYERS_MAX + (FIRST_DRAFT_LAYER if draft else 0)
    return found


def _state(group: Group) -> MambaSpec:
    """The spec that all layers of a group with state have. LayoutError if they differ."""
    first, *others = group.specs.values()
    if not isinstance(first, MambaSpec) or any(other != first for other in others):
        raise LayoutError(f"layers {', '.join(group.specs)}: their state differs: {[first, *others]}")
    return first


def _model_groups(group: Group, vllm_config: VllmConfig) -> int | None:
    """Mamba 2's groups of heads in the model, which a rank's shapes do not tell where one group is on all ranks."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(group.specs))
    found = {getattr(getattr(layer, "norm", None), "n_groups", None) for layer in layers.values()}
    return found.pop() if len(found) == 1 else None


def _attention(name: str, cache: torch.Tensor, group: Group, vllm_config: VllmConfig) -> torch.Tensor:
    """A layer's cache as its backend has it, with a dtype that tells what the bytes are."""
    if vllm_config.model_config.use_mla and cache.dim() == 4 and cache.shape[1] == 1:
        cache = cache.squeeze(1)
    if group.facts.block_size % cache.shape[-2]:
        raise LayoutError(
            f"layer {name!r}: a block has {counted(group.facts.block_size, 'token')}, and its kernels have blocks of "
            f"{cache.shape[-2]}, which do not divide it"
        )
    dtype = _FP8.get(str(vllm_config.cache_config.cache_dtype)) if cache.dtype is torch.uint8 else None
    return cache if dtype is None else cache.view(dtype)


def _split(caches: Mapping[str, torch.Tensor], group: Group) -> int:
    """Blocks of a group's kernels that are one of vLLM's: all its layers have the same, or one is refused."""
    return max((group.facts.block_size // cache.shape[-2] for cache in caches.values()), default=1)


def _alike(
    caches: Mapping[str, torch.Tensor], vllm_config: VllmConfig
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Layers of one group by backend and shape, which one layout describes."""
    found: defaultdict[tuple[str, torch.Size, torch.dtype], dict[str, torch.Tensor]] = defaultdict(dict)
    for name, cache in caches.items():
        (backend,) = get_current_attn_backends(vllm_config, [name])
        found[backend.get_name(), cache.shape, cache.dtype][name] = cache
    for (backend_name, _, _), same in found.items():
        yield backend_name, same


def _layout_of(
    caches: dict[str, torch.Tensor],
    backend: str,
    block_size: int,
    vllm_config: VllmConfig,
    kv_format: str | None,
    numbers: Mapping[str, int],
) -> CacheLayout:
    if kv_format is None and backend == "CPU_ATTN":
        kv_format = _cpu_format(caches, vllm_config)
    elif kv_format is None:
        kv_format = _quantized_format(backend, vllm_config)
    return layout_for_backend(
        caches,
        backend=backend,
        block_size=block_size,
        engine_version=vllm.__version__,
        kv_format=kv_format,
        layer_indices=[numbers[name] for name in caches],
    )


def _cpu_format(kv_caches: dict[str, torch.Tensor], vllm_config: VllmConfig) -> str | None:
    """CPU kernels order the bytes of a block as their instruction set likes it."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(kv_caches))
    found = {getattr(layer, "isa", None) for layer in layers.values()}
    formats = [name for row in rows_of("CPU_ATTN", vllm.__version__) for name in row.kv_formats]
    return next((name for name in formats if found == {name.rpartition("_")[2]}), None)


def _quantized_format(backend: str, vllm_config: VllmConfig) -> str | None:
    """Meaning of a quantized cache's bytes, where vLLM's name for the cache's dtype is the table's name for it."""
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    known = {name for row in rows_of(backend, vllm.__version__) for name in (*row.kv_formats, *row.byte_formats)}
    return cache_dtype if get_kv_quant_mode(cache_dtype).value and cache_dtype in known else None
