"""How ranks of vLLM cut state: by the shapes that vLLM itself computes. No server is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.kv_cache_interface import MambaSpec

from kvflow.core.cache.state import StateLayout
from kvflow.errors import LayoutError
from kvflow.vllm.recurrent_state import slots_of, state_tensors


def mamba2(tp_size: int, groups: int) -> Any:
    return Shapes.mamba2_state_shape(
        intermediate_size=64,
        tp_world_size=tp_size,
        n_groups=groups,
        num_heads=8,
        head_dim=8,
        state_size=16,
        conv_kernel=4,
    )


def gated_delta_net(tp_size: int) -> Any:
    return Shapes.gated_delta_net_state_shape(
        tp_size, num_k_heads=4, num_v_heads=8, head_k_dim=16, head_v_dim=32, conv_kernel_size=4
    )


KINDS: dict[str, tuple[Backend, Callable[[int], Any], int | None, list[tuple[str, int]]]] = {
    "Mamba 2": (Backend.MAMBA2, lambda tp: mamba2(tp, 4), 4, [("x", 8), ("B", 4), ("C", 4), ("heads", 8)]),
    "Mamba 2 of one group": (Backend.MAMBA2, lambda tp: mamba2(tp, 1), 1, [("x", 8), ("B", 1), ("C", 1), ("heads", 8)]),
    "gated delta net": (
        Backend.GDN_ATTN,
        gated_delta_net,
        None,
        [("query", 4), ("key", 4), ("value", 8), ("heads", 8)],
    ),
    "Mamba 1": (Backend.MAMBA1, lambda tp: Shapes.mamba1_state_shape(tp, 64, 16, 4), None, [("x", 64), ("heads", 64)]),
    "short convolution": (Backend.SHORT_CONV, lambda tp: Shapes.short_conv_state_shape(tp, 64, 4), None, [("x", 64)]),
    "linear attention": (
        Backend.LINEAR,
        lambda tp: Shapes.linear_attention_state_shape(8, tp, 16),
        None,
        [("heads", 8)],
    ),
}


def spec_of(kind: Backend, shapes: Any, **more: Any) -> MambaSpec:
    dtypes = (torch.float32, torch.bfloat16)[: len(shapes)]
    return MambaSpec(block_size=64, shapes=tuple(shapes), dtypes=dtypes, mamba_type=kind, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_units_of_all_ranks_are_the_models(kind: str, tp_size: int) -> None:
    backend, shapes, groups, expected = KINDS[kind]
    spec = spec_of(backend, shapes(tp_size))
    tensors = state_tensors(spec, tp_size, model_groups=groups)
    segments = [segment for tensor in tensors for segment in tensor.segments]
    assert [(segment.name, segment.model_units) for segment in segments] == expected
    assert all(segment.units == max(1, segment.model_units // tp_size) for segment in segments)
    caches = {"layers.0": slots_of(torch.zeros(3, 1, 1, 1 << 14, dtype=torch.int8), spec)}
    StateLayout.infer(caches, tensors)  # segments and shapes fit


@pytest.mark.parametrize(
    ("backend", "more"), [(Backend.MAMBA2, {}), (Backend.CUSTOM, {}), (Backend.CUSTOM, {"tp_replicated": True})]
)
def test_what_is_not_known_is_whole(backend: Backend, more: dict[str, Any]) -> None:
    tensors = state_tensors(spec_of(backend, mamba2(2, 1), **more), 2, model_groups=None)
    assert len(tensors) == 2
    assert [len(tensor.segments) for tensor in tensors] == ([1, 1] if more else [0, 0])


def test_tensors_of_a_slot_are_where_vllm_has_them() -> None:
    spec = spec_of(Backend.MAMBA1, ((3, 8), (8, 16)))
    cache = torch.zeros(2, 1, 1, 1000, dtype=torch.int8)
    conv, recurrent = slots_of(cache, spec)
    conv[1] = 1.0
    recurrent[1] = 1.0
    assert (conv.shape, recurrent.shape, conv.dtype, recurrent.dtype) == (
        (2, 3, 8),
        (2, 8, 16),
        torch.float32,
        torch.bfloat16,
    )
    assert not cache[0].any()
    used = 3 * 8 * 4 + 8 * 16 * 2
    assert bool(cache[1, 0, 0, :used].any())
    assert not cache[1, 0, 0, used:].any()


@pytest.mark.parametrize("shape", [(2, 1, 1, 100), (2, 8, 1, 1000), (2, 1000)])
def test_other_bytes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="state: "):
        slots_of(torch.zeros(shape, dtype=torch.int8), spec_of(Backend.MAMBA1, ((3, 8), (8, 16))))
