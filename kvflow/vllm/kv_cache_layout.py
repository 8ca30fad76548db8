"""Translates vLLM's description of its KV cache for kvflow: groups of layers, windows, tensor layouts."""

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
)

from kvflow.attention_backends import layout_for_backend, rows_of
from kvflow.checks import counted
from kvflow.core.cache.groups import CacheGroup, GroupFacts, GroupKind
from kvflow.core.cache.layout import PLAIN, CacheLayout, is_draft
from kvflow.core.cache.state import StateLayout
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER, NAMED_LAYERS_MAX, LayerCache
from kvflow.errors import ConfigError, LayoutError
from kvflow.vllm.cache_dtypes import CacheDtype, cache_dtype_of
from kvflow.vllm.recurrent_state import slots_of, state_tensors

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_POOL = "vllm"  # all groups take block ids from the same pool
_COMPRESSED = ("tokens_per_state", "compress_ratio")  # of vLLM 0.29 and later, and of 0.28
_UNSUPPORTED_SPECS = (HiddenStateCacheSpec, SinkFullAttentionSpec)


@dataclass(frozen=True)
class Group:
    """A group of layers of vLLM's KV cache that is transferred.

    `index` is the group's index among all of vLLM's groups, and so among a request's block tables.
    """

    index: int
    specs: Mapping[str, KVCacheSpec]
    """vLLM's spec of each layer, by layer name."""
    facts: GroupFacts
    frees_blocks: bool
    """True if a layer of the group does not attend to the whole prompt, so that vLLM may free earlier blocks."""
    shards: int = 1
    """Number of ranks over which the tokens of a block are sharded."""

    @property
    def held_tokens(self) -> int:
        """Number of tokens of a block that one rank holds."""
        return self.facts.block_size // self.shards


def groups_of(kv_cache_config: KVCacheConfig, shards: int = 1) -> tuple[Group, ...]:
    """Return the groups of layers for which vLLM enables KV transfer.

    `shards`: number of ranks over which vLLM shards the tokens of a block (`extra_config.token_shards`). ConfigError if
    there are no groups, or if kvflow cannot transfer the layers of a group.
    """
    groups = kv_cache_config.kv_cache_groups
    transferred = getattr(kv_cache_config, "transfer_group_ids", range(len(groups)))  # vLLM 0.28 transfers all groups
    transferred_groups = tuple(_group(index, groups[index], shards) for index in transferred)
    if not transferred_groups:
        raise ConfigError("KVFlowConnector: the model has no KV cache")
    return transferred_groups


def _group(index: int, group: KVCacheGroupSpec, shards: int) -> Group:
    whole = group.kv_cache_spec
    specs = {
        name: whole.kv_cache_specs[name] if isinstance(whole, UniformTypeKVCacheSpecs) else whole
        for name in group.layer_names
    }
    what = f"KVFlowConnector: layers {group.layer_names[0]}, ..."
    if getattr(group, "host_resident", False):  # vLLM 0.30 and later
        raise ConfigError(f"{what}: their cache is in the host's memory (HiSparse), which is not transferred")
    kinds = {_kind(spec, what) for spec in specs.values()}
    if len(kinds) != 1:
        raise ConfigError(f"{what}: one block table for several kinds of attention: {sorted(kinds)}")
    kind, window = next(iter(kinds))
    block_size = 1 if kind is GroupKind.STATE else whole.block_size
    frees_blocks = kind is not GroupKind.FULL or any(_hidden_window(spec) for spec in specs.values())
    if shards > 1:
        if frees_blocks or not all(getattr(spec, "dcp_sharded", True) for spec in specs.values()):  # 0.28 shards all
            raise ConfigError(f"{what}: with --decode-context-parallel-size only full attention (MLA) is transferred")
        kind = GroupKind.SHARDED
    facts = GroupFacts(name=f"group{index}", block_size=block_size * shards, kind=kind, window=window)
    return Group(index=index, specs=specs, facts=facts, frees_blocks=frees_blocks, shards=shards)


