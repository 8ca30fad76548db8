"""The tensors of a layer's recurrent state in vLLM, and how tensor-parallel ranks divide them.

vLLM stores a slot as bytes: the last inputs of a convolution, the recurrent state, then padding. For vLLM's own kinds
of state, this module knows which bytes belong to which head, so engines with different tensor-parallel sizes can
exchange them. Slots of other kinds are transferred whole, between engines of the same tensor-parallel size.
"""

from __future__ import annotations

import math

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.kv_cache_interface import MambaSpec

from kvflow.checks import counted
from kvflow.core.cache.state import Segment, StateTensor
from kvflow.errors import LayoutError


def state_tensors(spec: MambaSpec, tp_size: int, *, model_groups: int | None) -> tuple[StateTensor, ...]:
    """Describe the tensors in a slot, in vLLM's order: how `tp_size` ranks divide each tensor.

    A slot is one request's state in one layer. `model_groups` is a layer's number of Mamba 2 head groups in the whole
    model, or None.
    """
    axis = 0 if is_conv_state_dim_first() else 1
    match spec.mamba_type, spec.shapes:
        case _, _ if spec.tp_replicated:
            return tuple(
                _sliced(f"state{nth}", 0, Segment(name="all", size=shape[0], units=1, model_units=1))
                for nth, shape in enumerate(spec.shapes)
            )
        case Backend.MAMBA2, (conv, (heads, head_size, size)) if model_groups is not None:
            x = _shared("x", heads, head_size, tp_size)
            b, c = (_grouped(name, (conv[axis] - x.size) // 2, size, model_groups) for name in "BC")
            return _sliced("conv", axis, x, b, c), _recurrent(heads, tp_size)
        case Backend.GDN_ATTN, (conv, (heads, head_size, size)):
            value = _shared("value", heads, head_size, tp_size)
            groups = (conv[axis] - value.size) // 2 // size
            query, key = (_shared(name, groups, size, tp_size) for name in ("query", "key"))
            return _sliced("conv", axis, query, key, value), _recurrent(heads, tp_size)
        case Backend.MAMBA1, (conv, (channels, _)):
            return _sliced("conv", axis, _shared("x", channels, 1, tp_size)), _recurrent(channels, tp_size)
        case Backend.SHORT_CONV, (conv,):
            return (_sliced("conv", axis, _shared("x", conv[axis], 1, tp_size)),)
        case Backend.LINEAR, ((heads, _, _),):
            return (_recurrent(heads, tp_size),)
    return tuple(StateTensor(name=f"state{nth}") for nth in range(len(spec.shapes)))


def slots_of(cache: torch.Tensor, spec: MambaSpec) -> tuple[torch.Tensor, ...]:
    """Return a view of `cache` for each state tensor of a layer; the first dimension of a view is the slot.

    LayoutError unless `cache`, vLLM's tensor of the layer, has the shape (slots, 1, 1, bytes of a slot).
    """
    if cache.dim() != 4 or cache.shape[1:3] != (1, 1):
        raise LayoutError(f"state: expected (B, 1, 1, C), got {tuple(cache.shape)}")
    slots = cache[:, 0, 0, :].view(torch.uint8)
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    if sum(sizes) > slots.shape[1]:
        raise LayoutError(f"state: a slot has {counted(slots.shape[1], 'byte')}, its tensors have {sizes}")
    parts = torch.split(slots[:, : sum(sizes)], sizes, dim=1)
    return tuple(
        part.view(dtype).view(len(part), *shape)
        for part, shape, dtype in zip(parts, spec.shapes, spec.dtypes, strict=True)
    )


def _sliced(name: str, axis: int, *segments: Segment) -> StateTensor:
    return StateTensor(name=name, axis=axis, segments=segments)


def _recurrent(heads: int, tp_size: int) -> StateTensor:
    return _sliced("recurrent", 0, _shared("heads", heads, 1, tp_size))


def _shared(name: str, units: int, size: int, tp_size: int) -> Segment:
    """Describe a range of a state tensor that `tp_size` ranks divide into equal parts.

    A rank has `units` units, for example heads, each of `size` entries.
    """
    return Segment(name=name, size=units * size, units=units, model_units=units * tp_size)


def _grouped(name: str, entries: int, size: int, model_groups: int) -> Segment:
    """Describe a range of a state tensor that ranks divide by Mamba 2 head groups.

    A rank has `entries` entries, `size` for each head group. If the model has a single head group, each rank has a
    copy.
    """
    return Segment(name=name, size=entries, units=entries // size, model_units=model_groups)