def _kind(spec: KVCacheSpec, what: str) -> tuple[GroupKind, int]:
    """Return the kind of a layer's attention, and the window or chunk in tokens (0 if the layer has none).

    kvflow's sliding window does not count the current token, so it is one token shorter than vLLM's. ConfigError, with
    a message that begins with `what`, if kvflow cannot transfer such layers.
    """
    compressed = next((name for name in _COMPRESSED if getattr(spec, name, 1) != 1), None)
    if isinstance(spec, AttentionSpec) and compressed:
        tokens = getattr(spec, compressed)
        raise ConfigError(f"{what}: {compressed} is {tokens}: compressed tokens are not transferred")
    match spec:
        case MambaSpec() if spec.num_speculative_blocks:
            raise ConfigError(f"{what}: state with speculative decoding is not transferred")
        case MambaSpec():
            return GroupKind.STATE, 0
        case SlidingWindowSpec():
            # vLLM's window includes the token itself. vLLM keeps what the next token needs, not what the last needed.
            return GroupKind.SLIDING, max(spec.sliding_window - 1, 1)
        case ChunkedLocalAttentionSpec():
            return GroupKind.CHUNKED, spec.attention_chunk_size
        case FullAttentionSpec() if not isinstance(spec, _UNSUPPORTED_SPECS):
            return GroupKind.FULL, 0
    raise ConfigError(f"{what}: {type(spec).__name__} is not transferred; known are full, sliding, chunked and state")


def _hidden_window(spec: KVCacheSpec) -> bool:
    """Return True if a layer attends only to a window or chunk, but vLLM keeps the KV of the whole prompt for it.

    vLLM does so if its hybrid cache manager is off.
    """
    return isinstance(spec, FullAttentionSpec) and (
        spec.sliding_window is not None or spec.attention_chunk_size is not None
    )


def check_sharding(group: Group, vllm_config: VllmConfig) -> None:
    """Raise ConfigError if consecutive tokens of the group's blocks are on different ranks."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        interleave = parallel.cp_kv_cache_interleave_size
        if interleave != group.held_tokens:
            raise ConfigError(
                f"KVFlowConnector: --cp-kv-cache-interleave-size is {interleave}, supported with "
                f"--decode-context-parallel-size is the block size, {group.held_tokens}"
            )


def cache_groups(
    kv_caches: Mapping[str, torch.Tensor], groups: Sequence[Group], vllm_config: VllmConfig, *, kv_format: str | None
) -> list[CacheGroup]:
    """Return a registrable CacheGroup for each of `groups`, with this rank's tensors and their layout.

    `kv_caches` has each layer's tensor, by layer name. `kv_format` is the user's byte format, or None. If attention
    kernels use smaller blocks than vLLM, the kernels' blocks are registered. LayoutError if kvflow does not know how an
    attention backend lays out its blocks, ConfigError if the cache has a dtype that kvflow refuses, or if consecutive
    tokens of a block are on different ranks.
    """
    cache_dtype = cache_dtype_of(str(vllm_config.cache_config.cache_dtype))
    numbers = _layer_numbers(
        [name for group in groups for name in group.specs], vllm_config.model_config.get_total_num_hidden_layers()
    )
    registrable = []
    for group in groups:
        check_sharding(group, vllm_config)
        caches, split = {name: kv_caches[name] for name in group.specs if name in kv_caches}, 1
        if group.facts.kind is GroupKind.STATE:
            layers: dict[str, LayerCache] = {
                name: slots_of(cache, _state_spec(group)) for name, cache in caches.items()
            }
            layout: StateLayout | list[CacheLayout] = StateLayout.infer(
                layers,
                state_tensors(
                    _state_spec(group),
                    vllm_config.parallel_config.tensor_parallel_size,
                    model_groups=_model_groups(group, vllm_config),
                ),
                layer_indices=[numbers[name] for name in layers],
            )
        else:
            caches = {
                name: _attention_view(name, cache, group, vllm_config, cache_dtype) for name, cache in caches.items()
            }
            # Blocks of the kernels in a block of vLLM. If layers differ, `_layout_of` refuses those with fewer.
            split = max((group.held_tokens // cache.shape[-2] for cache in caches.values()), default=1)
            layers = {**caches}
            layout = [
                _layout_of(same, backend, group.held_tokens // split, vllm_config, kv_format, cache_dtype, numbers)
                for backend, same in _by_layout(caches, vllm_config)
            ]
        facts, window = group.facts, group.facts.window or None
        registrable.append(
            CacheGroup(facts.name, layers, layout, window=window, kind=facts.kind, pool=_POOL, split=split)
        )
    return registrable


def _layer_numbers(names: Sequence[str], model_layers: int | None = None) -> dict[str, int]:
    """Return a number for each layer name, the same on all engines with the model.

    Engines may have different layers, such as those of one pipeline stage, so the number is made from the index in the
    name. Names with the same index, such as those of an attention layer and its indexer, get different numbers, in
    alphabetical order. Layers of a draft model get a separate range of numbers: layers named as a draft's, or with an
    index of at least `model_layers`, the count of the model's own layers.

    Raises:
        LayoutError: the index in a name is too large, or too many names have the same index.
    """
    by_number: defaultdict[tuple[bool, int], list[str]] = defaultdict(list)
    for name in sorted(names):
        number = extract_layer_index(name)
        draft = is_draft(name) or (model_layers is not None and number >= model_layers)
        by_number[draft, number].append(name)
    alike_max = FIRST_DRAFT_LAYER // NAMED_LAYERS_MAX
    numbers = {}
    for (draft, number), alike in by_number.items():
        if number >= NAMED_LAYERS_MAX or len(alike) > alike_max:
            counts = f"expected numbers below {NAMED_LAYERS_MAX}, and {counted(alike_max, 'layer')} of one at most"
            raise LayoutError(f"layer {alike[0]!r}: {counts}, got {len(alike)} of number {number}")
        for nth, name in enumerate(alike):
            numbers[name] = number + nth * NAMED_LAYERS_MAX + (FIRST_DRAFT_LAYER if draft else 0)
    return numbers


def _state_spec(group: Group) -> MambaSpec:
    """Return the spec of the recurrent state of the layers of `group`. LayoutError if the layers differ."""
    first, *others = group.specs.values()
    if not isinstance(first, MambaSpec) or any(other != first for other in others):
        raise LayoutError(f"layers {', '.join(group.specs)}: their state differs: {[first, *others]}")
    return first


def _model_groups(group: Group, vllm_config: VllmConfig) -> int | None:
    """Return how many head groups a Mamba 2 layer of `group` has in the whole model; None if unknown.

    The shapes of a rank's tensors do not show this, since all ranks may have copies of a single head group.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(group.specs))
    counts = {getattr(getattr(layer, "norm", None), "n_groups", None) for layer in layers.values()}
    return counts.pop() if len(counts) == 1 else None


def _attention_view(
    name: str, cache: torch.Tensor, group: Group, vllm_config: VllmConfig, cache_dtype: CacheDtype
) -> torch.Tensor:
    """Return a view of a layer's cache tensor with its real dtype and the shape that its attention backend uses.

    vLLM stores fp8 as uint8. LayoutError if the kernels' block size does not divide the group's.
    """
    if vllm_config.model_config.use_mla and cache.dim() == 4 and cache.shape[1] == 1:
        cache = cache.squeeze(1)
    if group.held_tokens % cache.shape[-2]:
        raise LayoutError(
            f"layer {name!r}: a block has {counted(group.held_tokens, 'token')}, and its kernels have blocks of "
            f"{cache.shape[-2]}, which do not divide it"
        )
    stored_as_bytes = cache_dtype.values and cache.dtype is torch.uint8
    return cache.view(getattr(torch, cache_dtype.values)) if stored_as_bytes else cache


def _by_layout(
    caches: Mapping[str, torch.Tensor], vllm_config: VllmConfig
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Divide the layers in `caches` into sets with equal attention backend, tensor shape and dtype.

    One layout describes a set. Yield each set's backend name, and its tensors by layer name.
    """
    by_layout: defaultdict[tuple[str, torch.Size, torch.dtype], dict[str, torch.Tensor]] = defaultdict(dict)
    for name, cache in caches.items():
        (backend,) = get_current_attn_backends(vllm_config, [name])
        by_layout[backend.get_name(), cache.shape, cache.dtype][name] = cache
    for (backend_name, _, _), same in by_layout.items():
        yield backend_name, same


def _layout_of(
    caches: dict[str, torch.Tensor],
    backend: str,
    block_size: int,
    vllm_config: VllmConfig,
    kv_format: str | None,
    cache_dtype: CacheDtype,
    numbers: Mapping[str, int],
) -> CacheLayout:
    if kv_format is None and backend == "CPU_ATTN":
        kv_format = _cpu_format(caches, vllm_config)
    elif kv_format is None and cache_dtype.kv_format != PLAIN:
        # Layers in --kv-cache-dtype-skip-layers have values of the model's dtype, not bytes.
        in_bytes = next(iter(caches.values())).dtype in (torch.uint8, torch.int8)
        kv_format = cache_dtype.kv_format if in_bytes else None
    return layout_for_backend(
        caches,
        backend=backend,
        block_size=block_size,
        engine_version=vllm.__version__,
        kv_format=kv_format,
        layer_indices=[numbers[name] for name in caches],
    )


def _cpu_format(kv_caches: dict[str, torch.Tensor], vllm_config: VllmConfig) -> str | None:
    """Return kvflow's name for the byte format of blocks in vLLM's CPU attention backend; None if unknown.

    The format depends on the instruction set that the layers use.
    """
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(kv_caches))
    isas = {getattr(layer, "isa", None) for layer in layers.values()}
    formats = [name for row in rows_of("CPU_ATTN", vllm.__version__) for name in row.kv_formats]
    return next((name for name in formats if isas == {name.rpartition("_")[2]}), None)
